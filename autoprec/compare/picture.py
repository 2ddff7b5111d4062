"""A comparison as a picture: the metric over time for each arm, and the step times against the best static arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autoprec.compare.records import Comparison, Run
from autoprec.compare.verdict import NOISE, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STEERED = ("#1b7f5f", "#5fb7a0", "#0d4a36")
_STATIC = ("#3b4a6b", "#5b7fb5", "#f0a04b", "#8a5fb0", "#b0485f", "#8c8c8c")
_GREY = "#bdbdbd"
_LOSS_PARTS = 60
"""Points that the training losses of a run are drawn as, each the mean of its part."""

Point = tuple[float, float]


def draw(comparison: Comparison, verdict: Verdict, path: Path) -> None:
    """Draws a comparison into a PNG file.

    Args:
        comparison: Its runs.
        verdict: What follows from them.
        path: The file.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 12, "axes.titlesize": 13, "legend.fontsize": 11}):
        figure = Figure(figsize=(17, 7), layout="constrained")
        figure.suptitle(f"{comparison.task}: {verdict.verdict}")
        over_time, ratios = figure.subplots(1, 2, width_ratios=(3, 2))
        draw_metric(over_time, comparison, verdict)
        draw_ratios(ratios, verdict)
        figure.savefig(path, dpi=90)


def draw_metric(axes: Axes, comparison: Comparison, verdict: Verdict) -> None:
    """Draws the metric over the seconds spent in steps: means as lines, from the lowest to the highest seed as bands.

    The training loss is drawn where no run was evaluated twice: a single point is no curve.

    Args:
        axes: Where to draw.
        comparison: The runs.
        verdict: What follows from them.
    """
    is_evaluated = any(len(evaluations(run, verdict.metric)) > 1 for run in comparison.runs)
    colours = _colours(verdict)
    for figures in verdict.arms:
        runs = [run for run in comparison.runs if run.arm == figures.arm]
        curves = [evaluations(run, verdict.metric) if is_evaluated else losses(run) for run in runs]
        seconds, middle, low, high = band(curves)
        colour, style = colours[figures.arm], "-" if figures.problem is None else ":"
        label = figures.arm if figures.problem is None else f"{figures.arm} ({figures.problem.split(' ')[0]})"
        width, marker = 3.0 if figures.is_steered else 1.8, "." if is_evaluated else ""
        axes.plot(seconds, middle, style, color=colour, label=label, linewidth=width, marker=marker)
        axes.fill_between(seconds, low, high, color=colour, alpha=0.12, linewidth=0)
    seeds = max(len(figures.seeds) for figures in verdict.arms)
    spread = "one seed" if seeds == 1 else f"mean and range of {seeds} seeds"
    axes.set_title(f"{verdict.metric if is_evaluated else 'training loss'} over time: {spread}")
    axes.set_xlabel("seconds in steps")
    axes.set_ylabel(verdict.metric if is_evaluated else "training loss")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")


def draw_ratios(axes: Axes, verdict: Verdict) -> None:
    """Draws the times of all arms over that of the best static arm, with their intervals and the band of the noise.

    Args:
        axes: Where to draw.
        verdict: The verdict.
    """
    known = [figures for figures in verdict.arms if math.isfinite(figures.time_ratio.value)]
    colours = _colours(verdict)
    axes.axvspan(1 - NOISE, 1 + NOISE, color=_GREY, alpha=0.5, label=f"noise: less than {NOISE:.0%}")
    for row, figures in enumerate(known):
        ratio = figures.time_ratio
        errors = None
        if ratio.low is not None and ratio.high is not None:
            errors = [[ratio.value - ratio.low], [ratio.high - ratio.value]]
        face = colours[figures.arm] if figures.problem is None else "white"
        axes.errorbar(
            [ratio.value], [row], xerr=errors, fmt="o", color=colours[figures.arm], mfc=face, capsize=5, markersize=9
        )
        axes.annotate(f"{ratio.value:.3f}", (ratio.value, row), xytext=(0, 9), textcoords="offset points", ha="center")
    axes.set_yticks(range(len(known)), [figures.arm for figures in known])
    axes.set_ylim(len(known) - 0.4, -0.6)
    what = "step time" if verdict.time_basis == "step" else "time of a whole run"
    has_intervals = any(figures.time_ratio.low is not None for figures in known)
    spread = f"{100 * verdict.confidence:.3g}% intervals" if has_intervals else "too few seeds for intervals"
    axes.set_title(f"{what} / {verdict.best_static}: {spread}")
    axes.set_xlabel("ratio, less is faster; hollow: failed or diverged")
    axes.margins(x=0.12)
    axes.grid(alpha=0.3, axis="x")
    if known:
        axes.legend(loc="best")
    else:
        axes.text(0.5, 0.5, "no ratios", ha="center", va="center", transform=axes.transAxes)


def evaluations(run: Run, metric: str) -> list[Point]:
    """Returns seconds and metric of each evaluation.

    Args:
        run: The run.
        metric: Name of the metric.
    """
    return [(found.elapsed_s, found.metrics[metric]) for found in run.evaluations if metric in found.metrics]


def losses(run: Run) -> list[Point]:
    """Returns seconds and mean training loss of each part of a run.

    Args:
        run: The run.
    """
    seconds, points = 0.0, []
    part: list[float] = []
    size = max(1, len(run.steps) // _LOSS_PARTS)
    for step in run.steps:
        seconds += step.step_ms / 1e3
        part.append(math.nan if step.loss is None else step.loss)
        if len(part) == size:
            points.append((seconds, statistics.fmean(part)))
            part = []
    return points


def band(curves: Sequence[Sequence[Point]]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Returns mean seconds, mean, lowest and highest value of curves, point by point, as far as the shortest goes.

    Args:
        curves: One for each seed; those without points are left out.
    """
    columns = list(zip(*(curve for curve in curves if curve), strict=False))
    values = [[value for _, value in column] for column in columns]
    seconds = [statistics.fmean(second for second, _ in column) for column in columns]
    return seconds, [statistics.fmean(each) for each in values], [min(v) for v in values], [max(v) for v in values]


def _colours(verdict: Verdict) -> dict[str, str]:
    steered = [figures.arm for figures in verdict.arms if figures.is_steered]
    static = [figures.arm for figures in verdict.arms if not figures.is_steered]
    return {
        arm: palette[index % len(palette)]
        for arms, palette in ((steered, _STEERED), (static, _STATIC))
        for index, arm in enumerate(arms)
    }
