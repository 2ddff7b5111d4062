"""What the transfer study trains: five small models on real data, none of which is downloaded.

Nothing here knows about precision. Learning rates are warmed up and then constant, so that a run of any length begins
as a shorter one does, and one run shows what was reached within any budget of time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from autoprec.demo import data
from autoprec.demo.models import Block, ByteGPT, DigitsCNN, _with_warmup

Batch = tuple[Tensor, ...]
Material = tuple[TensorDataset, Batch]
Answers = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """One model with its data.

    Args:
        name: Name in the output.
        model: Makes the module; the seed of its first weights is set before.
        material: Returns the training samples and one held-out batch.
        answer: Returns the logits ``[n, classes]`` and the labels ``[n]`` of a batch.
        batch_size: Samples in a step, as long as nobody changes it.
        steps: Optimizer steps of the fp32 twin, which are the budget.
        epoch_batches: Batches of an epoch at that batch size; the batch size may change between epochs.
    """

    name: str
    model: Callable[[], pl.LightningModule]
    material: Callable[[], Material]
    answer: Callable[[Any, Batch], Answers]
    batch_size: int
    steps: int
    epoch_batches: int

    def loader(self, seed: int) -> DataLoader[Batch]:
        """Returns the training samples in an order drawn from the seed, anew for each epoch.

        Args:
            seed: Seed of the order.
        """
        train, _ = self.material()
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(train, num_samples=self.epoch_batches * self.batch_size, generator=generator)
        return DataLoader(train, batch_size=self.batch_size, sampler=sampler)


class Classifier(pl.LightningModule):
    """A module with one loss.

    Args:
        learning_rate: AdamW's learning rate after the warm-up.
    """

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean cross entropy; ``batch`` is a pair of inputs and labels."""
        inputs, labels = batch
        return F.cross_entropy(self(inputs), labels)

    def configure_optimizers(self) -> Any:
        """AdamW with a linear warm-up."""
        return _with_warmup(AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01))


class SignalMLP(Classifier):
    """Classifies signals of 40 numbers.

    Args:
        width: Size of the hidden layers.
        learning_rate: AdamW's learning rate.
    """

    def __init__(self, width: int = 512, learning_rate: float = 1e-3) -> None:
        super().__init__(learning_rate)
        sizes = (40, width, width, width)
        pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in zip(sizes, sizes[1:], strict=False)]
        self.net = nn.Sequential(*(layer for pair in pairs for layer in pair), nn.Linear(width, 10))

    def forward(self, signals: Tensor) -> Tensor:
        """Maps signals ``[batch, 40]`` to logits ``[batch, 10]``."""
        logits: Tensor = self.net(signals)
        return logits


class ByteLSTM(Classifier):
    """A language model over bytes with one recurrent layer.

    Args:
        width: Size of the state.
        learning_rate: AdamW's learning rate.
    """

    def __init__(self, width: int = 192, learning_rate: float = 3e-3) -> None:
        super().__init__(learning_rate)
        self.embed = nn.Embedding(256, 64)
        self.recurrent = nn.LSTM(64, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps bytes ``[batch, time]`` to logits ``[batch, time, 256]``."""
        states, _ = self.recurrent(self.embed(tokens))
        logits: Tensor = self.head(states)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean cross entropy of the next byte."""
        return F.cross_entropy(*next_bytes(self, batch))


class WideRangeBlock(Block):
    """A block whose perceptron has squared ReLUs of large values, as nobody minds who trains in fp32 or bf16.

    Args:
        width: Size of the residual stream.
        heads: Attention heads.
        gain: What is multiplied before squares are taken, and divided by afterwards.
    """

    def __init__(self, width: int, heads: int, gain: float) -> None:
        super().__init__(width, heads)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        """Returns the residual stream after attention and the two-layer perceptron, ``[batch, time, width]``."""
        x = x + self.project(self._attend(self.norm_attention(x)))
        hidden = F.relu(self.gain * self.expand(self.norm_mlp(x))).square()
        stream: Tensor = x + self.contract(hidden) / self.gain**2
        return stream


class WideRangeTransformer(Classifier):
    """Reads images row by row. Its activations pass 65504, the largest number in fp16, early in training.

    Args:
        width: Size of the residual stream.
        layers: Number of blocks.
        gain: That of the blocks.
        learning_rate: AdamW's learning rate.
    """

    def __init__(self, width: int = 64, layers: int = 2, gain: float = 100.0, learning_rate: float = 1e-3) -> None:
        super().__init__(learning_rate)
        self.read = nn.Linear(8, width)
        self.position = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(WideRangeBlock(width, 4, gain) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images ``[batch, 1, 8, 8]`` to logits ``[batch, 10]``."""
        x = self.read(images.squeeze(1)) + self.position(torch.arange(8, device=images.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def labelled(module: Any, batch: Batch) -> Answers:
    """Returns the logits and the labels of a batch that is a pair."""
    return module(batch[0]), batch[1]


def next_bytes(module: Any, batch: Batch) -> Answers:
    """Returns the logits of each next byte, and that byte."""
    (window,) = batch
    return module(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()


@functools.cache
def digits() -> Material:
    """Returns scikit-learn's images of digits."""
    split = data.load_digits()
    return TensorDataset(*split.train), split.held_out


@functools.cache
def signals() -> Material:
    """Returns the 4000 + 1000 signals that the package mnist1d generates by default."""
    from mnist1d.data import get_dataset_args, make_dataset

    states = random.getstate(), np.random.get_state()  # it sets the seeds of both
    try:
        made = make_dataset(get_dataset_args())
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    train, held_out = (
        (torch.from_numpy(made[f"x{part}"]).float(), torch.from_numpy(made[f"y{part}"])) for part in ("", "_test")
    )
    return TensorDataset(*train), held_out


@functools.cache
def source(context: int, windows: int = 20_000, held_out: int = 128) -> Material:
    """Returns windows of the standard library's source.

    Args:
        context: Bytes that are predicted in a window.
        windows: Training windows, the same in every run; their order is the run's.
        held_out: Held-out windows, of other files.
    """
    split, length = data.load_source(limit=2_000_000), context + 1
    places = (
        data.random_offsets(len(split.train[0]), length, windows, seed=0),
        data.spread_offsets(len(split.held_out[0]), length, held_out),
    )
    train, rest = (
        text.unfold(0, length, 1)[offsets].long()
        for text, offsets in zip((split.train[0], split.held_out[0]), places, strict=True)
    )
    return TensorDataset(train), (rest,)


TASKS = {
    task.name: task
    for task in (
        Task("digits-cnn", partial(DigitsCNN, width=16), digits, labelled, 64, 80, 20),
        Task(
            "byte-gpt",
            partial(ByteGPT, width=96, layers=2, heads=4, context=32),
            partial(source, 32),
            next_bytes,
            16,
            80,
            20,
        ),
        Task("mnist1d-mlp", SignalMLP, signals, labelled, 100, 100, 20),
        Task("byte-lstm", ByteLSTM, partial(source, 32), next_bytes, 32, 100, 20),
        Task("wide-range", WideRangeTransformer, digits, labelled, 64, 100, 20),
    )
}
"""The tasks by name. Sizes and lengths were chosen on seeds 0 and 1, which are not in the study."""
