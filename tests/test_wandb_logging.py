"""What reaches Weights & Biases, read back from its offline files; and that no fault of it touches a training.

Cases F-05 and F-06. Time budget: 12 s (a run of wandb takes half a second to open).
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor

from autoprec import AutoPrecisionCallback, metric_names
from autoprec.map_file import load_map
from autoprec.run_tables import FORMAT_COLUMNS, HISTORY_COLUMNS
from autoprec.wandb_logging import open_run
from tests.small_fits import Plain, StatefulLoader, assert_identical, loader, outcome, quiet, seed
from tests.test_loggers import STRETCHES, Logs, Noted, moving, trained
from tests.wandb_files import OfflineRun, read_runs

wandb = pytest.importorskip("wandb")

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "wandb_offline.py"


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    yield
    wandb.finish()
    for name in set(os.environ) - set(before):  # wandb leaves the address of its service
        del os.environ[name]


def stored(folder: Path) -> OfflineRun:
    wandb.finish()
    (run,) = read_runs(folder, 1)
    return run


class Counted:
    """Counts what is sent to a run."""

    def __init__(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[set[str]] = []
        original = run.log

        def log(data: Any, *args: Any, **options: Any) -> Any:
            assert not args, "a step of wandb's own drops rows"
            assert not options, "the same"
            self.rows.append(set(data))
            return original(data)

        monkeypatch.setattr(run, "log", log)


def own(row: dict[str, Any]) -> set[str]:
    return {name for name in row if not name.startswith("_")}


# what is stored


def test_everything_is_read_back_from_the_offline_file(tmp_path: Path) -> None:
    callback = moving()
    trained(WandbLogger(save_dir=tmp_path, project="mine", group="g", name="n"), callback)
    run = stored(tmp_path)

    assert (run.project, run.group, run.name, run.job_type) == ("mine", "g", "n", "")
    assert run.step_metrics["autoprec/*"] == metric_names.STEP
    settings = run.config["autoprec"]
    assert (settings["policy"], settings["interval"], settings["base_precision"]) == ("scripted", 4, "32-true")
    assert settings["settings"]["clip"]["multiplier"] == 1.5
    assert [row[metric_names.STEP] for row in run.rows(metric_names.LOSS)] == [5, 10, 15]
    assert [row[metric_names.STEP] for row in run.rows(metric_names.BITS)] == list(range(16))
    assert run.rows("autoprec/parameter_share/bf16")[0]["autoprec/parameter_share/bf16"] == pytest.approx(144 / 178)
    assert run.summary[metric_names.APPLIED_STEPS] == 16

    table = run.table(metric_names.FORMAT_MAP)
    assert table["columns"] == FORMAT_COLUMNS
    assert [row[0::3] for row in table["data"]] == STRETCHES
    history = run.table(metric_names.HISTORY)
    assert history["columns"] == HISTORY_COLUMNS
    assert [row[:7] for row in history["data"] if row[1] == "precision" and row[6] == "applied"] == [
        [3, "precision", "net.0", "fp32", "bf16", "bf16", "applied"],
        [6, "precision", "net.0", "bf16", "int8", "int8", "applied"],
    ]
    assert len(history["data"]) == len(callback.history)

    (artifact,) = [each for each in run.artifacts if each["type"] == "policy"]
    assert artifact["files"] == ["history.jsonl", "map.yaml"]
    assert json.loads(artifact["metadata"]) == {"policy": "scripted", "ended": "finished", "windows": 16}


def test_the_artifact_is_a_map_to_train_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = []
    monkeypatch.setattr(wandb.Artifact, "add_dir", lambda self, folder: maps.append(load_map(Path(folder, "map.yaml"))))
    callback = moving()
    trained(WandbLogger(save_dir=tmp_path), callback)
    (found,) = maps
    assert dict(found.precision or {}) == callback.precision_map()


def test_a_prefix_of_the_logger_is_kept(tmp_path: Path) -> None:
    trained(WandbLogger(save_dir=tmp_path, prefix="mine"), moving(), max_epochs=1)
    run = stored(tmp_path)
    assert run.step_metrics["mine-autoprec/*"] == metric_names.STEP
    assert run.rows("mine-autoprec/loss")
    assert not run.rows("autoprec/loss")


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")  # the same one, on purpose
def test_f05_all_rows_are_stored_also_of_a_run_that_goes_on_from_an_earlier_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Direct(Logs):
        """Writes into the run itself, beside what it logs through Lightning."""

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            for part in range(20):
                logger.experiment.log({"direct": loss.item(), "part": part})
            return loss

    logger = WandbLogger(save_dir=tmp_path)
    sent = Counted(logger.experiment, monkeypatch)
    saving = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"logger": logger, "log_every_n_steps": 1, "enable_checkpointing": True}
    quiet(callbacks=[moving(), saving], max_epochs=1, **options).fit(Direct(), StatefulLoader(64))
    first = len(sent.rows)
    again = quiet(callbacks=[moving(), saving], max_epochs=1, **options)
    again.fit(Direct(), StatefulLoader(64), ckpt_path=tmp_path / "saved" / "step=3.ckpt")
    run = stored(tmp_path)

    assert first > 160  # the user's, more than a block of the file holds
    assert len(run.history) == len(sent.rows)
    for row, names in zip(run.history, sent.rows, strict=True):
        assert own(row) - {metric_names.STEP} == names - {metric_names.STEP}  # synced into the rows of users
    steps = [row[metric_names.STEP] for row in run.rows("train_loss")]
    assert steps[:8] == list(range(8))
    assert min(steps[8:]) == 3  # back, and stored all the same
    assert [row[metric_names.STEP] for row in run.rows(metric_names.PEAK_BYTES)] == [8, 8]


def test_a_run_that_breaks_leaves_its_tables_and_stays_open(tmp_path: Path) -> None:
    class Break(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                raise RuntimeError("mine")

    logger = WandbLogger(save_dir=tmp_path, name="theirs")
    with pytest.raises(RuntimeError, match="mine"):
        quiet(logger=logger, callbacks=[moving(), Break()], max_epochs=1).fit(Logs(), loader())
    assert not logger.experiment._is_finished
    assert wandb.run is logger.experiment
    run = stored(tmp_path)
    assert run.name == "theirs"
    assert [row[3] for row in run.table(metric_names.FORMAT_MAP)["data"]] == ["fp32", "bf16", "fp32"]
    assert [json.loads(each["metadata"])["ended"] for each in run.artifacts if each["type"] == "policy"] == ["failed"]


# F-06: nothing of it touches a training


@pytest.mark.parametrize("logger", [False, "csv"])
def test_f06_no_run_is_opened_where_the_user_has_none(
    logger: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "init", None)
    trained(CSVLogger(tmp_path) if logger else False, moving(), max_epochs=1)
    assert wandb.run is None


def test_f06_disabled(tmp_path: Path) -> None:
    callback = moving()
    trained(WandbLogger(save_dir=tmp_path, mode="disabled"), callback)
    assert callback.applied_steps == 16
    assert not list(tmp_path.rglob("*.wandb"))


@pytest.mark.parametrize("when", ["before", "within"])
def test_f06_a_run_that_the_user_has_finished(when: str, tmp_path: Path) -> None:
    class Finish(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                logger.experiment.finish()

    logger, other = WandbLogger(save_dir=tmp_path), Noted()
    if when == "before":
        logger.experiment.finish()
    callbacks = [moving(), Finish()] if when == "within" else [moving()]
    seed()
    module = Plain()  # logs nothing itself: without autoprec, nothing fails
    trainer = quiet(logger=[logger, other], callbacks=callbacks, max_epochs=2, log_every_n_steps=1)
    with pytest.warns(UserWarning, match="logging to WandbLogger failed .* is finished") as caught:
        trainer.fit(module, loader())
    assert len([each for each in caught if "WandbLogger failed" in str(each.message)]) == 1
    assert other.steps(metric_names.BITS) == list(range(16))
    assert other.steps(metric_names.LOSS) == [5, 10, 15]

    seed()
    plain = Plain()
    expected = outcome(trained(False, moving(), plain), plain)
    assert_identical(outcome(trainer, module), expected)


@pytest.mark.parametrize("part", ["Table.__init__", "Artifact.add_dir"])
def test_f06_a_fault_of_wandb_at_the_end_is_said_once(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise OSError("disk full")

    monkeypatch.setattr(f"wandb.{part}", broken)
    callback = AutoPrecisionCallback("fixed:bf16", interval=4, verbose=False)
    with pytest.warns(UserWarning, match=r"logging to WandbLogger failed \(OSError: disk full\)"):
        trained(WandbLogger(save_dir=tmp_path), callback, max_epochs=1)
    assert callback.applied_steps == 8


# runs that autoprec opens itself


def open_one(folder: Path, said: list[str]) -> Any:
    options: dict[str, Any] = {"group": "g", "job_type": "fp32", "name": "n", "config": {"arm": "32-true"}}
    return open_run("p", folder=folder, say=said.append, **options)


def test_own_runs_stand_beside_the_users_and_follow_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    users = wandb.init(project="theirs", dir=str(tmp_path / "theirs"))
    open_one(tmp_path / "ours", said).finish()
    monkeypatch.setenv("WANDB_RUN_GROUP", "of the environment")
    open_one(tmp_path / "second", said).finish()
    assert not users._is_finished
    (ours,), (second,) = read_runs(tmp_path / "ours", 1), read_runs(tmp_path / "second", 1)
    assert (ours.project, ours.group, ours.job_type, ours.name) == ("p", "g", "fp32", "n")
    assert ours.config["autoprec"] == {"arm": "32-true"}
    assert second.group == "of the environment"
    assert said == []


def test_f06_without_a_login_or_a_network_own_runs_are_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    said: list[str] = []
    original, modes = wandb.init, []

    def unreachable(mode: str | None = None, **options: Any) -> Any:
        modes.append(mode)
        if mode is None:
            raise wandb.errors.CommError("no such host")
        return original(mode=mode, **options)

    monkeypatch.setattr(wandb, "init", unreachable)
    for is_logged_in in (False, True):
        monkeypatch.setattr(wandb, "login", lambda *, found=is_logged_in, **options: found)
        open_one(tmp_path / str(is_logged_in), said).finish()
    assert modes == ["offline", None, "offline"]
    assert [line.split(",")[0] for line in said] == [
        "Weights & Biases: no login (`wandb login`)",
        "Weights & Biases cannot be reached (no such host)",
    ]
    assert len(read_runs(tmp_path, 2)) == 2


# the example


def test_the_example_logs_two_runs_of_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["wandb_offline.py", "--quick", "--out", "out"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "wandb sync out/wandb/offline-run-*" in capsys.readouterr().out
    runs = {run.job_type: run for run in read_runs(tmp_path / "out", 2)}
    assert set(runs) == {"amp-bf16", "autoprec"}
    assert {run.group for run in runs.values()} == {"corners"}
    for run in runs.values():
        assert run.rows(metric_names.LOSS)
        assert run.rows("val_loss")
