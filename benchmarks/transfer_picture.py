"""The transfer study as a picture: what each arm scored, and how far the subject is from the best static arm."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoprec.paired import Interval
from benchmarks.transfer_arms import ARMS
from benchmarks.transfer_charge import CHARGES
from benchmarks.transfer_report import TITLES
from benchmarks.transfer_scores import best_static, differences, total

_COLOURS = ("#3b4a6b", "#5b7fb5", "#f0a04b", "#8a5fb0", "#b0485f", "#8c8c8c")
_POLICIES = ("#5fb7a0", "#9bd1c0", "#2f8f74", "#1b7f5f", "#0d4a36")
_SPACING = 0.22


def draw(study: Mapping[str, Any], path: Path) -> None:
    """Draws a study into a PNG file.

    Args:
        study: What docs/results/transfer.json holds.
        path: The file.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 9}):
        figure = Figure(figsize=(16, 4.8), layout="constrained")
        panels = figure.subplots(1, len(CHARGES) + 1, width_ratios=[*(1 for _ in CHARGES), 1.4])
        for axes, charge in zip(panels, CHARGES, strict=False):
            _draw_scores(axes, study, charge)
        _draw_differences(panels[-1], study)
        for axes, columns in ((panels[0], 8), (panels[-1], len(CHARGES))):
            handles, labels = axes.get_legend_handles_labels()
            is_first = axes is panels[0]
            figure.legend(
                handles, labels, loc="outside lower left" if is_first else "outside lower right", ncols=columns
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=80)


def _draw_scores(axes: Any, study: Mapping[str, Any], charge: str) -> None:
    tasks = study["tasks"]
    static = {arm.name for arm in ARMS if arm.is_static}
    names = list(next(iter(tasks.values()))["arms"])
    counts = {True: 0, False: 0}
    for name in names:
        is_static = name in static
        palette = _COLOURS if is_static else _POLICIES
        colour = palette[counts[is_static] % len(palette)]
        counts[is_static] += 1
        cells = [task["arms"][name][charge] for task in tasks.values()]
        known = [(x, statistics.fmean(cell["scores"])) for x, cell in enumerate(cells) if cell["failed"] is None]
        marker = "o" if is_static else "D"
        axes.plot(*zip(*known, strict=True) if known else ([], []), marker, color=colour, label=name, alpha=0.85)
    axes.axhline(1.0, color="#bdbdbd", linewidth=1)
    axes.set_xticks(range(len(tasks)), list(tasks), rotation=30, ha="right")
    axes.set_title(f"score, {TITLES[charge]}")
    axes.grid(alpha=0.3)


def _draw_differences(axes: Any, study: Mapping[str, Any]) -> None:
    subject = study["subject"]
    rows = {**{name: {name: task} for name, task in study["tasks"].items()}, "all tasks": study["tasks"]}
    for offset, charge in enumerate(CHARGES):
        found = {name: total(differences(tasks, subject, best_static, [charge])) for name, tasks in rows.items()}
        known = [(row, each) for row, each in enumerate(found.values()) if isinstance(each, Interval)]
        axes.errorbar(
            [each.mean for _, each in known],
            [row + _SPACING * (offset - 1) for row, _ in known],
            xerr=[[each.mean - each.low for _, each in known], [each.high - each.mean for _, each in known]],
            fmt="o",
            color=_COLOURS[offset],
            capsize=3,
            label=charge,
        )
    axes.axvline(0.0, color="#bdbdbd", linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_title(f"{subject} less the best static arm, 95% intervals")
    axes.grid(alpha=0.3, axis="x")
