"""Trains a small CNN on digits while the batch grows, memory runs out and somebody ruins the weights.

    pip install '.[cli]'                # once, in the checkout: the extra brings scikit-learn
    python examples/surviving_run.py    # ten seconds on one core

The batch doubles with every epoch and the learning rate follows it. The last size does not fit into memory, and before
that a weight becomes NaN; both are simulated, see `SmallDevice` and `Vandal`. What the run did about it is printed.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from autoprec import (
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    BatchConfig,
    RollbackConfig,
    ScriptedController,
)

Batch = tuple[Tensor, Tensor]
FIRST_SIZE = 32
LARGEST_THAT_FITS = 128


class DigitsCNN(pl.LightningModule):
    """A plain LightningModule, which knows nothing of what is going to happen to it."""

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


class SmallDevice(DigitsCNN):
    """Simulated: fails as a GPU does whose memory is too small for more than 128 samples."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.training and len(batch[0]) > LARGEST_THAT_FITS:
            raise torch.OutOfMemoryError(f"simulated: {len(batch[0])} samples do not fit into memory")
        return super().training_step(batch, batch_idx)


class Vandal(pl.Callback):
    """Simulated: ruins a weight once, as a faulty update or a broken callback would."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.batch:
            with torch.no_grad():
                next(pl_module.parameters()).fill_(torch.nan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    if options.epochs < 4:
        parser.error(f"--epochs is {options.epochs}, and at least 4 are needed for the batch to outgrow memory")

    pl.seed_everything(0, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels))
    train_set, val_set = random_split(digits, [0.8, 0.2])

    auto = AutoPrecisionCallback(
        policy=ScriptedController(epochs={epoch: Action(batch_size=FIRST_SIZE * 2**epoch) for epoch in (1, 2, 3)}),
        config=AutoPrecisionConfig(
            batch=BatchConfig(learning_rate="sqrt"),  # twice the batch, 1.41 times the learning rate
            rollback=RollbackConfig(every=20),  # a copy every 20 steps, because this run is short
        ),
    )
    trainer = pl.Trainer(
        max_epochs=options.epochs,
        callbacks=[auto, Vandal(batch=60)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(SmallDevice(), DataLoader(train_set, FIRST_SIZE, shuffle=True), DataLoader(val_set, batch_size=256))

    print("what happened:")
    for each in auto.history:
        if each.knob in ("batch_size", "rollback"):
            print(f"  window {each.step}: {each.knob} {each.before} -> {each.applied}: {each.reason}")
    print("batch size at the end:", auto.batch_size)
    print("lost to memory:", auto.lost_windows, "window,", auto.lost_samples, "samples")
    print("optimizer steps: applied", auto.applied_steps, "undone", auto.undone_windows, "skipped", auto.skipped_steps)
    print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items() if name[:4] == "val_"})


if __name__ == "__main__":
    main()
