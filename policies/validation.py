"""How good a policy is on tasks that it does not learn from: each is played once, with the likeliest actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import EvalCallback

from autoprec.envs.proxies import Task
from autoprec.envs.proxy_env import ProxyVecEnv
from autoprec.envs.twins import Twin
from autoprec.policies.network import PolicyNetwork
from autoprec.policies.train_settings import TrainSettings


class Validation(EvalCallback):
    """An ``EvalCallback`` that plays each task once when ``learn`` ends, not some episodes at some steps.

    Args:
        tasks: Tasks with their twins.
        settings: Of the training.
        export: Makes the network that would ship of the model that ``learn`` trains.
    """

    eval_env: ProxyVecEnv

    def __init__(
        self, tasks: Sequence[tuple[Task, Twin]], settings: TrainSettings, export: Callable[[Any], PolicyNetwork]
    ) -> None:
        env = ProxyVecEnv(
            tasks,
            runs=len(tasks),
            mode=settings.mode,
            settings=settings.table,
            weights=settings.reward,
            guard=settings.guard,
            is_shuffled=False,
        )
        self._export = export
        super().__init__(env, eval_freq=0, verbose=0)
        self.result: dict[str, Any] = {}
        """Of the last time: mean score, its standard error, scores in the order of seeds, and what went wrong."""

    def evaluate(self, network: PolicyNetwork) -> dict[str, Any]:
        """Plays the tasks and returns the result.

        Args:
            network: Decides.
        """
        rows: Any = self.eval_env.reset()
        ended: list[dict[str, Any]] = []
        first_rows = np.flatnonzero(np.diff(self.eval_env.run_of_row, prepend=-1))
        while not self.eval_env.is_idle.all():
            rows, _, _, infos = self.eval_env.step(_likeliest(network, rows))
            ended += [infos[row] for row in first_rows if infos[row]]
        ended.sort(key=lambda info: info["seed"])
        scores = np.array([info["score"] for info in ended])
        error = float(scores.std(ddof=1) / np.sqrt(len(scores))) if len(scores) > 1 else 0.0
        attempted = sum(info["steps"] for info in ended)
        self.last_mean_reward = float(np.mean([info["episode"]["r"] for info in ended]))
        self.result = {
            "score": float(scores.mean()),
            "standard_error": error,
            "scores": [float(value) for value in scores],
            "diverged": float(np.mean([info["diverged"] for info in ended])),
            "skipped": sum(info["skipped"] for info in ended) / max(attempted, 1),
        }
        return self.result

    def _on_training_end(self) -> None:
        result = self.evaluate(self._export(self.model))
        for name in ("score", "diverged", "skipped"):
            self.logger.record(f"eval/{name}", result[name])
        self.logger.record("eval/mean_reward", self.last_mean_reward)
        self.logger.dump(self.num_timesteps)


def _likeliest(network: PolicyNetwork, rows: NDArray[np.float32]) -> NDArray[np.int64]:
    with torch.no_grad():
        logits = network(torch.from_numpy(rows))
    actions: NDArray[np.int64] = logits.argmax(dim=1).numpy()
    return actions
