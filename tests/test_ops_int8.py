"""Linear layers in int8: the fused implementation against the reference, gradients, sizes, copies.

Time budget: 10 s.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoprec import ops
from tests.kernels import NONFINITE, assert_same_bits, isa, needs_cpu_kernels, threads

pytestmark = needs_cpu_kernels
__all__ = ["isa", "threads"]
sizes = st.integers(0, 70)


def weight_and_copy(out: int, inner: int) -> tuple[Tensor, ops.WeightCopy]:
    weight = torch.randn(out, inner)
    copy = ops.new_copy(weight, "int8")
    ops.refresh_copies_([weight], [copy])
    return weight, copy


def both(x: Tensor, copy: ops.WeightCopy, bias: Tensor | None = None) -> Tensor:
    assert copy.scale is not None
    actual, expected = (
        ops.int8_matmul(x, copy.values, copy.scale, bias, implementation=name) for name in ("cpu", "reference")
    )
    assert_same_bits(actual, expected)
    return actual


@given(rows=sizes, inner=sizes, out=sizes, dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]))
def test_matmul_equals_the_reference(rows: int, inner: int, out: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, inner).to(dtype)
    _, copy = weight_and_copy(out, inner)
    both(x, copy)
    both(x, copy, torch.randn(out))


def test_on_every_instruction_set(isa: str) -> None:
    x = torch.randn(33, 129).bfloat16()
    x[3] = 0.0
    _, copy = weight_and_copy(75, 129)
    both(x, copy, torch.randn(75))
    both(x.t().contiguous().t(), copy)


def test_error_is_that_of_int8(threads: int) -> None:
    x, bias = torch.randn(64, 256).bfloat16(), torch.randn(96)
    weight, copy = weight_and_copy(96, 256)
    exact = x.double() @ weight.double().t() + bias
    error = (both(x, copy, bias).double() - exact).norm() / exact.norm()
    assert float(error) < 0.02


@pytest.mark.parametrize("bad", NONFINITE)
def test_a_non_finite_row_is_nan_and_the_others_are_not(bad: float) -> None:
    x = torch.ones(3, 20)
    x[1, 2] = bad
    _, copy = weight_and_copy(18, 20)
    y = both(x, copy)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("has_copy", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_equal_the_references(has_copy: bool, has_bias: bool) -> None:
    weight, copy = weight_and_copy(24, 40)
    bias = torch.randn(24)
    x, grad = torch.randn(3, 7, 40), torch.randn(3, 7, 24).bfloat16()
    results = []
    for implementation in ("cpu", "reference"):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = ops.int8_linear(
            leaves[0],
            leaves[1],
            leaves[2] if has_bias else None,
            copy if has_copy else None,
            implementation=implementation,
        )
        y.backward(grad)
        results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert len(results[0]) == 3 + has_bias
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)
    assert results[0][0].dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for tensor in results[0][1:])


def test_gradients_are_close_to_those_of_float32() -> None:
    weight, x = torch.randn(48, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    grad = torch.randn(32, 48)
    exact = torch.autograd.grad(x @ weight.t(), [x, weight], grad)
    found = torch.autograd.grad(ops.int8_linear(x, weight), [x, weight], grad.bfloat16())
    for actual, expected in zip(found, exact, strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 0.02


def test_a_copy_without_transposition_serves_too() -> None:
    weight, copy = weight_and_copy(16, 32)
    single = ops.new_copy(weight, "int8", transposed=False)
    ops.refresh_copies_([weight], [single])
    grads = []
    for given_copy in (copy, single):
        x = torch.ones(4, 32, requires_grad=True)
        ops.int8_linear(x, weight, None, given_copy).float().sum().backward()
        grads.append(x.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    assert_same_bits(*grads)  # type: ignore[arg-type]


def test_a_gradient_can_be_differentiated_again() -> None:
    weight, x = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, requires_grad=True)
    y = ops.int8_linear(x, weight).float()
    (grad_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    grad_x.square().sum().backward()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


def test_a_weight_without_gradient_and_no_grad() -> None:
    weight, copy = weight_and_copy(5, 6)
    with torch.no_grad():
        y = ops.int8_linear(torch.randn(2, 6), weight.requires_grad_(), None, copy)
    assert not y.requires_grad
    assert ops.int8_linear(torch.randn(0, 6), weight, None, copy).shape == (0, 5)
