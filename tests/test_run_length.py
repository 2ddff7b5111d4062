"""Counts of what is left of a run, against Lightning's conditions carried out one batch after the other.

Time budget: 5 s.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.run_length import EpochPlan, RunLength


def play(plan: EpochPlan, epochs_left: int | None, done: int | None, steps_left: int | None, frequency: int) -> int:
    """Calls of a schedule until the run ends."""
    assert plan.batches is not None
    batch, epoch, calls, steps = done or 0, 0 if done is not None else 1, 0, 0
    while True:
        if batch == plan.batches or done is None and epoch == 1 and batch == 0 and not epochs_left:
            epoch, batch = epoch + 1, 0
        if epochs_left is not None and epoch > epochs_left:
            return calls
        if steps_left is not None and steps >= steps_left:
            return calls
        batch += 1
        if batch % plan.accumulate == 0 or batch == plan.batches:
            steps += 1
            calls += batch % frequency == 0


def test_calls_are_those_of_the_loop() -> None:
    grid = itertools.product((1, 5, 8), (1, 2, 3, 8), (1, 2, 3), (0, 1, 2), (None, 0, 1), (None, 0, 1, 4, 9))
    count = 0
    for batches, accumulate, frequency, epochs_left, windows, steps_left in grid:
        done = None if windows is None else min(windows * accumulate, batches)
        plan = EpochPlan(batches=batches, accumulate=accumulate)
        other = EpochPlan(batches=batches, accumulate=1)
        length = RunLength(before=plan, now=other, epochs_left=epochs_left, done=done, steps_left=steps_left)
        found = length.calls(frequency)
        if found is None:  # `max_steps` ends it either way
            assert steps_left is not None
            assert length.ratio(frequency) == 1
            continue
        count += 1
        expected = tuple(play(each, epochs_left, done, steps_left, frequency) for each in (plan, other))
        assert found == expected, (plan, length, frequency)
    assert count > 500


def test_ratio_of_calls() -> None:
    length = partial(RunLength, before=EpochPlan(batches=8), now=EpochPlan(batches=16))
    assert length(epochs_left=3).ratio() == Fraction(1, 2)
    assert length(epochs_left=0).ratio() == 1
    assert length(epochs_left=None, steps_left=7).ratio() == 1
    assert length(epochs_left=3, steps_left=24).ratio() == 1
    assert length(epochs_left=3, steps_left=32).ratio() == Fraction(24, 32)


def test_ratio_without_lengths_is_that_of_samples() -> None:
    before, now = EpochPlan(batches=None, batch_size=8), EpochPlan(batches=None, accumulate=2, batch_size=12)
    assert RunLength(before=before, now=now, epochs_left=3).ratio() == 3
    assert RunLength(before=before, now=now, epochs_left=3).ratio(frequency=2) == Fraction(3, 2)
    before, now = EpochPlan(batches=8), EpochPlan(batches=8, accumulate=4)
    assert RunLength(before=before, now=now, epochs_left=None).ratio() == 4


def test_no_call_is_left() -> None:
    length = RunLength(before=EpochPlan(batches=8), now=EpochPlan(batches=2), epochs_left=1)
    assert length.ratio(frequency=2) == 4
    assert length.ratio(frequency=3) is None
    assert length.ratio(frequency=9) == 1  # there was none before


def _progress(**counts: int) -> Any:
    return SimpleNamespace(**counts)


def trainer(**changes: Any) -> Any:
    """As Lightning's is in the fourth batch of the second epoch, before its step."""
    loop = SimpleNamespace(
        batch_progress=SimpleNamespace(current=_progress(ready=4, processed=3), total=_progress(processed=11))
    )
    fit_loop = SimpleNamespace(
        epoch_progress=SimpleNamespace(current=_progress(ready=2, started=2, processed=1)), epoch_loop=loop
    )
    facts = {
        "fit_loop": fit_loop,
        "max_epochs": 5,
        "max_steps": -1,
        "global_step": 11,
        "num_training_batches": 8,
        "accumulate_grad_batches": 1,
        "lightning_module": SimpleNamespace(automatic_optimization=True),
    }
    return SimpleNamespace(**{**facts, **changes})


def test_read_from_a_trainer() -> None:
    before = EpochPlan(batches=8, accumulate=2, batch_size=3)
    length = RunLength.of(trainer(), before)
    now = EpochPlan(batches=8, accumulate=1, batch_size=3)
    assert length == RunLength(before=before, now=now, epochs_left=3, done=3, steps_left=None)
    assert RunLength.of(trainer(max_epochs=-1, max_steps=20), before, before) == RunLength(
        before=before, now=before, epochs_left=None, done=3, steps_left=9
    )
    assert EpochPlan.of(trainer(num_training_batches=float("inf"))).batches is None


@pytest.mark.parametrize(("global_step", "left"), [(11, 89), (22, 39), (5, 209)])
def test_manual_optimization_counts_batches(global_step: int, left: int) -> None:
    """One, two and about a half steps of optimizers in each batch."""
    module = SimpleNamespace(automatic_optimization=False)
    found = RunLength.of(trainer(lightning_module=module, max_steps=100, global_step=global_step), EpochPlan(batches=8))
    assert found.steps_left == left
