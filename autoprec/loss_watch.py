"""Tells a loss that is far too high for long from one that only jumps about."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

_WINDOW = 64
_AT_LEAST = 16
# half the spread of a normal distribution lies within so many standard deviations
_ROBUST = 1.4826
# a high loss that has lost so much of what is above the median, from one half of the newest to the other, still falls
_FALLS = 0.1
# smallest spread, in units of the largest median so far: a flat loss is no reason to call a small rise high
_FLOOR = 0.02


class LossWatch:
    """Counts losses in a row above median + ``spreads`` x spread of the losses before.

    The spread is the median distance from the median, at least 2% of the largest median that the run has had: a loss
    that has come down to a hundredth may rise to a third of where it began without counting as high. High losses do not
    enter the median, unless they are accepted. While nothing but exact zeros was seen there is no scale, and no loss is
    high.

    Args:
        spreads: How far above the median is too high; ``inf`` for never.

    Attributes:
        streak: High losses in a row.
        newest: The newest loss, NaN before the first.
    """

    def __init__(self, spreads: float) -> None:
        self.streak = 0
        self.newest = math.nan
        self._spreads = spreads
        self._ordinary: deque[float] = deque(maxlen=_WINDOW)
        self._largest_median = 0.0
        self._high: deque[float] = deque(maxlen=_WINDOW)  # of the streak
        self._accepted = -math.inf
        self._came_down = -math.inf

    @property
    def bound(self) -> float:
        """Losses above it are too high; ``inf`` until enough losses are known."""
        if len(self._ordinary) < _AT_LEAST or math.isinf(self._spreads):
            return math.inf
        return max(self._above_ordinary(), self._accepted)

    def _above_ordinary(self) -> float:
        median = statistics.median(self._ordinary)
        spread = _ROBUST * statistics.median([abs(loss - median) for loss in self._ordinary])
        if len(self._ordinary) == _WINDOW:
            self._largest_median = max(self._largest_median, abs(median))
        spread = max(spread, _FLOOR * max(self._largest_median, abs(median)))
        return median + self._spreads * spread if spread > 0.0 else math.inf

    @property
    def is_falling(self) -> bool:
        """Whether high losses come down, as those of a task do that has just begun."""
        half = len(self._high) // 2
        if half < _AT_LEAST // 4 or not self._ordinary:
            return False
        median, high = statistics.median(self._ordinary), list(self._high)
        before, after = statistics.median(high[:half]), statistics.median(high[half:])
        return after - median < (1.0 - _FALLS) * (before - median)

    def newest_high(self, count: int) -> list[float]:
        """The newest losses of the streak, at most so many."""
        return list(self._high)[-count:]

    @property
    def has_come_down(self) -> bool:
        """Whether losses as high as these have come down by themselves before, as those of a task in turn do."""
        return bool(self._high) and statistics.median(self._high) <= self._came_down

    def accept(self) -> None:
        """Takes the high losses in a row for ordinary ones, now and whenever such losses come again."""
        self._ordinary = deque(self._high, maxlen=_WINDOW)
        self._high.clear()
        self.streak = 0
        self._accepted = max(self._accepted, self._above_ordinary())

    def return_to(self, state: Mapping[str, Any]) -> None:
        """Forgets the losses since ``state_dict`` returned this, but not what was accepted since.

        Losses from before that are too few to tell a high one leave the newer ones in place.
        """
        ordinary, accepted, largest = self._ordinary, self._accepted, self._largest_median
        came_down = self._came_down
        self.load_state_dict(state)
        self._came_down = max(self._came_down, came_down)
        if len(self._ordinary) < _AT_LEAST:
            self._ordinary = ordinary
        self._accepted = max(self._accepted, accepted)
        self._largest_median = max(self._largest_median, largest)

    @property
    def is_calm(self) -> bool:
        """Whether the newest loss is finite and none is high."""
        return self.streak == 0 and not math.isinf(self.newest) and (math.isfinite(self.newest) or not self._ordinary)

    def note(self, losses: Iterable[float]) -> None:
        """Notes losses, oldest first. The bound is that of the losses before them all.

        Args:
            losses: Finite or not; what is not finite leaves the count as it is, the step is skipped anyway.
        """
        bound = self.bound
        for loss in losses:
            self.newest = loss
            if not math.isfinite(loss):
                continue
            if loss > bound:
                self.streak += 1
                self._high.append(loss)
            else:
                if self.streak >= _AT_LEAST:  # all but the highest tenth: one of them may be an outlier
                    self._came_down = max(self._came_down, sorted(self._high)[len(self._high) * 9 // 10])
                self.streak = 0
                self._high.clear()
                self._ordinary.append(loss)

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {
            "streak": self.streak,
            "newest": self.newest,
            "ordinary": list(self._ordinary),
            "largest_median": self._largest_median,
            "high": list(self._high),
            "accepted": self._accepted,
            "came_down": self._came_down,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned."""
        self.streak, self.newest = int(state["streak"]), float(state["newest"])
        self._ordinary = deque(map(float, state["ordinary"]), maxlen=_WINDOW)
        self._largest_median = float(state["largest_median"])
        self._high = deque(map(float, state.get("high", ())), maxlen=_WINDOW)
        self._accepted = float(state.get("accepted", -math.inf))
        self._came_down = float(state.get("came_down", -math.inf))
