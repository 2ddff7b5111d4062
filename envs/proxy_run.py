"""One proxy run at a time as an environment of gymnasium: the view of ``ProxyVecEnv`` that a plain agent expects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from autoprec.encoding import FEATURES, LIMIT
from autoprec.envs.proxies import Bank, Task
from autoprec.envs.proxy_env import ProxyVecEnv, load_tasks
from autoprec.envs.twins import Twin

Array = NDArray[Any]


class ProxyRunEnv(gymnasium.Env[Array, Array]):
    """Steers one proxy run after another, all rows of it at once; spaces are those of ``TrainingEnv``.

    Args:
        tasks: Tasks with their twins; ``None`` for the first 64 of the train bank, whose twins are trained and kept on
            disk where they are missing.
        units: Tasks with so many units are played; ``None`` for the number that most have.
        render_mode: ``None``; there is nothing to see.
        options: See ``ProxyVecEnv``.

    Raises:
        ValueError: If no task has so many units.
    """

    metadata = {"render_modes": []}

    def __init__(
        self,
        tasks: Sequence[tuple[Task, Twin]] | None = None,
        *,
        units: int | None = None,
        render_mode: None = None,
        **options: Any,
    ) -> None:
        tasks = load_tasks(Bank("train", 64)) if tasks is None else tasks
        counts = Counter(task.units for task, _ in tasks)
        units = counts.most_common(1)[0][0] if units is None and counts else units
        chosen = [pair for pair in tasks if pair[0].units == units]
        if not chosen:
            raise ValueError(f"Passed `units={units!r}`. Tasks have {sorted(counts)} units.")
        self.render_mode = render_mode
        self._runs = ProxyVecEnv(chosen, runs=1, **options)
        self._is_under_way = False
        self.rows = self._runs.num_envs
        """Number of knobs."""
        self.observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (self.rows * len(FEATURES),), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([3] * self.rows)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begins a run of a task that is drawn.

        Args:
            seed: Of the order of tasks.
            options: Of no effect.
        """
        super().reset(seed=seed)
        self._runs.seed(int(self.np_random.integers(2**31)))
        self._is_under_way = True
        return self._runs.reset().reshape(-1), {}

    def step(self, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Moves the knobs and runs one window.

        Args:
            action: ``[rows]``: 0 lowers, 1 keeps, 2 raises.

        Raises:
            ResetNeeded: If no run is under way.
            ValueError: If the action is not in the action space.
        """
        if not self._is_under_way:
            raise ResetNeeded("No run is under way. Call `reset` first.")
        self._runs.step_async(action)
        rows, rewards, dones, infos = self._runs.step_wait()
        assert isinstance(rows, np.ndarray)
        info = dict(infos[0])
        if dones[0]:
            rows = np.stack([each["terminal_observation"] for each in infos])
            self._is_under_way = False
        is_cut = bool(info.pop("TimeLimit.truncated", False))
        for name in ("terminal_observation", "episode"):
            info.pop(name, None)
        return rows.reshape(-1), float(rewards[0]), bool(dones[0]) and not is_cut, is_cut, info

    def close(self) -> None:
        """Frees the run. May be called twice."""
        self._runs.close()
        self._is_under_way = False

    def action_masks(self) -> NDArray[np.bool_]:
        """Returns ``[rows * 3]``: which actions lead somewhere; ``sb3_contrib`` asks for it."""
        return self._runs.action_masks().reshape(-1)
