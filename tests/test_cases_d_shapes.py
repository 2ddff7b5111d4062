"""Case D-01: sizes that fp8 cannot take, in layers and in batches.

Time budget: 15 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, RMSprop
from torch.utils.checkpoint import checkpoint

from autoprec import Action, AutoPrecision, AutoPrecisionCallback
from tests.support import (
    Ask,
    Manual,
    Task,
    all_in,
    assert_finite,
    cpu,
    fp16cpu,
    loader,
    reported,
    rows,
    scripted,
)

BF16 = torch.bfloat16
# batches of the case, of sizes that fp8 takes, and the remainder that comes last
BATCHES = (8, 24, 16, 32, 5)
EVEN = tuple(size % 16 == 0 for size in BATCHES)


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    return reported(caplog, monkeypatch)


def heads() -> nn.Sequential:
    """The layers of the case: one that fp8 takes, and two classifier heads."""
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 15), nn.Linear(15, 2))


def batches(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def of_sizes(sizes: Sequence[int] = BATCHES) -> list[Tensor]:
    return batches(*((size, 32) for size in sizes))


def uneven(net: nn.Module, data: list[Tensor] | None = None, make: Callable[..., Task] = Task, **kwargs: Any) -> Task:
    """A task whose batches are these, as they are."""
    return make(net, of_sizes() if data is None else data, None, **kwargs)


Call = tuple[Tensor, Tensor, Tensor, Tensor | None]


def watch_calls(layer: nn.Module) -> list[Call]:
    """Keeps input, output, weight and bias of every call of a linear layer."""
    calls: list[Call] = []

    def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        bias = None if module.bias is None else module.bias.detach().clone()
        calls.append((args[0].detach().clone(), output.detach().clone(), module.weight.detach().clone(), bias))

    layer.register_forward_hook(hook)
    return calls


def runs_in_bf16(call: Call) -> bool:
    x, output, weight, bias = call
    expected = nn.functional.linear(x.to(BF16), weight.to(BF16), None if bias is None else bias.to(BF16))
    assert output.dtype == BF16
    return torch.equal(output, expected)


def fits(task: Task, ap: AutoPrecisionCallback, **options: Any) -> list[Call]:
    calls = watch_calls(task.net[0])  # type: ignore[index]
    cpu(callbacks=[ap], **options).fit(task)
    assert ap.skipped_steps == 0
    assert_finite(task)
    return calls


def test_d01_heads_are_refused_and_odd_batches_run_in_bf16(report: Callable[[], str]) -> None:
    task, ap = uneven(heads()), scripted({0: all_in("fp8")})
    calls = fits(task, ap)
    assert [not runs_in_bf16(call) for call in calls] == list(EVEN)
    assert ap.applied_steps == len(BATCHES)
    assert ap.precision_map() == {"net.0": "fp8", "net.1": "fp32", "net.2": "fp32"}
    refused = rows(ap.history, "precision", "refused")
    assert [d.unit for d in refused] == ["net.1", "net.2"]
    assert all("cannot run in fp8; legal here: fp32, tf32, bf16, fp16, int8" in d.reason for d in refused)
    assert "3 of 5 calls ran in bf16" in report()


@pytest.mark.parametrize(
    ("inner", "outer", "is_legal"),
    [(16, 16, True), (32, 48, True), (32, 15, False), (15, 32, False), (8, 16, False), (16, 24, False), (1, 1, False)],
)
def test_d01_both_sizes_of_a_layer_count(inner: int, outer: int, is_legal: bool) -> None:
    task = Task(nn.Sequential(nn.Linear(inner, outer)), torch.rand(32, inner), 16)
    ap = scripted({0: all_in("fp8")})
    fits(task, ap)
    assert ap.precision_map() == {"net.0": "fp8" if is_legal else "fp32"}


@pytest.mark.parametrize(
    ("shape", "is_even"),
    [((2, 8, 32), True), ((2, 7, 32), False), ((16, 1, 32), True), ((1, 1, 32), False), ((4, 2, 2, 32), True)],
)
def test_d01_rows_are_batch_times_sequence(shape: tuple[int, ...], is_even: bool) -> None:
    task = uneven(nn.Sequential(nn.Linear(32, 32)), batches(shape))
    (call,) = fits(task, scripted({0: all_in("fp8")}))
    assert runs_in_bf16(call) is not is_even


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("optimizer", [SGD, AdamW, RMSprop, functools.partial(AdamW, fused=True)])
def test_d01_odd_batches_train_as_in_bf16(optimizer: Callable[..., Any], bias: bool) -> None:
    """Forward and backward: a fit of odd batches alone ends with the weights of a fit in bf16, bit for bit."""
    weights = []
    for name in ("fp8", "bf16"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32, bias=bias), nn.Linear(32, 16, bias=bias))
        make = functools.partial(optimizer, lr=0.01)
        task = uneven(net, of_sizes((8, 24, 5, 1)), optimizer=make)
        fits(task, scripted({0: all_in(name)}, knobs=("precision",)))
        weights.append([p.detach() for p in task.parameters()])
    for fp8, bf16 in zip(*weights, strict=True):
        assert torch.equal(fp8, bf16)


def by_script() -> AutoPrecisionCallback:
    return scripted({2: all_in("fp8")})


def by_policy() -> AutoPrecisionCallback:
    return AutoPrecisionCallback("fixed:fp8", knobs=("precision",))


def by_epoch() -> AutoPrecisionCallback:
    return scripted(epochs={0: Action(precision={"net.0": "fp8"})})


@pytest.mark.parametrize(("make", "first"), [(by_script, 2), (by_policy, 0), (by_epoch, 0)])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16"])
def test_d01_every_way_of_asking_and_every_start(
    make: Callable[[], AutoPrecisionCallback], first: int, precision: str
) -> None:
    task, ap = uneven(heads()), make()
    base: dict[str, Any] = {"plugins": fp16cpu(128.0)} if precision == "fp16" else {"precision": precision}
    calls = fits(task, ap, **base)
    assert [not runs_in_bf16(call) for call in calls[first:]] == list(EVEN[first:])
    assert ap.precision_map()["net.0"] == "fp8"


def test_d01_a_request_in_mid_run_and_the_plugin_alone() -> None:
    task, ap = uneven(heads()), scripted()
    calls = watch_calls(task.net[0])  # type: ignore[index]
    cpu(callbacks=[ap, Ask(ap, "on_before_backward", 1, all_in("fp8"))]).fit(task)
    assert [not runs_in_bf16(call) for call in calls[2:]] == list(EVEN[2:])
    assert calls[1][1].dtype == torch.float32

    task = uneven(heads())
    calls = watch_calls(task.net[0])  # type: ignore[index]
    cpu(plugins=[AutoPrecision({"*": "fp8"})]).fit(task)
    assert [not runs_in_bf16(call) for call in calls] == list(EVEN)


@pytest.mark.parametrize(("make", "accumulate"), [(Task, 1), (Task, 2), (Manual, 1)])
def test_d01_loops(make: Callable[..., Task], accumulate: int) -> None:
    task, ap = uneven(heads(), make=make), scripted({0: all_in("fp8")})
    calls = fits(task, ap, accumulate_grad_batches=accumulate)
    assert [not runs_in_bf16(call) for call in calls] == list(EVEN)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_d01_recomputation_takes_the_form_of_the_forward(use_reentrant: bool, report: Callable[[], str]) -> None:
    class Recomputed(Task):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            output: Any = checkpoint(self.net, batch.requires_grad_(), use_reentrant=use_reentrant)
            return output.pow(2).mean()  # type: ignore[no-any-return]

    task, ap = uneven(heads(), make=Recomputed), scripted({0: all_in("fp8")})
    calls = fits(task, ap)
    assert [not runs_in_bf16(call) for call in calls] == [is_even for is_even in EVEN for _ in range(2)]
    assert "3 of 5 calls ran in bf16" in report()  # what is recomputed is not counted again


def test_d01_a_new_batch_size_is_checked_again(report: Callable[[], str]) -> None:
    """The size grows at an epoch end, as a tuner would have it: 8 rows, 16, 24."""

    class Growing(Task):
        def train_dataloader(self) -> Any:
            return loader(self.data, 8 * (self.trainer.current_epoch + 1))

    task, ap = Growing(heads(), torch.rand(48, 32)), scripted({0: all_in("fp8")})
    calls = fits(task, ap, max_epochs=3, reload_dataloaders_every_n_epochs=1)
    sizes = [len(call[0]) for call in calls]
    assert sizes == [8] * 6 + [16] * 3 + [24] * 2
    assert [not runs_in_bf16(call) for call in calls] == [size == 16 for size in sizes]
    assert "8 of 11 calls ran in bf16" in report()


def test_d01_validation_in_current_formats_is_checked_too() -> None:
    class Validated(Task):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("loss", self.net(batch).float().pow(2).mean(), batch_size=len(batch))

    task = uneven(heads(), of_sizes((16,)), Validated)
    ap = scripted({0: all_in("fp8")}, eval_precision="current")
    calls = watch_calls(task.net[0])  # type: ignore[index]
    trainer: Trainer = cpu(callbacks=[ap], num_sanity_val_steps=0)
    trainer.fit(task, val_dataloaders=loader(of_sizes((5, 16)), None))
    assert [not runs_in_bf16(call) for call in calls] == [True, False, True]


def test_d01_an_empty_batch_and_a_single_row() -> None:
    task, ap = uneven(heads(), of_sizes((16, 1, 0))), scripted({0: all_in("fp8")})

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return net(batch).float().pow(2).sum()  # type: ignore[no-any-return]

    task._loss = loss
    calls = fits(task, ap)
    assert [not runs_in_bf16(call) for call in calls] == [True, False, False]


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "int8"])
def test_d01_other_formats_take_every_size(name: str, report: Callable[[], str]) -> None:
    task, ap = uneven(heads()), scripted({0: all_in(name)})
    fits(task, ap)
    assert set(ap.precision_map().values()) == {name}
    assert not rows(ap.history, "precision", "refused")
    assert "calls ran in" not in report()
