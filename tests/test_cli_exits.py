"""What holds for every command: help with examples, exit codes, no traceback unless asked, completion.

Time budget: 15 s; the process that is interrupted is `slow` (20 s).
"""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from autoprec import cli
from autoprec.target_functions import PlainError

CHECKOUT = Path(__file__).parents[1]
COMMAND: Any = typer.main.get_command(cli.build_app())
NAMES = sorted(COMMAND.commands)
JSON = [name for name in NAMES if any("--json" in each.opts for each in COMMAND.commands[name].params)]


def words_for(name: str) -> list[str]:
    """The fewest words that a command takes."""
    words = [name]
    for parameter in COMMAND.commands[name].params:
        if parameter.required:
            words += ["target.py"] if parameter.param_type_name == "argument" else [parameter.opts[0], "value"]
    return words


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line, with the work of every command replaced by an error if one is given."""

    def call(*words: str, error: BaseException | None = None) -> tuple[int, str, str]:
        if error is not None:
            app = cli.build_app()
            for command in app.registered_commands:
                command.callback = _raising(command.callback, error)
            monkeypatch.setattr(cli, "build_app", lambda: app)
        code = cli.main(words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def _raising(callback: Any, error: BaseException) -> Any:
    @functools.wraps(callback)
    def work(*args: Any, **kwargs: Any) -> None:
        raise error

    return work


def test_every_command_but_version_has_json() -> None:
    assert set(NAMES) - set(JSON) <= {"version"}


@pytest.mark.parametrize("name", NAMES)
def test_help_has_examples(name: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run(name, "--help")
    assert (code, err) == (0, "")
    assert f"autoprec {name}" in out.split("Example")[1]


@pytest.mark.parametrize("name", NAMES)
def test_wrong_usage_ends_with_2(name: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run(*words_for(name), "--no-such-option")
    assert (code, out) == (2, "")
    assert "--no-such-option" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", NAMES)
def test_failed_work_ends_with_1_and_one_message(name: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run(*words_for(name), error=RuntimeError("the disk is on fire"))
    assert (code, out) == (1, "")
    assert err.startswith("RuntimeError: the disk is on fire\n")
    assert "--traceback" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_ends_with_130(name: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run(*words_for(name), error=KeyboardInterrupt())
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_ctrl_c_that_lightning_has_turned_into_an_end(run: Callable[..., tuple[int, str, str]]) -> None:
    end = SystemExit(1)
    end.__context__ = KeyboardInterrupt()
    assert run("doctor", error=end)[0] == 130


def test_ctrl_c_before_there_is_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "build_app", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"


@pytest.mark.parametrize("words", [["--traceback", "doctor"], ["doctor", "--traceback"], ["doctor"]])
def test_a_traceback_on_request(
    words: list[str], run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--traceback" not in words:
        monkeypatch.setenv("AUTOPREC_TRACEBACK", "1")
    code, _, err = run(*words, error=ValueError("why"))
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert err.endswith("ValueError: why\n")


def test_an_encoding_that_lacks_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # rich cuts names of options with an ellipsis
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["apply", "--help"]) == 0
    stream.flush()
    assert b"--checkpoint" in stream.buffer.getvalue()


def test_words_of_the_target_stay_its_own() -> None:
    words = ["compare", "train.py", "--", "--traceback"]
    assert cli._without_traceback(words) == (words, False)
    assert cli._without_traceback(["compare", "--traceback", "a", "--", "b"]) == (["compare", "a", "--", "b"], True)


def test_messages_that_say_all_stand_alone(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("doctor", error=PlainError("Passed 1. It must be 2."))[2] == "Passed 1. It must be 2.\n"


def test_a_missing_module_names_its_extra(run: Callable[..., tuple[int, str, str]]) -> None:
    error = ModuleNotFoundError("No module named 'optuna.storages'", name="optuna.storages")
    code, _, err = run("doctor", error=error)
    assert code == 1
    assert "needs `optuna.storages`" in err
    assert "pip install '.[sweep]'" in err


def test_completion_of_names(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_AUTOPREC_COMPLETE": "complete_bash", "COMP_WORDS": "autoprec ca", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    code, out, _ = run()
    assert (code, out.split()) == (0, ["calibrate"])


def test_completion_can_be_installed(run: Callable[..., tuple[int, str, str]]) -> None:
    out = run("--help")[1]
    assert "--install-completion" in out
    assert "--show-completion" in out


TARGET = """
import time, torch, lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)
    def training_step(self, batch, index):
        print("stepping", flush=True)
        time.sleep(0.2)
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def build():
    return Module(), torch.utils.data.DataLoader(torch.randn(4000, 64), batch_size=8), {"max_epochs": 1}
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sends signals")
def test_an_interrupted_process_says_where_results_are(tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text(TARGET)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "AUTOPREC_CACHE_DIR": str(tmp_path / "cache")}
    words = [sys.executable, "-m", "autoprec", "calibrate", "target.py:build", "--steps", "4000", "--json"]
    words += ["--formats", "fp32"]  # nothing to choose from, so that the fit goes on
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    assert process.stderr is not None
    while "stepping" not in (line := process.stderr.readline()):
        assert line or process.poll() is None, "it ended before its first step"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert f"is in `{tmp_path / 'cache'}`" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", sorted(set(JSON) & {"doctor", "hardware"}))
def test_json_is_all_of_standard_output(name: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run(name, "--json")
    assert code == 0
    assert json.loads(out)
