"""Cases A-01 to A-06: what was asked for and what ran, skipped steps, and the loss scale.

Time budget: 30 s.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from autoprec import (
    FORMATS,
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    GuardConfig,
    LossScaleConfig,
    NonFiniteTrainingError,
    ScriptedController,
)
from autoprec.encoding import feature
from autoprec.units import find_units
from tests.support import (
    Ask,
    Lin,
    Manual,
    Task,
    Watch,
    assert_finite,
    assert_same_state,
    cpu,
    fp16cpu,
    loader,
    rows,
    scripted,
    squares,
    squares_but,
    state_of,
    stops_for_good,
    watch_dtypes,
    weights_of,
)

# many runs here are so short that no step is left
pytestmark = pytest.mark.filterwarnings("ignore:autoprec. no step was applied")

always_inf = functools.partial(squares_but, bad=range(10_000))


def summary(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if "autoprec" in record.getMessage())


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """The table that fit prints."""
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    return lambda: summary(caplog)


# ---- the report says what ran ----


class Moves(ScriptedController):
    """Moves every row up at each decision and keeps the observations."""

    def __init__(self) -> None:
        super().__init__()
        self.observations: list[Any] = []

    def decide(self, observation: Any) -> Any:
        self.observations.append(observation)
        return np.ones(len(observation), dtype=np.int64)


def test_a01_swapped_half_precision_is_reported_as_what_ran(report: Callable[[], str]) -> None:
    ap, task = scripted(), Lin(64, 8)
    seen = watch_dtypes(task)
    with pytest.warns(UserWarning, match="16-mixed"):
        trainer = cpu(precision="16-mixed", callbacks=[ap])
    trainer.fit(task)
    assert set(seen["net"]) == {torch.bfloat16}
    assert ap.precision_map() == {"net": "bf16"}
    assert "started from bf16-mixed" in report()
    assert "bf16       1 units, 100.0% of parameters" in report()
    assert "fp16       " not in report()


def test_a01_loss_scale_is_shown_as_disabled_under_bf16(report: Callable[[], str]) -> None:
    ap = scripted()
    cpu(precision="bf16-mixed", callbacks=[ap]).fit(Lin(64, 8))
    assert ap.loss_scale == 1.0
    assert "loss scale not in use" in report()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a01_loss_scale_without_effect_is_masked_for_the_policy(precision: Any) -> None:
    moves = Moves()
    ap = AutoPrecisionCallback(policy=moves, interval=2)
    cpu(precision=precision, callbacks=[ap]).fit(Lin(64, 8))
    assert moves.observations
    for observation in moves.observations:
        row = observation[feature(observation, "knob_loss_scale") == 1]
        assert feature(row, "can_raise") == 0
        assert feature(row, "can_lower") == 0
    assert ap.loss_scale == 1.0
    assert rows(ap.history, "loss_scale", "applied") == []


def test_a01_masked_knobs_cannot_be_moved_in_the_observation() -> None:
    moves = Moves()
    ap = AutoPrecisionCallback(policy=moves, interval=2, knobs=("precision",))
    cpu(callbacks=[ap]).fit(Lin(64, 8))
    last = moves.observations[-1]
    for knob in ("loss_scale", "batch_size", "clip"):
        row = last[feature(last, f"knob_{knob}") == 1]
        assert not feature(row, "can_raise").any(), knob
        assert not feature(row, "can_lower").any(), knob
    assert {d.knob for d in ap.history} <= {"precision"}


@pytest.mark.parametrize("name", list(FORMATS))
def test_a01_map_and_report_agree_with_what_ran(name: str, report: Callable[[], str]) -> None:
    """32 is a multiple of 16, so every format is legal for these layers."""
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    task = Task(net, torch.rand(32, 32))
    ap = scripted({0: Action(precision={"net.0": name})})
    seen = watch_dtypes(task)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.0": name, "net.2": "fp32"}
    assert set(seen["net.0"]) == {FORMATS[name].compute_dtype}
    assert set(seen["net.2"]) == {torch.float32}
    line = next(line for line in report().splitlines() if line.strip().startswith(name))
    # fp16 and fp8 have no arithmetic on any CPU that the tests run on
    assert ("emulated" in line) or name not in ("fp16", "fp8")
    (decision,) = [d for d in rows(ap.history, "precision") if d.unit == "net.0"]
    assert (decision.requested, decision.applied, decision.outcome) == (name, name, "applied")


@pytest.mark.parametrize("name", ["fp16", "fp8", "int8"])
def test_a01_emulation_shows_in_the_observation(name: str) -> None:
    """Where the device has no such arithmetic, the policy must be able to see it."""
    moves = Moves()
    task = Task(nn.Sequential(nn.Linear(32, 32)), torch.rand(64, 32))
    moves.steps = {0: Action(precision={"*": name})}
    ap = AutoPrecisionCallback(policy=moves, interval=1)
    cpu(callbacks=[ap], max_steps=4).fit(task)
    (unit,) = find_units(task)
    first = moves.observations[0]
    row = first[feature(first, "knob_precision") == 1]
    assert bool(feature(row, "emulated")[0]) == unit.is_emulated(name)


def test_a01_layer_protected_by_its_user_is_not_reported_as_lowered(report: Callable[[], str]) -> None:
    """A region without autocast keeps its layer in fp32, so neither map nor report may call it fp16."""

    class Protected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.free, self.kept = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.free(x).float()
            with torch.autocast("cpu", enabled=False):
                return self.kept(x)  # type: ignore[no-any-return]

    ap, task = scripted({0: Action(precision={"*": "fp16"})}), Task(Protected(), torch.rand(32, 4))
    seen = watch_dtypes(task)
    cpu(callbacks=[ap]).fit(task)
    assert set(seen["net.kept"]) == {torch.float32}
    assert set(seen["net.free"]) == {torch.float16}
    assert ap.precision_map() == {"net.free": "fp16", "net.kept": "fp32"}


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("bf16-true", torch.bfloat16)])
def test_a01_true_precision_is_observed_but_not_steered(
    precision: Any, dtype: torch.dtype, report: Callable[[], str]
) -> None:
    ap, task = scripted({1: Action(precision={"*": "fp16"}, loss_scale=8.0)}), Task(nn.Linear(4, 1), torch.rand(32, 4))
    seen = watch_dtypes(task)
    cpu(precision=precision, callbacks=[ap]).fit(task)
    assert set(seen["net"]) == {dtype}
    assert {d.outcome for d in ap.history if d.knob in ("precision", "loss_scale")} == {"refused"}
    assert all(precision in d.reason for d in ap.history)
    assert f"not steered: the Trainer runs in {precision}" in report()
    assert "fp16 " not in report().split("refused")[0]
    assert ap.applied_steps == 4


def test_a01_refused_format_is_reported_with_its_reason(report: Callable[[], str]) -> None:
    ap, task = scripted({0: Action(precision={"net": "fp8"})}), Lin(16, 8)
    seen = watch_dtypes(task)
    cpu(callbacks=[ap]).fit(task)
    (decision,) = ap.history
    assert (decision.requested, decision.applied, decision.outcome) == ("fp8", "fp32", "refused")
    assert decision.reason
    assert ap.precision_map() == {"net": "fp32"}
    assert set(seen["net"]) == {torch.float32}
    assert "refused    net to fp8" in report()


# ---- a skipped step moves nothing ----


def halving(interval: str = "step", **extra: Any) -> Callable[[Optimizer], dict[str, Any]]:
    return lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.5), "interval": interval, **extra}


def sgd_one(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1.0)


def lin_with_bad(bad: Iterable[int], n: int = 16, schedule: Any = None, factor: float = math.inf, **kwargs: Any) -> Lin:
    loss = functools.partial(squares_but, bad=tuple(bad), factor=factor)
    return Lin(n, 8, loss=loss, optimizer=sgd_one, schedule=schedule or halving(), **kwargs)


def test_a02_skipped_step_moves_neither_weights_nor_schedule() -> None:
    ap, task = scripted(), lin_with_bad([0, 1])
    before = weights_of(task)
    trainer = cpu(plugins=fp16cpu(1024), callbacks=[ap])
    trainer.fit(task)
    assert all(map(torch.equal, weights_of(task), before))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0
    assert (ap.skipped_steps, ap.applied_steps) == (2, 0)
    assert trainer.global_step == 2  # Lightning counts attempts


def test_a02_report_counts_applied_steps(report: Callable[[], str]) -> None:
    cpu(plugins=fp16cpu(1024), callbacks=[scripted()]).fit(lin_with_bad([0, 1, 3], n=40))
    assert "2 applied, 3 skipped" in report()


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("plugins", [{}, {"precision": "bf16-mixed"}, {"plugins": "fp16"}])
def test_a02_schedule_counts_applied_steps_in_every_precision(factor: float, plugins: dict[str, Any]) -> None:
    """Without a scaler a non-finite gradient would ruin the weights; it is skipped all the same."""
    kwargs = {"plugins": fp16cpu(1024)} if "plugins" in plugins else plugins
    ap = scripted()
    watch, task = Watch(ap), lin_with_bad([0, 2], n=32, factor=factor)
    cpu(callbacks=[ap, watch], **kwargs).fit(task)
    assert watch.rates == [1.0, 0.5, 0.5, 0.25]
    assert (ap.skipped_steps, ap.applied_steps) == (2, 2)
    assert_finite(task)


def test_a02_gradient_that_only_the_hooks_made_non_finite() -> None:
    """The loss is finite; a tensor hook of the user ruins the gradient."""
    ap, task = scripted(), lin_with_bad([])
    next(task.net.parameters()).register_hook(lambda grad: grad * math.nan)
    before = weights_of(task)
    trainer = cpu(callbacks=[ap])
    trainer.fit(task)
    assert all(map(torch.equal, weights_of(task), before))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0
    assert ap.skipped_steps == 2


def test_a02_gradient_ruined_in_the_last_hook_before_the_step() -> None:
    class Ruin(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
            for parameter in pl_module.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(math.inf)

    ap, task = scripted(), lin_with_bad([])
    before = weights_of(task)
    cpu(callbacks=[ap, Ruin()]).fit(task)
    assert all(map(torch.equal, weights_of(task), before))
    assert (ap.skipped_steps, ap.applied_steps) == (2, 0)


def test_a02_accumulation_skips_whole_windows() -> None:
    ap = scripted()
    watch, task = Watch(ap), lin_with_bad([1], n=48)  # windows (0, 1), (2, 3), (4, 5)
    trainer = cpu(plugins=fp16cpu(1024), callbacks=[ap, watch], accumulate_grad_batches=2)
    trainer.fit(task)
    assert (ap.skipped_steps, ap.applied_steps, trainer.global_step) == (1, 2, 3)
    assert watch.rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_a02_manual_optimization() -> None:
    ap, loss = scripted(), functools.partial(squares_but, bad=(0, 2))
    watch = Watch(ap)
    task = Manual(nn.Linear(4, 1), torch.ones(32, 4), loss=loss, optimizer=sgd_one, schedule=halving())
    trainer = cpu(plugins=fp16cpu(1024), callbacks=[ap, watch])
    trainer.fit(task)
    assert watch.rates == [1.0, 0.5, 0.5, 0.25]
    assert (ap.skipped_steps, ap.applied_steps, trainer.global_step) == (2, 2, 4)


def test_a02_manual_schedule_of_an_epoch_is_not_held_back() -> None:
    class PerEpoch(Manual):
        def on_train_epoch_end(self) -> None:
            scheduler: Any = self.lr_schedulers()
            scheduler.step()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self._loss(self.net, batch, batch_idx))
            optimizer.step()

    loss = functools.partial(squares_but, bad=(0, 1))
    task = PerEpoch(nn.Linear(4, 1), torch.ones(16, 4), loss=loss, optimizer=sgd_one, schedule=halving())
    trainer = cpu(callbacks=[scripted()], max_epochs=2)
    trainer.fit(task)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


class TwoOptimizers(LightningModule):
    """Two nets with an optimizer and a schedule each; the loss of the second is bad in batch 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        factors = (1.0, math.inf if batch_idx == 0 else 1.0)
        for net, optimizer, schedule, factor in zip((self.a, self.b), optimizers, schedules, factors, strict=True):
            optimizer.zero_grad()
            self.manual_backward((net(batch) ** 2).mean() * factor)
            optimizer.step()
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [SGD(self.a.parameters(), lr=1.0), SGD(self.b.parameters(), lr=1.0)]
        return optimizers, [StepLR(optimizer, 1, 0.5) for optimizer in optimizers]

    def train_dataloader(self) -> Any:
        return loader(torch.ones(16, 4), 8)


def test_a02_only_the_skipped_optimizer_is_held_back() -> None:
    ap, task = scripted(), TwoOptimizers()
    before = weights_of(task.b)
    trainer = cpu(callbacks=[ap])
    trainer.fit(task)
    assert [o.param_groups[0]["lr"] for o in trainer.optimizers] == [0.25, 0.5]
    assert (ap.skipped_steps, ap.applied_steps) == (1, 3)
    assert_finite(task)
    assert not any(map(torch.equal, weights_of(task.b), before))


def one_cycle(optimizer: Optimizer) -> dict[str, Any]:
    return {"scheduler": OneCycleLR(optimizer, 1.0, total_steps=8), "interval": "step"}


def warm_up_then_decay(optimizer: Optimizer) -> dict[str, Any]:
    parts = [LinearLR(optimizer, 0.25, total_iters=2), ExponentialLR(optimizer, 0.5)]
    return {"scheduler": SequentialLR(optimizer, parts, [2]), "interval": "step"}


def chained(optimizer: Optimizer) -> dict[str, Any]:
    return {
        "scheduler": ChainedScheduler([StepLR(optimizer, 2, 0.5), ExponentialLR(optimizer, 0.9)]),
        "interval": "step",
    }


@pytest.mark.parametrize("schedule", [one_cycle, warm_up_then_decay, chained, halving()])
def test_a02_schedule_ends_where_its_applied_steps_lead(schedule: Callable[[Optimizer], dict[str, Any]]) -> None:
    """Four applied steps out of six move the schedule as four steps out of four do."""
    rates = []
    for n, bad in ((48, (0, 3)), (32, ())):
        task = lin_with_bad(bad, n=n, schedule=schedule)
        trainer = cpu(callbacks=[scripted()])
        trainer.fit(task)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1]


def test_a02_overridden_lr_scheduler_step_is_held_too() -> None:
    class Own(Lin):
        calls = 0

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.calls += 1
            scheduler.step()

    task = Own(32, 8, loss=functools.partial(squares_but, bad=(0, 1)), optimizer=sgd_one, schedule=halving())
    trainer = cpu(callbacks=[scripted()])
    trainer.fit(task)
    assert task.calls == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a02_epoch_schedule_is_not_held_back() -> None:
    ap, task = scripted(), lin_with_bad([1], schedule=halving("epoch"))
    trainer = cpu(callbacks=[ap], max_epochs=2)  # the last batch of each epoch is skipped
    trainer.fit(task)
    assert ap.skipped_steps == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a02_reduce_on_plateau_is_not_held_back(interval: str) -> None:
    """It follows a metric, not the number of steps."""

    class Plateau(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("metric", torch.tensor(1.0))  # never improves
            return loss

    def schedule(optimizer: Optimizer) -> dict[str, Any]:
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"scheduler": scheduler, "interval": interval, "monitor": "metric"}

    rates = []
    for callbacks in ([], [scripted()]):
        # a finite loss for the plain run, whose weights would be NaN otherwise
        bad = (1, 3) if callbacks else ()
        task = Plateau(16, 8, loss=functools.partial(squares_but, bad=bad), optimizer=sgd_one, schedule=schedule)
        trainer = cpu(callbacks=callbacks, max_epochs=3)
        trainer.fit(task)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1] < 1.0


def test_a02_following_the_framework_is_opt_in() -> None:
    ap = scripted(config=AutoPrecisionConfig(hold_schedules=False))
    task = lin_with_bad([0, 1])
    before = weights_of(task)
    trainer = cpu(plugins=fp16cpu(1024), callbacks=[ap])
    trainer.fit(task)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    assert all(map(torch.equal, weights_of(task), before))


def test_a02_following_the_framework_under_manual_optimization() -> None:
    ap = scripted(config=AutoPrecisionConfig(hold_schedules=False))
    loss = functools.partial(squares_but, bad=(0, 1))
    task = Manual(nn.Linear(4, 1), torch.ones(16, 4), loss=loss, optimizer=sgd_one, schedule=halving())
    trainer = cpu(callbacks=[ap])
    trainer.fit(task)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a02_schedule_is_its_own_class_and_moves_again_after_fit() -> None:
    task = lin_with_bad([0, 1])
    trainer = cpu(callbacks=[scripted()])
    trainer.fit(task)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert type(scheduler) is StepLR
    trainer.optimizers[0].step()
    scheduler.step()
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


def test_a02_moments_of_the_optimizer_stay_too() -> None:
    """Momentum must not decay in a step that did not count."""
    momentum: list[float] = []

    class Momentum(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            states = trainer.optimizers[0].state.values()
            momentum.append(sum(float(s["exp_avg"].sum()) + float(s["step"]) for s in states))

    task = Lin(32, 8, loss=functools.partial(squares_but, bad=(2,)), optimizer=torch.optim.Adam)
    cpu(callbacks=[scripted(), Momentum()]).fit(task)
    assert momentum[1] == momentum[2] != momentum[3]


# ---- the scale has a floor, and training an end ----


def test_a03_scale_never_falls_below_its_floor_and_training_stops() -> None:
    ap, task = scripted(), Lin(2400, 8, loss=always_inf)
    watch, before = Watch(ap), weights_of(task)
    with stops_for_good() as caught:
        cpu(plugins=fp16cpu(65536), callbacks=[ap, watch]).fit(task)
    assert min(watch.scales) >= 1.0
    assert "net" in str(caught.value)
    assert "0 applied" in str(caught.value)
    assert ap.applied_steps == 0
    assert ap.skipped_steps <= 60  # bounded, far below the 300 batches
    assert all(map(torch.equal, weights_of(task), before))
    assert set(ap.precision_map().values()) == {"fp32"}


def test_a03_fp16_is_left_after_twenty_skips_in_a_row() -> None:
    ap, task = scripted(), Lin(2400, 8, loss=always_inf)
    watch = Watch(ap)
    with stops_for_good():
        cpu(plugins=fp16cpu(65536), callbacks=[ap, watch]).fit(task)
    formats = [m["net"] for m in watch.maps]
    assert formats.index("fp32") in (19, 20)
    raised = [d for d in rows(ap.history, "precision") if d.applied == "fp32"]
    assert [d.unit for d in raised] == ["net"]
    assert "20 steps in a row" in raised[0].reason


@pytest.mark.parametrize("limit", [1, 5])
def test_a03_the_bound_is_a_setting(limit: int) -> None:
    ap = scripted(config=AutoPrecisionConfig(guard=GuardConfig(max_consecutive_skips=limit)))
    with stops_for_good():
        cpu(plugins=fp16cpu(), callbacks=[ap]).fit(Lin(2400, 8, loss=always_inf))
    assert ap.skipped_steps == 2 * limit


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a03_fp32_without_a_scaler_stops_as_well(factor: float) -> None:
    ap, task = scripted(), Lin(2400, 8, loss=functools.partial(always_inf, factor=factor))
    before = weights_of(task)
    with pytest.raises(NonFiniteTrainingError, match="net"):
        cpu(callbacks=[ap]).fit(task)
    assert ap.skipped_steps == 20
    assert all(map(torch.equal, weights_of(task), before))


class Broken(nn.Module):
    """Divides by zero; has no parameters, so only its output can give it away."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


def test_a03_the_layer_that_is_named_is_the_first_offender() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Broken(), nn.Linear(4, 1))
    with pytest.raises(NonFiniteTrainingError, match=r"First offending layer: net\.2 "):
        cpu(callbacks=[scripted()]).fit(Task(net, torch.rand(800, 4)))


def test_a03_weights_that_are_nan_already_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        next(net[1].parameters())[0, 0] = math.nan
    with pytest.raises(NonFiniteTrainingError, match=r"First offending layer: net\.1 "):
        cpu(callbacks=[scripted()]).fit(Task(net, torch.rand(800, 4)))


def test_a03_gradients_that_are_never_cleared() -> None:
    """One inf stays in the gradient for ever when nobody clears it."""

    class NeverCleared(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(self._loss(self.net, batch, batch_idx))
            optimizer: Any = self.optimizers()
            optimizer.step()

    ap = scripted()
    task = NeverCleared(nn.Linear(4, 1), torch.ones(2400, 4), loss=functools.partial(squares_but, bad=(3,)))
    with stops_for_good():
        cpu(plugins=fp16cpu(8), callbacks=[ap]).fit(task)
    assert ap.applied_steps == 3
    assert_finite(task)


def test_a03_manual_optimization_stops_as_well() -> None:
    ap, task = scripted(), Manual(nn.Linear(4, 1), torch.ones(2400, 4), loss=always_inf)
    with stops_for_good():
        cpu(plugins=fp16cpu(), callbacks=[ap]).fit(task)
    assert ap.applied_steps == 0


def test_a03_accumulation_counts_windows() -> None:
    ap, task = scripted(), Lin(2400, 8, loss=always_inf)
    with stops_for_good():
        cpu(plugins=fp16cpu(), callbacks=[ap], accumulate_grad_batches=3).fit(task)
    assert ap.skipped_steps == 40


def test_a03_masked_knobs_do_not_switch_the_guard_off() -> None:
    ap, task = scripted(knobs=()), Lin(2400, 8, loss=always_inf)
    with pytest.raises(NonFiniteTrainingError):
        cpu(callbacks=[ap]).fit(task)
    assert ap.skipped_steps == 20


class Large(nn.Module):
    """Leaves the range of fp16 and comes back; parameter-free, so it runs in the precision of the layer before it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e6) * 1e-6


def test_a03_training_goes_on_once_the_overflowing_layer_left_fp16() -> None:
    ap, task = scripted(), Task(nn.Sequential(nn.Linear(4, 4), Large(), nn.Linear(4, 1)), torch.rand(480, 4))
    before = weights_of(task)
    cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(task)
    assert 0 < ap.skipped_steps <= 3
    assert ap.applied_steps == 60 - ap.skipped_steps
    assert ap.precision_map()["net.0"] == "fp32"
    assert not any(map(torch.equal, weights_of(task), before))
    assert ap.loss_scale >= 512  # an overflow in the forward is no reason to give up small gradients


def test_a03_a_run_without_an_applied_step_says_so(report: Callable[[], str]) -> None:
    """Ten skips are not enough to stop, but the run must not look trained."""
    cpu(plugins=fp16cpu(), callbacks=[scripted()]).fit(Lin(80, 8, loss=always_inf))
    assert "NO STEP WAS APPLIED" in report()


def test_a03_a_quiet_run_without_an_applied_step_warns() -> None:
    with pytest.warns(UserWarning, match="(?i)no step was applied"):
        cpu(plugins=fp16cpu(), callbacks=[scripted(verbose=False)]).fit(Lin(80, 8, loss=always_inf))


def test_a03_module_and_trainer_are_clean_after_the_stop() -> None:
    ap, task = scripted(), Lin(2400, 8, loss=always_inf)
    plugin = fp16cpu()
    trainer = cpu(plugins=plugin, callbacks=[ap])
    with stops_for_good():
        trainer.fit(task)
    assert trainer.strategy.precision_plugin is plugin
    assert type(task.net) is nn.Linear
    assert task.net(torch.ones(1, 4)).dtype is torch.float32
    assert not task.net._forward_hooks


# ---- the scale has a cap ----


class OneParameter(LightningModule):
    """loss = p * 1e-30, and p in the last batch."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(1.0))
        self.n = n

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.p * (1.0 if batch_idx == self.n else 1e-30)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> Any:
        return loader(torch.ones(self.n + 1, 1), 1)


def test_a04_growth_ends_at_the_cap_and_a_normal_loss_still_works() -> None:
    ap, task = scripted(knobs=("precision", "loss_scale")), OneParameter(300)
    watch = Watch(ap)
    cpu(plugins=fp16cpu(65536, growth_interval=1), callbacks=[ap, watch]).fit(task)
    assert max(watch.scales) == 2.0**24
    assert ap.skipped_steps == 0
    assert ap.applied_steps == 301
    assert task.p.item() == pytest.approx(0.5)


def test_a04_cap_is_a_setting() -> None:
    config = AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=64.0, cap=1024.0, growth_interval=1))
    ap = scripted({0: Action(precision={"*": "fp16"})}, config=config)
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(Lin(80, 8))
    assert max(watch.scales) == 1024.0


@pytest.mark.parametrize(
    ("asked", "got", "outcome"), [(2.0**40, 2.0**24, "limited"), (2.0**24, 2.0**24, "applied"), (0.25, 1.0, "limited")]
)
def test_a04_request_beyond_the_limits_gets_the_limit(asked: float, got: float, outcome: str) -> None:
    ap = scripted({1: Action(loss_scale=asked)})
    cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(Lin(24, 8, loss=tiny))
    (decision,) = rows(ap.history, "loss_scale")
    assert (decision.requested, decision.applied, decision.outcome) == (asked, got, outcome)
    assert ap.loss_scale == got


def test_a04_request_from_user_code_is_limited_as_well() -> None:
    ap = scripted()
    ask = Ask(ap, "on_train_batch_end", 0, Action(loss_scale=2.0**60))
    cpu(plugins=fp16cpu(1024), callbacks=[ap, ask]).fit(Lin(24, 8, loss=tiny))
    assert [d.outcome for d in rows(ap.history, "loss_scale")] == ["deferred", "limited"]
    assert ap.loss_scale == 2.0**24


@pytest.mark.parametrize("asked", [math.inf, -math.inf, math.nan, 0.0, -2.0])
def test_a04_impossible_scale_is_refused(asked: float) -> None:
    ap = scripted({1: Action(loss_scale=asked)})
    cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(Lin(24, 8))
    (decision,) = rows(ap.history, "loss_scale")
    assert (decision.outcome, decision.applied, ap.loss_scale) == ("refused", 1024.0, 1024.0)
    assert decision.reason


def test_a04_policy_cannot_climb_above_the_cap() -> None:
    ap = AutoPrecisionCallback(policy=Moves(), interval=1, knobs=("loss_scale",))
    watch = Watch(ap)
    cpu(plugins=fp16cpu(2.0**20), callbacks=[ap, watch]).fit(Lin(160, 8, loss=tiny))
    assert max(watch.scales) == 2.0**24
    assert all(d.applied is not None and float(d.applied) <= 2.0**24 for d in rows(ap.history, "loss_scale"))


def test_a04_scaler_that_already_is_beyond_the_cap_starts_at_it() -> None:
    ap = scripted()
    watch = Watch(ap)
    cpu(plugins=fp16cpu(2.0**80), callbacks=[ap, watch]).fit(Lin(16, 8, loss=tiny))
    assert watch.scales[0] == 2.0**24


# ---- nothing changes inside an accumulation window ----


def seen_gradients(callbacks: list[Callback], task: LightningModule, **kwargs: Any) -> list[list[Tensor]]:
    watch = Watch()
    cpu(callbacks=[*callbacks, watch], **kwargs).fit(task)
    return watch.gradients


def tiny(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    """So small that no scale below the cap overflows; in float32, as the scale itself passes through its gradient."""
    output: Tensor = net(batch)
    return output.float().mean() * 1e-9


def constant(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    """Its gradient is one in every micro-batch, whatever the weights are."""
    output: Tensor = net(batch)
    return output.mean()


# a hook and the first of its calls inside a window
HOOKS = {
    "on_train_batch_start": 1,
    "on_before_zero_grad": 0,
    "on_before_backward": 0,
    "on_after_backward": 0,
    "on_train_batch_end": 0,
}


@pytest.mark.parametrize("hook", list(HOOKS))
def test_a05_scale_changed_inside_a_window_waits_for_the_next(hook: str) -> None:
    expected = seen_gradients([], Lin(32, 8, loss=constant), accumulate_grad_batches=2)
    ap = scripted()
    ask = Ask(ap, hook, HOOKS[hook], Action(loss_scale=2048.0))
    found = seen_gradients([ap, ask], Lin(32, 8, loss=constant), accumulate_grad_batches=2, plugins=fp16cpu(1024))
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    decisions = rows(ap.history, "loss_scale")
    assert [(d.step, d.outcome, d.requested) for d in decisions] == [(0, "deferred", 2048.0), (1, "applied", 2048.0)]
    assert [(d.before, d.applied) for d in decisions] == [(1024.0, 1024.0), (1024.0, 2048.0)]


def test_a05_gradient_is_the_one_of_a_constant_scale() -> None:
    """The number in the books: 1.5 where 2.0 would be right, here both halved by the mean over the window."""
    ap = scripted()
    ask = Ask(ap, "on_train_batch_end", 0, Action(loss_scale=2048.0))
    (first, _) = seen_gradients([ap, ask], Lin(32, 8, loss=constant), accumulate_grad_batches=2, plugins=fp16cpu(1024))
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in first)


@pytest.mark.parametrize(
    ("knob", "action", "before", "after"),
    [
        ("precision", Action(precision={"net": "bf16"}), "fp32", "bf16"),
        ("clip", Action(clip=0.5), math.inf, 0.5),
        ("loss_scale", Action(loss_scale=4.0), 1.0, 4.0),
    ],
)
def test_a05_same_rule_for_the_other_knobs(knob: str, action: Action, before: object, after: object) -> None:
    seen: list[object] = []

    class Look(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            values = {"precision": ap.precision_map()["net"], "clip": ap.clip_threshold, "loss_scale": ap.loss_scale}
            seen.append(values[knob])

    ap = scripted()
    cpu(callbacks=[ap, Ask(ap, "on_before_backward", 2, action), Look()], accumulate_grad_batches=2).fit(Lin(48, 8))
    assert seen == [before, before, before, before, after, after]
    assert [(d.step, d.outcome) for d in rows(ap.history, knob)] == [(1, "deferred"), (2, "applied")]


def test_a05_batch_size_is_not_changed_inside_a_window_either() -> None:
    ap, task = scripted(), Lin(32, 8)
    sizes: list[int] = []

    class Sizes(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Tensor, *args: Any) -> None:
            sizes.append(len(batch))

    ask = Ask(ap, "on_train_batch_end", 0, Action(batch_size=16, accumulate=1))
    cpu(callbacks=[ap, ask, Sizes()], accumulate_grad_batches=2).fit(task)
    assert sizes == [8, 8, 8, 8]
    for knob in ("batch_size", "accumulate"):
        assert all(d.outcome in ("deferred", "refused") and d.reason for d in rows(ap.history, knob))
        assert rows(ap.history, knob)


def test_a05_script_counts_windows_not_batches() -> None:
    ap = scripted({1: Action(precision={"net": "bf16"})})
    watch = Watch(ap)
    cpu(callbacks=[ap, watch], accumulate_grad_batches=3).fit(Lin(72, 8))
    assert [m["net"] for m in watch.maps] == ["fp32"] * 3 + ["bf16"] * 6


def test_a05_growth_waits_for_the_end_of_the_window() -> None:
    ap = scripted()
    watch = Watch(ap)
    cpu(plugins=fp16cpu(1024, growth_interval=1), callbacks=[ap, watch], accumulate_grad_batches=2).fit(
        Lin(48, 8, loss=constant)
    )
    expected = seen_gradients([], Lin(48, 8, loss=constant), accumulate_grad_batches=2)
    for ours, theirs in zip(watch.gradients, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    assert ap.loss_scale == 1024 * 2**3


class ManualAccumulation(Manual):
    """Accumulates by hand over two batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self._loss(self.net, batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_a05_accumulation_by_hand_is_a_window_too() -> None:
    ap = scripted()
    task = ManualAccumulation(nn.Linear(4, 1), torch.ones(32, 4), loss=constant)
    ask = Ask(ap, "on_train_batch_end", 0, Action(loss_scale=2048.0, precision={"net": "fp32"}))
    watch = Watch(ap)
    cpu(plugins=fp16cpu(1024), callbacks=[ap, ask, watch]).fit(task)
    assert all(torch.equal(g, torch.ones_like(g)) for gradients in watch.gradients for g in gradients)
    assert watch.scales[0] == 1024.0
    assert [(d.step, d.outcome) for d in rows(ap.history, "loss_scale")] == [(0, "deferred"), (1, "applied")]
    assert [(d.step, d.outcome) for d in rows(ap.history, "precision")] == [(0, "deferred"), (1, "applied")]


def test_a05_request_in_the_last_window_of_an_epoch_acts_in_the_next_epoch() -> None:
    """Three batches and windows of two: the last one is short."""
    ap = scripted()
    ask = Ask(ap, "on_before_backward", 2, Action(loss_scale=2048.0))
    watch = Watch(ap)
    task = Lin(24, 8, loss=constant)
    cpu(plugins=fp16cpu(1024), callbacks=[ap, ask, watch], accumulate_grad_batches=2, max_epochs=2).fit(task)
    assert [(d.step, d.outcome) for d in rows(ap.history, "loss_scale")] == [(1, "deferred"), (2, "applied")]
    sizes = [float(gradients[0].mean()) for gradients in watch.gradients]
    assert sizes == [1.0, 0.5, 1.0, 0.5]  # Lightning divides short windows by two as well


# ---- running statistics survive a skipped step ----


def rows_with_a_bad_batch(bad: int, factor: float, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(64, width, generator=generator)
    data[bad * 8 : bad * 8 + 8] *= factor
    return data


class Validated(Task):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(self.net, batch, batch_idx)
        self.log("val", loss)
        return loss

    def val_dataloader(self) -> Any:
        return loader(rows_with_a_bad_batch(2, 1.0), 8)


def sgd_small(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.01)


def test_a06_batch_norm_survives_an_fp16_overflow() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    task = Validated(net, rows_with_a_bad_batch(2, 1e5), optimizer=sgd_small)
    ap = scripted()
    buffers: list[dict[str, Tensor]] = []

    class Buffers(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            buffers.append({name: buffer.clone() for name, buffer in pl_module.named_buffers()})

    trainer = cpu(plugins=fp16cpu(128), callbacks=[ap, Buffers()])
    trainer.fit(task)
    assert (ap.skipped_steps, ap.applied_steps) == (1, 7)
    assert_finite(task)
    assert math.isfinite(trainer.callback_metrics["val"])
    assert_same_state(buffers[2], buffers[1])  # the skipped batch left no trace
    assert int(buffers[7]["net.1.num_batches_tracked"]) == 7
    assert ap.precision_map()["net.0"] == "fp32"
    assert [d.unit for d in rows(ap.history, "precision") if d.applied == "fp32"] == ["net.0"]


class RunningMean(nn.Module):
    """A user's own running statistic, written in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.float().flatten(1).mean(1)[:4], alpha=0.1)
        return x


class ReplacedMean(RunningMean):
    """The same, assigned anew in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = (0.9 * self.mean + 0.1 * x.detach().float().flatten(1).mean(1)[:4]).clone()
        return x


class LateMean(RunningMean):
    """The same, from the third batch on: its first write may be the bad one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 2 else x


class UntrackedMean(RunningMean):
    """The same with a buffer that is not part of ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=False)


def vectors(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 1))


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Unflatten(1, (4, 2, 2)), *layers, nn.Flatten(), nn.Linear(16, 1))


STATISTICS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm_1d": lambda: vectors(nn.BatchNorm1d(8)),
    "batch_norm_1d_cumulative": lambda: vectors(nn.BatchNorm1d(8, momentum=None)),
    "batch_norm_2d": lambda: images(nn.BatchNorm2d(4)),
    "batch_norm_3d": lambda: images(nn.Unflatten(1, (4, 1)), nn.BatchNorm3d(4)),
    "instance_norm": lambda: images(nn.InstanceNorm2d(4, track_running_stats=True)),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(3, 8)), nn.Linear(8, 1)),
    "own_in_place": lambda: vectors(RunningMean()),
    "own_replaced": lambda: vectors(ReplacedMean()),
    "own_late": lambda: vectors(LateMean()),
    "own_untracked": lambda: vectors(UntrackedMean()),
    "two_of_them": lambda: vectors(nn.BatchNorm1d(8), RunningMean(), nn.BatchNorm1d(8)),
}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("name", list(STATISTICS))
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a06_a_skipped_batch_might_never_have_been(name: str, factor: float) -> None:
    """Weights and buffers end bit for bit where a run without the bad batch ends."""
    runs = []
    for is_bad in (True, False):
        torch.manual_seed(0)
        net = STATISTICS[name]()
        data = rows_with_a_bad_batch(2, factor)
        if not is_bad:
            data = torch.cat([data[:16], data[24:]])
        ap, task = scripted(), Task(net, data, optimizer=sgd_small)
        cpu(callbacks=[ap]).fit(task)
        assert ap.skipped_steps == is_bad
        runs.append({**state_of(task), **buffers_of(task)})
    assert_same_state(*runs)


@pytest.mark.parametrize("name", ["batch_norm_1d", "batch_norm_2d", "instance_norm", "own_in_place", "own_replaced"])
@pytest.mark.parametrize("bad", [(2,), (0, 2)])
def test_a06_statistics_survive_an_overflow_of_the_scaled_gradient(name: str, bad: tuple[int, ...]) -> None:
    """Here the forward is fine and only the loss scale is too high."""

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return squares(net, batch, index).float() * (1e6 if index in bad else 1.0)

    runs = []
    for is_whole in (True, False):
        torch.manual_seed(0)
        data = rows_with_a_bad_batch(0, 1.0).unflatten(0, (8, 8))
        task = Task(STATISTICS[name](), data.flatten(0, 1), optimizer=sgd_small, loss=loss)
        if not is_whole:
            task.data, task._loss = data[[i for i in range(8) if i not in bad]].flatten(0, 1), squares
        ap = scripted()
        cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(task)
        assert (ap.skipped_steps, ap.applied_steps) == (len(bad) * is_whole, 8 - len(bad))
        runs.append({**state_of(task), **buffers_of(task)})
    assert_finite(task)
    for key, value in runs[1].items():
        torch.testing.assert_close(runs[0][key], value, rtol=1e-3, atol=1e-3)


def test_a06_accumulation_goes_back_to_the_start_of_the_window() -> None:
    """Batch 2 is good, batch 3 is bad: the window (2, 3) leaves no trace."""
    runs = []
    for is_bad in (True, False):
        torch.manual_seed(0)
        data = rows_with_a_bad_batch(3, math.inf)
        if not is_bad:
            data = torch.cat([data[:16], data[32:]])
        ap, task = scripted(), Task(STATISTICS["batch_norm_1d"](), data, optimizer=sgd_small)
        cpu(callbacks=[ap], accumulate_grad_batches=2).fit(task)
        assert ap.skipped_steps == is_bad
        runs.append(state_of(task))
    assert_same_state(*runs)


def test_a06_manual_optimization() -> None:
    runs = []
    for is_bad in (True, False):
        torch.manual_seed(0)
        data = rows_with_a_bad_batch(2, math.inf)
        if not is_bad:
            data = torch.cat([data[:16], data[24:]])
        ap, task = scripted(), Manual(STATISTICS["batch_norm_1d"](), data, optimizer=sgd_small)
        cpu(callbacks=[ap]).fit(task)
        assert ap.skipped_steps == is_bad
        runs.append(state_of(task))
    assert_same_state(*runs)


class TwoNorms(LightningModule):
    """Two nets, two optimizers: the second one's step is skipped in batch 1, the first one's stays."""

    def __init__(self, bad: bool) -> None:
        super().__init__()
        self.a, self.b = vectors(nn.BatchNorm1d(8)), vectors(nn.BatchNorm1d(8))
        self.automatic_optimization = False
        self.bad = bad

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for net, optimizer in zip((self.a, self.b), optimizers, strict=True):
            optimizer.zero_grad()
            factor = math.nan if self.bad and net is self.b and batch_idx == 1 else 1.0
            self.manual_backward(net(batch * factor).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return SGD(self.a.parameters(), lr=0.01), SGD(self.b.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return loader(rows_with_a_bad_batch(0, 1.0)[:24], 8)


def test_a06_with_several_optimizers_an_applied_step_keeps_its_statistics() -> None:
    torch.manual_seed(0)
    good = TwoNorms(bad=False)
    torch.manual_seed(0)
    bad = TwoNorms(bad=True)
    ap = scripted()
    cpu(callbacks=[scripted()]).fit(good)
    cpu(callbacks=[ap]).fit(bad)
    assert (ap.skipped_steps, ap.applied_steps) == (1, 5)
    assert_same_state(state_of(bad.a), state_of(good.a))
    assert_finite(bad.b)
    assert int(state_of(bad.b)["1.num_batches_tracked"]) == 2


def test_a06_first_batch_of_all() -> None:
    ap, task = scripted(), Task(vectors(nn.BatchNorm1d(8), RunningMean()), rows_with_a_bad_batch(0, math.inf))
    cpu(callbacks=[ap]).fit(task)
    assert ap.skipped_steps == 1
    assert_finite(task)


def test_a06_layer_unfrozen_in_mid_run() -> None:
    """Its statistics are written for the first time by the bad batch."""

    class Unfreeze(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.net[1].train(batch_idx >= 2)

    ap, task = scripted(), Task(vectors(nn.BatchNorm1d(8)), rows_with_a_bad_batch(2, math.inf), optimizer=sgd_small)
    cpu(callbacks=[ap, Unfreeze()]).fit(task)
    assert ap.skipped_steps == 1
    assert_finite(task)
