"""The guard's last level: going back to a copy of the run.

Time budget: 60 s.
"""

from __future__ import annotations

import gc
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn

from autoprec import (
    Action,
    AutoPrecision,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    DivergedTrainingError,
    NonFiniteTrainingError,
    RollbackConfig,
    ScriptedController,
)
from autoprec.config import GuardConfig
from autoprec.rollback import Rollback
from autoprec.summary import summarize
from tests.small_fits import Full, assert_identical, clone, differences, outcome, quiet, seed
from tests.small_fits import loader as small_loader
from tests.support import Manual, Task, Watch, assert_finite, cpu, loader, rows, squares

NAN = float("nan")


def config(guard: Mapping[str, Any] | None = None, **kwargs: Any) -> AutoPrecisionConfig:
    settings = {"every": 10, "patience": 10, "quarantine": 20, **kwargs}
    return AutoPrecisionConfig(
        rollback=RollbackConfig(**settings), guard=GuardConfig(**{"max_consecutive_skips": 4, **(guard or {})})
    )


def callback(policy: Any = None, knobs: Any = ("precision", "loss_scale"), **kwargs: Any) -> AutoPrecisionCallback:
    return AutoPrecisionCallback(policy=policy or ScriptedController(), knobs=knobs, config=config(**kwargs))


def data(count: int, width: int = 8) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


class Writes(Callback):
    """Something of the user's that writes into the run after the steps named."""

    def __init__(self, write: Callable[[LightningModule, Any], None], *windows: int) -> None:
        self.write = write
        self.windows = set(windows)
        self.seen = -1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.seen += 1
        if self.seen in self.windows:
            with torch.no_grad():
                self.write(pl_module, trainer.optimizers[0])


class States(Callback):
    """Weights, buffers and optimizers at the start of each batch."""

    def __init__(self) -> None:
        self.at: list[Any] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        buffers = dict(pl_module.named_buffers())
        weights = dict(pl_module.named_parameters())
        schedules = [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]
        self.at.append(clone([weights, buffers, [each.state_dict() for each in trainer.optimizers], schedules]))


def poison_weight(module: LightningModule, optimizer: Any) -> None:
    next(module.parameters()).data[0] = NAN  # without a trace


def poison_moment(module: LightningModule, optimizer: Any) -> None:
    optimizer.state[next(module.parameters())]["exp_avg_sq"].fill_(math.inf)


def poison_buffer(module: LightningModule, optimizer: Any) -> None:
    module.get_buffer("net.1.running_var").fill_(math.inf)


def blow_up(module: LightningModule, optimizer: Any) -> None:
    """Finite, but its outputs are not: steps are skipped whatever the precision."""
    for parameter in module.parameters():
        parameter.mul_(1e30)


def enlarge(module: LightningModule, optimizer: Any) -> None:
    """The loss is far too high and everything finite."""
    list(module.parameters())[-2].mul_(1e3)


@contextmanager
def goes_back(match: str = "goes back to its copy") -> Iterator[None]:
    with pytest.warns(UserWarning, match=".") as found:  # all of them
        yield
    assert any(re.search(match, str(each.message)) for each in found)


def assert_counted(ap: AutoPrecisionCallback, windows: int) -> None:
    steering = ap.steering
    assert steering is not None
    assert steering.window == windows
    counted = ap.applied_steps + ap.skipped_steps + steering.user_skipped_steps + ap.undone_windows
    assert counted == windows


# ---- what makes the run go back ----

# what is written after window 25, when that is found, and what the copy of window 20 undoes
FAULTS: dict[str, tuple[Callable[..., None], int]] = {
    "weights": (poison_weight, 27),  # the step of window 26 is skipped
    "moments": (poison_moment, 30),  # found when a copy is due
    "buffers": (poison_buffer, 30),
    "levels 1 and 2": (blow_up, 30),  # four skipped steps
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("knobs", [("precision", "loss_scale"), ()], ids=["steered", "guard alone"])
def test_the_run_goes_back_to_its_last_good_copy(name: str, knobs: Any) -> None:
    write, found_at = FAULTS[name]
    module = Task(net(), data(60 * 8), optimizer=adam)
    ap, states = callback(knobs=knobs), States()
    trainer = cpu(callbacks=[ap, states, Writes(write, 25)])
    with goes_back():
        trainer.fit(module)
    (row,) = rows(ap.history, "rollback")
    assert (row.step, row.applied, row.outcome) == (found_at, 20, "applied")
    assert not differences(states.at[20], states.at[found_at])
    assert row.before == 20 + ap.undone_windows
    assert trainer.global_step == 60  # attempted steps, as Lightning counts them
    assert_counted(ap, 60)
    assert ap.applied_steps == 60 - ap.undone_windows - ap.skipped_steps
    assert_finite(module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", "bf16-true"])
def test_in_any_precision(precision: Any) -> None:
    class AsBase(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch.to(next(self.parameters()).dtype), batch_idx).float()

    module, ap = AsBase(net(), data(40 * 8), optimizer=adam), callback()
    with goes_back():
        cpu(callbacks=[ap, Writes(poison_weight, 25)], precision=precision).fit(module)
    assert len(rows(ap.history, "rollback")) == 1
    assert_counted(ap, 40)
    assert_finite(module)


def test_a_loss_that_stays_too_high_makes_the_run_go_back() -> None:
    module, ap = Task(net(), data(200 * 8), optimizer=adam), callback(every=20)
    states = States()
    with goes_back("the loss was above"):
        cpu(callbacks=[ap, states, Writes(enlarge, 105)]).fit(module)
    (row,) = rows(ap.history, "rollback")
    assert row.applied == 100
    assert 116 <= row.step <= 116 + 16  # patience, and sixteen losses are read at once
    assert not differences(states.at[100], states.at[row.step])
    assert re.search(r"first offender: net\.\d \(its gradient grew most\)", row.reason)
    assert_counted(ap, 200)


@pytest.mark.parametrize("knobs", [(), ("precision",)])
def test_high_losses_are_left_alone_where_nothing_is_steered_or_asked_for(knobs: Any) -> None:
    module = Task(net(), data(150 * 8), optimizer=adam)
    ap = callback(knobs=knobs, **({"loss_spreads": math.inf} if knobs else {}))
    cpu(callbacks=[ap, Writes(enlarge, 80)]).fit(module)
    assert not rows(ap.history, "rollback")


def test_a_high_loss_is_not_copied() -> None:
    module, ap, kept = Task(net(), data(130 * 8), optimizer=adam), callback(patience=1000), []

    class Looks(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            copy = rollback_of(ap)._ring.newest
            kept.append(None if copy is None else copy.window)

    cpu(callbacks=[ap, Looks(), Writes(enlarge, 85)]).fit(module)
    assert kept[84] == 80
    assert kept[129] == 80


def test_weights_that_are_not_finite_at_the_very_end_are_put_back() -> None:
    module, ap = Task(net(), data(28 * 8), optimizer=adam), callback()
    with goes_back():
        cpu(callbacks=[ap, Writes(poison_weight, 27)]).fit(module)
    assert (ap.applied_steps, ap.undone_windows) == (20, 8)
    assert_finite(module)


def test_values_that_were_not_finite_when_training_began_are_the_users_own() -> None:
    module, ap = Task(net(), data(40 * 8), optimizer=adam), callback()
    module.register_parameter("floor", nn.Parameter(torch.full((2,), -math.inf), requires_grad=False))
    module.register_buffer("best", torch.tensor(NAN))
    cpu(callbacks=[ap]).fit(module)
    assert not rows(ap.history, "rollback")
    assert ap.applied_steps == 40


def test_masks_may_become_infinite() -> None:
    class Masks(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            pl_module.mask = torch.full((3, 3), -math.inf)

    module, ap = Task(net(), data(40 * 8), optimizer=adam), callback()
    module.register_buffer("mask", torch.zeros(3, 3))
    cpu(callbacks=[ap, Masks()]).fit(module)
    assert not rows(ap.history, "rollback")


# ---- what follows ----


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_everything_runs_in_fp32_for_the_quarantine(precision: Any) -> None:
    steps = {0: Action(precision={"*": "bf16"}), **{n: Action(precision={"*": "bf16"}) for n in (35, 60)}}
    module, ap = Task(net(), data(80 * 8), optimizer=adam), callback(ScriptedController(steps=steps))
    watch = Watch(ap)
    with goes_back("stays in fp32 for 20 applied steps"):
        cpu(callbacks=[ap, watch, Writes(poison_weight, 25)], precision=precision).fit(module)
    formats = [each["net.0"] for each in watch.maps]
    assert formats[25] == "bf16"
    assert formats[27:60] == ["fp32"] * 33
    assert formats[60:] == ["bf16"] * 20
    (refused, _) = rows(ap.history, "precision", "refused")
    assert (refused.step, refused.reason) == (35, "the guard holds the unit in fp32 until 40 steps were applied")


def test_the_loss_scale_stays_where_it_is() -> None:
    steps = {0: Action(precision={"*": "fp16"}, loss_scale=1024.0), 22: Action(loss_scale=64.0)}
    module, ap = Task(net(), data(40 * 8), optimizer=adam), callback(ScriptedController(steps=steps))
    with goes_back():
        cpu(callbacks=[ap, Writes(poison_weight, 25)]).fit(module)
    assert rows(ap.history, "rollback")[0].applied == 20
    assert ap.loss_scale == 64.0


SCHEDULES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "linear": lambda o: {"scheduler": torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 50), "interval": "step"},
    "cycle": lambda o: {"scheduler": torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, 60), "interval": "step"},
    "every third": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        "interval": "step",
        "frequency": 3,
    },
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_count_the_steps_that_are_left(name: str) -> None:
    def rates(*others: Callback, **kwargs: Any) -> list[float]:
        module, watch = Task(net(), data(56 * 8), optimizer=adam, schedule=SCHEDULES[name]), Watch()
        cpu(callbacks=[*others, watch], **kwargs).fit(module)
        return watch.rates

    plain, ap = rates(), callback()
    with goes_back():
        found = rates(ap, Writes(poison_weight, 25))
    applied = 56 - ap.undone_windows - ap.skipped_steps
    assert ap.applied_steps == applied
    if name == "every third":  # Lightning calls it by the batch; windows 26 to 28 have none of the copy's phase
        assert found[-1] >= plain[applied - 1]
    else:
        assert found[27:] == plain[20:49]


def test_schedules_of_epochs_and_their_rates_stay() -> None:
    def by_epoch(optimizer: Any) -> dict[str, Any]:
        return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1), "interval": "epoch"}

    module = Task(net(), data(12 * 8), optimizer=adam, schedule=by_epoch)
    ap, watch = callback(), Watch()
    with goes_back():
        cpu(callbacks=[ap, watch, Writes(poison_weight, 25)], max_epochs=3).fit(module)
    assert rows(ap.history, "rollback")[0].applied == 20
    assert watch.rates[20] == pytest.approx(1e-4)
    assert watch.rates[-2] == pytest.approx(1e-5)


def test_the_clip_threshold_goes_by_the_norms_before() -> None:
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback(knobs=("clip",))
    with goes_back():
        cpu(callbacks=[ap, Writes(enlarge, 22), Writes(poison_weight, 25)]).fit(module)
    assert ap.steering is not None
    assert max(ap.steering.telemetry.norms) < 100


def test_the_learning_rate_is_lowered_once_for_each_rollback_and_that_is_on_record() -> None:
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback(learning_rate_factor=0.5)
    with goes_back("multiplied by 0.5"):
        cpu(callbacks=[ap, Writes(poison_weight, 25, 45)]).fit(module)
    assert [(row.before, row.applied) for row in rows(ap.history, "learning_rate")] == [(1.0, 0.5), (0.5, 0.25)]
    assert ap.steering is not None
    assert ap.steering.learning_rate.factor == 0.25


def test_decisions_go_on_at_their_interval() -> None:
    class Counts(ScriptedController):
        calls = 0

        def decide(self, observation: Any) -> Any:
            self.calls += 1
            return None

    policy = Counts()
    ap = AutoPrecisionCallback(policy=policy, interval=5, knobs=("precision",), config=config(every=30))
    with goes_back():
        cpu(callbacks=[ap, Writes(poison_weight, 50)]).fit(Task(net(), data(100 * 8), optimizer=adam))
    assert rows(ap.history, "rollback")[0].applied == 30
    assert policy.calls >= 15  # not silent until fifty steps are applied once more


# ---- when it is not the weights ----

LEVELS: dict[str, Callable[[int], float]] = {
    "another unit": lambda window: 1.0 if window < 120 else 1000.0,
    "sign": lambda window: -1.0 if window < 120 else 3.0,
    "five levels": lambda window: 10.0 ** (window // 85),
    "two tasks in turn": lambda window: 0.01 if window // 100 % 2 else 50.0,
    "rewards at last": lambda window: 0.0 if window < 120 else 1.0,
}


@pytest.mark.filterwarnings("ignore:autoprec:UserWarning")
@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("name", LEVELS)
def test_a_loss_that_moves_does_not_end_a_healthy_run(name: str, keep: int) -> None:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        value = squares(net, batch, index)
        return value - value.detach() + LEVELS[name](index)

    module, ap = Task(net(), data(430 * 8), loss=loss, optimizer=adam), callback(keep=keep, learning_rate_factor=0.5)
    cpu(callbacks=[ap]).fit(module)
    assert_counted(ap, 430)
    assert ap.steering is not None
    applied = rows(ap.history, "rollback", "applied")
    refused = rows(ap.history, "rollback", "refused")
    assert bool(applied) == bool(refused)
    assert all("data or loss have changed" in row.reason for row in refused)
    assert ap.steering.learning_rate.named.get("rollback", 1.0) == 1.0


@pytest.mark.filterwarnings("ignore:autoprec:UserWarning", "ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_that_losses_were_accepted_is_resumed(tmp_path: Path) -> None:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        value = squares(net, batch, index)
        return value - value.detach() + (50.0 if module.current_epoch % 2 else 0.01)

    module, ap = Task(net(), data(100 * 8), loss=loss, optimizer=adam), callback()
    saver = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
    cpu(callbacks=[ap, saver], max_epochs=3, enable_checkpointing=True).fit(module)
    assert len(rows(ap.history, "rollback", "refused")) == 1
    module, ap = Task(net(), data(100 * 8), loss=loss, optimizer=adam), callback()
    resumed = cpu(callbacks=[ap], max_epochs=6)
    resumed.fit(module, ckpt_path=str(tmp_path / "last.ckpt"), weights_only=True)
    assert len(rows(ap.history, "rollback", "applied")) == 1
    assert ap.steering is not None
    assert ap.steering.window == 600


# ---- when it does not help ----


def test_after_the_last_rollback_training_stops() -> None:
    module, ap = Task(net(), data(200 * 8), optimizer=adam), callback(max_rollbacks=2)
    writes = Writes(poison_weight, *range(25, 200, 7))
    with goes_back(), pytest.raises(NonFiniteTrainingError, match="First offending layer: net.0.weight") as caught:
        cpu(callbacks=[ap, writes]).fit(module)
    text = str(caught.value)
    assert "Rollbacks: at window 27 to 20 applied steps, at window 34 to 20 applied steps" in text
    assert "`max_rollbacks=2` allows no more" in text
    assert len(rows(ap.history, "rollback")) == 2


def test_g03_a_run_that_diverges_in_fp32_as_well_is_not_retried_for_ever() -> None:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        value: Tensor = (net(batch) - batch[:, :2]).pow(2).mean()
        return value

    def wild(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.2)

    ap = callback("fixed:bf16", every=50, quarantine=400)
    module = Task(nn.Sequential(nn.Linear(8, 2)), data(5000 * 8), loss=loss, optimizer=wild)
    with goes_back("this is not a precision problem"), pytest.raises(RuntimeError) as caught:
        cpu(callbacks=[ap]).fit(module)
    assert isinstance(caught.value, (DivergedTrainingError, NonFiniteTrainingError))
    is_by_losses = isinstance(caught.value, DivergedTrainingError)
    assert ("loss_spreads=math.inf" in str(caught.value)) == is_by_losses
    text = str(caught.value)
    assert "not a precision problem" in text
    assert "learning rate" in text
    assert "net.0" in text
    assert ap.steering is not None
    assert ap.steering.rollbacks <= 3
    assert ap.steering.window < 1000
    assert set(ap.precision_map().values()) == {"fp32"}
    switches = [row for row in rows(ap.history, "precision", "applied") if row.applied == "bf16"]
    assert len(switches) == 1


def test_data_that_are_never_finite_again_end_the_run_after_one_rollback() -> None:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return squares(net, batch, index) * (math.inf if index >= 25 else 1.0)

    module, ap = Task(net(), data(100 * 8), loss=loss, optimizer=adam), callback()
    with goes_back(), pytest.raises(NonFiniteTrainingError, match="no step was applied since the last copy") as caught:
        cpu(callbacks=[ap]).fit(module)
    assert "Rollbacks: at window 29 to 20 applied steps" in str(caught.value)
    assert ap.skipped_steps == 8
    assert_finite(module)


def test_without_a_step_there_is_nothing_to_go_back_to() -> None:
    module = Task(net(), data(100 * 8), loss=lambda net, x, i: squares(net, x, i) * math.inf, optimizer=adam)
    ap = callback()
    with pytest.raises(NonFiniteTrainingError):
        cpu(callbacks=[ap]).fit(module)
    assert ap.skipped_steps == 4


def test_an_older_copy_is_used_where_the_newest_did_not_help() -> None:
    module, ap = Task(net(), data(100 * 8), optimizer=adam), callback(keep=3)
    with goes_back():
        cpu(callbacks=[ap, Writes(poison_weight, 35, 40, 45)]).fit(module)
    assert [row.applied for row in rows(ap.history, "rollback")] == [30, 20, 10]


def test_a_copy_after_which_no_step_was_applied_is_passed_over() -> None:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return squares(net, batch, index) * (math.inf if 30 <= index < 36 else 1.0)

    module, ap = Task(net(), data(60 * 8), loss=loss, optimizer=adam), callback(keep=2)
    with goes_back():
        cpu(callbacks=[ap]).fit(module)
    assert [(row.step, row.applied) for row in rows(ap.history, "rollback")] == [(34, 20)]
    assert_counted(ap, 60)


def rollback_of(ap: AutoPrecisionCallback) -> Rollback:
    assert ap.plugin._rollback is not None
    return ap.plugin._rollback


def corrupt(ap: AutoPrecisionCallback, copies: int) -> Callable[..., None]:
    def write(module: LightningModule, optimizer: Any) -> None:
        for copy in rollback_of(ap)._ring._copies[-copies:]:
            assert copy.block is not None
            copy.block[100] += 1

    return write


def test_a_corrupt_copy_is_on_record_and_the_one_before_it_is_used() -> None:
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback(keep=2)
    with goes_back("not what was written"):
        cpu(callbacks=[ap, Writes(corrupt(ap, 1), 24), Writes(poison_weight, 25)]).fit(module)
    assert [(row.applied, row.outcome) for row in rows(ap.history, "rollback")] == [(26, "refused"), (10, "applied")]
    assert_finite(module)
    assert_counted(ap, 60)


def test_without_a_copy_that_is_whole_training_stops() -> None:
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback(keep=2)
    with (
        pytest.warns(UserWarning, match="not what was written"),
        pytest.raises(NonFiniteTrainingError, match="no copy"),
    ):
        cpu(callbacks=[ap, Writes(corrupt(ap, 2), 24), Writes(poison_weight, 25)]).fit(module)


@pytest.mark.parametrize("off", [{"keep": 0}, {"max_bytes": 100}])
def test_switched_off_or_without_memory_the_guard_has_two_levels(off: Any) -> None:
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback(**off)
    with pytest.raises(NonFiniteTrainingError):
        cpu(callbacks=[ap, Writes(poison_weight, 25)]).fit(module)
    assert not rows(ap.history, "rollback")
    assert ap.skipped_steps == 4
    assert ap.steering is not None
    text = summarize(ap.steering, "scripted")
    assert "rollback   off" in text
    assert ("more than the 0.0001 MB" in text) == ("max_bytes" in off)


# ---- loops ----


class Pair(LightningModule):
    """Two optimizers under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for layer, optimizer in zip((self.a, self.b), optimizers, strict=True):
            optimizer.zero_grad()
            self.manual_backward((layer(batch) ** 2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [adam(self.a.parameters()), torch.optim.SGD(self.b.parameters(), lr=0.01, momentum=0.9)]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data(60 * 8), batch_size=8)  # type: ignore[arg-type]


def test_manual_optimization_with_two_optimizers_goes_back_whole() -> None:
    module, ap, states = Pair(), callback(every=20), States()
    with goes_back():
        cpu(callbacks=[ap, states, Writes(poison_weight, 25)]).fit(module)
    (row,) = rows(ap.history, "rollback")
    assert (row.step, row.before, row.applied) == (27, 53, 40)  # optimizer steps
    assert not differences(states.at[20], states.at[27])
    assert ap.applied_steps + ap.skipped_steps + ap.undone_windows == 120
    assert_finite(module)


def test_manual_optimization_with_one() -> None:
    module, ap = Manual(net(), data(60 * 8), optimizer=adam), callback()
    with goes_back():
        cpu(callbacks=[ap, Writes(blow_up, 25)]).fit(module)
    assert rows(ap.history, "rollback")[0].applied == 20
    assert_counted(ap, 60)


@pytest.mark.parametrize("write", [poison_weight, blow_up])
def test_lbfgs(write: Callable[..., None]) -> None:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=1e-3, max_iter=3)

    module, ap, states = Task(net(), data(40 * 8), optimizer=lbfgs), callback(), States()
    with goes_back():
        cpu(callbacks=[ap, states, Writes(write, 25)]).fit(module)
    (row,) = rows(ap.history, "rollback")
    assert row.applied == 20
    assert not differences(states.at[20], states.at[row.step])
    assert_counted(ap, 40)
    assert_finite(module)


def test_whole_accumulation_windows_go_back() -> None:
    module, ap, states = Task(net(), data(160 * 8), optimizer=adam), callback(), States()
    with goes_back():
        cpu(callbacks=[ap, states, Writes(poison_weight, 4 * 25 + 1)], accumulate_grad_batches=4).fit(module)
    (row,) = rows(ap.history, "rollback")
    assert (row.step, row.before, row.applied) == (26, 25, 20)
    assert not differences(states.at[80], states.at[104])
    assert_counted(ap, 40)


def test_validation_between_batches_changes_nothing() -> None:
    class Validated(Full):
        def __init__(self) -> None:
            super().__init__(lambda parameters: adam(parameters))

    seed()
    module, ap, states = Validated(), callback(), States()
    with goes_back():
        quiet(callbacks=[ap, states, Writes(poison_weight, 25)], max_epochs=5, val_check_interval=3).fit(
            module, small_loader(64), small_loader(16)
        )
    (row,) = rows(ap.history, "rollback")
    assert (row.step, row.applied) == (27, 20)
    assert not differences(states.at[20], states.at[27])
    assert_finite(module)


def test_second_moments_in_16_bits_go_back() -> None:
    settings = AutoPrecisionConfig(second_moment="bf16", second_moment_after=15, rollback=RollbackConfig(every=10))
    module = Task(net(), data(60 * 8), optimizer=adam)
    ap, states = AutoPrecisionCallback("fixed:bf16", knobs=("precision",), config=settings), States()
    with goes_back():
        cpu(callbacks=[ap, states, Writes(poison_weight, 15, 37)]).fit(module)
    assert len(rows(ap.history, "rollback")) == 2
    for row in rows(ap.history, "rollback"):
        first = next(n for n, state in enumerate(states.at) if not differences(state, states.at[row.step]))
        assert first < row.step
    assert_finite(module)


def test_the_plugin_alone_goes_back_as_well() -> None:
    plugin = AutoPrecision({"*": "bf16"}, config=config())
    module = Task(net(), data(60 * 8), optimizer=adam)
    with goes_back():
        cpu(plugins=[plugin], callbacks=[Writes(poison_weight, 25)]).fit(module)
    assert [row.applied for row in rows(plugin.history, "rollback")] == [20]
    assert_finite(module)


def test_a_step_that_draws_its_own_batches() -> None:
    class Draws(Task):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]
            batch, index, _ = next(dataloader_iter)
            return super().training_step(batch, index)

    module, ap = Draws(net(), data(60 * 8), optimizer=adam), callback()
    with goes_back():  # Lightning warns of this flavour, too
        cpu(callbacks=[ap, Writes(poison_weight, 25)]).fit(module)
    assert [row.applied for row in rows(ap.history, "rollback")] == [20]


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
@pytest.mark.parametrize("draws_own", [False, True])
def test_the_boundary_is_asked_once_a_batch(draws_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Takes(Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def val_dataloader(self) -> Any:
            return loader(self.data[:16], 8)

    class Draws(Takes):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, index, _ = next(dataloader_iter)
            return squares(self.net, batch, index)

    asked: list[bool] = []
    original = Rollback.at_boundary

    def at_boundary(self: Rollback) -> None:
        root: Any = self._steering.root
        asked.append(root.trainer.training)
        original(self)

    monkeypatch.setattr(Rollback, "at_boundary", at_boundary)
    module = (Draws if draws_own else Takes)(net(), data(20 * 8), optimizer=adam)
    cpu(callbacks=[callback()], val_check_interval=5, num_sanity_val_steps=0).fit(module)
    assert asked.count(True) == 20


def test_averages_of_weights_are_kept_by_their_callback() -> None:
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback()
    with goes_back():
        cpu(callbacks=[ap, Writes(blow_up, 25), WeightAveraging()]).fit(module)
    assert [row.applied for row in rows(ap.history, "rollback")] == [20]


def test_a_lazy_model_is_copied_once_it_is_there() -> None:
    module, ap = Task(nn.Sequential(nn.LazyLinear(2)), data(40 * 8), optimizer=adam), callback(every=100)
    kept: list[int] = []

    class Looks(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            copy = rollback_of(ap)._ring.newest
            kept.append(-1 if copy is None else copy.window)

    cpu(callbacks=[ap, Looks()]).fit(module)
    assert kept[0] == -1
    assert kept[-1] == 1


# ---- a run without trouble ----


class Busy(Full):
    """Running statistics, dropout, AdamW and a schedule per step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 2)
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), "interval": "step"}]


@pytest.mark.parametrize("policy", ["rule", "fixed:bf16", "fixed:fp16", "fixed:int8"])
@pytest.mark.parametrize("moment", ["fp32", "bf16"])
def test_a_healthy_run_has_the_same_bits_with_copies_and_without(policy: str, moment: Any) -> None:
    def run(keep: int) -> Any:
        seed(3)
        settings = AutoPrecisionConfig(second_moment=moment, rollback=RollbackConfig(keep=keep, every=7))
        module, ap = Busy(), AutoPrecisionCallback(policy, interval=10, config=settings)
        trainer = quiet(callbacks=[ap], max_epochs=6)
        trainer.fit(module, small_loader(64), small_loader(16))
        return outcome(trainer, module), list(ap.history)

    (left, left_history), (right, right_history) = run(0), run(2)
    assert_identical(left, right)
    assert left_history == right_history


def test_nothing_is_left_behind() -> None:
    module, ap = Task(net(), data(30 * 8), optimizer=adam), callback(keep=2)
    blocks: list[Any] = []

    class Looks(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            blocks[:] = [weakref.ref(copy.block) for copy in rollback_of(ap)._ring._copies]

    cpu(callbacks=[ap, Looks()]).fit(module)
    assert len(blocks) == 2
    gc.collect()
    assert [block() for block in blocks] == [None, None]
    assert ap.steering is not None
    assert ap.steering.fallback.last_resort is None


def test_compressed_copies_in_a_run() -> None:
    pytest.importorskip("zstandard")
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback(keep=2, compress=True)
    with goes_back():
        cpu(callbacks=[ap, Writes(poison_weight, 25)]).fit(module)
    assert rows(ap.history, "rollback")[0].applied == 20
    assert not [each for each in threading.enumerate() if each.name == "autoprec-compress"]


def test_a_fault_while_compressing_is_told_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zstandard")
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback(keep=2, compress=True)

    class Breaks(Callback):
        def on_fit_start(self, *args: Any) -> None:
            rollback_of(ap)._packer._codec = None  # type: ignore[union-attr]

    with goes_back("could not be compressed"):
        cpu(callbacks=[ap, Breaks(), Writes(poison_weight, 25)]).fit(module)
    assert rows(ap.history, "rollback")[0].applied == 20


def test_the_table_tells_of_copies_and_rollbacks() -> None:
    module, ap = Task(net(), data(60 * 8), optimizer=adam), callback()
    with goes_back():
        cpu(callbacks=[ap, Writes(poison_weight, 25)]).fit(module)
    assert ap.steering is not None
    text = summarize(ap.steering, "scripted")
    assert re.search(r"^  rollback   1 copy of 0.00\d+ MB, 1 rollback$", text, re.MULTILINE)
    assert "  steps      53 applied, 1 skipped as non-finite, 6 undone" in text


# ---- resume ----


def fit(steps: int, folder: Path, *writes: Callback, resume: Path | None = None, save_at: int = 0) -> Any:
    seed(5)
    module, ap = Busy(), callback(max_rollbacks=2, quarantine=100)
    others: list[Callback] = [ap, *writes]
    if save_at:
        others.append(ModelCheckpoint(folder, save_top_k=-1, filename="{step}", every_n_train_steps=save_at))
    trainer = quiet(max_steps=steps, max_epochs=-1, callbacks=others, enable_checkpointing=save_at > 0)
    trainer.fit(module, small_loader(64), small_loader(16), ckpt_path=resume, weights_only=True if resume else None)
    return module, ap


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_the_count_of_rollbacks_and_the_quarantine_are_resumed(tmp_path: Path) -> None:
    with goes_back():
        _, before = fit(40, tmp_path, Writes(poison_weight, 25), save_at=40)
    file = tmp_path / "step=40.ckpt"
    held = before.steering.knobs.guard.held
    module, ap = fit(60, tmp_path, resume=file)
    assert (ap.steering.rollbacks, ap.undone_windows) == (1, before.undone_windows)
    assert ap.steering.knobs.guard.held == held
    assert_counted(ap, 60)
    with goes_back("rollback 2 of at most 2"):  # there is a copy of the very window at which it was resumed
        module, ap = fit(60, tmp_path, Writes(poison_weight, 3), resume=file)
    assert rows(ap.history, "rollback")[-1].applied == before.applied_steps
    assert_counted(ap, 60)
    assert_finite(module)
    with goes_back(), pytest.raises(NonFiniteTrainingError, match="`max_rollbacks=2` allows no more"):
        fit(80, tmp_path, Writes(poison_weight, 3, 8), resume=file)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
def test_a_checkpoint_from_before_there_were_copies_loads(tmp_path: Path) -> None:
    fit(10, tmp_path, save_at=10)
    file = tmp_path / "step=10.ckpt"
    content = torch.load(file, weights_only=True)
    for name in ("rollback", "rollbacks", "undone_windows", "has_skipped"):
        del content["AutoPrecision"][name]
    del content["AutoPrecision"]["telemetry"]["loss_count"]
    torch.save(content, file)
    with goes_back():
        _, ap = fit(30, tmp_path, Writes(poison_weight, 5), resume=file)
    assert rows(ap.history, "rollback")[0].applied == 10
