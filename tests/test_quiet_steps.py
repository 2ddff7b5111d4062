"""Steps without a decision read one number from the device, whatever the model's size, also while they are monitored.

Counted are the ways in which Python gets at the values of a tensor. On a GPU each of them waits for all kernels before.

Time budget: 15 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.overrides import TorchFunctionMode

from autoprec import AutoPrecisionCallback
from tests.support import Task, cpu

READS = {"__array__", "__bool__", "__float__", "__index__", "__int__", "item", "nonzero", "numpy", "tolist"}
SHORT, LONG = 10, 60


class Reads(TorchFunctionMode):
    """Counts them while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def reads(layers: int, steps: int, callbacks: list[Callback]) -> int:
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.ReLU())]
    module = Task(nn.Sequential(*hidden, nn.Linear(8, 1)), torch.randn(steps * 4, 8), 4)
    with Reads() as seen:
        cpu(callbacks=callbacks).fit(module)
    return sum(seen.counts.values())


def idle(**options: Any) -> list[Callback]:
    """Without the clip threshold, which is compared with the norm in tensors that never were on the device."""
    return [AutoPrecisionCallback(knobs=("precision", "loss_scale"), interval=10_000, verbose=False, **options)]


def per_step(layers: int, callbacks: Callable[[], list[Callback]]) -> float:
    return (reads(layers, LONG, callbacks()) - reads(layers, SHORT, callbacks())) / (LONG - SHORT)


@pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning")
@pytest.mark.parametrize("layers", [3, 50])
def test_one_read_a_step(layers: int) -> None:
    """The global norm, which the search for non-finite gradients needs; statistics are read at decisions."""
    assert per_step(layers, list) == 0
    assert 1 <= per_step(layers, idle) <= 1.1
    assert per_step(layers, lambda: idle(monitor=0)) == per_step(layers, idle)


class Curious(Callback):
    """Reads one value in each step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()


def test_the_count_can_fail() -> None:
    assert per_step(3, lambda: [*idle(), Curious()]) >= 2
