"""Small modules and runs that the integration tests share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def quiet(**options: Any) -> Trainer:
    return Trainer(**{**QUIET, **options})


def callback_of(trainer: Any) -> AutoPrecisionCallback:
    (callback,) = (each for each in trainer.callbacks if isinstance(each, AutoPrecisionCallback))
    return callback


def seed(value: int = 0) -> None:
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def rows(count: int = 64, width: int = 8) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=generator)
    return TensorDataset(x, x @ torch.randn(width, 2, generator=generator))


def loader(count: int = 64, batch_size: int = 8, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(rows(count), batch_size=batch_size, shuffle=shuffle)


def fp16_plugin(init_scale: float = 1024.0, **options: Any) -> MixedPrecision:
    """Real fp16-mixed on a CPU, which ``precision="16-mixed"`` is not there."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale, **options))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Plain(pl.LightningModule):
    """Two layers and nothing random: names ``net.0``, ``net.2``."""

    def __init__(self, make_optimizer: MakeOptimizer = sgd) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        self.make_optimizer = make_optimizer
        self.losses: list[float] = []

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        # torch 2.11's mse_loss refuses mixed dtypes
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1].float())

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(list(self.parameters()))


class Full(Plain):
    """The same with validation, test and predict steps."""

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return self.net(batch[0])


class StatefulLoader:
    """Shuffles by a generator of its own and can go on in the middle of an epoch, as torchdata's loader does.

    The first row of every batch whose number is in ``spikes`` is far outside the range of fp16.
    """

    def __init__(self, count: int = 80, batch_size: int = 8, spikes: Sequence[int] = ()) -> None:
        self.spikes = spikes
        self.data = rows(count)
        self.batch_size = batch_size
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        return len(self.data) // self.batch_size

    def __iter__(self) -> Iterator[list[Tensor]]:
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(100 + self.epoch))
        while self.position < len(self):
            start = self.position * self.batch_size
            x, y = (tensor[order[start : start + self.batch_size]] for tensor in self.data.tensors)
            if self.epoch * len(self) + self.position in self.spikes:
                x[0] = 1e5
            self.position += 1
            yield [x, y]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clone(item) for item in value]
    return value


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two nests of tensors and primitives are not equal bit for bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        is_same = left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bits(left), _bits(right))
        return [] if is_same else [path]
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        if list(left) != list(right):
            return [f"{path}: {list(left)} != {list(right)}"]
        return [line for key in left for line in differences(left[key], right[key], f"{path}.{key}")]
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        if len(left) != len(right):
            return [f"{path}: {len(left)} != {len(right)} items"]
        pairs = enumerate(zip(left, right, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}[{index}]")]
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return [] if np.array_equal(left, right) else [path]
    is_same = left == right or (left != left and right != right)
    return [] if is_same else [f"{path}: {left!r} != {right!r}"]


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN, and 0 is not -0."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.detach().reshape(-1).contiguous().view(torch.uint8)


@dataclass
class Outcome:
    """Everything a run leaves behind that must be reproducible."""

    weights: Any
    optimizers: Any
    schedules: Any
    random_states: Any
    losses: list[float]


def outcome(trainer: Trainer, module: pl.LightningModule) -> Outcome:
    return Outcome(
        weights=clone(module.state_dict()),
        optimizers=clone([optimizer.state_dict() for optimizer in trainer.optimizers]),
        schedules=clone([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        random_states=clone([torch.get_rng_state(), np.random.get_state(), random.getstate()]),
        losses=list(getattr(module, "losses", ())),
    )


def assert_identical(left: Outcome, right: Outcome) -> None:
    found = differences(vars(left), vars(right))
    assert not found, f"not bit-identical: {found[:10]}"
