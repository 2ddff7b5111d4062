"""For the site: links that show the name of a file (``[guard.md](guard.md#memory)``) show the title of its page."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[(?:\w+/)*(\w+\.md)\]\(((?:[\w.]+/)*\1)(#[\w-]+)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **kwargs: Any) -> str:
    """Called by mkdocs with the text of each page."""
    folder, docs = posixpath.dirname(page.file.src_uri), Path(config["docs_dir"])
    return with_titles(markdown, lambda target: title_of(docs / folder / target))


def with_titles(markdown: str, title: Any) -> str:
    """Returns a page with titles in the place of names of files."""
    return _LINK.sub(lambda each: f"[{title(each[2])}]({each[2]}{each[3] or ''})", markdown)


def title_of(path: Path) -> str:
    """Returns the first heading of a page, its name where there is none."""
    found = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else path.name
