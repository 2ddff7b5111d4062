"""Sweeps with a stand-in for the training: states, dead workers, storages, results.

What trains in processes of its own is in ``test_sweep_runs``. Time budget: 20 s.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import socket
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState

from autoprec.sweep import SweepConfig, SweepError, SweepResult, storage
from autoprec.sweep.measure import FailedTrialError, Measured, OnProgress, Progress, TrialSpec, UnusableError
from autoprec.sweep.outcome import complete, write_outcome
from autoprec.sweep.reading import checked_config
from autoprec.sweep.results import collect, pareto_front, write_results
from autoprec.sweep.studies import SweepStudy, is_lost
from autoprec.sweep.worker import SweepWorker
from autoprec.target_functions import TargetError
from tests.compared import write_training

pytest.importorskip("sklearn.datasets")  # sets environment variables when it is imported

Figures = Callable[[float], dict[str, float]]


def without_waiting(connection: Any, record: object) -> None:
    # nothing here outlives the machine
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous=OFF")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    sqlalchemy.event.listen(sqlalchemy.Engine, "connect", without_waiting)
    with storage.quiet_optuna():
        yield
    sqlalchemy.event.remove(sqlalchemy.Engine, "connect", without_waiting)


def config_of(tmp_path: Path, **changes: Any) -> SweepConfig:
    tmp_path.mkdir(exist_ok=True)
    write_training(tmp_path)
    document = {
        "target": f"{tmp_path / 'training.py'}:build",
        "arguments": {"lr": {"low": 0.0, "high": 1.0}},
        "baselines": [],
        "trials": 4,
        "out": str(tmp_path / "out"),
    }
    return checked_config({**document, **changes})


def lr_of(spec: TrialSpec) -> float:
    (word,) = [word for word in spec.target.arguments if word.startswith("lr=")]
    return float(word.partition("=")[2])


class Training:
    """Stands for a training: its figures are a function of the learning rate."""

    def __init__(self, figures: Figures = lambda lr: {"val_loss": (lr - 0.3) ** 2}) -> None:
        self._figures = figures
        self.specs: list[TrialSpec] = []

    def __call__(self, spec: TrialSpec, on_progress: OnProgress) -> Measured:
        self.specs.append(spec)
        figures = self._figures(lr_of(spec))
        for step in (1, 2, 3):
            on_progress(Progress(0, step, 3, 1.0, {step: figures}))
        return Measured(figures, {}, {"torch": "2"}, {"net.0": "bf16"})


def sweep_with(config: SweepConfig, training: Any = None, **options: Any) -> SweepResult:
    sweep = SweepStudy(config)
    SweepWorker(sweep, measuring=training or Training(), **options).run()
    return collect(config, sweep.study)


def raising(error: BaseException, when: Callable[[float], bool] = lambda lr: True) -> Figures:
    def figures(lr: float) -> dict[str, float]:
        if when(lr):
            raise error
        return {"val_loss": lr}

    return figures


# what is tried


def test_static_precisions_come_first_and_what_cannot_run_is_left_out(tmp_path: Path) -> None:
    config = config_of(tmp_path, baselines=["32-true", "bf16-mixed", "16-mixed"], trials=5)
    training = Training()
    result = sweep_with(config, training)
    assert [trial.arm for trial in result.trials[:3]] == ["32-true", "bf16-mixed", "autoprec"]
    assert [trial.baseline for trial in result.trials] == ["32-true", "bf16-mixed", "autoprec", None, None]
    assert [lr_of(spec) for spec in training.specs[:3]] == [0.5, 0.5, 0.5]
    assert training.specs[1].arm.precision == "bf16-mixed"
    assert result.counts == {"complete": 5}


def test_seeds_and_versions_are_kept(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=1, seeds=3)
    sweep_with(config)
    (trial,) = SweepStudy(config).study.get_trials()
    assert trial.user_attrs["seeds"] == [0, 1, 2]
    assert {"autoprec", "torch", "lightning", "optuna"} <= set(trial.user_attrs["versions"])
    assert trial.user_attrs["environment"] == {"torch": "2"}
    assert trial.user_attrs["arm"] == "autoprec"


def test_static_arms_can_be_searched_too(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        baselines=["bf16-mixed"],
        arm={"choices": ["autoprec", "bf16-mixed"]},
        callback={"interval": {"low": 5, "high": 50}},
        trials=12,
    )
    result = sweep_with(config)
    assert {trial.arm for trial in result.trials} == {"autoprec", "bf16-mixed"}
    assert all(("callback.interval" in trial.params) == (trial.arm == "autoprec") for trial in result.trials)


def test_a_grid_tries_every_combination_once(tmp_path: Path) -> None:
    grid = {"lr": {"choices": [0.1, 0.2]}, "width": {"low": 8, "high": 16, "step": 8}}
    result = sweep_with(config_of(tmp_path, arguments=grid, sampler="grid", trials=50))
    tried = [(trial.params["arguments.lr"], trial.params["arguments.width"]) for trial in result.trials]
    assert sorted(tried) == [(0.1, 8), (0.1, 16), (0.2, 8), (0.2, 16)]


def test_the_same_seed_proposes_the_same(tmp_path: Path) -> None:
    first = sweep_with(config_of(tmp_path / "a", trials=14, seed=3))
    again = sweep_with(config_of(tmp_path / "b", trials=14, seed=3))
    other = sweep_with(config_of(tmp_path / "c", trials=14, seed=4))
    assert [trial.params for trial in first.trials] == [trial.params for trial in again.trials]
    assert [trial.params for trial in first.trials] != [trial.params for trial in other.trials]


# how trials end


def test_divergence_is_a_result_with_its_reason(tmp_path: Path) -> None:
    bad = raising(UnusableError("diverged: the training loss is not finite from step 3 on"), lambda lr: lr > 0.45)
    result = sweep_with(config_of(tmp_path, trials=6), Training(bad))
    pruned = [trial for trial in result.trials if trial.state == "pruned"]
    assert pruned
    assert all("not finite from step 3" in str(trial.reason) for trial in pruned)
    assert result.best is not None
    assert result.best.values == (min(trial.params["arguments.lr"] for trial in result.trials),)


def test_nan_is_a_result_with_its_reason(tmp_path: Path) -> None:
    result = sweep_with(config_of(tmp_path, trials=3), Training(lambda lr: {"val_loss": math.nan}))
    assert [trial.reason for trial in result.trials] == ["diverged: val_loss is nan"] * 3


@pytest.mark.parametrize("objectives", [["val_loss"], ["val_loss", "step_ms"]])
def test_a_sweep_in_which_all_diverge_says_so_and_keeps_what_there_is(tmp_path: Path, objectives: list[str]) -> None:
    config = config_of(tmp_path, objectives=objectives)
    result = sweep_with(config, Training(raising(UnusableError("diverged: all of it"))))
    write_results(config, SweepStudy(config).study, result)
    assert result.best is None
    assert result.front == ()
    assert result.message == "no usable trial among 4:\n  4 x diverged: all of it"
    document = json.loads((config.out / "pareto.json").read_text())
    assert len(document["trials"]) == 4
    assert document["best"] is None
    assert (config.out / "pareto.html").stat().st_size > 1000
    assert not (config.out / "best.yaml").exists()


def test_a_crash_is_a_result_too(tmp_path: Path) -> None:
    crash = raising(FailedTrialError("failed after step 4: ZeroDivisionError: the module broke"), lambda lr: lr > 0.45)
    result = sweep_with(config_of(tmp_path, trials=6), Training(crash))
    assert result.counts["failed"] + result.counts["complete"] == 6
    assert {trial.reason for trial in result.trials if trial.state == "failed"} == {
        "failed after step 4: ZeroDivisionError: the module broke"
    }


def test_values_that_do_not_go_together_are_a_result_too(tmp_path: Path) -> None:
    callback = {"config.clip.min_norms": {"low": 1, "high": 64}, "config.clip.window": 32}
    config = config_of(tmp_path, callback={"config.clip.min_norms": 16, **callback}, trials=8)
    result = sweep_with(config)
    reasons = [trial.reason for trial in result.trials if trial.state == "failed"]
    assert reasons
    assert all("`min_norms` must be <= `window`" in str(reason) for reason in reasons)


def test_a_figure_that_nobody_logs_names_those_there_are(tmp_path: Path) -> None:
    result = sweep_with(config_of(tmp_path, objectives=["val_los"], trials=1))
    assert result.message.endswith("there is no figure `val_los`; the runs gave val_loss")


def test_a_target_that_cannot_be_trained_ends_the_sweep_and_costs_no_trial(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(TargetError, match="no function"):
        sweep_with(config, Training(raising(TargetError("there is no function"))))
    assert sweep_with(config).counts == {"complete": 4}


def test_bad_trials_are_ended_early(tmp_path: Path) -> None:
    options = {"name": "median", "options": {"n_startup_trials": 2, "n_warmup_steps": 0}}
    result = sweep_with(config_of(tmp_path, pruner=options, trials=10))
    pruned = [trial for trial in result.trials if trial.state == "pruned"]
    assert pruned
    assert all("is worse than other trials'" in str(trial.reason) for trial in pruned)
    assert result.best is not None


@pytest.mark.parametrize(
    ("name", "options"),
    [("sampler", {"n_startup": 3}), ("pruner", {"n_startup_trials": -1})],
    ids=["sampler", "pruner"],
)
def test_options_that_optuna_does_not_take_are_named(tmp_path: Path, name: str, options: dict[str, int]) -> None:
    kind = {"sampler": "tpe", "pruner": "median"}[name]
    with pytest.raises(SweepError, match=rf"`{name}\.options`"):
        sweep_with(config_of(tmp_path, **{name: {"name": kind, "options": options}}))


def test_no_trial_begins_after_the_time_is_up(tmp_path: Path) -> None:
    assert sweep_with(config_of(tmp_path), deadline=time.time() - 1.0).trials == ()


# several objectives


def trade_off(lr: float) -> dict[str, float]:
    return {"val_loss": lr, "step_ms": 1.0 - lr, "peak_bytes": 1e9 * lr, "val_accuracy": lr}


def test_the_pareto_front_and_its_winner(tmp_path: Path) -> None:
    config = config_of(tmp_path, objectives=["val_loss", "step_ms"], trials=6)
    result = sweep_with(config, Training(trade_off))
    assert len(result.front) == 6
    assert result.best is not None
    nearest = min(result.trials, key=lambda trial: abs(trial.values[0] - sum(limits(result)) / 2))
    assert result.best.number == nearest.number
    picked = collect(config.model_copy(update={"pick": "step_ms"}), SweepStudy(config).study)
    assert picked.best is not None
    assert picked.best.values[1] == min(trial.values[1] for trial in result.trials)


def limits(result: SweepResult) -> tuple[float, float]:
    values = [trial.values[0] for trial in result.trials]
    return min(values), max(values)


def test_a_trial_that_is_beaten_is_not_on_the_front(tmp_path: Path) -> None:
    config = config_of(tmp_path, objectives=["val_accuracy", "step_ms"], trials=2)
    trials = sweep_with(config, Training(trade_off)).trials
    good = replace(trials[0], number=0, values=(0.9, 1.0))
    beaten = replace(trials[0], number=1, values=(0.8, 1.0))
    fast = replace(trials[0], number=2, values=(0.1, 0.5))
    banned = replace(trials[0], number=3, values=(1.0, 0.1), constraints={"peak_bytes": 1.0})
    front = pareto_front(config.objectives, [good, beaten, fast, banned])
    assert [trial.number for trial in front] == [0, 2]


def test_a_constraint_is_kept(tmp_path: Path) -> None:
    limit = {"constraints": [{"name": "peak_bytes", "max": 0.5e9}], "objectives": ["step_ms"]}
    config = config_of(tmp_path, trials=12, **limit)
    result = sweep_with(config, Training(trade_off))
    assert result.best is not None
    assert result.best.figures["peak_bytes"] <= 0.5e9
    assert any(not trial.is_usable and trial.values < result.best.values for trial in result.trials)
    (study_trial,) = [each for each in SweepStudy(config).study.get_trials() if each.number == result.best.number]
    assert study_trial.constraints["peak_bytes"] <= 0


# deaths


def killed(config: SweepConfig, measured: Measured | None = None) -> tuple[int, dict[str, Any]]:
    """Begins a trial as a worker that is killed then, before or after its outcome is on disk."""
    sweep = SweepStudy(config)
    sweep._lock_of(sweep.worker).touch()  # the system has freed it, nobody has removed it
    trial = sweep.ask()
    assert trial is not None
    trial.suggest_float("arguments.lr", 0.0, 1.0)
    if measured is not None:
        folder = sweep.trial_folder(trial.number)
        folder.mkdir(parents=True)
        write_outcome(complete(config, measured), folder, sweep.mark(trial))
    return trial.number, dict(trial.params)


def test_a_trial_of_a_dead_worker_is_tried_again_with_its_values(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=3)
    number, params = killed(config)
    result = sweep_with(config)
    assert result.lost == 1
    assert result.counts == {"complete": 3}
    assert number not in {trial.number for trial in result.trials}
    assert params in [trial.params for trial in result.trials]


def test_a_trial_that_was_trained_is_not_trained_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=3)
    number, _ = killed(config, Measured({"val_loss": 0.125}))
    training = Training()
    result = sweep_with(config, training)
    assert result.lost == 0
    assert len(training.specs) == 2
    assert {trial.number: trial.values for trial in result.trials}[number] == (0.125,)


def test_a_worker_that_dies_before_it_says_who_it_is(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=2)
    SweepStudy(config).study.ask()
    assert sweep_with(config).counts == {"complete": 2}


def test_a_trial_that_kills_its_workers_is_given_up(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=1, max_retry=1)
    values = [killed(config)[1] for _ in range(2)]
    assert values[0] == values[1]
    result = sweep_with(config)
    assert result.lost == 2
    assert result.counts == {"complete": 1}


def test_a_worker_that_lives_keeps_its_trial(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    one, other = SweepStudy(config), SweepStudy(config)
    with one.alive():
        trial = one.ask()
        assert trial is not None
        assert other.bury() == 0
    assert other.study.trials[trial.number].state == TrialState.RUNNING


def test_ctrl_c_queues_the_trial_again_however_often(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=2, max_retry=0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sweep_with(config, Training(raising(KeyboardInterrupt())))
    result = sweep_with(config)
    assert result.lost == 2
    assert result.counts == {"complete": 2}


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_a_trial_of_another_machine_is_tried_again_when_it_gives_no_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(storage, "HEARTBEAT_S", 1)
    monkeypatch.setattr(storage, "GRACE_S", 1)
    monkeypatch.setattr("autoprec.sweep.studies.GRACE_S", 1)
    url = f"{'journal:' if kind == 'journal' else 'sqlite:///'}{tmp_path / 'shared'}"
    config = config_of(tmp_path, storage=url, trials=2)
    sweep = SweepStudy(config.model_copy(update={"out": tmp_path / "other-machine"}))
    trial = sweep.ask()
    assert trial is not None
    from autoprec.sweep.worker import _beat

    _beat(sweep, trial)
    here = SweepStudy(config)
    assert here.ask() is not None  # there is a second one
    assert here.ask() is None  # and the first one may yet live
    time.sleep(2.1)
    assert here.ask() is not None
    assert [is_lost(each) for each in here.study.trials].count(True) == 1


# storages


def work(config: SweepConfig) -> None:
    with storage.quiet_optuna():
        SweepWorker(SweepStudy(config), measuring=Training()).run()


@pytest.mark.parametrize("url", [None, "journal"])
def test_six_processes_share_a_file(tmp_path: Path, url: str | None) -> None:
    config = config_of(tmp_path, trials=18, storage=None if url is None else f"journal:{tmp_path / 'study.log'}")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(config,)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    result = collect(config, SweepStudy(config).study)
    assert result.counts == {"complete": 18}
    assert result.lost == 0


def test_a_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_BUSY_S", 0)
    config = config_of(tmp_path)
    sweep = SweepStudy(config)
    other = sqlite3.connect(config.out / "study.db", check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")

    def release() -> None:
        time.sleep(0.5)
        other.rollback()
        other.close()

    thread = Thread(target=release)
    thread.start()
    sweep.study.set_user_attr("waited", True)
    thread.join()
    assert sweep.study.user_attrs["waited"] is True


@pytest.mark.parametrize(
    "url",
    ["nothing://here", "grpc://nobody", "sqlite:////no/such/folder/study.db", "postgresql://nobody@127.0.0.1:1/x"],
)
def test_storages_that_cannot_be_opened_say_what_they_may_be(tmp_path: Path, url: str) -> None:
    with pytest.raises(SweepError, match="grpc://"):
        SweepStudy(config_of(tmp_path, storage=url))


@pytest.mark.slow
def test_a_sweep_through_a_grpc_proxy(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(str(tmp_path / "study.log"), port))
    server.start()
    try:
        result = sweep_with(config_of(tmp_path, storage=f"grpc://127.0.0.1:{port}", trials=3))
    finally:
        server.kill()
        server.join()
    assert result.counts == {"complete": 3}


def serve(path: str, port: int) -> None:
    from optuna.storages import JournalStorage, run_grpc_proxy_server
    from optuna.storages.journal import JournalFileBackend

    run_grpc_proxy_server(JournalStorage(JournalFileBackend(path)), host="127.0.0.1", port=port)


def test_another_sweep_in_the_same_study_is_refused(tmp_path: Path) -> None:
    sweep_with(config_of(tmp_path, trials=1))
    with pytest.raises(SweepError, match="`seeds` was 1 and is 2"):
        SweepStudy(config_of(tmp_path, seeds=2))
    with pytest.raises(SweepError, match="no sweep `other` to go on with"):
        SweepStudy(config_of(tmp_path, name="other"), must_exist=True)


def test_more_trials_go_on_where_a_sweep_ended(tmp_path: Path) -> None:
    first = sweep_with(config_of(tmp_path, trials=2))
    more = sweep_with(config_of(tmp_path, trials=5))
    assert more.trials[:2] == first.trials
    assert len(more.trials) == 5


def test_the_dashboard_lists_the_study_and_its_artifacts(tmp_path: Path) -> None:
    dashboard = pytest.importorskip("optuna_dashboard")
    config = config_of(tmp_path, trials=2, objectives=["val_loss", "step_ms"])
    sweep_with(config, Training(trade_off))
    app = dashboard.wsgi(storage.default_url(config.out))
    (listed,) = get_json(app, "/api/studies")["study_summaries"]
    assert listed["study_name"] == "build"
    detail = get_json(app, f"/api/studies/{listed['study_id']}")
    assert [trial["state"] for trial in detail["trials"]] == ["Complete", "Complete"]
    assert detail["objective_names"] == ["val_loss", "step_ms"]
    assert [artifact["filename"] for artifact in detail["trials"][0]["artifacts"]] == ["result.json"]


def get_json(app: Any, path: str) -> Any:
    from wsgiref.util import setup_testing_defaults

    environment: dict[str, Any] = {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
    setup_testing_defaults(environment)
    status: list[str] = []
    body = b"".join(app(environment, lambda line, headers, *rest: status.append(line)))
    assert status[0].startswith("200"), (status, body)
    return json.loads(body)


def test_results_of_optuna_are_ours(tmp_path: Path) -> None:
    config = config_of(tmp_path, trials=8, objectives=["val_loss", "step_ms"])
    result = sweep_with(config, Training(lambda lr: {"val_loss": (lr - 0.5) ** 2, "step_ms": lr}))
    study = optuna.load_study(study_name="build", storage=storage.default_url(config.out))
    assert {trial.number for trial in study.best_trials} == set(result.front)
