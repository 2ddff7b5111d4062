"""The behaviour report on recordings made by hand, whose answers are known.

Time budget: 5 s.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.recordings import UNITS, recording, some_tasks

pytest.importorskip("stable_baselines3")
pytest.importorskip("scipy")
from autoprec.policies import behaviour_measures as measures
from autoprec.policies.behaviour import report

TASKS = some_tasks(8)


def levels(windows: int, value: int = 2) -> np.ndarray:
    return np.full((windows, len(TASKS), UNITS), value, dtype=np.int64)


def test_who_is_raised_after_an_overflow() -> None:
    level, offender, overflows = levels(12), np.full((12, 8), -1), np.zeros((12, 8, UNITS), dtype=np.int64)
    offender[3, :4], overflows[3, :4, 1] = 1, 5
    level[4:, 0, 1], level[5:, 1, 1] = 1, 1  # at once, one decision later
    level[6:, 2, 1] = 1  # too late
    level[4:, 3, 0] = 1  # another unit
    level[9:, 7, 2] = 1  # for no reason
    found = measures.raise_rates(recording(TASKS, 12, level=level, offender=offender, overflows=overflows))
    assert found.overflows == 4
    assert found.offenders.mean == 2 / 4
    assert found.bystanders.mean == 1 / 8
    in_question = [
        (task, window, unit)
        for task in range(8)
        for window in range(11)
        for unit in range(UNITS)
        if offender[window, task] < 0 and level[window, task, unit] == 2
    ]
    raised = [(w, t, u) for t, w, u in in_question if (level[w + 1 : w + 3, t, u] < 2).any()]
    assert len(raised) == 7  # windows 2 of tasks 0 and 3, 4 of task 1, 4 and 5 of task 2, 7 and 8 of task 7
    assert found.base.mean == pytest.approx(len(raised) / len(in_question))
    assert found.lift.mean == pytest.approx(found.offenders.mean / found.base.mean)
    assert found.offenders.low <= found.offenders.mean <= found.offenders.high


def test_the_base_rate_is_that_of_the_same_levels() -> None:
    level, offender, overflows = levels(6), np.full((6, 8), -1), np.zeros((6, 8, UNITS), dtype=np.int64)
    level[:, 4:] = 1
    level[1::2, 4:] = 0  # at level 1 units go up in every other window
    offender[4, 0], overflows[4, 0, 0] = 0, 1
    level[5, 0, 0] = 1
    found = measures.raise_rates(recording(TASKS, 6, level=level, offender=offender, overflows=overflows))
    assert found.offenders.mean == 1.0
    assert found.base.mean == pytest.approx(1 / (4 * UNITS * 5 - UNITS))  # window 3 of the offender itself


def test_units_that_cannot_be_raised_and_last_windows_do_not_count() -> None:
    level, offender, overflows = levels(4, 0), np.full((4, 8), -1), np.zeros((4, 8, UNITS), dtype=np.int64)
    offender[1, 0], overflows[1, 0, 2] = 2, 1  # in fp32
    level[:, 1] = 1
    offender[3, 1], overflows[3, 1, 0] = 0, 1  # in the last window
    found = measures.raise_rates(recording(TASKS, 4, level=level, offender=offender, overflows=overflows))
    assert found.overflows == 0
    assert np.isnan(found.offenders.mean)
    assert np.isnan(found.lift.mean)


def test_instability_is_the_spread_of_the_windows_before() -> None:
    values = np.array([1.0, 2.0, 4.0, 8.0, 8.0, 0.0, np.inf, 8.0])
    found = measures.instability(values)
    assert np.isnan(found[:3]).all()
    assert found[3] == pytest.approx(np.std([0, 1, 2]))
    assert found[4] == pytest.approx(np.std([0, 1, 2, 3]))
    assert found[6] == pytest.approx(np.std([2, 3, 3]))  # 0 is not known
    assert np.isnan(found[7])


@pytest.mark.parametrize("sign", [1, -1], ids=["wide where restless", "narrow where restless"])
def test_precision_that_follows_the_ranges(sign: int) -> None:
    windows, rng = 40, np.random.Generator(np.random.PCG64(0))
    swing = np.linspace(8.0, 0.0, windows)[:, None, None]
    amax = 2.0 ** (swing * rng.choice([-1.0, 1.0], (windows, 8, UNITS)))
    is_early = (np.arange(windows) < windows // 2)[:, None, None]
    level = np.where(is_early, 1, 3) if sign > 0 else np.where(is_early, 3, 1)
    level = np.broadcast_to(level, amax.shape).copy()
    level[:, 6:] = 2  # two tasks in which no format moves
    seen = recording(TASKS, windows, level=level, activation_amax=amax)
    found = measures.precision_correlation(seen, measures.range_instability(seen), np.ones(8, dtype=bool))
    assert sign * found.mean > 0.5
    assert found.low <= found.mean <= found.high
    assert (found.tasks, found.moved) == (6, 0.75)
    of_two = measures.precision_correlation(seen, measures.range_instability(seen), np.arange(8) >= 6)
    assert np.isnan(of_two.mean)
    assert of_two.moved == 0.0


def test_time_counts_and_not_windows() -> None:
    # three slow windows with a small batch take half of the time, nine fast ones with a large batch the other half
    share = np.concatenate([np.arange(3) / 6, 0.5 + np.arange(9) / 18])[:, None].repeat(8, axis=1)
    batch = np.where(share < 0.5, 1, 3)
    seen = recording(TASKS, 12, share=share, batch=batch)
    assert measures.mean_by(seen, {"all": np.ones(8, dtype=bool)}, batch) == {"all": pytest.approx(2.0)}
    assert measures.by_fifth(seen, batch) == pytest.approx((1.0, 1.0, 2.0, 3.0, 3.0))


def test_batch_sizes_and_what_doubling_costs() -> None:
    tasks = [replace(task, overhead=0.0, batch_exponent=0.1 * (place + 1)) for place, task in enumerate(TASKS)]
    assert measures.doubling_cost(recording(tasks, 2))[7] == pytest.approx(2.0**0.8)
    assert measures.doubling_cost(recording([replace(tasks[0], overhead=1.0, batch_exponent=1.0)] * 2, 2))[0] == 1.5
    batch = np.repeat(np.array([4, 4, 3, 3, 2, 2, 1, 1])[None], 10, axis=0)
    found = report(recording(tasks, 10, batch=batch)).batch_with_doubling_cost
    assert found.mean < -0.95
    assert found.low >= -1.0
    same = report(recording(tasks, 10)).batch_with_doubling_cost
    assert np.isnan(same.mean)


def test_the_report_as_text_and_json() -> None:
    tasks = [replace(task, regime="drift" if place < 3 else "late") for place, task in enumerate(TASKS)]
    skipped = np.zeros((10, 8), dtype=np.int64)
    skipped[0, 0] = 4
    found = report(recording(tasks, 10, level=levels(10), skipped=skipped), recording(tasks, 10))
    assert found.skipped.mean == pytest.approx(4 / (8 * 80))
    assert set(found.raised) == {"with guard", "without guard"}
    assert set(found.with_time) == {"all", "drift", "late"}
    assert set(found.level_by_profile) == {task.profile for task in tasks}
    assert found.level_by_fifth == pytest.approx((2.0,) * 5)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["with_time"]["drift"]["mean"] is None  # no format moved
    assert plain["decisions"] == 80
    assert "by fifth of the budget" in found.table()
    assert "not known" in found.table()
