"""Pictures of what a policy does: its knobs over the run by hardware and regime, and one run from beginning to end.

Both are written as PNG files without a display. What is drawn by group is a mean over tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.engine import FORMATS
from autoprec.envs.profiles import PROFILES
from autoprec.envs.proxies import BATCH_SIZES, REGIMES
from autoprec.policies.behaviour_measures import SHARES, at_shares, mean_level
from autoprec.policies.play import Recording

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[Any]

FORMAT_COLOURS = dict(
    zip(
        FORMATS,
        ("#3b4a6b", "#5fb7a0", "#f2c14e", "#f6a15c", "#ee8434", "#c8385a", "#8a5fb0", "#b98bd0"),
        strict=True,
    )
)
_LINES = ("#3b4a6b", "#1b7f5f", "#ee8434", "#c8385a", "#8a5fb0", "#5b7fb5")
_DASHES = ("-", "--", ":", "-.")
_WIDEST, _THINNEST = 4.0, 1.4
_MOST_NOTES = 6


def draw_overview(recording: Recording, path: Path, title: str) -> None:
    """Draws levels, batch sizes and clips over the budget, by kind of hardware and by regime.

    Args:
        recording: What a policy did.
        path: The PNG file.
        title: Line above the panels.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    profiles = np.array([task.profile for task in recording.tasks])
    regimes = np.array([task.regime for task in recording.tasks])
    rows = {
        "hardware": {name: profiles == name for name in [*PROFILES, *sorted(set(profiles) - set(PROFILES))]},
        "regime": {name: regimes == name for name in REGIMES},
    }
    with rc_context({"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 10}):
        figure = Figure(figsize=(15, 8), layout="constrained")
        figure.suptitle(title)
        grid = figure.subplots(len(rows), 3, sharex=True)
        for (what, groups), axes in zip(rows.items(), grid, strict=True):
            _draw_lines(axes[0], recording, mean_level(recording), groups)
            _draw_lines(axes[1], recording, recording.batch, groups)
            _draw_lines(axes[2], recording, recording.clip, groups)
            axes[0].set_ylabel("mean level of units (0 is fp32)")
            _name_ticks(axes[1], "batch size", [str(size) for size in BATCH_SIZES])
            _name_ticks(axes[2], "clip, in median norms", _clip_names())
            axes[2].legend(*axes[0].get_legend_handles_labels(), title=what, loc="center left", bbox_to_anchor=(1, 0.5))
        for axes, knob in zip(grid[0], ("formats", "batch size", "clip"), strict=True):
            axes.set_title(knob)
        for axes in grid[-1]:
            axes.set_xlabel("share of the time budget")
        figure.savefig(path, dpi=90)


def draw_episode(recording: Recording, task: int, path: Path, title: str) -> None:
    """Draws one run: formats of its units over the decisions, overflows and raises, and what else was seen.

    Args:
        recording: What a policy did.
        task: Which of the recording's tasks; :func:`eventful_task` finds one that shows something.
        path: The PNG file.
        title: Line above the panels.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    windows = int(recording.is_played[:, task].sum())
    with rc_context({"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 10}):
        figure = Figure(figsize=(14, 13), layout="constrained")
        figure.suptitle(f"{title}\nformats of units; notes: what followed an overflow")
        panels = figure.subplots(6, 1, sharex=True, height_ratios=(4, 1.6, 1.6, 1.2, 1.2, 1.6))
        _draw_formats(panels[0], recording, task, windows)
        at = np.arange(windows)
        for axes, values, name in (
            (panels[1], recording.loss, "held-out loss"),
            (panels[2], recording.step_time, "step time\n(fp32 steps)"),
            (panels[5], recording.loss_scale, "loss scale"),
        ):
            axes.plot(at, values[:windows, task], color=_LINES[0], drawstyle="steps-mid", linewidth=1.6)
            axes.set_ylabel(name)
        for axes, values, name, ticks in (
            (panels[3], recording.batch, "batch size", [str(size) for size in BATCH_SIZES]),
            (panels[4], recording.clip, "clip\n(medians)", _clip_names()),
        ):
            axes.plot(at, values[:windows, task], color=_LINES[1], drawstyle="steps-mid", linewidth=1.6)
            _name_ticks(axes, name, ticks)
        _plain_log(panels[1])
        panels[5].set_yscale("log", base=2)
        skipped = np.flatnonzero(recording.skipped[:windows, task] > 0)
        for axes in panels[1:]:
            axes.grid(alpha=0.3)
            for window in skipped:
                axes.axvspan(window - 0.5, window + 0.5, color="#c8385a", alpha=0.15, linewidth=0)
        panels[5].set_xlabel("decision; red bands: windows with skipped steps")
        panels[5].set_xlim(-0.5, windows - 0.5)
        figure.savefig(path, dpi=90)


def eventful_task(recording: Recording) -> int:
    """Returns the task with the most overflows that were answered, then the most changes of formats.

    Args:
        recording: What a policy did.
    """
    answered = np.array([len(raises(recording, task)) for task in range(len(recording.tasks))])
    level, played = recording.level, recording.is_played[1:, :, None]
    changes = ((level[1:] != level[:-1]) & (level[1:] >= 0) & played).sum(axis=(0, 2))
    return int(np.lexsort((changes, answered))[-1])


def raises(recording: Recording, task: int) -> list[tuple[int, int]]:
    """Returns window and unit of each overflow whose unit had a wider format at the next decision.

    Args:
        recording: What a policy did.
        task: Which task.
    """
    found = []
    for window in range(int(recording.is_played[:, task].sum()) - 1):
        unit = int(recording.offender[window, task])
        if unit >= 0 and recording.level[window + 1, task, unit] < recording.level[window, task, unit]:
            found.append((window, unit))
    return found


def _draw_lines(axes: Axes, recording: Recording, values: Array, groups: Mapping[str, Array]) -> None:
    found = at_shares(recording, values, SHARES)
    groups = {name: chosen for name, chosen in groups.items() if chosen.any()}
    for place, (name, chosen) in enumerate(groups.items()):
        turn, colour = divmod(place, len(_LINES))
        count = int(chosen.sum())
        axes.plot(
            SHARES,
            found[:, chosen].mean(axis=1),
            color=_LINES[colour],
            linestyle=_DASHES[turn % len(_DASHES)],  # colours come again, dashed
            # lines that lie on each other are thick, thinner, thinnest
            linewidth=_WIDEST - (_WIDEST - _THINNEST) * place / max(len(groups) - 1, 1),
            label=f"{name} ({count} task{'' if count == 1 else 's'})",
            alpha=0.9,
        )
    axes.grid(alpha=0.3)


def _draw_formats(axes: Axes, recording: Recording, task: int, windows: int) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    units = recording.tasks[task].units
    formats = recording.formats[:windows, task, :units].T
    colours = ListedColormap(list(FORMAT_COLOURS.values()))
    norm = BoundaryNorm(np.arange(len(FORMATS) + 1) - 0.5, len(FORMATS))
    axes.imshow(formats, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    unit, window = np.nonzero(recording.overflows[:windows, task, :units].T > 0)
    axes.plot(window, unit + 0.2, "x", color="black", markersize=8, markeredgewidth=2)
    answered = raises(recording, task)
    at, of_unit = np.array(answered).reshape(-1, 2).T
    axes.plot(at, of_unit - 0.2, "^", color="white", markeredgecolor="black", markersize=9)
    _annotate(axes, recording, task, answered)
    axes.set_yticks(range(units), [f"unit {index}" for index in range(units)])
    axes.set_ylim(units - 0.5, -0.5)
    marks = [
        *(Patch(color=FORMAT_COLOURS[FORMATS[each]], label=FORMATS[each]) for each in np.unique(formats)),
        Line2D([], [], linestyle="", marker="x", color="black", label="overflow"),
        Line2D([], [], linestyle="", marker="^", color="white", markeredgecolor="black", label="then raised"),
    ]
    axes.legend(handles=marks, loc="center left", bbox_to_anchor=(1, 0.5))


def _annotate(axes: Axes, recording: Recording, task: int, answered: Sequence[tuple[int, int]]) -> None:
    """Says above the map what the first raises did, on three lines in turn so that neighbours do not meet."""
    for place, (window, unit) in enumerate(answered[:_MOST_NOTES]):
        before, after = (FORMATS[recording.formats[at, task, unit]] for at in (window, window + 1))
        axes.annotate(
            f"unit {unit}: {before} to {after}",
            (window, unit - 0.35),
            xytext=(window, 1.04 + 0.08 * (place % 3)),
            textcoords=axes.get_xaxis_transform(),
            ha="center",
            fontsize=9,
            annotation_clip=False,
            arrowprops={"arrowstyle": "->", "color": "#333333"},
        )


def _plain_log(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _name_ticks(axes: Axes, label: str, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(-0.4, len(names) - 0.6)
    axes.set_ylabel(label)


def _clip_names() -> list[str]:
    return ["off" if np.isinf(clip) else f"{clip:g}" for clip in CLIP_MULTIPLIERS]
