"""Parameters of awkward shapes, and steps that kernels take of them as ``stepping`` has them taken."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoprec.fused import FusedStep


def parameters() -> list[nn.Parameter]:
    """Odd sizes, no entry, no dimension, channels last."""
    generator = torch.Generator().manual_seed(0)
    shapes: Sequence[tuple[int, ...]] = [(5, 7), (13,), (), (0, 3), (1,), (4, 3, 3, 3), (2, 2, 2, 2, 2), (33, 17)]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    made[5] = made[5].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(tensor) for tensor in made]


def give_gradients(params: Sequence[nn.Parameter], step: int, sometimes: bool = False) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for index, param in enumerate(params):
        grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
        param.grad = None if sometimes and (index + step) % 3 == 0 else grad


def take(fused: FusedStep, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> bool:
    """One step as ``stepping`` takes it; whether the kernels could."""
    planned: list[bool] = []

    def planning() -> Any:
        result = closure() if closure is not None else None
        given = [p for p in fused.parameters() if p.grad is not None]
        planned.append(fused.plan(given, [p.grad for p in given if p.grad is not None], are_in_grad=True))
        fused.arm(1.0)
        return result

    with fused.standing_in():
        optimizer.step(planning)
    return planned[-1]


def copied(optimizer: Optimizer, way: str) -> Any:
    """A copy by ``"deepcopy"``, ``"pickle"`` or ``"torch.save"``."""
    if way == "deepcopy":
        return copy.deepcopy(optimizer)
    if way == "pickle":
        return pickle.loads(pickle.dumps(optimizer))
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
