"""Draws a report as one HTML file that holds all it needs: styles, data and plotly itself."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from autoprec.json_files import write_whole
from autoprec.report.page_data import Chart, Report, finite


def write_html(report: Report, path: str | Path) -> Path:
    """Writes a report as HTML.

    Args:
        report: The report.
        path: File to write; replaced if it exists, its folder is made if it does not.

    Returns:
        The file.

    Raises:
        ModuleNotFoundError: If the ``report`` extra is not installed.
    """
    path = Path(path)
    # a command line may hold bytes that are no text, which Python reads as halves of characters
    content = to_html(report).encode(errors="backslashreplace")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    return path


def to_html(report: Report) -> str:
    """Returns a report as HTML.

    Args:
        report: The report.

    Raises:
        ModuleNotFoundError: If the ``report`` extra is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"A report as HTML needs `{error.name}`. Run `pip install 'autoprec[report]'`.", name=error.name
        ) from error
    templates = resources.files("autoprec.report") / "templates"
    environment = Environment(
        loader=FileSystemLoader(os.fspath(str(templates))),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["with_code"] = _with_code
    figures = [
        finite(block.figure)
        for chapter in report.chapters
        for section in chapter.sections
        for block in section.blocks
        if isinstance(block, Chart)
    ]
    page: str = environment.get_template("page.html.j2").render(
        report=report,
        figures=figures,
        plotly=get_plotlyjs(),
        style=(templates / "page.css").read_text(encoding="utf-8"),
        script=(templates / "page.js").read_text(encoding="utf-8"),
    )
    return page


def _with_code(text: str) -> str:
    """Returns a text as HTML, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    if len(parts) % 2 == 0:  # one of them is alone
        return escape(text)
    return Markup("").join(
        Markup("<code>") + part + Markup("</code>") if i % 2 else part for i, part in enumerate(parts)
    )
