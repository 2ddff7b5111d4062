"""What environments with a row for every knob have in common as a ``VecEnv`` of stable-baselines3."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices

from autoprec.encoding import FEATURES, LIMIT

Array = NDArray[Any]


class RowVecEnv(VecEnv):
    """A ``VecEnv`` whose sub-environments are rows of runs, with no attributes, methods or wrappers of their own.

    Args:
        rows: How many there are.
    """

    def __init__(self, rows: int) -> None:
        self.render_mode = None
        space = gymnasium.spaces.Box(-LIMIT, LIMIT, (len(FEATURES),), np.float32)
        super().__init__(rows, space, gymnasium.spaces.Discrete(3))

    def checked(self, actions: Array) -> Array:
        """Returns actions as an array.

        Args:
            actions: ``[rows]``: 0 lowers, 1 keeps, 2 raises.

        Raises:
            ValueError: If there is not one for each row, or one is something else.
        """
        moves = np.asarray(actions)
        if moves.shape != (self.num_envs,) or not np.isin(moves, (0, 1, 2)).all():
            raise ValueError(f"Passed actions {list(moves.shape)}. There must be {self.num_envs}, each 0, 1 or 2.")
        return moves

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Returns an attribute of the whole environment for each row asked for."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Sets an attribute of the whole environment; rows have none of their own."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        """Calls a method once and hands out one entry of its result to each row asked for."""
        result = getattr(self, method_name)(*args, **kwargs)
        return [result[index] for index in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        """Says that no row is wrapped."""
        return [False] * len(list(self._get_indices(indices)))
