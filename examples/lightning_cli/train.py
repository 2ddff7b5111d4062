"""A LightningCLI around a small classifier; all settings of autoprec are in YAML files, none in this code.

    pip install '.[cli]' 'jsonargparse[signatures]'                    # once, in the checkout
    cd examples/lightning_cli
    python train.py fit --config base.yaml --config rule.yaml           # the callback, by default
    python train.py fit --config base.yaml --config everything.yaml     # every option, with what it means
    python train.py fit --config base.yaml --config map.yaml            # formats from a file, formats.yaml
    python train.py fit --config base.yaml --config script.yaml         # changes at given steps and epochs
    python train.py predict --config base.yaml --config predict.yaml    # predictions in a map of formats

The same by flags, on top of any file:

    python train.py fit --config base.yaml --trainer.callbacks+=autoprec.AutoPrecisionCallback \
        --trainer.callbacks.policy=table --trainer.callbacks.config.guard.hold=100

`--print_config` behind `fit` prints everything as one file. Without any of these, `AUTOPREC_AUTO=1` in the environment
adds the callback to every Trainer. Nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]


class Classifier(pl.LightningModule):
    """Two hidden layers."""

    def __init__(self, width: int = 256, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 10)
        self.learning_rate = learning_rate

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val_accuracy", (logits.argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Digits(pl.LightningDataModule):
    """Handwritten digits of 8 x 8 pixels, from scikit-learn."""

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        rows = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels))
        self.training, self.held_out = torch.utils.data.random_split(
            rows, [1500, 297], torch.Generator().manual_seed(0)
        )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.training, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=self.batch_size)


def main() -> None:
    LightningCLI(Classifier, Digits, save_config_callback=None, seed_everything_default=0)


if __name__ == "__main__":
    main()
