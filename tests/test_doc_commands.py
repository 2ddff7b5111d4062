"""Every command in README and docs is executed somewhere, or stands in a list with the reason why not.

`tests/doc_commands.yaml` says where. Commands in running text are not in it; they must exist all the same.

Time budget: 10 s.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from typing import Any

import pytest
import typer
import yaml

from autoprec import cli
from tests.doc_pages import PAGES, ROOT, commands, running_text

RUNNERS: dict[str, dict[str, str]] = {
    page: runners
    for page, runners in yaml.safe_load((ROOT / "tests" / "doc_commands.yaml").read_text()).items()
    if page in PAGES  # a page that is gone needs none
}
TARGETS = set(re.findall(r"^([\w.-]+(?: [\w.-]+)*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
TARGETS = {name for names in TARGETS for name in names.split()}
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_a_runner(page: str) -> None:
    known = RUNNERS.get(page, {})
    shown = commands(page)
    missing = [command for command in shown if command not in known]
    assert not missing, f"say in tests/doc_commands.yaml what runs these commands of {page}: {missing}"
    assert not set(known) - set(shown), f"{page} does not show these commands of tests/doc_commands.yaml any more"


@pytest.mark.parametrize("runner", sorted({runner for page in RUNNERS.values() for runner in page.values()}))
def test_runners_exist(runner: str) -> None:
    if runner.startswith("tests/"):
        path, _, name = runner.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), runner
    elif runner.startswith("make "):
        assert runner.removeprefix("make ") in TARGETS
    else:
        assert runner == "run" or re.fullmatch(r"not run: .{10,}", runner), runner


RUN_HERE = sorted({command for page in RUNNERS.values() for command, runner in page.items() if runner == "run"})


@pytest.mark.parametrize("command", RUN_HERE)
def test_commands_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def all_commands(page: str) -> list[str]:
    """Those in blocks and those in running text, except for patterns such as `make <target>`."""
    inline = re.findall(r"`((?:autoprec|make|pip|python) [^`]+)`", running_text(page))
    plain = [" ".join(text.split()) for text in inline]
    return [text for text in dict.fromkeys(commands(page) + plain) if not re.search(r"<\w|\.\.\.", text)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    wrong = {}
    for command in all_commands(page):
        words = [word for word in shlex.split(command, comments=True) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if (fault := fault_of(words)) is not None:
            wrong[command] = fault
    assert not wrong


def fault_of(words: list[str]) -> str | None:
    """What is wrong with a command, as far as that can be told without running it."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        unknown = [word for word in rest if "=" not in word and word not in TARGETS]
        return f"the Makefile has no {unknown}" if unknown else None
    if program == "python" and rest[0] == "-m":
        return None if importlib.util.find_spec(rest[1]) else f"there is no module {rest[1]}"
    if program == "python":
        is_ours = "/" in rest[0]  # `train.py` and the like are the reader's
        return f"there is no file {rest[0]}" if is_ours and not (ROOT / rest[0]).exists() else None
    if program == "pip":
        named = {extra for word in rest for extra in re.findall(r"[\w-]+", "".join(re.findall(r"\[(.*?)\]", word)))}
        unknown = sorted(named - EXTRAS - {"signatures"})  # jsonargparse's own
        return f"pyproject.toml has no extra {unknown}" if unknown else None
    return fault_of_words(rest) if program == "autoprec" else None


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(cli.build_app())


def fault_of_words(words: list[str]) -> str | None:
    """What the command line does not know of some words: a command, or an option of it."""
    command, depth = command_line(), 0
    while hasattr(command, "commands") and depth < len(words) and not words[depth].startswith("-"):
        if words[depth] not in command.commands:
            return f"there is no command {' '.join(words[: depth + 1])}"
        command, depth = command.commands[words[depth]], depth + 1
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    own = words[depth : words.index("--")] if "--" in words else words[depth:]
    unknown = [word for word in own if word.startswith("--") and word.partition("=")[0] not in known | {"--help"}]
    return f"`autoprec {' '.join(words[:depth])}` has no {unknown}" if unknown else None


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("make nothing", "the Makefile has no ['nothing']"),
        ("python -m benchmarks.nothing", "there is no module benchmarks.nothing"),
        ("python examples/nothing.py", "there is no file examples/nothing.py"),
        ("pip install '.[nothing]'", "pyproject.toml has no extra ['nothing']"),
        ("autoprec nothing", "there is no command nothing"),
        ("autoprec hardware --nothing", "`autoprec hardware` has no ['--nothing']"),
    ],
)
def test_faults_are_found(command: str, fault: str) -> None:
    assert fault_of(shlex.split(command)) == fault
