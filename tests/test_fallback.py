"""Whom the guard blames for an overflow in a window of several micro-batches, and when it blames nobody.

Time budget: 5 s.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from autoprec import AutoPrecisionCallback, GuardConfig, NonFiniteTrainingError
from tests.support import Task, all_in, assert_finite, cpu, reported, scripted, squares_but

PARTS = 4


def squared(net: nn.Module, batch: Any, index: int) -> Tensor:
    x, y = batch
    loss: Tensor = (net(x).float() - y).pow(2).mean()
    return loss


def fit(name: str, loss: Any = squared, bad: dict[int, Tensor] | None = None) -> tuple[AutoPrecisionCallback, Task]:
    """Three windows of four micro-batches; ``bad`` replaces the targets of some."""
    torch.manual_seed(0)
    inputs, targets = torch.rand(3 * PARTS * 16, 16), torch.zeros(3 * PARTS * 16, 1)
    for index, value in (bad or {}).items():
        targets[16 * index : 16 * (index + 1)] = value
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Flatten())
    task, ap = Task(net, TensorDataset(inputs, targets), 16, loss=loss), scripted({0: all_in(name)})
    cpu(callbacks=[ap], accumulate_grad_batches=PARTS).fit(task)
    return ap, task


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", ["fp16", "fp8", "int8"])
def test_an_infinite_loss_is_located_in_every_micro_batch(name: str, part: int) -> None:
    def loss(net: nn.Module, batch: Any, index: int) -> Tensor:
        return squared(net, batch, index) * (math.inf if index == PARTS + part else 1.0)

    ap, _ = fit(name, loss)
    assert (ap.applied_steps, ap.skipped_steps) == (2, 1)
    assert ap.precision_map() == {"net.0": name, "net.1": "fp32"}
    (decision,) = (d for d in ap.history if d.reason.startswith("guard"))
    assert decision.reason == "guard: the operations between net.1 and the loss left the range of the format"


def test_who_ran_before_the_loss_is_blamed_not_who_ran_last() -> None:
    def loss(net: Any, batch: Any, index: int) -> Tensor:
        if index == PARTS:
            net = net[0]
        return squared(net, batch, index) * (math.inf if index == PARTS else 1.0)

    ap, _ = fit("fp16", loss)
    assert ap.precision_map() == {"net.0": "fp32", "net.1": "fp16"}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_data_in_any_micro_batch_cost_a_step_and_no_format(
    value: float, part: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = reported(caplog, monkeypatch)
    ap, task = fit("fp16", bad={PARTS + part: torch.tensor(value)})
    assert (ap.applied_steps, ap.skipped_steps) == (2, 1)
    assert set(ap.precision_map().values()) == {"fp16"}
    assert text().count("the batch of window 1 holds inf or NaN") == 1
    assert_finite(task)


def test_bad_data_of_the_window_before_excuse_nobody() -> None:
    def loss(net: nn.Module, batch: Any, index: int) -> Tensor:
        return squared(net, batch, index) * (math.inf if index == 2 * PARTS else 1.0)

    ap, _ = fit("fp16", loss, bad={PARTS: torch.tensor(math.nan)})
    assert (ap.applied_steps, ap.skipped_steps) == (1, 2)
    assert ap.precision_map() == {"net.0": "fp16", "net.1": "fp32"}


def test_the_search_for_the_first_offender_leaves_vmap_alone() -> None:
    """Under vmap a tensor's values cannot be read."""

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Any:
            return torch.func.vmap(self.inner)(x)

    skips = GuardConfig().max_consecutive_skips
    always = functools.partial(squares_but, bad=range(skips), factor=math.inf)
    task = Task(nn.Sequential(nn.Linear(16, 16), Mapped()), torch.rand(16 * skips, 16), 16, loss=always)
    with pytest.raises(NonFiniteTrainingError, match=re.escape("First offending layer: net.1.inner (its gradient)")):
        cpu(callbacks=[scripted()]).fit(task)
