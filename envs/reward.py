"""What a stretch of training is worth: pure functions of numbers or arrays.

Progress counts in units of what the same training makes in fp32 without clipping in the same time (its twin), so that
tasks compare. The term for time is potential-based: over an episode it sums to the share of the budget that was used,
so it moves no optimum and only pays at once what saved time would pay later, in further steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.floating[Any]]

LEAST_PROGRESS = 0.25
"""Least progress of a twin, in log loss. Tasks with less are left out, their ratios would explode."""

SCORE_RANGE = (-2.0, 5.0)
"""Scores are clipped to this range."""


@dataclass(frozen=True, kw_only=True)
class RewardWeights:
    """What counts how much.

    Args:
        accuracy: Weight of progress in units of the twin's.
        time: Weight of the share of the budget that is used.
        memory: Weight of memory, relative to everything in fp32, while it is in use.
        divergence: What a diverged training costs.

    Raises:
        ValueError: If a weight is negative or not finite.
    """

    accuracy: float = 1.0
    time: float = 1.0
    memory: float = 0.0
    divergence: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"Passed `RewardWeights({name}={value!r})`. Weights are finite and not negative.")


def progress(loss_before: Numbers, loss_after: Numbers, twin_progress: Numbers) -> Numbers:
    """Returns the fall of the log loss in units of the twin's, within [-1, 1].

    Args:
        loss_before: Held-out loss before, > 0.
        loss_after: The same after.
        twin_progress: Fall of the twin's log loss over the whole budget, >= ``LEAST_PROGRESS``.
    """
    with np.errstate(all="ignore"):
        made = (np.log(loss_before) - np.log(loss_after)) / twin_progress
    return np.clip(np.nan_to_num(made, nan=-1.0, posinf=1.0, neginf=-1.0), -1.0, 1.0)


def reward(
    made: Numbers, time_share: Numbers, memory: Numbers, diverged: NDArray[np.bool_], weights: RewardWeights
) -> Numbers:
    """Returns the reward of a stretch.

    Args:
        made: From :func:`progress`.
        time_share: Share of the budget that the stretch took.
        memory: Memory in use relative to everything in fp32.
        diverged: Whether the training ended there because it diverged.
        weights: What counts how much.
    """
    paid = time_share * (weights.time + weights.memory * memory)
    return weights.accuracy * made - paid - weights.divergence * diverged


def is_diverged(loss: Numbers, first_loss: Numbers) -> NDArray[np.bool_]:
    """Says whether a held-out loss is beyond recovery: not finite, or above 3 x the first one + 3.

    Args:
        loss: Held-out loss.
        first_loss: The same before training.
    """
    return ~(loss <= 3.0 * first_loss + 3.0)


def score(first_loss: Numbers, last_loss: Numbers, twin_progress: Numbers) -> Numbers:
    """Returns what a whole training is worth; the fp32 twin has 1.0.

    Args:
        first_loss: Held-out loss before training.
        last_loss: The same at the end of the budget.
        twin_progress: Fall of the twin's log loss.
    """
    with np.errstate(all="ignore"):
        made = (np.log(first_loss) - np.log(last_loss)) / twin_progress
    return np.clip(np.nan_to_num(made, nan=SCORE_RANGE[0], neginf=SCORE_RANGE[0]), *SCORE_RANGE)
