"""Paired comparisons: ratios of times with their spread, differences with intervals over seeds, and what follows.

Pure: numbers in, numbers out. `demo`, `compare` and the benchmarks judge by the same rules.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles, of ``count`` values."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns median and quartiles of the values; all NaN without values."""
        if not values:
            return cls(math.nan, math.nan, math.nan, 0)
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


class Interval(NamedTuple):
    """A mean with its interval.

    Attributes:
        mean: Mean of the values; infinite where one side of a pair diverged.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float


def bootstrap_mean(values: ArrayLike, confidence: float = 0.95, resamples: int = RESAMPLES) -> Interval:
    """Bootstraps a mean: values are drawn again with replacement, percentiles of the means.

    Values in a table of rows and columns, as of seeds and tasks that each seed was tried on, are drawn by row and by
    column, since those of one row have something in common and those of one column too (Owen, *The pigeonhole
    bootstrap*, 2007).

    Plain percentiles are too narrow for few values, and no percentile leaves the range of the values, which three
    of them cover 3 times in 4 at best. So the distance of each percentile from the mean is stretched by what Student's
    t distribution asks for beyond the normal one and by the bias of the resampled variance (the corrections of
    Hesterberg, arXiv:1411.5279, on the scale of the values). For normal values that covers as promised from three on.
    Rows and columns together have the degrees of freedom that Welch and Satterthwaite give them.

    Args:
        values: At least two finite values ``[columns]``, or ``[rows, columns]`` with at least two columns.
        confidence: Share of such intervals that hold the true mean, between 0 and 1.
        resamples: How often values are drawn again.
    """
    found = np.atleast_2d(np.asarray(values, dtype=np.float64))
    rows, columns = found.shape
    tail = (1.0 - confidence) / 2.0
    rng = np.random.default_rng(0)
    drawn = rng.integers(columns, size=(resamples, columns))
    means = np.stack([row[drawn].mean(axis=1) for row in found], axis=1)
    if rows > 1:
        means = np.take_along_axis(means, rng.integers(rows, size=(resamples, rows)), axis=1)
    mean = float(found.mean())
    low, high = np.percentile(means.mean(axis=1), [100.0 * tail, 100.0 * (1.0 - tail)])
    freedom, bias = _freedom(found)
    factor = _stretch(freedom, bias, confidence)
    return Interval(mean, mean - factor * (mean - float(low)), mean + factor * (float(high) - mean))


def stretch(count: int, confidence: float) -> float:
    """Returns what the distance of a bootstrap percentile from the mean is multiplied by for few values.

    Args:
        count: How many values there are, at least 2.
        confidence: Share of such intervals that hold the true mean, between 0 and 1.
    """
    return _stretch(count - 1.0, count / (count - 1.0), confidence)


def _stretch(freedom: float, bias: float, confidence: float) -> float:
    from scipy.stats import t as student  # imports most of scipy

    upper = (1.0 + confidence) / 2.0
    return float(student.ppf(upper, freedom)) / statistics.NormalDist().inv_cdf(upper) * math.sqrt(bias)


def _freedom(values: NDArray[np.float64]) -> tuple[float, float]:
    """Degrees of freedom of a mean over rows and columns, and by how much resampling makes its variance too small."""
    rows, columns = values.shape
    counts = np.array([rows, columns])
    if rows == 1:
        return columns - 1.0, columns / (columns - 1.0)
    variances = np.array([values.mean(axis=1).var(ddof=1), values.mean(axis=0).var(ddof=1)]) / counts
    if not variances.sum() > 0.0:
        return columns - 1.0, 1.0
    shares = variances / variances.sum()
    return float(1.0 / (shares**2 / (counts - 1)).sum()), float(1.0 / (shares * (counts - 1) / counts).sum())


def paired_difference(left: Sequence[float], right: Sequence[float], confidence: float = 0.95) -> Interval:
    """Returns the mean of ``left - right`` with its interval over the pairs.

    Args:
        left: One value for each pair, ``inf`` where a run diverged.
        right: The other values, in the same order.
        confidence: Level of the interval.

    Raises:
        ValueError: If there is no pair, or a value has no partner.
    """
    if not left or len(left) != len(right):
        raise ValueError(
            f"Passed `paired_difference` {len(left)} and {len(right)} values. It takes one of each for every pair, and"
            " at least one pair."
        )
    pairs = zip(left, right, strict=True)
    differences = [0.0 if math.isinf(a) and math.isinf(b) else a - b for a, b in pairs]
    if len(differences) < 2 or not np.isfinite(differences).all():
        mean = float(np.mean(differences))
        return Interval(mean, mean, mean)
    return bootstrap_mean(differences, confidence)


def verdict(difference: Interval, margin: float) -> str:
    """Judges a difference of losses against a margin that was stated beforehand.

    To ask that the whole interval lies inside the margin is the test of equivalence by two one-sided tests (TOST), at
    half the level of the interval's tails together: stricter than its usual form with a 90% interval.

    Args:
        difference: Left minus right; positive is worse for the left side.
        margin: Largest difference that counts as none, > 0.

    Returns:
        ``equivalent`` if the whole interval is inside the margin, else ``worse`` or ``better`` if it leaves out zero,
        else ``undecided``.
    """
    if -margin < difference.low and difference.high < margin:
        return "equivalent"
    if difference.low > 0:
        return "worse"
    return "better" if difference.high < 0 else "undecided"
