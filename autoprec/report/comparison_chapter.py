"""The chapter on a comparison: its verdict, every arm with intervals, curves, formats of the runs with autoprec."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.compare.arm_figures import ArmFigures
from autoprec.compare.picture import Point as CurvePoint
from autoprec.compare.picture import band, evaluations, losses
from autoprec.compare.records import Comparison, Run
from autoprec.compare.statistics import Estimate
from autoprec.compare.verdict import NOISE, Verdict
from autoprec.report import record_parts as parts
from autoprec.report.charts import STATIC, STEERED, Line, Point, bars, lines, points
from autoprec.report.page_data import Blocks, Cell, Chapter, Chart, Code, Table, Text, Tone
from autoprec.report.prices import JOULES_PER_KWH, Prices
from autoprec.report.timeline import timeline_chart, timeline_of
from autoprec.report.wording import NOTHING, interval, number, seconds_text
from autoprec.run_record import RunRecord

_ROW_PX, _AROUND_PX = 46, 110
_HOURS = 100.0


@dataclass(frozen=True, kw_only=True)
class ComparisonData:
    """What the folder of a comparison holds.

    Args:
        folder: The folder.
        comparison: The runs.
        verdict: What follows from them.
        refused: Why an arm did not run, by its name.
        notes: What a reader should know.
        records: Record of the first seed of each arm with autoprec, by arm.
    """

    folder: Path
    comparison: Comparison
    verdict: Verdict
    refused: Mapping[str, str]
    notes: Sequence[str]
    records: Mapping[str, RunRecord]


def comparison_chapter(data: ComparisonData, prices: Prices) -> Chapter:
    """Returns the chapter on a comparison.

    Args:
        data: What its folder holds.
        prices: What time and energy cost.
    """
    verdict = data.verdict
    blocks = Blocks()
    reasons = Text(lines=tuple(verdict.reasons), is_list=True)
    blocks.add("arms", "All arms", _arms_table(verdict), reasons)
    blocks.add("loss", "Loss over time and steps", *_curves(data))
    blocks.add("speed", "Speed and memory", _ratios(verdict), _differences(verdict), _memory(verdict))
    for arm, record in data.records.items():
        timeline = timeline_of(record)
        if timeline is not None:
            title = f"Formats of {arm}, first seed"
            shown = timeline_chart(timeline, "Formats over the run")
            name = "formats" if len(data.records) == 1 else f"formats-{list(data.records).index(arm)}"
            blocks.add(name, title, shown, parts.formats_table(record), parts.decisions_table(record))
    candidate = data.records.get(verdict.candidate or "") or next(iter(data.records.values()), None)
    if candidate is not None:
        blocks.add("knobs", "The other knobs", *parts.knob_charts(candidate))
    refused = None if candidate is None else parts.refused_table(candidate)
    blocks.add("refused", "What was refused, and why", _refused_arms(data), refused)
    if candidate is not None:
        blocks.add("costs", "What formats cost here", parts.costs_table(candidate))
    blocks.add("money", "Cost and saving against static", *_money(verdict, prices))
    blocks.add("again", "To run it again", *_again(data))
    return Chapter(
        title=f"Comparison: {verdict.task}",
        kind="comparison",
        folder=str(data.folder),
        headline=verdict.headline,
        tone=_tone(verdict),
        facts=_facts(data),
        sections=tuple(blocks.sections),
    )


def _tone(verdict: Verdict) -> Tone:
    return "good" if verdict.verdict.startswith("use") else "plain"


def _facts(data: ComparisonData) -> tuple[tuple[str, str], ...]:
    verdict, settings = data.verdict, data.comparison.settings
    seeds = max(len(arm.seeds) for arm in verdict.arms)
    steps = sorted({len(run.steps) for run in data.comparison.runs})
    environment = next((run.environment for run in data.comparison.runs if run.environment), {})
    better = "lower" if verdict.mode == "min" else "higher"
    return (
        ("judged by", f"{verdict.metric}, {better} is better"),
        ("margin", number(verdict.margin)),
        ("best static", verdict.best_static or NOTHING),
        ("seeds", str(seeds)),
        ("steps of a run", " to ".join(f"{count:,}" for count in dict.fromkeys((steps[0], steps[-1])))),
        ("clock", str(environment.get("clock", settings.get("clock", NOTHING)))),
        ("device", str(environment.get("device", NOTHING))),
    )


def _arms_table(verdict: Verdict) -> Table:
    sign = 1.0 if verdict.mode == "min" else -1.0
    usable = [arm for arm in verdict.arms if arm.problem is None and "@" not in arm.arm]
    best = {
        "time": _best(usable, lambda arm: arm.time_ratio.value),
        "metric": _best(usable, lambda arm: sign * arm.metric.value),
        "memory": _best(usable, lambda arm: math.nan if arm.peak_bytes is None else arm.peak_bytes),
        "energy": _best(usable, lambda arm: math.nan if arm.energy_j is None else arm.energy_j),
    }
    has_energy = any(arm.energy_j is not None for arm in verdict.arms)
    has_skips = any(arm.skipped_steps for arm in verdict.arms)
    has_fidelity = any(arm.fidelity for arm in verdict.arms)
    rows = []
    for arm in verdict.arms:
        cells = [
            Cell(text=arm.arm, detail=arm.problem or _formats(arm)),
            _time_cell(arm, best["time"]),
            Cell(text=f"{number(arm.step_ms, 3)} ms" if math.isfinite(arm.step_ms) else NOTHING),
            _metric_cell(arm, best["metric"]),
            _difference_cell(arm),
            Cell(
                text=NOTHING if arm.peak_bytes is None else f"{arm.peak_bytes / 2**20:,.0f} MiB",
                is_best=arm.arm == best["memory"],
            ),
        ]
        cells += [_energy_cell(arm, best["energy"])] if has_energy else []
        cells += [Cell(text=f"{arm.skipped_steps:,}")] if has_skips else []
        cells += [_fidelity_cell(arm)] if has_fidelity else []
        rows.append(tuple(cells))
    ratio = "step time" if verdict.time_basis == "step" else "whole run"
    columns = ["trained with", f"{ratio} / best static", "a step", verdict.metric, "difference", "peak memory"]
    columns += ["energy"] if has_energy else []
    columns += ["skipped"] if has_skips else []
    columns += ["outputs vs fp32"] if has_fidelity else []
    seeds = max(len(arm.seeds) for arm in verdict.arms)
    intervals = f"Small numbers are {100 * verdict.confidence:.3g}% intervals over {seeds} seeds."
    if not any(arm.time_ratio.is_sure for arm in verdict.arms):
        intervals = f"Too few seeds ({seeds}) for intervals."
    against = f" Differences are from {verdict.reference}." if verdict.reference else ""
    return Table(columns=tuple(columns), rows=tuple(rows), caption=f"{intervals}{against} Bold: the best.")


def _best(arms: Sequence[ArmFigures], score: Callable[[ArmFigures], float]) -> str | None:
    known = [arm for arm in arms if math.isfinite(score(arm))]
    return min(known, key=score).arm if len(known) > 1 else None


def _formats(arm: ArmFigures) -> str:
    return ", ".join(f"{count} × {name}" for name, count in arm.formats.items())


def _time_cell(arm: ArmFigures, best: str | None) -> Cell:
    ratio = arm.time_ratio
    text = NOTHING if math.isnan(ratio.value) else f"{ratio.value:.3f}"
    return Cell(text=text, detail=interval(ratio.low, ratio.high, 4), is_best=arm.arm == best)


def _metric_cell(arm: ArmFigures, best: str | None) -> Cell:
    metric = arm.metric
    if not metric.seeds:
        return Cell(text=NOTHING)
    return Cell(text=number(metric.value), detail=interval(metric.low, metric.high), is_best=arm.arm == best)


def _difference_cell(arm: ArmFigures) -> Cell:
    if arm.against in (None, arm.arm) or arm.problem or not arm.difference.seeds:
        return Cell(text=NOTHING)
    return Cell(text=f"{arm.difference.value:+.2g}", detail=arm.relation)


def _energy_cell(arm: ArmFigures, best: str | None) -> Cell:
    if arm.energy_j is None:
        return Cell(text=NOTHING)
    return Cell(text=f"{number(arm.energy_j, 3)} J", is_best=arm.arm == best)


def _fidelity_cell(arm: ArmFigures) -> Cell:
    found = arm.fidelity
    sqnr_db = found.get("logit_sqnr_db", found.get("sqnr_db"))
    text = NOTHING if sqnr_db is None else "equal" if sqnr_db == math.inf else f"{sqnr_db:.1f} dB"
    return Cell(text=text, detail=f"KL {found['kl']:.2g}" if "kl" in found else "")


# ---- charts ----


def _colours(verdict: Verdict) -> dict[str, tuple[str, int]]:
    """Colour and dashes of each arm: arms with autoprec are green and solid."""
    found: dict[str, tuple[str, int]] = {}
    for is_steered, palette in ((True, STEERED), (False, STATIC)):
        arms = [arm.arm for arm in verdict.arms if arm.is_steered == is_steered]
        found |= {arm: (palette[i % len(palette)], 0 if is_steered else i + 1) for i, arm in enumerate(arms)}
    return found


def _curves(data: ComparisonData) -> tuple[Chart, ...]:
    verdict, runs = data.verdict, data.comparison.runs
    seeds = max(len(arm.seeds) for arm in verdict.arms)
    spread = "One seed." if seeds == 1 else f"Means of {seeds} seeds, bands from the lowest to the highest."
    metric, seconds, loss = verdict.metric, "seconds in steps", "training loss"
    charts = [
        _curve(data, "Training loss over time", losses, seconds, loss, spread),
        _curve(data, "Training loss over steps", _losses_by_step, "optimizer step", loss, spread),
    ]
    if any(len(evaluations(run, metric)) > 1 for run in runs):
        shown = _curve(data, f"{metric} over time", lambda run: evaluations(run, metric), seconds, metric, spread)
        charts.append(shown)
    return tuple(chart for chart in charts if chart is not None)


def _curve(
    data: ComparisonData,
    title: str,
    curve_of: Callable[[Run], list[CurvePoint]],
    x_title: str,
    y_title: str,
    caption: str,
) -> Chart | None:
    colours = _colours(data.verdict)
    drawn = []
    for arm in data.verdict.arms:
        curves = [curve_of(run) for run in data.comparison.runs if run.arm == arm.arm]
        x, middle, low, high = band(curves)
        if not any(math.isfinite(value) for value in middle):
            continue
        colour, dash = colours[arm.arm]
        has_band = len(curves) > 1
        drawn.append(
            Line(
                name=arm.arm if arm.problem is None else f"{arm.arm} ({arm.problem.split(' ')[0]})",
                x=x,
                y=middle,
                low=low if has_band else None,
                high=high if has_band else None,
                colour=colour,
                dash=dash,
                is_bold=arm.is_steered,
            )
        )
    if not drawn:
        return None
    return Chart(title=title, figure=lines(drawn, x_title, y_title), caption=caption, height=380)


def _losses_by_step(run: Run) -> list[CurvePoint]:
    """Mean training loss of each part of a run over its steps."""
    points_ = losses(run)
    if not points_:
        return []
    size = max(1, len(run.steps) // len(points_))
    return [(float((position + 1) * size), loss) for position, (_, loss) in enumerate(points_)]


def _ratios(verdict: Verdict) -> Chart | None:
    known = [arm for arm in verdict.arms if math.isfinite(arm.time_ratio.value)]
    if not known:
        return None
    drawn = _points(verdict, [(arm, arm.time_ratio) for arm in known])
    what = "Step time" if verdict.time_basis == "step" else "Time of a whole run"
    figure = points(
        drawn, f"less is faster than {verdict.best_static}", centre=1.0, band=NOISE, band_name=f"noise ({NOISE:.0%})"
    )
    caption = "Hollow points: the arm failed or diverged." if any(point.is_hollow for point in drawn) else ""
    return Chart(
        title=f"{what} over that of {verdict.best_static}",
        figure=figure,
        caption=caption,
        height=_AROUND_PX + _ROW_PX * len(drawn),
    )


def _points(verdict: Verdict, estimates: Sequence[tuple[ArmFigures, Estimate]]) -> list[Point]:
    colours = _colours(verdict)
    return [
        Point(
            name=arm.arm,
            value=estimate.value,
            low=estimate.low,
            high=estimate.high,
            colour=colours[arm.arm][0],
            is_hollow=arm.problem is not None,
        )
        for arm, estimate in estimates
    ]


def _differences(verdict: Verdict) -> Chart | None:
    known = [
        arm
        for arm in verdict.arms
        if arm.against not in (None, arm.arm) and arm.difference.seeds and math.isfinite(arm.difference.value)
    ]
    if not known or verdict.reference is None:
        return None
    drawn = _points(verdict, [(arm, arm.difference) for arm in known])
    better = "less" if verdict.mode == "min" else "more"
    figure = points(
        drawn, f"{better} is better", centre=0.0, band=verdict.margin, band_name="counts as no difference", form="+.2g"
    )
    return Chart(
        title=f"{verdict.metric} less that of {verdict.reference}",
        figure=figure,
        height=_AROUND_PX + _ROW_PX * len(drawn),
    )


def _memory(verdict: Verdict) -> Chart | None:
    known = [arm for arm in verdict.arms if arm.peak_bytes is not None]
    if not known:
        return None
    colours = _colours(verdict)
    sizes = [(arm.peak_bytes or 0) / 2**20 for arm in known]
    figure = bars([arm.arm for arm in known], sizes, "MiB", [colours[arm.arm][0] for arm in known])
    caption = "Most memory of a run over what stood before it."
    return Chart(title="Peak memory", figure=figure, caption=caption, height=_AROUND_PX + 34 * len(known))


# ---- the rest ----


def _refused_arms(data: ComparisonData) -> Table | None:
    rows = [(Cell(text=arm), Cell(text="was not run"), Cell(text=why)) for arm, why in data.refused.items()]
    rows += [
        (Cell(text=arm.arm), Cell(text="left out"), Cell(text=arm.problem))
        for arm in data.verdict.arms
        if arm.problem is not None
    ]
    return Table(columns=("arm", "", "why"), rows=tuple(rows), left=(1, 2)) if rows else None


def _money(verdict: Verdict, prices: Prices) -> tuple[Table | Text, ...]:
    source = next((arm.energy_source for arm in verdict.arms if arm.energy_source), None)
    best = verdict.figures(verdict.best_static)
    base = prices.cost(best.seconds, best.energy_j) if best is not None else None
    columns = ["trained with", "time of a run", "cost of a run", f"saving against {verdict.best_static or 'static'}"]
    rows = []
    for arm in verdict.arms:
        cost = prices.cost(arm.seconds, arm.energy_j)
        saving = None if base is None or cost is None or arm.arm == verdict.best_static else base - cost
        energy = "" if arm.energy_j is None else f"{number(arm.energy_j / JOULES_PER_KWH, 3)} kWh"
        rows.append(
            (
                Cell(text=arm.arm),
                Cell(text=seconds_text(arm.seconds), detail=energy),
                Cell(text=prices.text(cost)),
                Cell(text=prices.text(saving)),
            )
        )
    said = (
        *_saving_sentences(verdict, prices),
        "Time of a run is the median over seeds of the time in its steps: starting up, validation and saving are not in"
        " it. All arms of a seed take the same steps.",
        *prices.assumptions(source),
    )
    return Table(columns=tuple(columns), rows=tuple(rows)), Text(lines=said, is_list=True)


def _saving_sentences(verdict: Verdict, prices: Prices) -> tuple[str, ...]:
    """What the candidate saves on long runs, as far as its interval shows it."""
    ratio = verdict.time_ratio
    if verdict.candidate is None or verdict.best_static is None or not math.isfinite(ratio.value):
        return ("No saving can be told: there is no pair of an arm with autoprec and a static arm.",)
    hours = f"{_HOURS:g} hours of training with {verdict.best_static}"
    saved = _HOURS * (1.0 - ratio.value)
    amount = "" if prices.per_hour is None else f" ({prices.text(abs(saved) * prices.per_hour)})"
    word = "less" if saved >= 0 else "more"
    said = f"For every {hours}, {verdict.candidate} would take {abs(saved):.3g} hours {word}{amount}"
    if ratio.low is None or ratio.high is None:
        return (f"{said}, by too few seeds to say how certain that is.",)
    ends = sorted((_HOURS * (1.0 - ratio.high), _HOURS * (1.0 - ratio.low)))
    certain = "" if verdict.speed in ("faster", "slower") else " That is inside the noise: it is no saving and no loss."
    return (
        f"{said}; the {100 * verdict.confidence:.3g}% interval goes from {ends[0]:+.3g} to {ends[1]:+.3g} hours saved."
        f"{certain}",
    )


def _again(data: ComparisonData) -> tuple[Code | Table | Text, ...]:
    settings = data.comparison.settings
    environment: dict[str, Any] = {}
    for run in data.comparison.runs:
        environment = {**run.environment, **environment}
    rows = tuple((Cell(text=name), Cell(text=str(value))) for name, value in environment.items())
    found: list[Code | Table | Text] = [Code(text=_command(settings, data), title="Command")]
    if rows:
        found.append(Table(columns=("", ""), rows=rows, left=(1,)))
    if data.notes:
        found.append(Text(lines=tuple(data.notes), is_list=True))
    return tuple(found)


def _command(settings: Mapping[str, Any], data: ComparisonData) -> str:
    words = ["autoprec", "compare", str(settings.get("what", data.comparison.task))]
    options = {
        "arms": ",".join(map(str, settings.get("arms") or ())),
        "seeds": settings.get("seeds"),
        "steps": settings.get("steps"),
        "minutes": settings.get("minutes"),
        "threads": settings.get("threads"),
        "clock": settings.get("clock"),
        "interval": settings.get("interval"),
        "evaluate-every": settings.get("evaluate_every"),
        "metric": settings.get("metric"),
        "margin": data.verdict.margin,
        "out": data.folder.name,
    }
    for name, value in options.items():
        if value not in (None, ""):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    arguments = [str(argument) for argument in settings.get("arguments") or ()]
    return shlex.join([*words, *(["--", *arguments] if arguments else [])])
