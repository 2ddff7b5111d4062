"""The demo's table in the terminal, narrow enough for 80 columns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.table import Table

from autoprec.demo.summary import Row, TaskSummary
from autoprec.demo.tasks import AUTOPREC, BASELINE
from autoprec.paired import Spread

_HEADINGS = (
    "trained\nwith",
    f"step time /\n{BASELINE}",
    f"whole run /\n{BASELINE}",
    "held-out\nloss",
    "skipped",
    "peak\nMiB",
)


def build_table(summaries: Sequence[TaskSummary]) -> Table:
    """Returns one table with a section for each task.

    There is no column of milliseconds: medians of whole runs are not paired, and beside the paired ratios they would
    seem to contradict them wherever the machine's speed changed on the way.

    Args:
        summaries: What came out of the tasks.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    table.add_column("formats\nat the end", max_width=10)
    for summary in summaries:
        table.add_row(f"[bold underline]{summary.name}[/]")
        for row in summary.rows:
            table.add_row(*_cells(row), style="bold" if row.label == AUTOPREC else None)
        table.add_section()
    return table


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.label.replace(", ", "\n"),
        _spread(row.ratio),
        _ratio(row.whole_ratio),
        _losses(row.losses),
        str(row.skipped),
        "?" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
        row.formats.replace(", ", "\n"),
    )


def _ratio(ratio: float) -> str:
    return "n/a" if math.isnan(ratio) else f"{ratio:.2f}"


def _spread(spread: Spread) -> str:
    if math.isnan(spread.median) or spread.low == spread.high:
        return _ratio(spread.median)
    return f"{spread.median:.2f}\n{spread.low:.2f}-{spread.high:.2f}"


def _losses(losses: tuple[float, ...]) -> str:
    mean = f"{sum(losses) / len(losses):.4f}"
    return mean if len(losses) == 1 else f"{mean}\n{min(losses):.4f}-{max(losses):.4f}"
