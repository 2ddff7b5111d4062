"""Rewards: progress in units of the twin, a term for time that sums to the budget, and what divergence costs.

Time budget: 2 s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.envs.reward import RewardWeights, is_diverged, progress, reward, score

losses = st.floats(1e-6, 1e6)


def array(*values: float) -> Any:
    return np.array(values)


@given(before=losses, after=losses, twin=st.floats(0.25, 10))
def test_progress_is_bounded_and_has_the_sign_of_what_the_loss_did(before: float, after: float, twin: float) -> None:
    made = float(progress(array(before), array(after), array(twin))[0])
    assert -1.0 <= made <= 1.0
    assert made == 0 or (made > 0) == (after < before)


def test_progress_of_a_whole_twin_is_one() -> None:
    assert progress(array(2.0), array(2.0 / math.e), array(1.0)) == pytest.approx(1.0)
    assert progress(array(2.0, 2.0), array(math.nan, math.inf), array(1.0, 1.0)).tolist() == [-1.0, -1.0]


@given(cuts=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), accuracy=st.floats(0.0, 2.0))
def test_time_sums_to_the_budget_however_it_is_cut(cuts: list[float], accuracy: float) -> None:
    """The term is a potential: it is worth the same over every whole episode."""
    at = np.array([0.0, *sorted(cuts), 1.0])
    made = np.linspace(-0.1, 0.2, len(at) - 1)
    none = np.zeros(len(made), dtype=bool)
    weights = RewardWeights(accuracy=accuracy)
    total = reward(made, np.diff(at), np.ones(len(made)), none, weights).sum()
    assert total == pytest.approx(accuracy * made.sum() - 1.0)


def test_weights_of_memory_and_divergence() -> None:
    weights = RewardWeights(time=0.5, memory=2.0, divergence=3.0)
    values = reward(array(0.0, 0.0), array(0.1, 0.1), array(1.0, 0.25), np.array([False, True]), weights)
    assert values.tolist() == pytest.approx([-0.25, -0.1 - 3.0])


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_weights_without_sense_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="RewardWeights"):
        RewardWeights(memory=value)


def test_divergence() -> None:
    assert is_diverged(array(9.0, 9.1, math.nan, math.inf), array(2.0)).tolist() == [False, True, True, True]


def test_score() -> None:
    scores = score(array(2.0), array(2.0 / math.e, 2.0, 2e9, 2e-9, math.nan), array(1.0))
    assert scores.tolist() == pytest.approx([1.0, 0.0, -2.0, 5.0, -2.0])
