"""A step that is left from inside its closure leaves no trace in weights and state.

Time budget: 5 s.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from autoprec.undo import StepUndo


def parameters(*gradients: Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]


class TwoCalls(torch.optim.SGD):
    """Moves the weights between two calls of its closure, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(100.0)
        result = closure()
        super().step()
        return result


class OneCall(torch.optim.SGD):
    """A foreign optimizer that does what torch's own do."""

    def step(self, closure: Any = None) -> Any:
        result = closure()
        super().step()
        return result


class StoppedError(Exception):
    pass


def step(optimizer: torch.optim.Optimizer, fails_at: int, made: Sequence[nn.Parameter]) -> None:
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        undo.note_call()
        if calls == fails_at:
            raise StoppedError
        for parameter in made:
            parameter.grad = torch.ones_like(parameter)
        return torch.zeros(())

    undo = StepUndo(optimizer)
    try:
        optimizer.step(closure)  # type: ignore[arg-type]
        undo.learn()
    except StoppedError:
        undo.restore()


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a16_an_optimizer_that_calls_twice_is_put_back(fails_at: int) -> None:
    made = parameters(torch.ones(3))
    optimizer = TwoCalls(made, lr=0.1, momentum=0.9)
    step(optimizer, 0, made)
    weights, state = made[0].detach().clone(), copy.deepcopy(optimizer.state_dict())
    step(optimizer, fails_at, made)
    assert torch.equal(made[0], weights)
    assert optimizer.state_dict()["state"].keys() == state["state"].keys()
    buffers = [s["state"][0]["momentum_buffer"] for s in (optimizer.state_dict(), state)]
    assert torch.equal(*buffers)


def test_a16_a_failing_first_step_of_an_unknown_optimizer_is_put_back() -> None:
    class Unknown(TwoCalls):
        pass

    made = parameters(torch.ones(3))
    step(Unknown(made, lr=0.1), 2, made)
    assert torch.equal(made[0], torch.zeros(3))


def test_optimizers_that_call_once_are_copied_at_most_once() -> None:
    made = parameters(torch.ones(3))
    assert StepUndo(torch.optim.Adam(made))._copies is None
    foreign = OneCall(made, lr=0.1)
    step(foreign, 0, made)
    assert StepUndo(foreign)._copies is None
    assert StepUndo(torch.optim.LBFGS(made))._copies is not None


class Pair(NamedTuple):
    average: Tensor
    steps: int


def test_state_of_an_unknown_optimizer_may_hold_named_tuples() -> None:
    class Foreign(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            return closure()

    weight = nn.Parameter(torch.zeros(2))
    optimizer = Foreign([weight], {"lr": 0.1})
    optimizer.state[weight]["pair"] = Pair(torch.ones(2), 3)
    assert StepUndo(optimizer)._copies is not None  # torch's own load_state_dict cannot take them back


class LooksAhead(torch.optim.SGD):
    """Writes the weights before it evaluates its closure."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1.0)
        return closure()


@pytest.mark.parametrize("clean_steps", [0, 1, 3])
def test_a16_weights_written_before_the_closure_are_put_back(clean_steps: int) -> None:
    class Ahead(LooksAhead):
        pass

    made = parameters(torch.ones(3))
    optimizer = Ahead(made, lr=0.1)
    for _ in range(clean_steps):
        step(optimizer, 0, made)
    step(optimizer, 1, made)
    assert torch.equal(made[0], torch.full((3,), float(clean_steps)))


def test_a16_an_optimizer_that_begins_to_write_early_is_named_once() -> None:
    """It looked like the others at first; what it wrote in that one step is lost."""

    class Sometimes(torch.optim.SGD):
        is_early = False

        def step(self, closure: Any = None) -> Any:
            return LooksAhead.step(self, closure) if self.is_early else closure()  # type: ignore[arg-type]

    made = parameters(torch.ones(3))
    optimizer = Sometimes(made, lr=0.1)
    step(optimizer, 0, made)
    optimizer.is_early = True
    with pytest.warns(UserWarning, match="a skipped step of `.*Sometimes` could not be taken back"):
        step(optimizer, 1, made)
    assert torch.equal(made[0], torch.ones(3))
    step(optimizer, 1, made)
    assert torch.equal(made[0], torch.ones(3))
