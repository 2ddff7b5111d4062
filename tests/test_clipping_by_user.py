"""Manual optimization: `self.clip_gradients` may come at any place between the backwards and the step.

Time budget: 10 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec import AutoPrecisionCallback
from tests.small_fits import Plain, fp16_plugin, loader, quiet

HUGE = 1e9  # acts on nothing: only the unscaling of the clipping is left


class ByHand(Plain):
    def __init__(self, step: Callable[[Any, Any, int], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one_step = step

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.one_step(self, batch, batch_idx)

    def backward_twice(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.loss(batch), self.net(batch[0]).float().abs().mean()


def between(module: Any, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    first, second = module.backward_twice(batch)
    module.manual_backward(first)
    module.clip_gradients(optimizer, HUGE, "norm")
    module.manual_backward(second)
    optimizer.step()


def each_micro_batch(module: Any, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    module.manual_backward(module.loss(batch) / 2)
    module.clip_gradients(optimizer, HUGE, "norm")
    if batch_idx % 2:
        optimizer.step()
        optimizer.zero_grad()


def each_and_a_part(module: Any, batch: Any, batch_idx: int) -> None:
    """The second backward reaches the last layer only."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))
    module.clip_gradients(optimizer, HUGE, "value")
    with torch.no_grad():
        hidden = module.net[:2](batch[0])
    module.manual_backward(module.net[2](hidden).float().abs().mean())
    optimizer.step()


def rejected(module: Any, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad(set_to_none=batch_idx % 3 == 0)
    module.manual_backward(module.loss(batch))
    module.clip_gradients(optimizer, HUGE, "norm")
    if batch_idx % 4 != 1:
        optimizer.step()


def rejected_and_kept(module: Any, batch: Any, batch_idx: int) -> None:
    """The gradients of a batch without a step are added to those of the next."""
    optimizer = module.optimizers()
    module.manual_backward(module.loss(batch))
    module.clip_gradients(optimizer, HUGE, "norm")
    if batch_idx % 4 != 1:
        optimizer.step()
        optimizer.zero_grad()


def then_bare(module: Any, batch: Any, batch_idx: int) -> None:
    """A bare backward after the clipping adds unscaled gradients to unscaled ones."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    first, second = module.backward_twice(batch)
    module.manual_backward(first)
    module.clip_gradients(optimizer, HUGE, "norm")
    second.backward()
    optimizer.step()


STEPS = {f.__name__: f for f in (between, each_micro_batch, each_and_a_part, rejected, rejected_and_kept, then_bare)}


def trained(step: Callable[[Any, Any, int], None], *callbacks: Any, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = ByHand(step)
    quiet(max_epochs=1, callbacks=list(callbacks), **options).fit(module, loader())
    return module.state_dict()


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("knobs", [(), ("precision", "loss_scale", "clip")])
def test_a_loss_scale_shows_nowhere(name: str, knobs: tuple[str, ...]) -> None:
    expected = trained(STEPS[name], plugins=[fp16_plugin(1.0)])
    callback = AutoPrecisionCallback(knobs=knobs, verbose=False)
    found = trained(STEPS[name], callback, plugins=[fp16_plugin(2.0**10)])
    assert callback.skipped_steps == 0
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=2e-2, atol=2e-3), key


@pytest.mark.parametrize("knobs", [(), ("precision", "loss_scale", "clip")])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_an_entry_that_turns_bad_after_the_clipping_reaches_no_weight(
    knobs: tuple[str, ...], scale: float | None
) -> None:
    def spoiled(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        module.clip_gradients(optimizer, 1.0, "norm")
        if batch_idx == 1:
            module.net[0].weight.grad.data.mul_(math.inf)  # leaves no trace in the tensor's version
        optimizer.step()

    callback = AutoPrecisionCallback(knobs=knobs, verbose=False)
    options: dict[str, Any] = {"plugins": [fp16_plugin(scale)]} if scale else {}
    weights = trained(spoiled, callback, **options)
    assert (callback.applied_steps, callback.skipped_steps) == (7, 1)
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())


def test_automatic_optimization_with_a_clipping_per_micro_batch() -> None:
    class Clips(Plain):
        def on_after_backward(self) -> None:
            self.clip_gradients(self.optimizers(), HUGE, "norm")  # type: ignore[arg-type]

    def weights(scale: float, callback: AutoPrecisionCallback | None = None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Clips()
        callbacks = [] if callback is None else [callback]
        quiet(max_epochs=1, callbacks=callbacks, accumulate_grad_batches=3, plugins=[fp16_plugin(scale)]).fit(
            module, loader()
        )
        return module.state_dict()

    expected, callback = weights(1.0), AutoPrecisionCallback(knobs=("loss_scale",), verbose=False)
    found = weights(1024.0, callback)
    assert callback.skipped_steps == 0
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=2e-2, atol=2e-3), key


@pytest.mark.filterwarnings("ignore:A step under a loss scale used gradients:UserWarning")
def test_a14_gradients_combined_from_scaled_ones_are_unscaled() -> None:
    """One backward per task, then an own combination assigned (PCGrad, MGDA): what GradScaler does right."""

    def combined(module: Any, batch: Any, batch_idx: int) -> None:
        optimizer = module.optimizers()
        parts = []
        for loss in module.backward_twice(batch):
            optimizer.zero_grad()
            module.manual_backward(loss)
            parts.append([p.grad.clone() for p in module.parameters()])
        for parameter, first, second in zip(module.parameters(), *parts, strict=True):
            parameter.grad = 0.5 * (first + second)
        optimizer.step()

    expected = trained(combined, plugins=[fp16_plugin(1.0)])
    callback = AutoPrecisionCallback(verbose=False)
    found = trained(combined, callback, plugins=[fp16_plugin(2.0**10)])
    assert callback.skipped_steps == 0
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=2e-2, atol=2e-3), key


def test_the_scale_is_put_back_exactly() -> None:
    """Powers of two: unscaling and scaling again changes no bit."""
    from autoprec.gradients import Gradients

    parameter = nn.Parameter(torch.randn(50))
    parameter.grad = torch.randn(50) * 4096
    before = parameter.grad.clone()
    gradients = Gradients([parameter], 1 / 4096)
    assert gradients.rescale_(4096.0) == [parameter]
    assert torch.equal(parameter.grad, before)
