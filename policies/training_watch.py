"""What looks on while a policy is trained: how far it is, which features it has seen, and what was logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter

from autoprec.envs.proxy_env import ProxyVecEnv
from autoprec.envs.training_rows import TrainingRows
from autoprec.policies.training_state import TrainingState


class Progress(NamedTuple):
    """How far a training is.

    Attributes:
        done: Decisions, or twins while those are being trained.
        total: How many there will be.
        phase: ``twins``, ``statistics`` or ``learning``.
        first: Validation score before learning; in offset mode the table's. NaN until it is known.
        last: Latest validation score.
        best: Best one.
    """

    done: int
    total: int
    phase: str
    first: float = float("nan")
    last: float = float("nan")
    best: float = float("nan")


OnProgress = Callable[[Progress], None]


class Watch(BaseCallback):
    """Counts rollouts, tells how far the training is, and widens the training range by what is seen.

    Args:
        state: Of the training, as the last segment has left it.
        total: Rollouts of the whole training.
        env: Environment of the segment.
        tell: Called after each rollout.
    """

    def __init__(self, state: TrainingState, total: int, env: ProxyVecEnv | TrainingRows, tell: OnProgress) -> None:
        super().__init__()
        self.runs = int(env.run_of_row[-1]) + 1
        """Runs side by side."""
        self._state, self._total, self._tell = state, total, tell
        self._begun = 0

    @property
    def share(self) -> float:
        """Share of all rollouts that were over before the one that is learnt from."""
        return (self._state.rollouts + max(self._begun - 1, 0)) / self._total

    def _on_rollout_start(self) -> None:
        self._begun += 1

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        model: Any = self.model
        state, of_rollout = self._state, model.n_steps * self.runs
        state.widen(torch.from_numpy(model.rollout_buffer.observations).flatten(0, 1))
        done, total = state.decisions + self._begun * of_rollout, state.decisions
        total += (self._total - state.rollouts) * of_rollout
        scores = (state.validations[index]["score"] for index in (0, -1, state.best_at))
        self._tell(Progress(done, total, "learning", *scores))


class Metrics(KVWriter):
    """Keeps what stable-baselines3 logs.

    Args:
        kept: Gets an entry for each rollout and each validation.
    """

    def __init__(self, kept: list[dict[str, float]]) -> None:
        self._kept = kept

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        """Takes what was logged."""
        self._kept.append({"timesteps": float(step), **{name: float(value) for name, value in key_values.items()}})

    def close(self) -> None:
        """Has nothing to free."""
