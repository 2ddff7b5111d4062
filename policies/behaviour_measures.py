"""Measures of what a policy did: rates, correlations and means with intervals, from a recording of its decisions.

What lives here: pure functions of arrays. What does not: which of them make a report (``behaviour``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.proxies import MAX_LEVELS
from autoprec.paired import Interval, bootstrap_mean
from autoprec.policies.play import Recording

Array = NDArray[Any]

DECISIONS = 2
"""Decisions within which a raise counts as an answer to an overflow."""
LOOK_BACK = 4
"""Windows over which the spread of a range is taken."""
FIFTHS = 5
SHARES = (np.arange(100) + 0.5) / 100
"""Shares of the budget at which means over time are taken."""
RESAMPLES = 2000
_FEWEST_WINDOWS = 5


@dataclass(frozen=True, kw_only=True)
class RaiseRates:
    """How often units were raised within ``DECISIONS`` decisions; intervals are bootstraps over tasks.

    Attributes:
        offenders: Of the units that overflowed first in their window.
        bystanders: Of those that did not overflow in such a window.
        base: Of units in windows without any overflow, at the levels that offenders had.
        lift: ``offenders`` over ``base``.
        overflows: How many offenders could have been raised.
    """

    offenders: Interval
    bystanders: Interval
    base: Interval
    lift: Interval
    overflows: int


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Mean over tasks of the rank correlation within a run, with a bootstrap over tasks.

    Attributes:
        mean: NaN where no run has one.
        low: Lower end of the interval.
        high: Upper end of the interval.
        tasks: Tasks that have a correlation: a unit whose format moved.
        moved: Their share.
    """

    mean: float
    low: float
    high: float
    tasks: int
    moved: float


def raise_rates(recording: Recording) -> RaiseRates:
    """Returns how often units were raised after their own overflow, and else.

    Units in the widest format, which cannot be raised, and last windows of runs do not count.

    Args:
        recording: What a policy did.
    """
    level, raised = recording.level, _raised(recording)
    can_be_raised = (level > 0) & _has_next(recording)[:, :, None]
    has_overflow = (recording.offender >= 0)[:, :, None]
    is_first = np.arange(level.shape[2]) == recording.offender[:, :, None]
    groups = {
        "offenders": is_first,
        "bystanders": has_overflow & ~is_first & (recording.overflows == 0),
        "base": ~has_overflow & np.ones_like(is_first),
    }
    counts = {name: _by_level(level, group & can_be_raised) for name, group in groups.items()}
    hits = {name: _by_level(level, group & can_be_raised & raised) for name, group in groups.items()}
    weights = _resampling_weights(level.shape[1])
    offenders, bystanders = (_drawn(hits[name], counts[name], weights) for name in ("offenders", "bystanders"))
    base = _matched(hits["base"], counts["base"], counts["offenders"], weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        lift = offenders / base
    return RaiseRates(
        offenders=_interval(offenders),
        bystanders=_interval(bystanders),
        base=_interval(base),
        lift=_interval(lift),
        overflows=int(counts["offenders"].sum()),
    )


def skipped_share(recording: Recording) -> Interval:
    """Returns the share of optimizer steps that were skipped.

    Args:
        recording: What a policy did.
    """
    played = recording.is_played
    skipped, steps = (np.where(played, values, 0).sum(axis=0) for values in (recording.skipped, recording.steps))
    return _interval(_drawn(skipped[:, None], steps[:, None], _resampling_weights(len(steps))))


def instability(values: Array) -> Array:
    """Returns the spread of a positive quantity, in bits, over the ``LOOK_BACK`` windows before each one.

    Args:
        values: ``[windows, ...]``; what is not finite or not above 0 is not known.

    Returns:
        ``[windows, ...]``, the standard deviation of log2; NaN where fewer than three values are known.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where((values > 0) & np.isfinite(values), np.log2(values), np.nan)
    unknown = np.full((LOOK_BACK, *values.shape[1:]), np.nan)
    shifted = np.concatenate([unknown, bits])
    before = np.stack([shifted[lag : lag + len(values)] for lag in range(LOOK_BACK)])
    known = ~np.isnan(before)
    count = known.sum(axis=0)
    mean = np.where(known, before, 0.0).sum(axis=0) / np.maximum(count, 1)
    variance = np.where(known, (before - mean) ** 2, 0.0).sum(axis=0) / np.maximum(count, 1)
    return np.where(count >= 3, np.sqrt(variance), np.nan)


def range_instability(recording: Recording) -> Array:
    """Returns for each window and unit how restless its ranges were just before: activations or gradients.

    Args:
        recording: What a policy did.
    """
    of_both = np.stack([instability(recording.activation_amax), instability(recording.gradient_amax)])
    return np.asarray(np.fmax.reduce(of_both, axis=0))


def precision_correlation(recording: Recording, other: Array, tasks: Array) -> Correlation:
    """Returns the rank correlation of a unit's precision (wider is more) with something, within runs.

    A task's value is the mean over its units whose format moved; tasks without such a unit have none.

    Args:
        recording: What a policy did.
        other: ``[windows, tasks, units]``, NaN where it is not known.
        tasks: ``[tasks]``: which tasks count.
    """
    found = []
    for task in np.flatnonzero(tasks):
        played = recording.is_played[:, task]
        units = np.flatnonzero(recording.level[0, task] >= 0)
        pairs = ((-recording.level[played, task, unit], other[played, task, unit]) for unit in units)
        values = [value for precision, against in pairs if not np.isnan(value := rank_correlation(precision, against))]
        if values:
            found.append(float(np.mean(values)))
    mean = _mean_interval(np.array(found))
    share = len(found) / max(int(tasks.sum()), 1)
    return Correlation(mean=mean.mean, low=mean.low, high=mean.high, tasks=len(found), moved=share)


def rank_correlation(a: Array, b: Array) -> float:
    """Returns Spearman's rank correlation of the pairs that are known, NaN for few of them or a constant side.

    Args:
        a: ``[pairs]``.
        b: ``[pairs]``.
    """
    from scipy.stats import rankdata

    known = np.isfinite(a) & np.isfinite(b)
    if known.sum() < _FEWEST_WINDOWS or np.ptp(a[known]) == 0 or np.ptp(b[known]) == 0:
        return float("nan")
    return float(np.corrcoef(rankdata(a[known]), rankdata(b[known]))[0, 1])


def at_shares(recording: Recording, values: Array, shares: Array) -> Array:
    """Returns what held at shares of the budget: windows count by their time, however many fast steps make.

    Args:
        recording: What a policy did.
        values: ``[windows, tasks]``.
        shares: ``[shares]``, 0 to 1. The first window stands for what was before, the last for what follows.

    Returns:
        ``[shares, tasks]``.
    """
    began = np.where(recording.is_played, recording.share, np.inf)
    window = np.stack([(began <= share).sum(axis=0) - 1 for share in shares])
    return np.asarray(np.take_along_axis(np.asarray(values, dtype=np.float64), np.maximum(window, 0), axis=0))


def by_fifth(recording: Recording, values: Array) -> tuple[float, ...]:
    """Returns means over tasks and time by fifth of the budget.

    Args:
        recording: What a policy did.
        values: ``[windows, tasks]``.
    """
    return tuple(float(part.mean()) for part in np.split(at_shares(recording, values, SHARES), FIFTHS))


def mean_level(recording: Recording) -> Array:
    """Returns ``[windows, tasks]``: the mean level of a run's units, 0 is fp32; NaN where nothing ran."""
    is_unit = recording.level >= 0
    return np.asarray(_ratio(np.where(is_unit, recording.level, 0).sum(axis=2), is_unit.sum(axis=2)))


def doubling_cost(recording: Recording) -> Array:
    """Returns for each task how much longer a step in fp32 takes with twice the base batch size."""
    overhead = np.array([task.overhead for task in recording.tasks])
    exponent = np.array([task.batch_exponent for task in recording.tasks])
    return np.asarray((overhead + 2.0**exponent) / (overhead + 1.0))


def correlation_over_tasks(a: Array, b: Array) -> Interval:
    """Returns the rank correlation over tasks with a bootstrap over them.

    Args:
        a: ``[tasks]``.
        b: ``[tasks]``.
    """
    from scipy.stats import rankdata

    known = np.isfinite(a) & np.isfinite(b)
    a, b = a[known], b[known]
    value = rank_correlation(a, b)
    if np.isnan(value):
        return Interval(value, value, value)
    drawn = np.random.Generator(np.random.PCG64(0)).integers(len(a), size=(RESAMPLES, len(a)))
    ranks = [rankdata(side[drawn], axis=1) for side in (a, b)]
    centred = [side - side.mean(axis=1, keepdims=True) for side in ranks]
    with np.errstate(invalid="ignore", divide="ignore"):
        values = (centred[0] * centred[1]).sum(axis=1) / np.sqrt(np.prod([(c**2).sum(axis=1) for c in centred], axis=0))
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Interval(value, float(low), float(high))


def mean_by(recording: Recording, groups: Mapping[str, Array], values: Array) -> dict[str, float]:
    """Returns means over time and the tasks of each group that has any.

    Args:
        recording: What a policy did.
        groups: ``[tasks]`` by name: which tasks belong to it.
        values: ``[windows, tasks]``.
    """
    of_task = at_shares(recording, values, SHARES).mean(axis=0)
    return {name: float(of_task[chosen].mean()) for name, chosen in groups.items() if chosen.any()}


def _raised(recording: Recording) -> Array:
    """``[windows, tasks, units]``: whether a unit had a wider format within the next decisions."""
    level, raised = recording.level, np.zeros(recording.level.shape, dtype=bool)
    for ahead in range(1, DECISIONS + 1):
        later = np.full_like(level, -1)
        later[:-ahead] = level[ahead:]
        raised |= (later >= 0) & (later < level)
    return raised


def _has_next(recording: Recording) -> Array:
    played = recording.is_played
    return np.asarray(played & np.vstack([played[1:], np.zeros_like(played[:1])]))


def _by_level(level: Array, counts: Array) -> Array:
    """``[tasks, levels]``: how many of what counts there are at each level."""
    return np.stack([(counts & (level == place)).sum(axis=(0, 2)) for place in range(MAX_LEVELS)], axis=1)


def _resampling_weights(tasks: int) -> Array:
    """``[1 + RESAMPLES, tasks]``: how often each task was drawn; the first row has each of them once."""
    rng = np.random.Generator(np.random.PCG64(0))
    drawn = rng.multinomial(tasks, np.full(tasks, 1.0 / tasks), size=RESAMPLES)
    return np.concatenate([np.ones((1, tasks), dtype=drawn.dtype), drawn])


def _drawn(hits: Array, counts: Array, weights: Array) -> Array:
    return _ratio(weights @ hits.sum(axis=1), weights @ counts.sum(axis=1))


def _matched(hits: Array, counts: Array, like: Array, weights: Array) -> Array:
    """Rates by level, averaged as the levels of ``like`` are; levels that nothing else had are left out."""
    rates = _ratio(weights @ hits, weights @ counts)
    shares = np.where(np.isnan(rates), 0.0, weights @ like)
    return _ratio((shares * np.nan_to_num(rates)).sum(axis=1), shares.sum(axis=1))


def _ratio(a: Array, b: Array) -> Array:
    return np.where(b > 0, a / np.maximum(b, 1), np.nan)


def _interval(drawn: Array) -> Interval:
    """The first value with percentiles of the others."""
    known = drawn[1:][~np.isnan(drawn[1:])]
    if np.isnan(drawn[0]) or not len(known):
        return Interval(*[float("nan")] * 3)
    low, high = np.percentile(known, [2.5, 97.5], method="nearest")  # no mean of two infinite ones
    return Interval(float(drawn[0]), float(low), float(high))


def _mean_interval(values: Array) -> Interval:
    if len(values) >= 2:
        return bootstrap_mean(values.tolist())
    mean = float(values[0]) if len(values) else float("nan")
    return Interval(mean, mean, mean)
