"""Runs whose batch sizes change, and what a user would see of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autoprec import Action, AutoPrecisionCallback, Decision
from tests.support import Task, cpu, rows, scripted


def numbers(count: int) -> Any:
    """Rows that say which one they are."""
    return torch.arange(float(count)).reshape(-1, 1) * torch.ones(1, 4)


def first(batch: Any) -> Any:
    """The batch, or that of the first of several loaders."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return batch


class Numbers(Task):
    """One Linear layer on numbered rows, which come in the order of ``shuffle``."""

    def __init__(self, n: int = 64, bs: int = 8, **options: Any) -> None:
        super().__init__(nn.Linear(4, 1), numbers(n), bs, loss=lambda net, batch, index: net(first(batch)).mean())
        self.options = options
        self.calls = 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        return DataLoader(self.data, self.bs, **self.options)


class Sees(Callback):
    """Notes what a user would see of an epoch."""

    def __init__(self, ap: AutoPrecisionCallback | None = None) -> None:
        self.ap = ap
        self.sizes: list[list[int]] = []
        self.rows: list[list[int]] = []
        self.batches: list[float] = []
        self.knob: list[set[Any]] = []
        self.every: list[int] = []
        self.validations: list[int] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        for notes in (self.sizes, self.rows):
            notes.append([])
        self.knob.append(set())
        self.batches.append(trainer.num_training_batches)
        self.every.append(trainer.reload_dataloaders_every_n_epochs)

    def on_train_batch_start(self, trainer: Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.sizes:
            self.on_train_epoch_start(trainer, pl_module)
        self.sizes[-1].append(len(first(batch)))
        self.rows[-1] += [int(row[0]) for row in first(batch)]
        if self.ap is not None:
            self.knob[-1].add(self.ap.batch_size)

    def on_validation_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self.validations.append(trainer.fit_loop.epoch_loop.total_batch_idx + 1)


def sizes_of(*epochs: int) -> dict[int, Action]:
    """A script: the size of each epoch, 0 for no request."""
    return {epoch: Action(batch_size=size) for epoch, size in enumerate(epochs) if size}


def fit(
    module: pl.LightningModule,
    script: Mapping[int, Action] | AutoPrecisionCallback,
    data: Any = None,
    others: tuple[Callback, ...] = (),
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[AutoPrecisionCallback, Sees, Any]:
    ap = script if isinstance(script, AutoPrecisionCallback) else scripted(epochs=script)
    sees = Sees(ap)
    trainer = cpu(**{"max_epochs": 3, "callbacks": [ap, sees, *others], "num_sanity_val_steps": 0, **options})
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return ap, sees, trainer


def sizes(ap: AutoPrecisionCallback, *outcomes: str) -> list[Decision]:
    return [d for d in rows(ap.history, "batch_size") if not outcomes or d.outcome in outcomes]


class Data(pl.LightningDataModule):
    """Numbered rows from a data module."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.calls = 0

    def train_dataloader(self) -> Any:
        self.calls += 1
        return DataLoader(numbers(64), 8, **self.options)


class Validated(Numbers):
    """The same with a validation set, which notes after how many training batches it is used."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(self.net, batch, batch_idx))

    def val_dataloader(self) -> Any:
        return DataLoader(numbers(8), 8)
