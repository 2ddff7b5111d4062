"""Finds out whether a run is in trouble: values that are not finite, a loss that is far too high for long.

What lives here: looking, and saying what was found. What does not: what follows from it (``rollback``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autoprec.guard import DivergedTrainingError, NonFiniteTrainingError
from autoprec.live_state import LiveState
from autoprec.loss_watch import LossWatch
from autoprec.steering import Steering

# losses that are read from the device at once
_LOSSES_AT_ONCE = 16
# a high loss that falls, or that has come down by itself before, is given so many times the patience
_LONGER = 4
# high losses in a row, from the first one after the run went back on, that show that it is not the weights
_NOT_THE_WEIGHTS = 4


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
        self._rollbacks = 0  # that losses were the reason for
        self._from_start: frozenset[str] | None = None
        self._is_high_since_return = False
        self._level_before = math.inf  # of the high losses that were the reason

    def release(self) -> None:
        """Lets go of the model."""
        self._live = None

    @property
    def is_due(self) -> bool:
        """Whether enough losses wait to be read."""
        new = self._steering.telemetry.loss_count - self._losses_read
        return new >= _LOSSES_AT_ONCE or (self._is_high_since_return and new > 0)

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
            losses = _one_per_window(list(telemetry.losses)[-new:], steering.window - self._window_read)
            self._watch.note(losses)
            count = sum(map(math.isfinite, losses))
            self._is_high_since_return &= self._watch.streak == streak + count
        self._losses_read, self._window_read = telemetry.loss_count, steering.window

    def too_high(self, before: Mapping[str, Any] | None) -> Trouble | None:
        """Says whether the losses read so far were too high for too long.

        Args:
            before: What ``Telemetry.copies`` returned when the run was healthy, ``None`` if it never was.
        """
        windows = self._watch.streak
        is_longer = self._watch.is_falling or self._watch.has_come_down
        # later at each time: where the run has gone back at the very end of a block of high losses, the next one ends
        later = 0 if self._is_high_since_return else _LOSSES_AT_ONCE * self._rollbacks
        if windows < self._patience * (_LONGER if is_longer else 1) + later:
            return None
        bound, newest = self._watch.bound, self._watch.newest
        cause = f"the loss was above {bound:.3g} for {windows} windows in a row and is {newest:.3g}"
        return Trouble(cause, DivergedTrainingError, self._loudest(before))

    @property
    def has_moved(self) -> bool:
        """Whether losses are high from the first window on after the run went back.

        They come from the weights that had ordinary losses, so it is the data or the loss that have changed.
        """
        return self._is_high_since_return and self._watch.streak >= min(_NOT_THE_WEIGHTS, self._patience)

    @property
    def is_undecided(self) -> bool:
        """Whether no loss was ordinary since the run went back, so that the weights may not have been the reason."""
        return self._is_high_since_return

    @property
    def was_no_worse(self) -> bool:
        """Whether losses were no higher before the run went back: then its weights had followed the data."""
        return self._level_before <= max(self._watch.newest_high(_NOT_THE_WEIGHTS), default=-math.inf)

    def accept(self) -> None:
        """Takes the losses that are high for ordinary ones."""
        self._watch.accept()
        self._rollbacks = 0
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

    def go_back(self, note: Mapping[str, Any], is_of_loss: bool = False) -> None:
        """Forgets the losses since :meth:`note`.

        Args:
            note: What it returned.
            is_of_loss: Whether losses were the reason.
        """
        high = self._watch.newest_high(_NOT_THE_WEIGHTS)
        if not self._is_high_since_return:
            self._level_before = statistics.median(high) if is_of_loss and high else math.inf
        self._watch.return_to(note)
        self._rollbacks += is_of_loss
        self._is_high_since_return = True
        self._losses_read, self._window_read = self._steering.telemetry.loss_count, self._steering.window

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        unread = self._steering.telemetry.loss_count - self._losses_read
        return {
            "watch": self._watch.state_dict(),
            "unread": unread,
            "window_read": self._window_read,
            "loss_rollbacks": self._rollbacks,
            "is_high_since_return": self._is_high_since_return,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned, ``{}`` for nothing."""
        steering = self._steering
        self._losses_read = steering.telemetry.loss_count - int(state.get("unread", 0))
        self._window_read = int(state.get("window_read", steering.window))
        self._rollbacks = int(state.get("loss_rollbacks", 0))
        self._from_start = None
        self._is_high_since_return = bool(state.get("is_high_since_return", False))
        if "watch" in state:
            self._watch.load_state_dict(state["watch"])


def _one_per_window(losses: Sequence[float], windows: int) -> list[float]:
    """One loss for each window: micro-batches, and closures that an optimizer calls again, share theirs.

    Args:
        losses: Of all backwards, in order.
        windows: How many windows they belong to.
    """
    if len(losses) <= max(windows, 1):
        return list(losses)
    ends = [len(losses) * (window + 1) // max(windows, 1) for window in range(max(windows, 1))]
    return [_middle(losses[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _middle(losses: Sequence[float]) -> float:
    """The median of what is finite: a line search may have tried weights that have no finite loss."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.median(finite) if finite else losses[-1]
