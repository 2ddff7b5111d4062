"""A global of torch that is replaced for a while, in such a way that fits in several threads do not trip each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Replaced:
    """Replaces a value while at least one region needs it; the last one to leave puts the original back.

    What somebody else has set inside a region is theirs, and stays.

    Args:
        read: Returns the value.
        write: Sets it.
        value: What it is inside the regions.

    Attributes:
        original: What was found by the region that came first.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> None:
        self._read, self._write, self._value = read, write, value
        self._lock = threading.Lock()
        self._regions = 0
        self.original: Any = None

    @contextmanager
    def region(self) -> Iterator[None]:
        """Surrounds code that needs the replacement."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begins a region."""
        with self._lock:
            if self._regions == 0:
                self.original = self._read()
                self._write(self._value)
            self._regions += 1

    def leave(self) -> None:
        """Ends a region."""
        with self._lock:
            self._regions -= 1
            if self._regions == 0 and self._read() == self._value:
                self._write(self.original)
