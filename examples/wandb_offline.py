"""A training that logs to Weights & Biases without a network: a static run and one with the callback, as one group.

Run it with ``python examples/wandb_offline.py``; ``--quick`` takes seconds. It needs the extra ``wandb``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import wandb
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback


class Classifier(LightningModule):
    """Says in which of four corners a point is, from 32 noisy copies of its coordinates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(rows: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(rows, 2, generator=generator) - 0.5
    labels = (points[:, 0] > 0).long() + 2 * (points[:, 1] > 0).long()
    noisy = points.repeat(1, 32) + 0.2 * torch.randn(rows, 64, generator=generator)
    return DataLoader(TensorDataset(noisy, labels), batch_size=64)


def train(job_type: str, callback: AutoPrecisionCallback, precision: Any, out: Path, quick: bool) -> None:
    seed_everything(0, verbose=False)
    logger = WandbLogger(
        project="autoprec-example", group="corners", job_type=job_type, name=job_type, save_dir=out.resolve()
    )
    trainer = Trainer(
        max_epochs=1 if quick else 5,
        precision=precision,
        logger=logger,
        callbacks=[callback],
        accelerator="cpu",
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(64 if quick else 512), loader(1024 if quick else 8192, seed=1), loader(512, seed=2))
    wandb.finish()  # the run is yours: neither Lightning nor autoprec finishes it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("wandb-example"), help="folder for the runs")
    parser.add_argument("--quick", action="store_true", help="a small model for a few steps")
    chosen = parser.parse_args()

    chosen.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    # knobs=() changes nothing: a static run with the same metrics
    train(
        "amp-bf16", AutoPrecisionCallback(knobs=(), interval=4, verbose=False), "bf16-mixed", chosen.out, chosen.quick
    )
    train("autoprec", AutoPrecisionCallback("fixed:bf16", interval=4), "32-true", chosen.out, chosen.quick)

    runs = sorted((chosen.out / "wandb").glob("offline-run-*"))
    print(f"{len(runs)} runs in {chosen.out / 'wandb'}. With a network and a login:")
    print(f"    wandb sync {chosen.out}/wandb/offline-run-*")
    print("    autoprec report --wandb YOUR-ENTITY/autoprec-example --group corners")


if __name__ == "__main__":
    main()
