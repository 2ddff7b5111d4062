"""Comparisons of a small training, in processes of their own.

Time budget: 90 s (about forty processes forked from one server); what is stopped and goes on is `slow` (60 s).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec import cli
from autoprec.compare.checks import notes_of
from autoprec.compare.settings import with_defaults
from autoprec.compare.store import Store, Stored
from autoprec.hardware import native_formats
from tests.compared import run_beside_another, write_training
from tests.comparisons import arm_runs

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported

CHECKOUT = Path(__file__).parents[1]
ARMS = "32-true,bf16-mixed"
LAST_LINE = re.compile(r"compare: task=\w+ best_static=\S+ step_ratio=(nan|\d+\.\d{3}) loss_diff=\S+ verdict=.+")


@pytest.fixture(autouse=True)
def _training(tmp_path: Path) -> None:
    write_training(tmp_path)


class Shell:
    """Calls the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.code, self.out, self.err = 0, "", ""

    def __call__(self, target: str, *words: str, arms: str = ARMS, seeds: int = 1, out: str = "out") -> dict[str, Any]:
        options = ["--arms", arms, "--seeds", str(seeds), "--out", out, "--interval", "3"]
        before, _, after = " ".join(words).partition("-- ")
        self.code = cli.main(["compare", target, *options, *before.split(), *(["--", *after.split()] if after else [])])
        captured = self._capsys.readouterr()
        self.out, self.err = captured.out, captured.err
        path = Path(out) / "comparison.json"
        return dict(json.loads(path.read_text())) if path.exists() and self.code == 0 else {}


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def losses_of(run: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in run["steps"]]


# what comes out


def test_a_function_from_end_to_end(shell: Shell) -> None:
    document = shell("training.py:build", "--consistency", arms="32-true,bf16-mixed,16-mixed,autoprec", seeds=2)
    assert shell.code == 0, shell.err
    assert LAST_LINE.fullmatch(shell.out.splitlines()[-1]), shell.out
    assert "16-mixed was not run: fp16 is not native on cpu" in shell.out
    runs = {(run["arm"], run["seed"]): run for run in document["runs"]}
    assert set(runs) == {(a, s) for a in ("32-true", "bf16-mixed", "autoprec") for s in (0, 1)} | {("autoprec@avx2", 0)}
    for run in runs.values():
        assert run["error"] is None
        assert len(run["steps"]) == 16
        assert all(step["step_ms"] > 0 for step in run["steps"])
        assert [found["step"] for found in run["evaluations"]] == [8, 16]
        assert run["final_metric"] == run["evaluations"][-1]["metrics"]["val_loss"]
        assert set(run["evaluations"][-1]["metrics"]) == {"val_loss", "val_accuracy", "train_loss"}
        assert run["peak_bytes"] is None or run["peak_bytes"] >= 0
        assert run["environment"]["threads"] == "1"
    # the same seed: the same weights and batches; another one: others
    assert losses_of(runs["32-true", 0])[0] == pytest.approx(losses_of(runs["bf16-mixed", 0])[0], abs=0.02)
    assert losses_of(runs["32-true", 0])[0] == losses_of(runs["autoprec", 0])[0]
    assert losses_of(runs["32-true", 0]) != losses_of(runs["32-true", 1])
    assert runs["32-true", 0]["formats"] == {}
    assert set(runs["autoprec", 0]["formats"]) == {"net.0", "net.3"}
    assert runs["32-true", 0]["fidelity"] is None
    assert 0 <= runs["bf16-mixed", 0]["fidelity"]["kl"] < 0.1
    assert runs["bf16-mixed", 0]["fidelity"]["rows"] == 32
    assert document["consistency"]["arm"] == "autoprec"
    assert document["consistency"]["largest_loss_difference"] < 0.1
    assert "Consistency: " in shell.out
    assert all("left every layer in fp32" in note for note in document["notes"]), document["notes"]  # they are small
    assert not any(Path("out/work").iterdir())


def test_json_is_all_that_is_printed(shell: Shell) -> None:
    document = shell("training.py:build", "--json", "--steps", "4", arms="32-true")
    assert json.loads(shell.out) == document
    assert "32-true  seed 0" in shell.err


def test_a_script_and_what_was_changed(shell: Shell) -> None:
    document = shell("script.py", "-- --epochs 2")
    assert shell.code == 0, shell.err
    for change in (
        "32-true: seed_everything(7) gives the seed of the run",
        "32-true: Trainer 1: precision='bf16-mixed' -> '32-true'",
        "32-true: Trainer 1: ModelCheckpoint writes into the folder of the run",
        "32-true: Trainer 1: taken out: TQDMProgressBar",
    ):
        assert change in shell.out
    assert "Note: the target fits 2 times; the first fit is compared." in shell.out
    assert [len(run["steps"]) for run in document["runs"]] == [16, 16]
    fits = json.loads(Path("out/runs/32-true-seed0.json").read_text())["extra"]["fits"]
    assert [fit["steps"] for fit in fits] == [16, 8]
    assert not Path("users_logs").exists()
    assert not Path("users_checkpoints").exists()


def test_a_config(shell: Shell) -> None:
    document = shell("config.yaml", "--steps", "5")
    assert [len(run["steps"]) for run in document["runs"]] == [5, 5]
    # runs are cut, and validated where they end
    assert [found["step"] for found in document["runs"][0]["evaluations"]] == [5]


def test_steps_are_windows(shell: Shell) -> None:
    document = shell("training.py:accumulating", arms="32-true")
    assert len(document["runs"][0]["steps"]) == 6  # 8 batches in windows of 3, twice
    assert all(0.1 < loss < 5 for loss in losses_of(document["runs"][0]))  # not divided by 3


@pytest.mark.slow
def test_without_validation_the_training_loss_is_compared(shell: Shell) -> None:
    document = shell("training.py:no_validation")
    assert document["verdict"]["metric"] == "train_loss"
    assert any("no validation" in note for note in document["notes"])
    run = document["runs"][0]
    assert run["final_metric"] == pytest.approx(sum(losses_of(run)) / 16)
    assert run["fidelity"] is None


@pytest.mark.slow
def test_dropout_does_not_change_the_order_of_samples(shell: Shell) -> None:
    shell("training.py:build", "-- dropout=0.5")
    digests = [json.loads(path.read_text())["extra"]["batches"] for path in Path("out/runs").iterdir()]
    assert len(digests) == 2
    assert len(digests[0]) == 16
    assert digests[0] == digests[1]
    assert digests[0][:8] != digests[0][8:]


# what fails


@pytest.mark.slow
def test_an_arm_that_lightning_refuses_is_a_result(shell: Shell) -> None:
    document = shell("training.py:clash")
    assert shell.code == 0
    assert "does not allow for gradient clipping" in document["refused"]["bf16-mixed"]
    assert [run["arm"] for run in document["runs"]] == ["32-true"]


def test_an_arm_that_crashes_is_a_result(shell: Shell) -> None:
    document = shell("training.py:crashing")
    assert shell.code == 0
    static, mixed = document["runs"]
    assert static["error"] is None
    assert mixed["error"] == "failed after step 4: ZeroDivisionError: the module broke"
    assert len(mixed["steps"]) == 4
    assert "ZeroDivisionError" in Path("out/logs/bf16-mixed-seed0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("error", ["EOFError", "ConnectionResetError"])
def test_what_fails_after_the_first_fit_costs_no_result(shell: Shell, error: str) -> None:
    """These errors may come from the user's files and loaders as well as from the pipe to this process."""
    imports = "import lightning.pytorch as pl\nfrom training import Net, loaders"
    fit = f"{imports}\npl.Trainer(max_epochs=1).fit(Net(), *loaders())"
    Path("ends_badly.py").write_text(f"{fit}\nraise {error}('no more')\n")
    document = shell("ends_badly.py", arms="32-true")
    assert shell.code == 0
    assert [run["error"] for run in document["runs"]] == [None]
    assert f"after its first fit the target failed with {error}: no more" in shell.out


def test_an_arm_that_diverges_is_a_result(shell: Shell) -> None:
    document = shell("training.py:exploding")
    assert shell.code == 0
    for run in document["runs"]:
        assert run["error"] == "diverged: the training loss is not finite from step 3 on"
        assert math.isnan(float(run["steps"][-1]["loss"]))


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("empty.py", 2, "`empty.py` ended and makes no Trainer"),
        ("no_fit.py", 2, "`no_fit.py` ended and has no `Trainer.fit` that takes a step"),
        ("training.py:only_a_module", 2, "It must return (LightningModule, data, Trainer arguments)"),
        ("missing.module:build", 2, "There is no module `missing`"),
        ("raising.py", 1, "No arm of `raising.py` ran.\n  32-true: KeyError: 'lost'"),
        ("cut_off.py", 1, "No arm of `cut_off.py` ran.\n  32-true: EOFError: Ran out of input"),
        ("missing.py", 2, "There is no file `missing.py`"),
    ],
)
def test_what_cannot_be_trained_is_named(shell: Shell, target: str, code: int, message: str) -> None:
    Path("empty.py").write_text("print('nothing')\n")
    Path("no_fit.py").write_text("import lightning.pytorch as pl\npl.Trainer(logger=False)\n")
    Path("raising.py").write_text("{}['lost']\n")
    Path("cut_off.py").write_text("import pickle\npickle.loads(b'')\n")
    shell(target, arms="32-true")
    assert shell.code == code
    assert re.sub(r"[│\s]+", " ", message) in re.sub(r"[│\s]+", " ", shell.err)
    assert "Traceback" not in shell.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "Passed `--steps 0`"),
        (["--minutes", "0"], "Passed `--minutes 0`"),
        (["--margin", "0"], "Passed `--margin 0`"),
        (["--mode", "lowest"], "Passed `--mode lowest`"),
    ],
)
def test_bad_options(shell: Shell, words: list[str], message: str) -> None:
    shell("training.py:build", *words)
    assert shell.code == 2
    assert message in shell.err
    assert not Path("out").exists()


def test_a_metric_that_was_not_logged_is_named(shell: Shell) -> None:
    shell("training.py:build", "--steps", "2", "--metric", "val_auc", arms="32-true")
    assert shell.code == 2
    assert "The runs logged train_loss, val_accuracy, val_loss" in shell.err
    document = shell("training.py:build", "--steps", "2", "--metric", "val_accuracy", arms="32-true")
    assert document["verdict"]["mode"] == "max"  # the stored run is judged anew


# what runs have in common


def test_other_batches_are_noticed(shell: Shell) -> None:
    document = shell("training.py:unsteady")
    assert any("read different batches from batch" in note for note in document["notes"])


@pytest.mark.slow
def test_equal_seeds_are_noticed(shell: Shell) -> None:
    document = shell("training.py:own_seed", arms="32-true", seeds=2)
    assert any("seeds 0, 1 gave the same losses" in note for note in document["notes"])


def test_why_layers_stayed_in_fp32(shell: Shell) -> None:
    (note,) = shell("training.py:build", "--steps", "12", arms="autoprec")["notes"]
    assert note.startswith("autoprec left every layer in fp32 for all 12 steps")
    if "bf16" in native_formats(torch.device("cpu")):
        assert ". Of its layers 2 have formats that are not offered to policies (net.0: bf16 cannot pay below" in note
    assert shell("training.py:build", "--steps", "3", arms="autoprec", out="shorter")["notes"] == [
        "autoprec left every layer in fp32 for all 3 steps; a smaller `--interval` decides earlier"
    ]


def test_decisions_that_come_late_are_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", {})
    (run,) = arm_runs("autoprec", 5.0, 1.0, seeds=1, steps=12, formats={"net.0": "bf16"})
    for first, count in ((7, 1), (2, 0)):
        store.add(Stored(run, {"first_change": first}))
        notes = notes_of(store, [run])
        assert len(notes) == count
        assert all("autoprec lowered its first layer after 7 of 12 steps" in note for note in notes)


def test_the_users_own_callback(shell: Shell) -> None:
    document = shell("training.py:with_callback", arms="32-true,autoprec")
    assert "32-true: Trainer 1: taken out: the AutoPrecisionCallback of the target" in shell.out
    assert "autoprec: Trainer 1: kept: the AutoPrecisionCallback and the precision of the target" in shell.out
    static, steered = document["runs"]
    assert static["formats"] == {}
    assert set(steered["formats"]) == {"net.0", "net.3"}


# what is stored


def test_only_what_is_missing_runs(shell: Shell) -> None:
    shell("training.py:build", "--steps", "4", arms="32-true")
    first = Path("out/runs/32-true-seed0.json")
    written = first.stat().st_mtime_ns
    document = shell("training.py:build", "--steps", "4", seeds=2)
    assert first.stat().st_mtime_ns == written
    assert "1 runs are stored in `out`" in shell.out
    assert len(document["runs"]) == 4


def test_another_target_is_refused(shell: Shell) -> None:
    words = ("training.py:build", "--steps", "4")
    shell(*words, arms="32-true")
    for changed, message in (((*words[:2], "5"), "steps was 4 and is 5"), (words, "training.py` changed since")):
        if changed == words:
            with Path("training.py").open("a") as file:
                file.write("# changed\n")
        shell(*changed, arms="32-true")
        assert shell.code == 2
        assert message in shell.err
        assert "--fresh" in shell.err
    assert shell(*words, "--fresh", arms="32-true")["runs"]


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["training.py:missing", "no_trainer.py", "training.py:clash"])
def test_a_folder_without_a_run_is_free(shell: Shell, refused: str) -> None:
    Path("no_trainer.py").write_text("print('forgot the Trainer')\n")
    arms = "bf16-mixed" if refused.endswith("clash") else "32-true"
    shell(refused, "--steps", "4", arms=arms)
    assert shell.code in (1, 2)
    assert shell("training.py:build", "--steps", "4", arms="32-true")["runs"], shell.err


@pytest.mark.slow
def test_a_damaged_file_is_made_again(shell: Shell) -> None:
    shell("training.py:build", "--steps", "4", arms="32-true")
    Path("out/runs/32-true-seed0.json").write_text("{")
    document = shell("training.py:build", "--steps", "4", arms="32-true")
    assert "is damaged; the run is made again" in shell.out
    assert len(document["runs"]) == 1


@pytest.mark.slow
def test_all_runs_are_cut_equally_when_time_is_up(shell: Shell) -> None:
    document = shell("training.py:long", "--minutes", "0.0001", seeds=2)
    lengths = {len(run["steps"]) for run in document["runs"]}
    assert len(lengths) == 1
    assert lengths.pop() < 100


# others' models


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gpt", "cnn"])
def test_tasks_of_the_demo_are_targets(shell: Shell, task: str) -> None:
    document = shell(f"autoprec.demo.targets:{task}", "--steps", "4 -- quick=true", arms="32-true,autoprec")
    assert shell.code == 0, shell.err
    assert [len(run["steps"]) for run in document["runs"]] == [4, 4]
    assert document["verdict"]["metric"] == "val_loss"
    assert document["runs"][1]["fidelity"]["kl"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("words", ["text -- width=32 layers=1 length=8", "vision -- width=32 layers=1 size=16"])
def test_transformers_models_are_targets(shell: Shell, words: str) -> None:
    pytest.importorskip("transformers")
    name, _, arguments = words.partition(" ")
    target = f"{CHECKOUT / 'examples/compare_target.py'}:{name}"
    document = shell(target, "--steps", "6", arguments, arms="32-true,bf16-mixed,autoprec")
    assert shell.code == 0, shell.err
    assert {(run["arm"], run["error"]) for run in document["runs"]} == {
        (arm, None) for arm in ("32-true", "bf16-mixed", "autoprec")
    }
    assert all(run["fidelity"]["kl"] < 0.1 for run in document["runs"][1:])
    assert any(unit.startswith("model.") for unit in document["runs"][2]["formats"])
    assert len({run["steps"][0]["loss"] for run in document["runs"] if run["arm"] != "bf16-mixed"}) == 1


def test_quick_says_nothing_about_speed(shell: Shell) -> None:
    document = shell("training.py:long", "--quick", arms="32-true")
    assert [len(run["steps"]) for run in document["runs"]] == [12]  # and one seed, as the command has it
    assert "quick: runs are far too short to say anything about speed or loss." in shell.out
    assert with_defaults({"seeds": None, "steps": 40, "interval": None}, quick=True) == {
        "seeds": 2,
        "steps": 40,
        "interval": 4,
        "out": Path("autoprec-compare-quick"),
        "is_quick": True,
    }
    assert with_defaults({"seeds": None, "steps": None}, quick=False) == {
        "seeds": 3,
        "steps": None,
        "out": Path("autoprec-compare"),
        "is_quick": False,
    }


def test_a_quick_try_leaves_the_folder_of_the_comparison_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, bool]] = []
    monkeypatch.setattr(
        "autoprec.commands.compare._compare", lambda settings, fresh, *_: asked.append((settings.out, fresh))
    )
    for words in ("--quick", "", "--quick --out mine"):
        assert cli.main(["compare", "training.py:build", *words.split()]) == 0
    assert asked == [(Path("autoprec-compare-quick"), True), (Path("autoprec-compare"), False), (Path("mine"), False)]


def test_runs_use_the_autoprec_of_the_command(tmp_path: Path) -> None:
    words = ["compare", "training.py:build", "--arms", "autoprec", "--seeds", "1", "--steps", "2"]
    done = run_beside_another(tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert "compare: task=build" in done.stdout


def test_help_teaches(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "--help"]) == 0
    text = " ".join(re.sub("[│╭╰─╮╯]", " ", capsys.readouterr().out).split())
    for words in ("autoprec compare train.py -- --epochs 3", "keep bf16-mixed", "--margin", "--fresh", "goes on"):
        assert words in text


# what is stopped


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_stopped_and_killed_it_goes_on(tmp_path: Path) -> None:
    words = ["compare", "training.py:slow", "--arms", ARMS, "--seeds", "2", "--out", "out", "--minutes", "5"]
    first = tmp_path / "out/runs/bf16-mixed-seed0.json"

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        command = [sys.executable, "-m", "autoprec", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def wait_for_seed_1() -> None:
        log, until = tmp_path / "out/logs/bf16-mixed-seed1.log", time.monotonic() + 120
        while not (first.exists() and log.exists()) and time.monotonic() < until:
            time.sleep(0.1)
        assert log.exists()
        time.sleep(1.0)  # it stands in the middle of a step

    process = start()
    wait_for_seed_1()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Stopped. 2 finished runs are in `out`" in err
    assert len(json.loads((tmp_path / "out/comparison.json").read_text())["runs"]) == 2
    written = first.stat().st_mtime_ns

    shutil.rmtree(tmp_path / "out/logs")
    process = start()
    wait_for_seed_1()
    process.kill()
    process.communicate(timeout=60)

    (tmp_path / "go").touch()
    process = start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert LAST_LINE.fullmatch(out.splitlines()[-1])
    assert first.stat().st_mtime_ns == written
    document = json.loads((tmp_path / "out/comparison.json").read_text())
    assert {len(run["steps"]) for run in document["runs"]} == {16}
    assert len(document["runs"]) == 4
