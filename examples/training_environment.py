"""Steers the training of a small classifier as an environment of gymnasium: three scripted agents, then PPO.

    pip install '.[rl]'                      # once, in the checkout
    python examples/training_environment.py  # half a minute on one core

An episode is one `Trainer.fit` of the module below, which knows nothing of precision or autoprec. A step is the stretch
from one decision to the next. What time costs is told by relative costs of formats, so that the same seed gives the
same numbers; leave `cost` out to go by the clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import gymnasium
import lightning.pytorch as pl
import numpy as np
import torch
from stable_baselines3 import PPO
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import autoprec.envs
from autoprec import AutoPrecisionConfig
from autoprec.envs.step_cost import FormatCost

Batch = tuple[Tensor, Tensor]
LOWER, KEEP, RAISE = 0, 1, 2


class Classifier(pl.LightningModule):
    """A plain LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make() -> tuple[pl.LightningModule, tuple[DataLoader[Any], DataLoader[Any]], dict[str, Any]]:
    """What is trained, as `autoprec compare` takes it too."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(1280, 16, generator=generator)
    labels = torch.tanh(samples @ torch.randn(16, 8, generator=generator)) @ torch.randn(8, 4, generator=generator)
    data = TensorDataset(samples, labels.argmax(dim=1))
    train, held_out = torch.utils.data.random_split(data, [1024, 256], generator)
    loaders = DataLoader(train, batch_size=16, shuffle=True), DataLoader(held_out, batch_size=256)
    return Classifier(), loaders, {"accelerator": "cpu", "max_epochs": 2, "deterministic": True}


def play(env: Any, act: Callable[[int], Any]) -> tuple[float, dict[str, Any]]:
    """Plays one episode and returns the sum of its rewards, and what is known at its end."""
    env.reset(seed=0)
    total, step, is_over = 0.0, 0, False
    info: dict[str, Any] = {}
    while not is_over:
        _, reward, terminated, truncated, info = env.step(act(step))
        total, step, is_over = total + reward, step + 1, terminated or truncated
    return total, info


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=256, help="steps that PPO learns from")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    gymnasium.register_envs(autoprec.envs)
    env = gymnasium.make(
        "autoprec/Training-v0",
        make=make,
        interval=8,
        mode="ladder",  # actions move knobs from where they are; "offset": from what the table proposes
        cost=FormatCost(),
        config=AutoPrecisionConfig(formats=("fp32", "bf16", "fp16")),
        max_episode_steps=50,  # a limit that these short trainings do not meet
    )
    units: tuple[str, ...] = env.get_wrapper_attr("unit_names")
    rows = env.get_wrapper_attr("rows")
    print(f"{rows} knobs: the formats of {', '.join(units)}; loss scale, batch size and clip")

    keep = np.full(rows, KEEP)
    lower_units = np.array([LOWER] * len(units) + [KEEP] * 3)  # fp32 -> bf16
    drawn = np.random.default_rng(0).integers(0, 3, (50, rows))
    agents: dict[str, Callable[[int], Any]] = {
        "stay in fp32": lambda step: keep,
        "bf16 from the first decision on": lambda step: lower_units if step == 0 else keep,
        "random": lambda step: drawn[step],
    }
    for name, act in agents.items():
        total, info = play(env, act)
        print(f"{name:32} return {total:6.2f}  loss {info['loss']:.3f}  time {info['time_share']:.2f} of fp32's")

    model = PPO("MlpPolicy", env, n_steps=32, batch_size=32, n_epochs=4, gamma=0.98, device="cpu", seed=0)
    model.learn(arguments.steps)
    observation, _ = env.reset(seed=0)
    total, is_over = 0.0, False
    while not is_over:
        action, _ = model.predict(observation, deterministic=True)
        observation, reward, terminated, truncated, info = env.step(action)
        total, is_over = total + float(reward), terminated or truncated
    print(f"{f'PPO after {model.num_timesteps} steps':32} return {total:6.2f}  loss {info['loss']:.3f}", end="")
    print(f"  time {info['time_share']:.2f} of fp32's")
    env.close()


if __name__ == "__main__":
    main()
