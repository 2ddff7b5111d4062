"""What a run tells about itself while it trains, as plain data, and who is told.

A :class:`ProgressListener` is told when training begins, what is decided, one :class:`ProgressReading` for each
decision point, and how training ended. What lives here: the data and the protocol, without Lightning and without a
device. What does not: where the numbers come from (``progress_feed``) and which listeners a run has:
``listeners.listeners_for`` is the one place where the options of the callback (``record=`` among them) and the
Trainer's loggers become listeners.

Everything runs on rank zero, in the training thread, and only in a run that has listeners. A listener that raises is
warned about once and told nothing more; it never ends or changes the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from autoprec.history import Decision

HowEnded: TypeAlias = Literal["finished", "interrupted", "failed"]
Costs: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Unit name, then format name, then ``ms``, ``activation_bytes``, ``copy_bytes``, ``implementation`` and ``error``."""


@dataclass(frozen=True, kw_only=True)
class UnitInfo:
    """What does not change about a decision unit.

    Args:
        name: Its stable name.
        kind: Kind of layer.
        parameter_count: Parameters, shared ones counted once.
        depth: Position in the model, 0 (first) to 1 (last).
        left_alone: Why it is not steered, ``None`` if it is.
        emulated: Formats that the device only emulates.
    """

    name: str
    kind: str
    parameter_count: int
    depth: float = 0.0
    left_alone: str | None = None
    emulated: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What is known when training begins.

    Args:
        model: Class of the module.
        started_at: The moment, ISO 8601, UTC.
        command: What started the process.
        versions: By name of the package.
        device: Name of the device.
        device_type: ``"cpu"``, ``"cuda"`` and so on.
        machine: System, processor and cores.
        policy: Name of the policy.
        interval: Applied steps between decisions.
        knobs: Knobs that are steered.
        masked: Other knobs, each with the reason.
        settings: The configuration as primitives.
        base_precision: What the Trainer had.
        units: All decision units, in the model's order.
        formats: Format of every unit as training begins.
        parameter_count: Parameters of the model.
        seed: What ``seed_everything`` was called with, ``None`` if it was not.
        window: Optimizer window that training begins with; more than 0 in a resumed run.
        restored_decisions: How many decisions of the history come from a checkpoint.
        max_steps: Where the Trainer stops, ``None`` if it does not say so.
        max_epochs: The same in epochs.
    """

    model: str
    started_at: str
    command: str
    versions: Mapping[str, str]
    device: str
    device_type: str
    machine: Mapping[str, Any]
    policy: str
    interval: int
    knobs: tuple[str, ...]
    masked: Mapping[str, str]
    settings: Mapping[str, Any]
    base_precision: str
    units: tuple[UnitInfo, ...]
    formats: Mapping[str, str]
    parameter_count: int
    seed: int | None = None
    window: int = 0
    restored_decisions: int = 0
    max_steps: int | None = None
    max_epochs: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """The numbers of a run at one decision point, after what was decided there.

    ``None`` stands for what is not known; measured numbers may be infinite or NaN.

    Args:
        window: Optimizer window that begins, from 0, skipped windows included.
        global_step: Lightning's count of attempted steps, which loggers use.
        epoch: The epoch.
        elapsed_s: Seconds since training began in this process.
        loss: Mean of the finite losses since the last reading, NaN if there was none; ``None`` if no loss was seen.
        loss_scale: Loss scale, 1.0 if none is in use.
        clip_threshold: Threshold on the global norm, infinite if clipping is off.
        batch_size: Batch size of the loader.
        accumulate: Micro-batches of a step.
        grad_norm: Global gradient norm of the latest applied step, before clipping.
        noise_scale: Gradient-noise scale in samples.
        learning_rate: Largest learning rate of all optimizers.
        applied: Optimizer steps taken so far.
        skipped: Optimizer steps not taken so far because a gradient was not finite.
        undone: Applied steps that rollbacks have undone so far.
        rollbacks: How often the run went back so far.
        step_ms: Median time of a step since the last reading, loading of data included.
        samples_per_s: Samples per second at that time.
        decision_ms: What the decision took, measurements for it included.
        memory_bytes: Memory that the run holds: of torch's allocator on a GPU, else resident memory of the process.
        utilisation: Share of the time that the device was busy, 0 to 1.
    """

    window: int
    global_step: int
    epoch: int
    elapsed_s: float
    loss: float | None = None
    loss_scale: float = 1.0
    clip_threshold: float = float("inf")
    batch_size: int | None = None
    accumulate: int = 1
    grad_norm: float | None = None
    noise_scale: float | None = None
    learning_rate: float | None = None
    applied: int = 0
    skipped: int = 0
    undone: int = 0
    rollbacks: int = 0
    step_ms: float | None = None
    samples_per_s: float | None = None
    decision_ms: float = 0.0
    memory_bytes: int | None = None
    utilisation: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProgressReading(StepNumbers):
    """The run at one decision point, after what was decided there; see :class:`StepNumbers` for its numbers.

    Args:
        formats: Format of every unit from here on.
        changed: Those of them that differ from the last reading's.
        activation_amax: Largest output magnitude in the latest sample, by unit.
        grad_norms: Norm of the unit's gradient in the latest applied step, by unit.
        overflows: Outputs outside their format's range since the last reading, by unit, where there were any.
        costs: What formats cost in units, where that was measured since the last reading, else ``None``.
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, str] = field(default_factory=dict)
    activation_amax: Mapping[str, float] = field(default_factory=dict)
    grad_norms: Mapping[str, float] = field(default_factory=dict)
    overflows: Mapping[str, int] = field(default_factory=dict)
    costs: Costs | None = None


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """How training ended.

    Args:
        ended: ``"finished"``, ``"interrupted"`` by the user or a signal, or ``"failed"`` with an exception.
        error: Type and message of the exception, ``""`` if there was none.
        window: Optimizer windows that are over.
        applied: Optimizer steps taken.
        skipped: Optimizer steps not taken because a gradient was not finite.
        undone: Applied steps that rollbacks have undone.
        rollbacks: How often the run went back.
        lost_windows: Windows in which memory ran out.
        wall_s: Seconds since training began in this process.
        decision_s: Seconds of them that decisions took, measurements for them included.
        peak_bytes: Most memory that was held, of the device or of the process.
        metrics: Last values that the module has logged.
        formats: Format of every unit at the end.
        overflows: Outputs outside their format's range in the whole fit, by unit, where there were any.
        summary: The table that is printed at the end.
        history: Every decision, with what was noted on it later.
    """

    ended: HowEnded
    error: str = ""
    window: int = 0
    applied: int = 0
    skipped: int = 0
    undone: int = 0
    rollbacks: int = 0
    lost_windows: int = 0
    wall_s: float = 0.0
    decision_s: float = 0.0
    peak_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    overflows: Mapping[str, int] = field(default_factory=dict)
    summary: str = ""
    history: Sequence[Decision] = ()


class ProgressListener(Protocol):
    """Is told how a run goes. All calls come from the training thread, between two steps."""

    def started(self, info: RunInfo) -> None:
        """Called once, when training begins and the first formats are in force.

        Args:
            info: What is known.
        """

    def decided(self, decisions: Sequence[Decision]) -> None:
        """Called at the boundary that follows decisions, and right after ``started`` with those made before it.

        The first ``RunInfo.restored_decisions`` of the first call come from a checkpoint.

        Args:
            decisions: The new ones, at least one, oldest first.
        """

    def progressed(self, reading: ProgressReading) -> None:
        """Called at each decision point, after ``decided``.

        Args:
            reading: The run as it is.
        """

    def ended(self, totals: RunTotals) -> None:
        """Called once, when training has ended in whatever way; nothing may be left open afterwards.

        Args:
            totals: How it ended.
        """
