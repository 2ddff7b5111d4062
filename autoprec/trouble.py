"""Finds out whether a run is in trouble: values that are not finite, a loss that is far too high for long.

What lives here: looking, and saying what was found. What does not: what follows from it (``rollback``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from autoprec.guard import DivergedTrainingError, NonFiniteTrainingError
from autoprec.live_state import LiveState
from autoprec.loss_watch import LossWatch
from autoprec.steering import Steering

# losses that are read from the device at once
_LOSSES_AT_ONCE = 16
# a high loss that falls is given so many times the patience
_LONGER = 4


class Trouble(NamedTuple):
    """Why a run has to go back.

    Attributes:
        cause: In words.
        error: What to raise if it cannot.
        where: The first offending layer or tensor.
        needs_progress: Whether going back helps only if steps were applied since the copy.
    """

    cause: str
    error: type[RuntimeError]
    where: str
    needs_progress: bool = True


class TroubleSearch:
    """Looks for trouble in one fit.

    Args:
        steering: State of the fit.
        live: Its weights, buffers and moments.
        watches_losses: Whether a loss can be too high.
    """

    def __init__(self, steering: Steering, live: LiveState, watches_losses: bool) -> None:
        config = steering.config.rollback
        self._steering = steering
        self._live: LiveState | None = live
        self._patience = config.patience
        self._is_watching = watches_losses and math.isfinite(config.loss_spreads)
        self._watch = LossWatch(config.loss_spreads if self._is_watching else math.inf)
        self._losses_read = 0
        self._window_read = 0
        self._per_window = 1
        self._from_start: frozenset[str] | None = None
        self._is_high_since_return = False

    def release(self) -> None:
        """Lets go of the model."""
        self._live = None

    @property
    def is_due(self) -> bool:
        """Whether enough losses wait to be read."""
        return self._steering.telemetry.loss_count - self._losses_read >= _LOSSES_AT_ONCE

    @property
    def is_calm(self) -> bool:
        """Whether the last step was applied, and the last loss finite and not too high."""
        return not self._steering.knobs.guard.consecutive_skips and self._watch.is_calm

    def nonfinite(self) -> Trouble | None:
        """Looks at every weight, moment and running statistic.

        What was not finite when this was first called does not count: masks of the user's, or nothing to be mended.
        """
        assert self._live is not None, "the fit is over"
        found = self._live.nonfinite()
        if self._from_start is None:
            self._from_start = frozenset(found)
        bad = [name for name in found if name not in self._from_start]
        if not bad:
            return None
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        return Trouble(f"{bad[0]}{more} is not finite", NonFiniteTrainingError, bad[0], needs_progress=False)

    def read_losses(self) -> None:
        """Reads the losses that are still on the device."""
        telemetry, steering = self._steering.telemetry, self._steering
        new = telemetry.loss_count - self._losses_read
        if self._is_watching and new > 0:
            telemetry.flush_losses()
            streak = self._watch.streak
            losses = list(telemetry.losses)[-new:]
            self._watch.note(losses)
            count = sum(map(math.isfinite, losses))
            self._is_high_since_return &= self._watch.streak == streak + count
            self._per_window = max(1, round(new / max(steering.window - self._window_read, 1)))
        self._losses_read, self._window_read = telemetry.loss_count, steering.window

    def too_high(self, before: Mapping[str, Any] | None) -> Trouble | None:
        """Says whether the losses read so far were too high for too long.

        Args:
            before: What ``Telemetry.copies`` returned when the run was healthy, ``None`` if it never was.
        """
        windows = self._watch.streak // self._per_window
        if windows < self._patience * (_LONGER if self._watch.is_falling else 1):
            return None
        bound, newest = self._watch.bound, self._watch.newest
        cause = f"the loss was above {bound:.3g} for {windows} windows in a row and is {newest:.3g}"
        return Trouble(cause, DivergedTrainingError, self._loudest(before))

    @property
    def has_moved(self) -> bool:
        """Whether losses are high from the first window on after the run went back.

        They come from the weights that had ordinary losses, so it is the data or the loss that have changed.
        """
        enough = min(_LOSSES_AT_ONCE, self._patience * self._per_window)
        return self._is_high_since_return and self._watch.streak >= enough

    def accept(self) -> None:
        """Takes the losses that are high for ordinary ones."""
        self._watch.accept()
        self._is_high_since_return = False

    def _loudest(self, before: Mapping[str, Any] | None) -> str:
        """The layer whose gradient norm has grown most."""
        telemetry = self._steering.telemetry
        telemetry.flush()
        units = {} if before is None else before["units"]
        growth = {}
        for name, unit in telemetry.units.items():
            old = [norm for norm in units.get(name, ((), ()))[0] if norm > 0] or [1.0]
            if unit.norms:
                growth[name] = max(unit.norms) / statistics.median(old)
        return f"{max(growth, key=lambda name: growth[name])} (its gradient grew most)" if growth else "unknown"

    # ---- state ----

    def note(self) -> dict[str, Any]:
        """Returns what :meth:`go_back` takes, as primitives."""
        return self._watch.state_dict()

    def go_back(self, note: Mapping[str, Any]) -> None:
        """Forgets the losses since :meth:`note`."""
        self._watch.return_to(note)
        self._is_high_since_return = True
        self._losses_read, self._window_read = self._steering.telemetry.loss_count, self._steering.window

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        unread = self._steering.telemetry.loss_count - self._losses_read
        return {
            "watch": self._watch.state_dict(),
            "unread": unread,
            "window_read": self._window_read,
            "per_window": self._per_window,
            "is_high_since_return": self._is_high_since_return,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned, ``{}`` for nothing."""
        steering = self._steering
        self._losses_read = steering.telemetry.loss_count - int(state.get("unread", 0))
        self._window_read = int(state.get("window_read", steering.window))
        self._per_window = int(state.get("per_window", 1))
        self._from_start = None
        self._is_high_since_return = bool(state.get("is_high_since_return", False))
        if "watch" in state:
            self._watch.load_state_dict(state["watch"])
