"""The clip knob: a threshold on the global gradient norm, fixed or a multiple of the running median."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autoprec.config import ClipConfig
from autoprec.history import Decision, History, Outcome


class ClipThreshold:
    """State of the clip knob; puts its changes on record.

    Args:
        config: How the threshold follows the median.
        given: The Trainer's own threshold, ``None`` if it has none.
        follows_median: Whether the threshold follows the median until somebody pins it.
        history: Where changes are recorded.

    Attributes:
        value: Threshold on the norm of the unscaled gradients, ``math.inf`` for off.
        multiplier: Threshold in units of the median, while it follows.
        follows_median: Whether it follows.
    """

    def __init__(self, config: ClipConfig, given: float | None, follows_median: bool, history: History) -> None:
        self.config = config
        self.value = math.inf if given is None else given
        self.multiplier = config.multiplier
        self.follows_median = follows_median
        self._given = given
        self._history = history

    def follow(self, median_norm: float, count: int, step: int) -> None:
        """Moves with the median once enough norms are known; the first time is put on record, for all that follow.

        Args:
            median_norm: Running median of finite norms.
            count: Norms that it rests on.
            step: Index of the window that begins.
        """
        if not self.follows_median or count < self.config.min_norms or not median_norm > 0:
            return
        before, self.value = self.value, self.multiplier * median_norm
        if math.isinf(before) and math.isfinite(self.value):
            reason = f"from now on {self.multiplier:g} x the running median of the gradient norm"
            self._record(step, before, self.value, "applied", reason)

    def set(
        self, requested: float, value: float, outcome: Outcome, step: int, reason: str, moved_from: float | None = None
    ) -> None:
        """Carries out a request.

        Args:
            requested: Threshold asked for.
            value: The legal one.
            outcome: ``"applied"`` or ``"limited"``.
            step: Index of the window that begins.
            reason: Why.
            moved_from: The median norm if a policy moved the threshold by a notch. Then it goes on following, by
                another multiplier. Else it stays where it is put.
        """
        before, self.value = self.value, value
        if moved_from is None:
            self.follows_median = False
        elif moved_from > 0:
            self.multiplier = value / moved_from
        self._record(step, before, requested, outcome, reason)

    def _record(self, step: int, before: float, requested: float, outcome: Outcome, reason: str) -> None:
        self._history.append(Decision(step, "clip", None, before, requested, self.value, outcome, reason))

    def leave(self) -> None:
        """Gives the threshold back to the Trainer."""
        self.value = math.inf if self._given is None else self._given
        self.follows_median = False

    def state_dict(self, is_masked: bool) -> dict[str, Any]:
        """Returns primitives only; no threshold if the knob is masked and somebody else's."""
        return {
            "value": None if is_masked else self.value,
            "multiplier": self.multiplier,
            "follows_median": self.follows_median,
            "given": self._given,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned, unless the Trainer was given another threshold since then."""
        if state["value"] is not None and state["given"] == self._given:
            self.value = float(state["value"])
            self.multiplier = float(state["multiplier"])
            self.follows_median = bool(state["follows_median"])
