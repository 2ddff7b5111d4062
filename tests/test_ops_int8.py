"""Linear layers in int8: the fused implementation against the reference, gradients, sizes, copies.

Time budget: 10 s.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoprec import ops
from tests.kernels import NONFINITE, assert_same_bits, isa, needs_cpu_kernels, threads
from tests.wrapped_tensors import Wrapped

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


def strided(x: Tensor) -> Tensor:
    return x.detach().t().contiguous().t()


def every_other(x: Tensor) -> Tensor:
    return x.detach().repeat_interleave(2, dim=-1)[..., ::2]


def specification(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear(x, weight, bias, "int8")


EVERY = (True, True, True)


def outcome(run: Callable[..., Tensor], tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """The output, and the gradients of those tensors that need one."""
    leaves = [t.detach().requires_grad_(n) for t, n in zip(tensors, needs, strict=True)]
    y = run(*leaves)
    if any(needs):
        y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def assert_equals_the_specification(x: Tensor, weight: Tensor, bias: Tensor, needs: Sequence[bool] = EVERY) -> None:
    found = outcome(ops.int8_linear, (x, weight, bias), needs)
    expected = outcome(specification, (x, weight, bias), needs)
    for actual, wanted, source in zip(found[1:], expected[1:], (x, weight, bias), strict=True):
        assert (actual is None) == (wanted is None)
        if actual is not None and wanted is not None:
            assert actual.dtype == source.dtype
            assert_same_bits(actual, wanted)
    assert found[0] is not None
    assert expected[0] is not None
    assert_same_bits(found[0], expected[0])


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3)))
def test_equals_the_specification_whatever_needs_a_gradient(needs: tuple[bool, ...]) -> None:
    assert_equals_the_specification(torch.randn(5, 40), torch.randn(24, 40), torch.randn(24), needs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(40,), (7, 40), (2, 3, 40), (0, 40), (2, 0, 40)])
def test_equals_the_specification_for_any_input(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(24, 40), torch.randn(24)
    assert_equals_the_specification(x, weight, bias)
    assert_equals_the_specification(every_other(x), weight, every_other(bias))


@pytest.mark.parametrize("layout", [strided, every_other])
def test_equals_the_specification_for_weights_of_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    weight = layout(torch.randn(24, 40))
    assert not weight.is_contiguous()
    assert_equals_the_specification(torch.randn(5, 40), weight, torch.randn(24))


@pytest.mark.parametrize(("rows", "inner", "out"), [(3, 0, 4), (3, 4, 0), (0, 0, 4), (1, 1, 1), (1, 5, 1), (3, 1, 2)])
def test_equals_the_specification_at_the_smallest_sizes(rows: int, inner: int, out: int) -> None:
    assert_equals_the_specification(torch.randn(rows, inner), torch.randn(out, inner), torch.randn(out))


def test_a_gradient_can_be_differentiated_again() -> None:
    """A penalty on the slope of two layers, the first of which sees its own output change with the weight."""
    leaves = [torch.randn(4, 16), torch.randn(8, 16), torch.randn(8), torch.randn(6, 8)]
    results = []
    for run in (ops.int8_linear, specification):
        x, first, bias, second = (leaf.clone().requires_grad_() for leaf in leaves)
        y = run(torch.tanh(run(x, first, bias)), second)
        (slope,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), [first, bias, second]))
    for actual, expected in zip(*results, strict=True):
        assert actual.any()
        assert_same_bits(actual, expected)


def test_the_backward_can_be_repeated() -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    y = ops.int8_linear(x, weight).float().sum()
    first, second = (torch.autograd.grad(y, [x, weight], retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("has_transposed", [False, True])
def test_a_weight_written_after_the_forward_is_noticed_where_it_is_needed(has_transposed: bool) -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    copy = ops.new_copy(weight, "int8", transposed=has_transposed)
    ops.refresh_copies_([weight.detach()], [copy])
    y = ops.int8_linear(x, weight, None, copy).float().sum()
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, create_graph=has_transposed)


def test_a_step_between_forward_and_backward_changes_no_gradient() -> None:
    """As with autocast, whose casts are what is kept."""
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    expected = torch.autograd.grad(ops.int8_linear(x, weight).float().sum(), [x, weight])
    y = ops.int8_linear(x, weight).float().sum()
    with torch.no_grad():
        weight.mul_(2.0)
    assert all(map(torch.equal, torch.autograd.grad(y, [x, weight]), expected))


def test_a_stand_in_takes_the_gradient_in_its_own_dtype_and_the_master_serves_further_ones() -> None:
    x, weight, bias = torch.randn(4, 16), torch.randn(8, 16), torch.randn(8)
    copy = ops.new_copy(weight, "int8")
    ops.refresh_copies_([weight], [copy])
    results = []
    for has_stand_in in (False, True):
        x_, weight_ = x.clone().requires_grad_(), weight.clone().requires_grad_()
        stand_in = torch.zeros((), dtype=torch.bfloat16).expand(8, 16).requires_grad_() if has_stand_in else weight_
        y = ops.int8_linear(x_, stand_in, bias, copy, master=weight_)
        first = torch.autograd.grad(y.float().square().sum(), [x_, stand_in], create_graph=True)
        further = torch.autograd.grad(first[0].square().sum(), [weight_, stand_in] if has_stand_in else [weight_])
        results.append([y, *first, torch.stack([grad.float() for grad in further]).sum(0)])
        assert first[1].dtype is stand_in.dtype
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual.float(), expected.float(), rtol=2**-7)  # a sum is rounded once more
    assert all(map(torch.equal, results[0][:2], results[1][:2]))


def test_hooks_on_saved_tensors_see_everything_that_is_kept() -> None:
    """Activation offloading would otherwise leave the transposed copy behind."""
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ops.int8_linear(x, weight)
    assert sorted(kept, key=str) == [
        (torch.bfloat16, (4, 16)),
        (torch.float32, (16, 1)),
        (torch.int8, (16, 8)),
    ]
    found = torch.autograd.grad(y.float().sum(), [x, weight])
    expected = torch.autograd.grad(ops.int8_linear(x, weight).float().sum(), [x, weight])
    assert all(map(torch.equal, found, expected))


def test_a_weight_without_gradient_and_no_grad() -> None:
    weight, copy = weight_and_copy(5, 6)
    with torch.no_grad():
        y = ops.int8_linear(torch.randn(2, 6), weight.requires_grad_(), None, copy)
    assert not y.requires_grad
    assert ops.int8_linear(torch.randn(0, 6), weight, None, copy).shape == (0, 5)


def test_tensors_of_inference_mode_serve_as_well() -> None:
    with torch.inference_mode():
        x, weight = torch.randn(3, 8), torch.randn(5, 8)
        y = ops.int8_linear(x, weight)
    assert_same_bits(y.clone(), ops.int8_linear(x.clone(), weight.clone()))
    leaf = torch.randn(3, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.int8_linear(leaf, weight).float().sum(), leaf)
    (expected,) = torch.autograd.grad(ops.int8_linear(leaf, weight.clone()).float().sum(), leaf)
    assert_same_bits(grad, expected)


def test_a_gradient_of_another_library_is_not_read_by_kernels() -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    y, grad = ops.int8_linear(x, weight), torch.randn(4, 8).bfloat16()
    expected = torch.autograd.grad(y, [x, weight], grad, retain_graph=True)
    found = torch.autograd.grad(y, [x, weight], Wrapped(grad))
    assert all(map(torch.equal, found, expected))
