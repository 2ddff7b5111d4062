"""An evaluation as a picture: what the policy gains on each rival, and on the strongest table by group of tasks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.policies.evaluation_results import strongest_table
from autoprec.policies.evaluation_tables import verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LABEL_WIDTH = 34
_TITLE_WIDTH = 44
_COLOURS = {"better": "#1b7f5f", "tied": "#8c8c8c", "worse": "#b0485f", "n/a": "#8c8c8c"}

Row = tuple[str, Sequence[float | None]]


def draw(results: Mapping[str, Any], title: str, path: Path) -> bool:
    """Draws the results of a bank into a PNG file.

    Args:
        results: Of ``evaluation_results.bank_results``.
        title: Above the picture.
        path: The file.

    Returns:
        Whether there was something to draw: a policy and a rival.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    differences = results["differences"]
    if not differences:
        return False
    ways, strongest = results["ways"], strongest_table(results) or next(iter(differences))
    overall: list[Row] = [
        (ways[name]["description"], found["all"]["difference"]) for name, found in differences.items()
    ]
    grouped: list[Row] = [
        (f"{kind}: {group} ({results['groups'][kind][group]})", found["difference"])
        for kind, names in differences[strongest]["by"].items()
        for group, found in names.items()
    ]
    with rc_context({"font.size": 11}):
        rows = max(len(overall), len(grouped))
        figure = Figure(figsize=(15, 2.0 + 0.38 * rows), layout="constrained")
        figure.suptitle(title)
        figure.supxlabel("difference of the score (fp32 without clip = 1) with its 95% interval", fontsize=11)
        left, right = figure.subplots(1, 2)
        _draw_rows(left, overall, "policy less each rival")
        _draw_rows(right, grouped, f"policy less {ways[strongest]['description']} (number of tasks)")
        figure.savefig(path, dpi=90)
    return True


def _draw_rows(axes: Axes, rows: Sequence[Row], title: str) -> None:
    for place, (_, found) in enumerate(rows):
        mean, low, high = found
        if mean is None:
            continue
        colour = _COLOURS[verdict(found)]
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color=colour, linewidth=2.0)
        axes.plot([mean], [place], "o", color=colour)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [textwrap.fill(name, _LABEL_WIDTH) for name, _ in rows])
    axes.invert_yaxis()
    axes.set_title(textwrap.fill(title, _TITLE_WIDTH))
    axes.grid(axis="x", alpha=0.3)
