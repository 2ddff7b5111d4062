"""What passes between a comparison and the processes in which its runs train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoprec.compare.records import Evaluation


@dataclass(frozen=True)
class Go:
    """Take ``steps`` optimizer steps; with ``last``, the run ends after them."""

    steps: int
    last: bool


@dataclass(frozen=True)
class Evaluate:
    """Compute the held-out loss now."""


@dataclass(frozen=True)
class Finish:
    """Leave ``fit``, do what comes after it, and report."""


@dataclass(frozen=True)
class Ready:
    """The run stands before its first step.

    Args:
        parameters: Numbers in the model.
        changes: What was changed in the arguments of the Trainer, a line for each point.
        device: Where the model is.
        steps: Steps of the whole training, ``None`` where it has no end that is known.
    """

    parameters: int
    changes: tuple[str, ...] = ()
    device: str = "cpu"
    steps: int | None = None


@dataclass
class Turn:
    """Steps were taken.

    Args:
        step_s: Seconds of each step, from one batch to the next, everything in between included.
        losses: Training loss of each step, ``None`` where the module gives none.
        formats: ``(step, format of each unit)`` where it changed.
        evaluations: What the module's own validation gave.
        is_over: Whether the training has ended.
    """

    step_s: list[float] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    formats: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    is_over: bool = False


@dataclass(frozen=True)
class Evaluated:
    """The mean held-out loss, computed in fp32."""

    loss: float


@dataclass(frozen=True)
class Done:
    """The run has ended.

    Args:
        peak_bytes: Most memory that the run held, ``None`` where the system does not tell.
        applied_steps: Optimizer steps taken.
        skipped_steps: Optimizer steps not taken.
        unit_parameters: Parameters of each unit of the format map; empty in a static run.
        outcomes: Number of recorded decisions by outcome.
        loss_scale: Loss scale at the end, None in a static run.
        clip_threshold: Clip threshold at the end.
        extra: What only some callers ask for, as JSON can hold it.
    """

    peak_bytes: int | None
    applied_steps: int = 0
    skipped_steps: int = 0
    unit_parameters: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    loss_scale: float | None = None
    clip_threshold: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The run raised.

    Args:
        traceback: All of it.
        message: Type and text of the exception.
        is_target: Whether what is to be trained is at fault, not the run: then no other run can do better.
    """

    traceback: str
    message: str = ""
    is_target: bool = False


Command = Go | Evaluate | Finish
Reply = Ready | Turn | Evaluated | Done | Failed
