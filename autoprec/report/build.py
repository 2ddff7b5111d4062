"""From folders to a report."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from autoprec.report.folders import ReportError, chapter_of
from autoprec.report.page_data import Report
from autoprec.report.prices import Prices
from autoprec.version import __version__


def build(folders: str | Path | Iterable[str | Path], *, prices: Prices | None = None) -> Report:
    """Reads folders of runs, comparisons and sweeps.

    Args:
        folders: One folder or several; each becomes a chapter.
        prices: What time and energy cost; without them there are no amounts of money.

    Raises:
        ReportError: If there is no folder, or no report can be made of one.
    """
    paths = [Path(folders)] if isinstance(folders, (str, Path)) else [Path(folder) for folder in folders]
    if not paths:
        raise ReportError("Passed `build([])`. It needs one folder at least.")
    chapters = tuple(chapter_of(path, prices or Prices()) for path in paths)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return Report(chapters=chapters, made_at=now, made_by=f"autoprec {__version__}")
