"""The threshold on the global gradient norm: fixed, or a multiple of the running median."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autoprec.config import ClipConfig


class ClipThreshold:
    """State of the clip knob.

    Args:
        config: How the threshold follows the median.
        given: The Trainer's own threshold, ``None`` if it has none.
        follows_median: Whether the threshold follows the median until somebody pins it.

    Attributes:
        value: Threshold on the norm of the unscaled gradients, ``math.inf`` for off.
        multiplier: Threshold in units of the median, while it follows.
        follows_median: Whether it follows.
    """

    def __init__(self, config: ClipConfig, given: float | None, follows_median: bool) -> None:
        self.config = config
        self.given = given
        self.value = math.inf if given is None else given
        self.multiplier = config.multiplier
        self.follows_median = follows_median

    def follow(self, median_norm: float, count: int) -> None:
        """Moves with the median once enough norms are known.

        Args:
            median_norm: Running median of finite norms.
            count: Norms that it rests on.
        """
        if self.follows_median and count >= self.config.min_norms and median_norm > 0:
            self.value = self.multiplier * median_norm

    def pin(self, value: float) -> None:
        """Sets a threshold that stays until it is set again."""
        self.value, self.follows_median = value, False

    def shift(self, value: float, median_norm: float) -> None:
        """Sets a threshold by another multiple of the median, which it follows from here on if it did so far."""
        self.value = value
        if median_norm > 0:
            self.multiplier = value / median_norm

    def state_dict(self, is_masked: bool) -> dict[str, Any]:
        """Returns primitives only; no threshold if the knob is masked and somebody else's."""
        return {
            "value": None if is_masked else self.value,
            "multiplier": self.multiplier,
            "follows_median": self.follows_median,
            "given": self.given,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned, unless the Trainer was given another threshold since then."""
        if state["value"] is not None and state["given"] == self.given:
            self.value = float(state["value"])
            self.multiplier = float(state["multiplier"])
            self.follows_median = bool(state["follows_median"])
