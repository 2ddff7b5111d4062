"""A run that is stopped and resumed ends like one that was not, bit for bit.

What Lightning alone reproduces is established first: a checkpoint at an epoch's end, one in the middle of an epoch with
a loader that can go on there, with dropout if the random state is carried over.

Time budget: 60 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from autoprec import (
    Action,
    AutoPrecision,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    ClipConfig,
    GuardConfig,
    LossScaleConfig,
    ScriptedController,
)
from tests.small_fits import Outcome, Plain, StatefulLoader, assert_identical, fp16_plugin, loader, outcome, quiet, seed

pytestmark = [
    # a resumed run has no ModelCheckpoint
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    # what every run under manual optimization hears
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization:UserWarning"),
]

STOP, TOTAL = 37, 80

# moves often: decisions every few steps, fp16 from the start of its life on a scale that overflows and grows
RESTLESS = AutoPrecisionConfig(
    formats=("fp32", "fp16"),
    stable_cv=10.0,
    loss_scale=LossScaleConfig(init_scale=2.0**22, growth_interval=6),
    clip=ClipConfig(min_norms=4, window=8),
    guard=GuardConfig(hold=7),
)


class Net(Plain):
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

    def fit(self, steps: int, folder: Path, resume: Path | None = None, save_at: int = 0) -> Result:
        seed(5)
        module, callback = self.module(), self.callback()
        callbacks: list[Callback] = [CarriesRandomState()] if self.is_random_state_carried else []
        callbacks += [callback] if callback is not None else []
        callbacks += [make() for make in self.others]
        options: dict[str, Any] = dict(self.options or {})
        if save_at:
            callbacks.append(ModelCheckpoint(folder, every_n_train_steps=save_at, save_top_k=-1, filename="{step}"))
            options["enable_checkpointing"] = True
        if self.plugin is not None:
            options["plugins"] = [self.plugin()]
        trainer = quiet(max_steps=steps, max_epochs=-1, callbacks=callbacks, **options)
        trainer.fit(module, self.data(), ckpt_path=resume, weights_only=True if resume else None)
        return Result(outcome(trainer, module), callback, trainer)


@dataclass
class Result:
    outcome: Outcome
    callback: AutoPrecisionCallback | None
    trainer: Trainer


def assert_resumes(setup: Setup, folder: Path, stop: int = STOP, total: int = TOTAL) -> tuple[Result, Result]:
    """Runs through, runs to ``stop``, resumes from the file in new objects, and compares."""
    through = setup.fit(total, folder)
    setup.fit(stop, folder, save_at=stop)
    resumed = setup.fit(total, folder, resume=folder / f"step={stop}.ckpt")
    through.outcome.losses = through.outcome.losses[-len(resumed.outcome.losses) :]
    if not setup.is_random_state_carried:
        through.outcome.random_states = resumed.outcome.random_states = None
    assert_identical(through.outcome, resumed.outcome)
    if through.callback is not None and resumed.callback is not None:
        assert_same_state(through.callback, resumed.callback)
    return through, resumed


def assert_same_state(left: AutoPrecisionCallback, right: AutoPrecisionCallback) -> None:
    assert left.precision_map() == right.precision_map()
    assert left.loss_scale == right.loss_scale
    assert left.clip_threshold == right.clip_threshold
    assert left.applied_steps == right.applied_steps
    assert left.skipped_steps == right.skipped_steps
    assert list(left.history) == list(right.history)


def plain_loader(callback: Callable[[], AutoPrecisionCallback | None]) -> Setup:
    """A torch loader draws a seed per epoch, one more in a resumed run."""
    return Setup(callback, data=lambda: loader(80), is_random_state_carried=False)


def rule() -> AutoPrecisionCallback:
    return AutoPrecisionCallback("rule", interval=5, config=RESTLESS, verbose=False)


# what Lightning reproduces by itself


@pytest.mark.parametrize("stop", [30, STOP])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_lightning_alone_resumes_exactly(dropout: float, stop: int, tmp_path: Path) -> None:
    assert_resumes(Setup(lambda: None, lambda: Net(dropout)), tmp_path, stop)


def test_lightning_alone_resumes_a_plain_loader_at_an_epoch_end(tmp_path: Path) -> None:
    assert_resumes(plain_loader(lambda: None), tmp_path, stop=40)


# the rule, fp16 units


def spiked() -> StatefulLoader:
    return StatefulLoader(spikes=[20, 35, 55])


@pytest.mark.parametrize("stop", [1, 11, 12, 13, 21, 35, 36, STOP, 40, 56])
def test_rule_with_fp16_units(stop: int, tmp_path: Path) -> None:
    through, _ = assert_resumes(Setup(rule, data=spiked), tmp_path, stop)
    callback = through.callback
    assert callback is not None
    moves = [d for d in callback.history if d.knob == "precision" and d.outcome == "applied"]
    assert {d.applied for d in moves if d.step <= STOP} == {"fp16", "fp32"}, "too little happens before the stop"
    assert {d.applied for d in moves if d.step > STOP} == {"fp16", "fp32"}, "too little happens after the stop"
    assert callback.skipped_steps > 0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rule_with_validation_and_accumulation(accumulate: int, tmp_path: Path) -> None:
    """Windows of three end on other steps than epochs of ten batches do."""
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    config = AutoPrecisionConfig(formats=("fp32", "bf16", "fp16"), stable_cv=10.0)
    setup = Setup(lambda: AutoPrecisionCallback(interval=4, config=config, verbose=False), options=options)
    through, _ = assert_resumes(setup, tmp_path)
    assert through.callback is not None
    assert "fp16" in through.callback.precision_map().values()


# scripts


def scripted() -> AutoPrecisionCallback:
    steps = {
        0: Action(precision={"net.0": "bf16"}),
        12: Action(precision={"net.4": "fp16"}, loss_scale=512.0),
        36: Action(precision={"net.5": "fp16", "net.1": "bf16"}, clip=0.7),
        37: Action(precision={"net.5": "bf16"}, loss_scale=64.0),
        38: Action(precision={"net.4": "int8"}, clip=2.0),
        60: Action(precision={"*": "fp32"}, loss_scale=2.0**20),
    }
    return AutoPrecisionCallback(ScriptedController(steps, epochs={4: Action(clip=9.0)}), verbose=False)


@pytest.mark.parametrize("stop", [12, 13, 36, STOP, 38, 40, 60])
def test_script(stop: int, tmp_path: Path) -> None:
    assert_resumes(Setup(scripted), tmp_path, stop)


@pytest.mark.parametrize("make", [rule, scripted])
def test_plain_loader_at_an_epoch_end(make: Callable[[], AutoPrecisionCallback], tmp_path: Path) -> None:
    assert_resumes(plain_loader(make), tmp_path, stop=40)


class Asks(Callback):
    """Asks for a change at the end of a batch, after which the checkpoint is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self.step:
            watcher = next(c for c in trainer.callbacks if isinstance(c, AutoPrecisionCallback))
            watcher.request(Action(precision={"net.4": "int8"}, clip=0.25))


def test_request_that_waits_for_the_boundary(tmp_path: Path) -> None:
    through, _ = assert_resumes(Setup(scripted, others=[lambda: Asks(STOP)]), tmp_path)
    assert through.callback is not None
    assert any(d.outcome == "deferred" for d in through.callback.history)


# other ways in


def test_dropout(tmp_path: Path) -> None:
    assert_resumes(Setup(scripted, lambda: Net(0.4)), tmp_path)


@pytest.mark.parametrize("policy", ["fixed:fp16", "fixed:bf16", "fixed:int8"])
def test_fixed_format(policy: str, tmp_path: Path) -> None:
    assert_resumes(Setup(lambda: AutoPrecisionCallback(policy, verbose=False), data=spiked), tmp_path)


def test_saved_map(tmp_path: Path) -> None:
    first = Setup(scripted).fit(50, tmp_path)
    assert first.callback is not None
    path = tmp_path / "maps" / "last.yaml"
    first.callback.save_map(path)
    through, _ = assert_resumes(Setup(lambda: AutoPrecisionCallback(path, verbose=False)), tmp_path / "checkpoints")
    assert through.callback is not None
    assert through.callback.precision_map() == first.callback.precision_map()


@pytest.mark.parametrize("knobs", [(), ("loss_scale",), ("clip",), ("precision", "loss_scale", "clip")])
def test_on_top_of_a_grad_scaler(knobs: tuple[str, ...], tmp_path: Path) -> None:
    setup = Setup(
        lambda: AutoPrecisionCallback(knobs=knobs, interval=5, config=RESTLESS, verbose=False),
        data=spiked,
        plugin=lambda: fp16_plugin(2.0**20, growth_interval=5),
    )
    assert_resumes(setup, tmp_path)


@pytest.mark.parametrize("formats", [{"*": "fp16"}, {"net.0": "bf16", "net.1": "bf16"}])
def test_plugin_alone(formats: Mapping[str, str], tmp_path: Path) -> None:
    setup = Setup(lambda: None, data=spiked, plugin=lambda: AutoPrecision(formats, config=RESTLESS))
    assert_resumes(setup, tmp_path)


def test_strategy(tmp_path: Path) -> None:
    assert_resumes(Setup(rule, data=spiked, options={"strategy": "autoprec"}), tmp_path)


class TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        halves = list(self.net[:3].parameters()), list(self.net[3:].parameters())
        return [torch.optim.Adam(half, lr=1e-2) for half in halves], []


def test_two_optimizers(tmp_path: Path) -> None:
    assert_resumes(Setup(rule, TwoOptimizers, spiked), tmp_path, stop=38)


# how the file comes about


def finish(setup: Setup, folder: Path, write: Callable[[Result, Path], None]) -> None:
    """Like ``assert_resumes``, for a file that ``write`` makes after the first part ended."""
    through = setup.fit(60, folder)
    write(setup.fit(40, folder), folder / "late.ckpt")
    resumed = setup.fit(60, folder, resume=folder / "late.ckpt")
    through.outcome.losses = through.outcome.losses[-len(resumed.outcome.losses) :]
    assert_identical(through.outcome, resumed.outcome)
    assert through.callback is not None
    assert resumed.callback is not None
    assert_same_state(through.callback, resumed.callback)


@pytest.mark.parametrize("make", [rule, scripted])
def test_file_written_after_fit(make: Callable[[], AutoPrecisionCallback], tmp_path: Path) -> None:
    finish(Setup(make, data=spiked), tmp_path, lambda first, path: first.trainer.save_checkpoint(path))
