"""Times of a run's steps: their median, how it compares with that of the first steps, and with other batch sizes.

What lives here: arithmetic on moments that are handed in. What does not: reading a clock, and predicting times.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

FEWEST_STEPS = 8
"""Step times that make a median."""
_STEPS = 32


class StepClock:
    """Keeps the latest step times of one fit.

    Attributes:
        first_ms: The first median of the run, NaN before there was one.
    """

    def __init__(self) -> None:
        self.first_ms = math.nan
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._last_s: float | None = None
        self._size: int | None = None
        self._size_ms: dict[int, float] = {}

    def note(self, now_s: float, has_new_formats: bool) -> None:
        """Called when a window opens.

        Args:
            now_s: The moment.
            has_new_formats: Whether it is the first one in some formats: earlier times say nothing of it.
        """
        if has_new_formats:
            self._restart()
            self._size_ms.clear()
        elif self._last_s is not None:
            self._step_s.append(now_s - self._last_s)
        self._last_s = now_s

    def note_pause(self) -> None:
        """Called when something was done between two steps that belongs to none."""
        self._last_s = None

    def note_size(self, batch_size: int | None) -> None:
        """Called when a decision is due: keeps the time of the batch size.

        Args:
            batch_size: The size in force, ``None`` if it is not known. When it has changed, steps are timed anew.
        """
        if batch_size != self._size:
            is_new, self._size = self._size is not None, batch_size
            if is_new:
                self._restart()
        step_ms = self.step_ms
        if step_ms is None:
            return
        self.first_ms = step_ms if math.isnan(self.first_ms) else self.first_ms
        if batch_size is not None:
            self._size_ms[batch_size] = step_ms

    def _restart(self) -> None:
        self._step_s.clear()
        self._last_s = None

    @property
    def step_ms(self) -> float | None:
        """Median of the latest step times, ``None`` while there are too few."""
        return statistics.median(self._step_s) * 1e3 if len(self._step_s) >= FEWEST_STEPS else None

    @property
    def time_bits(self) -> float:
        """log2 of the step time over that of the first steps; NaN while one of them is not known."""
        step_ms = self.step_ms
        is_known = step_ms is not None and step_ms > 0.0 and self.first_ms > 0.0
        return math.log2(step_ms / self.first_ms) if is_known and step_ms is not None else math.nan

    def cost_of_size(self, size: int, other: int) -> float:
        """Relative change of the time per sample at another batch size; NaN where not both were timed in these formats.

        Args:
            size: The size in force.
            other: The other one.
        """
        now, then = self._size_ms.get(size), self._size_ms.get(other)
        return math.nan if now is None or then is None else then * size / (now * other) - 1.0
