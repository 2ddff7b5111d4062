"""What follows from the measured times: ratios within rounds, their medians and spreads, geometric means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.arms import ARMS

CLOCKS = {1: 0, 2: 1}
"""Place of the clock in a lap, by threads: the thread's processor time at one thread, else the wall."""


class Ratio(NamedTuple):
    """A ratio of times.

    Args:
        value: Median over the rounds.
        low: Lower quartile.
        high: Upper quartile.
    """

    value: float
    low: float
    high: float


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Returns the ratio of two lists of times that belong together round by round.

    Args:
        numerators: Times of the arm above the line.
        denominators: Times of the arm below it, of the same rounds.
    """
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    if len(ratios) < 2:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(statistics.median(ratios), low, high)


def geomean(values: Iterable[float]) -> float:
    """Returns the geometric mean, NaN of nothing.

    Args:
        values: Positive numbers.
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


class RowTimes:
    """Times of the arms of one row.

    Args:
        result: What a ``trainer`` or ``bare`` job wrote.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.job = result["job"]
        self.name: str = self.job["row"]
        self.threads: int = self.job["threads"]
        clock = CLOCKS.get(self.threads, 1)
        self.times = {arm: [lap[clock] for lap in laps] for arm, laps in result["laps"].items()}

    @property
    def family(self) -> str:
        """``mlp``, ``gpt`` or ``cnn``."""
        return self.name.split("-")[0]

    def median_ms(self, arm: str) -> float:
        """Median milliseconds of a step; NaN without that arm.

        Args:
            arm: Its name.
        """
        return statistics.median(self.times[arm]) * 1e3 if arm in self.times else math.nan

    def speed_up(self, base: str, arm: str = "ours") -> Ratio | None:
        """Time of ``base`` over time of ``arm``; ``None`` where one of them was not measured.

        Args:
            base: What it is compared with.
            arm: What is faster where the ratio exceeds 1.
        """
        if base not in self.times or arm not in self.times:
            return None
        return ratio(self.times[base], self.times[arm])

    def fastest_static(self) -> str | None:
        """The static arm that is fastest, ``None`` without one."""
        names = [name for name in self.times if name in ARMS and ARMS[name].is_static]
        return min(names, key=lambda name: statistics.median(self.times[name]), default=None)
