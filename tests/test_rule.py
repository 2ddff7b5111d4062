"""The rule: when it lowers, when it raises, and how long it waits.

Time budget: 5 s.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoprec.config import AutoPrecisionConfig, GuardConfig, RuleConfig
from autoprec.encoding import GlobalReading, UnitReading, decode, encode
from autoprec.rule import RuleController

STABLE = UnitReading(
    name="net.0",
    kind="linear",
    format="bf16",
    legal=("fp32", "bf16", "fp16"),
    grad_amax=0.01,
    grad_norm=1.0,
    grad_norm_history=(1.0, 1.1, 0.9, 1.0) * 4,
    underflow_fraction=0.0,
    act_amax=10.0,
    act_amax_history=(10.0, 10.0, 10.0),
    steps_since_change=500,
)
RUN = GlobalReading(losses=(1.0,) * 8, norms=(1.0,) * 20, clip_threshold=1.5)


def move(unit: UnitReading, controller: RuleController | None = None, run: GlobalReading = RUN) -> int:
    moves = (controller or RuleController()).decide(encode([unit], run))
    assert moves[1:3].tolist() == [0, 0]
    return int(moves[0])


def test_lowers_what_is_stable_and_has_headroom() -> None:
    assert move(STABLE) == -1
    assert move(replace(STABLE, format="fp32")) == -1


@pytest.mark.parametrize(
    "change",
    [
        {"grad_norm_history": (0.1, 0.1, 0.1, 8.0) * 4},
        {"grad_norm_history": (1.0,) * 7},
        {"grad_norm_history": ()},
        {"grad_norm_history": (1.0,) * 15 + (math.inf,)},
        {"grad_amax": math.nan},
        {"grad_amax": 65504.0 / 2},
        {"act_amax": 65504.0 / 2},
        {"act_amax": math.inf, "format": "fp32"},
        {"act_amax": 2000.0, "act_amax_history": (10.0, 200.0, 2000.0)},
        {"underflow_fraction": 0.2},
        {"underflow_fraction_lower": 0.2},
        {"weight_subnormal_lower": 0.2},
        {"nonfinite_count": 1},
        {"held": True},
        {"legal": ("fp32", "bf16")},
        {"frozen": True, "act_amax": math.nan},
    ],
    ids=lambda change: ",".join(change),
)
def test_leaves_alone(change: dict[str, Any]) -> None:
    assert move(replace(STABLE, **change)) == 0


def test_output_that_was_not_sampled_does_not_hold_a_unit_back() -> None:
    assert move(replace(STABLE, act_amax=math.nan, act_amax_history=())) == -1


def test_frozen_unit_is_lowered_on_headroom_alone() -> None:
    frozen = replace(STABLE, frozen=True, grad_amax=math.nan, grad_norm=math.nan, grad_norm_history=())
    assert move(frozen) == -1
    assert move(replace(frozen, act_amax=65504.0 / 2)) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"overflow_count": 1},
        {"overflow_count": 1, "held": True},
        {"underflow_fraction": 0.3},
        {"act_amax": math.inf},
        {"format": "fp16", "act_amax": 60000.0, "act_amax_history": (15000.0, 30000.0, 60000.0)},
    ],
    ids=lambda change: ",".join(change),
)
def test_raises(change: dict[str, Any]) -> None:
    assert move(replace(STABLE, **change)) == 1


def test_raises_rather_than_lowers_where_the_lower_format_has_more_range() -> None:
    leaving = replace(STABLE, format="fp16", legal=("bf16", "fp16", "fp8"), act_amax=1e5)
    assert move(leaving) == 1


def test_does_not_raise_fp32() -> None:
    assert move(replace(STABLE, format="fp32", overflow_count=1)) == 0


def test_g02_growing_outputs_are_raised_before_they_overflow() -> None:
    """Outputs grow by 2 % a step towards a spike at step 200. The unit leaves fp16 while all of them still fit."""
    controller = RuleController()
    for step in range(20, 200):
        history = tuple(1300.0 * 1.02**s for s in range(step - 20, step))
        unit = replace(STABLE, format="fp16", act_amax=history[-1], act_amax_history=history)
        if move(unit, controller) == 1:
            break
    assert 65504 / 2 < history[-1] < 65504


def test_thresholds_come_from_the_config() -> None:
    spread = replace(STABLE, grad_norm_history=(1.0, 2.0) * 8)
    assert move(spread) == -1
    assert move(spread, RuleController(AutoPrecisionConfig(rule=RuleConfig(stable_cv=0.2)))) == 0
    assert move(STABLE, RuleController(AutoPrecisionConfig(rule=RuleConfig(headroom_bits=14.0)))) == 0
    guard = GuardConfig(underflow_fraction=0.5)
    assert move(replace(STABLE, underflow_fraction=0.3), RuleController(AutoPrecisionConfig(guard=guard))) == 0


def test_waits_after_a_raise_and_longer_after_each_further_one() -> None:
    controller = RuleController()
    bad, good = replace(STABLE, overflow_count=1), replace(STABLE, format="fp32")
    for wait in (200, 400, 800):
        assert move(bad, controller) == 1
        assert move(replace(good, steps_since_change=wait - 1), controller) == 0
        assert move(replace(good, steps_since_change=wait), controller) == -1
    for _ in range(50):
        move(bad, controller)
    assert move(replace(good, steps_since_change=200 * 64), controller) == -1


def test_does_not_wait_before_it_has_raised() -> None:
    assert move(replace(STABLE, steps_since_change=0)) == -1


def test_lowers_all_that_may_be_lowered_at_once_and_raises_one_alone() -> None:
    units = [replace(STABLE, name=f"net.{index}") for index in range(5)]
    units[2] = replace(units[2], overflow_count=1)
    units[3] = replace(units[3], held=True)
    moves = RuleController().decide(encode(units, RUN))
    assert moves.tolist() == [-1, -1, 1, 0, -1, 0, 0, 0]
    assert decode(moves, units, RUN).precision == {"net.0": "fp16", "net.1": "fp16", "net.2": "fp32", "net.4": "fp16"}


@pytest.mark.parametrize("count", [0, 3, 7, 40])
def test_e02_any_number_of_units(count: int) -> None:
    moves = RuleController().decide(encode([STABLE] * count, RUN))
    assert moves.tolist() == [-1] * count + [0, 0, 0]


def test_c06_loosens_a_clip_that_always_acts() -> None:
    run = replace(RUN, norms=(20.0,) * 50, clip_threshold=1.0, clipped_share=1.0)
    moves = RuleController().decide(encode([], run))
    assert moves.tolist() == [0, 0, 1]
    assert decode(moves, [], run).clip == 20.0
    for other in (replace(run, clipped_share=0.9), replace(run, clip_threshold=math.inf), replace(run, norms=())):
        assert RuleController().decide(encode([], other)).tolist() == [0, 0, 0]


@given(values=st.lists(st.floats() | st.sampled_from([math.nan, math.inf]), min_size=6, max_size=6))
def test_e01_non_finite_readings_give_legal_moves(values: list[float]) -> None:
    unit = replace(STABLE, grad_amax=values[0], act_amax=values[1], grad_norm_history=tuple(values[2:]))
    run = replace(RUN, losses=tuple(values), norms=tuple(values), clipped_share=values[0])
    moves = RuleController().decide(encode([unit], run))
    assert set(moves.tolist()) <= {-1, 0, 1}


def test_resumes_by_unit_name(tmp_path: Path) -> None:
    legal = [("fp32", "bf16", "fp16")] * 2
    first = RuleController()
    first.start(["a", "b"], legal)
    first.decide(encode([replace(STABLE, overflow_count=1), STABLE], RUN))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    fresh = replace(STABLE, steps_since_change=10)
    resumed = RuleController()
    resumed.start(["a", "b"], legal)
    resumed.load_state_dict(state)
    assert resumed.decide(encode([fresh, fresh], RUN)).tolist()[:2] == [0, -1]
    resumed.start(["a", "b"], legal)  # the next run knows nothing of it
    assert resumed.decide(encode([fresh, fresh], RUN)).tolist()[:2] == [-1, -1]


def test_a_new_run_starts_without_memory() -> None:
    controller = RuleController()
    controller.start(["a"], [STABLE.legal])
    assert move(replace(STABLE, overflow_count=1), controller) == 1
    controller.start(["a"], [STABLE.legal])
    assert move(replace(STABLE, steps_since_change=0), controller) == -1
