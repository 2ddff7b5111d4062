"""The batch size of one fit: what is asked for, what is legal, when it acts, and what is put on record.

A size acts from the first batch of an epoch on. It is *proven* by one applied step; until then an out-of-memory error
leads back to the last proven size, in the middle of an epoch too. What does not live here: the loaders and how they are
given a size (``training_loaders``), which sizes are legal (``legal_sizes``) and who asks (``callback``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from autoprec.config import BatchConfig
from autoprec.history import Decision, History, Outcome
from autoprec.legal_sizes import nearest_legal
from autoprec.training_loaders import TrainingLoaders, batches_done, what_repeats

TO_BE_PROVEN = "; to be proven by a step"
_LATER = "to the end of the epoch"


class _Wish(NamedTuple):
    """A size that is asked for, and why."""

    size: int
    why: str


class _Verdict(NamedTuple):
    """What becomes of a wish: a size of the first loader."""

    size: int
    outcome: Outcome
    reason: str


class BatchSize:
    """State of the batch-size knob of one fit.

    Args:
        config: Bounds.
        masked: Knob to the reason why it cannot be moved; shared with whoever looks.
        history: Where decisions are recorded.

    Attributes:
        on_change: Called with the index of the window when a change has taken effect.
        on_users_change: Called when the user has brought loaders of another size, from which on factors count.
        on_recount: Called when batches were counted at a size that came in force before, in the middle of an epoch.
        on_lost: Called with the number of samples that the rest of an epoch has no batch for.
        refusal: Asked before each change, with the new size in units of the first; what it returns is the reason to
            refuse it.
        size: Batch size of the first loader in force, ``None`` if it is not known.
        first_size: The one that the run began with.
        first_batches: Batches that the first epoch would have had at that size, ``None`` if that is not known.
        is_unproven: Whether no step was applied at this size yet.
    """

    def __init__(self, config: BatchConfig, masked: dict[str, str], history: History) -> None:
        self.on_change: Callable[[int], object] = _nothing
        self.on_users_change: Callable[[], object] = _nothing
        self.on_recount: Callable[[], object] = _nothing
        self.on_lost: Callable[[int], object] = _nothing
        self.refusal: Callable[[float], str | None] = _nothing
        self.size: int | None = None
        self.first_size: int | None = None
        self.first_batches: int | None = None
        self.is_unproven = False
        self._config = config
        self._masked = masked
        self._history = history
        self._trainer: Any = None
        self._loaders: TrainingLoaders | None = None
        self._before_first: Callable[[], None] | None = None
        self._is_miscounted = False
        self._holds: int | None = None
        self._proven: int | None = None
        self._failed: tuple[int, int] | None = None
        self._wish: _Wish | None = None
        self._is_between = True
        self._lowered_from: tuple[int, float] | None = None
        self._resumed_after = (0, 0)  # batches and samples of the epoch under way before this run began
        self._is_borrowed = False
        self._own_mask: str | None = None
        self._saved: Mapping[str, Any] | None = None

    # ---- the fit ----

    def attach(self, trainer: Any, before_first: Callable[[], None]) -> None:
        """Takes hold of the loaders of a fit that begins.

        Args:
            trainer: Its Trainer.
            before_first: Called when the first loaders are set up, to ask for the size that they begin with.
        """
        self._trainer = trainer
        self._before_first = before_first
        self._loaders = TrainingLoaders(trainer, self._before_set_up, self._after_loader)

    def release(self) -> None:
        """Leaves loaders, strategy and Trainer as they were found; the size stays readable."""
        if self._loaders is not None:
            self._loaders.release()
        self._trainer = self._loaders = self._before_first = None

    @property
    def factor(self) -> float:
        """The batch size in units of the one that the run began with."""
        return 1.0 if self.size is None or not self.first_size else self.size / self.first_size

    @property
    def chosen(self) -> int | None:
        """The size that was asked for and granted, ``None`` if the loaders' own is in force."""
        return self._holds

    # ---- requests ----

    def why_refused(self, size: int) -> str | None:
        """Says why a request is refused at once, ``None`` if it is not.

        Args:
            size: What is asked for.
        """
        if size < 1:
            return f"a batch size must be >= 1, not {size}"
        return self._why_masked or self.refusal(size / (self.first_size or size))

    @property
    def _why_masked(self) -> str | None:
        reason = self._masked.get("batch_size")
        return None if reason is None else f"the batch-size knob is masked: {reason}"

    def request(self, size: int, step: int, why: str, is_move: bool = False) -> None:
        """Notes a request, which acts at the end of the epoch.

        Args:
            size: What is asked for.
            step: Index of the current window.
            why: Reason to record.
            is_move: Whether a policy moves from what is there, which it may do many times in an epoch.
        """
        if self._loaders is not None and self._loaders.is_counted:
            self.begin_epoch(step)  # the batches of the epoch that begins have been counted
        reason = self.why_refused(size)
        if reason is not None:
            self._record(step, size, self.size, "refused", reason)
            return
        is_repeated = is_move and self._wish is not None and self._wish.size == size
        self.plan(size, step, why)
        if not is_repeated:
            self._record(step, size, self.size, "deferred", f"{_LATER}; {why}")
        if self._is_between and self._loaders is not None:
            self._order_reload(self._loaders)

    def plan(self, size: int, step: int, why: str) -> None:
        """Notes what the next epoch is to begin with; recorded when it begins.

        Args:
            size: What is asked for.
            step: Index of the current window.
            why: Reason to record.
        """
        if self._wish is not None and self._wish.size != size:
            later = f"a later request for {size} has taken its place"
            self._record(step, self._wish.size, self.size, "refused", later)
        self._wish = _Wish(size, why)

    # ---- epochs ----

    def begin_epoch(self, step: int) -> None:
        """Called when an epoch begins, and may be called again: puts on record what its loaders were given.

        Args:
            step: Index of the window that begins.
        """
        loaders = self._loaders
        if loaders is None:
            return
        if not loaders.are_known:
            self._adopt(loaders)
        is_new = loaders.is_counted
        loaders.close()
        if is_new or self._may_change_now(loaders):
            self._commit(loaders, step)
        elif self._is_between and self._wish is not None:
            self._leave_waiting(self._wish, step)
        self._is_between = False

    def _may_change_now(self, loaders: TrainingLoaders) -> bool:
        """Whether what waits needs no new count of batches."""
        if not self._is_between or self._wish is None or not loaders.sized:
            return False
        return not loaders.can_count or self._verdict(loaders).size == self.size

    def _leave_waiting(self, wish: _Wish, step: int) -> None:
        reason = self.why_refused(wish.size)
        if reason is None:
            why = f"{_LATER}; {wish.why}; its loaders were set up before"
            self._record(step, wish.size, self.size, "deferred", why)
        else:
            self._wish = None
            self._record(step, wish.size, self.size, "refused", reason)

    def end_epoch(self) -> None:
        """Called when an epoch is over: has Lightning count batches anew if sizes change."""
        if self._loaders is None:
            return
        if self._lowered_from is not None:
            self.on_lost(self._loaders.lost_samples(*self._lowered_from, *self._resumed_after))
            self._lowered_from = None
        self._resumed_after = (0, 0)
        self._is_between = True
        if self._is_borrowed:
            self._is_borrowed, self._holds = False, None
            if self._loaders.sized:
                self._loaders.hold(self._loaders.sized[0].found_size)
                self._is_miscounted |= self._loaders.size != self.size
        self._order_reload(self._loaders)

    def _order_reload(self, loaders: TrainingLoaders) -> None:
        is_changed = self._is_miscounted
        if loaders.sized and self._wish is not None:
            is_changed |= self._verdict(loaders).size != self.size
        loaders.order(is_changed)

    # ---- loaders ----

    def _before_set_up(self) -> None:
        self._unmask()
        if self._saved is not None and self._trainer.fit_loop.restarting:
            self._is_between = False  # Lightning goes on in the epoch of the checkpoint, if only to end it
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()

    def _after_loader(self) -> None:
        """Gives loaders their size before Lightning takes their length, as far as they are known."""
        loaders = self._loaders
        if loaders is not None and loaders.sized and self._wanted is not None:
            loaders.hold(self._verdict(loaders).size)

    def _adopt(self, loaders: TrainingLoaders) -> None:
        """Takes loaders that were set up too early to be given a size; they are counted again if they get one now."""
        loaders.adopt()
        self._before_set_up()
        self._mask(loaders)
        if loaders.sized and self._verdict(loaders).size != loaders.size:
            loaders.set_up_again()

    def _verdict(self, loaders: TrainingLoaders) -> _Verdict:
        """What the loaders are to have: what is asked for, what a checkpoint or an earlier request says, or nothing."""
        wanted, found = self._wanted, loaders.sized[0]
        if wanted is None:
            return _Verdict(found.size, "applied", "")
        is_asked = wanted != self._holds
        keeps = self._holds if is_asked and self._why_masked is None else None
        current = found.found_size if keeps is None else keeps
        refused = (self.why_refused(wanted) if is_asked else self._why_masked) or loaders.why_unknown_last_batch()
        if refused is not None:
            return _Verdict(current, "refused", refused)
        facts, limits = [each.facts for each in loaders.sized], loaders.limits(self._config, self._failed)
        size, reason = nearest_legal(wanted, facts, limits)
        if size is None:
            return _Verdict(current, "refused", f"no size is legal here: {reason}")
        return _Verdict(size, "limited" if reason else "applied", reason)

    @property
    def _wanted(self) -> int | None:
        if self._wish is not None and self._is_between:
            return self._wish.size
        return self._holds if self._why_masked is None else None

    def _commit(self, loaders: TrainingLoaders, step: int) -> None:
        """Records what the loaders that an epoch begins with were given."""
        saved, self._saved = self._saved, None
        was_miscounted, self._is_miscounted = self._is_miscounted, False
        if saved is not None and not saved["is_between"]:
            self._resumed_after = (batches_done(self._trainer), int(saved["consumed"]))
            self._keep_count(saved)
        self._mask(loaders)
        if loaders.sized:
            before = self.size
            self._take_size(loaders, step, saved)
            if was_miscounted and self.size == before:
                self.on_recount()
        else:
            self.size = loaders.size
            if self._wish is not None:
                self._leave_waiting(self._wish, step)
        self.first_size = self.first_size or self.size

    def _keep_count(self, saved: Mapping[str, Any]) -> None:
        """An epoch in which memory ran out ends in a resumed run where it would have ended."""
        if self._lowered_from is not None:
            self._trainer.fit_loop.max_batches = self._lowered_from[1]
            self._trainer.val_check_batch = saved["val_check_batch"]
            self._is_miscounted = True

    def _take_size(self, loaders: TrainingLoaders, step: int, saved: Mapping[str, Any] | None) -> None:
        found = loaders.sized[0].found_size
        if self.first_size is None:
            self.first_size, self.first_batches = found, loaders.found_batches
        before = found if self.size is None else self.size
        verdict, is_ours = self._verdict(loaders), self._wanted is not None
        if is_ours:
            loaders.hold(verdict.size)
        self._note(step, verdict, before, found, saved)
        if verdict.size != self.size:
            self.size = verdict.size
            self.is_unproven = self.size != self._proven
        if saved is not None and (text := what_repeats(loaders, self._trainer, int(saved["consumed"]))):
            rank_zero_info(text)
        if not is_ours and self.size != before:
            self.first_size = self.size
            self.on_users_change()
        elif self.size != before or (saved is not None and self.factor != 1.0):
            self.on_change(step)

    def _note(self, step: int, verdict: _Verdict, before: int, found: int, saved: Mapping[str, Any] | None) -> None:
        size, outcome, reason = verdict
        if self._wish is not None and self._is_between:
            wish, self._wish = self._wish, None
            if outcome != "refused":
                self._holds = size
            self._record(step, wish.size, size, outcome, reason or wish.why, before)
        elif saved is not None and found not in (size, saved["first_size"]):
            why = reason or f"the checkpoint's size counts; the loader came with {found}"
            self._record(step, self._holds, size, outcome, why, found)
            rank_zero_info(f"autoprec: batch size {size}: {why}")
        elif size != before:
            wanted = size if self._holds is None else self._holds
            self._record(step, wanted, size, outcome, reason or "the user's new loader has it", before)

    def _mask(self, loaders: TrainingLoaders) -> None:
        """Turns the knob off where a loader cannot be resized, and on again where loaders that can have come."""
        self._unmask()
        reason = loaders.why_fixed()
        if reason is not None and "batch_size" not in self._masked:
            self._masked["batch_size"] = self._own_mask = reason

    def _unmask(self) -> None:
        if self._own_mask is not None:
            del self._masked["batch_size"]
            self._own_mask = None

    # ---- proof ----

    def prove(self) -> None:
        """Called when a step was applied at a size that is not proven."""
        self.is_unproven = False
        self._proven = self.size
        for index, decision in enumerate(self._history):
            if decision.knob == "batch_size" and decision.reason.endswith(TO_BE_PROVEN):
                self._history[index] = replace(decision, reason=decision.reason.removesuffix(TO_BE_PROVEN))

    def lower(self, rows: int, step: int = 0) -> bool:
        """Goes back to the last proven size after a batch that did not fit into memory, in mid-epoch.

        Args:
            rows: Samples of the batch.
            step: Index of the current window.

        Returns:
            Whether there was a smaller size to go to, or such a size is in force already.
        """
        loaders = self._loaders
        if loaders is None or self._proven is None or self.size is None or "batch_size" in self._masked:
            return False
        if rows <= self._proven or self.size <= self._proven:
            return self._lowered_from is not None and rows > self.size  # drawn before the size was lowered
        before, self.size = self.size, self._proven
        self._failed = (before, self._proven)
        self._holds, self.is_unproven, self._is_miscounted = self._proven, False, True
        self._lowered_from = (before, self._trainer.num_training_batches)
        loaders.hold(self._proven)
        reason = f"out of memory with {rows} samples; the last size that a step has survived is {self._proven}"
        self._record(step, self._proven, self._proven, "applied", reason, before)
        self.on_change(step)
        return True

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        if self._saved is not None:  # saved again before the loaders came
            return dict(self._saved)
        done = 0 if self._trainer is None or self._is_between else batches_done(self._trainer)
        first = self._loaders.sized[0] if self._loaders is not None and self._loaders.sized else None
        before, consumed = self._resumed_after
        lowered = self._lowered_from
        return {
            "size": None if self._own_mask is not None else self.size,
            "first_size": self.first_size,
            "proven": self._proven,
            "is_unproven": self.is_unproven,
            "failed": None if self._failed is None else list(self._failed),
            "wish": None if self._wish is None else list(self._wish),
            "is_between": self._is_between,
            "is_miscounted": self._is_miscounted,
            "consumed": consumed + first.samples_of(done - before) if done and first is not None else 0,
            "lowered_from": None if lowered is None else list(lowered),
            "val_check_batch": None if lowered is None else self._trainer.val_check_batch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned; it acts when the loaders come.

        Args:
            state: The saved state, empty if there is none.
        """
        if state.get("first_size") is None:
            return
        self._saved = dict(state)
        self.first_size = state["first_size"]
        self.size = state["size"]
        # where the run has not moved it, another size of the loader is the user's wish, but no epoch may be mixed
        is_moved, is_inside = self.size != self.first_size, not state["is_between"]
        self._is_borrowed = is_inside and not is_moved
        self._holds = self.size if is_moved or is_inside else None
        self._proven, self.is_unproven = state["proven"], bool(state["is_unproven"])
        self._failed = None if state["failed"] is None else (int(state["failed"][0]), int(state["failed"][1]))
        self._wish = None if state["wish"] is None else _Wish(int(state["wish"][0]), str(state["wish"][1]))
        self._is_between = bool(state["is_between"])
        self._is_miscounted = bool(state.get("is_miscounted", False))
        lowered = state.get("lowered_from")
        self._lowered_from = None if lowered is None or not is_inside else (int(lowered[0]), lowered[1])

    def _record(
        self, step: int, requested: int | None, applied: int | None, outcome: Outcome, reason: str, before: Any = ...
    ) -> None:
        before = self.size if before is ... else before
        if outcome in ("applied", "limited") and applied != before and applied != self._proven:
            reason += TO_BE_PROVEN
        self._history.append(Decision(step, "batch_size", None, before, requested, applied, outcome, reason))


def _nothing(*_: object) -> None:
    """What is done, and what stands in the way, where nobody listens."""
