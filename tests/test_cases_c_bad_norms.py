"""Gradient clipping: one non-finite entry must skip the whole step, whoever clips and however it got there.

Time budget: 20 s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from autoprec import Action, AutoPrecisionCallback
from tests.clipping import State, same
from tests.support import Lin, Manual, Task, cpu, rows, scripted

BAD = (math.inf, -math.inf, math.nan)
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class SignedStep(Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
                    parameter.data.add_(state["sum"].sign(), alpha=-group["lr"])
        return loss


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adam": functools.partial(Adam, lr=0.1),
    "fused adam": functools.partial(Adam, lr=0.1, fused=True),
    "adamw": functools.partial(AdamW, lr=0.1),
    "momentum": functools.partial(SGD, lr=0.1, momentum=0.9),
    "rmsprop": functools.partial(RMSprop, lr=0.1),
    "adagrad": functools.partial(Adagrad, lr=0.1),
    "foreign": SignedStep,
}


def poisoned_by_a_hook(module: Task, bad: float, batch: int = 3) -> None:
    """The gradient of one batch goes bad in the backward; its loss is finite."""
    seen = iter(range(1000))

    def hook(grad: Tensor) -> Tensor:
        if next(seen) != batch:
            return grad
        grad = grad.clone()
        grad.view(-1)[1] = bad
        return grad

    module.net.get_parameter("weight").register_hook(hook)


def assert_batch_3_is_skipped(ap: AutoPrecisionCallback, state: State) -> None:
    assert (ap.applied_steps, ap.skipped_steps) == (7, 1)
    assert same(state.weights[3], state.weights[2])
    assert same(state.moments[3], state.moments[2])
    for before, after in ((1, 2), (3, 4)):
        assert not same(state.weights[after], state.weights[before])
    assert all(torch.isfinite(weight).all() for weight in state.weights[-1])


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_c01_a_non_finite_norm_skips_the_whole_step(bad: float, optimizer: MakeOptimizer) -> None:
    module, ap, state = Lin(64, 8, optimizer=optimizer), scripted({0: Action(clip=1.0)}), State()
    poisoned_by_a_hook(module, bad)
    cpu(callbacks=[ap, state]).fit(module)
    assert_batch_3_is_skipped(ap, state)
    assert ap.clip_threshold == 1.0
    assert len(rows(ap.history, "clip")) == 1


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "options",
    [{"gradient_clip_val": 1.0}, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, {}],
    ids=["norm", "value", "none"],
)
@pytest.mark.parametrize("knobs", [("precision", "loss_scale", "clip"), ()], ids=["steered", "masked"])
def test_c01_whoever_clips(bad: float, options: dict[str, Any], knobs: tuple[str, ...]) -> None:
    module = Lin(64, 8, optimizer=functools.partial(SGD, lr=0.01))
    ap, state = AutoPrecisionCallback(knobs=knobs), State()
    poisoned_by_a_hook(module, bad)
    cpu(callbacks=[ap, state], **options).fit(module)
    assert_batch_3_is_skipped(ap, state)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_c01_in_low_precision(bad: float, name: str) -> None:
    module, state = Lin(64, 8), State()
    ap = scripted({0: Action(precision={"*": name}, clip=1.0)})
    poisoned_by_a_hook(module, bad)
    cpu(callbacks=[ap, state]).fit(module)
    assert_batch_3_is_skipped(ap, state)


@pytest.mark.parametrize("bad", BAD)
def test_c01_under_manual_optimization(bad: float) -> None:
    module, ap, state = Manual(nn.Linear(4, 1), torch.ones(64, 4), 8), AutoPrecisionCallback(), State()
    poisoned_by_a_hook(module, bad)
    cpu(callbacks=[ap, state]).fit(module)
    assert_batch_3_is_skipped(ap, state)


@pytest.mark.parametrize("bad_batch", [6, 7])
def test_c01_a_bad_micro_batch_skips_its_whole_window(bad_batch: int) -> None:
    module, ap, state = Lin(128, 8), scripted({0: Action(clip=1.0)}), State()
    poisoned_by_a_hook(module, math.inf, bad_batch)
    cpu(callbacks=[ap, state], accumulate_grad_batches=2).fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (7, 1)
    assert same(state.weights[7], state.weights[5])
    assert not same(state.weights[9], state.weights[7])


def fills(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.grad.fill_(math.nan)  # type: ignore[union-attr]


def replaces(parameter: nn.Parameter) -> None:
    parameter.grad = torch.full_like(parameter, math.inf)


def writes_data(parameter: nn.Parameter) -> None:
    parameter.grad.data.div_(0.0)  # type: ignore[union-attr]


def binds_data(parameter: nn.Parameter) -> None:
    parameter.grad.data = torch.full_like(parameter, math.nan)  # type: ignore[union-attr]


def writes_numpy(parameter: nn.Parameter) -> None:
    parameter.grad.numpy()[:] = math.nan  # type: ignore[union-attr]


WRITES = (fills, replaces, writes_data, binds_data, writes_numpy)


class Writer(Callback):
    def __init__(self, write: Callable[[nn.Parameter], None]) -> None:
        self.write, self.calls = write, 0

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.calls == 3:
            self.write(next(pl_module.parameters()))
        self.calls += 1


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("clip", [1.0, math.inf])
def test_c01_non_finite_gradients_written_by_a_callback(write: Callable[[nn.Parameter], None], clip: float) -> None:
    module, ap, state = Lin(64, 8), scripted({0: Action(clip=clip)}), State()
    cpu(callbacks=[Writer(write), ap, state]).fit(module)
    assert_batch_3_is_skipped(ap, state)


@pytest.mark.parametrize("write", WRITES)
def test_c01_non_finite_gradients_written_by_the_modules_own_clipping(write: Callable[[nn.Parameter], None]) -> None:
    class Clipping(Lin):
        calls = 0

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            if self.calls == 3:
                write(next(self.parameters()))
            self.calls += 1

    module, ap, state = Clipping(64, 8), AutoPrecisionCallback(), State()
    cpu(callbacks=[ap, state]).fit(module)
    assert_batch_3_is_skipped(ap, state)


def test_c01_a_threshold_that_follows_the_median_is_not_moved_by_bad_norms() -> None:
    module, state = Lin(320, 8, optimizer=functools.partial(SGD, lr=1e-4)), State()
    ap = AutoPrecisionCallback()
    for batch in (20, 25, 30):
        poisoned_by_a_hook(module, math.inf, batch)
    thresholds: list[float] = []

    class Look(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            thresholds.append(ap.clip_threshold)

    cpu(callbacks=[ap, state, Look()]).fit(module)
    assert ap.skipped_steps == 3
    assert all(math.isinf(value) for value in thresholds[:15])
    assert thresholds[16:] == pytest.approx([thresholds[16]] * len(thresholds[16:]), rel=0.05)
