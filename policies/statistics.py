"""From scores to intervals, and what one way to set the knobs is worth against another on the same tasks.

Scores are ``[seeds, tasks]``: a policy is trained with several seeds, each plays every task. Intervals are over both,
because another training seed is another policy. Aggregates are those of Agarwal et al., *Deep Reinforcement Learning
at the Edge of the Statistical Precipice* (NeurIPS 2021), with tasks drawn again as well: what is asked is how a policy
does on tasks of this kind, not on these.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoprec.paired import Interval, bootstrap_mean

Array = NDArray[Any]

RESAMPLES = 2000
"""Resamples of an interval; an evaluation has thousands of intervals."""


class Comparison(NamedTuple):
    """A policy against a rival on the same tasks.

    Attributes:
        difference: Mean of the policy's score less the rival's.
        win_rate: Share of the pairs in which the policy's score is higher.
        improvement: Probability of improvement: that the policy's score on a task is higher, ties counted half.
        tasks: Number of tasks.
        seeds: Number of training seeds.
    """

    difference: Interval
    win_rate: float
    improvement: Interval
    tasks: int
    seeds: int


def mean(scores: Array) -> Interval:
    """Returns the mean with its interval.

    Args:
        scores: ``[tasks]`` or ``[seeds, tasks]``. Of fewer than two tasks no interval is made (NaN).
    """
    found = np.atleast_2d(scores)
    if found.shape[1] < 2:
        return Interval(float(found.mean()) if found.size else math.nan, math.nan, math.nan)
    return bootstrap_mean(found, resamples=RESAMPLES)


def interquartile_mean(scores: Array) -> Interval:
    """Returns the mean of the middle half of all scores with its interval.

    Args:
        scores: ``[tasks]`` or ``[seeds, tasks]``. Of fewer than two tasks no interval is made (NaN).
    """
    from scipy.stats import trim_mean  # imports most of scipy

    found = np.atleast_2d(scores)
    value = float(trim_mean(found, 0.25, axis=None)) if found.size else math.nan
    seeds, tasks = found.shape
    if tasks < 2:
        return Interval(value, math.nan, math.nan)
    rng = np.random.Generator(np.random.PCG64(0))
    rows, columns = rng.integers(seeds, size=(RESAMPLES, seeds)), rng.integers(tasks, size=(RESAMPLES, tasks))
    drawn = found[rows[:, :, None], columns[:, None, :]].reshape(RESAMPLES, -1)
    low, high = np.percentile(trim_mean(drawn, 0.25, axis=1), [2.5, 97.5])
    return Interval(value, float(low), float(high))


def compare(policy: Array, rival: Array) -> Comparison:
    """Compares a policy with a rival, pair by pair.

    Args:
        policy: ``[tasks]`` or ``[seeds, tasks]``.
        rival: ``[tasks]``, in the same order.

    Raises:
        ValueError: If they have different tasks.
    """
    own = np.atleast_2d(policy)
    if rival.shape != own.shape[1:]:
        raise ValueError(
            f"Passed `compare` scores {list(own.shape)} of a policy and {list(rival.shape)} of a rival. Both must have"
            " one column for each task: play the same tasks with both."
        )
    seeds, tasks = own.shape
    is_better = own > rival
    return Comparison(
        difference=mean(own - rival),
        win_rate=float(is_better.mean()) if tasks else math.nan,
        improvement=_share(mean(is_better + 0.5 * (own == rival))),
        tasks=tasks,
        seeds=seeds,
    )


def _share(found: Interval) -> Interval:
    """An interval of a share of which no end lies outside of [0, 1]."""
    return Interval(*(value if math.isnan(value) else min(max(value, 0.0), 1.0) for value in found))
