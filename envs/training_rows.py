"""Trainings of the user's own module with a row for every knob, as ``ProxyVecEnv`` has them.

A policy of rows that was trained on proxies goes on learning here: the same spaces and the same order of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from autoprec.encoding import FEATURES
from autoprec.envs.row_vec_env import RowVecEnv
from autoprec.envs.training_env import TrainingEnv

Array = NDArray[Any]


class TrainingRows(RowVecEnv):
    """Steps trainings one after the other; each of their knobs is a sub-environment with ``Discrete(3)``.

    All rows of a training get its reward and end together; the next fit begins at once.

    Args:
        trainings: Environments, in a time limit if need be; each may train another module.

    Raises:
        ValueError: If there are none, or one comes twice.
        TypeError: If one is no ``TrainingEnv``.
    """

    def __init__(self, trainings: Sequence[gymnasium.Env[Any, Any]]) -> None:
        if not trainings:
            raise ValueError("Passed `TrainingRows([])`. It needs one environment at least.")
        self.trainings = list(trainings)
        if len({id(_inner(env)) for env in self.trainings}) < len(self.trainings):
            raise ValueError("Passed `TrainingRows` an environment twice. Each trains one module: make one for each.")
        counts = [_inner(env).rows for env in self.trainings]
        self.run_of_row = np.repeat(np.arange(len(counts)), counts)
        """The training that each row belongs to."""
        self._slices = [slice(end - count, end) for end, count in zip(np.cumsum(counts), counts, strict=True)]
        self._actions: Array = np.ones(len(self.run_of_row), dtype=np.int64)
        self._returns, self._lengths = np.zeros((2, len(counts)))
        super().__init__(len(self.run_of_row))

    def reset(self) -> NDArray[np.float32]:
        """Begins every training anew and returns the first rows."""
        rows = []
        for env, where in zip(self.trainings, self._slices, strict=True):
            rows.append(_as_rows(env.reset(seed=self._seeds[where.start])[0]))
        self._returns[:] = self._lengths[:] = 0
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return np.concatenate(rows)

    def step_async(self, actions: Array) -> None:
        """Takes one action for each row."""
        self._actions = self.checked(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Lets every training run to its next decision."""
        observation = np.empty((self.num_envs, len(FEATURES)), dtype=np.float32)
        rewards = np.empty(self.num_envs, dtype=np.float32)
        dones = np.empty(self.num_envs, dtype=bool)
        infos: list[dict[str, Any]] = []
        for index, where in enumerate(self._slices):
            observation[where], rewards[where], dones[where], found = self._step(index)
            infos += found
        return observation, rewards, dones, infos

    def close(self) -> None:
        """Ends every training. May be called twice."""
        for env in self.trainings:
            env.close()

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns ``[rows, 3]``: which actions lead somewhere; ``sb3_contrib`` asks for it."""
        return np.concatenate([_inner(env).action_masks().reshape(-1, 3) for env in self.trainings])

    def _step(self, index: int) -> tuple[Array, float, bool, list[dict[str, Any]]]:
        env, where = self.trainings[index], self._slices[index]
        flat, value, terminated, truncated, info = env.step(self._actions[where])
        rows, reward = _as_rows(flat), float(value)
        self._returns[index] += reward
        self._lengths[index] += 1
        infos = [dict(info) for _ in rows]
        if not (terminated or truncated):
            return rows, reward, False, infos
        episode = {"r": float(self._returns[index]), "l": int(self._lengths[index]), "t": float(info["time_share"])}
        for row, found in zip(rows, infos, strict=True):
            found |= {
                "terminal_observation": row.copy(),
                "TimeLimit.truncated": truncated and not terminated,
                "episode": dict(episode),
            }
        self._returns[index] = self._lengths[index] = 0
        return _as_rows(env.reset()[0]), reward, True, infos


def _inner(env: gymnasium.Env[Any, Any]) -> TrainingEnv:
    inner = getattr(env, "unwrapped", env)
    if not isinstance(inner, TrainingEnv):
        raise TypeError(
            f"Passed `TrainingRows` a `{type(inner).__qualname__}`. It takes `TrainingEnv`s, wrapped or not."
        )
    return inner


def _as_rows(flat: Array) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = flat.reshape(-1, len(FEATURES))
    return rows
