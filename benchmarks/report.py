"""Tables on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures import Ratio, RowTimes


def text_of(ratio: Ratio | None) -> str:
    """A ratio with its quartiles, ``-`` for nothing.

    Args:
        ratio: What to show.
    """
    return "-" if ratio is None else f"{ratio.value:.2f} [{ratio.low:.2f} {ratio.high:.2f}]"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest entry, the first to the left, the others to the right.

    Args:
        head: Titles.
        lines: Entries.
    """
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(entry.ljust(width) if not place else entry.rjust(width) for place, (entry, width) in pairs)
        for pairs in (list(enumerate(zip(line, widths, strict=True))) for line in (head, *lines))
    )


def step_table(rows: Sequence[RowTimes]) -> str:
    """Milliseconds of a step of ours and its speed-up over every other arm, with quartiles.

    Args:
        rows: What was measured.
    """
    arms = list(dict.fromkeys(arm for row in rows for arm in row.times if arm != "ours"))
    lines = [[row.name, f"{row.median_ms('ours'):.3f}", *(text_of(row.speed_up(arm)) for arm in arms)] for row in rows]
    return table(["row", "ours ms", *arms], lines)
