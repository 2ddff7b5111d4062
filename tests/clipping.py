"""What the tests of clipping share: a loss of known norm, and what a run changed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from tests.support import weights_of


def constant(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    """A loss whose gradient has norm 20 wherever the weights are."""
    loss: Tensor = (net(batch) * 10.0).mean() - net.get_parameter("bias").sum() * 10.0
    return loss


def change(module: LightningModule, trainer: Trainer) -> Tensor:
    before = torch.cat([p.detach().clone().view(-1) for p in module.parameters()])
    trainer.fit(module)
    return torch.cat([p.detach().view(-1) for p in module.parameters()]) - before


class State(Callback):
    """Keeps weights and optimizer state after every batch."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.moments: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.weights.append(weights_of(pl_module))
        self.moments.append(copy.deepcopy([optimizer.state_dict() for optimizer in trainer.optimizers]))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)
