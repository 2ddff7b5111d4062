"""How much energy a run takes, where something counts it.

Counters are of a whole device, not of a process: with anything else on it, runs that take turns still compare, while
joules and operations per joule are too high and too low.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from types import TracebackType

import torch

from autoprec.compare.energy_counters import Counter, NoCounterError, Probes, find_counter

_READ_EVERY_S = 20.0


class EnergyMeter:
    """Adds up the joules of everything that runs inside of it; may be entered again and again, one at a time.

    Args:
        device: Where the model trains: NVIDIA's counter for a GPU, RAPL for a CPU, else codecarbon's estimate.
        probes: What is asked; for tests.

    Attributes:
        source: What counts, with the word ``estimated`` where it is an estimate; ``None`` where nothing does.
        reason: Why there is no counter, or no better one; empty where there is nothing to say.
    """

    def __init__(self, device: torch.device | str, probes: Probes | None = None) -> None:
        self._counter, self.reason = find_counter(torch.device(device), probes or Probes())
        self.source = None if self._counter is None else self._counter.source
        self._joules = 0.0
        self._lock = Lock()
        self._ended = Event()
        self._reader: Thread | None = None

    @property
    def joules(self) -> float | None:
        """Joules so far; ``None`` where nothing counts them."""
        return None if self._counter is None else self._joules

    def __enter__(self) -> EnergyMeter:
        with self._counting() as counter:
            if counter is not None:
                counter.start()
        if self._counter is not None and self._counter.wraps:
            self._ended.clear()
            self._reader = Thread(target=self._read_now_and_then, name="autoprec-energy", daemon=True)
            self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._ended.set()
            self._reader.join()
            self._reader = None
        with self._counting() as counter:
            if counter is not None:
                self._joules += counter.read()

    def _read_now_and_then(self) -> None:
        """So that a counter that starts again from 0 does so once between two readings at most."""
        while not self._ended.wait(_READ_EVERY_S):
            with self._counting() as counter:
                if counter is not None:
                    counter.read()

    @contextmanager
    def _counting(self) -> Iterator[Counter | None]:
        """One thread at a time; a counter that fails is given up, because a part of the joules is not their sum."""
        with self._lock:
            try:
                yield self._counter
            except NoCounterError as error:
                self._counter, self.source = None, None
                self.reason = str(error)
