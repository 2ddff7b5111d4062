"""Trains a policy on simulated runs and lets it decide in a real one.

    pip install '.[cli,rl,sweep]'    # once, in the checkout
    python examples/own_policy.py    # a minute on one core

This is far too short to learn anything worth having. A policy that could be used takes hours: `autoprec train-policy`
trains it, and `autoprec evaluate-policy` says whether it is better than the table that it begins with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback
from autoprec.policies.ppo import train_policy
from autoprec.policies.train_settings import load_settings

# small models and short runs only: the shares of drawn tasks are settings, too
TASKS = {"units": [3, 4], "widths": [32], "architectures": {"mlp": 1.0}, "budget": 64, "late_budget": 64}
TASKS |= {"steps": 8, "late_steps": 8}


class Regression(pl.LightningModule):
    """A plain LightningModule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=2000, help="decisions of simulated runs to learn from")
    options = parser.parse_args()
    if options.decisions < 1:
        parser.error(f"--decisions is {options.decisions}, and at least 1 is needed")

    settings = load_settings(
        decisions=options.decisions,
        n_envs=8,
        n_steps=16,
        segment=5,
        batch_size=256,
        net_arch=[32],
        statistics_steps=8,
        train={"name": "train", "size": 32, "distribution": TASKS},
        validation={"name": "val", "size": 16, "distribution": TASKS},
    )
    with TemporaryDirectory() as folder:
        policy = train_policy(settings, seed=0, folder=Path(folder) / "my-policy")
        card = json.loads((policy / "policy.json").read_text())
        print("trained:", sorted(each.name for each in policy.iterdir()))
        print("features it looks at:", len(card["features"]))
        auto = AutoPrecisionCallback(policy=policy, interval=10)
        trainer = pl.Trainer(max_epochs=1, callbacks=[auto], logger=False, enable_checkpointing=False)
        samples = torch.randn(128 * 60, 32)
        data = TensorDataset(samples, samples.square().mean(1, keepdim=True))
        trainer.fit(Regression(width=512), DataLoader(data, batch_size=128))
    for each in auto.history:
        print(f"step {each.step}: {each.unit or each.knob} {each.before} -> {each.applied} ({each.reason})")


if __name__ == "__main__":
    main()
