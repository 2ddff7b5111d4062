"""Intervals over tasks and seeds, against SciPy, against numbers made by hand, and in how often they are right.

Time budget: 10 s.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from autoprec.paired import bootstrap_mean
from autoprec.policies.statistics import compare, interquartile_mean, mean

stats = pytest.importorskip("scipy.stats")


def test_with_many_tasks_the_interval_is_scipys() -> None:
    values = np.random.default_rng(3).gamma(2.0, 1.0, 400)
    expected = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(1))
    found = mean(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(expected.confidence_interval.low, abs=0.01)
    assert found.high == pytest.approx(expected.confidence_interval.high, abs=0.01)


def test_alike_seeds_add_nothing_and_one_row_is_a_row() -> None:
    values = np.random.default_rng(3).normal(size=50)
    one, many = bootstrap_mean(values), bootstrap_mean(np.tile(values, (5, 1)))
    assert bootstrap_mean(values[None]) == one
    assert many.mean == pytest.approx(one.mean)
    assert many.high - many.low == pytest.approx(one.high - one.low, rel=0.03)


def test_seeds_that_differ_widen_the_interval_however_many_tasks_there_are() -> None:
    seeds = np.array([0.0, 0.1, 0.2, 0.3, 0.4])
    scores = seeds[:, None] + np.zeros((5, 1000))
    found = mean(scores)
    # Student's interval over the five seeds
    half = stats.t.ppf(0.975, 4) * seeds.std(ddof=1) / math.sqrt(5)
    assert found.mean == pytest.approx(0.2)
    assert found.high - found.mean == pytest.approx(half, rel=0.1)


@pytest.mark.parametrize(("seeds", "tasks", "of_seeds"), [(5, 40, 0.05), (5, 100, 0.0), (1, 60, 0.0), (8, 30, 0.3)])
def test_intervals_hold_the_true_mean_as_often_as_they_say(seeds: int, tasks: int, of_seeds: float) -> None:
    rng, hits, trials = np.random.default_rng(5), 0, 200
    for _ in range(trials):
        scores = (
            rng.normal(0.0, of_seeds, (seeds, 1)) + rng.normal(0.0, 0.2, tasks) + rng.normal(0.0, 0.2, (seeds, tasks))
        )
        found = bootstrap_mean(scores)
        hits += found.low <= 0.0 <= found.high
    assert 0.90 <= hits / trials <= 0.995


def test_the_interquartile_mean_leaves_out_the_outer_quarters() -> None:
    scores = np.array([[0.0, 1.0, 2.0, 100.0], [-50.0, 1.0, 2.0, 3.0]])
    assert interquartile_mean(scores).mean == pytest.approx((1.0 + 1.0 + 2.0 + 2.0) / 4)
    values = np.random.default_rng(0).normal(size=(3, 60))
    found = interquartile_mean(values)
    assert found.mean == pytest.approx(stats.trim_mean(values.ravel(), 0.25))
    assert found.low < found.mean < found.high
    assert found == interquartile_mean(values)  # the generator is private and seeded


def test_a_comparison_counts_wins_and_ties() -> None:
    policy = np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 2.0, 0.0]])
    rival = np.array([1.0, 1.0, 2.0, 1.0])
    found = compare(policy, rival)
    assert found.difference.mean == pytest.approx((0 + 1 + 1 + 3 + 0 + 1 + 0 - 1) / 8)
    assert found.win_rate == pytest.approx(4 / 8)
    assert found.improvement.mean == pytest.approx((4 + 0.5 * 3) / 8)
    # Mann and Whitney's statistic of each task, as rliable has it
    by_task = [stats.mannwhitneyu(policy[:, t], rival[t : t + 1]).statistic / 2 for t in range(4)]
    assert found.improvement.mean == pytest.approx(np.mean(by_task))
    assert (found.tasks, found.seeds) == (4, 2)


def test_too_few_tasks_have_no_interval() -> None:
    one = compare(np.array([[1.0], [2.0]]), np.array([1.0]))
    assert one.difference.mean == 0.5
    assert math.isnan(one.difference.low)
    assert math.isnan(mean(np.zeros((2, 0))).mean)
    assert math.isnan(interquartile_mean(np.zeros((2, 0))).mean)


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("Passed `compare` scores [1, 3] of a policy and [2] of a rival")):
        compare(np.zeros(3), np.zeros(2))
