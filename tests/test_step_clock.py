"""Step times: what they are relative to, and what they say of batch sizes.

Time budget: 1 s.
"""

from __future__ import annotations

import math

import pytest

from autoprec.step_clock import FEWEST_STEPS, StepClock


class Run:
    """Steps that take a given time."""

    def __init__(self) -> None:
        self.clock, self.now = StepClock(), 0.0

    def steps(self, count: int, step_s: float, has_new_formats: bool = False) -> None:
        for index in range(count):
            self.clock.note(self.now, has_new_formats and index == 0)
            self.now += step_s


def test_too_few_steps_say_nothing() -> None:
    run = Run()
    run.steps(FEWEST_STEPS, 1.0)
    run.clock.note_size(8)
    assert run.clock.step_ms is None
    assert math.isnan(run.clock.time_bits)
    run.steps(1, 1.0)
    assert run.clock.step_ms == 1000.0
    assert math.isnan(run.clock.time_bits), "nobody has asked yet"
    run.clock.note_size(8)
    assert run.clock.time_bits == 0.0


def test_times_are_relative_to_the_first_steps_and_of_one_map() -> None:
    run = Run()
    run.steps(20, 1.0)
    run.clock.note_size(None)
    run.steps(20, 0.25, has_new_formats=True)
    run.clock.note_size(None)
    assert run.clock.time_bits == -2.0


def test_a_pause_is_no_step() -> None:
    run = Run()
    for _ in range(20):
        run.steps(1, 1.0)
        run.clock.note_pause()
        run.now += 100.0
    assert run.clock.step_ms is None


def test_the_time_per_sample_of_sizes_that_were_timed() -> None:
    run = Run()
    run.steps(20, 1.0)
    run.clock.note_size(8)
    assert math.isnan(run.clock.cost_of_size(8, 16))
    run.clock.note_size(16)  # from here on
    run.steps(20, 1.5)
    run.clock.note_size(16)
    assert run.clock.cost_of_size(16, 8) == pytest.approx(1.0 / 0.75 - 1.0)
    assert run.clock.cost_of_size(8, 16) == pytest.approx(-0.25)
    assert run.clock.time_bits == pytest.approx(math.log2(1.5))
    run.steps(1, 1.0, has_new_formats=True)
    assert math.isnan(run.clock.cost_of_size(16, 8)), "they were timed in other formats"
