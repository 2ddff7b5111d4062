"""The contextual bandit: better than any constant where context matters, within its budget, blind to true costs.

Time budget: 10 s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoprec.envs.baselines import Table, play
from autoprec.envs.proxies import Bank, Distribution, Task
from autoprec.envs.twins import Twin, run_twins
from autoprec.table import TableSettings
from tests.kernels import needs_cpu_kernels

pytest.importorskip("optuna")
pytest.importorskip("stable_baselines3")
from autoprec.policies import bandit as bandit_module
from autoprec.policies.bandit import CONTEXT, Bandit, context, default_arms, fit_bandit
from autoprec.policies.tuning_study import Meter

SMALL = Distribution(units=(3, 4), widths=(32,), budget=48, late_budget=96, steps=8, late_steps=8)
REAL = Distribution(units=(3, 4), widths=(32,))
"""Tasks as long as those of the banks, which nobody trains here."""
ARMS = [TableSettings(), TableSettings(batch=1), TableSettings(batch=2)]
Tasks = Sequence[tuple[Task, Twin]]


def gain(task: Task, settings: TableSettings) -> float:
    """Long runs want a large batch, short ones a small one."""
    is_long = task.budget > REAL.budget
    return 0.1 * settings.batch * (1.0 if is_long else -1.0)


def synthetic(tasks: Tasks, settings: TableSettings, meter: Meter) -> Any:
    meter.spend(len(tasks))
    # what a task is worth whatever the settings differs more than what settings make of it
    return np.array([np.sin(task.seed) + gain(task, settings) for task, _ in tasks])


@pytest.fixture(scope="module")
def tasks() -> list[tuple[Task, Twin]]:
    return [(task, Twin(2.0, 1.0)) for task in Bank("train", 120, REAL)]


def test_it_beats_the_best_constant_arm(tasks: Tasks) -> None:
    bandit = fit_bandit(tasks, budget_decisions=400, seed=0, arms=ARMS, play=synthetic)
    others = list(Bank("val", 100, REAL))
    chosen = bandit.chosen(others)
    made = np.mean([gain(task, ARMS[arm]) for task, arm in zip(others, chosen, strict=True)])
    constants = [np.mean([gain(task, arm) for task in others]) for arm in ARMS]
    assert made > max(constants) + 0.03
    assert chosen[[task.budget > REAL.budget for task in others]].tolist() == [2] * sum(
        task.budget > REAL.budget for task in others
    )


def test_the_budget_and_the_seed_hold(tasks: Tasks) -> None:
    same = [fit_bandit(tasks, budget_decisions=200, seed=4, arms=ARMS, play=synthetic) for _ in range(2)]
    assert same[0].decisions <= 200
    np.testing.assert_array_equal(same[0].weights, same[1].weights)
    other = fit_bandit(tasks, budget_decisions=200, seed=5, arms=ARMS, play=synthetic)
    assert not np.array_equal(other.weights, same[0].weights)


def test_nothing_is_learnt_without_a_budget(tasks: Tasks) -> None:
    bandit = fit_bandit(tasks, budget_decisions=0, seed=0, arms=ARMS, play=synthetic)
    assert not bandit.weights.any()
    assert set(bandit.chosen([task for task, _ in tasks])) == {0}


def test_no_task_is_played_twice_with_one_arm(tasks: Tasks) -> None:
    played: list[tuple[int, TableSettings]] = []

    def noted(part: Tasks, settings: TableSettings, meter: Meter) -> Any:
        played.extend((task.seed, settings) for task, _ in part)
        return synthetic(part, settings, meter)

    fit_bandit(tasks, budget_decisions=10_000, seed=0, arms=ARMS, play=noted)
    assert len(played) == len(set(played)) == len(tasks) * len(ARMS)


def test_the_context_knows_no_true_cost_and_no_optimizer(tasks: Tasks) -> None:
    some = [task for task, _ in tasks[:20]]
    changed = []
    for task in some:
        spec = task.spec.copy()
        spec["optimizer"] = (int(spec["optimizer"]) + 1) % 3
        changed.append(replace(task, cost=task.cost * 3.0, spec=spec, lr=task.lr * 2.0))
    hidden = [replace(task, table=np.full_like(task.table, np.nan)) for task in some]
    np.testing.assert_array_equal(context(some), context(changed))
    unknown = context(hidden)
    assert not unknown[:, [CONTEXT.index("table_known"), CONTEXT.index("growth_lower")]].any()
    with_other_times = [replace(task, overhead=task.overhead + 1.0, batch_exponent=0.1) for task in hidden]
    np.testing.assert_array_equal(unknown, context(with_other_times))
    assert np.isfinite(context(some)).all()


def test_it_survives_json(tasks: Tasks) -> None:
    bandit = fit_bandit(
        tasks, budget_decisions=200, seed=0, arms=[*ARMS, TableSettings(clip=float("inf"))], play=synthetic
    )
    found = json.loads(json.dumps(bandit.to_dict(), allow_nan=False))
    again = Bandit.from_dict(found)
    assert again.arms == bandit.arms
    np.testing.assert_array_equal(again.weights, bandit.weights)
    with pytest.raises(ValueError, match="Passed a bandit with context"):
        Bandit.from_dict({**found, "context": ["units"]})


def test_it_says_what_it_needs(tasks: Tasks) -> None:
    with pytest.raises(ValueError, match="120 tasks and 1 arms"):
        fit_bandit(tasks, budget_decisions=1, seed=0, arms=ARMS[:1])
    assert len(default_arms()) == len(set(default_arms())) > 4


def test_a_command_that_learns_nothing_writes_nothing(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bandit_module, "load_tasks", lambda bank: tasks)
    out = tmp_path / "bandit.json"
    for budget, said in (("-1", "passed '-1'"), ("1", "does not last")):
        with pytest.raises(SystemExit):
            bandit_module.main(["--budget", budget, "--out", str(out)])
        assert said in capsys.readouterr().err
    assert not out.exists()


@needs_cpu_kernels
def test_each_run_plays_its_own_arm() -> None:
    drawn = list(Bank("train", 8, SMALL))
    pairs = [(task, Twin(t.first_loss, t.first_loss / 1.5)) for task, t in zip(drawn, run_twins(drawn), strict=True)]
    weights = np.zeros((2, len(CONTEXT)))
    weights[1, CONTEXT.index("run_length")] = 1.0
    weights[1, 0] = 1.8  # log2 of the length of a run is -2.3 or -1.3
    bandit = Bandit(arms=(ARMS[0], ARMS[2]), weights=weights)
    chosen = bandit.chosen(drawn)
    assert set(chosen) == {0, 1}
    found = play(pairs, bandit).score
    alone = [play(pairs, Table(settings=arm)).score for arm in bandit.arms]
    np.testing.assert_array_equal(found, np.where(chosen == 1, alone[1], alone[0]))
    fitted = fit_bandit(pairs, budget_decisions=120, seed=0, arms=ARMS)
    assert 0 < fitted.decisions <= 120
    assert np.isfinite(fitted.play(pairs)).all()
