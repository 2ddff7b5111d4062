"""Two targets for `autoprec compare`: a transformers text model and a transformers vision model, random weights.

    pip install '.[cli]' transformers                                    # once, in the checkout
    autoprec compare examples/compare_target.py:text --steps 100 --interval 10    # a few minutes on 2 cores
    autoprec compare examples/compare_target.py:vision --steps 100 --interval 10
    autoprec compare examples/compare_target.py:text --quick -- width=64  # arguments after -- go to the function

A target is a function that returns the module, its data and the arguments of the Trainer, as a training script would
write them. Nothing in it knows about precision or autoprec. Nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

Batch = dict[str, Tensor]
Parts = tuple[pl.LightningModule, tuple[DataLoader[Batch], DataLoader[Batch]], dict[str, Any]]


class Classifier(pl.LightningModule):
    """Any transformers model that returns `loss` and `logits`."""

    def __init__(self, model: nn.Module, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self.model(**batch)
        size = len(batch["labels"])
        self.log("val_loss", output.loss, batch_size=size)
        self.log("val_accuracy", (output.logits.argmax(-1) == batch["labels"]).float().mean(), batch_size=size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Words(Dataset[Batch]):
    """Sentences of random words; the label says whether the first half holds more words of the upper vocabulary."""

    def __init__(self, count: int, length: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, vocabulary, (count, length), generator=generator)
        upper = self.words > vocabulary // 2
        self.labels = (upper[:, : length // 2].sum(1) > upper[:, length // 2 :].sum(1)).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Batch:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


class Stripes(Dataset[Batch]):
    """Noisy images with stripes; the label is their direction."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=generator)
        stripes = (torch.arange(size) % 4 < 2).float().expand(count, 3, size, size)
        turned = torch.where(self.labels.view(-1, 1, 1, 1) == 1, stripes, stripes.transpose(2, 3))
        self.images = turned + torch.randn(count, 3, size, size, generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def text(width: int = 256, layers: int = 4, length: int = 64, batch_size: int = 16) -> Parts:
    config = BertConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=length,
    )
    train, held_out = Words(4096, length, 1000, seed=0), Words(256, length, 1000, seed=1)
    return Classifier(BertForSequenceClassification(config)), loaders(train, held_out, batch_size), {"max_epochs": 1}


def vision(width: int = 192, layers: int = 4, size: int = 32, batch_size: int = 32) -> Parts:
    config = ViTConfig(
        image_size=size,
        patch_size=4,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
    )
    train, held_out = Stripes(4096, size, seed=0), Stripes(256, size, seed=1)
    return Classifier(ViTForImageClassification(config)), loaders(train, held_out, batch_size), {"max_epochs": 1}


def loaders(
    train: Dataset[Batch], held_out: Dataset[Batch], batch_size: int
) -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(held_out, batch_size=batch_size)
