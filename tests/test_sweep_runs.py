"""Sweeps that train in processes of their own, the command, and the winner in LightningCLI.

Time budget: 25 s; what starts workers, is stopped or killed is `slow` (400 s).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from torch import nn

from autoprec import cli
from autoprec.compare.records import Run
from autoprec.map_file import load_map
from autoprec.run_record import read_record
from autoprec.sweep import SweepInterruptedError, TrialRecord, run
from autoprec.sweep.best_config import best_document, write_best
from autoprec.sweep.reading import checked_config
from autoprec.sweep.results import SweepResult
from tests.compared import run_beside_another, write_training
from tests.small_fits import Full, callback_of, loader

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported

CHECKOUT = Path(__file__).parents[1]
CLIP = "callback.config.clip.multiplier"


@pytest.fixture(autouse=True)
def _training(tmp_path: Path) -> None:
    write_training(tmp_path)


def settings(tmp_path: Path, target: str = "build", **changes: Any) -> dict[str, Any]:
    return {
        "target": target if target.endswith(".yaml") else f"training.py:{target}",
        "baselines": ["bf16-mixed"],
        "trials": 3,
        "out": str(tmp_path / "out"),
        **changes,
    }


def test_a_sweep_from_end_to_end(tmp_path: Path) -> None:
    searched = {"interval": 3, "policy": "fixed:bf16", "config.clip.multiplier": {"low": 1.0, "high": 2.0}}
    objectives = ["val_accuracy", "step_time_ratio"]
    result = run(settings(tmp_path, callback=searched, objectives=objectives, seeds=2), launcher="inline")
    assert result.counts == {"complete": 3}, result.message
    static, first, _ = result.trials
    assert (static.arm, static.values[1]) == ("bf16-mixed", 1.0)
    assert first.params == {CLIP: 1.5}
    assert first.formats["net.0"] == "bf16"
    assert {"val_loss", "val_accuracy", "train_loss", "training_seconds", "step_ms"} <= set(first.figures)
    folder = tmp_path / "out" / "trials" / "1"
    assert set(load_map(folder / "map.yaml").precision or {}) == set(first.formats)
    runs = [Run.from_dict(json.loads((folder / f"seed-{seed}.json").read_text())["run"]) for seed in (0, 1)]
    assert [one.seed for one in runs] == [0, 1]
    assert first.figures["val_loss"] == pytest.approx(
        sum(one.evaluations[-1].metrics["val_loss"] for one in runs) / 2, rel=1e-6
    )
    assert read_record(folder / "record" / "seed-1").formats
    assert not (folder / "work").exists()
    assert not list((tmp_path / "out" / "workers").glob("*.lock"))
    assert run(tmp_path / "out" / "sweep.yaml", launcher="inline", resume=True).trials == result.trials


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "state", "reason"),
    [
        ("exploding", "pruned", "diverged: the training loss is not finite from step 3 on"),
        ("crashing", "failed", "failed after step 4: ZeroDivisionError: the module broke"),
    ],
)
def test_how_trainings_end(tmp_path: Path, target: str, state: str, reason: str) -> None:
    config = settings(tmp_path, target, trials=1)
    (trial,) = run(config, launcher="inline").trials
    assert (trial.state, trial.reason) == (state, reason)


@pytest.mark.slow
def test_workers_use_the_autoprec_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(settings(tmp_path, trials=1)))
    done = run_beside_another(tmp_path, ["sweep", "sweep.yaml"])
    assert done.returncode == 0, done.stderr


# the winner


class Configured(Full):
    """No argument that a command line cannot hold."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(16)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


def result_of(tmp_path: Path, best: TrialRecord, **changes: Any) -> tuple[Any, SweepResult]:
    config = checked_config(settings(tmp_path, **changes))
    config.out.mkdir(exist_ok=True)
    return config, SweepResult(
        "study", config.objectives, (best,), (best.number,), best, "best val_loss", 0, config.out
    )


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended:UserWarning")
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_lightning_cli_trains_with_the_winner(tmp_path: Path) -> None:
    best = TrialRecord(4, "autoprec", "complete", {CLIP: 2.5, "arguments.lr": 1e-5}, (0.25,))
    searched = {"interval": 3, "policy": "fixed:bf16", "config.clip.multiplier": {"low": 1.0, "high": 3.0}}
    arguments = {"lr": {"low": 1e-6, "high": 1.0, "log": True}}
    write_best(*result_of(tmp_path, best, callback=searched, arguments=arguments))
    path = tmp_path / "out" / "best.yaml"
    assert "# with these arguments of `training.py:build`: lr=1.0e-05" in path.read_text()
    trained = LightningCLI(
        Configured,
        trainer_defaults=QUIET,
        args=["fit", "--config", str(path)],
        save_config_callback=None,
        seed_everything_default=0,
    )
    callback = callback_of(trained.trainer)
    assert callback.applied_steps > 0
    assert callback.interval == 3
    assert callback.config.clip.multiplier == 2.5
    assert set(callback.precision_map().values()) == {"bf16"}


def test_a_static_winner_has_no_callback_left(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "model: {class_path: training.Net, init_args: {width: 8}}\n"
        "trainer: {max_epochs: 1, callbacks: [{class_path: autoprec.AutoPrecisionCallback},"
        " {class_path: LearningRateMonitor}]}\n"
    )
    best = TrialRecord(0, "bf16-mixed", "complete", {"arguments.model.init_args.width": 32}, (0.25,))
    config, result = result_of(
        tmp_path, best, target="config.yaml", arguments={"model.init_args.width": {"choices": [16, 32]}}
    )
    assert result.best is not None
    document, notes = best_document(config, result.best)
    assert document == {
        "model": {"class_path": "training.Net", "init_args": {"width": 32}},
        "trainer": {"max_epochs": 1, "callbacks": [{"class_path": "LearningRateMonitor"}], "precision": "bf16-mixed"},
    }
    assert notes == []


# the command


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["sweep", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("target: training.py:build\ntrails: 3", [], "`trails`: there is no such key. Did you mean `trials`?"),
        ("target: none.py:build", [], "There is no file"),
        ("target: training.py:build", ["--resume"], "no sweep `build` to go on with"),
        ("target: training.py:build", ["--resume", "--fresh"], "choose one"),
        ("target: training.py:build", ["--launcher", "slurm"], "processes, inline, ray"),
        ("target: training.py:build", ["--storage", "nothing://"], "Cannot open the storage"),
        ("target: training.py:build", ["--storage", "journal:x", "--fresh"], "which others may use"),
        ("target: training.py:build", ["--trials", "0"], "--trials"),
    ],
)
def test_mistakes_end_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], said: str
) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    code, out, err = call(capsys, "sweep.yaml", *words)
    assert (code, out) == (2, "")
    assert said in re.sub(r"[│\s]+", " ", err)
    assert "Traceback" not in err


@pytest.mark.parametrize("best", [0, None])
def test_the_exit_code_says_whether_there_is_a_winner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, best: int | None
) -> None:
    trial = TrialRecord(0, "autoprec", "complete" if best == 0 else "pruned", {CLIP: 2.5}, (0.25,), reason="diverged")
    _, result = result_of(tmp_path, trial)
    if best is None:
        result = SweepResult("study", result.objectives, (trial,), (), None, "", 0, result.out)
    monkeypatch.setattr("autoprec.sweep.run", lambda *words, **options: result)
    code, out, err = call(capsys, "sweep.yaml", "--json")
    assert code == (0 if best == 0 else 1)
    assert json.loads(out)["best"] == best
    assert ("no usable trial among 1:\n  1 x diverged" in err) == (best is None)


def test_ctrl_c_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, result = result_of(tmp_path, TrialRecord(0, "autoprec", "complete", {CLIP: 2.5}, (0.25,)))

    def stop(*words: Any, **options: Any) -> None:
        raise SweepInterruptedError(result)

    monkeypatch.setattr("autoprec.sweep.run", stop)
    code, out, err = call(capsys, "sweep.yaml")
    assert code == 130
    assert "best: trial 0" in out
    assert "Run the same command again to go on." in err


def test_without_ray_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[ray\]'"):
        run(settings(tmp_path), launcher="ray")


# whole processes


def start(*words: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(CHECKOUT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path.strip(os.pathsep), "COLUMNS": "80"}
    command = [sys.executable, "-m", "autoprec", "sweep", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_a_config_of_lightning_cli_from_end_to_end(tmp_path: Path) -> None:
    sweep = settings(tmp_path, "config.yaml", workers=2, callback={"interval": 3})
    (tmp_path / "sweep.yaml").write_text(
        yaml.safe_dump({**sweep, "arguments": {"model.init_args.width": {"choices": [8, 16]}}})
    )
    out, err = (process := start("sweep.yaml", "--json")).communicate()
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["counts"] == {"complete": 3}
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert best["model"]["init_args"]["width"] in (8, 16)
    assert best["data"] == {"class_path": "data.Rows"}


@pytest.mark.slow
def test_ctrl_c_in_the_middle_and_going_on(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({**settings(tmp_path, trials=4), "callback": {"interval": 3}}))
    process = start("sweep.yaml")
    until = time.monotonic() + 200
    while not list((tmp_path / "out" / "trials").glob("*/result.json")) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Run the same command again" in err
    assert "Traceback" not in err
    stopped = json.loads((tmp_path / "out" / "pareto.json").read_text())
    out, err = (process := start("sweep.yaml", "--resume", "--json")).communicate()
    assert process.returncode == 0, err
    document = json.loads(out)
    assert document["counts"] == {"complete": 4}
    assert [trial for trial in document["trials"] if trial in stopped["trials"]] == stopped["trials"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kills_lose_no_trial(tmp_path: Path) -> None:
    script = [
        sys.executable,
        str(CHECKOUT / "scripts" / "sweep_check.py"),
        "--trials",
        "8",
        "--out",
        str(tmp_path / "k"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"sweep: trials=8 lost=0 resumed=[2-9]", done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")
def test_a_sweep_on_ray(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(settings(tmp_path, workers=2)))
    out, err = (process := start("sweep.yaml", "--launcher", "ray", "--json")).communicate()
    assert process.returncode == 0, err
    assert json.loads(out)["counts"] == {"complete": 3}
