"""Case A-01: what was asked for and what ran.

Time budget: 10 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec import (
    FORMATS,
    Action,
    AutoPrecisionCallback,
)
from autoprec.encoding import feature
from autoprec.units import find_units
from tests.support import (
    Climber,
    Lin,
    Task,
    cpu,
    reported,
    rows,
    scripted,
    watch_dtypes,
)


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    return reported(caplog, monkeypatch)


def test_a01_swapped_half_precision_is_reported_as_what_ran(report: Callable[[], str]) -> None:
    ap, task = scripted(), Lin(64, 8)
    seen = watch_dtypes(task)
    with pytest.warns(UserWarning, match="16-mixed"):
        trainer = cpu(precision="16-mixed", callbacks=[ap])
    trainer.fit(task)
    assert set(seen["net"]) == {torch.bfloat16}
    assert ap.precision_map() == {"net": "bf16"}
    assert "started from bf16-mixed" in report()
    assert "bf16       1 unit, 100.0% of parameters" in report()
    assert "fp16       " not in report()


def test_a01_loss_scale_is_shown_as_disabled_under_bf16(report: Callable[[], str]) -> None:
    ap = scripted()
    cpu(precision="bf16-mixed", callbacks=[ap]).fit(Lin(64, 8))
    assert ap.loss_scale == 1.0
    assert "loss scale not in use" in report()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a01_loss_scale_without_effect_is_masked_for_the_policy(precision: Any) -> None:
    moves = Climber()
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
    moves = Climber()
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
    moves = Climber()
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
