"""The demo's table in the terminal, narrow enough for 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from autoprec.demo.results import Spread
from autoprec.demo.summary import Row, TaskSummary
from autoprec.demo.tasks import AUTOPREC, BASELINE


def build_table(summaries: Sequence[TaskSummary]) -> Table:
    """Returns one table with a section for each task.

    Args:
        summaries: What came out of the tasks.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("arm", "ms per\nstep", f"time /\n{BASELINE}", "held-out\nloss", "skipped", "peak\nMiB"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
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
        f"{row.step_ms:.1f}",
        _spread(row.ratio),
        _losses(row.losses),
        str(row.skipped),
        "?" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
        row.formats.replace(", ", "\n"),
    )


def _spread(spread: Spread) -> str:
    if spread.low == spread.high:
        return f"{spread.median:.2f}"
    return f"{spread.median:.2f}\n{spread.low:.2f}-{spread.high:.2f}"


def _losses(losses: tuple[float, ...]) -> str:
    mean = f"{sum(losses) / len(losses):.4f}"
    return mean if len(losses) == 1 else f"{mean}\n{min(losses):.4f}-{max(losses):.4f}"
