"""How good a policy is on runs that it does not learn from, with the likeliest actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import EvalCallback

from autoprec.policies.network import PolicyNetwork
from autoprec.policies.training_tasks import TrainingTasks


class Validation(EvalCallback):
    """An ``EvalCallback`` that plays each run of validation once when ``learn`` ends, not some episodes at some steps.

    Args:
        tasks: What is played.
        export: Makes the network that would ship of the model that ``learn`` trains.
    """

    def __init__(self, tasks: TrainingTasks, export: Callable[[Any], PolicyNetwork]) -> None:
        self._tasks, self._export = tasks, export
        super().__init__(tasks.validation_env, eval_freq=0, verbose=0)
        self.result: dict[str, Any] = {}
        """Of the last time: mean score, its standard error, scores in the order of seeds, and what went wrong."""

    def evaluate(self, network: PolicyNetwork) -> dict[str, Any]:
        """Plays the runs and returns the result.

        Args:
            network: Decides.
        """
        played = self._tasks.play(network)
        scores = np.array([one.score for one in played])
        error = float(scores.std(ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else 0.0
        attempted = sum(one.steps for one in played)
        self.last_mean_reward = float(np.mean([one.reward for one in played]))
        self.result = {
            "score": float(scores.mean()),
            "standard_error": error,
            "scores": [float(value) for value in scores],
            "diverged": float(np.mean([one.diverged for one in played])),
            "skipped": sum(one.skipped for one in played) / max(attempted, 1),
        }
        return self.result

    def _on_training_end(self) -> None:
        result = self.evaluate(self._export(self.model))
        for name in ("score", "diverged", "skipped"):
            self.logger.record(f"eval/{name}", result[name])
        self.logger.record("eval/mean_reward", self.last_mean_reward)
        self.logger.dump(self.num_timesteps)
