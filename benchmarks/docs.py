"""The dated figures in docs/benchmarks.md, written by ``python -m benchmarks.train --write-docs``."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from benchmarks.figures import Findings, last_line
from benchmarks.report import as_markdown, machine_line, tables
from benchmarks.store import ROOT, circumstances

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"


def write_docs(findings: Findings, command: str, page: Path = PAGE) -> None:
    """Puts the tables of a run between the marks of the page.

    Args:
        findings: What was measured.
        command: What measured it.
        page: The page.

    Raises:
        ValueError: If the page has no marks.
    """
    put_between(page, BEGIN, END, _block(findings, command))


def put_between(page: Path, begin: str, end: str, block: str) -> None:
    """Replaces what stands between two lines of a page.

    Args:
        page: The page.
        begin: The line before.
        end: The line after.
        block: What stands there from now on.

    Raises:
        ValueError: If the page does not have both lines.
    """
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(end)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"Passed the page `{page}`. It must have the lines `{begin}` and `{end}`.")
    page.write_text(pattern.sub(lambda _: f"{begin}\n{block}\n{end}", text), encoding="utf-8")


def _block(findings: Findings, command: str) -> str:
    about = circumstances()
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    head = f"{datetime.date.today():%d %B %Y}, `{command}`, {about['processor']}, {about['cores']} cores, {versions}."
    parts = [head, machine_line(findings), *map(as_markdown, tables(findings)), f"`{last_line(findings.figures())}`"]
    return "\n\n".join(parts)
