"""The table at the end of fit names the layers whose format nobody used, and no others.

Time budget: 10 s.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, GuardConfig, LossScaleConfig
from autoprec.summary import summarize
from tests.kernels import needs_cpu_kernels
from tests.private_runs import run
from tests.small_fits import Plain
from tests.support import Task, all_in, cpu, scripted, squares


class Reads(nn.Module):
    """Uses the weight of the layer inside without calling it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


def task_of(net: nn.Module, data: Tensor | None = None, **options: Any) -> Task:
    torch.manual_seed(0)
    return Task(net, torch.rand(64, 16) if data is None else data, 16, **options)


def remarks(ap: AutoPrecisionCallback) -> list[str]:
    assert ap.steering is not None
    return [line for line in summarize(ap.steering, "").splitlines() if "never called" in line]


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_layer_whose_weight_others_read_is_said_not_to_run(name: str, precision: Any) -> None:
    ap, task = (
        scripted({0: all_in(name), 1: Action(precision={"net.1": "fp16"})}),
        task_of(nn.Sequential(Reads(), nn.Linear(16, 16))),
    )
    cpu(callbacks=[ap], precision=precision).fit(task)
    (line,) = remarks(ap)
    assert line.strip().startswith(name)
    assert "net.0.inner: never called" in line
    assert "net.1" not in line
    assert ap.precision_map() == {"net.0.inner": name, "net.1": "fp16"}


def test_a_model_of_which_nothing_is_called() -> None:
    ap = scripted({0: all_in("bf16")})
    cpu(callbacks=[ap]).fit(task_of(Reads()))
    assert "bf16       1 unit, 100.0% of parameters (net.inner: never called)" in remarks(ap)[0]


def test_nothing_is_said_while_lightning_runs_the_layers() -> None:
    ap = scripted()
    cpu(callbacks=[ap], precision="bf16-mixed").fit(task_of(nn.Sequential(Reads(), nn.Linear(16, 16))))
    assert not remarks(ap)


def test_nothing_is_said_of_formats_that_came_after_the_last_step() -> None:
    """Lightning ran the layers until the guard raised them all."""

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return squares(net, batch, index) * (1.0 if index < 2 else math.inf)

    skips = GuardConfig().max_consecutive_skips
    ap = scripted()
    task = task_of(nn.Sequential(nn.Linear(16, 16)), torch.rand(16 * (2 + skips), 16), loss=loss)
    with pytest.warns(UserWarning, match="everything runs in fp32 from here on"):
        cpu(callbacks=[ap], precision="bf16-mixed").fit(task)
    assert ap.precision_map() == {"net.0": "fp32"}
    assert not remarks(ap)


class Everything(nn.Module):
    """Layers of all kinds, each called in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.conv = nn.Conv1d(16, 16, 1)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.BatchNorm1d(4)])
        self.kept, self.checkpointed, self.mapped = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.prelu = nn.PReLU()
        self.tied = nn.Linear(16, 8, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.embedding((x[:, :4] * 8).long())
        y = self.conv(tokens.transpose(1, 2)).transpose(1, 2)
        y, _ = self.rnn(y)
        y, _ = self.attention(y, y, y)
        y = self.block(y)
        for norm in self.norms:
            y = norm(y)
        with torch.autocast("cpu", enabled=False):
            y = self.kept(y.float())
        y = checkpoint(self.checkpointed, y, use_reentrant=False)
        y = torch.func.vmap(self.mapped)(self.prelu(y))
        output: Tensor = self.tied(y)
        return output


@pytest.mark.parametrize("granularity", ["layer", "block"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_nothing_is_said_of_layers_that_are_called(name: str, granularity: Any) -> None:
    config = AutoPrecisionConfig(granularity=granularity, loss_scale=LossScaleConfig(init_scale=128.0))
    ap = scripted({0: all_in(name), 1: Action(precision={"*norm*": name})}, config=config)
    cpu(callbacks=[ap]).fit(task_of(Everything()))
    assert ap.applied_steps
    assert name in ap.precision_map().values()
    assert not remarks(ap)


@needs_cpu_kernels
@pytest.mark.parametrize("policy", ["fixed:bf16", "fixed:int8"])
@pytest.mark.parametrize("is_read", [False, True])
def test_layers_on_kept_copies_are_called(is_read: bool, policy: str) -> None:
    module = Plain()
    if is_read:
        module.net.insert(0, Reads(8))
    private = run(module, policy=policy)
    assert private.counts["on copies"] > 0
    assert [("net.0.inner: never called" in line, "net.1" in line) for line in remarks(private.callback)] == (
        [(True, False)] if is_read else []
    )


def test_what_the_compiler_runs_is_not_known() -> None:
    net = nn.Sequential(Reads(), nn.Linear(16, 16))
    net.compile(backend="eager")
    ap = scripted({0: all_in("bf16")})
    cpu(callbacks=[ap]).fit(task_of(net))
    assert not remarks(ap)


@pytest.mark.parametrize("more", [0, 1])
def test_a_resumed_run_remembers_who_was_called(more: int, tmp_path: Path) -> None:
    """One layer runs in the first epoch only, the other never."""

    def fit(epochs: int, is_called: bool, path: Path | None = None) -> tuple[AutoPrecisionCallback, Any]:
        def loss(net: Any, batch: Tensor, index: int) -> Tensor:
            return squares(net[1:], net[0](batch) if is_called else batch, index)

        task = task_of(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), Reads()), loss=loss)
        ap = scripted({0: all_in("bf16")})
        trainer = cpu(callbacks=[ap], max_epochs=epochs)
        trainer.fit(task, ckpt_path=path)
        return ap, trainer

    fit(1, is_called=True)[1].save_checkpoint(tmp_path / "last.ckpt")
    ap, _ = fit(1 + more, is_called=False, path=tmp_path / "last.ckpt")
    (line,) = remarks(ap)
    assert "(net.2.inner: never called)" in line
