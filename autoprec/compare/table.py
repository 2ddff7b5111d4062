"""A verdict on the screen: the answer in a sentence, a row for each arm, what was left out, the reasons.

The table fits the width of the console: columns that no arm has figures for are not shown, and those that do not fit
are left out in a fixed order and named below it. The best cell of a column is bold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoprec.compare.arm_figures import ArmFigures
from autoprec.compare.statistics import MIN_SEEDS
from autoprec.compare.verdict import Verdict
from autoprec.compare.wording import bytes_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NOTHING = "-"
_BEST = "bold green"
_HEADLINE = "bold"
_UNBOUNDED = 10_000


@dataclass(frozen=True)
class _Column:
    """One column.

    Args:
        name: What it is called where it is left out.
        heading: Its heading, with line breaks.
        cell: Text of an arm's cell; ``_NOTHING`` where nothing is known.
        score: What is lowest for the best cell, NaN for a cell that takes no part; ``None`` for a column without one.
        rank: The column with the highest rank is left out first; 0 stays.
    """

    name: str
    heading: str
    cell: Callable[[ArmFigures], str]
    score: Callable[[ArmFigures], float] | None
    rank: int


def render_table(verdict: Verdict, console: Console) -> None:
    """Prints a verdict.

    Args:
        verdict: The verdict.
        console: Where to; its width decides how many columns there are.
    """
    from rich.text import Text

    console.print(Text(verdict.headline, style=_HEADLINE))
    table, left_out = fitting_table(verdict, console)
    console.print()
    console.print(table)
    for line in _footnotes(verdict, left_out):
        console.print(Text(line))
    console.print()
    for reason in verdict.reasons:
        console.print(Text(f"- {reason}"))


def fitting_table(verdict: Verdict, console: Console) -> tuple[Table, list[str]]:
    """Returns the table with as many columns as fit, and the names of the others.

    Args:
        verdict: The verdict.
        console: Whose width it has to fit.
    """
    columns = [c for c in _columns(verdict) if c.rank == 0 or any(c.cell(a) != _NOTHING for a in verdict.arms)]
    left_out: list[str] = []
    unbounded = console.options.update(width=_UNBOUNDED)
    while True:
        table = _table(verdict, columns)
        last = max(columns, key=lambda column: column.rank)
        if console.measure(table, options=unbounded).maximum <= console.width or last.rank == 0:
            return table, left_out
        columns.remove(last)
        left_out.append(last.name)


def _table(verdict: Verdict, columns: Sequence[_Column]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(Text(column.heading), justify="right" if index else "left", no_wrap=True)
    best = {column.name: _best(column, verdict.arms) for column in columns}
    for arm in verdict.arms:
        cells = [Text(c.cell(arm), style=_BEST if arm.arm in best[c.name] else "") for c in columns]
        table.add_row(*cells, style="dim" if arm.problem else None)
    return table


def _best(column: _Column, arms: Sequence[ArmFigures]) -> set[str]:
    """Arms whose cell reads like that of the best one; none where all read alike."""
    usable = [arm for arm in arms if arm.problem is None and "@" not in arm.arm]
    if column.score is None or len(usable) < 2:
        return set()
    scores = {arm.arm: column.score(arm) for arm in usable}
    known = [arm for arm in usable if not math.isnan(scores[arm.arm])]
    if len({column.cell(arm) for arm in known}) < 2:
        return set()
    first = min(known, key=lambda arm: scores[arm.arm])
    return {arm.arm for arm in known if scores[arm.arm] == scores[first.arm]}


def _columns(verdict: Verdict) -> Iterator[_Column]:
    sign = 1.0 if verdict.mode == "min" else -1.0
    ratio = "step time" if verdict.time_basis == "step" else "whole run"
    yield _Column("arm", "trained\nwith", _arm, None, 0)
    yield _Column("time", f"{ratio} /\nbest static", _time, lambda arm: arm.time_ratio.value, 0)
    yield _Column("metric", verdict.metric, _metric, lambda arm: sign * arm.metric.value, 0)
    yield _Column("relation", "difference,\nrelation", _relation, None, 1)
    yield _Column("time to target", "time to\ntarget", _target, lambda arm: _or_nan(arm.target_seconds), 2)
    yield _Column("peak memory", "peak\nmemory", _memory, lambda arm: _or_nan(arm.peak_bytes), 3)
    yield _Column("skipped steps", "skip-\nped", lambda arm: str(arm.skipped_steps or _NOTHING), None, 4)
    yield _Column("energy", "energy", _energy, lambda arm: _or_nan(arm.energy_j), 5)
    yield _Column("fidelity", "outputs\nvs fp32", _fidelity, None, 6)
    yield _Column("formats", "formats\nat the end", _formats, None, 7)


def _arm(arm: ArmFigures) -> str:
    return arm.arm.replace(":", ":\n", 1)


def _time(arm: ArmFigures) -> str:
    ratio = arm.time_ratio
    if math.isnan(ratio.value):
        return _NOTHING
    if ratio.low is None or ratio.high is None or ratio.low == ratio.high:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f}\n{ratio.low:.3f}-{ratio.high:.3f}"


def _metric(arm: ArmFigures) -> str:
    metric = arm.metric
    if arm.problem:
        return arm.problem.split(" (")[0].replace(" with ", "\n")
    if not metric.seeds:
        return _NOTHING
    if metric.low is None or metric.high is None:
        return f"{metric.value:.4g}\n{_seeds(metric.seeds)}"
    return f"{metric.value:.4g}\n{metric.low:.4g} to {metric.high:.4g}"


def _relation(arm: ArmFigures) -> str:
    if arm.against in (None, arm.arm) or arm.problem or not arm.difference.seeds:
        return _NOTHING
    return f"{arm.difference.value:+.2g}\n{arm.relation}"


def _target(arm: ArmFigures) -> str:
    if not arm.target_seeds or arm.problem:
        return _NOTHING
    reached = "" if arm.target_reached == arm.target_seeds else f"\n{arm.target_reached} of {arm.target_seeds}"
    return f"{'never' if arm.target_seconds is None else _seconds(arm.target_seconds)}{reached}"


def _memory(arm: ArmFigures) -> str:
    return _NOTHING if arm.peak_bytes is None else bytes_text(arm.peak_bytes)


def _energy(arm: ArmFigures) -> str:
    if arm.energy_j is None:
        return _NOTHING
    rate = "" if arm.tops_per_watt is None else f"\n{arm.tops_per_watt:.3g} TOPS/W"
    return f"{_joules(arm.energy_j)}{rate}"


def _fidelity(arm: ArmFigures) -> str:
    found = arm.fidelity
    parts = [f"KL {found['kl']:.2g}"] if "kl" in found else []
    sqnr_db = found.get("logit_sqnr_db", found.get("sqnr_db"))
    if sqnr_db is not None:
        parts.append("equal" if sqnr_db == math.inf else f"{sqnr_db:.1f} dB")
    return "\n".join(parts) or _NOTHING


def _formats(arm: ArmFigures) -> str:
    return "\n".join(f"{count} x {name}" for name, count in arm.formats.items()) or _NOTHING


def _footnotes(verdict: Verdict, left_out: Sequence[str]) -> Iterator[str]:
    seeds = max(len(arm.seeds) for arm in verdict.arms)
    intervals = (
        f"intervals: {100 * verdict.confidence:.3g}% over {seeds} seeds"
        if seeds >= MIN_SEEDS
        else f"intervals: n/a, they need {MIN_SEEDS} seeds and there {'is 1' if seeds == 1 else f'are {seeds}'}"
    )
    reference = (
        "" if verdict.reference is None else f"; difference: from {verdict.reference}, margin {verdict.margin:.4g}"
    )
    yield f"{intervals}{reference}"
    if any(arm.target_seeds for arm in verdict.arms) and "time to target" not in left_out:
        yield f"target: {verdict.metric} of {verdict.target}"
    sources = list(dict.fromkeys(arm.energy_source for arm in verdict.arms if arm.energy_source))
    if sources and "energy" not in left_out:
        yield f"energy of a run: {', '.join(sources)}"
    if left_out:
        yield f"not shown at this width: {', '.join(reversed(left_out))}"
    for arm in verdict.arms:
        for seed, error in list(arm.errors.items())[:1]:
            yield f"{arm.arm}, seed {seed}: {error.strip().splitlines()[-1] if error.strip() else 'no message'}"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"


def _joules(joules: float) -> str:
    for unit, size in (("MJ", 1e6), ("kJ", 1e3)):
        if joules >= size:
            return f"{joules / size:.3g} {unit}"
    return f"{joules:.3g} J"


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
