"""The last level of the guard: takes copies of a healthy run, and goes back to one when nothing else helps.

What lives here: when a copy is taken, and how the run goes back to it. What does not: what a copy consists of and where
it is kept (``live_state``, ``snapshots``), and what makes the run go back (``trouble``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from autoprec.guard import DivergedTrainingError, NonFiniteTrainingError
from autoprec.history import Decision
from autoprec.live_state import LiveState
from autoprec.packing import Packer
from autoprec.snapshots import Snapshot, SnapshotRing
from autoprec.steering import Steering
from autoprec.trouble import Trouble, TroubleSearch

_NOT_PRECISION = (
    "It went wrong in fp32 as well: this is not a precision problem. Look at the learning rate, the data and the loss."
)
_HIGH_LOSSES = " Where such losses are part of the task, `RollbackConfig(loss_spreads=math.inf)` leaves them alone."
_MAYBE_PRECISION = "See whether it trains in fp32: `Trainer(precision='32-true')`, or 'precision' among the `knobs`."


class Rollback:
    """Copies of one fit and the way back to them.

    Args:
        steering: State of the fit.
        optimizers: All optimizers.
        schedules: Lightning's ``LRSchedulerConfig`` objects.
        watches_losses: Whether a loss that is too high for long makes the run go back.
        distrust: Called after weights were written.

    Raises:
        ModuleNotFoundError: If copies are to be compressed and zstandard is not installed.
    """

    def __init__(
        self,
        steering: Steering,
        optimizers: Sequence[Any],
        schedules: Sequence[Any],
        watches_losses: bool,
        distrust: Callable[[], None],
    ) -> None:
        config = steering.config.rollback
        self._config = config
        self._steering = steering
        self._distrust: Callable[[], None] | None = distrust
        self._is_on = config.keep > 0
        moving, fixed = _that_go_back(optimizers, schedules, steering)
        live = LiveState(steering.root, optimizers, moving, fixed)
        self._live: LiveState | None = live
        self._search = TroubleSearch(steering, live, self._is_on and watches_losses)
        packer = Packer() if self._is_on and config.compress else None
        self._ring = SnapshotRing(config.keep, config.max_bytes if self._is_on else 0, packer)
        self._packer = packer
        self._due = 0
        self._wide_until = -1
        self._pending: Trouble | None = None
        self._aside: Snapshot | None = None  # of the run before it went back, until it is known that weights were bad
        self._has_new_copy = False
        self._futile = 0  # rollbacks in a row after which no loss was ordinary
        self._pardoned = 0  # rollbacks that do not count any more: they were no answer to what had changed
        self._has_told_of_packer = False
        if self._is_on:
            steering.fallback.last_resort = self._answer_stop

    @property
    def nbytes(self) -> int:
        """Memory that the copies take."""
        aside = None if self._aside is None else self._aside.block
        return self._ring.nbytes + (0 if aside is None else aside.nbytes)

    def release(self) -> None:
        """Frees all copies; what was counted stays readable."""
        if self._live is None:
            return
        self._report_packer()
        self._describe()
        self._ring.close()
        self._aside = None
        self._search.release()
        self._live = None
        self._distrust = None
        self._is_on = False
        self._steering.fallback.last_resort = None

    # ---- boundaries ----

    def at_boundary(self) -> None:
        """Called before each batch: goes back if there is a reason, else takes a copy if one is due.

        Raises:
            NonFiniteTrainingError: If weights, moments or gradients are not finite and there is no way back.
            DivergedTrainingError: If the loss stays too high and there is no way back.
        """
        steering = self._steering
        if steering.coupling.has_new_batch:
            steering.coupling.has_new_batch = False
            self._ring.clear()  # their schedules count steps of another size
            self._aside = None
            self._due = 0
        is_due = steering.applied_steps >= self._due or steering.has_skipped or self._pending is not None
        if self._is_on and (is_due or self._search.is_due) and steering.is_at_boundary and _is_training(steering.root):
            self._look()

    def at_end(self) -> None:
        """Called after the last batch: training does not end on weights that are not finite.

        Raises:
            NonFiniteTrainingError: If there is no way back.
        """
        if not self._is_on:
            return
        self._steering.finish_window()
        if self._pending is not None:
            raise self._error(self._pending, "training has ended")
        trouble = self._search.nonfinite()
        if trouble is not None:
            self._go_back(trouble)

    def _look(self) -> None:
        steering = self._steering
        trouble, self._pending = self._pending, None
        has_skipped, steering.has_skipped = steering.has_skipped, False
        if trouble is None and has_skipped:
            trouble = self._search.nonfinite()
        self._search.read_losses()
        if not self._search.is_undecided:
            self._aside = None
        if trouble is None:
            copy = self._ring.newest
            trouble = self._search.too_high(None if copy is None else copy.note["telemetry"])
            if self._search.has_moved and (self._is_spent or len(self._ring) == 1):
                self._accept()
                trouble = None
        if trouble is None and steering.applied_steps >= self._due and self._search.is_calm:
            trouble = self._search.nonfinite()
            if trouble is None:
                self._take()
        if trouble is not None:
            self._go_back(trouble)

    # ---- copies ----

    def _take(self) -> None:
        steering, live = self._steering, self._live
        assert live is not None
        self._report_packer()
        if live.has_lazy:
            self._due = steering.applied_steps + 1
            return
        if self._ring.take(live.gather(), self._note(), steering.window):
            self._has_new_copy = True
            self._due = steering.applied_steps + self._config.every
        else:  # the copy before is being compressed, or there is no memory
            self._due = steering.applied_steps + 1
            self._is_on = not self._ring.is_off

    def _note(self) -> dict[str, Any]:
        """What is kept with a copy."""
        steering = self._steering
        return {
            "applied_steps": steering.applied_steps,
            "telemetry": steering.telemetry.copies(),
            "schedules": steering.schedules.state(),
            "losses": self._search.note(),
        }

    def _report_packer(self) -> None:
        if self._packer is not None and self._packer.error is not None and not self._has_told_of_packer:
            self._has_told_of_packer = True
            error = self._packer.error
            rank_zero_warn(
                f"autoprec: a copy of the run could not be compressed ({type(error).__name__}: {error}); copies stay as"
                " they are from here on."
            )

    def _describe(self) -> None:
        count, reason = len(self._ring), self._ring.reason
        if not self._config.keep:
            self._steering.copies = "off"
            return
        text = f"{count} {'copy' if count == 1 else 'copies'} of {self._ring.nbytes / max(count, 1) / 1e6:.3g} MB"
        self._steering.copies = text if reason is None else f"off: {reason}" if not count else f"{text}; {reason}"

    # ---- reasons to go back ----

    def _answer_stop(self, text: str, where: str) -> str | None:
        """Called where steps were skipped for so long that training would stop.

        Returns:
            ``None`` if the run goes back instead, else why it does not.
        """
        trouble = Trouble(text, NonFiniteTrainingError, where)
        if self._is_spent or not self._has_way_back(trouble):
            return self._past()
        self._pending = trouble
        return None

    # ---- the way back ----

    def _has_way_back(self, trouble: Trouble) -> bool:
        copy = self._ring.newest
        if copy is None:
            return False
        has_progress = copy.note["applied_steps"] != self._steering.applied_steps
        return has_progress or not trouble.needs_progress or len(self._ring) > 1

    def _go_back(self, trouble: Trouble) -> None:
        steering = self._steering
        is_of_loss, has_moved = trouble.error is DivergedTrainingError, self._search.has_moved
        if self._is_spent or not self._has_way_back(trouble):
            raise self._error(trouble)
        self._futile = is_of_loss + (self._futile if has_moved else 0)
        if self._has_failed(trouble) and len(self._ring) > 1:
            self._ring.drop_newest()
        failed_in_fp32 = self._was_in_fp32
        self._set_aside(is_of_loss)
        copy = self._restored()
        if copy is None:
            raise self._error(trouble)
        before, after = steering.applied_steps, int(copy.note["applied_steps"])
        self._follow(copy)
        self._search.go_back(copy.note["losses"], is_of_loss)
        steering.rollbacks += 1
        reason = f"guard: {trouble.cause}; first offender: {trouble.where}"
        steering.history.append(Decision(steering.window, "rollback", None, before, after, after, "applied", reason))
        quarantine = self._config.quarantine
        steering.knobs.quarantine(steering.window, after, quarantine, "the run went back to a copy")
        self._wide_until = after + quarantine
        self._lower_learning_rate()
        self._due = after + self._config.every
        self._has_new_copy = False
        self._warn(trouble, copy, before, after, failed_in_fp32)
        if self._search.nonfinite() is not None:
            raise self._error(trouble)

    def _set_aside(self, is_of_loss: bool) -> None:
        """Keeps what the run is before it goes back by its losses: it may turn out that the data have changed."""
        assert self._live is not None
        if not is_of_loss:
            self._aside = None
        elif self._aside is None:
            self._aside = self._ring.aside(self._live.gather(), self._note(), self._steering.window)

    def _follow(self, copy: Snapshot) -> None:
        """Has counters, measurements and schedules follow a copy that was written."""
        steering = self._steering
        steering.go_back(int(copy.note["applied_steps"]), copy.note["telemetry"])
        steering.schedules.load(copy.note["schedules"])
        if self._distrust is not None:
            self._distrust()

    def _take_up_again(self, is_no_worse: bool) -> bool:
        """Goes on from what was set aside, unless that had higher losses; returns whether it does."""
        copy, self._aside = self._aside, None
        read = None if copy is None or not is_no_worse else copy.reader()
        if copy is None or read is None or self._live is None:
            return False
        self._live.write(copy.state, read)
        self._follow(copy)
        return True

    @property
    def _counted(self) -> int:
        return self._steering.rollbacks - self._pardoned

    @property
    def _is_spent(self) -> bool:
        return self._counted >= self._config.max_rollbacks

    def _accept(self) -> None:
        """Goes on: weights that had ordinary losses have high ones now, so another rollback would change nothing."""
        steering = self._steering
        was_no_worse = self._search.was_no_worse
        self._search.accept()
        self._pardoned += self._futile
        self._futile = 0
        self._lower_learning_rate()
        before = steering.applied_steps
        is_back = self._take_up_again(was_no_worse)
        reason = (
            "the loss is too high from the first window after the rollback on: data or loss have changed, not the"
            " weights; such losses count as ordinary from here on"
            + ("; the run goes on from where it was before it went back" if is_back else "")
        )
        steps = steering.applied_steps
        steering.history.append(Decision(steering.window, "rollback", None, before, None, steps, "refused", reason))
        rank_zero_warn(
            f"autoprec: {reason}. That rollback does not count. `RollbackConfig(loss_spreads=math.inf)` leaves high"
            " losses alone."
        )

    def _has_failed(self, trouble: Trouble) -> bool:
        """Whether going back to the newest copy did not help, or cannot because the run is still where it was then."""
        copy = self._ring.newest
        is_where_it_was = copy is not None and copy.note["applied_steps"] == self._steering.applied_steps
        return (self._steering.rollbacks > 0 and not self._has_new_copy) or (trouble.needs_progress and is_where_it_was)

    def _restored(self) -> Snapshot | None:
        """Writes the newest copy that is what was written; ``None`` if there is none."""
        assert self._live is not None
        while (copy := self._ring.newest) is not None:
            read = copy.reader()
            if read is not None:
                self._live.write(copy.state, read)
                return copy
            self._ring.drop_newest()
            after = copy.note["applied_steps"]
            reason = f"the copy of window {copy.window} is not what was written; the one before it is tried"
            before = self._steering.applied_steps
            decision = Decision(self._steering.window, "rollback", None, before, after, before, "refused", reason)
            self._steering.history.append(decision)
            rank_zero_warn(f"autoprec: {reason}.")
        return None

    @property
    def _was_in_fp32(self) -> bool:
        """Whether the run went wrong in the fp32 that the last rollback put it into."""
        steering = self._steering
        return steering.rollbacks > 0 and steering.applied_steps <= self._wide_until and steering.knobs.runs_in_fp32

    def _lower_learning_rate(self) -> None:
        factor = self._config.learning_rate_factor**self._counted
        self._steering.coupling.set_factor("rollback", factor, self._steering.window, "the run went back to a copy")

    def _warn(self, trouble: Trouble, copy: Snapshot, before: int, after: int, failed_in_fp32: bool) -> None:
        steering, config = self._steering, self._config
        follows = f"the data go on, and everything stays in fp32 for {config.quarantine} applied steps"
        if "precision" in steering.knobs.masked:
            follows = "the data go on"
        if config.learning_rate_factor != 1.0:
            follows += f"; the learning rate is multiplied by {config.learning_rate_factor:g}"
        rank_zero_warn(
            f"autoprec: {trouble.cause} at window {steering.window}. The run goes back to its copy of window"
            f" {copy.window}, {before - after} applied steps are undone ({after} are left); {follows}. This is rollback"
            f" {steering.rollbacks} of at most {config.max_rollbacks}."
            + (f" {_NOT_PRECISION}" if failed_in_fp32 else "")
        )

    def _error(self, trouble: Trouble, why_not: str | None = None) -> RuntimeError:
        steering = self._steering
        advice = _HIGH_LOSSES if trouble.error is DivergedTrainingError else ""
        is_wide = self._was_in_fp32 or (not steering.rollbacks and steering.knobs.runs_in_fp32)
        return trouble.error(
            f"Training stopped at window {steering.window}: {trouble.cause}. First offending layer: {trouble.where}."
            f" {self._past(why_not)} {steering.applied_steps} steps are applied, {steering.skipped_steps} were skipped,"
            f" {steering.undone_windows} undone. {_NOT_PRECISION if is_wide else _MAYBE_PRECISION}{advice}"
        )

    def _past(self, why_not: str | None = None) -> str:
        """The rollbacks so far, and why there is not another one."""
        rollbacks = [d for d in self._steering.history if d.knob == "rollback" and d.outcome == "applied"]
        past = ", ".join(f"at window {each.step} to {each.applied} applied steps" for each in rollbacks)
        return f"Rollbacks: {past or 'none'}; {why_not or self._why_not()}."

    def _why_not(self) -> str:
        if self._is_spent:
            return f"`max_rollbacks={self._config.max_rollbacks}` allows no more"
        if self._ring.newest is None:
            return "there is no copy to go back to" + (f" ({self._ring.reason})" if self._ring.reason else "")
        return "no step was applied since the last copy"

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only; copies are not part of it."""
        counts = {"wide_until": self._wide_until, "futile": self._futile, "pardoned": self._pardoned}
        return {**self._search.state_dict(), **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned, ``{}`` for nothing; the next boundary takes a copy."""
        self._ring.clear()
        self._due = 0
        self._pending = self._aside = None
        self._search.load_state_dict(state)
        self._wide_until = int(state.get("wide_until", -1))
        self._futile, self._pardoned = int(state.get("futile", 0)), int(state.get("pardoned", 0))
        if self._steering.rollbacks:
            self._lower_learning_rate()


def _is_training(root: nn.Module) -> bool:
    """Whether training batches run, not those of a validation in between."""
    return isinstance(root, pl.LightningModule) and bool(root.trainer.training)


def _that_go_back(
    optimizers: Sequence[Any], schedules: Sequence[Any], steering: Steering
) -> tuple[list[Any], Sequence[int]]:
    """Schedules that count applied steps, and the optimizers whose learning rate others move."""
    held = steering.schedules.held()
    fixed = {
        index
        for index, optimizer in enumerate(optimizers)
        for each in schedules
        if getattr(each.scheduler, "optimizer", None) is optimizer and not any(each.scheduler is one for one in held)
    }
    moving = {id(optimizers[index]) for index in fixed}
    return [each for each in held if id(getattr(each, "optimizer", None)) not in moving], sorted(fixed)
