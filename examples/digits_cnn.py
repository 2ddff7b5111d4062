"""Trains a small CNN on scikit-learn's digits, once as it is and once with its precision under control.

    pip install '.[cli]'                         # once, in the checkout: the extra brings scikit-learn
    python examples/digits_cnn.py --epochs 10    # a minute or two on 2 cores

The model is the same, the Trainer is the same, the callback is the difference. Nothing is downloaded.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from autoprec import AutoPrecisionCallback

Batch = tuple[Tensor, Tensor]


class DigitsCNN(pl.LightningModule):
    """A plain LightningModule: convolutions, BatchNorm, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * 64, 10),
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
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(epochs: int, callbacks: list[pl.Callback]) -> dict[str, float]:
    pl.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels))
    train_set, val_set = random_split(digits, [0.8, 0.2])
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=callbacks,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(DigitsCNN(), DataLoader(train_set, batch_size=64, shuffle=True), DataLoader(val_set, batch_size=256))
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs is {options.epochs}, and at least 1 is needed")

    auto = AutoPrecisionCallback(interval=10)  # decides often, because this run is short
    print("as it is:     ", train(options.epochs, []))
    print("with autoprec:", train(options.epochs, [auto]))
    for unit, number_format in auto.precision_map().items():
        print(f"  {unit:<10} {number_format}")
    print("optimizer steps: applied", auto.applied_steps, "skipped", auto.skipped_steps)


if __name__ == "__main__":
    main()
