"""Costs from the times of whole steps: the filter against regression, the prior against what it should believe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autoprec.cost_estimate import COMMON_SD, TIME_SD, UNIT_SD, CostEstimate, StepTimes

Array = NDArray[Any]

RUNS, UNITS, LEVELS, BATCHES = 2, 3, 4, 2
GUESS = np.array([1.0, 0.6, 0.6, 0.5])
SHARE = np.array([0.5, 0.3, 0.2])
GROWTH = np.array([1.0, 1.7])


def step_times(runs: int = RUNS) -> StepTimes:
    return StepTimes(
        times=np.tile([1.0, 1.5], (runs, 1)),
        covariance=np.tile(np.diag([1e-4, 1e-2]), (runs, 1, 1)),
        growth=np.tile(GROWTH, (runs, 1)),
    )


def estimate(table: Array | None = None, units: int = UNITS) -> CostEstimate:
    """Estimates of two runs; the first has a table, if any is passed, the second none."""
    made = CostEstimate(RUNS, units, LEVELS, BATCHES)
    share = np.zeros((RUNS, units))
    share[:, :UNITS] = SHARE
    told = np.full((RUNS, units, LEVELS), np.nan)
    if table is not None:
        told[0, :UNITS] = table
    guess = np.tile(GUESS, (RUNS, 1))
    made.begin(np.arange(RUNS), share, guess, told, np.array([0.8, 0.8]), step_times())
    return made


def ratios(estimated: CostEstimate, run: int) -> Array:
    """Costs relative to the first level."""
    return np.asarray(1.0 + estimated.saving[run, :UNITS] / (0.8 * SHARE)[:, None])


def observe(estimated: CostEstimate, level: list[int], time: float, batch: int = 0, other: float = 0.0) -> None:
    levels = np.tile(level, (RUNS, 1))
    times, others = np.full(RUNS, time), np.full(RUNS, other)
    estimated.observe(levels, np.full(RUNS, batch), times, others, np.ones(RUNS, dtype=bool))


def test_without_a_table_the_guess_stands() -> None:
    fresh = estimate()
    assert ratios(fresh, 1) == pytest.approx(np.tile(GUESS, (UNITS, 1)))
    sd = (fresh.saving - fresh.optimistic(1.0))[1]
    assert sd[:, 1:] == pytest.approx(0.8 * np.hypot(COMMON_SD, UNIT_SD) * np.repeat(SHARE[:, None], 3, axis=1))
    assert (sd[:, 0] == 0).all()


def test_a_table_whose_units_agree_is_believed() -> None:
    table = np.tile([1.0, 1.4, 0.45, 0.3], (UNITS, 1)) * np.array([[1.0], [1.05], [0.95]])
    table[:, 0] = 1.0
    assert ratios(estimate(table), 0) == pytest.approx(table, abs=0.03)


def test_a_table_whose_units_disagree_is_believed_on_the_average() -> None:
    table = np.array([[1.0, 0.2, 1.2, 0.3], [1.0, 1.4, 0.5, 1.1], [1.0, 0.5, 0.2, 0.9]])
    found = ratios(estimate(table), 0)[:, 1:]
    spread = found.max(axis=0) - found.min(axis=0)
    assert (spread < 0.35 * (table.max(axis=0) - table.min(axis=0))[1:]).all()


def test_the_filter_is_bayesian_regression() -> None:
    rng = np.random.default_rng(3)
    estimated = estimate()
    free = UNITS * (LEVELS - 1)
    scale = 0.8 * SHARE
    prior = np.zeros((free + BATCHES,) * 2)
    for column in range(LEVELS - 1):
        at = np.arange(UNITS) * (LEVELS - 1) + column
        prior[np.ix_(at, at)] = np.outer(scale, scale) * (COMMON_SD**2 + UNIT_SD**2 * np.eye(UNITS))
    prior[free:, free:] = np.diag([1e-4, 1e-2])
    mean = np.concatenate([(scale[:, None] * (GUESS[1:] - 1.0)).ravel(), [1.0, 1.5]])
    designs, times, noises = [], [], []
    for _ in range(9):
        level: Array = rng.integers(0, LEVELS, UNITS)
        batch = int(rng.integers(BATCHES))
        design = np.zeros(free + BATCHES)
        for unit, place in enumerate(level):
            if place:
                design[unit * (LEVELS - 1) + place - 1] = GROWTH[batch]
        design[free + batch] = 1.0
        time = float(rng.uniform(0.4, 1.6))
        observe(estimated, level.tolist(), time + 0.05, batch, other=0.05)
        designs.append(design)
        times.append(time)
        noises.append((TIME_SD * (time + 0.05)) ** 2)
    x, y, weight = np.stack(designs), np.array(times), 1.0 / np.array(noises)
    precision = np.linalg.inv(prior) + x.T * weight @ x
    expected = np.linalg.solve(precision, np.linalg.inv(prior) @ mean + x.T @ (weight * y))
    assert estimated.saving[1, :, 1:].ravel() == pytest.approx(expected[:free], abs=1e-9)
    covariance = np.linalg.inv(precision)
    level, other = np.array([1, 0, 3]), np.array([2, 2, 0])
    change, spread = estimated.move(np.tile(level, (RUNS, 1)), np.tile(other, (RUNS, 1)), np.ones(RUNS, dtype=int))
    for unit in range(UNITS):
        contrast = np.zeros(len(expected))
        for place, sign in ((level[unit], -1.0), (other[unit], 1.0)):
            if place:
                contrast[unit * (LEVELS - 1) + place - 1] = sign * GROWTH[1]
        assert change[1, unit] == pytest.approx(contrast @ expected, abs=1e-9)
        assert spread[1, unit] == pytest.approx(np.sqrt(contrast @ covariance @ contrast), abs=1e-9)


def test_costs_are_found_from_times_of_whole_steps() -> None:
    true = np.array([[1.0, 1.3, 0.4, 0.7], [1.0, 1.2, 0.5, 0.8], [1.0, 1.4, 0.4, 0.6]])
    estimated = estimate(np.array([[1.0, 0.3, 1.2, 0.7], [1.0, 0.5, 0.9, 1.1], [1.0, 0.9, 0.5, 0.2]]))
    for _ in range(30):
        observe(estimated, [0, 0, 0], 1.0)
        for unit in range(UNITS):
            for place in range(1, LEVELS):
                level = [place if each == unit else 0 for each in range(UNITS)]
                observe(estimated, level, 1.0 + 0.8 * SHARE[unit] * (true[unit, place] - 1.0))
    for run in range(RUNS):
        assert ratios(estimated, run) == pytest.approx(true, abs=0.08)
        assert (ratios(estimated, run)[:, 1:].argmin(axis=1) == true[:, 1:].argmin(axis=1)).all()


def test_one_format_for_all_tells_of_each() -> None:
    estimated = estimate()
    observe(estimated, [1, 1, 1], 1.0 + 0.8 * 0.3)  # 1.3 times the time, where 0.6 was guessed
    assert ratios(estimated, 1)[:, 1] == pytest.approx(np.full(UNITS, 1.3), abs=0.06)
    assert ratios(estimated, 1)[:, 2:] == pytest.approx(np.tile(GUESS[2:], (UNITS, 1)))


def test_runs_that_tell_nothing_new_and_padding_stay_as_they_are() -> None:
    estimated = estimate(units=UNITS + 2)
    before = estimated.saving.copy()
    level = np.zeros((RUNS, UNITS + 2), dtype=int)
    level[:, 0] = 1
    is_new = np.array([True, False])
    estimated.observe(level, np.zeros(RUNS, dtype=int), np.full(RUNS, 0.3), np.zeros(RUNS), is_new)
    assert (estimated.saving[1] == before[1]).all()
    assert (estimated.saving[0] != before[0]).any()
    assert (estimated.saving[:, UNITS:] == 0).all()
    assert (estimated.optimistic(2.0)[:, UNITS:] == 0).all()
    estimated.begin(
        np.array([0]),
        np.append(SHARE, [0.0, 0.0])[None],
        GUESS[None],
        np.full((1, UNITS + 2, LEVELS), np.nan),
        np.array([0.8]),
        step_times(1),
    )
    assert estimated.saving[0] == pytest.approx(before[0])


@pytest.mark.parametrize("units", [1, 12])
@pytest.mark.parametrize("times", ["ordinary", "short", "wild"])
def test_the_covariance_stays_one_over_long_runs(units: int, times: str) -> None:
    rng = np.random.default_rng(0)
    made = CostEstimate(RUNS, units, LEVELS, BATCHES)
    told, share = np.full((RUNS, units, LEVELS), np.nan), np.full((RUNS, units), 1 / units)
    made.begin(np.arange(RUNS), share, np.tile(GUESS, (RUNS, 1)), told, np.full(RUNS, 0.8), step_times())
    bad = [0.0, -1.0, np.inf, -np.inf, np.nan, 1e-300, 1e300]
    for window in range(1500):
        time = {
            "ordinary": 1.0 + TIME_SD * rng.standard_normal(RUNS),
            "short": np.full(RUNS, 1e-9),
            "wild": np.full(RUNS, bad[window % len(bad)]) if window % 2 else 10.0 ** rng.uniform(-12, 12, RUNS),
        }[times]
        level, batch = rng.integers(0, LEVELS, (RUNS, units)), rng.integers(0, BATCHES, RUNS)
        made.observe(level, batch, time, np.zeros(RUNS), np.ones(RUNS, dtype=bool))
    covariance = made._covariance
    assert np.isfinite(made.saving).all()
    assert np.linalg.eigvalsh(covariance).min() > 0
    assert np.abs(covariance - covariance.swapaxes(1, 2)).max() < 1e-15


@pytest.mark.parametrize("time", [0.0, -1.0, np.inf, np.nan, 1e300])
def test_what_is_no_time_tells_nothing(time: float) -> None:
    one, other = estimate(), estimate()
    observe(one, [1, 1, 1], time)
    assert (one.saving == other.saving).all()
    assert (one.optimistic(1.0) == other.optimistic(1.0)).all()


@pytest.mark.parametrize("entry", [0.0, -1.0, np.inf])
def test_what_is_no_time_in_a_table_is_left_out(entry: float) -> None:
    table = np.tile([1.0, 0.5, 0.5, 0.4], (UNITS, 1))
    without, broken = table.copy(), table.copy()
    without[1, 2], broken[1, 2] = np.nan, entry
    assert (estimate(broken).saving == estimate(without).saving).all()
