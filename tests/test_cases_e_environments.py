"""Cases E-03 and E-05 with siblings, for trainings of a module and for proxy runs.

Time budget: 30 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autoprec import AutoPrecisionConfig, GuardConfig, LossScaleConfig
from autoprec.encoding import FEATURES
from autoprec.envs.engine import FORMATS
from autoprec.envs.profiles import Range
from autoprec.envs.proxies import Bank, Distribution, Task
from autoprec.envs.step_cost import FormatCost
from autoprec.envs.twins import Twin, run_twins
from tests.kernels import needs_cpu_kernels
from tests.small_fits import Full, Plain
from tests.training_envs import Maker, make_env, play

pytest.importorskip("stable_baselines3")
pytest.importorskip("gymnasium")
import gymnasium
from gymnasium.utils.env_checker import check_env as check_gymnasium
from stable_baselines3.common.env_checker import check_env as check_sb3

from autoprec.envs.proxy_run import ProxyRunEnv

ZERO = Range(low=0.0, high=0.0)
SMALL = Distribution(
    units=(3,),
    widths=(32,),
    budget=96,
    ladders=(0, 1, 1, 0, 0),
    regimes=(1, 0, 0),
    tables=(1, 0, 0),
    steps=8,
    large_means=0.0,
    activation_bits=ZERO,
    gradient_bits=ZERO,
    loss_decades=ZERO,
    label_noise=ZERO,
)

# ---- trainings ----

SKIPS_ALL = LossScaleConfig(init_scale=2.0**120, floor=2.0**120, cap=2.0**120)


class Fragile(Plain):
    """Its weights are ruined where the first layer runs in fp16."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (callback,) = (each for each in self.trainer.callbacks if hasattr(each, "precision_map"))  # type: ignore[attr-defined]
        if callback.precision_map()["net.0"] == "fp16":
            with torch.no_grad():
                self.net.get_parameter("2.weight").fill_(1e4)
        return super().training_step(batch, batch_idx)


class FragileWithValidation(Fragile, Full):
    """The same, with a held-out loss."""


# the run begins in bf16; of the five rows the first two are the layers
KEEP, RAISE_ALL, LOWER_FIRST, LOWER_LAST = [1] * 5, [2, 2, 1, 1, 1], [0, 1, 1, 1, 1], [1, 0, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:.*no step was applied", "ignore:.*return to the copy", "ignore:autoprec")
@pytest.mark.parametrize("budget", [None, 32], ids=["own end", "budget"])
@pytest.mark.parametrize("kind", [FragileWithValidation, Fragile], ids=["held-out", "training"])
def test_e05_returns_of_four_agents_in_a_training(kind: type[Plain], budget: int | None) -> None:
    config = AutoPrecisionConfig(
        formats=("fp32", "bf16", "fp16"), loss_scale=SKIPS_ALL, guard=GuardConfig(max_consecutive_skips=10_000)
    )
    env = make_env(Maker(kind, precision="bf16-mixed"), config=config, budget=budget, cost=FormatCost(fixed=0.0))
    returns, infos = {}, {}
    for name, first in {"bf16": KEEP, "fp32": RAISE_ALL, "diverge": LOWER_FIRST, "skip": LOWER_LAST}.items():
        _, rewards, infos[name] = play(env, lambda step, first=first: np.array(KEEP if step else first))
        returns[name] = sum(rewards)
    env.close()
    assert returns["bf16"] >= returns["fp32"], returns
    assert returns["fp32"] > max(returns["skip"], returns["diverge"]), returns
    assert infos["diverge"]["diverged"]
    assert not any(infos[name]["diverged"] for name in ("bf16", "fp32", "skip"))
    assert infos["skip"]["skipped_steps"] > 20
    assert infos["skip"]["applied_steps"] < 8


# ---- proxies ----


@pytest.fixture(scope="module")
def tasks() -> list[tuple[Task, Twin]]:
    drawn = list(Bank("train", 6, SMALL))
    return [(task, Twin(twin.first_loss, twin.last_loss)) for task, twin in zip(drawn, run_twins(drawn), strict=True)]


def play_proxy(pair: tuple[Task, Twin], first: list[int], **changes: Any) -> tuple[float, bool, dict[str, Any]]:
    """Plays one run; returns the sum of its rewards, whether it was terminated, and what is known at its end."""
    env = ProxyRunEnv([(replace(pair[0], **changes), pair[1])], mode="ladder", guard=False)
    env.reset(seed=0)
    total, step, terminated, truncated = 0.0, 0, False, False
    info: dict[str, Any] = {}
    while not (terminated or truncated):
        _, reward, terminated, truncated, info = env.step(np.array([1] * env.rows if step else first))
        total, step = total + reward, step + 1
    env.close()
    return total, terminated, info


def agents_of(pair: tuple[Task, Twin]) -> dict[str, tuple[float, bool, dict[str, Any]]]:
    task = pair[0]
    cheaper = np.where(np.arange(len(FORMATS)) == 0, 1.0, 0.6)
    free = {"overhead": 0.0, "cast_cost": 0.0, "switch_cost": 0.0, "cost": task.compute_share[:, None] * cheaper}
    bf16, unscaled = FORMATS.index("bf16"), FORMATS.index("fp8-unscaled")
    lower, keep = [0] * 3 + [1] * 3, [1] * 6
    huge = task.spec.copy()
    huge["activation_bits"][:3] = 20.0  # far outside of fp8: every step is skipped, whatever the loss scale
    return {
        "fp32": play_proxy(pair, keep, **free),
        "bf16": play_proxy(pair, lower, ladder=(0, bf16), **free),
        "skip": play_proxy(pair, lower, ladder=(0, unscaled), spec=huge, **free),
        "diverge": play_proxy(pair, keep, lr=task.lr * 1e4, **free),
    }


@needs_cpu_kernels
def test_e05_returns_of_four_agents_in_proxies(tasks: list[tuple[Task, Twin]]) -> None:
    played = [agents_of(pair) for pair in tasks]
    returns = {name: float(np.mean([agents[name][0] for agents in played])) for name in played[0]}
    assert returns["bf16"] >= returns["fp32"] > max(returns["skip"], returns["diverge"]), returns
    for agents in played:
        assert agents["skip"][2]["skipped"] > 0.9 * (agents["skip"][2]["steps"] - 1)
        assert agents["diverge"][2]["diverged"]
        assert not any(agents[name][2]["diverged"] for name in ("fp32", "bf16", "skip"))
        assert all(terminated for _, terminated, _ in agents.values())


@needs_cpu_kernels
@pytest.mark.parametrize("mode", ["offset", "ladder"])
def test_e03_contract_of_a_proxy_run(tasks: list[tuple[Task, Twin]], mode: str) -> None:
    made = gymnasium.make("autoprec/Proxy-v0", tasks=tasks, mode=mode, max_episode_steps=4)
    check_sb3(made.unwrapped)
    check_gymnasium(made.unwrapped)
    env = ProxyRunEnv(tasks, mode=mode)
    assert env.observation_space.shape == (env.rows * len(FEATURES),)
    observation, _ = env.reset(seed=0)
    for _ in range(200):
        assert observation in env.observation_space
        assert env.action_masks().shape == (env.rows * 3,)
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        assert type(reward) is float
        assert np.isfinite(reward)
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    env.close()


@needs_cpu_kernels
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size")
def test_e03_ppo_learns_on_a_proxy_run(tasks: list[tuple[Task, Twin]]) -> None:
    from stable_baselines3 import PPO

    env = ProxyRunEnv(tasks)
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=1, device="cpu", seed=1)
    model.learn(64)
    assert model.num_timesteps == 64
    env.close()


@needs_cpu_kernels
def test_e05_a_time_limit_truncates_a_proxy_run(tasks: list[tuple[Task, Twin]]) -> None:
    for limited in (
        gymnasium.make("autoprec/Proxy-v0", tasks=tasks, max_episode_steps=2),
        ProxyRunEnv(tasks, max_decisions=2),
    ):
        limited.reset(seed=0)
        keep = np.ones(limited.get_wrapper_attr("rows"), dtype=np.int64)
        assert limited.step(keep)[2:4] == (False, False)
        assert limited.step(keep)[2:4] == (False, True)
        limited.close()


@needs_cpu_kernels
def test_units_that_no_task_has_are_refused(tasks: list[tuple[Task, Twin]]) -> None:
    with pytest.raises(ValueError, match=r"Tasks have \[3\] units"):
        ProxyRunEnv(tasks, units=9)
