"""Runs a module twice, once with private steps and once with somebody looking on, and counts what really ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import AdamW

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, runners, weight_copies
from autoprec.fused import FusedStep
from autoprec.stepping import Stepping
from tests.small_fits import MakeOptimizer, Outcome, Plain, clone, differences, loader, outcome, quiet, seed

Make = Callable[[], LightningModule]

every_format = pytest.mark.parametrize("policy", ["fixed:bf16", "fixed:int8"])
adamw: MakeOptimizer = partial(AdamW, lr=0.01)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


class Changing(Plain):
    """``change`` is called with the module and the number of the step before each forward."""

    def __init__(self, optimizer: MakeOptimizer, change: Callable[[Any, int], object] | None = None) -> None:
        super().__init__(optimizer)
        self.change = change
        self.steps = 0

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        if self.change is not None:
            self.change(self, self.steps)
        self.steps += 1
        return super().training_step(batch, batch_idx)


class Net(Changing):
    """``net`` on batches."""

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: MakeOptimizer = adamw,
        change: Callable[[Any, int], None] | None = None,
    ) -> None:
        super().__init__(optimizer, change)
        if net is not None:
            self.net: Any = net


def convolutions() -> Any:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 6, 2, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


class Onlooker(Callback):
    """Harmless, but it could look at gradients."""

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts calls of layers on copies, steps that kernels took, and steps whose gradients were private."""
    counts: Counter[str] = Counter()
    run_on_copies, run_on_int8_copy = runners.run_on_copies, runners.run_on_int8_copy
    take, private = FusedStep._take, Stepping._private

    def counting_run(*args: Any) -> Tensor:
        counts["on copies"] += 1
        return run_on_copies(*args)

    def counting_run_int8(*args: Any) -> Tensor:
        counts["on copies"] += 1
        counts["on int8 copies"] += 1
        return run_on_int8_copy(*args)

    def counting_take(self: FusedStep, *args: Any) -> bool:
        is_taken = take(self, *args)
        counts["groups by kernel"] += is_taken
        return is_taken

    def counting_private(self: Stepping, *args: Any) -> Any:
        gradients = private(self, *args)
        counts["private"] += gradients is not None
        counts["private in low precision"] += gradients is not None and any(
            grad.dtype is torch.bfloat16 for grad in gradients.grads()
        )
        return gradients

    with (
        mock.patch.object(weight_copies, "run_on_copies", counting_run),
        mock.patch.object(weight_copies, "run_on_int8_copy", counting_run_int8),
        mock.patch.object(FusedStep, "_take", counting_take),
        mock.patch.object(Stepping, "_private", counting_private),
    ):
        yield counts


@dataclass
class Run:
    """A fit and what it left behind."""

    trainer: Trainer
    module: LightningModule
    callback: AutoPrecisionCallback
    counts: Counter[str]
    left: Outcome
    record: Any
    telemetry: Any


def run(
    module: LightningModule,
    *,
    policy: Any = "fixed:bf16",
    looks_on: bool = False,
    config: AutoPrecisionConfig | None = None,
    callbacks: Sequence[Callback] = (),
    data: Any = None,
    validates: bool = False,
    fit: Mapping[str, Any] | None = None,
    ap: Mapping[str, Any] | None = None,
    **trainer_options: Any,
) -> Run:
    """Fits a module; ``looks_on`` adds somebody who might look at gradients."""
    callback = AutoPrecisionCallback(policy=policy, config=config, verbose=False, **(ap or {}))
    extra = [Onlooker()] if looks_on else []
    options = {"max_epochs": 2, **trainer_options}
    trainer = quiet(callbacks=[callback, *callbacks, *extra], **options)
    with counted() as counts:
        trainer.fit(module, loader() if data is None else data, loader(16) if validates else None, **(fit or {}))
    assert callback.steering is not None
    return Run(
        trainer,
        module,
        callback,
        counts,
        outcome(trainer, module),
        [asdict(decision) for decision in callback.history],
        clone(callback.steering.telemetry.state_dict()),
    )


def assert_same_runs(left: Run, right: Run) -> None:
    """Bit for bit: weights, buffers, moments, schedules, losses, record, telemetry, and gradients after the fit."""
    found = differences(vars(left.left), vars(right.left))
    found += differences(left.record, right.record, "record") + differences(
        left.telemetry, right.telemetry, "telemetry"
    )
    found += differences(gradients_of(left.module), gradients_of(right.module), "gradients")
    assert not found, f"not bit-identical: {found[:10]}"


def gradients_of(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_private_is_the_same(make: Make, *, runs_on_copies: bool | None = True, **options: Any) -> tuple[Run, Run]:
    """Trains with private steps and with somebody looking on; the runs must be the same bit for bit.

    Args:
        make: Makes the module, the same each time.
        runs_on_copies: Whether layers are to run on copies in the first run, ``None`` where that is not the question.
        options: For :func:`run`. Callables under ``callbacks``, ``data`` and ``policy`` are called for each run.
    """
    runs = []
    for looks_on in (False, True):
        seed()
        made = {
            name: value() if name in ("callbacks", "data", "policy") and callable(value) else value
            for name, value in options.items()
        }
        runs.append(run(make(), looks_on=looks_on, **made))
    private, seen = runs
    assert private.counts["private"] > 0, "no step was private"
    assert runs_on_copies in (None, private.counts["on copies"] > 0), f"{private.counts}"
    assert seen.counts["private"] == seen.counts["on copies"] == 0
    assert_same_runs(private, seen)
    return private, seen
