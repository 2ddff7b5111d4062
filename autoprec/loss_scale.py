"""The loss scale as a pure state machine.

What lives here: when the scale grows and when it backs off, and what a request for another scale becomes. What does
not: tensors, the scaling of a loss, and the search for non-finite gradients.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoprec.config import LossScaleConfig
from autoprec.history import Outcome


class LossScale:
    """Moves the loss scale as ``torch.amp.GradScaler`` does, between a floor and a cap.

    Args:
        config: Where it starts and how it moves.
        enabled: Whether a loss scale is in use. If not, ``scale`` is 1.0 and ``update`` does nothing. May be set at
            any time. The scale is kept meanwhile.

    Attributes:
        is_pinned: Whether somebody has asked for a scale; policies that set one on their own leave it alone.
    """

    def __init__(self, config: LossScaleConfig | None = None, enabled: bool = True) -> None:
        self.config = config if config is not None else LossScaleConfig()
        self.enabled = enabled
        self.is_pinned = False
        self.growth_tracker = 0
        self._scale = float(self.config.init_scale)

    @property
    def scale(self) -> float:
        """Factor on the loss."""
        return self._scale if self.enabled else 1.0

    @property
    def planned(self) -> float:
        """Factor on the loss as soon as it is in use."""
        return self._scale

    @property
    def inv_scale(self) -> float:
        """Factor that takes the loss scale off a gradient."""
        return 1.0 / self.scale

    def update(self, found_inf: bool) -> None:
        """Moves the scale after a step, exactly as GradScaler does inside floor and cap.

        Args:
            found_inf: Whether the step was skipped because of a non-finite gradient.
        """
        if not self.enabled:
            return
        if found_inf:
            self._scale = self._limited(self._scale * self.config.backoff_factor)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.config.growth_interval:
            self._scale = self._limited(self._scale * self.config.growth_factor)
            self.growth_tracker = 0

    @staticmethod
    def refusal(value: float) -> str:
        """Says why a scale cannot be used, ``""`` if it can."""
        return "" if math.isfinite(value) and value > 0 else f"a loss scale must be finite and > 0, not {value!r}"

    def request(self, value: float) -> tuple[float, Outcome, str]:
        """Sets the scale on request and starts to count clean steps anew.

        A legal request takes the loss scale into use if it was not.

        Args:
            value: Scale asked for.

        Returns:
            The scale from here on, ``"applied"``, ``"limited"`` (to floor or cap) or ``"refused"``, and the reason.
        """
        reason = self.refusal(value)
        if reason:
            return self.scale, "refused", reason
        low, high = self.config.floor, self.config.cap
        self._scale = float(min(max(value, low), high))
        self.enabled = True
        self.growth_tracker = 0
        if self._scale == value:
            return self._scale, "applied", "requested"
        bound = "floor" if value < low else "cap"
        return self._scale, "limited", f"{value!r} is outside [{low}, {high}], limited to the {bound}"

    def state_dict(self) -> dict[str, float | int | bool]:
        """Returns primitives only. The keys include GradScaler's, so that it can load them, too."""
        return {
            "scale": self._scale,
            "growth_factor": self.config.growth_factor,
            "backoff_factor": self.config.backoff_factor,
            "growth_interval": self.config.growth_interval,
            "_growth_tracker": self.growth_tracker,
            "enabled": self.enabled,
            "is_pinned": self.is_pinned,
        }

    def scaler_state(self) -> dict[str, float | int | bool]:
        """Returns what GradScaler itself would have saved."""
        return {key: value for key, value in self.state_dict().items() if key not in ("enabled", "is_pinned")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved scale, also from GradScaler.

        As with GradScaler, factors and interval come from the state. Floor and cap come from ``config``, and a saved
        scale outside them is limited.

        Args:
            state: What ``state_dict`` or ``GradScaler.state_dict`` returned.

        Raises:
            ValueError: If a key is missing, or the scale is not a finite number > 0.
        """
        missing = sorted(
            {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} - set(state)
        )
        if missing:
            raise ValueError(
                f"Passed `LossScale.load_state_dict(...)` without the keys {missing}."
                " The state must come from LossScale or from an enabled GradScaler."
            )
        scale = float(state["scale"])
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(
                f"Passed `LossScale.load_state_dict(...)` with scale {scale!r}. It must be finite and > 0."
            )
        names = ("growth_factor", "backoff_factor", "growth_interval")
        self.config = replace(self.config, **{name: state[name] for name in names})
        self._scale = float(min(max(scale, self.config.floor), self.config.cap))
        self.growth_tracker = int(state["_growth_tracker"])
        self.enabled = bool(state.get("enabled", True))
        self.is_pinned = bool(state.get("is_pinned", False))

    def _limited(self, scale: float) -> float:
        # GradScaler keeps its scale in float32, so a factor that is no power of two rounds there
        return max(self.config.floor, min(self.config.cap, _to_float32(min(scale, 2.0**127))))


def _to_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])
