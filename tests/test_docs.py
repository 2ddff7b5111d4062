"""The code in README and docs runs as it stands there.

Time budget: 20 s.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoprec import AutoPrecisionCallback
from tests.small_fits import Plain, loader, quiet

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{name}.md"
        for name in ("behaviour", "compare", "environments", "hardware", "loggers", "policies", "usage")
    ),
]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::UserWarning")  # a fit with every default, as a reader would start
@pytest.mark.parametrize(
    "page", ["README.md", "docs/usage.md", "docs/hardware.md", "docs/loggers.md", "docs/policies.md"]
)
def test_python_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        if "for decision in" in block:  # reads what a fit has left
            names["callback"] = callback = AutoPrecisionCallback("fixed:bf16", verbose=False)
            quiet(max_epochs=1, callbacks=[callback, names["asking"]]).fit(Plain(), loader())
            assert callback.history
        exec(block, names)
    assert names


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_own_controller_decides() -> None:
    names: dict[str, Any] = {}
    (block,) = [block for block in blocks("docs/usage.md", "python") if "class LowerLast" in block]
    exec(block, names)
    callback: AutoPrecisionCallback = names["callback"]
    quiet(max_epochs=4, callbacks=[callback]).fit(Plain(), loader())
    assert callback.precision_map() == {"net.0": "fp32", "net.2": "bf16"}


def test_yaml_is_yaml() -> None:
    (block,) = blocks("docs/usage.md", "yaml")
    init_args = yaml.safe_load(block)["trainer"]["callbacks"][0]["init_args"]
    assert set(init_args) <= {"policy", "knobs", "interval", "config", "eval_precision", "history_file", "verbose"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_lead_to_one(page: str) -> None:
    for target, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert heading in slugs, f"{target}#{heading}"
