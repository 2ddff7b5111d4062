"""How long something that is counted will still take, for lines of progress."""

from __future__ import annotations

import time


class TimeLeft:
    """Estimates by the pace since the first count, so that what was there already counts for nothing."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def text(self, done: int, total: int) -> str:
        """Returns ``, about 12 min left``, or nothing while that is not known or there is nothing left.

        Args:
            done: How much is done.
            total: How much there is.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = (done, now)
        count, since = self._first
        if not count < done < total:
            return ""
        return f", about {duration((now - since) / (done - count) * (total - done))} left"


def duration(seconds: float) -> str:
    """Returns seconds as text.

    Args:
        seconds: How many.
    """
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
