"""The code in README and docs runs as it stands there, and links lead somewhere.

Time budget: 40 s.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoprec import AutoPrecisionCallback
from tests.doc_pages import PAGES, ROOT, blocks, read, running_text
from tests.small_fits import Plain, loader, quiet

ELSEWHERE = {"docs/environments.md": "tests/test_training_env.py::test_the_code_in_the_docs_runs"}


def runnable(page: str) -> list[str]:
    return [block.text for block in blocks(page, "python") if not block.note]


@pytest.mark.filterwarnings("ignore::UserWarning")  # fits as a reader would start them
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page) and page not in ELSEWHERE])
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block in runnable(page):
        if page == "docs/usage.md" and "for decision in" in block:  # reads what a fit has left
            names["callback"] = callback = AutoPrecisionCallback("fixed:bf16", verbose=False)
            quiet(max_epochs=1, callbacks=[callback, names["asking"]]).fit(Plain(), loader())
            assert callback.history
        exec(compile(block, page, "exec"), names)


def test_a_block_that_is_not_run_says_why() -> None:
    for page in PAGES:
        text = read(page)
        assert len(re.findall("^<!-- not run: ", text, re.MULTILINE)) == sum(
            bool(block.note) for block in blocks(page, "python")
        ), page
        assert not re.search(r"^```\w+ ", text, re.MULTILINE), (
            f"{page}: the site shows no block with words after its kind"
        )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_own_controller_decides() -> None:
    names: dict[str, Any] = {}
    (block,) = [block for block in runnable("docs/usage.md") if "class LowerLast" in block]
    exec(block, names)
    callback: AutoPrecisionCallback = names["callback"]
    quiet(max_epochs=4, callbacks=[callback]).fit(Plain(), loader())
    assert callback.precision_map() == {"net.0": "fp32", "net.2": "bf16"}


def test_yaml_is_yaml() -> None:
    (block,) = blocks("docs/usage.md", "yaml")
    init_args = yaml.safe_load(block.text)["trainer"]["callbacks"][0]["init_args"]
    assert set(init_args) <= {"policy", "knobs", "interval", "config", "eval_precision", "history_file", "verbose"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", read(page)):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_lead_to_one(page: str) -> None:
    for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", read(page)):
        path = (ROOT / page).parent / target if target else ROOT / page
        titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert heading in slugs, f"{target}#{heading}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_lists_begin_after_an_empty_line(page: str) -> None:
    joined = re.findall(r"^(?!\s|- |\d+\. |$|\||<).+\n(?:- |\d+\. ).*", running_text(page), re.MULTILINE)
    assert not joined, f"the site runs these lists into the paragraph before: {joined}"
