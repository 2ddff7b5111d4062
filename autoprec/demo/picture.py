"""The demo's picture: loss over steps, loss over time, and the format of every unit over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from autoprec.demo.results import RunResult
from autoprec.demo.tasks import AUTOPREC

FORMAT_COLOURS = {
    "fp32": "#3b4a6b",
    "tf32": "#5b7fb5",
    "bf16": "#5fb7a0",
    "fp16": "#f2c14e",
    "fp8": "#ee8434",
    "int8": "#c8385a",
}
_SMOOTH_STEPS = 10
_MARKERS = "os^dv"
_WIDTHS = (3.0, 2.0, 1.2)


def draw(runs: Sequence[RunResult], path: Path, title: str) -> None:
    """Draws one row of three panels for each task.

    Args:
        runs: Results of all runs.
        path: The PNG file.
        title: Line above the panels.
    """
    tasks = list(dict.fromkeys(run.task for run in runs))
    figure = Figure(figsize=(19, 6.5 * len(tasks)), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(len(tasks), 3, squeeze=False, width_ratios=(1, 1, 1.3))
    for task, (over_steps, over_time, formats) in zip(tasks, grid, strict=True):
        of_task = [run for run in runs if run.task == task]
        draw_losses(over_steps, of_task, over_time=False)
        draw_losses(over_time, of_task, over_time=True)
        steered = next((run for run in of_task if run.arm == AUTOPREC), None)
        draw_formats(formats, steered)
    figure.savefig(path, dpi=110)


def draw_losses(axes: Axes, runs: Sequence[RunResult], *, over_time: bool) -> None:
    """Draws training losses as thin lines and held-out losses as marked lines, one colour for each arm.

    Args:
        axes: Where to draw.
        runs: Results of one task.
        over_time: Over the seconds spent in steps instead of over the steps.
    """
    arms = list(dict.fromkeys(run.arm for run in runs))
    for run in runs:
        index = arms.index(run.arm)
        colour = f"C{index}"
        second = [second for turn in run.rounds for second in turn]
        x = list(accumulate(second)) if over_time else list(range(1, run.steps + 1))
        axes.plot(x, _smooth(run.losses), color=colour, alpha=0.4, linewidth=0.8)
        axes.plot(
            [point[1] if over_time else point[0] for point in run.points],
            [point[2] for point in run.points],
            color=colour,
            linestyle="-" if run.seed == 0 else ":",
            linewidth=_WIDTHS[min(index, 2)],  # equal curves stay visible under each other
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            label=run.arm if run.seed == 0 else None,
        )
    axes.set_title(f"{runs[0].task}: loss over {'time' if over_time else 'steps'}")
    axes.set_xlabel("seconds in steps" if over_time else "optimizer steps")
    axes.set_ylabel("loss (thin: training; marked: held out, fp32)")
    if min(min(run.losses) for run in runs) < 0.5:
        axes.set_yscale("log")
    axes.legend(title="dotted: other seeds")
    axes.grid(alpha=0.3)


def draw_formats(axes: Axes, run: RunResult | None) -> None:
    """Draws the format of each unit over the steps: rows are units, colours are formats.

    Args:
        axes: Where to draw.
        run: A steered run; without one, or without a map, the panel says so.
    """
    if run is None or not run.format_changes:
        axes.text(0.5, 0.5, "no format map", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    units = list(run.format_changes[-1][1])
    names = list(FORMAT_COLOURS)
    edges = [step for step, _ in run.format_changes] + [run.steps]
    columns = [[names.index(formats[unit]) for unit in units] for _, formats in run.format_changes]
    shown = [
        (edge, column) for (edge, following), column in zip(pairwise(edges), columns, strict=True) if following > edge
    ]
    axes.pcolormesh(
        [edge for edge, _ in shown] + [run.steps],
        range(len(units) + 1),
        [list(row) for row in zip(*(column for _, column in shown), strict=True)],
        cmap=ListedColormap(list(FORMAT_COLOURS.values())),
        norm=BoundaryNorm(range(len(names) + 1), len(names)),
    )
    axes.set_yticks([index + 0.5 for index in range(len(units))], units, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("optimizer steps")
    axes.set_title(f"{run.task}: format of each unit, {run.arm}, seed {run.seed}")
    used = {names[value] for column in columns for value in column}
    patches = [Patch(color=FORMAT_COLOURS[name], label=name) for name in names if name in used]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _smooth(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, end - _SMOOTH_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
