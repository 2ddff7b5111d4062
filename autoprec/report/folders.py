"""Finds out what a folder holds and makes its chapter; says what it needs where it holds nothing that it knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autoprec.compare.records import Comparison
from autoprec.compare.store import slug
from autoprec.compare.verdict import judge
from autoprec.report.comparison_chapter import ComparisonData, comparison_chapter
from autoprec.report.page_data import Chapter
from autoprec.report.prices import Prices
from autoprec.report.run_chapter import run_chapter
from autoprec.report.sweep_chapter import Sweep, sweep_chapter
from autoprec.run_record import RUN, RecordError, RunRecord, is_record, read_record

COMPARISON, FRONT = "comparison.json", "pareto.json"
_INNER = "autoprec"  # where `record=True` puts the record in the log folder


class ReportError(ValueError):
    """No report can be made of a folder; the message says why and what to do."""


def chapter_of(folder: Path, prices: Prices) -> Chapter:
    """Returns the chapter on a folder.

    Args:
        folder: The folder.
        prices: What time and energy cost.

    Raises:
        ReportError: If it holds nothing that a report can be made of.
    """
    if not folder.is_dir():
        what = "is a file; pass the folder that it is in" if folder.exists() else "does not exist"
        raise ReportError(f"`{folder}` {what}.")
    try:
        if (folder / COMPARISON).is_file():
            return comparison_chapter(read_comparison(folder), prices)
        if (folder / FRONT).is_file():
            return _sweep(folder)
        if is_record(folder):
            return run_chapter(read_record(folder), prices)
        if is_record(folder / _INNER):
            return run_chapter(read_record(folder / _INNER), prices)
    except RecordError as error:
        raise ReportError(str(error)) from error
    raise ReportError(_unknown(folder))


def _unknown(folder: Path) -> str:
    if (folder / "demo.json").is_file():
        return (
            f"`{folder}` holds results of `autoprec demo`, whose picture is `{folder / 'demo.png'}`. For a report of"
            " the same models run `autoprec compare autoprec.demo.targets:gpt`."
        )
    if (folder / "sweep.yaml").is_file():
        return f"`{folder}` holds a sweep that has no `{FRONT}` yet. Let `autoprec sweep` end a trial first."
    if (folder / "settings.json").is_file() and (folder / "runs").is_dir():
        return (
            f"`{folder}` holds a comparison without `{COMPARISON}`: no run has ended. Run the same `autoprec compare`"
            " again to go on."
        )
    found = sorted({path.parent for name in (RUN, COMPARISON, FRONT) for path in folder.glob(f"*/{name}")})
    hint = f" Did you mean {', '.join(f'`{path}`' for path in found[:5])}?" if found else ""
    return (
        f"`{folder}` holds nothing that a report can be made of. It must be a folder with `{RUN}` (of"
        f" `AutoPrecisionCallback(record=True)`), `{COMPARISON}` (of `autoprec compare`) or `{FRONT}` (of `autoprec"
        f" sweep`).{hint}"
    )


def read_comparison(folder: Path) -> ComparisonData:
    """Returns what the folder of a comparison holds.

    Args:
        folder: The folder.

    Raises:
        ReportError: If ``comparison.json`` is damaged or of another version.
    """
    document = _document(folder / COMPARISON)
    try:
        comparison = Comparison.from_dict(document)
        told = document["verdict"]
        verdict = judge(
            comparison,
            metric=told["metric"],
            mode=told["mode"],
            margin=told["margin"],
            confidence=told["confidence"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"`{folder / COMPARISON}` cannot be used: {error}") from error
    return ComparisonData(
        folder=folder,
        comparison=comparison,
        verdict=verdict,
        refused={str(arm): str(why) for arm, why in dict(document.get("refused") or {}).items()},
        notes=[str(note) for note in document.get("notes") or ()],
        records=_records(folder, comparison),
    )


def _records(folder: Path, comparison: Comparison) -> dict[str, RunRecord]:
    """Record of the first seed of each arm that has one which can be read."""
    found: dict[str, RunRecord] = {}
    for run in comparison.runs:
        path = folder / "records" / slug(run.arm, run.seed)
        if run.arm not in found and is_record(path):
            try:
                found[run.arm] = read_record(path)
            except RecordError:  # the comparison stands without it
                continue
    return found


def _sweep(folder: Path) -> Chapter:
    try:
        sweep = Sweep.model_validate(_document(folder / FRONT))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ReportError(f"`{folder / FRONT}` cannot be used: {where}: {first['msg']}.") from error
    return sweep_chapter(sweep, folder, _text(folder / "best.yaml"), _text(folder / "sweep.yaml"))


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"`{path}` cannot be read: {error}.") from error


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
