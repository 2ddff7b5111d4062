"""Runs that are stopped, saved and resumed in new objects, to be compared with runs that were not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from autoprec import AutoPrecisionCallback
from tests.small_fits import Full, Outcome, Plain, StatefulLoader, assert_identical, loader, outcome, quiet, seed

STOP, TOTAL = 37, 80


class Net(Full):
    """Three units, running statistics, AdamW and a schedule per step."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Linear(16, 2)
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=TOTAL)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class CarriesRandomState(Callback):
    """Lightning leaves the random state to the user."""

    def on_save_checkpoint(self, trainer: Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, trainer: Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.state = checkpoint["random"]

    def on_train_start(self, trainer: Trainer, module: pl.LightningModule) -> None:
        if hasattr(self, "state"):
            torch.set_rng_state(self.state)


@dataclass
class Setup:
    """How one kind of run is made; each call makes everything anew, as another process would."""

    callback: Callable[[], AutoPrecisionCallback | None]
    module: Callable[[], Plain] = Net
    data: Callable[[], Any] = StatefulLoader
    options: Mapping[str, Any] | None = None
    plugin: Callable[[], Any] | None = None
    is_random_state_carried: bool = True
    others: Sequence[Callable[[], Callback]] = ()
    checkpoint: Mapping[str, Any] | None = None

    def fit(self, steps: int, folder: Path, resume: Path | None = None, save_at: int = 0) -> Result:
        seed(5)
        module, callback = self.module(), self.callback()
        callbacks: list[Callback] = [CarriesRandomState()] if self.is_random_state_carried else []
        callbacks += [callback] if callback is not None else []
        callbacks += [make() for make in self.others]
        options: dict[str, Any] = {"num_sanity_val_steps": 0, **(self.options or {})}
        if save_at:
            when = self.checkpoint or {"every_n_train_steps": save_at}
            callbacks.append(ModelCheckpoint(folder, save_top_k=-1, filename="{step}", **when))
            options["enable_checkpointing"] = True
        if self.plugin is not None:
            options["plugins"] = [self.plugin()]
        trainer = quiet(max_steps=steps, max_epochs=-1, callbacks=callbacks, **options)
        trainer.fit(module, self.data(), loader(16), ckpt_path=resume, weights_only=True if resume else None)
        return Result(outcome(trainer, module), callback, trainer)


@dataclass
class Result:
    outcome: Outcome
    callback: AutoPrecisionCallback | None
    trainer: Trainer


def assert_resumes(setup: Setup, folder: Path, stop: int = STOP) -> Result:
    """Runs through, runs to ``stop``, resumes from the file in new objects, and compares."""
    through = setup.fit(TOTAL, folder)
    setup.fit(stop, folder, save_at=stop)
    resumed = setup.fit(TOTAL, folder, resume=folder / f"step={stop}.ckpt")
    assert_same_end(through, resumed, setup.is_random_state_carried)
    return through


def assert_same_end(through: Result, resumed: Result, compares_random_state: bool = True) -> None:
    left, right = replace(through.outcome), replace(resumed.outcome)
    left.losses = left.losses[-len(right.losses) :]
    if not compares_random_state:
        left.random_states = right.random_states = None
    assert_identical(left, right)
    if through.callback is not None:
        assert resumed.callback is not None
        assert_same_state(through.callback, resumed.callback)


def assert_same_state(left: AutoPrecisionCallback, right: AutoPrecisionCallback) -> None:
    assert left.precision_map() == right.precision_map()
    assert left.loss_scale == right.loss_scale
    assert left.clip_threshold == right.clip_threshold
    assert noise_pairs(left) == noise_pairs(right)
    assert left.applied_steps == right.applied_steps
    assert left.skipped_steps == right.skipped_steps
    assert list(left.history) == list(right.history)


def noise_pairs(callback: AutoPrecisionCallback) -> dict[str, Any]:
    """What the gradient-noise scale rests on."""
    assert callback.steering is not None
    return callback.steering.telemetry.noise.scale.state_dict()
