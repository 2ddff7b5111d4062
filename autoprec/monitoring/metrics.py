"""The metrics: their names, kinds and labels, and what of a run becomes which sample.

What lives here: plain data in, plain samples out. What does not: where numbers come from (``values``), and Prometheus'
own classes (``collector``). Names follow Prometheus' conventions: base units, ``_total`` for counters, ``_ratio`` for
shares from 0 to 1, ``_info`` for constants whose labels are what counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from autoprec.formats import FORMATS
from autoprec.history import Knob, Outcome
from autoprec.monitoring.values import StepValues
from autoprec.progress_reading import ProgressReading, RunInfo, UnitInfo

Kind = Literal["counter", "gauge", "info", "histogram"]
PREFIX = "autoprec_"
RUN_LABELS = ("run", "device")
"""On every metric."""
STEP_SECONDS = "step_seconds"
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the histogram of step times, in seconds."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        kind: What Prometheus calls its type.
        help: What it means, in one sentence.
        labels: Its labels beside ``run`` and ``device``.
    """

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """What Prometheus puts behind the name."""
        return {"counter": "_total", "info": "_info"}.get(self.kind, "")


METRICS: Mapping[str, Metric] = {
    "run": Metric("info", "The run, always 1.", ("model", "policy", "precision", "device_name", "version")),
    "running": Metric("gauge", "1 while the run trains, 0 in the last push or file."),
    "start_timestamp_seconds": Metric("gauge", "When training began, Unix time."),
    "last_step_timestamp_seconds": Metric("gauge", "When the latest optimizer step ended, Unix time."),
    "progress_ratio": Metric("gauge", "Share of the run that is over; absent if its end is not known."),
    "epoch": Metric("gauge", "Epoch at the last decision point, from 0."),
    "applied_steps": Metric("counter", "Optimizer steps taken, those included that a rollback has undone."),
    "skipped_steps": Metric("counter", "Optimizer steps not taken because a gradient was not finite."),
    "undone_steps": Metric("counter", "Applied steps that rollbacks have undone."),
    "rollbacks": Metric("counter", "How often the run went back to a copy of itself."),
    "lost_windows": Metric("counter", "Optimizer windows lost to out-of-memory errors."),
    STEP_SECONDS: Metric("histogram", "Time from the first batch of a step to its end, without waiting for data."),
    "samples_per_second": Metric("gauge", "Samples trained per second around the last decision point."),
    "loss": Metric("gauge", "Mean training loss since the decision point before the last."),
    "loss_scale": Metric("gauge", "Loss scale; absent while nothing needs one."),
    "loss_scale_floor": Metric("gauge", "Smallest loss scale that is allowed; absent while nothing needs one."),
    "grad_norm": Metric("gauge", "Global norm of the unscaled gradients of the latest applied step, before clipping."),
    "clip_threshold": Metric("gauge", "Threshold on the global gradient norm; absent while clipping is off."),
    "batch_size": Metric("gauge", "Samples in a batch of the loader."),
    "accumulate_grad_batches": Metric("gauge", "Batches per optimizer step."),
    "utilization_ratio": Metric("gauge", "Share of the time that the device was busy; on a CPU, that the process was."),
    "memory_bytes": Metric("gauge", "Memory of the run: torch's allocator on a GPU, resident memory on a CPU."),
    "units": Metric("gauge", "Steered units that run in a format.", ("format", "emulated")),
    "parameters": Metric("gauge", "Parameters of the steered units that run in a format.", ("format", "emulated")),
    "decisions": Metric("counter", "Decisions by knob and by what became of them.", ("knob", "outcome")),
    "unit_series_omitted": Metric("gauge", "Units that have no metrics of their own (MonitorConfig.max_units)."),
    "unit_format": Metric("info", "The format that a unit runs in, always 1.", ("unit", "kind", "format", "emulated")),
    "unit_activation_amax": Metric("gauge", "Largest output magnitude of a unit in the latest sample.", ("unit",)),
    "unit_grad_norm": Metric("gauge", "Norm of a unit's unscaled gradients in the latest applied step.", ("unit",)),
    "unit_overflows": Metric("counter", "How often outputs of a unit left the range of its format.", ("unit",)),
}

Samples = Iterator[tuple[str, tuple[str, ...], float]]
"""Metric, values of its own labels, value."""


def exported_names() -> frozenset[str]:
    """Returns the names of all series, those of histograms included."""
    names = {f"{PREFIX}{name}{metric.suffix}" for name, metric in METRICS.items() if metric.kind != "histogram"}
    parts = {f"{PREFIX}{STEP_SECONDS}{part}" for part in ("_bucket", "_count", "_sum", "_created")}
    return frozenset(names | parts)


@dataclass
class RunValues:
    """What is known of a run. Every field is replaced as a whole, so that another thread may read at any time.

    Args:
        info: The run.
        max_units: Units that have metrics of their own.

    Attributes:
        started_at: When training began, Unix time.
        is_running: Whether it trains.
        step: After the latest optimizer step.
        reading: At the latest decision point.
        progress: Share of the run that was over then, NaN if not known.
        decisions: Decisions so far, by knob and outcome.
        shown: The units with metrics of their own.
    """

    info: RunInfo
    max_units: int
    started_at: float
    is_running: bool = True
    step: StepValues | None = None
    reading: ProgressReading | None = None
    progress: float = math.nan
    decisions: dict[tuple[str, str], int] = field(default_factory=dict)
    shown: tuple[UnitInfo, ...] = ()

    def __post_init__(self) -> None:
        """Chooses the units that are shown, for the whole run."""
        every = [(knob, outcome) for knob in get_args(Knob) for outcome in get_args(Outcome)]
        self.decisions = dict.fromkeys(every, 0)  # a counter that comes into being later hides its first increase
        largest = sorted(self.steered, key=lambda unit: -unit.parameter_count)[: self.max_units]
        self.shown = tuple(unit for unit in self.steered if unit in largest)

    @property
    def steered(self) -> tuple[UnitInfo, ...]:
        """Units that are not left alone, in the model's order."""
        return tuple(unit for unit in self.info.units if unit.left_alone is None)


def samples(values: RunValues) -> Samples:
    """Makes samples of what is known; what is not known, or has no meaning at the time, has none.

    Args:
        values: The run.
    """
    known = (*_run_samples(values), *_step_samples(values), *_reading_samples(values), *_unit_samples(values))
    for name, labels, value in known:
        if value is not None and not math.isnan(value):
            yield name, tuple(map(as_label, labels)), float(value)


def as_label(text: str) -> str:
    """Returns a text as UTF-8 can hold it: names of files may have bytes in them that are no text.

    Args:
        text: The text.
    """
    return text.encode(errors="backslashreplace").decode()


_Maybe = Iterator[tuple[str, tuple[str, ...], float | None]]


def _run_samples(values: RunValues) -> _Maybe:
    info = values.info
    version = info.versions.get("autoprec", "")
    yield "run", (info.model, info.policy, info.base_precision, info.device, version), 1.0
    yield "running", (), float(values.is_running)
    yield "start_timestamp_seconds", (), values.started_at
    yield "progress_ratio", (), values.progress
    yield "unit_series_omitted", (), len(values.steered) - len(values.shown)
    for key, count in tuple(values.decisions.items()):
        yield "decisions", key, count


def _step_samples(values: RunValues) -> _Maybe:
    step = values.step
    if step is None:
        return
    yield "last_step_timestamp_seconds", (), step.at
    yield "applied_steps", (), step.applied + step.undone
    yield "skipped_steps", (), step.skipped
    yield "undone_steps", (), step.undone
    yield "rollbacks", (), step.rollbacks
    yield "lost_windows", (), step.lost_windows
    if step.loss_scale is not None:
        yield "loss_scale", (), step.loss_scale
        yield "loss_scale_floor", (), step.loss_scale_floor
    yield "grad_norm", (), step.grad_norm
    yield "clip_threshold", (), step.clip_threshold if math.isfinite(step.clip_threshold) else None
    yield "batch_size", (), step.batch_size
    yield "accumulate_grad_batches", (), step.accumulate
    yield from _format_samples(values, step.formats)
    for unit in values.shown:
        yield "unit_overflows", (unit.name,), step.overflows.get(unit.name, 0)


def _format_samples(values: RunValues, formats: Mapping[str, str]) -> _Maybe:
    units: dict[tuple[str, str], int] = {(name, "false"): 0 for name in FORMATS}
    parameters = dict(units)
    for unit in values.steered:
        key = _format_labels(unit, formats)
        units[key] = units.get(key, 0) + 1
        parameters[key] = parameters.get(key, 0) + unit.parameter_count
    for key, count in units.items():
        yield "units", key, count
        yield "parameters", key, parameters[key]
    for unit in values.shown:
        yield "unit_format", (unit.name, unit.kind, *_format_labels(unit, formats)), 1.0


def _format_labels(unit: UnitInfo, formats: Mapping[str, str]) -> tuple[str, str]:
    name = formats.get(unit.name, "fp32")
    return name, "true" if name in unit.emulated else "false"


def _reading_samples(values: RunValues) -> _Maybe:
    reading = values.reading
    if reading is None:
        return
    yield "epoch", (), reading.epoch
    yield "loss", (), reading.loss
    yield "samples_per_second", (), reading.samples_per_s


def _unit_samples(values: RunValues) -> _Maybe:
    reading = values.reading
    if reading is None:
        return
    for unit in values.shown:
        yield "unit_activation_amax", (unit.name,), reading.activation_amax.get(unit.name)
        yield "unit_grad_norm", (unit.name,), reading.grad_norms.get(unit.name)
