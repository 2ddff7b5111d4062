"""For the site: links show titles in the place of file names, and sources of examples are put in.

``[guard.md](guard.md#memory)`` shows the title of that page, ``<!-- source: examples/gan.py -->`` the file. On a code
host both read well as they are.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[(?:\w+/)*(\w+\.md)\]\(((?:[\w.]+/)*\1)(#[\w-]+)?\)")
_SOURCE = re.compile(r"^<!-- source: (\S+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, **kwargs: Any) -> str:
    """Called by mkdocs with the text of each page."""
    folder, docs = posixpath.dirname(page.file.src_uri), Path(config["docs_dir"])
    return with_sources(with_titles(markdown, lambda target: title_of(docs / folder / target)), docs.parent)


def with_titles(markdown: str, title: Callable[[str], str]) -> str:
    """Returns a page with titles in the place of names of files."""
    return _LINK.sub(lambda each: f"[{title(each[2])}]({each[2]}{each[3] or ''})", markdown)


def title_of(path: Path) -> str:
    """Returns the first heading of a page, its name where there is none."""
    found = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else path.name


def with_sources(markdown: str, root: Path) -> str:
    """Returns a page with the files that it asks for."""
    return _SOURCE.sub(lambda each: f'```python title="{each[1]}"\n{(root / each[1]).read_text()}```', markdown)
