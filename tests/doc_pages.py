"""The pages that readers see, and what stands in them: links, headings, blocks of code, commands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(
    r"(?:^<!-- (?P<note>not run: .+?) -->\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)
_INDENTED = re.compile(r"(?:^\n|\A)((?:^    .*\n|^\n)+)", re.MULTILINE)
COMMANDS = ("autoprec", "git", "make", "optuna-dashboard", "pip", "promtool", "prometheus", "python", "pytest", "wandb")


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Args:
        text: What stands in it.
        note: Why it is not run, of the comment before it; empty if it is.
    """

    text: str
    note: str


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[Block]:
    """Fenced blocks of one language, in their order."""
    found = _FENCE.finditer(read(page))
    return [Block(each["text"], each["note"] or "") for each in found if each["language"] == language]


def commands(page: str) -> list[str]:
    """Shell commands in fenced and indented blocks, without what follows two spaces and a ``#``."""
    text = read(page)
    fenced = [
        line
        for language in ("sh", "bash", "console")
        for block in blocks(page, language)
        for line in block.text.splitlines()
    ]
    indented = [line.strip() for block in _INDENTED.findall(_FENCE.sub("", text)) for line in block.splitlines()]
    found = [re.sub(r"^\$ |\s+#.*$", "", line).strip() for line in fenced + indented]
    return [line for line in dict.fromkeys(found) if _program(line) in COMMANDS]


def running_text(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)


def _program(line: str) -> str:
    words = [word for word in line.split() if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    return words[0].removeprefix(".venv/bin/") if words else ""
