"""Parts of a chapter that the record of a run fills: charts over its steps, refusals, costs of formats, versions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from autoprec.formats import FORMATS
from autoprec.history import Decision
from autoprec.report.charts import BLUE, GREEN, ORANGE, PURPLE, Line, lines
from autoprec.report.page_data import Cell, Chart, Code, Table, Text
from autoprec.report.wording import count, listed, number, share
from autoprec.run_record import UNOFFERED, RunRecord

WINDOW = "optimizer window"
_MOST_DECISIONS = 500
_MOST_UNITS = 200
_MOST_REASONS = 200
_WIDE = 50.0


def loss_charts(record: RunRecord) -> tuple[Chart, ...]:
    """Returns the loss over steps and over time, nothing where no loss was seen.

    Args:
        record: The record.
    """
    steps = [step for step in record.steps if step.loss is not None]
    if not steps:
        return ()
    losses = [step.loss for step in steps]
    caption = "Each point is the mean training loss since the point before it."
    unit, size = _unit_of_time(steps[-1].elapsed_s)
    times = [step.elapsed_s / size for step in steps]
    return (
        Chart(
            title="Loss over steps",
            figure=lines([Line(name="loss", x=[s.window for s in steps], y=losses)], WINDOW, "training loss"),
            caption=caption,
        ),
        Chart(
            title="Loss over time",
            figure=lines([Line(name="loss", x=times, y=losses)], f"{unit} of training", "training loss"),
            caption=f"{caption} Validation and decisions are part of the time.",
        ),
    )


def _unit_of_time(seconds: float) -> tuple[str, float]:
    """The unit in which a span of time is read best, and its seconds."""
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 10800 else ("hours", 3600.0)


def speed_charts(record: RunRecord) -> tuple[Chart, ...]:
    """Returns speed, memory and use of the device over steps.

    Args:
        record: The record.
    """
    steps = record.steps
    windows = [step.window for step in steps]
    found = []
    if any(step.samples_per_s for step in steps):
        line = Line(name="speed", x=windows, y=[s.samples_per_s for s in steps], colour=GREEN, unit="samples/s")
        figure = lines([line], WINDOW, "samples per second", starts_at_0=True)
        caption = "By the median time of a step since the point before, loading of data included."
        found.append(Chart(title="Speed", figure=figure, caption=caption))
    elif any(step.step_ms for step in steps):
        line = Line(name="step", x=windows, y=[s.step_ms for s in steps], colour=GREEN, unit="ms")
        found.append(Chart(title="Time of a step", figure=lines([line], WINDOW, "milliseconds", starts_at_0=True)))
    if any(step.memory_bytes for step in steps):
        memory = [None if s.memory_bytes is None else s.memory_bytes / 2**20 for s in steps]
        line = Line(name="memory", x=windows, y=memory, colour=PURPLE, unit="MiB", is_step=True)
        where = "handed out by torch on the device" if record.info.device_type == "cuda" else "resident in the process"
        figure = lines([line], WINDOW, "MiB", starts_at_0=True)
        found.append(Chart(title="Memory", figure=figure, caption=f"Memory {where}, at each decision point."))
    if any(step.utilisation is not None for step in steps):
        busy = [None if s.utilisation is None else 100 * s.utilisation for s in steps]
        line = Line(name="busy", x=windows, y=busy, colour=ORANGE, unit="%")
        figure = lines([line], WINDOW, "percent", starts_at_0=True)
        found.append(Chart(title="Use of the device", figure=figure, caption="Share of the time that it was busy."))
    return tuple(found)


def knob_charts(record: RunRecord) -> tuple[Chart, ...]:
    """Returns loss scale, clip threshold with norms, batch size and noise scale over steps, where there were any.

    Args:
        record: The record.
    """
    steps = record.steps
    windows = [step.window for step in steps]
    found = []
    if any(step.loss_scale != 1.0 for step in steps):
        line = Line(name="loss scale", x=windows, y=[s.loss_scale for s in steps], is_step=True)
        found.append(
            Chart(title="Loss scale", figure=lines([line], WINDOW, "factor", is_log=_is_wide(line), starts_at_0=True))
        )
    norms = Line(name="gradient norm", x=windows, y=[step.grad_norm for step in steps], is_bold=False)
    clip = Line(
        name="clip threshold", x=windows, y=[s.clip_threshold for s in steps], colour=ORANGE, is_step=True, dash=1
    )
    shown = [line for line in (norms, clip) if any(value not in (None, float("inf")) for value in line.y)]
    if shown:
        caption = "Norms above the threshold are scaled down to it. Gaps: clipping is off, or a norm was not finite."
        title = " and ".join(line.name for line in shown)
        figure = lines(shown, WINDOW, "global norm", is_log=_is_wide(*shown), starts_at_0=True)
        found.append(Chart(title=title[:1].upper() + title[1:], figure=figure, caption=caption))
    sizes = [None if s.batch_size is None else s.batch_size * s.accumulate for s in steps]
    if len({size for size in sizes if size is not None}) > 1:
        line = Line(name="batch", x=windows, y=sizes, colour=PURPLE, is_step=True, unit="samples")
        found.append(Chart(title="Effective batch size", figure=lines([line], WINDOW, "samples", starts_at_0=True)))
    if any(step.noise_scale is not None for step in steps):
        line = Line(name="noise scale", x=windows, y=[s.noise_scale for s in steps], colour=GREEN, unit="samples")
        found.append(
            Chart(
                title="Gradient-noise scale",
                figure=lines([line], WINDOW, "samples", is_log=_is_wide(line), starts_at_0=True),
            )
        )
    rates = [step.learning_rate for step in steps]
    if len({rate for rate in rates if rate is not None}) > 1:
        line = Line(name="learning rate", x=windows, y=rates, colour=BLUE)
        found.append(Chart(title="Learning rate", figure=lines([line], WINDOW, "learning rate")))
    return tuple(found)


def _is_wide(*lines_: Line) -> bool:
    """Whether values differ so much that only a logarithmic axis shows them all."""
    values = [value for line in lines_ for value in line.y if value is not None and 0.0 < value < float("inf")]
    return bool(values) and max(values) > _WIDE * min(values)


def formats_table(record: RunRecord) -> Table | None:
    """Returns how many units and parameters each format has at the end.

    Args:
        record: The record.
    """
    sizes = {unit.name: unit.parameter_count for unit in record.info.units}
    total = sum(sizes.values())
    emulated = {(unit.name, name) for unit in record.info.units for name in unit.emulated}
    rows = []
    for name in FORMATS:
        units = [unit for unit, found in record.formats.items() if found == name]
        if units:
            parameters = sum(sizes.get(unit, 0) for unit in units)
            odd = sum((unit, name) in emulated for unit in units)
            remark = "" if not odd else "emulated" if odd == len(units) else f"{odd} emulated"
            rows.append(
                (Cell(text=name, detail=remark), Cell(text=f"{len(units):,}"), Cell(text=share(parameters, total)))
            )
    return Table(columns=("format at the end", "units", "parameters"), rows=tuple(rows)) if rows else None


def refused_table(record: RunRecord) -> Table | None:
    """Returns what was refused and why, one row for each reason.

    Args:
        record: The record.
    """
    rows = []
    groups = _grouped(record.refused)
    shown = set(sorted(groups, key=lambda group: -len(groups[group]))[:_MOST_REASONS])
    for (what, requested, reason), units in ((group, units) for group, units in groups.items() if group in shown):
        named = sorted({unit for unit in units if unit is not None})
        where = listed(named, 4) if named else what.replace("_", " ")
        times = len(units)
        rows.append(
            (
                Cell(text=where),
                Cell(text="a request" if requested == "None" else requested),
                Cell(text=reason, detail="" if times == len(named) or times == 1 else f"{times:,} times"),
            )
        )
    for reason, names in _by_reason((unit.name, unit.left_alone) for unit in record.info.units if unit.left_alone):
        rows.append((Cell(text=listed(names, 4)), Cell(text="any format"), Cell(text=f"left alone: {reason}")))
    for knob, reason in record.info.masked.items():
        rows.append((Cell(text=f"the {knob.replace('_', ' ')} knob"), Cell(text="any change"), Cell(text=reason)))
    left_out = f"The {_MOST_REASONS} most frequent of {len(groups):,} reasons." if len(groups) > len(shown) else ""
    if not rows:
        return None
    return Table(columns=("where", "asked for", "why not"), rows=tuple(rows), caption=left_out, left=(1, 2))


def _grouped(decisions: Sequence[Decision]) -> dict[tuple[str, str, str], list[str | None]]:
    groups: dict[tuple[str, str, str], list[str | None]] = {}
    for decision in decisions:
        reason = decision.reason.removeprefix(f"{UNOFFERED}: ")
        groups.setdefault((decision.knob, str(decision.requested), reason), []).append(decision.unit)
    return groups


def _by_reason(pairs: Iterator[tuple[str, str | None]]) -> Iterator[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name, reason in pairs:
        groups.setdefault(str(reason), []).append(name)
    yield from groups.items()


def costs_table(record: RunRecord) -> Table | None:
    """Returns what formats cost in units, as it was measured, the slowest units first.

    Args:
        record: The record.
    """
    costs = record.run.costs
    names = [name for name in FORMATS if any(name in formats for formats in costs.values())]
    if not names:
        return None
    ordered = sorted(costs, key=lambda unit: -max((cost.ms for cost in costs[unit].values()), default=0.0))
    rows = []
    for unit in ordered[:_MOST_UNITS]:
        known = costs[unit]
        least = min(cost.ms for cost in known.values())
        cells = [Cell(text=unit, detail=record.formats.get(unit, ""))]
        for name in names:
            cost = known.get(name)
            if cost is None:
                cells.append(Cell(text="–"))
                continue
            how = "" if cost.implementation == "default" else f"{cost.implementation}, "
            detail = f"{how}error {cost.error:.1g}" if cost.error else how.removesuffix(", ")
            cells.append(Cell(text=f"{cost.ms:.3g} ms", detail=detail, is_best=cost.ms == least and len(known) > 1))
        rows.append(tuple(cells))
    left_out = f" The {_MOST_UNITS} slowest of {len(ordered)} units." if len(ordered) > _MOST_UNITS else ""
    return Table(
        columns=("unit", *names),
        rows=tuple(rows),
        caption=(
            "Forward, backward and casts of a step, measured on the device when the run began; below it the relative"
            f" error against float64, below the unit its format at the end. Bold: the fastest.{left_out}"
        ),
    )


def decisions_table(record: RunRecord) -> Table | None:
    """Returns the decisions that were carried out, oldest first, folded.

    Args:
        record: The record.
    """
    done = [decision for decision in record.decisions if decision.outcome in ("applied", "limited")]
    rows = tuple(
        (
            Cell(text=f"{d.step:,}"),
            Cell(text=d.unit or d.knob.replace("_", " ")),
            Cell(text=f"{_value(d.before)} → {_value(d.applied)}"),
            Cell(text=d.reason),
        )
        for d in done[:_MOST_DECISIONS]
    )
    more = f" The first {_MOST_DECISIONS} of {len(done):,}." if len(done) > _MOST_DECISIONS else ""
    if not rows:
        return None
    return Table(
        columns=("window", "what", "change", "why"),
        rows=rows,
        caption=f"Every change with its reason: {count(len(done), 'change')}.{more}",
        left=(1, 2, 3),
        is_folded=True,
    )


def _value(value: object) -> str:
    return number(float(value)) if isinstance(value, (int, float)) else str(value)


def versions_block(record: RunRecord) -> tuple[Table | Code | Text, ...]:
    """Returns command, versions, machine, seed and settings.

    Args:
        record: The record.
    """
    info = record.info
    facts = {
        **info.versions,
        "device": info.device,
        **{name: str(value) for name, value in info.machine.items()},
        "seed": "not set by seed_everything" if info.seed is None else str(info.seed),
        "started": info.started_at,
    }
    table = Table(
        columns=("", ""),
        rows=tuple((Cell(text=name), Cell(text=str(value))) for name, value in facts.items()),
        left=(1,),
    )
    settings = {
        "policy": info.policy,
        "interval": info.interval,
        "knobs": list(info.knobs),
        **dict(info.settings),
    }
    return (
        Code(text=info.command, title="Command"),
        table,
        Code(text=json.dumps(settings, indent=2), title="Settings", is_folded=True),
    )


def format_shares(record: RunRecord) -> str:
    """Returns shares of parameters by format in words, largest first.

    Args:
        record: The record.
    """
    sizes = {unit.name: unit.parameter_count for unit in record.info.units}
    emulated = {name for unit in record.info.units for name in unit.emulated if record.formats.get(unit.name) == name}
    found: Counter[str] = Counter()
    for unit, name in record.formats.items():
        found[name] += sizes.get(unit, 0)
    total = sum(found.values())
    words = {name: f"{name} (emulated on this device)" if name in emulated else name for name in found}
    return ", ".join(f"{share(size, total)} {words[name]}" for name, size in found.most_common() if size)
