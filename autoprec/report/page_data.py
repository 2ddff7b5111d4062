"""What a report says, as plain data: chapters of sections of texts, tables and charts. Nothing here draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Tone: TypeAlias = Literal["good", "plain", "bad"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a table.

    Args:
        text: What it says.
        detail: A second, smaller line: an interval, a name.
        is_best: Whether it is the best of its column.
    """

    text: str
    detail: str = ""
    is_best: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table.

    Args:
        columns: Headings; the first column is on the left, the others are numbers on the right.
        rows: Cells of each row.
        caption: What a reader should know.
        left: Further columns that hold words, by index.
        is_folded: Whether it is shown on demand only.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    left: tuple[int, ...] = ()
    is_folded: bool = False
    kind: Literal["table"] = "table"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A figure for plotly.

    Args:
        title: Its heading.
        figure: ``data`` and ``layout``; numbers that are not finite are gaps.
        caption: What it shows, for those who do not see it as well.
        height: In pixels.
        is_wide: Whether it takes the whole width.
    """

    title: str
    figure: Mapping[str, Any]
    caption: str = ""
    height: int = 300
    is_wide: bool = False
    kind: Literal["chart"] = "chart"


@dataclass(frozen=True, kw_only=True)
class Text:
    """Sentences.

    Args:
        lines: One paragraph each, or one point each of a list.
        is_list: Whether it is a list.
    """

    lines: tuple[str, ...]
    is_list: bool = False
    kind: Literal["text"] = "text"


@dataclass(frozen=True, kw_only=True)
class Code:
    """Text to copy.

    Args:
        text: The text.
        title: What it is.
        is_folded: Whether it is shown on demand only.
    """

    text: str
    title: str = ""
    is_folded: bool = False
    kind: Literal["code"] = "code"


Block: TypeAlias = Table | Chart | Text | Code


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a chapter.

    Args:
        name: Names it inside of its chapter, in links.
        title: Its heading.
        blocks: What it holds.
    """

    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """What a report says about one folder.

    Args:
        title: Its heading.
        kind: ``run``, ``comparison`` or ``sweep``.
        folder: Where it was read.
        headline: The answer in a sentence.
        tone: Whether that is good or bad news.
        facts: Labels and values at its top.
        sections: Its parts.
    """

    title: str
    kind: Literal["run", "comparison", "sweep"]
    folder: str
    headline: str
    tone: Tone = "plain"
    facts: tuple[tuple[str, str], ...] = ()
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report.

    Args:
        chapters: One for each folder.
        made_at: The moment, for people.
        made_by: Name and version of what made it.
    """

    chapters: tuple[Chapter, ...]
    made_at: str = ""
    made_by: str = ""

    @property
    def title(self) -> str:
        """Title of the page."""
        return f"{self.chapters[0].title}: autoprec report" if len(self.chapters) == 1 else "autoprec report"

    def to_dict(self) -> dict[str, Any]:
        """Returns what strict JSON can hold: everything but the figures, which are drawings of the rest."""
        return _without_figures(finite(asdict(self)))


@dataclass
class Blocks:
    """Collects the parts of a chapter that have something to say."""

    sections: list[Section] = field(default_factory=list)

    def add(self, name: str, title: str, *blocks: Block | None) -> None:
        """Adds a section, unless all of its blocks are missing.

        Args:
            name: Names it in links.
            title: Its heading.
            blocks: What it holds.
        """
        kept = tuple(block for block in blocks if block is not None)
        if kept:
            self.sections.append(Section(name=name, title=title, blocks=kept))


def finite(value: Any) -> Any:
    """Returns a value as strict JSON can hold it: numbers that are not finite become ``None``.

    Args:
        value: Mappings, sequences, strings, numbers, ``None``.
    """
    if isinstance(value, Mapping):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_figures(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_figures(entry) for key, entry in value.items() if key != "figure"}
    return [_without_figures(entry) for entry in value] if isinstance(value, list) else value
