"""The guard: what is legal, how long a unit is held, and when skipped steps end a run.

Time budget: 10 s.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.config import ClipConfig, GuardConfig
from autoprec.formats import FORMATS
from autoprec.guard import FOREVER, Guard, Verdict

names = st.sampled_from(sorted(FORMATS))
legal_sets = st.sets(names).map(lambda chosen: tuple(name for name in FORMATS if name in chosen | {"fp32"}))
medians = st.just(math.nan) | st.floats(1e-30, 1e30)


# ---- formats ----


@given(requested=names, legal=legal_sets, end=st.none() | st.integers(FOREVER, 50), applied=st.integers(0, 60))
def test_only_legal_formats_that_the_hold_allows_pass(
    requested: str, legal: tuple[str, ...], end: int | None, applied: int
) -> None:
    guard = Guard()
    if end is not None:
        guard.held["unit"] = end
    outcome, reason = guard.check_format("unit", requested, legal, applied)
    is_held = end is not None and (end == FOREVER or applied < end)
    is_allowed = requested in legal and (not is_held or requested == "fp32")
    assert outcome == ("applied" if is_allowed else "refused")
    assert reason
    assert guard.is_held("unit", applied) == is_held
    assert guard.check_format("other", requested, legal, applied)[0] == ("applied" if requested in legal else "refused")


@given(requested=names, legal=legal_sets)
def test_a_unit_left_alone_takes_nothing(requested: str, legal: tuple[str, ...]) -> None:
    outcome, reason = Guard().check_format("unit", requested, legal, 0, "it is scripted")
    assert outcome == "refused"
    assert "it is scripted" in reason


@given(hold=st.integers(0, 300), at=st.integers(0, 300), later=st.integers(0, 700))
def test_a_hold_lasts_as_long_as_configured(hold: int, at: int, later: int) -> None:
    guard = Guard(GuardConfig(hold=hold))
    guard.hold("unit", at)
    assert guard.is_held("unit", later) == (later < at + hold)
    guard.hold("unit", at, forever=True)
    assert guard.is_held("unit", later)


def test_refusals_say_what_would_be_legal_and_until_when() -> None:
    guard = Guard(GuardConfig(hold=5))
    assert "legal here: fp32, bf16" in guard.check_format("unit", "int8", ("fp32", "bf16"), 0)[1]
    guard.hold("unit", 7)
    assert "until 12 steps were applied" in guard.check_format("unit", "bf16", ("fp32", "bf16"), 8)[1]
    guard.hold("unit", 7, forever=True)
    assert "for the rest of the fit" in guard.check_format("unit", "bf16", ("fp32", "bf16"), 10**6)[1]


# ---- c03: thresholds ----


@given(value=st.floats(), median=medians)
def test_c03_a_threshold_is_positive_and_not_below_the_floor(value: float, median: float) -> None:
    guard = Guard(clip=ClipConfig(floor=0.01))
    applied, outcome, reason = guard.check_clip(value, median)
    assert reason
    if math.isnan(value) or value <= 0:
        assert (applied, outcome) == (None, "refused")
        return
    assert applied is not None
    assert applied > 0
    if math.isnan(median) or value >= 0.01 * median:
        assert (applied, outcome) == (value, "applied")
    else:
        assert (applied, outcome) == (0.01 * median, "limited")


@pytest.mark.parametrize("value", [-1.0, 0.0, -0.0, math.nan, -math.inf])
def test_c03_illegal_values_are_named(value: float) -> None:
    applied, outcome, reason = Guard().check_clip(value, 1.0)
    assert (applied, outcome) == (None, "refused")
    assert repr(value) in reason
    assert "math.inf for off" in reason


def test_c03_off_is_explicit() -> None:
    assert Guard().check_clip(math.inf, 1.0)[:2] == (math.inf, "applied")


# ---- skipped steps ----


@given(limit=st.integers(1, 6), steps=st.lists(st.booleans(), max_size=60))
def test_only_skips_in_a_row_have_consequences(limit: int, steps: list[bool]) -> None:
    """First everything is raised, then, after as many again, training stops."""
    guard, run, is_wide = Guard(GuardConfig(max_consecutive_skips=limit)), 0, False
    for is_skipped in steps:
        if not is_skipped:
            guard.on_applied()
            run = 0
            continue
        run += 1
        verdict = guard.on_skipped(is_wide)
        if run < limit:
            assert verdict is Verdict.CONTINUE
        elif is_wide:
            assert verdict is Verdict.STOP
            return
        else:
            assert verdict is Verdict.RAISE_ALL
            is_wide, run = True, 0
        assert guard.is_all_raised == is_wide
        assert guard.consecutive_skips == run


def test_a_run_in_fp32_stops_without_a_second_chance() -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=3))
    assert [guard.on_skipped(True) for _ in range(3)] == [Verdict.CONTINUE, Verdict.CONTINUE, Verdict.STOP]


@given(
    skips=st.integers(0, 30),
    holds=st.dictionaries(st.text(min_size=1, max_size=4), st.integers(FOREVER, 100), max_size=4),
    wide=st.booleans(),
)
def test_state_round_trip(skips: int, holds: dict[str, int], wide: bool) -> None:
    guard = Guard(skips={0: skips, 1: 1}, is_all_raised=wide, held=holds)
    other = Guard()
    other.load_state_dict(guard.state_dict())
    assert other == guard
    other.hold("new", 3)
    assert "new" not in guard.held


def test_each_optimizer_counts_for_itself() -> None:
    """One that never takes a step stops the run, whatever the others do."""
    guard = Guard(GuardConfig(max_consecutive_skips=3))
    verdicts = []
    for _ in range(3):
        guard.on_applied(0)
        verdicts.append(guard.on_skipped(True, optimizer=1))
    assert verdicts == [Verdict.CONTINUE, Verdict.CONTINUE, Verdict.STOP]
    guard.on_skipped(True, optimizer=1)
    guard.on_applied(1)
    assert guard.consecutive_skips == 0


def test_a_loss_scale_on_its_way_down_is_no_reason_to_stop() -> None:
    guard = Guard(GuardConfig(max_consecutive_skips=2))
    assert [guard.on_skipped(True, is_backing_off=True) for _ in range(50)] == [Verdict.CONTINUE] * 50
    assert [guard.on_skipped(True) for _ in range(2)] == [Verdict.CONTINUE, Verdict.STOP]
    assert [guard.on_skipped(False, is_backing_off=True) for _ in range(2)] == [Verdict.CONTINUE, Verdict.RAISE_ALL]
