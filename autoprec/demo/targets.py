"""The two tasks of the demo as targets of ``autoprec compare``: `autoprec.demo.targets:gpt` and `:cnn`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from autoprec.demo.models import ByteGPT, DigitsCNN
from autoprec.demo.tasks import CLIP_NORM, Material, Task, cnn_task, gpt_task

_VALIDATE_EVERY = 20


class ValidatedGPT(ByteGPT):
    """The GPT with a validation of its own."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the held-out loss."""
        self.log("val_loss", self.loss(batch), batch_size=1)


class ValidatedCNN(DigitsCNN):
    """The CNN with a validation of its own."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs held-out loss and accuracy."""
        images, labels = batch
        self.log("val_loss", self.loss(batch), batch_size=1)
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean(), batch_size=1)


Parts = tuple[pl.LightningModule, tuple[Any, Any], dict[str, Any]]


def gpt(seed: int = 0, quick: bool = False) -> Parts:
    """Returns the byte-level GPT with its data and Trainer arguments.

    Args:
        seed: Seed of the order of the samples.
        quick: A tiny model.
    """
    task = gpt_task(quick=quick)
    options = {"width": 32, "layers": 2, "heads": 2, "context": 32} if quick else {"context": 128}
    return ValidatedGPT(**options), *_data(task, seed)


def cnn(seed: int = 0, quick: bool = False) -> Parts:
    """Returns the convolutional classifier with its data and Trainer arguments.

    Args:
        seed: Seed of the order of the samples.
        quick: A tiny model.
    """
    return ValidatedCNN(width=4 if quick else 32), *_data(cnn_task(quick=quick), seed)


def _data(task: Task, seed: int) -> tuple[tuple[Any, Any], dict[str, Any]]:
    material: Material = task.material(task.split, task.steps * task.batch_size, seed)
    train = DataLoader(material.train, batch_size=task.batch_size)
    held_out: Any = DataLoader(material.held_out, batch_size=None)  # type: ignore[arg-type]  # a list of batches
    trainer = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "gradient_clip_val": CLIP_NORM,
        "val_check_interval": min(_VALIDATE_EVERY, task.steps),
        "logger": False,
        "enable_checkpointing": False,
    }
    return (train, held_out), trainer
