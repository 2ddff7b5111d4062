"""The command line, in this process where it can be, in another where its end is the point.

Time budget: 30 s; the demo from end to end and its interruption are `slow` (60 s).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autoprec import __version__, cli
from autoprec.commands import (
    apply,
    calibrate,
    compare,
    demo,
    doctor,
    evaluate_policy,
    extras,
    hardware,
    monitoring,
    report,
    sweep,
    train_policy,
)
from autoprec.commands.time_left import TimeLeft
from autoprec.compare.turns import MIN_ROUNDS, RunError
from autoprec.demo import run
from autoprec.demo.results import ENOUGH_ROUNDS
from autoprec.demo.tasks import INTERVAL, gpt_task

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported, as examples do

CHECKOUT = Path(__file__).parents[1]
LAST_LINE = re.compile(
    r"demo: gpt_step_ratio=(\d+\.\d{3}|nan) gpt_loss_diff=-?\d+\.\d{4}"
    r" cnn_step_ratio=(\d+\.\d{3}|nan) cnn_loss_diff=-?\d+\.\d{4} skipped=\d+ seconds=\d+"
)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def start(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "80"}
    command = [sys.executable, "-m", "autoprec", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert "Trainer(callbacks=[AutoPrecisionCallback()])" in out
    assert all(command in out for command in ("demo", "compare", "doctor", "version"))
    assert "batch size" not in out  # not a knob yet


def test_help_of_demo_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "demo", "--help")
    assert code == 0
    assert "autoprec demo --quick" in out
    assert all(option in out for option in ("--out", "--minutes", "--threads"))
    text = " ".join(out.split())
    warmup = gpt_task().warmup
    assert f"AutoPrecisionCallback(interval={INTERVAL})" in text
    assert f"leaves out the first {warmup} steps of each run" in text
    assert f"Whole run is the sum of all steps, those {warmup} included" in text
    assert f"Fewer than {ENOUGH_ROUNDS} rounds give n/a" in text
    assert f"{MIN_ROUNDS} rounds are made" in re.sub(r"[│ ]+", " ", text)
    assert not re.search(r"\b(arms?|steered)\b", text)


@pytest.mark.parametrize("words", [["version"], ["--version"]])
def test_version(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert out == f"autoprec {__version__}\n"


@pytest.mark.parametrize(
    "words", [["dmo"], ["demo", "--threads", "0"], ["demo", "--minutes", "soon"], ["demo", "--minutes", "0.1"]]
)
def test_bad_words_end_with_code_2(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, _, err = call(capsys, *words)
    assert code == 2
    assert "Error" in err


def test_without_typer_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    code, out, err = call(capsys, "--help")
    assert (code, out) == (1, "")
    assert "needs `typer`" in err
    assert "pip install '.[cli]'" in err


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, below: str
) -> None:
    monkeypatch.setattr(run, "run_demo", lambda *arguments: pytest.fail("the demo began"))
    (tmp_path / "file").write_text("in the way")
    code, out, err = call(capsys, "demo", "--out", str(tmp_path / "file" / below))
    assert (code, out) == (2, "")
    assert "--out" in err
    assert "Traceback" not in err


def test_module_runs_as_the_command() -> None:
    out, err = (process := start("version")).communicate()
    assert (process.returncode, out) == (0, f"autoprec {__version__}\n"), err


def test_demo_says_at_once_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "cli", ("typer", "no_such_module"))
    code, _, err = call(capsys, "demo")
    assert code == 1
    assert "needs no_such_module. Run `pip install '.[cli]'` in a checkout" in err


def test_demo_that_fails_ends_with_code_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: run.DemoSettings, console: object) -> None:
        raise RunError(f"The run gpt/autoprec/seed 0 failed with {settings.threads} threads")

    monkeypatch.setattr(run, "run_demo", fail)
    code, _, err = call(capsys, "demo", "--threads", "3")
    assert code == 1
    assert err == "The run gpt/autoprec/seed 0 failed with 3 threads\n"


def example(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> Callable[[], None]:
    monkeypatch.setattr(sys, "argv", [name, *words])
    specification = importlib.util.spec_from_file_location(name, CHECKOUT / "examples" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    main: Callable[[], None] = module.main
    return main


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("gpt_source", ("--steps", "0"), "--steps is 0, and at least 1 is needed"),
        ("gpt_source", ("--layers", "-1"), "--layers is -1, and at least 1 is needed"),
        ("gpt_source", ("--width", "16"), "--width is 16, and a multiple of 32"),
        ("digits_cnn", ("--epochs", "0"), "--epochs is 0, and at least 1 is needed"),
        ("surviving_run", ("--epochs", "3"), "--epochs is 3, and at least 4 are needed"),
    ],
)
def test_examples_name_bad_arguments(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as stop:
        example(name, monkeypatch, *words)()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "expected"), [("3", "the first is due after 10 steps"), ("12", "the last decisions:")]
)
def test_example_says_when_no_decision_was_due(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, steps: str, expected: str
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # the example sets both
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    example("gpt_source", monkeypatch, "--steps", steps, "--width", "32", "--layers", "1", "--context", "16")()
    assert expected in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::UserWarning")  # each blow is announced
def test_example_survives(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    example("surviving_run", monkeypatch, "--epochs", "4")()
    out = capsys.readouterr().out
    for line in (
        "batch_size 32 -> 64: epoch 1",
        "rollback 60 -> 45: guard: net.0.weight is not finite",
        "batch_size 256 -> 128: out of memory with 256 samples",
        "batch size at the end: 128",
        "lost to memory: 1 window, 798 samples",
        "optimizer steps: applied 69 undone 15 skipped 1",
    ):
        assert line in out
    assert "nan" not in out.splitlines()[-1]


@pytest.mark.slow
def test_quick_demo_from_end_to_end(tmp_path: Path) -> None:
    out, err = (process := start("demo", "--quick", "--threads", "1", "--out", str(tmp_path / "out"))).communicate()
    assert process.returncode == 0, err
    assert out.startswith("autoprec demo: no new round after 6 minutes.")
    assert "of fewer than 5 no ratio is made" in " ".join(out.split())
    assert LAST_LINE.fullmatch(out.splitlines()[-1])
    assert "step_ratio=nan" in out.splitlines()[-1]
    document = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert document["threads"] == 1
    assert {run["arm"] for run in document["runs"]} == {"32-true", "bf16-mixed", "autoprec"}
    assert all(run["done"]["applied_steps"] == 12 for run in document["runs"] if run["arm"] != "autoprec")
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    process = start("demo", "--out", str(tmp_path / "out"))
    log = tmp_path / "out" / "logs" / "gpt-autoprec-0.log"
    until = time.monotonic() + 60
    while not log.exists() and time.monotonic() < until:
        time.sleep(0.1)
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert len(started) >= 4
    assert process.returncode != 0
    until = time.monotonic() + 10
    while any(Path(f"/proc/{one}").exists() for one in started) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [one for one in started if Path(f"/proc/{one}").exists()]


def descendants(process: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    below = {process}
    while len(more := below | {child for child, parent in parents.items() if parent in below}) > len(below):
        below = more
    return sorted(below - {process})


@pytest.mark.parametrize(
    "text",
    [
        apply._HELP,
        calibrate._HELP,
        compare._HELP,
        demo._HELP,
        doctor._HELP,
        evaluate_policy._HELP,
        hardware._HELP,
        monitoring._HELP,
        report._HELP,
        sweep._HELP,
        train_policy._HELP,
    ],
    ids=[
        "apply",
        "calibrate",
        "compare",
        "demo",
        "doctor",
        "evaluate-policy",
        "hardware",
        "monitoring",
        "report",
        "sweep",
        "train-policy",
    ],
)
def test_examples_fit_into_a_terminal_of_80_columns(text: str) -> None:
    examples = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert examples
    assert max(map(len, examples)) <= 76, max(examples, key=len)


def test_time_left_goes_by_what_was_not_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("autoprec.commands.time_left.time.monotonic", lambda: now)
    left = TimeLeft()
    assert left.text(64, 256) == ""  # how long these took is not known
    now = 32.0
    assert left.text(128, 256) == ", about 64 s left"
    now = 1000.0
    assert left.text(192, 256) == ", about 8 min left"
    assert left.text(256, 256) == ""
