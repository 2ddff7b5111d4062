"""The guard: what may be asked for, and what happens when a step had to be skipped. Always on, never learned.

Level 1 is the loss scale, which backs off by itself. Level 2 raises the offending units to fp32 and holds them there;
when skips do not end, all units and the operations between them. Level 3 goes back to a copy of the run
(``rollback``). If that does not help either, training stops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from autoprec.config import ClipConfig, GuardConfig
from autoprec.history import Outcome

FOREVER = -1


class NonFiniteTrainingError(RuntimeError):
    """Training stopped: gradients stayed non-finite although everything ran in fp32."""


class DivergedTrainingError(RuntimeError):
    """Training stopped: the loss stayed far too high although the run had gone back to copies of its past."""


class Verdict(Enum):
    """What follows from a skipped step."""

    CONTINUE = "continue"
    RAISE_ALL = "raise all"
    STOP = "stop"


@dataclass
class Guard:
    """Legality of requests, and the reaction to skipped steps.

    Args:
        config: Limits.
        clip: Limits of the clip threshold.

    Attributes:
        skips: Skipped steps in a row, by the index of the optimizer.
        is_all_raised: Whether level 2 was applied to everything.
        held: Unit name to the number of applied steps at which its hold ends, ``FOREVER`` for the whole fit.
    """

    config: GuardConfig = field(default_factory=GuardConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    skips: dict[int, int] = field(default_factory=dict)
    is_all_raised: bool = False
    held: dict[str, int] = field(default_factory=dict)

    def is_held(self, unit: str, applied_steps: int) -> bool:
        """Whether a unit must stay where the guard put it."""
        end = self.held.get(unit)
        return end is not None and (end == FOREVER or applied_steps < end)

    def hold(self, unit: str, applied_steps: int, forever: bool = False, steps: int | None = None) -> None:
        """Holds a raised unit, for ``steps`` applied steps (default: ``config.hold``) or for the whole fit."""
        if forever or self.held.get(unit) == FOREVER:
            self.held[unit] = FOREVER
        else:
            self.held[unit] = applied_steps + (self.config.hold if steps is None else steps)

    def check_format(
        self, unit: str, requested: str, legal: Sequence[str], applied_steps: int, reason: str | None = None
    ) -> tuple[Outcome, str]:
        """Judges a request for a unit's format.

        Args:
            unit: Unit name.
            requested: Format name.
            legal: What the unit can run in.
            applied_steps: Applied steps so far.
            reason: Why the unit is left alone, if it is.

        Returns:
            ``"applied"`` or ``"refused"``, and why.
        """
        if reason is not None:
            return "refused", f"the unit is left alone: {reason}"
        if requested not in legal:
            return "refused", f"the unit cannot run in {requested}; legal here: {', '.join(legal)}"
        if self.is_held(unit, applied_steps) and requested != "fp32":
            end = self.held[unit]
            until = "for the rest of the fit" if end == FOREVER else f"until {end} steps were applied"
            return "refused", f"the guard holds the unit in fp32 {until}"
        return "applied", "requested"

    def check_clip(self, value: float, median: float) -> tuple[float | None, Outcome, str]:
        """Judges a request for the clip threshold.

        Args:
            value: Threshold on the global norm of the unscaled gradients; ``math.inf`` for off.
            median: Running median of finite norms, NaN before the first.

        Returns:
            The threshold to use (``None`` if refused), the outcome and why.
        """
        if math.isnan(value) or value <= 0:
            return None, "refused", f"a clip threshold must be > 0, or math.inf for off, not {value!r}"
        if math.isfinite(median) and value < self.clip.floor * median:
            limited = self.clip.floor * median
            return limited, "limited", f"{value!r} is below {self.clip.floor} x the median norm {median:.3g}"
        return value, "applied", "requested"

    @property
    def consecutive_skips(self) -> int:
        """Skipped steps in a row, of the optimizer that has most."""
        return max(self.skips.values(), default=0)

    def on_applied(self, optimizer: int = 0) -> None:
        """Notes an applied step.

        Args:
            optimizer: Index of the optimizer.
        """
        self.skips.pop(optimizer, None)

    def on_skipped(self, is_all_wide: bool, is_backing_off: bool = False, optimizer: int = 0) -> Verdict:
        """Notes a skipped step.

        Args:
            is_all_wide: Whether nothing can be raised any more.
            is_backing_off: Whether the loss scale has still some way down. Then training is not stopped.
            optimizer: Index of the optimizer.
        """
        if is_all_wide and is_backing_off:
            return Verdict.CONTINUE
        self.skips[optimizer] = self.skips.get(optimizer, 0) + 1
        if self.skips[optimizer] < self.config.max_consecutive_skips:
            return Verdict.CONTINUE
        self.skips.clear()
        if is_all_wide:
            return Verdict.STOP
        self.is_all_raised = True
        return Verdict.RAISE_ALL

    def forget_skips(self) -> None:
        """Begins to count anew: the run has gone back to before the skipped steps."""
        self.skips.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {
            "skips": dict(self.skips),
            "is_all_raised": self.is_all_raised,
            "held": dict(self.held),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned."""
        self.skips = {int(index): int(count) for index, count in state["skips"].items()}
        self.is_all_raised = bool(state["is_all_raised"])
        self.held = {str(name): int(end) for name, end in state["held"].items()}
