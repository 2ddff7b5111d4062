"""Black-box tuning: finds a known optimum, keeps to its budget and seed, goes on after an interruption.

Time budget: 10 s.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoprec.envs.proxies import Bank, Distribution, Task
from autoprec.envs.twins import Twin, run_twins
from autoprec.table import TableSettings
from tests.kernels import needs_cpu_kernels

pytest.importorskip("optuna")
pytest.importorskip("stable_baselines3")
from autoprec.policies import tuning
from autoprec.policies.play import play_policy
from autoprec.policies.rule_rival import RuleKnobs
from autoprec.policies.tuning import default_settings, play_settings, problem_of, read_tuned, settings_from, tune_table
from autoprec.policies.tuning_study import Meter, Metered, Params, Problem, Scores, search

TASKS = 9
BEST = 0.3
SMALL = Distribution(units=(3,), widths=(32,), budget=24, late_budget=24, steps=8, late_steps=8)


class Stub:
    """A parabola with a known top; each task moves it up or down. Notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, slice]] = []
        self.fails_at = -1

    def evaluate(self, params: Params, part: slice, meter: Meter) -> Scores:
        if len(self.asked) == self.fails_at:
            raise KeyboardInterrupt
        self.asked.append((params["x"], part))
        tasks = np.arange(TASKS)[part]
        meter.spend(10 * len(tasks))
        return np.asarray(np.sin(tasks) - (params["x"] - BEST) ** 2, dtype=np.float64)

    def problem(self) -> Problem:
        def suggest(trial: Any) -> Params:
            return {"x": trial.suggest_float("x", -1.0, 1.0)}

        return Problem(
            name="stub", suggest=suggest, evaluate=self.evaluate, first=[{"x": -0.9}], tasks=TASKS, least_tasks=1
        )


def test_a_known_optimum_is_found() -> None:
    found = search(Stub().problem(), budget_decisions=2500, seed=1)
    assert abs(found.params["x"] - BEST) < 0.1
    assert found.score > found.default_score + 1.0
    assert found.default_score == pytest.approx(np.sin(np.arange(TASKS)).mean() - (-0.9 - BEST) ** 2)
    assert found.best[0] == (found.params, found.score)
    assert [score for _, score in found.best] == sorted((score for _, score in found.best), reverse=True)


def test_trials_grow_and_bad_ones_are_pruned() -> None:
    stub = Stub()
    found = search(stub.problem(), budget_decisions=2500, seed=1)
    assert stub.problem().rungs() == [1, 3, 9]
    assert found.pruned > found.trials > 1
    by_value: dict[float, list[slice]] = {}
    for value, part in stub.asked:
        by_value.setdefault(value, []).append(part)
    assert by_value[-0.9] == [slice(0, 1), slice(1, 3), slice(3, 9)]  # the default is never pruned
    reached = {value: parts[-1].stop for value, parts in by_value.items()}
    far = [stop for value, stop in reached.items() if abs(value - BEST) > 0.8 and value != -0.9]
    assert far
    assert max(far) < TASKS


def test_the_budget_is_never_exceeded() -> None:
    for budget in (91, 135, 500):
        stub = Stub()
        found = search(stub.problem(), budget_decisions=budget, seed=0)
        spent = 10 * sum(part.stop - part.start for _, part in stub.asked)
        assert found.decisions <= budget
        assert spent - found.decisions in (0, 10, 20, 60)  # what was refused was not played
    with pytest.raises(ValueError, match="Passed a budget of 89 decisions"):
        search(Stub().problem(), budget_decisions=89, seed=0)


def test_the_seed_decides() -> None:
    values = [
        [value for value, _ in stub.asked]
        for seed in (3, 3, 4)
        if search((stub := Stub()).problem(), budget_decisions=600, seed=seed)
    ]
    assert values[0] == values[1] != values[2]


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = search(Stub().problem(), budget_decisions=900, seed=2)
    stub = Stub()
    stub.fails_at = 17
    with pytest.raises(KeyboardInterrupt):
        search(stub.problem(), budget_decisions=900, seed=2, journal=tmp_path / "a" / "trials.log")
    resumed = Stub()
    assert search(resumed.problem(), budget_decisions=900, seed=2, journal=tmp_path / "a" / "trials.log") == whole
    assert -0.9 not in [value for value, _ in resumed.asked]  # what was done is not done again
    with pytest.raises(ValueError, match="of another search"):
        search(resumed.problem(), budget_decisions=900, seed=3, journal=tmp_path / "a" / "trials.log")


def test_a_problem_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="least_tasks=0"):
        replace(Stub().problem(), least_tasks=0)


def test_settings_survive_json() -> None:
    settings = TableSettings(threshold=0.2, clip=float("inf"), schedule=(0.5,))
    written = json.loads(json.dumps({"threshold": 0.2, "clip": "inf", "schedule": [0.5]}))
    assert settings_from("plain", written) == settings
    assert settings_from("rule", {"stable_cv": 0.5, "clip": "inf"}) == RuleKnobs(stable_cv=0.5, clip=float("inf"))
    with pytest.raises(ValueError, match="'threshold'"):
        settings_from("rule", {"threshold": 1.0})
    with pytest.raises(ValueError, match="'tresholds'"):
        settings_from("plain", {"tresholds": 1.0})
    with pytest.raises(ValueError, match="'rule_of_thumb'"):
        problem_of([], "rule_of_thumb")


@pytest.fixture(scope="module")
def tasks() -> list[tuple[Task, Twin]]:
    drawn = list(Bank("train", 6, SMALL))
    twins = run_twins(drawn)
    return [(task, Twin(t.first_loss, t.first_loss / 1.5)) for task, t in zip(drawn, twins, strict=True)]


@needs_cpu_kernels
@pytest.mark.parametrize("name", tuning.SEARCHES)
def test_the_default_is_where_it_begins(tasks: list[tuple[Task, Twin]], name: str) -> None:
    tuned = search(problem_of(tasks, name), budget_decisions=60, seed=0)
    default = default_settings(name)
    assert tuned.default_score == pytest.approx(play_settings(tasks, default).mean())
    assert tuned.decisions <= 60
    found = settings_from(name, tuned.params)
    assert type(found) is type(default)
    assert bool(found.schedule) <= (name == "schedule")


@needs_cpu_kernels
def test_decisions_are_those_of_runs_with_budget(tasks: list[tuple[Task, Twin]]) -> None:
    meter = Meter(10_000)
    _, recording = play_policy(tasks, Metered(lambda rows: np.zeros(len(rows), dtype=np.int64), meter), record=True)
    assert meter.used == recording.is_played.sum()


@needs_cpu_kernels
def test_settings_come_back(tasks: list[tuple[Task, Twin]]) -> None:
    assert isinstance(tune_table(tasks, budget_decisions=50, seed=0), TableSettings)
    assert not tune_table(tasks, budget_decisions=50, seed=0, has_schedule=False).schedule


@needs_cpu_kernels
def test_the_command_writes_what_rivals_read(
    tasks: list[tuple[Task, Twin]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tuning, "load_tasks", lambda bank: tasks)
    out = tmp_path / "tuned.json"
    arguments = ["--budget", "60", "--search", "plain", "--held-out", "6", "--out", str(out)]
    assert tuning.main([*arguments, "--journal", str(tmp_path / "journal")]) == 0
    entry = json.loads(out.read_text())["plain"]
    assert entry["decisions"] <= entry["budget"] == 60
    assert entry["command"].startswith("python -m autoprec.policies.tuning --budget 60")
    assert set(entry["held_out"]["gain"]) <= {"all", "standard", "drift", "late"}
    assert read_tuned("plain", out) == settings_from("plain", entry["settings"])
    assert "plain: gain on held-out tasks, all" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # a traceback teaches nothing
        tuning.main([*arguments, "--budget", "1"])
    assert "error: Passed a budget of 1 decisions" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="The file has \\['plain'\\]"):
        read_tuned("schedule", out)
