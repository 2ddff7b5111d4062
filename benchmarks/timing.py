"""Interleaved timing: variants take turns in every round, and only ratios within a round are compared.

Thread-CPU time of this thread, so that other processes on the machine do not count; with more than one thread, wall
time. The order of the variants is reversed in every other round.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Timing:
    """Times of the variants of one row.

    Attributes:
        seconds: For each variant its time per call in every round.
    """

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """Median over the rounds of ``name``'s time over ``base``'s."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True))

    def spread(self, name: str, base: str) -> float:
        """Half the distance between the quartiles of that ratio."""
        ratios = [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        return (high - low) / 2


def measure(variants: Mapping[str, Callable[[], object]], *, rounds: int = 9, seconds: float = 0.02) -> Timing:
    """Times callables against each other.

    Args:
        variants: What to call, by name.
        rounds: Rounds after one that does not count.
        seconds: About how long one variant runs in one round.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = {name: _calls_for(call, seconds) for name, call in variants.items()}
    found: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for _ in range(rounds):
        for name in order:
            call, count = variants[name], calls[name]
            start = clock()
            for _ in range(count):
                call()
            found[name].append((clock() - start) / count)
        order.reverse()
    return Timing(found)


def plain_reads(memory: Tensor) -> dict[str, Callable[[], object]]:
    """Returns ways of reading memory that do next to nothing else; the fastest tells the bandwidth.

    Args:
        memory: Zeros, float32, contiguous.
    """
    calls: dict[str, Callable[[], object]] = {"sum": memory.sum, "dot": lambda: torch.dot(memory, memory)}
    search = getattr(ctypes.CDLL(None), "memchr", None)
    if search is not None:
        search.argtypes, search.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
        # there is no byte but 0, so that looking for 1 reads everything
        calls["memchr"] = lambda: search(memory.data_ptr(), 1, memory.nbytes)
    return calls


def _calls_for(call: Callable[[], object], seconds: float) -> int:
    call()
    start = time.perf_counter()
    call()
    return max(1, min(2000, int(seconds / max(time.perf_counter() - start, 1e-9))))
