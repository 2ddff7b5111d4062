"""Micro-batches per optimizer step: when another number may act, and what is put on record.

Lightning reads the number in every batch, but clears gradients by the index of the batch: a change acts where both the
old and the new number divide the batches done, or at the start of an epoch. What does not live here: where an optimizer
window ends (``steering``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from autoprec.config import BatchConfig
from autoprec.history import Decision, History, Outcome

_USERS = "the Trainer came with it"
_LATER = "to a batch where both numbers divide the batches done, or the start of an epoch"


class _Wish(NamedTuple):
    """A number that is asked for, and why."""

    value: int
    why: str


class Accumulation:
    """State of the accumulation of one fit.

    Args:
        config: Bounds.
        masked: Knob to the reason why it cannot be moved; shared with whoever looks.
        history: Where decisions are recorded.

    Attributes:
        refusal: Asked before each change, with the new number in units of the first; what it returns is the reason to
            refuse it.
        on_change: Called with the index of the window when a change has taken effect.
        on_users_change: Called when the user's own number has taken effect, from which on factors count.
        is_waiting: Whether a request waits for the next boundary at which it may act.
    """

    def __init__(
        self,
        config: BatchConfig,
        masked: Mapping[str, str],
        history: History,
    ) -> None:
        self.on_change: Callable[[int], object] = bool
        self.on_users_change: Callable[[], object] = bool
        self.is_waiting = False
        self._config = config
        self._masked = masked
        self._history = history
        self.refusal: Callable[[float], str | None] = _nothing
        self._trainer: Any = None
        self._found = self._first = 1
        self._value = 1
        self._wish: _Wish | None = None

    def attach(self, trainer: Any) -> None:
        """Takes hold of the Trainer of a fit that begins."""
        self._trainer = trainer
        self._found = self._first = self._value = trainer.accumulate_grad_batches

    def release(self) -> None:
        """Gives the Trainer its own number back, unless somebody else has set another."""
        if self._trainer is not None and self._trainer.accumulate_grad_batches == self._value:
            self._trainer.accumulate_grad_batches = self._found
        self._trainer = None

    @property
    def value(self) -> int:
        """Micro-batches per optimizer step in force."""
        return self._value if self._trainer is None else int(self._trainer.accumulate_grad_batches)

    @property
    def factor(self) -> float:
        """The number in units of the one that the run began with."""
        return self.value / self._first

    def request(self, value: int, step: int, why: str, acts_now: bool) -> None:
        """Carries out a request as soon as it may act.

        Args:
            value: What is asked for.
            step: Index of the window.
            why: Reason to record.
            acts_now: Whether the caller is at a boundary.
        """
        reason = self.why_refused(value)
        if reason is not None:
            self._record(step, self.value, value, self.value, "refused", reason)
            return
        self._wish, self.is_waiting = _Wish(value, why), True
        if not acts_now or not self.apply_if_aligned(step):
            self._record(step, self.value, value, self.value, "deferred", f"{_LATER}; {why}")

    def why_refused(self, value: int) -> str | None:
        """Says why a request is refused at once, ``None`` if it is not.

        Args:
            value: What is asked for.
        """
        if "accumulate" in self._masked:
            return f"accumulation is masked: {self._masked['accumulate']}"
        if value < 1:
            return f"the micro-batches of a step must be >= 1, not {value}"
        return self.refusal(value / self._first)

    def apply_if_aligned(self, step: int) -> bool:
        """Carries out what waits if it may act here; the caller is at a boundary.

        Args:
            step: Index of the window that begins.

        Returns:
            Whether nothing waits any more.
        """
        if self._wish is None or self._trainer is None:
            return self._wish is None
        wish, before = self._wish, self.value
        reason = self.why_refused(wish.value)
        if reason is not None:
            self._record(step, before, wish.value, before, "refused", reason)
        else:
            value, reason = self._limited(wish.value)
            done = _batches_before(self._trainer)
            if done % before or done % value:
                return False
            self._trainer.accumulate_grad_batches = self._value = value
            outcome: Outcome = "limited" if reason else "applied"
            self._record(step, before, wish.value, value, outcome, reason or wish.why)
            if value != before and wish.why == _USERS:
                self._first = value
                self.on_users_change()
            elif value != before:
                self.on_change(step)
        self._wish, self.is_waiting = None, False
        return True

    def _limited(self, value: int) -> tuple[int, str]:
        limit = self._config.max_accumulate
        if limit is not None and value > limit:
            return limit, f"at most {limit} micro-batches (`BatchConfig.max_accumulate`)"
        batches = self._trainer.num_training_batches
        if limit is None and math.isfinite(batches) and value > batches > 0:
            return int(batches), f"an epoch has {batches} batches"
        return value, ""

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {"value": self.value, "first": self._first, "wish": None if self._wish is None else list(self._wish)}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Takes over what ``state_dict`` returned.

        Args:
            state: The saved state, empty if there is none.
            step: Index of the window that begins.
        """
        if not state or self._trainer is None or "accumulate" in self._masked:
            return
        found, first, value = self.value, int(state["first"]), int(state["value"])
        self._trainer.accumulate_grad_batches = self._value = value
        self._first = first
        if value != self._first:
            self.on_change(step)
        self._wish = None if state["wish"] is None else _Wish(int(state["wish"][0]), str(state["wish"][1]))
        if self._wish is None and value == first != found:
            self._wish = _Wish(found, _USERS)  # where the run has not moved it, another number is the user's wish
            self._record(step, value, found, value, "deferred", f"{_LATER}; {_USERS}")
        elif found not in (value, first):
            why = f"the checkpoint's number counts; the Trainer came with {found}"
            self._record(step, found, value, value, "applied", why)
        self.is_waiting = self._wish is not None

    def _record(self, step: int, before: int, requested: int, applied: int, outcome: Outcome, reason: str) -> None:
        self._history.append(Decision(step, "accumulate", None, before, requested, applied, outcome, reason))


def _nothing(*_: object) -> None:
    """What stands in the way where nobody knows of anything."""


def _batches_before(trainer: Any) -> int:
    """Batches of the epoch before the one that begins; Lightning's counts are stale until the first of an epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(progress.processed) if progress.completed < progress.ready else 0


def why_no_accumulation(root: pl.LightningModule, trainer: pl.Trainer) -> str | None:
    """Says why micro-batches per step cannot be changed in a fit, ``None`` if they can.

    Args:
        root: The module.
        trainer: Its Trainer.
    """
    if not root.automatic_optimization:
        return "under manual optimization the module takes its steps itself"
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return "`GradientAccumulationScheduler` changes it"
    if trainer.strategy.handles_gradient_accumulation:
        return f"`{type(trainer.strategy).__qualname__}` accumulates by itself"
    return None
