"""The first window under a map: operations without a low-precision form run in fp32 and name the units that fed them.

Time budget: 10 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.trial import Trial
from tests.steered import steered

LOW = (torch.bfloat16, torch.float16)


class Refusing(torch.autograd.Function):
    """Somebody's own kernel that knows float32 only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32, "expected dtype float32"
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0, -1e9)


def eigen(x: Tensor) -> Tensor:
    values: Tensor = torch.linalg.eigvalsh(x @ x.T)
    return values


def mixed_cat(x: Tensor) -> Tensor:
    other = torch.float16 if x.dtype is torch.bfloat16 else torch.bfloat16
    with torch.autocast("cpu", other):
        return torch.cat([x, x.to(other)])


def own_kernel(x: Tensor) -> Tensor:
    y: Tensor = Refusing.apply(x)  # type: ignore[no-untyped-call]
    return y


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[torch.dtype, ...]]] = {
    "mask constant": (masked, (torch.float16,)),
    "fft": (lambda x: torch.fft.rfft(x).abs(), LOW),
    "eigenvalues": (eigen, LOW),
    "concatenation": (mixed_cat, LOW),
    "own autograd function": (own_kernel, LOW),
}


@pytest.mark.parametrize(("call", "dtypes"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", LOW)
def test_a12_a_failing_call_runs_in_fp32_and_blames_the_unit(
    call: Callable[[Tensor], Tensor], dtypes: tuple[torch.dtype, ...], dtype: torch.dtype
) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    produced = (weight * 1.0).to(dtype)
    trial = Trial()
    with trial:
        trial.note_output("unit", produced)
        result = call(produced + 1)
        result.float().sum().backward()
    exact = call(produced.float() + 1)
    assert torch.allclose(result.float(), exact.float(), rtol=0.05, atol=0.05)
    assert (list(trial.failures) == ["unit"]) == (dtype in dtypes)
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
    if dtype in dtypes:
        assert str(dtype) in trial.failures["unit"]


def test_every_unit_that_fed_the_call_is_blamed_and_no_other() -> None:
    net = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("before", "left", "right", "after")})
    x = torch.randn(2, 4)
    trial = Trial()
    with steered(net, "fp16") as runtime, trial:
        runtime.on_output = trial.note_output
        h = net["before"](x)
        both = net["left"](h) + net["right"](h).relu()
        net["after"](masked(both))
    assert sorted(trial.failures) == ["left", "right"]


def test_a07_without_a_graph_the_last_unit_is_blamed() -> None:
    trial = Trial()
    with trial:
        trial.note_output("first", torch.ones(2).half())
        trial.note_output("last", torch.ones(2).half())
        masked(torch.ones(2).half())
    assert list(trial.failures) == ["last"]
    with Trial() as other:
        masked(torch.ones(2).half())
    assert not other.failures


def test_in_place_calls_keep_the_target_and_its_dtype() -> None:
    target = torch.zeros(4, dtype=torch.float16)
    index = torch.tensor([0, 2])
    with Trial() as trial:
        trial.note_output("unit", target)
        target.masked_fill_(torch.tensor([True, False, False, False]), -1e9)
        target[index + 1] = torch.ones(2)
        target.index_put_((torch.tensor([1]),), torch.full((1,), 3.0))
    assert target.dtype == torch.float16
    assert target.tolist() == [-65504.0, 3.0, 0.0, 1.0]
    assert list(trial.failures) == ["unit"]


def test_infinite_constants_stay_infinite() -> None:
    target = torch.zeros(2, dtype=torch.float16)
    with Trial():
        result = target.masked_fill(torch.tensor([True, False]), -math.inf)
    assert result.tolist() == [-math.inf, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_the_users_own_errors_are_raised_as_they_are(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, dtype=dtype)
    with pytest.raises(RuntimeError, match="shape"), Trial() as trial:
        x @ x
    with pytest.raises(TypeError), Trial():
        torch.add(x, "text")  # type: ignore[call-overload]
    with pytest.raises(IndexError), Trial():
        x[5]
    assert not trial.failures


def test_running_out_of_memory_is_never_repeated() -> None:
    calls = []

    def hungry(x: Tensor) -> Tensor:
        calls.append(x.dtype)
        raise torch.OutOfMemoryError("no memory")

    trial = Trial()
    with pytest.raises(torch.OutOfMemoryError), trial:
        trial.__torch_function__(hungry, (), (torch.ones(2).half(),))
    assert calls == [torch.float16]
    assert not trial.failures


def test_calls_that_work_are_left_alone() -> None:
    x = torch.randn(4, 4).bfloat16().requires_grad_()
    with Trial() as trial:
        y = torch.nn.functional.softmax(x @ x, dim=-1)
        torch.fft.rfft(x.float())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, torch.nn.functional.softmax(x @ x, dim=-1))
    assert not trial.failures


def test_a_trial_leaves_no_trace() -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(KeyError), Trial():
        raise KeyError
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert "apply" not in vars(Refusing)
    with Trial():
        assert Refusing.apply(torch.ones(2)).tolist() == [2.0, 2.0]  # type: ignore[no-untyped-call]
    assert torch.autograd.Function.__dict__["apply"] is apply


def test_the_first_reason_is_kept() -> None:
    half = torch.ones(2).half()
    with Trial() as trial:
        trial.note_output("unit", half)
        masked(half)
        torch.linalg.eigvalsh(half.expand(2, 2))
    assert "masked_fill" in trial.failures["unit"]
