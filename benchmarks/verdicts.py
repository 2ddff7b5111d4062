"""Paired differences, how sure they are, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
_LEVEL = 0.95


class Difference(NamedTuple):
    """A mean of paired differences with its 95% interval.

    Attributes:
        mean: Mean over the pairs; infinite where one side of a pair diverged.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float


def paired_difference(left: Sequence[float], right: Sequence[float]) -> Difference:
    """Bootstraps the mean of ``left - right``: pairs are drawn again with replacement, percentiles of their means.

    Plain percentiles are too narrow for few pairs, so the percentiles are moved out by what Student's t distribution
    asks for beyond the normal one (Hesterberg, arXiv:1411.5279, expanded percentile interval).

    Args:
        left: One value for each pair, ``inf`` where a run diverged.
        right: The other values, in the same order.

    Raises:
        ValueError: If there is no pair, or a value has no partner.
    """
    if not left or len(left) != len(right):
        raise ValueError(
            f"Passed `paired_difference` {len(left)} and {len(right)} values. It takes one of each for every pair, and"
            " at least one pair."
        )
    pairs = zip(left, right, strict=True)
    differences = np.array([0.0 if math.isinf(a) and math.isinf(b) else a - b for a, b in pairs])
    if not np.isfinite(differences).all():
        mean = float(differences.mean())
        return Difference(mean, mean, mean)
    drawn = np.random.default_rng(0).integers(len(differences), size=(RESAMPLES, len(differences)))
    tail = 100.0 * _expanded_tail(len(differences))
    low, high = np.percentile(differences[drawn].mean(axis=1), [tail, 100.0 - tail])
    return Difference(float(differences.mean()), float(low), float(high))


def _expanded_tail(count: int) -> float:
    """Share of the resampled means on either side of the interval."""
    z = NormalDist().inv_cdf(0.5 + _LEVEL / 2)
    degrees = count - 1
    if not degrees:
        return 0.0
    # Student's quantile, expanded in 1 / degrees
    t = z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return NormalDist().cdf(-math.sqrt(count / degrees) * t)


def verdict(difference: Difference, margin: float) -> str:
    """Judges a difference of losses against a margin that was stated beforehand.

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
