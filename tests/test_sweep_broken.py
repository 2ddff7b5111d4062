"""Sweeps that meet bad files, full disks, clocks that jump, and code that hangs.

Time budget: 30 s; what trains in processes of its own is `slow` (120 s).
"""

from __future__ import annotations

import datetime
import json
import sqlite3
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.artifacts import get_all_artifact_meta
from optuna.trial import TrialState

from autoprec.compare.session import digests
from autoprec.compare.targets import Target
from autoprec.report.build import build
from autoprec.sweep import SweepError, SweepResult, TrialRecord, load_config, run, running
from autoprec.sweep.best_config import best_document
from autoprec.sweep.launchers import WorkerError
from autoprec.sweep.measure import Measured
from autoprec.sweep.plan import trial_target
from autoprec.sweep.space import Dimension, load_yaml
from autoprec.sweep.storage import SEEN, open_storage
from autoprec.sweep.studies import SweepStudy
from autoprec.sweep.worker import SweepWorker
from autoprec.target_functions import TargetError
from tests.compared import write_training
from tests.test_sweep import Training, config_of, killed, raising, sweep_with

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported


def started(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    write_training(tmp_path)
    return {"target": "training.py:build", "baselines": [], "minutes": 1e-9, "out": str(tmp_path / "out"), **changes}


def inline(settings: Any, **options: Any) -> SweepResult:
    return run(settings, launcher="inline", **options)


# files of settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arguments: {day: 2024-99-99}", "month must be in"),
        ("steps: 0x_", "invalid literal"),
        ("arguments: " + "[" * 3000, "recursion"),
        ("trials: 3\ntrials: 4", "the key `trials` comes twice"),
        ("arguments: {lr: 1.0, lr: 2.0}", "the key `lr` comes twice"),
        ("arguments: &a {x: {y: *a}}", "JSON can hold"),
        ("constraints: [{name: val_loss, min: 2, max: 1}]", "Write min <= max"),
        ("constraints: [{name: val_loss, max: .nan}]", "Write min <= max"),
    ],
)
def test_bad_yaml_is_said(tmp_path: Path, text: str, said: str) -> None:
    write_training(tmp_path)
    (tmp_path / "sweep.yaml").write_text(f"target: training.py:build\n{text}\n")
    with pytest.raises(SweepError) as error:
        load_config(tmp_path / "sweep.yaml")
    assert said in str(error.value)


def test_a_merged_key_comes_once() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {<<: *a, y: 4}\n"
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_yaml(text)["b"] == {"x": 3, "y": 2}


def test_settings_are_written_down_as_they_are(tmp_path: Path) -> None:
    arguments = {"day": datetime.date(2024, 1, 2), "names": {1: "a"}, "nan": float("nan")}
    inline(started(tmp_path, arguments=arguments))
    found = load_config(tmp_path / "out" / "sweep.yaml").arguments
    assert (found["day"], found["names"]) == (arguments["day"], arguments["names"])
    assert not inline(tmp_path / "out" / "sweep.yaml", resume=True).trials


def test_the_last_value_of_a_grid_is_one_that_optuna_takes() -> None:
    dimension = Dimension(low=0.1, high=0.3, step=0.1)
    study = optuna.create_study()
    for value in dimension.grid():
        study.enqueue_trial({"x": value})
        assert dimension.suggest(study.ask(), "x") == value


def test_a_script_gets_text_without_quotes() -> None:
    target = Target("script", "train.py", "train.py")
    words = trial_target(target, {"mode": "on", "count": "1", "ok": True, "sizes": [1, 2]}).arguments
    assert words == ("--mode=on", "--count=1", "--ok=true", "--sizes=[1, 2]")


# folders


def test_a_file_of_the_users_is_not_written_over(tmp_path: Path) -> None:
    text = yaml.safe_dump(started(tmp_path, out="."))
    (tmp_path / "sweep.yaml").write_text(text)
    for fresh in (False, True):
        with pytest.raises(SweepError, match="has not written"):
            inline(tmp_path / "sweep.yaml", fresh=fresh)
    assert (tmp_path / "sweep.yaml").read_text() == text
    assert not (tmp_path / "study.db").exists()


def test_a_folder_is_of_one_study(tmp_path: Path) -> None:
    inline(started(tmp_path, name="first"))
    with pytest.raises(SweepError, match="holds the sweep `first`"):
        inline(started(tmp_path, name="second"))
    assert inline(started(tmp_path, name="second"), fresh=True).study == "second"


def test_fresh_forgets_nothing_else_and_no_sweep_that_runs(tmp_path: Path) -> None:
    settings = started(tmp_path)
    inline(settings)
    for folder in ("artifacts", "trials", "workers"):
        (tmp_path / "out" / folder / "mine.txt").touch()
    (tmp_path / "out" / "trials" / "0").mkdir()
    sweep = SweepStudy(load_config(tmp_path / "out" / "sweep.yaml"))
    with sweep.alive(), pytest.raises(SweepError, match="a sweep runs in"):
        inline(settings, fresh=True)
    inline(settings, fresh=True)
    assert len(list((tmp_path / "out").glob("*/mine.txt"))) == 3
    assert not (tmp_path / "out" / "trials" / "0").exists()


@pytest.mark.parametrize("name", ["a b", "größe", "what?", "50%20", "{1}", "a#b", "x&y"])
def test_any_name_of_a_folder_will_do(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path, out=str(tmp_path / name), trials=1)
    assert sweep_with(config).counts == {"complete": 1}
    assert (tmp_path / name / "study.db").is_file()
    assert {path.name for path in tmp_path.iterdir()} >= {name, "training.py"}


def test_changed_code_is_refused(tmp_path: Path) -> None:
    settings = started(tmp_path)
    inline(settings)
    code = tmp_path / "training.py"
    seed = tmp_path / "out" / "trials" / "0" / "seed-0.json"
    seed.parent.mkdir()
    seed.write_text(json.dumps({"extra": {"sources": digests([code])}}))
    inline(settings)
    code.write_text(code.read_text() + "\n")
    with pytest.raises(SweepError, match=r"training.py` changed since.*--fresh"):
        inline(settings)
    inline(settings, fresh=True)


# storages


@pytest.mark.parametrize("torn", [b'{"op_code": 4, "wor', b"x" * 200_000])
def test_a_journal_that_was_cut_off_goes_on(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "study.log"
    config = config_of(tmp_path, storage=f"journal:{path}", trials=2)
    sweep_with(config)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert sweep_with(config.model_copy(update={"trials": 3})).counts == {"complete": 3}
    assert path.read_bytes().startswith(whole)
    assert torn not in path.read_bytes()


def test_a_storage_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    open_storage(None, tmp_path, 3)
    path = tmp_path / "study.db"
    with pytest.raises(SweepError, match="readonly database"):
        SweepStudy(config.model_copy(update={"storage": f"sqlite:///file:{path}?mode=ro&uri=true"}))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), sqlite3.OperationalError("disk is full")])
def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*words: Any) -> None:
        raise error if isinstance(error, OSError) else optuna.exceptions.StorageInternalError("x") from error

    monkeypatch.setattr(running, "write_results", fail)
    with pytest.raises(WorkerError, match="run the same command again") as raised:
        inline(started(tmp_path))
    assert str(error.args[-1]) in str(raised.value)


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_clock_that_jumps_takes_no_trial_from_a_worker_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    config = config_of(tmp_path, storage=f"journal:{tmp_path / 'study.log'}" if kind == "journal" else None)
    one, other = SweepStudy(config), SweepStudy(config)
    with one.alive():
        trial = one.ask()
        assert trial is not None
        trial.set_user_attr(SEEN, time.time() - 9999)
        monkeypatch.setattr(type(other.storage), "_get_stale_trial_ids", lambda *_: [trial._trial_id], raising=False)
        assert other.bury() == 0
    assert other.study.trials[trial.number].state == TrialState.RUNNING


def test_a_worker_whose_trial_was_taken_goes_on(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=2)

    def take(lr: float) -> dict[str, float]:
        if len(training.specs) == 1:
            sweep.study.tell(0, state=TrialState.FAIL)
        return {"val_loss": lr}

    sweep, training = SweepStudy(config), Training(take)
    SweepWorker(sweep, measuring=training).run()
    assert [trial.state for trial in sweep.study.trials].count(TrialState.COMPLETE) == 2


def test_artifacts_are_attached_once(tmp_path: Path) -> None:
    from autoprec.sweep.outcome import complete, tell

    config = config_of(tmp_path)
    number, _ = killed(config, Measured({"val_loss": 0.125}))

    def stop(*words: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    sweep = SweepStudy(config)
    trial = optuna.Trial(sweep.study, sweep.study.trials[number]._trial_id)
    outcome = complete(config, Measured({"val_loss": 0.125}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optuna.Study, "tell", stop)  # killed between artifacts and end
        with pytest.raises(KeyboardInterrupt):
            tell(sweep.study, trial, outcome, sweep.trial_folder(number), tmp_path / "out" / "artifacts")
    sweep.bury()
    found = get_all_artifact_meta(sweep.study.trials[number], storage=sweep.storage)
    assert [one.filename for one in found] == ["result.json"]


def test_values_that_a_target_refuses_end_their_trial_only(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=4)
    result = sweep_with(config, Training(raising(TargetError("the script ended"), lambda lr: lr != 0.5)))
    assert result.counts == {"complete": 1, "failed": 3}
    assert result.trials[-1].reason == "the script ended"


# the winner


def test_the_winner_of_short_keys_is_a_config(tmp_path: Path) -> None:
    write_training(tmp_path)
    (tmp_path / "short.yaml").write_text("model: {class_path: training.Net}\ntrainer:\n")
    searched = {"model.width": {"choices": [8, 16]}}
    config = config_of(tmp_path, target=str(tmp_path / "short.yaml"), arguments=searched)
    best = TrialRecord(0, "32-true", "complete", {"arguments.model.width": 8}, (0.1,))
    document, _ = best_document(config, best)
    assert document == {
        "model": {"class_path": "training.Net", "init_args": {"width": 8}},
        "trainer": {"precision": "32-true"},
    }


# real processes and reports


@pytest.mark.slow
@pytest.mark.parametrize("where", ["build", "step"])
def test_a_trial_that_hangs_is_given_up(tmp_path: Path, where: str) -> None:
    write_training(tmp_path)
    code = {
        "build": "def hang():\n    time.sleep(3600)\n",
        "step": "class Hanging(Net):\n    def training_step(self, batch, batch_idx):\n        time.sleep(3600)\n"
        "def hang():\n    return Hanging(), loaders(), {'max_epochs': 1}\n",
    }
    (tmp_path / "hanging.py").write_text(f"from training import *\nfrom training import time\n{code[where]}")
    settings = started(tmp_path, target="hanging.py:hang", minutes=None, trials=1, trial_minutes=0.15)
    (trial,) = inline(settings).trials
    assert (trial.state, trial.reason) == ("pruned", "took longer than 9 s: given up after step 0")


@pytest.mark.slow
def test_a_report_of_a_real_sweep(tmp_path: Path) -> None:
    settings = started(tmp_path, out=str(tmp_path / "my sweep"))
    inline(settings)  # no time for a trial
    assert build(tmp_path / "my sweep").chapters[0].tone == "bad"
    inline({**settings, "minutes": None, "trials": 2, "baselines": ["bf16-mixed"]})
    chapter = build(tmp_path / "my sweep").chapters[0]
    assert chapter.tone == "good"
    assert dict(chapter.facts)["usable"] == "2"
    assert f"autoprec sweep '{tmp_path / 'my sweep' / 'sweep.yaml'}'" in str(asdict(chapter))
