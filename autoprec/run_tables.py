"""A run as tables: its decisions, and its format map over time in few rows and few numbers.

Pure: what experiment loggers store of a run is made here, and nothing knows which loggers there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from autoprec import metric_names
from autoprec.formats import FORMATS, get_format
from autoprec.history import Decision
from autoprec.json_files import encoded
from autoprec.progress_reading import ProgressReading, RunInfo, RunTotals, UnitInfo

Row: TypeAlias = "list[str | int | float | None]"

HISTORY_COLUMNS: Final = [
    "window",
    "knob",
    "unit",
    "before",
    "requested",
    "applied",
    "outcome",
    "reason",
    "recovered_at",
]
FORMAT_COLUMNS: Final = ["unit", "kind", "parameters", "format", "bits", "from_window", "to_window"]
MOST_ROWS: Final = 10_000
"""Rows that a table of wandb shows; of a longer history the newest are kept, and the artifact has all."""

_LEFT_OUT = ("units", "formats", "command", "started_at")


@dataclass
class _Period:
    """A stretch of windows in which a unit has one format."""

    unit: UnitInfo
    format: str
    start: int
    end: int | None = None


class FormatMap:
    """The formats of a run over time: one row for each stretch in which a unit keeps its format.

    It is empty where precision is not steered.

    Args:
        info: The run as training begins.
    """

    def __init__(self, info: RunInfo) -> None:
        # what is not steered runs in the Trainer's precision, whatever its format would be
        is_steered = "precision" in info.knobs
        self.units = {unit.name: unit for unit in info.units if is_steered and unit.left_alone is None}
        self._open = {name: _Period(unit, info.formats[name], info.window) for name, unit in self.units.items()}
        self._closed: list[_Period] = []
        self._seen = {period.format for period in self._open.values()}

    def note_decisions(self, decisions: Iterable[Decision]) -> None:
        """Takes over what decisions have changed, each from its own window on.

        Args:
            decisions: Decisions in their order, those from a checkpoint left out.
        """
        for decision in decisions:
            if decision.knob == "precision" and decision.unit in self.units:
                self._change(str(decision.unit), str(decision.applied), decision.step)

    def note(self, formats: Mapping[str, str], window: int) -> None:
        """Takes over what has changed in some other way than by a decision.

        Args:
            formats: Format of every unit.
            window: The window that begins with them.
        """
        for name in self.units:
            self._change(name, formats.get(name, self._open[name].format), window)

    def _change(self, name: str, number_format: str, window: int) -> None:
        period = self._open[name]
        if number_format == period.format:
            return
        self._seen.add(number_format)
        if window > period.start:
            period.end = window
            self._closed.append(period)
        self._open[name] = _Period(self.units[name], number_format, window)

    def shares(self) -> dict[str, float]:
        """Returns the shares of parameters and of units in each format that the run has used so far, by metric name."""
        total = sum(unit.parameter_count for unit in self.units.values())
        values: dict[str, float] = {}
        for name in (name for name in FORMATS if name in self._seen):
            members = [period.unit for period in self._open.values() if period.format == name]
            if total:
                share = sum(unit.parameter_count for unit in members) / total
                values[metric_names.PARAMETER_SHARE + name] = share
            if self.units:
                values[metric_names.UNIT_SHARE + name] = len(members) / len(self.units)
        return values

    def rows(self, window: int) -> list[Row]:
        """Returns the map with ``FORMAT_COLUMNS``, unit by unit in the model's order.

        Args:
            window: Window that the run has ended with.
        """
        order = {name: position for position, name in enumerate(self.units)}
        periods = sorted(
            [*self._closed, *self._open.values()], key=lambda period: (order[period.unit.name], period.start)
        )
        return [
            [
                period.unit.name,
                period.unit.kind,
                period.unit.parameter_count,
                period.format,
                get_format(period.format).bits,
                period.start,
                window if period.end is None else period.end,
            ]
            for period in periods
        ]


def history_rows(history: Sequence[Decision]) -> list[Row]:
    """Returns the newest decisions with ``HISTORY_COLUMNS``, at most ``MOST_ROWS``.

    Values are text: a column of formats, numbers and nothing would have no type.

    Args:
        history: Every decision.
    """
    return [
        [
            decision.step,
            decision.knob,
            decision.unit or "",
            *(_text(value) for value in (decision.before, decision.requested, decision.applied)),
            decision.outcome,
            decision.reason,
            decision.recovered_at,
        ]
        for decision in history[-MOST_ROWS:]
    ]


def settings_of(info: RunInfo) -> dict[str, Any]:
    """Returns what a run was started with as JSON can hold it, without what is in tables and in the command.

    Args:
        info: The run as training begins.
    """
    document = {name: value for name, value in asdict(info).items() if name not in _LEFT_OUT}
    return {**encoded(document), "units": len(info.units)}


def reading_metrics(reading: ProgressReading) -> dict[str, float]:
    """Returns the finite numbers of a reading that are logged at each decision, by metric name.

    Args:
        reading: The run at a decision point.
    """
    values = {
        metric_names.LOSS: reading.loss,
        metric_names.ELAPSED_S: reading.elapsed_s,
        metric_names.STEP_MS: reading.step_ms,
        metric_names.SAMPLES_PER_S: reading.samples_per_s,
        metric_names.BATCH_SIZE: reading.batch_size,
        metric_names.MEMORY_BYTES: reading.memory_bytes,
        metric_names.UTILISATION: reading.utilisation,
    }
    return _finite(values)


def end_metrics(totals: RunTotals) -> dict[str, float]:
    """Returns what is logged once, when training has ended, by metric name.

    Args:
        totals: How it ended.
    """
    values = {
        metric_names.PEAK_BYTES: totals.peak_bytes,
        metric_names.WALL_S: totals.wall_s,
        metric_names.APPLIED_STEPS: totals.applied,
        metric_names.SKIPPED_STEPS: totals.skipped,
    }
    return _finite(values)


def markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    """Returns a table as Markdown.

    Args:
        columns: Names of the columns.
        rows: The rows.
    """
    lines = [columns, ["---"] * len(columns), *([_text(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def document(info: RunInfo, totals: RunTotals, formats: FormatMap) -> dict[str, Any]:
    """Returns the tables of a run as JSON can hold them.

    Args:
        info: The run as training began.
        totals: How it ended.
        formats: Its format map.
    """
    history = [encoded(decision.to_dict()) for decision in totals.history]
    return {
        "settings": settings_of(info),
        "ended": totals.ended,
        "error": totals.error,
        "metrics": {**end_metrics(totals), **formats.shares()},
        "format_map": {"columns": FORMAT_COLUMNS, "data": formats.rows(totals.window)},
        "history": history,
    }


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value).replace("\n", " ")
