"""Trains a small classifier with its precision under control, and prints what was decided and why.

    pip install .                    # once, in the checkout
    python examples/quickstart.py    # a few seconds

The callback is the only line about precision. Nothing is downloaded: the data is made up.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """A plain LightningModule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    if min(options.steps, options.width) < 1:
        parser.error("--steps and --width are at least 1")

    pl.seed_everything(0, verbose=False)
    samples = torch.randn(128 * options.steps, 64)
    labels = (samples @ torch.randn(64, 10)).argmax(dim=1)

    auto = AutoPrecisionCallback(interval=10)  # decides often, because this run is short
    trainer = pl.Trainer(
        max_epochs=1, callbacks=[auto], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Classifier(options.width), DataLoader(TensorDataset(samples, labels), batch_size=128))

    print("formats at the end:", auto.precision_map())
    print("what was decided, and why:")
    for each in auto.history:
        print(f"  step {each.step}: {each.unit or each.knob} {each.before} -> {each.applied} ({each.reason})")


if __name__ == "__main__":
    main()
