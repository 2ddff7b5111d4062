"""The parts that the site is built with: its picture, its links, its settings. `make docs` builds it.

Time budget: 2 s; the build, marked slow, 30 s.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.docs_hooks import title_of, with_sources, with_titles
from scripts.draw_step import BOXES, HEIGHT, TARGET, WIDTH, draw
from tests.doc_pages import ROOT, read


def test_the_picture_of_a_step_is_what_the_script_draws() -> None:
    assert TARGET.read_text() == draw(), "run python scripts/draw_step.py"
    root = ElementTree.fromstring(draw())
    assert root.tag.endswith("svg")
    assert all(box.left + box.width <= WIDTH and box.top + box.height <= HEIGHT for box in BOXES)
    # about 6.6 units a letter: no line is wider than its box
    assert all(len(line) * 6.6 <= box.width for box in BOXES for line in box.lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see [guard.md](guard.md#memory).", "see [T](guard.md#memory)."),
        ("([policies.md](../policies.md))", "([T](../policies.md))"),
        ("[api/index.md](api/index.md)", "[T](api/index.md)"),
        ("[the guard](guard.md)", "[the guard](guard.md)"),
        ("[guard.md](other.md)", "[guard.md](other.md)"),
    ],
)
def test_links_show_titles(text: str, expected: str) -> None:
    assert with_titles(text, lambda target: "T") == expected


def test_titles_are_first_headings() -> None:
    assert title_of(ROOT / "docs" / "guard.md") == "Guard and rollback"
    assert title_of(ROOT / "docs" / "nothing.md") == "nothing.md"


def test_sources_are_put_in() -> None:
    text = with_sources(read("docs/examples.md"), ROOT)
    assert "<!-- source" not in text
    assert f'```python title="examples/gan.py"\n{read("examples/gan.py")}```' in text


def test_docstrings_lose_their_roles() -> None:
    roles = pytest.importorskip("scripts.griffe_roles", exc_type=ImportError)
    text = "A :class:`~autoprec.action.Action` or :meth:`save_map`, ``[n]``."
    assert roles.without_roles("    Example:\n        >>> 1") == "    Examples:\n        >>> 1"
    assert roles.without_roles(text) == "A `Action` or `save_map`, ``[n]``."


def test_nothing_comes_from_elsewhere() -> None:
    settings = read("mkdocs.yml")
    assert re.search(r"^  font: false", settings, re.MULTILINE)
    assert not re.search(r"https?://", settings)
    assert "http" not in read("docs/assets/site.css")


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "how_it_works.html", "api/index.html", "troubleshooting.html"} <= set(pages)
    loaded = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?(?:https?:)?//|<link[^>]+href=["']?(?:https?:)?//"""
    )
    elsewhere = {name: found[0] for name, text in pages.items() if (found := loaded.search(text))}
    assert not elsewhere
    assert "class GAN" in re.sub("<[^>]+>", "", pages["examples.html"])
    assert "<!-- source" not in pages["examples.html"]
    assert ":class:" not in pages["api/index.html"]
    assert "guard.md</a>" not in pages["loss_scale.html"]
