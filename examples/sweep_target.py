"""The target of `sweep.yaml`: a small CNN on scikit-learn's digits, with what is tuned as arguments.

    pip install '.[cli,sweep]'                          # once, in the checkout
    autoprec sweep examples/sweep.yaml --workers 2      # a few minutes on 2 cores

The function returns module, data and the arguments of the Trainer, as for `autoprec compare`. Nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

Batch = tuple[Tensor, Tensor]
Parts = tuple[pl.LightningModule, tuple[DataLoader[Batch], DataLoader[Batch]], dict[str, Any]]


class DigitsCNN(pl.LightningModule):
    """Two convolutions and a linear head."""

    def __init__(self, width: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self.net(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def digits(learning_rate: float = 2e-3, width: int = 32, epochs: int = 2, batch_size: int = 64, seed: int = 0) -> Parts:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    everything: Any = TensorDataset(images, torch.tensor(labels))
    train, held_out = random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))
    order = torch.Generator().manual_seed(seed)
    loaders = (
        DataLoader(train, batch_size=batch_size, shuffle=True, generator=order),
        DataLoader(held_out, batch_size=256),
    )
    options = {"max_epochs": epochs, "logger": False, "enable_checkpointing": False}
    return DigitsCNN(width, learning_rate), loaders, options
