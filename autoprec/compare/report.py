"""The end of a comparison: its verdict on the screen, and everything behind it as JSON."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from autoprec.compare.arms import FP32
from autoprec.compare.picture import draw
from autoprec.compare.run import Result
from autoprec.compare.settings import CompareSettings
from autoprec.compare.table import render_table
from autoprec.compare.verdict import Verdict, judge, summary_line
from autoprec.json_files import encoded, write_json

MARGIN_SHARE = 0.01
"""Part of the static arms' metric that counts as no difference where the user sets no margin."""


def judged(result: Result, settings: CompareSettings) -> Verdict:
    """Returns the verdict on a comparison.

    Args:
        result: The comparison.
        settings: ``margin`` is read.
    """
    margin = default_margin(result) if settings.margin is None else settings.margin
    return judge(result.comparison, metric=result.metric, mode=result.mode, margin=margin)


def default_margin(result: Result) -> float:
    """Returns one percent of the metric of ``32-true``, or of the static arm that ran first.

    Args:
        result: The comparison.
    """
    by_arm: dict[str, list[float]] = {}
    for run in result.comparison.runs:
        if run.final_metric is not None and math.isfinite(run.final_metric):
            by_arm.setdefault(run.arm, []).append(run.final_metric)
    values = by_arm.get(FP32) or next(iter(by_arm.values()), [1.0])
    return MARGIN_SHARE * (abs(statistics.fmean(values)) or 1.0)


def document(result: Result, verdict: Verdict) -> dict[str, Any]:
    """Returns everything that is known about a comparison, as JSON can hold it.

    Args:
        result: The comparison.
        verdict: What it says.
    """
    return {
        **result.comparison.to_dict(),
        "verdict": verdict.to_dict(),
        "summary": summary_line(verdict),
        "refused": result.refused,
        "notes": result.notes,
        "consistency": encoded(result.consistency),
    }


def write_report(result: Result, verdict: Verdict, folder: Path) -> None:
    """Writes ``comparison.json`` and ``comparison.png``.

    Args:
        result: The comparison.
        verdict: What it says.
        folder: The folder of the comparison.
    """
    write_json(folder / "comparison.json", document(result, verdict), allow_nan=False)
    draw(result.comparison, verdict, folder / "comparison.png")


def show_report(result: Result, verdict: Verdict, settings: CompareSettings, console: Console) -> None:
    """Prints the verdict, what could not run, and what a reader should know; the summary is the last line.

    Args:
        result: The comparison.
        verdict: What it says.
        settings: What was asked for.
        console: Where to print.
    """

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    render_table(verdict, console)
    for arm, why in result.refused.items():
        say(f"{arm} was not run: {why}")
    if settings.margin is None:
        say(f"Margin of {verdict.metric}: {verdict.margin:.3g}, 1% of the static metric; `--margin` sets another one.")
    if result.consistency is not None:
        say(_consistency_words(result.consistency))
    for note in result.notes:
        say(f"Note: {note}.")
    say(f"Written: {settings.out / 'comparison.json'}, {settings.out / 'comparison.png'}, {settings.out / 'logs'}/")
    say(summary_line(verdict))


def _consistency_words(row: dict[str, Any]) -> str:
    first, second = row["instructions"]
    if first == second:
        return (
            f"Consistency: both runs of {row['arm']} used {first}; this machine has no other instructions to compare."
        )
    loss, sqnr = row["largest_loss_difference"], row["output_sqnr_db"]
    losses = "no losses to compare" if loss is None else f"training losses differ by {loss:.3g} at most"
    outputs = "" if sqnr is None else f", outputs of the trained models have {sqnr:.1f} dB SQNR"
    return f"Consistency: {row['arm']} with seed {row['seed']} under {first} and {second}: {losses}{outputs}."
