"""The tables of a run, for the screen and, as Markdown, for docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.figures import Findings, Ratio, RowTimes
from benchmarks.targets import judge

EQUAL = 0.05
"""Ratios nearer to 1 than that are no difference."""


class Table(NamedTuple):
    """A table with what has to be said about it.

    Args:
        title: What it shows.
        head: Titles of the columns.
        lines: Entries.
        note: A sentence below it, or nothing.
    """

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    note: str = ""


def as_text(table: Table) -> str:
    """Columns as wide as their longest entry, the first to the left, the others to the right.

    Args:
        table: What to show.
    """
    widths = [max(map(len, column)) for column in zip(table.head, *table.lines, strict=True)]
    lines = []
    for entries in (table.head, *table.lines):
        padded = [entry.rjust(width) for entry, width in zip(entries, widths, strict=True)]
        lines.append("  ".join([entries[0].ljust(widths[0]), *padded[1:]]).rstrip())
    return "\n".join([table.title, "", *lines, *([table.note] if table.note else [])])


def as_markdown(table: Table) -> str:
    """The same for a page.

    Args:
        table: What to show.
    """
    lines = [table.head, ["---"] * len(table.head), *table.lines]
    parts = [f"**{table.title}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join([*parts, *([table.note] if table.note else [])])


def tables(findings: Findings) -> Iterator[Table]:
    """Yields all tables of a run.

    Args:
        findings: What was measured.
    """
    for kind in ("trainer", "bare"):
        for malloc in ("fixed", "default"):
            for threads in (1, 2):
                rows = findings.steps(kind, threads, malloc)
                if rows:
                    yield step_table(rows, _title(kind, threads, malloc), findings.machine(threads))
    for kind, title in (
        ("grad_stats", "grad_stats against clip_grad_norm_, ratios of times"),
        ("step", "Clipping + AdamW + bf16 weights in one kernel, speed-ups over torch"),
    ):
        if kernel_rows := findings.kernel_rows(kind):
            yield kernel_table(kernel_rows, title)
    if findings.of("memory"):
        yield memory_table(findings)
    yield target_table(findings)


def _title(kind: str, threads: int, malloc: str) -> str:
    where = "Lightning Trainer" if kind == "trainer" else "hand-written loop"
    clock = "1 thread, processor time" if threads == 1 else f"{threads} threads, wall time"
    base = "ours" if kind == "trainer" else "hand"
    extra = "" if malloc == "fixed" else ", malloc as the C library has it"
    return f"{where}, {clock}{extra}: speed-up of {base!r} over ..."


def step_table(rows: Sequence[RowTimes], title: str, machine: Mapping[str, Any] | None) -> Table:
    """Speed-ups over every other arm, with half the distance between the quartiles.

    Args:
        rows: What was measured.
        title: Its title.
        machine: For the bound.
    """
    base = rows[0].base
    others = list(dict.fromkeys(arm for row in rows for arm in row.times if arm != base))
    lines = []
    for row in rows:
        bound = row.bound_ms(machine)
        lines.append(
            [
                row.name,
                "-" if bound is None else f"{bound:.2f}",
                f"{row.median_ms(base):.2f}",
                *(_text(row.speed_up(arm)) for arm in others),
            ]
        )
    return Table(title, ["row", "bound ms", f"{base} ms", *others], lines, _note(rows))


def _text(ratio: Ratio | None) -> str:
    return "-" if ratio is None else f"{ratio.value:.2f}+-{ratio.spread:.2f}"


def _note(rows: Sequence[RowTimes]) -> str:
    foreign = max(row.elsewhere() for row in rows)
    return _losses(rows) + (f" Other threads took up to {foreign:.0%} of the processor time." * (foreign > 0.02))


def _losses(rows: Sequence[RowTimes]) -> str:
    lost = {}
    for row in rows:
        ratios = {arm: row.speed_up(arm) for arm in row.times if arm != row.base}
        lost[row.name] = [f"{arm} {v.value:.2f}" for arm, v in ratios.items() if v is not None and v.value < 1 - EQUAL]
    slower = [f"  {name} than {', '.join(arms)}" for name, arms in lost.items() if arms]
    head = f"Slower by more than {EQUAL:.0%}:"
    return "\n".join([head, *slower]) if slower else f"{head} nowhere."


def kernel_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Rows of ``benchmarks.ops`` as they are.

    Args:
        rows: From one of its tables.
        title: Its title.
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in ("table", "row")]
    lines = [[row["row"], *(f"{row[name]:.2f}" if name in row else "-" for name in names)] for row in rows]
    return Table(title, ["row", *names], lines)


def memory_table(findings: Findings) -> Table:
    """Peak of memory over what stood before fit.

    Args:
        findings: What was measured.
    """
    lines = []
    for row in dict.fromkeys(result["job"]["row"] for result in findings.of("memory")):
        peaks = [findings.peaks(row, arm) for arm in ("amp_clip", "ours")]
        lines.append([row, *(_megabytes(values) for values in peaks), f"{findings.memory_ratio(row):.2f}"])
    return Table("Peak of resident memory over baseline, MB", ["row", "amp_clip", "ours", "ratio"], lines)


def _megabytes(values: Sequence[int]) -> str:
    if not values:
        return "-"
    low, middle, high = (pick(values) / 1e6 for pick in (min, statistics.median, max))
    return f"{middle:.0f} ({low:.0f} to {high:.0f}, {len(values)} runs)"


def target_table(findings: Findings) -> Table:
    """Every target beside its figure; missed ones with what the machine leaves.

    Args:
        findings: What was measured.
    """
    verdicts = judge(findings)
    lines = [
        [v.target.figure, v.row, _short(v.value), v.target.text, "met" if v.is_met else "MISSED", v.bound]
        for v in verdicts
    ]
    met = sum(v.is_met for v in verdicts)
    return Table(
        "Targets: Lightning Trainer, 1 thread, processor time",
        ["figure", "row", "value", "target", "", "what the machine leaves"],
        lines,
        f"{met} of {len(verdicts)} met.",
    )


def _short(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _rates(rates: Mapping[str, float]) -> str:
    return " / ".join(f"{rate:.0f}" for rate in rates.values())


def machine_line(findings: Findings) -> str:
    """What the machine does at best, if that was measured, and what load it had.

    Args:
        findings: What was measured.
    """
    load = f"Load average up to {findings.load():.1f}."
    machine = findings.machine()
    if machine is None:
        return load
    return (
        f"One core at best: {machine['bf16_gflops']:.0f} Gflop/s bf16, {machine['int8_gops']:.0f} Gop/s int8,"
        f" {_rates(machine['read_gbs'])} GB/s read, {_rates(machine['copy_gbs'])} GB/s copied in"
        f" {' / '.join(machine['read_gbs'])} MB;"
        f" Lightning's loop alone takes {machine['loop_ms']:.2f} ms. {load}"
    )
