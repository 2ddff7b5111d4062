"""What the whole-step benchmark trains: nine models written as anybody would write them for Lightning, with their data.

A row's name says its shape: ``mlp-<width>-<batch>`` has four linear layers and 64 inputs, ``gpt-<blocks>-<width>``
reads tokens with heads of 64, ``cnn-<channels>`` has six convolutions with BatchNorm on images of 32 x 32. Nothing here
knows about precision. Batches are made once from a fixed seed and are the same for every way of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from autoprec.demo.models import Block

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

BATCHES = 4
"""Different batches of a row; a run goes round them."""


class Trained(pl.LightningModule):
    """What the models have in common: one batch of inputs and classes, cross entropy, one optimizer.

    Args:
        make_optimizer: Makes the optimizer from the parameters.
    """

    def __init__(self, make_optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.make_optimizer = make_optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        inputs, classes = batch
        logits = self(inputs)
        return F.cross_entropy(logits.flatten(0, -2), classes.flatten())

    def configure_optimizers(self) -> Optimizer:
        """One optimizer for all parameters."""
        return self.make_optimizer(self.parameters())


class MLP(Trained):
    """Four linear layers with ReLU between them, 64 inputs, 10 classes.

    Args:
        make_optimizer: As for :class:`Trained`.
        width: Width of the three hidden layers.
    """

    def __init__(self, make_optimizer: MakeOptimizer, width: int) -> None:
        super().__init__(make_optimizer)
        self.layers = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps ``[batch, 64]`` to logits ``[batch, 10]``."""
        logits: Tensor = self.layers(inputs)
        return logits


class GPT(Trained):
    """A causal transformer with ``scaled_dot_product_attention`` and GELU by the error function.

    Args:
        make_optimizer: As for :class:`Trained`.
        blocks: Number of blocks.
        width: Size of the residual stream; heads have 64.
        context: Length of the sequences.
        vocabulary: Number of tokens.
    """

    def __init__(self, make_optimizer: MakeOptimizer, blocks: int, width: int, context: int, vocabulary: int) -> None:
        super().__init__(make_optimizer)
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``[batch, time]`` to logits ``[batch, time, vocabulary]``."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class CNN(Trained):
    """Six 3 x 3 convolutions with BatchNorm and ReLU, the third and the fifth with stride 2, and a linear head.

    Args:
        make_optimizer: As for :class:`Trained`.
        channels: Channels of the first two convolutions; twice and four times as many follow.
    """

    def __init__(self, make_optimizer: MakeOptimizer, channels: int) -> None:
        super().__init__(make_optimizer)
        widths = [3, channels, channels, 2 * channels, 2 * channels, 4 * channels, 4 * channels]
        layers: list[nn.Module] = []
        for index in range(6):
            stride = 2 if index in (2, 4) else 1
            layers += [
                nn.Conv2d(widths[index], widths[index + 1], 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(widths[index + 1]),
                nn.ReLU(),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images ``[batch, 3, 32, 32]`` to logits ``[batch, 10]``."""
        logits: Tensor = self.head(self.features(images).mean((2, 3)))
        return logits


@dataclass(frozen=True)
class Workload:
    """One row of the benchmark.

    Args:
        name: Name of the row.
        model: Makes the module around an optimizer.
        inputs: Draws the inputs of one batch.
        classes: Number of classes, drawn at random for every sample.
        per_token: Whether every entry of the inputs has a class, as tokens do, and not the sample.
        steps: Optimizer steps of one turn, some 50 ms of them.
        int8: Formats by unit for the arm ``ours_int8``; empty where that arm has nothing to show.
        channels_last: Whether weights and images are laid out channels last, in every arm.
    """

    name: str
    model: Callable[[MakeOptimizer], Trained]
    inputs: Callable[[], Tensor]
    classes: int
    steps: int
    per_token: bool = False
    int8: Mapping[str, str] = field(default_factory=dict)
    channels_last: bool = False

    @property
    def family(self) -> str:
        """``mlp``, ``gpt`` or ``cnn``."""
        return self.name.split("-")[0]

    def make_module(self, make_optimizer: MakeOptimizer) -> Trained:
        """Returns a new module; its weights are the same every time."""
        torch.manual_seed(0)
        module = self.model(make_optimizer)
        return module.to(memory_format=torch.channels_last) if self.channels_last else module

    def make_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the row's batches, the same every time."""
        torch.manual_seed(1)
        batches = []
        for _ in range(BATCHES):
            inputs = self.inputs()
            if self.channels_last:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            classes = torch.randint(self.classes, inputs.shape if self.per_token else inputs.shape[:1])
            batches.append((inputs, classes))
        return batches


def _mlp(width: int, batch: int, steps: int, **options: Any) -> Workload:
    return Workload(
        f"mlp-{width}-{batch}",
        lambda make_optimizer: MLP(make_optimizer, width),
        lambda: torch.randn(batch, 64),
        classes=10,
        steps=steps,
        **options,
    )


def _gpt(blocks: int, width: int, batch: int, context: int, vocabulary: int, steps: int, **options: Any) -> Workload:
    return Workload(
        f"gpt-{blocks}-{width}",
        lambda make_optimizer: GPT(make_optimizer, blocks, width, context, vocabulary),
        lambda: torch.randint(vocabulary, (batch, context)),
        classes=vocabulary,
        steps=steps,
        per_token=True,
        **options,
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        _mlp(128, 64, 50),
        _mlp(512, 64, 20),
        _mlp(512, 512, 8),
        _mlp(2048, 128, 3),
        _mlp(2048, 512, 2, int8={"*": "bf16", "layers.2": "int8", "layers.4": "int8"}),
        _gpt(2, 128, 16, 128, 512, 3),
        _gpt(4, 256, 16, 128, 512, 1),
        _gpt(6, 512, 2, 256, 1024, 1, int8={"*": "bf16", "blocks.*": "int8"}),
        Workload(
            "cnn-32",
            lambda make_optimizer: CNN(make_optimizer, 32),
            lambda: torch.randn(64, 3, 32, 32),
            classes=10,
            steps=3,
            channels_last=True,
        ),
    )
}
"""The nine rows by name, in the order of the tables."""

MEMORY_ROWS = ("mlp-2048-128", "gpt-6-512")
"""Rows whose peak of memory is measured."""

MALLOC_ROWS = ("mlp-2048-128",)
"""Rows that are measured with malloc's default thresholds, too, because those make a difference there."""
