"""The chapter on the record of one run."""

from __future__ import annotations

import statistics

from autoprec.cost_table import CostTable, UnitCost
from autoprec.report import record_parts as parts
from autoprec.report.page_data import Blocks, Cell, Chapter, Code, Table, Text, Tone
from autoprec.report.prices import Prices
from autoprec.report.timeline import timeline_chart, timeline_of
from autoprec.report.wording import NOTHING, count, number, seconds_text, share
from autoprec.run_record import RunRecord

_BASE_FORMATS = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}


def run_chapter(record: RunRecord, prices: Prices) -> Chapter:
    """Returns the chapter on a run.

    Args:
        record: Its record.
        prices: What time and energy cost.
    """
    timeline = timeline_of(record)
    blocks = Blocks()
    blocks.add("loss", "Loss", *parts.loss_charts(record))
    blocks.add("speed", "Speed and memory", *parts.speed_charts(record))
    shown = None if timeline is None else timeline_chart(timeline)
    blocks.add("formats", "Formats of the layers", shown, parts.formats_table(record), parts.decisions_table(record))
    blocks.add("knobs", "The other knobs", *parts.knob_charts(record))
    blocks.add("refused", "What was refused, and why", parts.refused_table(record))
    blocks.add("costs", "What formats cost here", parts.costs_table(record))
    blocks.add("money", "Cost of the run", *_money(record, prices))
    summary = Code(text=record.totals.summary, title="Table at the end of fit", is_folded=True)
    said = summary if record.totals is not None and record.totals.summary else None
    blocks.add("again", "To run it again", *parts.versions_block(record), said, _damage(record))
    return Chapter(
        title=f"{record.info.model} with policy {record.info.policy}",
        kind="run",
        folder=str(record.folder),
        headline=headline(record),
        tone=_tone(record),
        facts=_facts(record),
        sections=tuple(blocks.sections),
    )


def headline(record: RunRecord) -> str:
    """Returns what became of a run in a few sentences.

    Args:
        record: Its record.
    """
    said = [f"Training {record.how_it_ended}, after {count(record.applied, 'applied step')}."]
    if record.formats:
        end = "Layers end in" if record.totals is not None else "Layers are in"
        said.append(f"{end} {parts.format_shares(record) or ', '.join(sorted(set(record.formats.values())))}.")
    raised = {d.unit for d in record.decisions if d.knob == "precision" and d.reason.startswith("guard")}
    if record.skipped:
        were = "was" if record.skipped == 1 else "were"
        said.append(f"{count(record.skipped, 'step')} {were} skipped as non-finite.")
    if raised:
        said.append(f"The guard has raised {count(len(raised), 'layer')}.")
    return " ".join(said)


def _tone(record: RunRecord) -> Tone:
    totals = record.totals
    if totals is not None and (totals.ended == "failed" or not totals.applied):
        return "bad"
    return "good" if totals is not None and totals.ended == "finished" else "plain"


def _facts(record: RunRecord) -> tuple[tuple[str, str], ...]:
    totals = record.totals
    losses = [step.loss for step in record.steps if step.loss is not None]
    speeds = [step.samples_per_s for step in record.steps if step.samples_per_s]
    memory = [step.memory_bytes for step in record.steps if step.memory_bytes]
    peak = totals.peak_bytes if totals is not None else max(memory, default=None)
    facts = [
        ("steps applied", f"{record.applied:,}"),
        ("steps skipped", f"{record.skipped:,}"),
        ("training time", seconds_text(record.elapsed_s)),
        ("last loss", number(losses[-1]) if losses else NOTHING),
        ("speed", f"{number(statistics.median(speeds), 3)} samples/s" if speeds else NOTHING),
        ("peak memory", f"{peak / 2**20:,.0f} MiB" if peak else NOTHING),
        ("parameters", f"{record.info.parameter_count:,}"),
        ("started from", record.info.base_precision),
    ]
    if totals is not None:
        facts += [(name, number(value)) for name, value in totals.metrics.items()]
        if totals.undone:
            facts.append(("steps undone", f"{totals.undone:,} by {count(totals.rollbacks, 'rollback')}"))
    if record.run.resumed_at:
        facts.append(("resumed at window", ", ".join(f"{window:,}" for window in record.run.resumed_at)))
    return tuple(facts)


def _money(record: RunRecord, prices: Prices) -> tuple[Table | Text, ...]:
    seconds = record.elapsed_s
    deciding_s = record.totals.decision_s if record.totals is not None else _deciding_s(record)
    rows = [
        ("the run", seconds, prices.cost(seconds)),
        ("of it decisions, measurements for them included", deciding_s, prices.cost(deciding_s)),
    ]
    saved, said = _estimated_saving(record)
    if saved is not None:
        rows.append((f"estimated saving against static {record.info.base_precision}", saved, prices.cost(saved)))
    table = Table(
        columns=("", "time", "share", "cost"),
        rows=tuple(
            (
                Cell(text=name),
                Cell(text=seconds_text(each)),
                Cell(text=share(each, seconds)),
                Cell(text=prices.text(money)),
            )
            for name, each, money in rows
        ),
    )
    return table, Text(lines=(said, *prices.assumptions(None)), is_list=True)


def _deciding_s(record: RunRecord) -> float:
    return sum(step.decision_ms for step in record.steps) / 1e3


def _estimated_saving(record: RunRecord) -> tuple[float | None, str]:
    """Seconds that the formats saved over all steps by the costs of units, and what that rests on."""
    measured = "`autoprec compare` measures what it saves against static settings."
    base = _BASE_FORMATS.get(record.info.base_precision)
    table = CostTable(
        {
            unit: {name: UnitCost(**cost.model_dump()) for name, cost in formats.items()}
            for unit, formats in record.run.costs.items()
        }
    )
    if base is None or not table:
        return None, f"No saving is shown: costs of formats were not measured in this run. {measured}"
    per_step_ms, steps_of = 0.0, _steps_by_format(record)
    for unit in table.units:
        before = table.unit_ms(unit, base)
        for name, steps in steps_of.get(unit, {}).items():
            now = table.unit_ms(unit, name)
            if before is None or now is None:
                return None, f"No saving is shown: {unit} was not measured in both {base} and {name}. {measured}"
            per_step_ms += (before - now) * steps
    return per_step_ms / 1e3, (
        f"The saving is an estimate, not a measurement: for each layer its measured time in {base} less that in the"
        " format that it had, times the steps in it. Operations between layers, the optimizer and the loading of data"
        f" count as unchanged. {measured}"
    )


def _steps_by_format(record: RunRecord) -> dict[str, dict[str, int]]:
    timeline = timeline_of(record)
    if timeline is None:
        return {}
    found: dict[str, dict[str, int]] = {}
    for unit, row in zip(timeline.units, timeline.cells, strict=True):
        for name, begin, end in zip(row, timeline.edges, timeline.edges[1:], strict=False):
            steps = found.setdefault(unit, {})
            steps[name] = steps.get(name, 0) + end - begin
    return found


def _damage(record: RunRecord) -> Text | None:
    if not record.damaged_lines:
        return None
    lines = count(record.damaged_lines, "line")
    return Text(lines=(f"{lines} could not be read and left out: a process was killed, or a disk was full.",))
