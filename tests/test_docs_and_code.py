"""What the docs say of names, numbers and messages is what the code has.

Time budget: 10 s.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from functools import cache

import pytest

import autoprec
from autoprec import hardware, ops, report, sweep
from autoprec.formats import BF16, E4M3, E5M2, FP16, FP32, INT8, TF32
from tests.doc_pages import PAGES, ROOT, blocks, read

pytest.importorskip("stable_baselines3")  # sets an environment variable when it is imported, as environments do

API = [page for page in PAGES if page.startswith("docs/api/")]
DOCUMENTED = [name for page in API for name in re.findall(r"^::: (\S+)$", read(page), re.MULTILINE)]


# names


@pytest.mark.parametrize("module", [autoprec, ops, hardware, report, sweep], ids=lambda module: str(module.__name__))
def test_every_public_name_is_in_the_reference(module: object) -> None:
    prefix = module.__name__  # type: ignore[attr-defined]
    names = {f"{prefix}.{name}" for name in module.__all__ if not name.startswith("__")}  # type: ignore[attr-defined]
    assert not names - set(DOCUMENTED), "add them to a page of docs/api"


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_reference_names_what_there_is(name: str) -> None:
    assert pkgutil.resolve_name(name.rpartition(".")[0] + ":" + name.rpartition(".")[2]) is not None


def imported_names() -> set[str]:
    """What README, docs and examples import from the parts of autoprec that have pages of their own."""
    texts = [block.text for page in PAGES for block in blocks(page, "python")]
    texts += [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
    found = set()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("autoprec.envs", "autoprec.policies")
            ):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_what_readers_import_is_in_the_reference() -> None:
    names = imported_names()
    assert "autoprec.policies.network.PolicyNetwork" in names
    assert not names - set(DOCUMENTED), "add them to docs/api/envs.md or docs/api/policies.md"


def test_every_environment_is_in_the_reference() -> None:
    registered = importlib.import_module("autoprec.envs")._ENVIRONMENTS
    assert {entry.replace(":", ".") for entry in registered.values()} <= set(DOCUMENTED)
    assert all(f"`{name}`" in read("docs/api/envs.md") for name in registered)


# numbers


def test_the_table_of_formats_is_that_of_the_code() -> None:
    rows = [
        line.strip("| \n").split(" | ")[:6] for line in read("docs/numerics.md").splitlines() if line.startswith("| ")
    ]
    expected = [
        [f.name, str(f.exponent_bits), str(f.mantissa_bits), *(f"{v:.3g}" for v in (f.max, f.tiny, f.eps))]
        for f in (FP32, TF32, BF16, FP16, E4M3, E5M2, INT8)
    ]
    assert [row for row in rows if row[0] in {each[0] for each in expected} and len(row) == 6] == expected


# messages


@cache
def messages() -> list[str]:
    """Every text in the code, with ``<>`` where values are put in."""
    found = []
    for folder in ("autoprec", "envs", "policies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found += [template(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.expr)]
    return [plain(text) for text in dict.fromkeys(found) if len(text) > 10]


def template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return re.sub(r"\{\w+\}", "<>", node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "<>" for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        return left + right if left and right else ""
    if isinstance(node, ast.IfExp):
        return template(node.body) or "<>"
    return ""


def plain(text: str) -> str:
    return " ".join(re.sub(r"`?<[^<>]*>`?", "<>", text).split())


@pytest.mark.parametrize("text", [block.text.strip() for block in blocks("docs/troubleshooting.md", "text")])
def test_messages_are_those_of_the_code(text: str) -> None:
    assert any(plain(text) in message for message in messages()), plain(text)


def test_a_message_that_nobody_writes_is_noticed() -> None:
    assert not any(plain("autoprec: policy <name> has failed") in message for message in messages())


@pytest.mark.parametrize("text", re.findall(r"^\| `(the .+?)` \|", read("docs/precision.md"), re.MULTILINE))
def test_reasons_are_those_of_the_code(text: str) -> None:
    assert any(plain(text.removesuffix("...")) in message for message in messages()), text


def test_the_site_shows_every_page() -> None:
    navigation = set(re.findall(r": ([\w/]+\.md)$|- ([\w/]+\.md)$", read("mkdocs.yml"), re.MULTILINE))
    listed = {f"docs/{first or second}" for first, second in navigation}
    assert {page for page in PAGES if page.startswith("docs/")} <= listed


@pytest.mark.parametrize("page", API)
def test_every_page_of_the_reference_has_no_name_twice(page: str) -> None:
    names = re.findall(r"^::: (\S+)$", read(page), re.MULTILINE)
    assert len(names) == len(set(names)) > 0
