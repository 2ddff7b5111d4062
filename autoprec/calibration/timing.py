"""Times calls in turns, until it is clear which is the fastest.

What lives here: laps, rounds and when to stop. What does not: what is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)
Call = Callable[[], object]
Lap = Callable[[Call, int], float]
"""Runs a call so many times and returns the seconds that one took."""

FEWEST_ROUNDS = 3
MOST_ROUNDS = 9
LAP_S = 1e-3
"""About how long a lap is at least."""
CLEAR = 1.03
"""How much slower all others must be in every round for the winner to be clear."""
_MOST_CALLS = 50


class Deadline:
    """Says how much of a budget is left.

    Args:
        budget_s: Seconds from now on.
        clock: Tells the time in seconds.
    """

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begun = clock()
        self._budget_s = budget_s

    @property
    def spent_s(self) -> float:
        """Seconds since it was made."""
        return self._clock() - self._begun

    @property
    def left_s(self) -> float:
        """Seconds that are left, negative once it is over."""
        return self._budget_s - self.spent_s


def make_lap(device: torch.device) -> Lap:
    """Returns the stopwatch for a device.

    On a CPU with one thread it is that thread's processor time, so that other processes do not count; with more the
    wall's. On a GPU, its own events.

    Args:
        device: Where the calls run.
    """
    if device.type == "cuda":
        return _cuda_lap
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def lap(call: Call, count: int) -> float:
        begun = clock()
        for _ in range(count):
            call()
        return (clock() - begun) / count

    return lap


def _cuda_lap(call: Call, count: int) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(count):
        call()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) * 1e-3 / count


def time_in_turns(calls: Mapping[K, Call], lap: Lap, deadline: Deadline) -> dict[K, float] | None:
    """Times calls against each other; all take turns in every round.

    Stops when one is faster than all others in every round, or after some rounds.

    Args:
        calls: What to time.
        lap: The stopwatch.
        deadline: When to stop at the latest.

    Returns:
        Median seconds of each, ``None`` if there was not the time for the fewest rounds.
    """
    counts: dict[K, int] = {}
    estimated_s = 0.0
    for name, call in calls.items():
        lap(call, 1)  # caches and memory of the first call are not what a step pays
        once = max(lap(call, 1), 1e-9)
        counts[name] = max(1, min(_MOST_CALLS, round(LAP_S / once)))
        estimated_s += FEWEST_ROUNDS * counts[name] * once
        if estimated_s > deadline.left_s:
            return None
    laps: dict[K, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for done in range(MOST_ROUNDS):
        if done >= FEWEST_ROUNDS and (is_clear(laps) or estimated_s / FEWEST_ROUNDS > deadline.left_s):
            break
        for name in order:
            laps[name].append(lap(calls[name], counts[name]))
        order.reverse()
    return {name: statistics.median(seconds) for name, seconds in laps.items()}


def is_clear(laps: Mapping[K, list[float]]) -> bool:
    """Whether one call was clearly the fastest in every round.

    Args:
        laps: Seconds of each call in every round.
    """
    best = min(laps, key=lambda name: statistics.median(laps[name]))
    others = [seconds for name, seconds in laps.items() if name != best]
    return all(mine * CLEAR < theirs for seconds in others for mine, theirs in zip(laps[best], seconds, strict=True))
