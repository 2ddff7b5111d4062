"""Trainings with a row for every knob: the same steps as the environments behind them, and PPO goes on learning there.

Time budget: 15 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("stable_baselines3")
pytest.importorskip("gymnasium")
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import PPO

from autoprec.encoding import FEATURES
from autoprec.envs.training_rows import TrainingRows
from tests.small_fits import Full
from tests.training_envs import Maker, make_env, nothing_left, random_moves


class Deeper(Full):
    """One layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Linear(2, 2))


def act(rows: TrainingRows, actions: Any) -> Any:
    return rows.step(actions)


def test_rows_are_those_of_the_environments() -> None:
    single, other = make_env(), make_env(Maker(Deeper))
    rows = TrainingRows([make_env(), make_env(Maker(Deeper))])
    assert rows.num_envs == single.rows + other.rows
    assert rows.run_of_row.tolist() == [0] * single.rows + [1] * other.rows
    rows.seed(3)
    observation = rows.reset()
    assert isinstance(observation, np.ndarray)
    assert observation.shape == (rows.num_envs, len(FEATURES))
    expected = [env.reset(seed=seed)[0] for env, seed in ((single, 3), (other, 3 + single.rows))]
    np.testing.assert_array_equal(observation.reshape(-1), np.concatenate(expected))
    moves = random_moves(single), random_moves(other, 1)
    for step in range(3):
        actions = [moves[0](step), moves[1](step)]
        results = [env.step(action) for env, action in zip((single, other), actions, strict=True)]
        observation, rewards, dones, _ = act(rows, np.concatenate(actions))
        np.testing.assert_array_equal(observation.reshape(-1), np.concatenate([result[0] for result in results]))
        expected_rewards = np.array([result[1] for result in results], dtype=np.float32)[rows.run_of_row]
        np.testing.assert_array_equal(rewards, expected_rewards)
        assert not dones.any()
        masks = np.concatenate([env.action_masks() for env in (single, other)])
        np.testing.assert_array_equal(rows.action_masks().reshape(-1), masks)
        np.testing.assert_array_equal(rows.env_method("action_masks", indices=[1]), rows.action_masks()[1:2])
    for env in (single, other, rows):
        env.close()


@pytest.mark.parametrize("limit", [None, 2], ids=["end", "time limit"])
def test_episodes_end_as_stable_baselines_expects(limit: int | None) -> None:
    env = make_env()
    rows = TrainingRows([env if limit is None else TimeLimit(env, limit)])
    rows.reset()
    keep = np.ones(rows.num_envs, dtype=np.int64)
    total, dones = 0.0, np.zeros(1, dtype=bool)
    while not dones.any():
        observation, rewards, dones, infos = act(rows, keep)
        total += float(rewards[0])
    assert dones.all()
    assert isinstance(observation, np.ndarray)
    for row, info in enumerate(infos):
        assert info["TimeLimit.truncated"] == (limit is not None)
        assert info["episode"]["r"] == pytest.approx(total, rel=1e-5)
        assert info["terminal_observation"].shape == (len(FEATURES),)
        assert (info["terminal_observation"] != observation[row]).any()
    rows.close()


@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_the_same_ppo_goes_on_learning() -> None:
    with nothing_left(draws=True):
        rows = TrainingRows([make_env(Maker(max_epochs=2), interval=2)])
        model = PPO("MlpPolicy", rows, n_steps=4, batch_size=rows.num_envs * 2, n_epochs=1, device="cpu", seed=1)
        before = {name: value.clone() for name, value in model.policy.state_dict().items()}
        model.learn(64)
        after = model.policy.state_dict()
        assert model.num_timesteps >= 64
        assert all(bool(torch.isfinite(value).all()) for value in after.values())
        assert any(not torch.equal(before[name], after[name]) for name in before)
        rows.close()


def test_none_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="It needs one environment at least"):
        TrainingRows([])


def test_wrong_use_is_named() -> None:
    env = make_env()
    with pytest.raises(ValueError, match="an environment twice"):
        TrainingRows([env, TimeLimit(env, 3)])
    with pytest.raises(TypeError, match="Passed `TrainingRows` a `int`"):
        TrainingRows([3])  # type: ignore[list-item]
    rows = TrainingRows([env])
    rows.reset()
    for actions in (np.ones(env.rows + 1), np.full(env.rows, 3), np.ones((env.rows, 1)), np.array(1)):
        with pytest.raises(ValueError, match=f"There must be {env.rows}, each 0, 1 or 2"):
            act(rows, actions)
    act(rows, np.ones(env.rows))
    rows.close()
