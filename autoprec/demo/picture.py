"""The demo's picture: for each task the losses, their differences, the step times, and the formats of the units.

What is compared is drawn as a difference or a ratio to the baseline, because the curves themselves lie on each other.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from autoprec.demo.results import RunResult, pairs_of
from autoprec.demo.tasks import AUTOPREC, BASELINE

FORMAT_COLOURS = {
    "fp32": "#3b4a6b",
    "tf32": "#5b7fb5",
    "bf16": "#5fb7a0",
    "fp16": "#f2c14e",
    "fp8": "#ee8434",
    "int8": "#c8385a",
}
SMOOTH_STEPS = 10
_COLOURS = {BASELINE: "#f0a04b", AUTOPREC: "#1b7f5f"}
_OTHERS = ("#3f6fb5", "#8a5fb0", "#b0485f")
_GREY = "#bdbdbd"


def draw(runs: Sequence[RunResult], path: Path, title: str, warmup: int) -> None:
    """Draws one row of four panels for each task.

    Args:
        runs: Results of all runs.
        path: The PNG file.
        title: Line above the panels.
        warmup: First steps that are left out of the paired step time; shaded.
    """
    tasks = list(dict.fromkeys(run.task for run in runs))
    with rc_context({"font.size": 13, "axes.titlesize": 14, "legend.fontsize": 12}):
        figure = Figure(figsize=(25, 7 * len(tasks)), layout="constrained")
        figure.suptitle(title)
        grid = figure.subplots(len(tasks), 4, squeeze=False)
        for task, (losses, differences, times, formats) in zip(tasks, grid, strict=True):
            of_task = [run for run in runs if run.task == task]
            draw_losses(losses, of_task)
            draw_differences(differences, of_task)
            draw_times(times, of_task, warmup)
            draw_formats(formats, next((run for run in of_task if run.arm == AUTOPREC), None))
        figure.savefig(path, dpi=90)


def draw_losses(axes: Axes, runs: Sequence[RunResult]) -> None:
    """Draws training losses as thin lines and held-out losses as marks, means over the seeds of the steered arm.

    Args:
        axes: Where to draw.
        runs: Results of one task.
    """
    lowest = math.inf
    for index, (arm, of_arm) in enumerate(_by_arm(runs).items()):
        training = smooth([statistics.fmean(losses) for losses in zip(*(run.losses for run in of_arm), strict=True)])
        held_out = [statistics.fmean(losses) for losses in zip(*(_curve(run) for run in of_arm), strict=True)]
        lowest = min(lowest, *training, *held_out)
        # lines that lie on each other are thick, thinner, thinnest; marks large, smaller, smallest
        axes.plot(range(1, len(training) + 1), training, color=_colour(arm, runs), linewidth=(6, 3, 1.2)[min(index, 2)])
        axes.plot(
            [step for step, _, _ in of_arm[0].points],
            held_out,
            "o",
            color=_colour(arm, runs),
            markersize=(15, 10, 5)[min(index, 2)],
            label=arm,
        )
    axes.set_title(f"{runs[0].task}: loss{_seeds_in_words(runs)}")
    axes.set_ylabel("loss")
    if 0 < lowest < 0.5:
        _log_scale(axes, (1, 2, 5))
    _finish(axes, f"dots: held out; lines: training, mean of the last {SMOOTH_STEPS} steps")


def draw_differences(axes: Axes, runs: Sequence[RunResult]) -> None:
    """Draws how far held-out losses are from the baseline's, in percent, and how far another seed is.

    Args:
        axes: Where to draw.
        runs: Results of one task.
    """
    steps = [step for step, _, _ in runs[0].points]
    baseline = [_curve(run) for run in runs if run.arm == BASELINE]
    spread = [_percent(max(losses), min(losses)) for losses in zip(*baseline, strict=True)]
    axes.fill_between(
        steps,
        [-value for value in spread],
        spread,
        color=_GREY,
        alpha=0.4,
        label=f"seeds differ by ({spread[-1]:.2g} % at the end)",
    )
    axes.axhline(0, color=_COLOURS[BASELINE], linewidth=4, label=BASELINE)
    largest = max(filter(math.isfinite, spread), default=1.0) / 4  # the band may go beyond the panel, curves may not
    for arm in (arm for arm in _by_arm(runs) if arm != BASELINE):
        pairs = pairs_of(runs, arm, BASELINE)
        curves = [
            [_percent(ours, theirs) for ours, theirs in zip(_curve(run), _curve(other), strict=True)]
            for run, other in pairs
        ]
        largest = max(largest, *(abs(value) for curve in curves for value in curve if math.isfinite(value)))
        means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axes.plot(steps, means, "o-", color=_colour(arm, runs), linewidth=2.5, markersize=8, label=arm)
        if len(curves) > 1:
            for curve in curves:
                axes.plot(steps, curve, "_", color=_colour(arm, runs), markersize=14, markeredgewidth=2)
    axes.set_ylim(-1.2 * (largest or 1.0), 1.2 * (largest or 1.0))
    axes.set_title(f"{runs[0].task}: held-out loss against {BASELINE}")
    axes.set_ylabel("difference, %")
    _finish(axes, "dots: mean; dashes: each seed" if len(_by_arm(runs)[BASELINE]) > 1 else None)


def draw_times(axes: Axes, runs: Sequence[RunResult], warmup: int) -> None:
    """Draws the ratio of step times to the baseline's, round by round, median over the seeds.

    Args:
        axes: Where to draw.
        runs: Results of one task.
        warmup: First steps, shaded.
    """
    lengths = [len(turn) for turn in runs[0].rounds]
    middles = [end - length / 2 for end, length in zip(accumulate(lengths), lengths, strict=True)]
    axes.axvspan(0, warmup, color=_GREY, alpha=0.4, label=f"left out: first {warmup} steps")
    axes.axhline(1, color=_COLOURS[BASELINE], linewidth=4, label=BASELINE)
    first, second = [run for run in runs if run.arm == BASELINE][:2]
    compared = {f"{BASELINE}, another seed": [(second, first)]}
    compared |= {arm: pairs_of(runs, arm, BASELINE) for arm in _by_arm(runs) if arm != BASELINE}
    for label, pairs in compared.items():
        ratios = [statistics.median(column) for column in zip(*(_round_ratios(*pair) for pair in pairs), strict=True)]
        colour = _colour(label, runs)
        axes.plot(middles, ratios, "o-", color=colour, linewidth=2.5 if label in _COLOURS else 1.5, label=label)
    _log_scale(axes, (1, 1.2, 1.5, 2, 3, 4, 6, 8, 9))
    axes.set_title(f"{runs[0].task}: step time / {BASELINE}, by round")
    axes.set_ylabel("ratio of medians in a round")
    _finish(axes, None)


def draw_formats(axes: Axes, run: RunResult | None) -> None:
    """Draws the format of each unit over the steps: rows are units, colours are formats.

    Units of repeated blocks that went the same way share a row.

    Args:
        axes: Where to draw.
        run: A steered run; without one, or without a map, the panel says so.
    """
    if run is None or not run.format_changes:
        axes.text(0.5, 0.5, "no format map", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    edges = [step for step, _ in run.format_changes] + [run.steps]
    maps = [
        formats for (step, formats), (_, end) in zip(run.format_changes, pairwise(edges), strict=True) if end > step
    ]
    shown = [edge for edge, end in pairwise(edges) if end > edge] + [run.steps]
    rows = merged_rows({unit: tuple(formats[unit] for formats in maps) for unit in maps[-1]}) if maps else {}
    names = list(FORMAT_COLOURS)
    axes.pcolormesh(
        shown,
        range(len(rows) + 1),
        [[names.index(name) for name in history] for history in rows.values()],
        cmap=ListedColormap(list(FORMAT_COLOURS.values())),
        norm=BoundaryNorm(range(len(names) + 1), len(names)),
        edgecolors="white",
        linewidth=0.5,
    )
    axes.set_yticks([index + 0.5 for index in range(len(rows))], list(rows), fontsize=11)
    axes.invert_yaxis()
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title(f"{run.task}: formats under {run.arm}, seed {run.seed}")
    used = {name for history in rows.values() for name in history}
    patches = [Patch(color=FORMAT_COLOURS[name], label=name) for name in names if name in used]
    _legend(axes, None, patches)


def merged_rows(histories: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Merges units whose names differ in one number and whose histories are equal.

    Args:
        histories: The formats of each unit over time.

    Returns:
        The formats by label, in the order of first appearance; ``blocks.0-5.qkv`` stands for six units.
    """
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for unit, history in histories.items():
        pattern = re.sub(r"\d+", "#", unit, count=1) if len(re.findall(r"\d+", unit)) == 1 else unit
        merged.setdefault((pattern, history), []).append(unit)
    return {
        units[0] if len(units) == 1 else pattern.replace("#", _ranges(units)): history
        for (pattern, history), units in merged.items()
    }


def smooth(values: Sequence[float]) -> list[float]:
    """Returns the mean of each value and up to ``SMOOTH_STEPS`` - 1 before it."""
    windows = (values[max(0, end - SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _ranges(units: Sequence[str]) -> str:
    numbers = sorted(int(re.findall(r"\d+", unit)[0]) for unit in units)
    runs = [[number for _, number in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _by_arm(runs: Sequence[RunResult]) -> dict[str, list[RunResult]]:
    """The runs of each arm with the seeds of the steered arm, or with all of them where there is none."""
    seeds = {run.seed for run in runs if run.arm == AUTOPREC} or {run.seed for run in runs}
    arms = dict.fromkeys(run.arm for run in runs)
    return {arm: [run for run in runs if run.arm == arm and run.seed in seeds] for arm in arms}


def _curve(run: RunResult) -> list[float]:
    return [loss for _, _, loss in run.points]


def _percent(loss: float, other: float) -> float:
    return 100 * (loss / other - 1) if other else math.nan


def _round_ratios(run: RunResult, other: RunResult) -> list[float]:
    return [
        statistics.median(ours) / statistics.median(theirs)
        for ours, theirs in zip(run.rounds, other.rounds, strict=True)
    ]


def _colour(arm: str, runs: Sequence[RunResult]) -> str:
    others = [name for name in dict.fromkeys(run.arm for run in runs) if name not in _COLOURS]
    return _COLOURS.get(arm) or (_OTHERS[others.index(arm) % len(_OTHERS)] if arm in others else "#888888")


def _seeds_in_words(runs: Sequence[RunResult]) -> str:
    count = max(map(len, _by_arm(runs).values()))
    return f", mean of {count} seeds" if count > 1 else ""


def _log_scale(axes: Axes, ticks: tuple[float, ...]) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=ticks, numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(axes: Axes, legend_title: str | None) -> None:
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.grid(alpha=0.3)
    _legend(axes, legend_title, axes.get_legend_handles_labels()[0])


def _legend(axes: Axes, title: str | None, handles: Sequence[Artist]) -> None:
    """Below the panel, where it covers nothing."""
    axes.legend(
        handles=handles,
        title=title,
        ncols=3 if len(handles) == 3 else 2,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
    )
