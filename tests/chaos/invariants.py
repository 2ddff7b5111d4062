"""What must hold after every run of the fault campaign, as pure functions of what the run left behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoprec import Action, Decision, NonFiniteTrainingError
from tests.chaos.fault import Asked, Effect, Fault
from tests.chaos.features import HAS_MEMORY_RECOVERY
from tests.chaos.settings import Setting

FINAL = ("applied", "limited", "refused")
SIZES = ("batch_size", "accumulate")


@dataclass(frozen=True)
class Reading:
    """The knobs as a training step found them."""

    window: int
    formats: dict[str, str]
    loss_scale: float
    clip: float
    batch_size: int | None
    accumulate: int


@dataclass
class Evidence:
    """What a run left behind.

    Args:
        setting: What was trained.
        faults: What was injected.
        error: What ended the fit.
        raised: What faults raised, in order.
        history: The record.
        windows: Windows that were closed.
        applied: Optimizer steps taken. The other counters are those of the same name.
        attempts: ``trainer.global_step``.
        readings: The knobs at each training step.
        asked: Requests that were made.
        non_finite: Names of tensors with inf or NaN: weights, buffers, moments.
        gradient_dtypes: Parameters whose gradients would have another dtype than they have.
        traces: What is not as it was, or not as without the callback.
        checkpoints: What is wrong with the checkpoints.
        differences: Where the run differs from its twin without faults.
        loss: Final loss.
        twin_loss: That of the twin.
        noise: Spread of the final loss over seeds, in plain fp32.
        resumed: Where the resumed run differs from the one that was not killed.
    """

    setting: Setting
    faults: Sequence[Fault] = ()
    error: BaseException | None = None
    raised: Sequence[BaseException] = ()
    history: Sequence[Decision] = ()
    windows: int = 0
    applied: int = 0
    skipped: int = 0
    user_skipped: int = 0
    lost: int = 0
    undone: int = 0
    attempts: int = 0
    readings: Sequence[Reading] = ()
    asked: Sequence[Asked] = ()
    non_finite: Sequence[str] = ()
    gradient_dtypes: Sequence[str] = ()
    traces: Sequence[str] = ()
    checkpoints: Sequence[str] = ()
    differences: Sequence[str] = ()
    loss: float = 0.0
    twin_loss: float = 0.0
    noise: Callable[[], float] = field(default=lambda: 0.0)
    resumed: Sequence[str] = ()

    @property
    def effect(self) -> Effect:
        """The worst that the faults which struck may do."""
        return max((fault.effect for fault in self.faults if fault.struck), default=Effect.NONE)

    @property
    def is_manual(self) -> bool:
        """Whether windows have several optimizer steps."""
        return self.setting.model == "gan"

    @property
    def counted(self) -> int:
        """Windows that are accounted for; optimizer steps where there are several optimizers."""
        return self.applied + self.skipped + self.user_skipped + self.lost + self.undone


def everything_is_finite(evidence: Evidence) -> Iterator[str]:
    """No weight, moment or buffer holds inf or NaN."""
    if evidence.non_finite:
        yield f"not finite: {', '.join(evidence.non_finite[:5])}"


def windows_add_up(evidence: Evidence) -> Iterator[str]:
    """Each window was applied, skipped as non-finite, skipped by the user, lost to memory or undone."""
    if not evidence.is_manual and evidence.windows != evidence.counted:
        yield f"{evidence.windows} windows, but {_sum(evidence)}"
    # the step that training stopped at has begun and is not an attempt of Lightning's yet
    began = {0, 1} if isinstance(evidence.error, NonFiniteTrainingError) else {0}
    if not evidence.lost and evidence.counted - evidence.attempts not in began:
        yield f"{evidence.attempts} attempted steps, but {_sum(evidence)}"


def bad_steps_are_skipped(evidence: Evidence) -> Iterator[str]:
    """Windows that a fault has poisoned were not applied."""
    if any(each.knob in ("batch_size", "accumulate") and each.outcome != "refused" for each in evidence.history):
        return
    left_out = {batch for fault in evidence.faults if fault.leaves_out for batch in fault.struck}
    poisoned = {batch for fault in evidence.faults if fault.poisons for batch in fault.struck} - left_out
    hit = {batch // evidence.setting.accumulate for batch in poisoned}
    needed = len(hit) - (evidence.error is not None)  # the last one may not have come to its step
    if evidence.skipped + evidence.lost + evidence.undone + evidence.user_skipped < needed:
        yield f"{len(hit)} windows were poisoned, but {_sum(evidence)}"


def the_right_error_arrives(evidence: Evidence) -> Iterator[str]:
    """What a fault raised reaches the user as it was, and nothing else ends the fit without need."""
    error = evidence.error
    if error is None:
        unanswered = [each for each in evidence.raised if not _may_be_survived(each)]
        if unanswered:
            yield f"{unanswered[0]!r} was raised and fit went on"
        return
    if any(error is each for each in evidence.raised) or any(fault.allows(error) for fault in evidence.faults):
        return
    if isinstance(error, SystemExit) and any(isinstance(each, KeyboardInterrupt) for each in evidence.raised):
        return  # Lightning's answer to Ctrl-C
    long_enough = sum(len(fault.struck) for fault in evidence.faults if fault.poisons) >= 4
    if isinstance(error, NonFiniteTrainingError) and long_enough:
        return
    yield f"fit ended with {type(error).__name__}: {str(error)[:300]}"


def every_change_is_on_record(evidence: Evidence) -> Iterator[str]:
    """Between two steps no knob has moved without a decision."""
    for before, after in zip(evidence.readings, evidence.readings[1:], strict=False):
        rows = [row for row in evidence.history if before.window <= row.step <= after.window]
        for name, value in after.formats.items():
            is_told = any(row.knob == "precision" and row.unit == name and row.applied == value for row in rows)
            if value != before.formats.get(name) and not is_told:
                yield f"window {after.window}: {name} went from {before.formats.get(name)} to {value} without a record"
        for knob in ("loss_scale", *SIZES):
            value = getattr(after, knob)
            is_steered = knob in evidence.setting.knobs or knob == "accumulate"
            is_told = any(row.knob == knob and row.applied == value for row in rows)
            if value != getattr(before, knob) and is_steered and not is_told:
                yield f"window {after.window}: {knob} is {value} without a record"
        # one row stands for a threshold that follows the median
        is_told = any(row.knob == "clip" and row.step <= after.window for row in evidence.history)
        if after.clip != before.clip and "clip" in evidence.setting.knobs and not is_told:
            yield f"window {after.window}: clip is {after.clip} without a record"


def every_request_has_an_outcome(evidence: Evidence) -> Iterator[str]:
    """What was asked for was applied, limited, refused, or waits because fit ended."""
    for asked in evidence.asked:
        for knob, unit, value in _parts(asked.action):
            rows = [
                row
                for row in evidence.history
                if row.knob == knob and row.step >= asked.window and _is_same(row.requested, value)
            ]
            if not rows:
                yield f"window {asked.window}: {knob} {unit or ''} = {value} was asked for and has no outcome"
            waits = [row for row in rows if row.outcome == "deferred" and knob not in SIZES]
            is_over = evidence.error is not None or evidence.windows <= asked.window + 1
            for row in waits if not is_over else ():
                if not any(other.unit == row.unit and other.outcome in FINAL for other in rows):
                    yield f"window {asked.window}: {knob} {row.unit or ''} = {value} was deferred for ever"


def faults_are_answered(evidence: Evidence) -> Iterator[str]:
    """Each fault has done to counters and record what it should."""
    for fault in evidence.faults:
        yield from fault.complaints(evidence)


def nothing_is_lost(evidence: Evidence) -> Iterator[str]:
    """Faults that should change nothing change no bit, and recoverable ones cost less than another seed."""
    if evidence.error is not None:
        return
    if evidence.effect == Effect.NONE and evidence.differences:
        yield f"not bit-identical to the run without the fault: {', '.join(evidence.differences[:5])}"
    excess = evidence.loss - evidence.twin_loss
    if evidence.effect == Effect.RECOVERABLE and not excess <= 0 and not excess <= (noise := evidence.noise()):
        yield f"final loss {evidence.loss:.5g}, {evidence.twin_loss:.5g} without the fault, noise {noise:.3g}"


def no_trace_is_left(evidence: Evidence) -> Iterator[str]:
    """Module, Trainer, threads and global state are as without the callback."""
    if evidence.traces:
        yield f"{'; '.join(evidence.traces[:5])}"


def gradients_have_their_dtype(evidence: Evidence) -> Iterator[str]:
    """No parameter is left with a dtype for gradients that is not its own."""
    if evidence.gradient_dtypes:
        yield f"`grad_dtype` of {', '.join(evidence.gradient_dtypes[:5])}"


def checkpoints_load(evidence: Evidence) -> Iterator[str]:
    """Checkpoints load with ``weights_only=True`` and their weights into the plain model."""
    yield from evidence.checkpoints


def resumed_runs_are_the_same(evidence: Evidence) -> Iterator[str]:
    """A run that was killed and resumed ends as the one that was not."""
    if evidence.resumed:
        yield f"not bit-identical after kill -9 and resume: {', '.join(evidence.resumed[:5])}"


INVARIANTS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    everything_is_finite,
    windows_add_up,
    bad_steps_are_skipped,
    the_right_error_arrives,
    every_change_is_on_record,
    every_request_has_an_outcome,
    faults_are_answered,
    nothing_is_lost,
    no_trace_is_left,
    gradients_have_their_dtype,
    checkpoints_load,
    resumed_runs_are_the_same,
)


@dataclass(frozen=True)
class Violation:
    """An invariant that did not hold.

    Args:
        name: Name of the invariant.
        detail: What was found.
    """

    name: str
    detail: str


def violations(evidence: Evidence) -> list[Violation]:
    """Returns what did not hold."""
    return [Violation(check.__name__, detail) for check in INVARIANTS for detail in check(evidence)]


def _sum(evidence: Evidence) -> str:
    return (
        f"{evidence.applied} applied + {evidence.skipped} skipped + {evidence.user_skipped} by the user"
        f" + {evidence.lost} lost + {evidence.undone} undone"
    )


def _may_be_survived(error: BaseException) -> bool:
    return HAS_MEMORY_RECOVERY and "memory" in str(error)


def _parts(action: Action) -> Iterator[tuple[str, str | None, Any]]:
    for pattern, name in (action.precision or {}).items():
        yield "precision", pattern, name
    for knob in ("loss_scale", "clip", *SIZES):
        value = getattr(action, knob)
        if value is not None:
            yield knob, None, value


def _is_same(left: Any, right: Any) -> bool:
    is_nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return is_nan or left == right
