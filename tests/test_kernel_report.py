"""The table at the end of fit says what kernels did, and whose code kept them from doing more.

Time budget: 5 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig
from autoprec.summary import summarize
from tests.kernels import needs_cpu_kernels
from tests.support import Task, cpu

pytestmark = needs_cpu_kernels


class Looks(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...


def table(*others: Callback, optimizer: Any = torch.optim.AdamW, **config: Any) -> str:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    ap = AutoPrecisionCallback("fixed:bf16", config=AutoPrecisionConfig(**config), verbose=False)
    task = Task(net, torch.rand(48, 4), optimizer=lambda parameters: optimizer(parameters, lr=0.01))
    cpu(callbacks=[ap, *others], max_epochs=3, precision="bf16-mixed").fit(task)
    assert ap.steering is not None
    return summarize(ap.steering, "fixed:bf16")


def test_steps_and_layers_are_counted() -> None:
    """The first step, which makes the moments, is torch's own."""
    text = table()
    assert "took 18 optimizer steps, 2 layers on kept copies of their weights" in text


def test_an_onlooker_is_named() -> None:
    text = table(Looks())
    assert "took 18 optimizer steps; gradients stay in .grad for `Looks.on_after_backward`" in text


@pytest.mark.parametrize("options", [{"optimizer": torch.optim.RMSprop}, {"fused_step": False}])
def test_nothing_is_said_where_no_kernel_took_a_step(options: dict[str, Any]) -> None:
    assert "optimizer steps" not in table(**options)
