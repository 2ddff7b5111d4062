"""The eager operations: quantisation, 8-bit and tf32 matmuls against fp64 and torchao, embeddings.

Time budget: 20 s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoprec import ops
from autoprec.formats import TF32
from autoprec.ops.reference import Tf32Linear, int_matmul, round_fp8, round_int8, tf32_matmul

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16_ROUNDING = 2.0**-8  # half a unit in the last place
LOW = ("tf32", "fp8", "int8")
sizes = st.integers(0, 24)


def low_linear(x: Tensor, weight: Tensor, bias: Tensor | None, format_name: str) -> Tensor:
    return Tf32Linear.call(x, weight, bias) if format_name == "tf32" else ops.linear(x, weight, bias, format_name)


def leaves(rows: int = 32, inner: int = 32, outer: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """Input (already bf16 numbers), weight and bias."""
    x = torch.randn(rows, inner).bfloat16().float().requires_grad_()
    return x, torch.randn(outer, inner, requires_grad=True), torch.randn(outer, requires_grad=True)


def values64(x: Tensor) -> Tensor:
    """What :func:`quantize_rows` made of ``x``, in float64."""
    values, scale = ops.quantize_rows(x)
    return values.double() / scale.double()


def assert_rounded(actual: Tensor, exact: Tensor, roundings: int = 1, added: Tensor | float = 0.0) -> None:
    """``actual`` is ``exact`` after a number of roundings to bfloat16, the last of them before ``added`` joined."""
    slack = roundings * BF16_ROUNDING * (exact.abs() + added) + 1e-5 * exact.abs().amax()
    assert torch.all((actual.double() - exact).abs() <= slack)


# ---- quantisation ----


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_quantize_tensor_uses_the_whole_range(dtype: torch.dtype) -> None:
    x = torch.randn(7, 5) * 1e-3
    values, scale = ops.quantize_tensor(x, dtype)
    limit = torch.finfo(dtype).max
    assert values.dtype == dtype
    assert scale.dtype == torch.float32
    assert float(scale) == pytest.approx(limit / float(x.abs().max()))
    assert float(values.float().abs().max()) == limit
    eps = torch.finfo(dtype).eps
    assert torch.all((values.float() / scale - x).abs() <= eps / 2 * x.abs() + torch.finfo(dtype).tiny / scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("x", [torch.zeros(3, 4), torch.zeros(0, 4), torch.full((2, 2), 1e-40), torch.tensor(0.0)])
def test_quantize_tensor_of_nothing_stays_finite(x: Tensor, dtype: torch.dtype) -> None:
    values, scale = ops.quantize_tensor(x, dtype)
    assert values.shape == x.shape
    assert torch.isfinite(scale)
    assert not (values.float() / scale).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_quantize_tensor_does_not_hide_a_non_finite_entry(bad: float) -> None:
    x = torch.ones(4)
    x[2] = bad
    assert not torch.isfinite(round_fp8(E4M3)(x)[2])


@given(rows=sizes, cols=sizes, seed=st.integers(0, 99), exponent=st.integers(-20, 20))
def test_quantize_rows_is_the_definition(rows: int, cols: int, seed: int, exponent: int) -> None:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    values, scale = ops.quantize_rows(x)
    assert values.dtype == torch.int8
    assert scale.shape == (rows, 1)
    amax = x.abs().amax(dim=1, keepdim=True) if x.numel() else torch.zeros(rows, 1)
    expected = torch.where(amax > 0, (127 / amax.double().clamp(min=1e-12)).float(), scale)
    assert torch.equal(scale, expected)
    assert torch.equal(values.float(), (x * scale).round())  # torch rounds half to even
    assert torch.all((ops.dequantize_rows(values, scale) - x).abs() <= 0.5001 / scale)


def test_quantize_rows_rounds_half_to_even_and_keeps_rows_apart() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [1e6, -1e6, 0.0, 1.0]])
    values, scale = ops.quantize_rows(x)
    assert values.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [127, -127, 0, 0]]
    assert torch.isfinite(scale).all()
    assert torch.equal(ops.quantize_rows(x.t().contiguous().t())[0], values)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_quantize_rows_marks_the_row_with_a_non_finite_entry(bad: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = bad
    restored = ops.dequantize_rows(*ops.quantize_rows(x))
    assert restored[1].isnan().all()
    assert torch.equal(restored[[0, 2]], torch.ones(2, 4))


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 3), (2, 0), (1, 5), (5, 1), (2, 3, 4, 5)])
def test_round_int8_takes_empty_and_single_rows(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    rounded = round_int8(x)
    assert rounded.shape == x.shape
    assert torch.all((rounded - x).abs() <= x.abs().amax() / 200 if x.numel() else torch.ones(()))


def int8_matrix(rows: int, cols: int, is_transposed: bool, generator: torch.Generator) -> Tensor:
    shape = (cols, rows) if is_transposed else (rows, cols)
    matrix = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    return matrix.t() if is_transposed else matrix


@given(shape=st.tuples(sizes, sizes, sizes), layout=st.tuples(st.booleans(), st.booleans()), seed=st.integers(0, 99))
@example(shape=(4, 1, 8), layout=(False, True), seed=0)  # torch._int_mm itself returns garbage for these two
@example(shape=(1, 8, 8), layout=(True, False), seed=0)
def test_int_matmul_is_exact(shape: tuple[int, int, int], layout: tuple[bool, bool], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = int8_matrix(shape[0], shape[1], layout[0], generator)
    b = int8_matrix(shape[1], shape[2], layout[1], generator)
    product = int_matmul(a, b)
    assert product.dtype == torch.int32
    assert torch.equal(product.long(), a.long() @ b.long())


def test_fake_quantize_is_straight_through_both_ways() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    y = ops.fake_quantize(x, torch.round, lambda g: g * 2)
    assert torch.equal(y, x.detach().round())
    y.backward(torch.full((4, 4), 3.0))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4, 4), 6.0))
    untouched = ops.fake_quantize(x)
    assert torch.equal(untouched, x)
    assert untouched is not x


# ---- linear layers ----


@pytest.mark.parametrize(("rows", "inner", "outer"), [(32, 32, 48), (1, 32, 48), (7, 32, 1), (7, 1, 48), (1, 1, 1)])
def test_int8_linear_equals_fp64_on_the_same_quantised_values(rows: int, inner: int, outer: int) -> None:
    x, weight, _ = leaves(rows, inner, outer)
    y = ops.linear(x, weight, None, "int8")
    assert y.dtype == torch.bfloat16
    assert_rounded(y, values64(x) @ values64(weight).t())
    grad = torch.randn(rows, outer).bfloat16()
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.float32
    assert_rounded(x.grad, values64(grad) @ values64(weight.t()).t())
    assert_rounded(weight.grad, grad.double().t() @ x.detach().double())


def test_int8_linear_adds_its_bias_before_it_rounds() -> None:
    x, weight, bias = leaves()
    y = ops.linear(x, weight, bias, "int8")
    exact = values64(x) @ values64(weight).t() + bias.double()
    assert_rounded(y, exact)
    with pytest.raises(AssertionError):  # two roundings are seen
        assert_rounded(ops.linear(x, weight, None, "int8") + bias.bfloat16(), exact)
    y.sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((48,), 32.0))


@pytest.mark.parametrize("shape", [(16, 32), (2, 8, 32), (64, 32)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("magnitude", [1.0, 1e-4, 1e4])
def test_fp8_linear_equals_torchao(shape: tuple[int, ...], bias: bool, magnitude: float) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    layer = nn.Linear(32, 48, bias=bias)
    theirs: Any = Float8Linear.from_float(copy.deepcopy(layer), config=Float8LinearConfig(emulate=True))
    x = (torch.randn(shape) * magnitude).bfloat16()
    ours, other = x.float().requires_grad_(), x.clone().requires_grad_()
    y, expected = ops.linear(ours, layer.weight, layer.bias, "fp8"), theirs(other)
    assert y.dtype == expected.dtype == torch.bfloat16
    # both add up in float32 and round to bfloat16, in an order of their own; the bias is added after the rounding
    added = 0.0 if layer.bias is None else layer.bias.detach().double().abs()
    assert_rounded(y, expected.double(), 2, added)
    grad = torch.randn_like(y) * magnitude
    y.backward(grad)
    expected.backward(grad)
    assert ours.grad is not None
    assert_rounded(ours.grad, other.grad.double(), 2)  # type: ignore[union-attr]
    for mine, yours in zip(layer.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert_rounded(mine.grad, yours.grad.double(), 2)


@pytest.mark.parametrize(("rows", "inner", "outer"), [(15, 32, 48), (16, 24, 48), (16, 32, 40), (1, 16, 16)])
def test_fp8_linear_runs_other_shapes_in_bfloat16(rows: int, inner: int, outer: int) -> None:
    x, weight, bias = leaves(rows, inner, outer)
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.linear(x, weight), nn.functional.linear(x, weight, bias)
    assert torch.equal(ops.linear(x, weight, None, "fp8"), expected[0])
    assert torch.equal(ops.linear(x, weight, bias, "fp8"), expected[1])


def test_tf32_linear_equals_fp64_on_rounded_operands() -> None:
    x, weight, bias = torch.randn(8, 32, requires_grad=True), *leaves()[1:]
    y = Tf32Linear.call(x, weight, bias)
    x64, w64 = TF32.round(x).double(), TF32.round(weight).double()
    assert torch.allclose(y.double(), x64 @ w64.t() + bias.double(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(y.double(), (x.double() @ weight.double().t() + bias.double()), rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(y)
    y.backward(grad)
    g64 = TF32.round(grad).double()
    assert torch.allclose(x.grad.double(), g64 @ w64, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    assert torch.allclose(weight.grad.double(), g64.t() @ x64, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]


def test_tf32_matmul_keeps_ten_bits() -> None:
    one, third = torch.ones(1, 1), torch.full((1, 1), 1 / 3)
    assert float(tf32_matmul(one, third)) == float(TF32.round(torch.tensor(1 / 3)))
    assert float(tf32_matmul(one, third)) != float(torch.tensor(1 / 3))


def strided(x: Tensor) -> Tensor:
    return x.detach().t().contiguous().t()


def every_other(x: Tensor) -> Tensor:
    return x.detach().repeat_interleave(2, dim=1)[:, ::2]


@pytest.mark.parametrize("format_name", LOW)
@pytest.mark.parametrize("layout", [strided, every_other])
def test_linear_does_not_depend_on_the_layout(format_name: str, layout: Callable[[Tensor], Tensor]) -> None:
    x, weight, bias = leaves()
    expected = low_linear(x, weight, bias, format_name)
    expected.float().pow(2).sum().backward()
    other_x, other_weight = layout(x).requires_grad_(), layout(weight).requires_grad_()
    assert not other_x.is_contiguous()
    y = low_linear(other_x, other_weight, bias, format_name)
    assert torch.equal(y, expected)
    y.float().pow(2).sum().backward()
    for mine, theirs in ((other_x, x), (other_weight, weight)):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("format_name", LOW)
@pytest.mark.parametrize("shape", [(32,), (0, 32), (3, 0, 32), (2, 16, 32), (2, 2, 8, 32)])
def test_linear_takes_any_leading_shape(format_name: str, shape: tuple[int, ...]) -> None:
    _, weight, bias = leaves()
    x = torch.randn(shape, requires_grad=True)
    y = low_linear(x, weight, bias, format_name)
    flat = low_linear(x.detach().reshape(-1, 32), weight, bias, format_name)
    assert torch.equal(y, flat.reshape(*shape[:-1], 48))
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("format_name", LOW)
def test_linear_computes_only_the_gradients_asked_for(format_name: str) -> None:
    x, weight, bias = leaves()
    low_linear(x, weight.detach(), bias.detach(), format_name).float().sum().backward()
    assert x.grad is not None
    only_x, x.grad = x.grad, None
    low_linear(x.detach(), weight, None, format_name).float().sum().backward()
    assert x.grad is None
    low_linear(x, weight, bias, format_name).float().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, only_x)


@pytest.mark.parametrize("format_name", LOW)
def test_backward_inside_an_autocast_region_is_the_same(format_name: str) -> None:
    x, weight, bias = leaves()
    low_linear(x, weight, bias, format_name).float().pow(2).sum().backward()
    expected = [t.grad for t in (x, weight, bias)]
    for tensor in (x, weight, bias):
        tensor.grad = None
    y = low_linear(x, weight, bias, format_name).float().pow(2).sum()
    with torch.autocast("cpu", torch.bfloat16):
        y.backward()
    for tensor, grad in zip((x, weight, bias), expected, strict=True):
        assert tensor.grad is not None
        assert grad is not None
        assert torch.equal(tensor.grad, grad)


@pytest.mark.parametrize("format_name", LOW)
def test_zero_rows_and_zero_tensors_stay_zero(format_name: str) -> None:
    x, weight, _ = leaves()
    with torch.no_grad():
        x[3] = 0.0
        x[5:] = 0.0
    y = low_linear(x, weight, None, format_name)
    assert not y[3].any()
    assert y[0].any()
    low_linear(
        torch.zeros_like(x), torch.zeros_like(weight).requires_grad_(), None, format_name
    ).float().sum().backward()
    y.backward(torch.zeros_like(y))
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("format_name", LOW)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_non_finite_values_come_out_non_finite(format_name: str, bad: float, where: str) -> None:
    x, weight, bias = leaves()
    grad = torch.ones(32, 48)
    with torch.no_grad():
        {"input": x, "weight": weight, "gradient": grad}[where][2, 5] = bad
    y = low_linear(x, weight, bias, format_name)
    if where == "gradient":
        assert torch.isfinite(y).all()
        y.backward(grad.to(y.dtype))
        assert not torch.isfinite(weight.grad).all()  # type: ignore[arg-type]
        assert not torch.isfinite(x.grad).all()  # type: ignore[arg-type]
    else:
        row = y[2] if where == "input" else y[:, 2]
        assert not torch.isfinite(row).any()


def penalty(run: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    """Gradients of a penalty on the slope of ``run`` at ``x``."""
    (slope,) = torch.autograd.grad(run(x).float().sum(), x, create_graph=True)
    return list(torch.autograd.grad(slope.float().pow(2).sum(), parameters, allow_unused=True))


@pytest.mark.parametrize("format_name", LOW)
@pytest.mark.parametrize("is_first_low", [True, False])
def test_a15_double_backward_is_right(format_name: str, is_first_low: bool) -> None:
    x, first, _ = leaves()
    second = torch.randn(16, 48, requires_grad=True)

    def run(format_name: str, x: Tensor) -> Tensor:
        names = (format_name if is_first_low else "", format_name)
        layers = zip((first, second), names, strict=True)
        for weight, name in layers:
            x = torch.tanh((low_linear(x, weight, None, name) if name else x @ weight.t()).float() / 8)
        return x

    expected = penalty(lambda x: torch.tanh(torch.tanh(x @ first.t() / 8) @ second.t() / 8), x, [first, second])
    found = penalty(lambda x: run(format_name, x), x, [first, second])
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is not None
        assert theirs is not None
        assert float((mine - theirs).norm()) < 0.3 * float(theirs.norm())


# ---- embeddings ----


@pytest.mark.parametrize("format_name", ["fp8", "int8"])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (16,), (0, 16), (2, 0, 16)])
def test_embedding_rounds_rows_and_passes_the_gradient(format_name: str, shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape, requires_grad=True)
    y = ops.embedding(rows, format_name)
    assert y.dtype == torch.bfloat16
    assert y.shape == rows.shape
    step = 1 / 16 if format_name == "fp8" else 1 / 127
    amax = rows.detach().abs().amax() if rows.numel() else torch.zeros(())
    assert torch.all((y.float() - rows).abs() <= step * amax)
    grad = torch.randn(shape).bfloat16()
    y.backward(grad)
    assert rows.grad is not None
    assert torch.equal(rows.grad, grad.float())


def test_int8_embedding_scales_each_row_by_itself() -> None:
    rows = torch.stack([torch.full((8,), 1e-3), torch.full((8,), 1e3)])
    assert torch.equal(ops.embedding(rows, "int8"), rows.bfloat16())
