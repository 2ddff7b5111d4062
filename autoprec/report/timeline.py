"""Formats of all units over a run, from the decisions and the decision points of its record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoprec.formats import FORMATS, rank
from autoprec.report.charts import Marks, format_map, map_height
from autoprec.report.page_data import Chart
from autoprec.report.wording import count
from autoprec.run_record import RunRecord

_MOST_COLUMNS, _LEAST_COLUMNS = 400, 20
_MOST_CELLS = 400_000  # of units times columns
_MOST_MARKS = 4000
_SKIPPED, _ROLLBACKS = "steps skipped", "rollbacks"


@dataclass(frozen=True)
class Event:
    """Something that happened to a unit.

    Args:
        window: When.
        unit: To which.
        text: What.
    """

    window: int
    unit: str
    text: str


@dataclass(frozen=True)
class Timeline:
    """Formats of all units over a run.

    Args:
        units: Names of the units, in the model's order.
        edges: First window of each column, and the end of the last one.
        cells: Format of each unit in each column.
        raises: Where the guard has raised a unit.
        overflows: Where outputs have left the range of their format.
        skipped: Where steps were skipped since the decision point before.
        rollbacks: Where the run went back.
    """

    units: tuple[str, ...]
    edges: tuple[int, ...]
    cells: tuple[tuple[str, ...], ...]
    raises: tuple[Event, ...] = ()
    overflows: tuple[Event, ...] = ()
    skipped: tuple[Event, ...] = ()
    rollbacks: tuple[Event, ...] = ()

    @property
    def changes(self) -> int:
        """How often a unit has changed its format."""
        return sum(left != right for row in self.cells for left, right in zip(row, row[1:], strict=False))


def timeline_of(record: RunRecord) -> Timeline | None:
    """Returns the formats over a run, ``None`` where it has no units.

    Args:
        record: The record.
    """
    units = tuple(record.info.formats)
    if not units:
        return None
    begin = record.info.window
    known = [step.window for step in record.steps] + [decision.step for decision in record.decisions]
    end = max([begin + 1, *known, *([record.totals.window] if record.totals is not None else [])])
    changes = sorted(_changes(record, units), key=lambda change: change[0])
    columns_at_most = max(min(_MOST_COLUMNS, _MOST_CELLS // len(units)), _LEAST_COLUMNS)
    edges = _edges(begin, end, [window for window, _, _ in changes], columns_at_most)
    formats, columns, position = dict(record.info.formats), [], 0
    for edge in edges[:-1]:
        while position < len(changes) and changes[position][0] <= edge:
            _, unit, name = changes[position]
            formats[unit] = name
            position += 1
        columns.append([formats[unit] for unit in units])
    return Timeline(
        units=units,
        edges=tuple(edges),
        cells=tuple(zip(*columns, strict=True)),
        raises=tuple(_raises(record)),
        overflows=tuple(_overflows(record)),
        skipped=tuple(_skipped(record)),
        rollbacks=tuple(Event(d.step, "", d.reason) for d in record.decisions if d.knob == "rollback"),
    )


def timeline_chart(timeline: Timeline, title: str = "Formats over the run") -> Chart:
    """Returns the chart of a timeline.

    Args:
        timeline: The formats.
        title: Its heading.
    """
    extra = [name for name, events in ((_SKIPPED, timeline.skipped), (_ROLLBACKS, timeline.rollbacks)) if events]
    rows = [*timeline.units, *extra]
    cells = [*timeline.cells, *([None] * (len(timeline.edges) - 1) for _ in extra)]
    known = set(timeline.units)
    marks = [
        _marks("raised by the guard", [e for e in timeline.raises if e.unit in known], "triangle-up"),
        _marks("output overflowed", [e for e in timeline.overflows if e.unit in known], "x"),
        _marks(_SKIPPED, timeline.skipped, "diamond", _SKIPPED),
        _marks(_ROLLBACKS, timeline.rollbacks, "star", _ROLLBACKS),
    ]
    events = (
        (len(timeline.raises), "raise by the guard", "raises by the guard"),
        (len(timeline.overflows), "overflow", "overflows"),
    )
    said = "".join(f", {number} {one if number == 1 else many}" for number, one, many in events if number)
    return Chart(
        title=title,
        figure=format_map(rows, timeline.edges, cells, marks),
        caption=(
            f"One row for each of {count(len(timeline.units), 'unit')}, from the input of the model down to its"
            f" output; the colour is the format. {count(timeline.changes, 'change')}{said}."
        ),
        height=map_height(len(rows)),
        is_wide=True,
    )


def _marks(name: str, events: Sequence[Event], symbol: str, row: str | None = None) -> Marks:
    drawn = _thinned(events)
    if len(drawn) < len(events):
        name += f", {len(drawn):,} of {len(events):,}"
    return Marks(
        name=name,
        windows=[event.window for event in drawn],
        rows=[row or event.unit for event in drawn],
        texts=[event.text for event in drawn],
        symbol=symbol,
    )


def _thinned(events: Sequence[Event]) -> Sequence[Event]:
    """Returns the first event of each unit in each stretch of windows, which is as long as it takes to have few."""
    if len(events) <= _MOST_MARKS:
        return events
    windows = [event.window for event in events]
    begin, span = min(windows), max(windows) - min(windows) + 1
    kept, stretches = sorted(events, key=lambda event: event.window), 512
    while len(kept) > _MOST_MARKS and stretches:
        first: dict[tuple[str, int], Event] = {}
        for event in kept:
            first.setdefault((event.unit, (event.window - begin) * stretches // span), event)
        kept, stretches = list(first.values()), stretches // 2
    return kept


def _changes(record: RunRecord, units: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    known = set(units)
    for decision in record.decisions:
        is_done = decision.outcome in ("applied", "limited") and decision.step >= record.info.window
        if decision.knob == "precision" and decision.unit in known and is_done:
            yield decision.step, str(decision.unit), str(decision.applied)
    for step in record.steps:  # what changed without a decision of its own
        for unit, name in step.formats.items():
            if unit in known:
                yield step.window, unit, name


def _edges(begin: int, end: int, windows: Sequence[int], most: int) -> list[int]:
    least = max((end - begin) // most, 1)
    edges = [begin]
    for window in sorted(set(windows)):
        if window - edges[-1] >= least and window < end:
            edges.append(window)
    return [*edges, end]


def _raises(record: RunRecord) -> Iterator[Event]:
    for decision in record.decisions:
        is_raise = decision.knob == "precision" and decision.reason.startswith("guard")
        if not is_raise or decision.unit is None or decision.step < record.info.window:
            continue
        before, after = str(decision.before), str(decision.applied)
        if {before, after} <= FORMATS.keys() and rank(after) < rank(before):
            yield Event(decision.step, decision.unit, f"{before} to {after}: {decision.reason}")


def _overflows(record: RunRecord) -> Iterator[Event]:
    for step in record.steps:
        for unit, number in step.overflows.items():
            yield Event(step.window, unit, f"{count(number, 'output')} outside the range of the format")


def _skipped(record: RunRecord) -> Iterator[Event]:
    before = 0
    for step in record.steps:
        if step.skipped > before:
            yield Event(step.window, "", f"{count(step.skipped - before, 'step')} skipped as non-finite")
        before = step.skipped
    if record.totals is not None and record.totals.skipped > before:
        yield Event(record.totals.window, "", f"{count(record.totals.skipped - before, 'step')} skipped as non-finite")
