"""Playing policies on proxy tasks: order, equality with the baselines' player, guard, recordings.

Time budget: 20 s.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autoprec.encoding import FEATURES
from autoprec.envs.baselines import Table, play
from autoprec.envs.proxies import Bank, Distribution, Task
from autoprec.envs.twins import Twin, run_twins
from autoprec.feature_rows import INDEX
from tests.kernels import needs_cpu_kernels

pytest.importorskip("stable_baselines3")
pytest.importorskip("gymnasium")
from autoprec.envs.proxy_env import ProxyVecEnv
from autoprec.policies import play as playing
from autoprec.policies.play import Recording, play_policy

pytestmark = needs_cpu_kernels

SMALL = Distribution(units=(3, 4), widths=(32,), budget=48, late_budget=64, steps=8, late_steps=8)
Tasks = list[tuple[Task, Twin]]


@pytest.fixture(scope="module")
def tasks() -> Tasks:
    drawn = list(Bank("train", 10, SMALL))
    # short runs make little progress; what a twin is worth is of no matter here
    return [
        (task, Twin(twin.first_loss, twin.first_loss / 1.5)) for task, twin in zip(drawn, run_twins(drawn), strict=True)
    ]


def test_keeping_everywhere_is_the_table(tasks: Tasks) -> None:
    kept, table = play_policy(tasks, None, guard=False), play(tasks, Table())
    for mine, theirs in zip(kept, table, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_order_of_scores_is_that_of_the_tasks(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = play_policy(tasks, None)
    assert len(set(expected.score.tolist())) == len(tasks)
    monkeypatch.setattr(playing, "CHUNK", 3)
    done: list[int] = []
    order = [7, 1, 9, 1, 0]  # one of them twice
    found = play_policy([tasks[index] for index in order], None, progress=done.append)
    np.testing.assert_array_equal(found.score, expected.score[order])
    assert done == [3, 5]


def lower_units(rows: Any) -> Any:
    return np.where(rows[:, INDEX["knob_precision"]] == 1.0, -1, 0)


class Constantly(nn.Module):
    """Logits that do not depend on rows."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.biases = logits

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows.shape[1] == len(FEATURES)
        return torch.tensor(self.biases).expand(len(rows), 3)


def test_networks_take_the_likeliest_move_or_draw_one(tasks: Tasks) -> None:
    few = tasks[:4]
    lowered = play_policy(few, Constantly(2.0, 1.0, 1.0), mode="ladder", record=True)[1]
    assert (lowered.unit_moves[lowered.level >= 0] == -1).all()
    assert (lowered.knob_moves[lowered.is_played] == -1).all()
    drawn = [
        play_policy(few, Constantly(1.0, 1.0, 1.0), mode="ladder", sampled=seed, record=True)[1].unit_moves
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert drawn[0].shape != drawn[2].shape or (drawn[0] != drawn[2]).any()
    assert set(np.unique(drawn[0])) == {-1, 0, 1}


def test_policies_of_stable_baselines_decide(tasks: Tasks) -> None:
    import gymnasium
    from stable_baselines3.common.policies import ActorCriticPolicy

    box = gymnasium.spaces.Box(-10, 10, (len(FEATURES),), np.float32)
    policy = ActorCriticPolicy(box, gymnasium.spaces.Discrete(3), lambda _: 1e-3)
    with torch.no_grad():
        dict(policy.named_parameters())["action_net.bias"].copy_(torch.tensor([100.0, 0.0, 0.0]))
    recording = play_policy(tasks[:3], policy, record=True)[1]
    assert (recording.unit_moves[recording.level >= 0] == -1).all()


def test_recordings_hold_what_scores_sum_up(tasks: Tasks) -> None:
    scores, recording = play_policy(tasks, lower_units, mode="ladder", record=True)
    windows = recording.is_played.sum(axis=0)
    assert recording.is_played.any(axis=1).all()
    assert (np.diff(recording.is_played.astype(int), axis=0) <= 0).all()  # runs end once
    played = recording.is_played
    np.testing.assert_array_equal(np.where(played, recording.steps, 0).sum(axis=0), scores.steps)
    np.testing.assert_array_equal(np.where(played, recording.skipped, 0).sum(axis=0), scores.skipped)
    is_unit = recording.level >= 0
    means = np.where(is_unit, recording.level, 0).sum(axis=2) / np.maximum(is_unit.sum(axis=2), 1)
    np.testing.assert_allclose(means.sum(axis=0) / windows, scores.level)
    for index, (task, twin) in enumerate(tasks):
        assert recording.tasks[index] is task
        assert (is_unit[: windows[index], index].sum(axis=1) == task.units).all()
        last = recording.loss[windows[index] - 1, index]
        if not scores.diverged[index]:
            assert scores.score[index] == pytest.approx(np.log(twin.first_loss / last) / twin.progress, rel=1e-5)
        formats = recording.formats[0, index, : task.units]
        np.testing.assert_array_equal(formats, task.ladder[1])  # one lower than fp32
        assert np.isnan(recording.share[windows[index] :, index]).all()
    for field in fields(Recording):
        if field.name != "tasks":
            assert getattr(recording, field.name).shape[:2] == recording.is_played.shape


def test_the_guard_raises_offenders_and_its_absence_does_not(tasks: Tasks) -> None:
    for guard in (True, False):
        recording = play_policy(tasks, lower_units, mode="ladder", guard=guard, record=True)[1]
        at = np.argwhere((recording.offender[:-1] >= 0) & recording.is_played[1:])
        assert len(at)
        units = recording.offender[at[:, 0], at[:, 1]]
        before = recording.level[at[:, 0], at[:, 1], units]
        after = recording.level[at[:, 0] + 1, at[:, 1], units]
        overflown = recording.overflows[at[:, 0], at[:, 1], units]
        assert (overflown > 0).all()
        assert (after < before).all() if guard else (after >= before).all()


class Prepared:
    """Sets the clip before the first window and counts runs."""

    def __init__(self) -> None:
        self.runs = 0

    def start(self, env: ProxyVecEnv) -> None:
        self.runs += len(env.simulation)
        env.simulation.clip_index[:] = 1

    def __call__(self, rows: Any) -> Any:
        return np.zeros(len(rows), dtype=np.int64)


def test_policies_that_remember_are_told_of_each_chunk(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "CHUNK", 4)
    prepared = Prepared()
    recording = play_policy(tasks, prepared, mode="ladder", record=True)[1]
    assert prepared.runs == len(tasks)
    assert (recording.clip[recording.is_played] == 1).all()
