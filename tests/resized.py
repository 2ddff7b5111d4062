"""Runs whose batch size or accumulation changes on the way, for tests of what follows from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig
from autoprec.run_length import EpochPlan, RunLength
from tests.support import Loss, Task, cpu, scripted, squares

Schedule = Callable[[Optimizer], Any]


@dataclass
class Change:
    """Another batch size or accumulation, from a batch of an epoch on (a batch size from an epoch on)."""

    epoch: int = 1
    batch: int = 0
    bs: int | None = None
    accumulate: int | None = None


class Changes(Callback):
    """Carries changes out and tells schedules and learning rate, once they are in effect."""

    def __init__(self, ap: AutoPrecisionCallback, changes: Sequence[Change], is_told: bool = True) -> None:
        self.ap = ap
        self.changes = changes
        self.is_told = is_told
        self.before: EpochPlan | None = None

    def _tell(self, trainer: Trainer, before: EpochPlan) -> None:
        steering = self.ap.steering
        assert steering is not None
        if self.is_told:
            length = RunLength.of(trainer, before)
            assert steering.schedules.why_not_stretched(length) is None
            steering.schedules.stretch(length)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        for change in self.changes:
            if change.bs is not None and change.epoch == trainer.current_epoch + 1:
                self.before = EpochPlan.of(trainer)
                pl_module.bs = change.bs
                trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.before is not None:
            self._tell(trainer, self.before)
            self.before = None
        self._accumulate(trainer, 0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self._accumulate(trainer, batch_idx)

    def _accumulate(self, trainer: Trainer, batch_idx: int) -> None:
        for change in self.changes:
            if change.accumulate is not None and (change.epoch, change.batch) == (trainer.current_epoch, batch_idx):
                before = EpochPlan.of(trainer)
                trainer.accumulate_grad_batches = change.accumulate
                self._tell(trainer, before)


class Record(Callback):
    """Learning rate and position of the schedule by the number of samples that were seen."""

    def __init__(self) -> None:
        self.samples = 0
        self.rates: dict[int, float] = {}
        self.positions: dict[int, int] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples += len(batch)
        self.rates[self.samples] = float(trainer.optimizers[0].param_groups[0]["lr"])
        if trainer.lr_scheduler_configs:
            schedule: Any = trainer.lr_scheduler_configs[0].scheduler
            parts = getattr(schedule, "_schedulers", ()) if isinstance(schedule, ChainedScheduler) else ()
            self.positions[self.samples] = (parts[-1] if parts else schedule).last_epoch

    @property
    def last(self) -> float:
        return self.rates[self.samples]


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


@dataclass
class Run:
    """One kind of run. The rows are ones, so that nothing depends on how they are put into batches but the steps."""

    schedule: Schedule | None = None
    rows: int = 64
    bs: int = 8
    epochs: int = 2
    accumulate: int = 1
    frequency: int = 1
    interval: str = "step"
    loss: Loss = squares
    task: type[Task] = Task
    optimizer: Callable[[Any], Optimizer] = momentum
    config: AutoPrecisionConfig = field(default_factory=AutoPrecisionConfig)
    knobs: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    is_told: bool = True

    def module(self) -> Task:
        torch.manual_seed(0)

        def entry(optimizer: Optimizer) -> dict[str, Any]:
            assert self.schedule is not None
            schedule = self.schedule(optimizer)
            return {"scheduler": schedule, "interval": self.interval, "frequency": self.frequency}

        return self.task(
            nn.Linear(4, 1),
            torch.ones(self.rows, 4),
            self.bs,
            loss=self.loss,
            optimizer=self.optimizer,
            schedule=None if self.schedule is None else entry,
        )

    def fit(
        self, *changes: Change, others: Sequence[Callback] = (), **fit: Any
    ) -> tuple[Record, AutoPrecisionCallback]:
        record, ap = Record(), scripted(config=self.config, knobs=self.knobs, verbose=False)
        trainer = cpu(
            **{
                "max_epochs": self.epochs,
                "accumulate_grad_batches": self.accumulate,
                "callbacks": [Changes(ap, changes, self.is_told), ap, record, *others],
                **self.options,
            }
        )
        trainer.fit(self.module(), **fit)
        return record, ap


def calls(batches: int, accumulate: int = 1, frequency: int = 1) -> int:
    """Calls of a schedule in an epoch, counted as Lightning's loop does."""
    steps = [b for b in range(1, batches + 1) if b % accumulate == 0 or b == batches]
    return sum(b % frequency == 0 for b in steps)


def assert_follows(changed: Record, plain: Record) -> int:
    """The same rates wherever both runs have seen the same samples, and at the end; returns at how many places."""
    common = sorted(set(changed.rates) & set(plain.rates))
    wrong = {n: (changed.rates[n], plain.rates[n]) for n in common if changed.rates[n] != plain.rates[n]}
    assert not wrong, f"rates differ after so many samples: {wrong}"
    assert changed.samples == plain.samples == common[-1]
    return len(common)


def assert_even(changed: Record, since: int, until: int) -> None:
    """From a number of samples on, the schedule is never more than a call away from where the share of calls is."""
    late = [n for n in changed.positions if n > since]
    start, end = changed.positions[since], changed.positions[until]
    for count, n in enumerate(late, 1):
        target = start + Fraction((end - start) * count, len(late))
        assert target - 1 < changed.positions[n] <= target
