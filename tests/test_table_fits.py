"""The table policy in real fits in which the right answer is known.

Times are scripted where a test does not say otherwise: what the machine computes itself must not decide.
Time budget: 30 s.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from autoprec import (
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    CalibrationConfig,
    ClipConfig,
    Controller,
    GuardConfig,
    LossScaleConfig,
    NonFiniteTrainingError,
    ScriptedController,
    TableConfig,
)
from autoprec.cost_watch import CostWatch
from autoprec.encoding import feature
from autoprec.table import Proposal
from autoprec.table_policy import TableController
from tests.resumed import STOP, Setup, assert_resumes
from tests.small_fits import Plain, StatefulLoader, assert_identical, callback_of, outcome, quiet, seed
from tests.support import Lin, Manual, Task, fp16cpu, loader, reported, rows
from tests.test_cost_watch import FakeDevice, by_format
from tests.zoo_models import GAN

# a resumed run has no ModelCheckpoint
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning")
LOW_PAYS = {"fp32": 2.0, "bf16": 1.0, "fp16": 0.8}


def scripted_times(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
    def relative_times(costs: CostWatch, unit_name: str, formats: Iterable[str]) -> dict[str, float]:
        now = times[costs._unit_formats.current[unit_name]]
        return {name: times[name] / now for name in formats}

    monkeypatch.setattr(CostWatch, "relative_times", relative_times)
    monkeypatch.setattr("autoprec.collect.why_unprofitable", lambda *_: None)


@pytest.fixture(autouse=True)
def _low_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_times(monkeypatch, LOW_PAYS)


def table(*formats: str, policy: Any = "table", table: Any = None, **options: Any) -> AutoPrecisionCallback:
    config = {"formats": formats or ("fp32", "bf16"), "table": table or TableConfig(), **options.pop("config", {})}
    settings = {"interval": 3, "verbose": False, "knobs": ("precision", "loss_scale"), **options}
    return AutoPrecisionCallback(policy, config=AutoPrecisionConfig(**config), **settings)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def fitted(callback: AutoPrecisionCallback, module: Any = None, **options: Any) -> AutoPrecisionCallback:
    seed()
    others = options.pop("callbacks", [])
    module = Task(mlp(), torch.randn(96, 8)) if module is None else module()
    quiet(**{"max_epochs": 1, "callbacks": [callback, *others], **options}).fit(module)
    return callback


# ---- formats ----


def test_a_cheap_and_harmless_format_is_taken_at_the_first_decision() -> None:
    callback = fitted(table())
    moves = rows(callback.history, "precision")
    assert [(d.unit, d.applied, d.outcome, d.step) for d in moves] == [
        (f"net.{index}", "bf16", "applied", 4) for index in (0, 2, 4)
    ]
    for move in moves:
        assert move.reason.startswith("policy 'table': error 0.00")
        assert move.reason.endswith("(limit 0.1), 0.5 x its time in fp32")


def test_exactly_the_layer_with_a_huge_range_stays_wide() -> None:
    def fragile() -> Task:
        net = mlp()
        with torch.no_grad():
            net[2].weight.mul_(1e7)  # type: ignore[operator]
        return Task(net, torch.randn(96, 8))

    callback = fitted(table("fp32", "fp16"), fragile)
    assert callback.precision_map() == {"net.0": "fp16", "net.2": "fp32", "net.4": "fp16"}
    assert callback.skipped_steps == 0
    assert callback.steering is not None
    assert callback.steering.rounding.errors["net.2"].relative["fp16"] == 2.0


def test_exactly_the_layer_with_a_large_mean_stays_wide() -> None:
    """bf16 has the range but not the digits for what varies around a mean of 200."""
    callback = fitted(table(), lambda: Task(mlp(), torch.randn(96, 8) + 200.0))
    assert callback.precision_map() == {"net.0": "fp32", "net.2": "bf16", "net.4": "bf16"}
    callback = fitted(table("fp32", "bf16", "fp16"), lambda: Task(mlp(), torch.randn(96, 8) + 200.0))
    assert callback.precision_map() == dict.fromkeys(("net.0", "net.2", "net.4"), "fp16")


def test_measured_times_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    calibration = {"calibration": CalibrationConfig(enabled=True, cache=False)}
    for bf16_ms, expected in ((1.0, "bf16"), (1.99, "fp32"), (3.0, "fp32")):
        with pytest.MonkeyPatch.context() as patch:
            FakeDevice(patch, by_format(fp32=2.0, bf16=bf16_ms))
            callback = fitted(table(config=calibration))
        assert set(callback.precision_map().values()) == {expected}, bf16_ms


@pytest.mark.parametrize(
    ("ratio", "native", "expected"),
    [(2.0, ("fp32", "bf16"), "bf16"), (1.0, ("fp32", "bf16"), "fp32")]
    + [(None, ("fp32", "bf16"), "fp32"), (2.0, ("fp32",), "fp32")],
    ids=["faster", "no faster", "not stated", "emulated"],
)
def test_without_measured_times_the_stated_rates_count(
    monkeypatch: pytest.MonkeyPatch, ratio: float | None, native: tuple[str, ...], expected: str
) -> None:
    class Stated:
        def ratio(self, format_name: str) -> float | None:
            return ratio

    def reads() -> Task:
        net = nn.Sequential(nn.Embedding(16, 8), nn.Flatten(), nn.Linear(32, 4))
        return Task(net, torch.randint(16, (96, 4)))

    monkeypatch.undo()
    monkeypatch.setattr("autoprec.collect.why_unprofitable", lambda *_: None)
    monkeypatch.setattr("autoprec.units.native_formats", lambda device: native)
    monkeypatch.setattr("autoprec.cost_watch.describe", lambda device: Stated())
    callback = fitted(table(config={"calibration": CalibrationConfig(enabled=False)}), reads)
    assert callback.precision_map() == {"net.0": "fp32", "net.2": expected}, "a table is only read"


def outcome_of(callback: AutoPrecisionCallback, make: Callable[[], Any], **options: Any) -> Any:
    seed()
    module = make()
    trainer = quiet(**{"max_epochs": 1, "callbacks": [callback], **options})
    trainer.fit(module)
    return outcome(trainer, module)


@pytest.mark.parametrize("make", [lambda: Task(mlp(), torch.randn(96, 8)), lambda: Manual(mlp(), torch.randn(96, 8))])
@pytest.mark.parametrize("case", ["nothing pays", "nothing is accurate"])
def test_where_nothing_moves_training_is_the_same_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, case: str, make: Callable[[], Any]
) -> None:
    if case == "nothing pays":
        scripted_times(monkeypatch, {"fp32": 1.0, "bf16": 1.0})
    callback = table(table=TableConfig(threshold=0.1 if case == "nothing pays" else 1e-9, probe_every=1))
    looked = outcome_of(callback, make)
    assert callback.steering is not None
    assert callback.steering.rounding.errors["net.0"].relative["bf16"] > 0
    assert not rows(callback.history, "precision")
    assert_identical(looked, outcome_of(table(policy=ScriptedController()), make))


class Copies(Task):
    """Copies and pickles its layers in the middle of a step, as some average their weights."""

    def __init__(self) -> None:
        super().__init__(mlp(), torch.randn(96, 8))
        self.copies: list[nn.Module] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.save(self.net, io.BytesIO())
        self.copies.append(copy.deepcopy(self.net))
        return super().training_step(batch, batch_idx)


def test_copies_of_layers_made_in_a_look_hold_nothing_of_it() -> None:
    seed()
    module = Copies()
    quiet(max_epochs=1, callbacks=[table(table=TableConfig(probe_every=1))]).fit(module)
    assert not any(layer._forward_hooks for each in module.copies for layer in each.modules())


@pytest.mark.filterwarnings("ignore:.*everything runs in fp32", "ignore:.*no step was applied")
def test_copies_of_layers_made_while_the_origin_of_skipped_steps_is_sought_hold_nothing_of_it() -> None:
    seed()
    module = Copies()
    module._loss = lambda net, batch, index: net(batch).sum() * math.nan
    with pytest.raises(NonFiniteTrainingError):
        quiet(max_epochs=5, callbacks=[table()]).fit(module)
    assert not any(layer._forward_hooks for each in module.copies for layer in each.modules())
    assert not nn.modules.module._has_any_global_hook()


class OwnLoss(nn.Module):
    """A layer with a matrix that puts out the loss, a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).square().mean()


def test_a_layer_may_put_out_a_single_number() -> None:
    def module() -> Task:
        net = nn.Sequential(*mlp(), OwnLoss())
        return Task(net, torch.randn(96, 8), loss=lambda net, batch, index: net(batch))

    callback = fitted(table(), module)
    assert callback.steering is not None
    assert callback.steering.rounding.errors["net.5"].relative["bf16"] > 0


class Unusual(torch.optim.SGD):
    """Has settings under the names of Adam's that mean something else, as Adafactor and CAME have."""

    def __init__(self, parameters: Any, settings: dict[str, Any]) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group.update(settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)
            self.state[parameter] = {"exp_avg_sq": "elsewhere", "step": None}
        return loss


@pytest.mark.parametrize(
    "settings",
    [{"lr": None}, {"betas": None}, {"betas": (None, 0.9)}, {"betas": (0.9, 0.99, 0.999), "eps": (1e-30, 1e-16)}],
    ids=str,
)
def test_optimizers_with_settings_of_their_own(settings: dict[str, Any]) -> None:
    def unusual() -> Task:
        return Task(mlp(), torch.randn(96, 8), optimizer=lambda parameters: Unusual(parameters, settings))

    callback = fitted(table(), unusual)
    assert callback.applied_steps == 12
    assert set(callback.precision_map().values()) == {"bf16"}


def test_errors_are_looked_at_as_often_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    callback = table(table=TableConfig(probe_every=2), interval=2)
    count = LambdaCallback(
        on_train_batch_start=lambda *_: looks.append(callback.steering.rounding.is_wanted)  # type: ignore[union-attr]
    )
    fitted(callback, callbacks=[count], limit_train_batches=12)
    windows = [index for index, is_wanted in enumerate(looks) if is_wanted]
    assert windows == [2, 8], "decisions fall into windows 3, 6, 9 and 12"


# ---- overflow ----


def test_an_overflow_is_raised_held_and_tried_again() -> None:
    data = torch.randn(240, 8)
    data[100] = 1e5
    settings = {"guard": GuardConfig(hold=8)}
    callback = fitted(table("fp32", "fp16", config=settings), lambda: Task(mlp(), data))
    history = rows(callback.history, "precision")
    raised = [d for d in history if d.reason.startswith("guard")]
    assert raised
    assert [d.applied for d in raised] == ["fp32"] * len(raised)
    again = [d for d in history if d.unit == raised[0].unit and d.step > raised[0].step]
    assert [d.applied for d in again] == ["fp16"]
    assert again[0].step >= raised[0].step + 8
    assert not [d for d in history if d.outcome == "refused"]


def test_the_loss_scale_is_as_large_as_the_gradients_let_it() -> None:
    callback = fitted(table("fp32", "fp16"))
    (first, *_) = (d for d in rows(callback.history, "loss_scale") if d.reason.startswith("policy"))
    assert first.reason == "policy 'table': 3 bits above the largest gradient"
    assert callback.skipped_steps == 0
    assert callback.steering is not None
    largest = max(unit.gradient_amax for unit in callback.steering.rounding.errors.values())
    assert 65504 / 32 < callback.loss_scale * largest <= 65504 / 4


def test_a_loss_scale_that_the_loss_itself_does_not_bear_is_not_set_again_and_again() -> None:
    """An fp16 loss gets the scale as its gradient, which no layer's gradient shows."""

    def small() -> Task:
        return Task(mlp(), torch.randn(240 * 8, 8), loss=lambda net, batch, index: (net(batch) * 1e-4).abs().mean())

    callback = fitted(table("fp32", "fp16", interval=2), small)
    history: list[Any] = rows(callback.history, "loss_scale")
    raised = [d for d in history if d.reason.startswith("policy")]
    assert raised[0].applied == 2.0**24
    assert all(d.applied <= 4 * d.before for d in raised[1:])
    assert 1 < len(raised) < 5
    assert callback.skipped_steps < 9 + 3 * len(raised)
    assert set(callback.precision_map().values()) == {"fp16"}


@pytest.mark.parametrize("how", ["setting", "scaler", "request"])
def test_a_loss_scale_of_the_users_stays(how: str) -> None:
    config = {"loss_scale": LossScaleConfig(init_scale=128.0)} if how == "setting" else {}
    options: dict[str, Any] = {"plugins": [fp16cpu(128.0)]} if how == "scaler" else {}
    callback = table("fp32", "fp16", config=config)

    def ask(trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 0 and how == "request":
            callback.request(Action(loss_scale=128.0))

    options["callbacks"] = [LambdaCallback(on_train_batch_start=ask)]
    fitted(callback, **options)
    assert callback.loss_scale == 128.0
    assert set(callback.precision_map().values()) == {"fp16"}


# ---- clip and batch size ----


def test_the_clip_threshold_goes_on_following_the_median() -> None:
    callback = fitted(table(knobs=("clip",), config={"clip": ClipConfig(min_norms=4)}))
    (row,) = (d for d in rows(callback.history, "clip") if d.reason.startswith("policy"))
    assert row.reason == "policy 'table': 1 x the running median"
    assert callback.steering is not None
    assert callback.clip_threshold == pytest.approx(callback.steering.telemetry.median_norm)


@pytest.mark.parametrize("how", ["trainer", "setting", "request"])
def test_a_clip_threshold_of_the_users_stays(how: str) -> None:
    clip = ClipConfig(min_norms=4, multiplier=2.0 if how == "setting" else 1.5)
    callback = table(knobs=("clip",), config={"clip": clip})
    options: dict[str, Any] = {"gradient_clip_val": 0.25} if how == "trainer" else {}

    def ask(trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 0 and how == "request":
            callback.request(Action(clip=0.25))

    fitted(callback, callbacks=[LambdaCallback(on_train_batch_start=ask)], **options)
    assert not [d for d in rows(callback.history, "clip") if d.reason.startswith("policy")]
    if how != "setting":
        assert callback.clip_threshold == 0.25


def test_the_batch_size_is_left_alone_unless_there_is_a_schedule() -> None:
    sizes: list[int | None] = []

    def run(settings: TableConfig) -> AutoPrecisionCallback:
        sizes.clear()
        callback = table(table=settings, knobs=("batch_size",))
        note = LambdaCallback(on_train_epoch_end=lambda *_: sizes.append(callback.batch_size))
        return fitted(callback, callbacks=[note], max_epochs=4)

    assert not rows(run(TableConfig()).history, "batch_size")
    assert sizes == [8] * 4
    callback = run(TableConfig(schedule=(0.15, 0.6)))
    assert sizes == [8, 16, 16, 32]
    assert [d.applied for d in rows(callback.history, "batch_size", "applied")] == [16, 32]


# ---- what a learned policy sees ----


class Sees(TableController):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__(AutoPrecisionConfig(formats=("fp32", "bf16"), table=TableConfig(probe_every=1)))
        self.observations: list[Any] = []
        self.proposals: list[Proposal] = []

    def decide(self, observation: Any) -> Any:
        self.observations.append(observation)
        assert self._proposal is not None
        self.proposals.append(self._proposal)
        return super().decide(observation)


def test_rows_have_errors_and_proposals() -> None:
    sees = Sees()
    fitted(table(policy=sees, interval=4))
    first, second = sees.observations[:2]
    units = feature(first, "knob_precision") == 1
    assert feature(first, "error_known")[units].tolist() == [1.0] * 3
    assert feature(first, "error")[units].tolist() == [-1.0] * 3, "fp32 makes none"
    low = feature(first, "error_lower")[units]
    assert ((low > -0.6) & (low < 0.3)).all(), "that of bf16 is about 2 ** -9"
    assert feature(first, "proposal")[units].tolist() == [-1.0] * 3
    assert feature(second, "proposal")[units].tolist() == [0.0] * 3
    # what was measured in fp32 is remembered in bf16, where there is nothing left to round
    np.testing.assert_allclose(feature(second, "error")[units], low, atol=0.3)
    assert set(sees.proposals[0].formats.values()) == {"bf16"}


class Proposes(Controller):
    """A controller of the user's with a proposal of its own, which moves nothing."""

    name = "proposes"

    def __init__(self) -> None:
        self.observations: list[Any] = []

    def propose(self, units: Any, run: Any) -> Proposal:
        return Proposal(formats={"net.2": "bf16", "nobody": "bf16"}, clip=8.0 * run.median_norm)

    def decide(self, observation: Any) -> None:
        self.observations.append(observation)


def test_anybody_may_propose() -> None:
    proposes = Proposes()
    callback = fitted(table(policy=proposes, knobs=("precision", "clip")))
    assert feature(proposes.observations[0], "proposal").tolist() == [0.0, -1.0, 0.0, 0.0, 0.0, -1.0]
    assert not rows(callback.history, "precision"), "a proposal alone changes nothing"


def test_step_times_are_relative_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, by_format(fp32=2.0, bf16=1.0), step_s=0.01)

    class Slows(Proposes):
        def decide(self, observation: Any) -> None:
            super().decide(observation)
            device.step_s = 0.04

    slows = Slows()
    calibration = {"calibration": CalibrationConfig(enabled=True, cache=False)}
    fitted(table(policy=slows, interval=40, config=calibration), lambda: Task(mlp(), torch.randn(1000, 8)))
    known = [feature(each, "step_time_known")[0] for each in slows.observations]
    assert known == [1.0] * 3
    assert [feature(each, "step_time")[0] for each in slows.observations] == pytest.approx([0.0, 0.5, 0.5])


def test_deterministic_runs_read_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Lightning sets it
    monkeypatch.setattr("autoprec.cost_watch.perf_counter", lambda: pytest.fail("a clock was read"))
    proposes = Proposes()
    fitted(table(policy=proposes), deterministic=True)
    torch.use_deterministic_algorithms(False)
    assert feature(proposes.observations[-1], "step_time_known")[0] == 0.0


# ---- any run ----


class Bare(Plain):
    """Nothing to steer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ParameterList([torch.ones(8, 2)])  # type: ignore[assignment]

    def loss(self, batch: Any) -> Tensor:
        loss: Tensor = (batch[0] @ self.net[0] - batch[1]).square().mean()
        return loss


def test_without_layers_loss_scale_and_clip_are_still_steered() -> None:
    callback = table(knobs=("precision", "loss_scale", "clip"), config={"clip": ClipConfig(min_norms=4)})
    seed()
    data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 2))
    quiet(max_epochs=1, callbacks=[callback]).fit(Bare(), loader(data))
    assert not rows(callback.history, "precision")
    assert rows(callback.history, "clip")[-1].reason == "policy 'table': 1 x the running median"


def test_with_every_knob_masked_training_is_the_same_bit_for_bit() -> None:
    make = lambda: Task(mlp(), torch.randn(96, 8))  # noqa: E731
    plain = outcome_of(AutoPrecisionCallback(ScriptedController(), knobs=(), verbose=False), make)
    callback = table(knobs=())
    assert_identical(outcome_of(callback, make), plain)
    assert callback.steering is not None
    assert not callback.steering.rounding.errors


def test_several_optimizers_under_manual_optimization() -> None:
    seed()
    callback = table()
    batches = [{"pixel_values": torch.randn(2, 3, 32, 32)} for _ in range(8)]
    quiet(max_epochs=1, callbacks=[callback]).fit(GAN(), loader(batches, None))
    lowered = {d.unit for d in rows(callback.history, "precision", "applied")}
    assert {"generator.0", "discriminator.0", "discriminator.3"} <= lowered


def test_accumulation_and_a_frozen_layer() -> None:
    def frozen() -> Task:
        net = mlp()
        net[0].requires_grad_(False)
        return Task(net, torch.randn(320, 8))

    callback = fitted(table(), frozen, accumulate_grad_batches=4)
    assert set(callback.precision_map().values()) == {"bf16"}, "no gradient is needed to know what a frozen layer loses"


def test_a_layer_that_is_never_called_stays() -> None:
    class Idle(Task):
        def __init__(self) -> None:
            super().__init__(mlp(), torch.randn(96, 8))
            self.idle = nn.Linear(4, 4)

    callback = fitted(table(), Idle)
    assert callback.precision_map()["idle"] == "fp32"


@pytest.mark.parametrize("where", ["propose", "decide", "wants_errors", "reasons"])
def test_a_fault_in_the_table_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError(where)

    monkeypatch.setattr(TableController, where, fails)
    callback = table(interval=2)
    with pytest.warns(UserWarning, match="policy 'table' failed"):
        fitted(callback)
    assert callback.applied_steps == 12
    (fault,) = (d for d in callback.history if d.knob == "policy")
    assert "ZeroDivisionError" in fault.reason
    if where == "propose":
        assert set(callback.precision_map().values()) == {"fp32"}


@pytest.mark.parametrize("stop", [6, 12, STOP])
def test_resumes(stop: int, tmp_path: Path) -> None:
    """From between a look and its decision, and while a raised unit waits."""

    def callback() -> AutoPrecisionCallback:
        config = {"guard": GuardConfig(hold=10), "clip": ClipConfig(min_norms=4)}
        knobs = ("precision", "loss_scale", "clip")
        settings = TableConfig(probe_every=2)
        return table("fp32", "bf16", "fp16", table=settings, config=config, interval=5, knobs=knobs)

    through = assert_resumes(Setup(callback, data=lambda: StatefulLoader(spikes=(30,))), tmp_path, stop)
    assert through.callback is not None
    steps = {d.step for d in rows(through.callback.history, "precision", "applied")}
    assert len(steps) > 1, "something was raised and lowered again"


class AsksForAScale(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            callback_of(trainer).request(Action(loss_scale=128.0))


def test_what_was_requested_is_still_the_users_after_a_resume(tmp_path: Path) -> None:
    setup = Setup(lambda: table("fp32", "fp16", interval=5), data=StatefulLoader, others=(AsksForAScale,))
    through = assert_resumes(setup, tmp_path)
    assert through.callback is not None
    assert through.callback.loss_scale == 128.0
    assert rows(through.callback.history, "precision", "applied")


def test_the_end_says_what_was_measured(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    report = reported(caplog, monkeypatch)
    fitted(table(verbose=True))
    assert "  plan       errors of 3 layers measured once, limit 0.1" in report()
    fitted(table(verbose=True, interval=100), lambda: Lin(8, 4))
    assert "errors were not measured: no layer had a choice of formats when a decision was due" in report()
    assert math.isinf(table().clip_threshold)
