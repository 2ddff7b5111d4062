"""Trains a small network on digits with a record, and makes a page of it that is read without a network.

    pip install '.[cli,report]'                  # once, in the checkout
    python examples/offline_report.py            # ten seconds on one core; writes offline-report/report.html
    python examples/offline_report.py --steps 20 --out /tmp/report

The record is written while the network trains, so that it is there after a crash too. `autoprec report FOLDER` makes
the same page from the command line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback
from autoprec.report import Prices, build, write_html

Batch = tuple[Tensor, Tensor]


class DigitsMLP(pl.LightningModule):
    """A plain LightningModule, which knows nothing of records."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("offline-report"))
    options = parser.parse_args()

    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16.0, dtype=torch.float32), torch.tensor(labels))
    callback = AutoPrecisionCallback(interval=10, record=options.out / "record")
    trainer = pl.Trainer(
        max_steps=options.steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[callback],
    )
    trainer.fit(DigitsMLP(), DataLoader(data, batch_size=64, shuffle=True))

    report = build(options.out / "record", prices=Prices(per_hour=0.5, currency="EUR"))
    print(report.chapters[0].headline)
    print(f"Written: {write_html(report, options.out / 'report.html')}")


if __name__ == "__main__":
    main()
