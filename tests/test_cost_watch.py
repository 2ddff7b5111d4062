"""Costs in a fit: when something is measured, what is masked for it (case D-02), what is reported, saved and resumed.

Times are scripted: layers take what the test says. Time budget: 60 s (two processes).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from torch import nn

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, CalibrationConfig, Controller
from autoprec.calibration.attention import AttentionCase
from autoprec.calibration.layer_runs import Choice, LayerRuns
from autoprec.cost_table import CostTable, UnitCost
from autoprec.cost_watch import CostWatch
from autoprec.encoding import feature
from tests.small_fits import differences
from tests.support import Task, all_in, cpu, reported, rows, scripted

ROOT = Path(__file__).parents[1]
Times = Callable[[LayerRuns, Choice], float]


class FakeDevice:
    """Layers take scripted times, and so do steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: Times, step_s: float = 1.0) -> None:
        self.laps = 0
        self.now = 0.0
        self.step_s = step_s
        self._seconds: dict[Any, float] = {}
        in_turn = LayerRuns.in_turn

        def noting(runs: LayerRuns, choice: Choice) -> Any:
            call = in_turn(runs, choice)
            self._seconds[call] = times(runs, choice)
            return call

        monkeypatch.setattr(LayerRuns, "in_turn", noting)
        monkeypatch.setattr("autoprec.calibration.calibrator.make_lap", lambda device: self.lap)
        monkeypatch.setattr("autoprec.cost_watch.perf_counter", self.tick)

    def lap(self, call: Any, count: int) -> float:
        self.laps += 1
        return self._seconds[call]

    def tick(self) -> float:
        self.now += self.step_s
        return self.now


def by_format(**ms: float) -> Times:
    return lambda runs, choice: ms[choice.format] * 1e-3


LOW_PAYS, LOW_COSTS = by_format(fp32=2.0, bf16=1.0), by_format(fp32=1.0, bf16=2.0)


class Lowers(Controller):
    """Lowers every unit at every decision."""

    name = "lowers"

    def __init__(self) -> None:
        self.observations: list[Any] = []

    def decide(self, observation: Any) -> Any:
        self.observations.append(observation)
        return np.where(feature(observation, "knob_precision") == 1, -1, 0)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def task(batches: int = 12, size: int = 4) -> Task:
    return Task(net(), torch.rand(batches * size, 8), size)


def callback(
    policy: Any = None,
    enabled: Any = True,
    formats: Any = ("fp32", "bf16"),
    interval: int = 2,
    knobs: Any = ("precision",),
    **calibration: Any,
) -> AutoPrecisionCallback:
    config = AutoPrecisionConfig(formats=formats, calibration=CalibrationConfig(enabled=enabled, **calibration))
    return AutoPrecisionCallback(policy or Lowers(), knobs=knobs, interval=interval, config=config)


def fitted(ap: AutoPrecisionCallback, module: Task | None = None, **options: Any) -> CostWatch:
    cpu(callbacks=[ap], **options).fit(module or task())
    assert ap.steering is not None
    return ap.steering.costs


@pytest.fixture(autouse=True)
def _may_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.cost_watch.SHORTEST_RUN_S", 30.0)


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    return reported(caplog, monkeypatch)


# ---- the veto ----


def test_d02_what_pays_is_offered(monkeypatch: pytest.MonkeyPatch, report: Callable[[], str]) -> None:
    FakeDevice(monkeypatch, LOW_PAYS)
    ap = callback()
    costs = fitted(ap)
    assert set(ap.precision_map().values()) == {"bf16"}
    assert rows(ap.history, "precision", "refused") == []
    assert costs.table.units == ("net.0", "net.2")
    assert (costs.table.unit_ms("net.0", "fp32"), costs.table.unit_ms("net.0", "bf16")) == (2.0, 1.0)
    assert not costs.has_decided
    assert re.search(r"calibration: 2 layer shapes measured in \d+\.\d s(?!;)", report())


def test_d02_what_does_not_pay_is_masked_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, report: Callable[[], str]
) -> None:
    FakeDevice(monkeypatch, LOW_COSTS)
    ap = callback()
    costs = fitted(ap)
    assert set(ap.precision_map().values()) == {"fp32"}
    refused = rows(ap.history, "precision", "refused")
    assert [(d.unit, d.requested) for d in refused] == [("net.0", "bf16"), ("net.2", "bf16")]
    assert refused[0].reason == (
        "not offered to policies: bf16 does not pay here: 2 ms a step in forward and backward, fp32 1 ms"
    )
    assert costs.has_decided
    assert "timing decided: the same seed may give other formats" in report()
    assert isinstance(ap.controller, Lowers)
    last = ap.controller.observations[-1]
    assert feature(last, "can_lower")[feature(last, "knob_precision") == 1].tolist() == [0.0, 0.0]


def test_d02_each_layer_is_judged_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(runs: LayerRuns, choice: Choice) -> float:
        is_small = '"out_features": 4' in runs._workload.options
        return {"fp32": 1e-3, "bf16": 2e-3 if is_small else 0.2e-3}[choice.format]

    FakeDevice(monkeypatch, times)
    ap = callback()
    fitted(ap)
    assert ap.precision_map() == {"net.0": "bf16", "net.2": "fp32"}


def test_d02_measured_times_go_before_rules_of_thumb(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 is said not to pay at this size, and does."""
    monkeypatch.setattr("autoprec.units.native_formats", lambda device: ("fp32", "bf16", "int8"))
    FakeDevice(monkeypatch, by_format(fp32=3.0, bf16=2.0, int8=1.0))
    ap = callback(formats=("fp32", "bf16", "int8"))
    fitted(ap)
    assert set(ap.precision_map().values()) == {"int8"}


def test_an_explicit_request_is_applied_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch, LOW_COSTS)
    calibration = CalibrationConfig(enabled=True)
    ap = scripted({6: all_in("bf16")}, interval=2, config=AutoPrecisionConfig(calibration=calibration))
    costs = fitted(ap)
    assert costs.table, "it was asked for"
    assert set(ap.precision_map().values()) == {"bf16"}


def test_shares_of_compute_are_shares_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(runs: LayerRuns, choice: Choice) -> float:
        return 3e-3 if '"out_features": 4' in runs._workload.options else 1e-3

    FakeDevice(monkeypatch, times)
    ap = callback()
    fitted(ap)
    assert isinstance(ap.controller, Lowers)
    last = ap.controller.observations[-1]
    share = feature(last, "compute_share")[feature(last, "knob_precision") == 1]
    # not all lowered, since both take as long: no outputs were recorded, and shares fall back to multiplications
    assert share.sum() in (0.0, 1.0)


class Stays(Lowers):
    """Moves nothing, and keeps what it sees."""

    def decide(self, observation: Any) -> Any:
        return 0 * super().decide(observation)


def test_moves_have_their_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch, LOW_PAYS, step_s=0.01)
    ap = callback(Stays(), interval=5)
    fitted(ap, task(batches=30))
    assert isinstance(ap.controller, Stays)
    first, last = ap.controller.observations[0], ap.controller.observations[-1]
    is_unit = feature(last, "knob_precision") == 1
    # 1 ms less of the 4 that the layers take, as long as no step was timed, then of the 10 of a step
    assert feature(first, "cost_lower")[is_unit] == pytest.approx([-2.5, -2.5])
    assert feature(last, "cost_lower")[is_unit] == pytest.approx([-1.0, -1.0], rel=0.01)
    assert feature(last, "cost_higher")[is_unit].tolist() == [0.0, 0.0]
    assert feature(last, "cost_known")[is_unit].tolist() == [1.0, 1.0]


# ---- when ----


@pytest.mark.parametrize(
    ("enabled", "policy", "is_measured"),
    [
        ("auto", "rule", True),
        ("auto", "fixed:bf16", False),
        ("auto", "scripted", False),
        (True, "fixed:bf16", True),
        (False, "rule", False),
    ],
)
def test_who_measures(monkeypatch: pytest.MonkeyPatch, enabled: Any, policy: str, is_measured: bool) -> None:
    device = FakeDevice(monkeypatch, LOW_PAYS)
    ap = scripted(interval=10) if policy == "scripted" else callback(policy, enabled, interval=10)
    costs = fitted(ap, task(30))
    assert (device.laps > 0) is is_measured
    assert bool(costs.table) is is_measured


def test_nothing_is_measured_where_precision_is_not_steered(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, LOW_PAYS)
    config = AutoPrecisionConfig(calibration=CalibrationConfig(enabled=True))
    ap = AutoPrecisionCallback("rule", knobs=("loss_scale",), interval=2, config=config)
    assert not fitted(ap).table
    assert device.laps == 0


@pytest.mark.parametrize(("step_s", "is_measured"), [(0.5, False), (2.0, True)])
def test_short_runs_measure_nothing_by_themselves(
    monkeypatch: pytest.MonkeyPatch, step_s: float, is_measured: bool
) -> None:
    """30 steps of 0.5 s are short."""
    device = FakeDevice(monkeypatch, LOW_PAYS, step_s)
    costs = fitted(callback("rule", "auto", interval=10), task(30))
    assert (device.laps > 0) is is_measured
    assert bool(costs.table) is is_measured


@pytest.mark.parametrize(
    ("options", "budget_s"),
    [
        ({}, 2.0),  # 2 % of 100 s
        ({"max_epochs": 3}, 6.0),
        ({"max_epochs": 300}, 20.0),
        ({"max_epochs": 3, "max_steps": 40}, 0.8),
        ({"max_epochs": 3, "limit_train_batches": 50}, 3.0),
        ({"max_epochs": -1, "max_steps": 60}, 1.2),
        ({"callbacks": [Timer({"seconds": 30})]}, 0.0),  # beside those that are done
    ],
    ids=["plain", "3 epochs", "300 epochs", "40 steps", "50 batches", "60 steps", "timer"],
)
def test_the_budget_is_a_share_of_the_expected_time(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], budget_s: float
) -> None:
    FakeDevice(monkeypatch, LOW_PAYS)
    budgets: list[float] = []
    measure = CostWatch._look

    class Stops(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step > 12

    def noting(costs: CostWatch, budget: float, cases: Sequence[AttentionCase]) -> None:
        budgets.append(budget)
        measure(costs, budget, cases)

    monkeypatch.setattr(CostWatch, "_look", noting)
    ap = callback("rule", "auto", interval=10)
    trainer = cpu(**{**options, "callbacks": [ap, *options.get("callbacks", []), Stops()]})
    trainer.fit(task(100))
    if "callbacks" in options:
        assert 0.0 < budgets[0] <= 0.02 * (12 + 31)
    else:
        assert budgets[0] == pytest.approx(budget_s)


def test_a_budget_of_nothing_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, LOW_PAYS)
    assert not fitted(callback(budget_s=0.0)).table
    assert device.laps == 0


def test_new_rows_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, LOW_PAYS)
    ap = callback(ScriptedWithLook({1: Action(batch_size=16)}), knobs=("precision", "batch_size"))
    module = task(16)
    trainer = cpu(callbacks=[ap], max_epochs=2)
    shapes: list[int] = []

    class Counts(Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            assert ap.steering is not None
            shapes.append(len(ap.steering.costs.calibrator.measured))

    trainer.callbacks.append(Counts())  # type: ignore[attr-defined]
    trainer.fit(module)
    assert device.laps > 0
    assert shapes[0] >= 2
    assert shapes[1] > shapes[0]


class ScriptedWithLook(Controller):
    """Asks for actions at epochs, and looks."""

    name = "epochs"

    def __init__(self, epochs: dict[int, Action]) -> None:
        self._epochs = epochs

    def epoch_action(self, epoch: int) -> Action | None:
        return self._epochs.get(epoch)

    def decide(self, observation: Any) -> None:
        return None


def test_nothing_is_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, LOW_COSTS)
    fitted(callback(), task(8))
    first = device.laps
    costs = fitted(callback(), task(40))
    assert device.laps == first
    assert len(costs.calibrator.from_cache) == 2


def test_under_deterministic_no_clock_is_read(monkeypatch: pytest.MonkeyPatch, report: Callable[[], str]) -> None:
    """The cache still answers."""
    device = FakeDevice(monkeypatch, LOW_COSTS)
    flags = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", flags[1] or ":4096:8")
    try:
        assert not fitted(callback(), deterministic=True).table
        torch.use_deterministic_algorithms(False)
        fitted(callback())
        laps, now = device.laps, device.now
        ap = callback()
        costs = fitted(ap, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(flags[0])
    assert (device.laps, device.now) == (laps, now)
    assert costs.table
    assert set(ap.precision_map().values()) == {"fp32"}
    assert "0 layer shapes measured in 0.0 s, 2 from the cache" in report()


def test_a_compiled_model_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, LOW_COSTS)
    module = task()
    module.net = torch.compile(module.net, backend="eager")  # type: ignore[assignment]
    assert not fitted(callback(), module).table
    assert device.laps == 0


def test_a_cache_that_is_no_use_is_noted(
    monkeypatch: pytest.MonkeyPatch, report: Callable[[], str], tmp_path: Path
) -> None:
    FakeDevice(monkeypatch, LOW_COSTS)
    (tmp_path / "in the way").write_text("")
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path / "in the way"))
    costs = fitted(callback())
    assert costs.table
    assert report().count("could not be kept") == 1


# ---- bits ----


@pytest.mark.parametrize("start", ["32-true", "bf16-mixed"])
def test_looking_and_measuring_change_no_bit(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """As long as no format changes."""
    FakeDevice(monkeypatch, by_format(fp32=1.0, bf16=1.0))
    ends = []
    for enabled in (False, True):
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        module = Task(layers, torch.rand(48, 8), 4)
        fitted(callback(ScriptedWithLook({}), enabled, formats=None), module, precision=start)
        ends.append((module.state_dict(), torch.get_rng_state()))
        assert type(layers[0]) is nn.Linear
    assert differences(ends[0], ends[1]) == []


# ---- prediction ----


def test_steps_are_predicted_and_corrected(monkeypatch: pytest.MonkeyPatch, report: Callable[[], str]) -> None:
    device = FakeDevice(monkeypatch, by_format(fp32=4.0, bf16=1.0), step_s=10e-3)

    class Slower(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            device.step_s = 10e-3 if trainer.global_step < 20 else 40e-3

    ap = callback(ScriptedWithLook({}), interval=10)
    trainer = cpu(callbacks=[ap, Slower()])
    trainer.fit(task(80))
    assert ap.steering is not None
    model = ap.steering.costs.model
    assert model.corrections == 1
    assert model.predict_ms(8.0) == pytest.approx(40.0)
    assert "cost       a step predicted as 40 ms, measured 40 ms; layers keep" in report()
    assert "cost       predictions were off by up to 75% and were corrected: layers times 1, the rest 32 ms" in report()


def test_a_change_of_formats_begins_a_new_median(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch, LOW_PAYS, step_s=10e-3)
    costs = fitted(callback(interval=20), task(60))
    (first, second) = costs.model._seen
    assert (first[0], second[0]) == (4.0, 2.0)


# ---- memory ----


def test_a_memory_budget_masks_what_would_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch, LOW_PAYS)
    fp32 = fitted(callback(ScriptedWithLook({}))).table
    some, most = (fp32.map_bytes(dict.fromkeys(("net.0", "net.2"), name)) for name in ("fp32", "bf16"))
    assert some < most, "copies of weights are larger than the activations of 4 rows"
    ap = callback(memory_budget_bytes=(some + most) // 2)
    fitted(ap)
    assert sorted(ap.precision_map().values()) == ["bf16", "bf16"] or "fp32" in ap.precision_map().values()
    reasons = [d.reason for d in rows(ap.history, "precision", "refused")]
    assert any("bytes of activations and copies" in reason for reason in reasons)


def test_a_slow_format_is_offered_where_memory_must_be_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDevice(monkeypatch, LOW_COSTS)
    module = task(12, size=64)  # activations outweigh weights
    ap = callback(memory_budget_bytes=0)
    fitted(ap, module)
    assert set(ap.precision_map().values()) == {"bf16"}


# ---- resume ----


def test_choices_come_back_from_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = FakeDevice(monkeypatch, LOW_COSTS)
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path / "one"))
    first = callback()
    trainer = cpu(callbacks=[first], max_epochs=1)
    trainer.fit(task())
    trainer.save_checkpoint(tmp_path / "run.ckpt", weights_only=False)
    assert first.steering is not None
    laps, saved = device.laps, first.steering.costs.state_dict()
    torch.load(tmp_path / "run.ckpt", weights_only=True)

    # on another machine everything would be measured otherwise
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path / "two"))
    second = callback()
    cpu(callbacks=[second], max_epochs=2).fit(task(), ckpt_path=str(tmp_path / "run.ckpt"), weights_only=True)
    assert second.steering is not None
    assert device.laps == laps
    assert second.steering.costs.table == first.steering.costs.table
    assert second.steering.costs.has_decided
    assert second.steering.costs.state_dict()["calibrator"] == saved["calibrator"]
    assert set(second.precision_map().values()) == {"fp32"}


def test_a_table_of_another_model_is_cut_down() -> None:
    ap = callback()
    costs = fitted(ap, task(1))
    state = costs.state_dict()
    costs.load_state_dict({})
    table = CostTable({"net.0": {"fp32": UnitCost(1.0)}, "gone": {"fp32": UnitCost(2.0)}})
    costs.load_state_dict({**state, "table": table.to_dict()})
    assert costs.table.units == ("net.0",)


# ---- a real device without fast low precision ----

SLOW = """
import sys
import torch
from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, CalibrationConfig
from tests.support import Task, cpu
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 16))
config = AutoPrecisionConfig(formats=("fp32", "bf16"), calibration=CalibrationConfig(enabled=sys.argv[1] == "yes"))
ap = AutoPrecisionCallback("rule", interval=10, config=config, verbose=False)
cpu(callbacks=[ap]).fit(Task(net, torch.randn(40 * 128, 256), 128))
print(torch.backends.cpu.get_cpu_capability(), sorted(set(ap.precision_map().values())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="instruction sets are limited by environment variables of Linux")
@pytest.mark.parametrize(("enabled", "formats"), [("yes", "['fp32']"), ("no", "['bf16']")])
def test_with_avx2_alone_the_rule_keeps_fp32_because_it_measured(enabled: str, formats: str, tmp_path: Path) -> None:
    limits = dict.fromkeys(("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"), "AVX2") | {"ATEN_CPU_CAPABILITY": "avx2"}
    environment = {**os.environ, **limits, "PYTHONPATH": str(ROOT), "AUTOPREC_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SLOW, enabled],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"AVX2 {formats}"
