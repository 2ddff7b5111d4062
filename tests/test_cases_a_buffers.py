"""Cases A-06 and A-18: buffers.

Time budget: 10 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Optimizer

from autoprec import (
    Action,
)
from tests.support import (
    Manual,
    Task,
    assert_finite,
    assert_same_state,
    cpu,
    fp16cpu,
    loader,
    rows,
    scripted,
    squares,
    state_of,
)

# ---- running statistics survive a skipped step ----


def rows_with_a_bad_batch(bad: int, factor: float, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(64, width, generator=generator)
    data[bad * 8 : bad * 8 + 8] *= factor
    return data


class Validated(Task):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(self.net, batch, batch_idx)
        self.log("val", loss)
        return loss

    def val_dataloader(self) -> Any:
        return loader(rows_with_a_bad_batch(2, 1.0), 8)


def sgd_small(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.01)


def test_a06_batch_norm_survives_an_fp16_overflow() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    task = Validated(net, rows_with_a_bad_batch(2, 1e5), optimizer=sgd_small)
    ap = scripted()
    buffers: list[dict[str, Tensor]] = []

    class Buffers(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            buffers.append({name: buffer.clone() for name, buffer in pl_module.named_buffers()})

    trainer = cpu(plugins=fp16cpu(128), callbacks=[ap, Buffers()])
    trainer.fit(task)
    assert (ap.skipped_steps, ap.applied_steps) == (1, 7)
    assert_finite(task)
    assert math.isfinite(trainer.callback_metrics["val"])
    assert_same_state(buffers[2], buffers[1])  # the skipped batch left no trace
    assert int(buffers[7]["net.1.num_batches_tracked"]) == 7
    assert ap.precision_map()["net.0"] == "fp32"
    assert [d.unit for d in rows(ap.history, "precision") if d.applied == "fp32"] == ["net.0"]


class RunningMean(nn.Module):
    """A user's own running statistic, written in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.float().flatten(1).mean(1)[:4], alpha=0.1)
        return x


class ReplacedMean(RunningMean):
    """The same, assigned anew in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = (0.9 * self.mean + 0.1 * x.detach().float().flatten(1).mean(1)[:4]).clone()
        return x


class LateMean(RunningMean):
    """The same, from the third batch on: its first write may be the bad one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 2 else x


class UntrackedMean(RunningMean):
    """The same with a buffer that is not part of ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=False)


def vectors(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 1))


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.Unflatten(1, (4, 2, 2)), *layers, nn.Flatten(), nn.Linear(16, 1))


STATISTICS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm_1d": lambda: vectors(nn.BatchNorm1d(8)),
    "batch_norm_1d_cumulative": lambda: vectors(nn.BatchNorm1d(8, momentum=None)),
    "batch_norm_2d": lambda: images(nn.BatchNorm2d(4)),
    "batch_norm_3d": lambda: images(nn.Unflatten(1, (4, 1)), nn.BatchNorm3d(4)),
    "instance_norm": lambda: images(nn.InstanceNorm2d(4, track_running_stats=True)),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(3, 8)), nn.Linear(8, 1)),
    "own_in_place": lambda: vectors(RunningMean()),
    "own_replaced": lambda: vectors(ReplacedMean()),
    "own_late": lambda: vectors(LateMean()),
    "own_untracked": lambda: vectors(UntrackedMean()),
    "two_of_them": lambda: vectors(nn.BatchNorm1d(8), RunningMean(), nn.BatchNorm1d(8)),
}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("name", list(STATISTICS))
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a06_a_skipped_batch_might_never_have_been(name: str, factor: float) -> None:
    """Weights and buffers end bit for bit where a run without the bad batch ends."""
    runs = []
    for is_bad in (True, False):
        torch.manual_seed(0)
        net = STATISTICS[name]()
        data = rows_with_a_bad_batch(2, factor)
        if not is_bad:
            data = torch.cat([data[:16], data[24:]])
        ap, task = scripted(), Task(net, data, optimizer=sgd_small)
        cpu(callbacks=[ap]).fit(task)
        assert ap.skipped_steps == is_bad
        runs.append({**state_of(task), **buffers_of(task)})
    assert_same_state(*runs)


@pytest.mark.parametrize("name", ["batch_norm_1d", "batch_norm_2d", "instance_norm", "own_in_place", "own_replaced"])
@pytest.mark.parametrize("bad", [(2,), (0, 2)])
def test_a06_statistics_survive_an_overflow_of_the_scaled_gradient(name: str, bad: tuple[int, ...]) -> None:
    """Here the forward is fine and only the loss scale is too high."""

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return squares(net, batch, index).float() * (1e6 if index in bad else 1.0)

    runs = []
    for is_whole in (True, False):
        torch.manual_seed(0)
        data = rows_with_a_bad_batch(0, 1.0).unflatten(0, (8, 8))
        task = Task(STATISTICS[name](), data.flatten(0, 1), optimizer=sgd_small, loss=loss)
        if not is_whole:
            task.data, task._loss = data[[i for i in range(8) if i not in bad]].flatten(0, 1), squares
        ap = scripted()
        cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(task)
        assert (ap.skipped_steps, ap.applied_steps) == (len(bad) * is_whole, 8 - len(bad))
        runs.append({**state_of(task), **buffers_of(task)})
    assert_finite(task)
    for key, value in runs[1].items():
        torch.testing.assert_close(runs[0][key], value, rtol=1e-3, atol=1e-3)


def test_a06_accumulation_goes_back_to_the_start_of_the_window() -> None:
    """Batch 2 is good, batch 3 is bad: the window (2, 3) leaves no trace."""
    runs = []
    for is_bad in (True, False):
        torch.manual_seed(0)
        data = rows_with_a_bad_batch(3, math.inf)
        if not is_bad:
            data = torch.cat([data[:16], data[32:]])
        ap, task = scripted(), Task(STATISTICS["batch_norm_1d"](), data, optimizer=sgd_small)
        cpu(callbacks=[ap], accumulate_grad_batches=2).fit(task)
        assert ap.skipped_steps == is_bad
        runs.append(state_of(task))
    assert_same_state(*runs)


def test_a06_manual_optimization() -> None:
    runs = []
    for is_bad in (True, False):
        torch.manual_seed(0)
        data = rows_with_a_bad_batch(2, math.inf)
        if not is_bad:
            data = torch.cat([data[:16], data[24:]])
        ap, task = scripted(), Manual(STATISTICS["batch_norm_1d"](), data, optimizer=sgd_small)
        cpu(callbacks=[ap]).fit(task)
        assert ap.skipped_steps == is_bad
        runs.append(state_of(task))
    assert_same_state(*runs)


class TwoNorms(LightningModule):
    """Two nets, two optimizers: the second one's step is skipped in batch 1, the first one's stays."""

    def __init__(self, bad: bool) -> None:
        super().__init__()
        self.a, self.b = vectors(nn.BatchNorm1d(8)), vectors(nn.BatchNorm1d(8))
        self.automatic_optimization = False
        self.bad = bad

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for net, optimizer in zip((self.a, self.b), optimizers, strict=True):
            optimizer.zero_grad()
            factor = math.nan if self.bad and net is self.b and batch_idx == 1 else 1.0
            self.manual_backward(net(batch * factor).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return SGD(self.a.parameters(), lr=0.01), SGD(self.b.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return loader(rows_with_a_bad_batch(0, 1.0)[:24], 8)


def test_a06_with_several_optimizers_an_applied_step_keeps_its_statistics() -> None:
    torch.manual_seed(0)
    good = TwoNorms(bad=False)
    torch.manual_seed(0)
    bad = TwoNorms(bad=True)
    ap = scripted()
    cpu(callbacks=[scripted()]).fit(good)
    cpu(callbacks=[ap]).fit(bad)
    assert (ap.skipped_steps, ap.applied_steps) == (1, 5)
    assert_same_state(state_of(bad.a), state_of(good.a))
    assert_finite(bad.b)
    assert int(state_of(bad.b)["1.num_batches_tracked"]) == 2


def test_a06_first_batch_of_all() -> None:
    ap, task = scripted(), Task(vectors(nn.BatchNorm1d(8), RunningMean()), rows_with_a_bad_batch(0, math.inf))
    cpu(callbacks=[ap]).fit(task)
    assert ap.skipped_steps == 1
    assert_finite(task)


def test_a06_layer_unfrozen_in_mid_run() -> None:
    """Its statistics are written for the first time by the bad batch."""

    class Unfreeze(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            pl_module.net[1].train(batch_idx >= 2)

    ap, task = scripted(), Task(vectors(nn.BatchNorm1d(8)), rows_with_a_bad_batch(2, math.inf), optimizer=sgd_small)
    cpu(callbacks=[ap, Unfreeze()]).fit(task)
    assert ap.skipped_steps == 1
    assert_finite(task)


def test_a06_layer_added_in_mid_run() -> None:
    late = nn.BatchNorm1d(1)

    class Add(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                pl_module.net.add_module("late", late)

    ap, task = scripted(), Task(vectors(nn.BatchNorm1d(8)), rows_with_a_bad_batch(4, math.inf), optimizer=sgd_small)
    cpu(callbacks=[ap, Add()]).fit(task)
    assert (ap.skipped_steps, ap.applied_steps) == (1, 7)
    assert late.num_batches_tracked == 6  # seven batches, one of them skipped
    assert_finite(task)


# ---- buffers, ids and position tables ----


class Positions(nn.Module):
    table: Tensor
    ids: Tensor
    phase: Tensor
    mask: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(4096.0).unsqueeze(1) / 10000 ** (torch.arange(8) / 8)
        self.register_buffer("table", torch.sin(angles))
        self.register_buffer("ids", torch.arange(4096))
        self.register_buffer("phase", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("mask", torch.arange(8) > 3)
        self.register_buffer("scratch", torch.arange(4097.0), persistent=False)
        self.embed, self.first, self.last = nn.Embedding(4096, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.seen: list[tuple[torch.dtype, torch.dtype, float]] = []

    def forward(self, x: Tensor) -> Any:
        rows_ = self.ids[-8:]
        self.seen.append((self.table.dtype, rows_.dtype, float(self.scratch[-1])))
        y = self.first(x + self.table[rows_] + self.embed(rows_)).masked_fill(self.mask, 0.0)
        rotated = torch.view_as_complex(y.float().unflatten(1, (4, 2))) * self.phase
        return self.last(torch.view_as_real(rotated).flatten(1))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("low", ["bf16", "fp16", "int8", "fp8"])
def test_a18_buffers_keep_every_bit(low: str, precision: Any) -> None:
    task = Task(Positions(), torch.rand(32, 8))
    before = {name: buffer.clone() for name, buffer in task.named_buffers()}
    identities = [id(buffer) for buffer in task.buffers()]
    during: list[bool] = []

    class Look(Callback):
        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            during.append(all(torch.equal(b, before[n]) for n, b in pl_module.named_buffers()))

    ap = scripted({0: Action(precision={"*": low}), 2: Action(precision={"net.*": "bf16"})})
    cpu(precision=precision, callbacks=[ap, Look()]).fit(task)
    assert ap.applied_steps == 4
    assert during == [True] * 4
    assert_same_state({name: buffer.clone() for name, buffer in task.named_buffers()}, before)
    assert [id(buffer) for buffer in task.buffers()] == identities
    assert set(task.net.seen) == {(torch.float32, torch.int64, 4096.0)}  # type: ignore[arg-type]
