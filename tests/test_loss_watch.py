"""When a loss is too high for long.

Time budget: 2 s.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from autoprec.loss_watch import LossWatch


def watched(losses: Sequence[float], spreads: float = 20.0, at_once: int = 16) -> LossWatch:
    watch = LossWatch(spreads)
    for start in range(0, len(losses), at_once):
        watch.note(losses[start : start + at_once])
    return watch


def noisy(level: float, count: int, share: float = 0.1) -> list[float]:
    generator = random.Random(0)
    return [level * (1 + share * generator.gauss(0, 1)) for _ in range(count)]


HEALTHY = {
    "noise": noisy(2.0, 300),
    "flat": [0.7] * 300,
    "zero": [0.0] * 300,
    "falling": [2.3 * 0.98**n for n in range(300)],
    "falling steeply": [1e6 * 0.8**n for n in range(100)],
    "jumps": noisy(2.0, 150) + [50.0] * 10 + noisy(2.0, 150),
    "a schedule begins anew": [2.3 * 0.97**n for n in range(200)] + [0.2] * 100,
    "negative": noisy(-3.0, 300),
    "noise from zero on": [abs(loss) for loss in noisy(1.0, 300, 1.0)],
    "zero, then rewards": [0.0] * 100 + [1e-9] * 100,
    "nan in between": (noisy(1.0, 60) + [math.nan, math.inf]) * 5,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_ordinary_losses_are_not_too_high_for_long(name: str) -> None:
    watch = LossWatch(20.0)
    longest = 0
    for loss in HEALTHY[name]:
        watch.note([loss])
        longest = max(longest, watch.streak)
    assert longest <= 10
    assert watch.streak == 0


BAD = {
    "a jump that stays": noisy(0.1, 200) + noisy(4.0, 60),
    "flat, then a jump": [0.5] * 100 + [5.0] * 60,
    "growing": noisy(1.0, 100) + [1.1**n for n in range(120)],
    "growing from the start": [1.3**n for n in range(200)],
    "negative": noisy(-3.0, 200) + noisy(9.0, 60),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("at_once", [1, 16])
def test_a_loss_that_stays_high_is_counted(name: str, at_once: int) -> None:
    assert watched(BAD[name], at_once=at_once).streak >= 50


def test_a_high_loss_that_falls_is_told_from_one_that_stays() -> None:
    watch = watched(noisy(0.05, 200))
    watch.note([2.3 * 0.98**n for n in range(50)])
    assert watch.streak == 50
    assert watch.is_falling
    watch = watched(noisy(0.05, 200))
    watch.note(noisy(2.3, 50))
    assert not watch.is_falling


def test_accepted_losses_are_ordinary_whenever_they_come_again() -> None:
    watch = watched(noisy(0.05, 100))
    before = watch.state_dict()
    watch.note(noisy(2.3, 60))
    watch.accept()
    assert watch.is_calm
    watch.note(noisy(0.05, 100))
    watch.note(noisy(2.3, 60))
    assert watch.streak == 0
    watch.return_to(before)
    watch.note(noisy(2.3, 60))
    assert watch.streak == 0
    again = LossWatch(20.0)
    again.load_state_dict(watch.state_dict())
    assert again.bound == watch.bound


def test_losses_that_came_down_by_themselves_are_known_when_they_come_again() -> None:
    watch = watched(noisy(0.05, 100))
    watch.note(noisy(2.3, 20))
    assert not watch.has_come_down
    watch.note(noisy(0.05, 40))
    watch.note(noisy(2.3, 20))
    assert watch.has_come_down
    again = LossWatch(20.0)
    again.load_state_dict(watch.state_dict())
    assert again.has_come_down
    watch.note(noisy(0.05, 40))
    watch.note(noisy(9.0, 20))
    assert not watch.has_come_down


def test_a_few_high_losses_are_no_block() -> None:
    watch = watched(noisy(0.05, 100))
    watch.note(noisy(2.3, 15))
    watch.note(noisy(0.05, 40))
    watch.note(noisy(2.3, 20))
    assert not watch.has_come_down


def test_high_losses_do_not_raise_the_bound() -> None:
    watch = watched(noisy(1.0, 100))
    bound = watch.bound
    for _ in range(200):
        watch.note([100.0])
    assert watch.bound == bound
    assert watch.streak == 200


def test_losses_that_are_not_finite_leave_the_count_and_are_not_calm() -> None:
    watch = watched([*noisy(1.0, 100), 100.0, 100.0])
    watch.note([math.nan])
    assert watch.streak == 2
    watch.note([1.0])
    assert watch.is_calm
    for value in (math.nan, math.inf, -math.inf):
        watch.note([value])
        assert not watch.is_calm


def test_nothing_is_high_before_there_are_losses_or_without_a_limit() -> None:
    assert LossWatch(20.0).bound == math.inf
    assert LossWatch(20.0).is_calm
    assert watched([1.0] * 15 + [1e9]).streak == 0
    assert watched(BAD["growing"], spreads=math.inf).streak == 0


def test_state_round_trip() -> None:
    watch, other = watched([*noisy(1.0, 100), 100.0]), LossWatch(20.0)
    other.load_state_dict(watch.state_dict())
    assert other.state_dict() == watch.state_dict()
    assert (other.bound, other.streak) == (watch.bound, 1)
