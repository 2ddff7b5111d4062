"""What passes between the demo and the processes in which its runs train."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """Leave ``fit`` and report."""


@dataclass(frozen=True)
class Ready:
    """The run stands before its first step; its model has ``parameters`` numbers."""

    parameters: int


@dataclass(frozen=True)
class Turn:
    """Steps were taken.

    Args:
        step_s: Seconds of each step, from one batch to the next, everything in between included.
        losses: Training loss of each step.
        formats: ``(step, format of each unit)`` where it changed.
    """

    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    formats: list[tuple[int, dict[str, str]]] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluated:
    """The mean held-out loss, computed in fp32."""

    loss: float


@dataclass(frozen=True)
class Done:
    """The run has ended.

    Args:
        peak_bytes: Largest resident memory of the process, None where the system does not tell.
        applied_steps: Optimizer steps taken.
        skipped_steps: Optimizer steps not taken.
        unit_parameters: Parameters of each unit of the format map; empty in a static run.
        outcomes: Number of recorded decisions by outcome.
        loss_scale: Loss scale at the end, None in a static run.
        clip_threshold: Clip threshold at the end.
    """

    peak_bytes: int | None
    applied_steps: int = 0
    skipped_steps: int = 0
    unit_parameters: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    loss_scale: float | None = None
    clip_threshold: float | None = None


@dataclass(frozen=True)
class Failed:
    """The run raised."""

    traceback: str


Command = Go | Evaluate | Finish
Reply = Ready | Turn | Evaluated | Done | Failed
