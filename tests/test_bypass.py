"""Optimizer steps that do not come through the plugin: refused under a loss scale, warned of without one.

Time budget: 10 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from autoprec import Action, AutoPrecisionCallback, ScriptedController
from tests.small_fits import Plain, loader, quiet


class InBackward(Plain):
    """The first layer has an optimizer of its own, which steps as soon as a gradient is complete."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        for parameter in self.net[0].parameters():
            own = torch.optim.SGD([parameter], lr=0.01)

            def step(parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.01)


class ByHand(Plain):
    """A private optimizer in manual optimization."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.automatic_optimization = False
        self.private = torch.optim.SGD(self.net[0].parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.private.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.private.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.01)


class Nested(torch.optim.SGD):
    """An optimizer that has another one do the work."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=0.01)
        self.inner = torch.optim.SGD(parameters, lr=0.01)

    def step(self, closure: Any = None) -> Any:
        result = closure()
        self.inner.step()
        return result


def fit(module: Plain, callback: AutoPrecisionCallback | None) -> Plain:
    quiet(max_epochs=1, callbacks=[] if callback is None else [callback]).fit(module, loader())
    return module


@pytest.mark.parametrize("make", [InBackward, ByHand])
def test_private_steps_under_a_loss_scale_are_refused(make: type[Plain]) -> None:
    module = make()
    first = next(module.parameters())
    before = first.detach().clone()
    with pytest.raises(MisconfigurationException, match=r"Lightning does not know \(`SGD`\).*configure_optimizers"):
        fit(module, AutoPrecisionCallback("fixed:fp16", verbose=False))
    assert torch.equal(first, before)


@pytest.mark.parametrize("make", [InBackward, ByHand])
def test_private_steps_without_one_are_warned_of_and_keep_fp16_away(make: type[Plain]) -> None:
    script = ScriptedController({3: Action(precision={"*": "fp16"}), 4: Action(loss_scale=8.0)})
    callback = AutoPrecisionCallback(script, knobs=("precision", "loss_scale"), verbose=False)
    with pytest.warns(UserWarning, match="Lightning does not know") as seen:
        module = fit(make(), callback)
    assert sum("Lightning does not know" in str(warning.message) for warning in seen) == 1
    assert {row.outcome for row in callback.history} == {"refused"}
    assert all("steps past autoprec" in row.reason for row in callback.history)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), fit(make(), None).parameters(), strict=True))


@pytest.mark.parametrize("make", [InBackward, ByHand])
def test_private_steps_are_no_harm_to_fp16_that_runs_without_a_loss_scale(make: type[Plain]) -> None:
    callback = AutoPrecisionCallback("fixed:fp16", knobs=("precision",), interval=2, verbose=False)
    with pytest.warns(UserWarning, match="Lightning does not know"):
        fit(make(), callback)
    assert set(callback.precision_map().values()) == {"fp16"}
    assert callback.applied_steps == 8


def test_an_optimizer_inside_another_is_no_bypass() -> None:
    callback = AutoPrecisionCallback("fixed:fp16", verbose=False)
    fit(Plain(Nested), callback)
    assert callback.applied_steps + callback.skipped_steps == 8


def test_optimizers_of_other_models_are_nobodys_business() -> None:
    other = nn.Linear(2, 2)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)

    class Also(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            other(torch.ones(2)).sum().backward()
            elsewhere.step()
            return super().training_step(batch, batch_idx)

    callback = AutoPrecisionCallback("fixed:fp16", verbose=False)
    fit(Also(), callback)
    assert callback.applied_steps + callback.skipped_steps == 8
    elsewhere.step()
