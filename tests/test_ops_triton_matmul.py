"""Matmuls under Triton's interpreter against float64 products of the same 8-bit numbers; signatures of all operations.

Time budget: 20 s.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_ops_triton.py starts it under Triton's interpreter", allow_module_level=True)

from autoprec.ops import (
    copies,
    reference,
    reference_casts,
    reference_prepared,
    reference_steps,
    statistics,
    triton_casts,
    triton_matmul,
    triton_optimizers,
    triton_statistics,
)
from autoprec.ops.reference import int8_matmul as reference_int8_matmul

SIZES = [(64, 64, 256), (70, 200, 130), (1, 3, 17), (130, 129, 128)]
BF16_ROUNDING = 2.0**-8  # half a unit in the last place


def assert_rounded(actual: Tensor, exact: Tensor, magnitude: Tensor) -> None:
    """Within one rounding to bfloat16 and the float32 sums of products whose magnitudes add up to ``magnitude``."""
    slack = BF16_ROUNDING * exact.abs() + 2.0**-20 * magnitude
    assert torch.all((actual.double() - exact).abs() <= slack)


def uneven(rows: int, cols: int) -> Tensor:
    """Rows of very different size, as activations and gradients have them."""
    return torch.randn(rows, cols) * torch.logspace(-4, 4, rows)[:, None]


@pytest.mark.parametrize("format_name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_block_scaled_matmul_is_the_product_of_what_was_cast(size: tuple[int, int, int], format_name: str) -> None:
    rows, cols, inner = size
    a = triton_casts.cast(uneven(rows, inner), format_name, granularity="1x128")
    b = triton_casts.cast(uneven(cols, inner), "e4m3", granularity="128x128")
    assert a.scale is not None
    assert b.scale is not None
    y = triton_matmul.block_scaled_matmul(a.values, b.values, a.scale, b.scale)
    a_exact = triton_casts.restore(a.values, a.scale, granularity="1x128").double()
    b_exact = triton_casts.restore(b.values, b.scale, granularity="128x128").double()
    assert y.dtype is torch.bfloat16
    assert_rounded(y, a_exact @ b_exact.t(), a_exact.abs() @ b_exact.abs().t())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_int8_matmul_is_the_reference(size: tuple[int, int, int], has_bias: bool) -> None:
    rows, cols, inner = size
    x, bias = uneven(rows, inner).bfloat16(), torch.randn(cols) if has_bias else None
    copy = reference.quantize_rows(torch.randn(cols, inner))
    assert torch.equal(triton_matmul.int8_matmul(x, *copy, bias), reference_int8_matmul(x, *copy, bias))


def test_int8_input_gradient_reads_the_transposed_copy() -> None:
    weight, grad = torch.randn(48, 33), torch.randn(20, 48)
    transposed = reference.quantize_rows(weight.t())
    grad_x = triton_matmul.int8_matmul(grad, *transposed)
    exact = grad.double() @ weight.double()
    assert float((grad_x.double() - exact).norm() / exact.norm()) < 0.02


def test_rows_that_are_not_finite_stay_visible() -> None:
    x = torch.randn(4, 32)
    x[1, 3] = torch.nan
    y = triton_matmul.int8_matmul(x, *reference.quantize_rows(torch.randn(8, 32)))
    assert y.isnan().all(dim=1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_scaled_matmul_goes_through_torch(granularity: str) -> None:
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    bias = torch.randn(48).bfloat16()
    a_cast, b_cast = (triton_casts.cast(x, "e4m3", granularity=granularity) for x in (a, b))
    assert a_cast.scale is not None
    assert b_cast.scale is not None
    exact = (a_cast.values.double() / a_cast.scale) @ (b_cast.values.double() / b_cast.scale).t()
    y = triton_matmul.scaled_matmul(a_cast.values, b_cast.values, a_cast.scale, b_cast.scale, bias)
    torch.testing.assert_close(y.double(), exact + bias.double(), rtol=0.02, atol=0.05)


def test_scaled_matmul_without_the_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (triton_casts.cast(torch.randn(32, 32), "e4m3", granularity="tensor") for _ in range(2))
    arguments = (a.values, b.values, a.scale, b.scale)
    expected = triton_matmul.scaled_matmul(*arguments)  # type: ignore[arg-type]
    monkeypatch.delattr(torch.nn.functional, "scaled_mm", raising=False)
    assert torch.equal(triton_matmul.scaled_matmul(*arguments), expected)  # type: ignore[arg-type]


def test_empty_and_unequal_matrices() -> None:
    values, scale = reference.quantize_rows(torch.randn(5, 7))
    empty = torch.zeros(0, 7)
    assert triton_matmul.int8_matmul(empty, values, scale).shape == (0, 5)
    with pytest.raises(ValueError, match=r"Passed matrices \[5, 7\] and \[5, 6\]"):
        triton_matmul.scaled_int8_matmul(values, values[:, :6], scale, scale)


@pytest.mark.parametrize(
    ("ours", "specification"),
    [
        (triton_statistics.grad_stats, statistics.grad_stats),
        (triton_casts.cast, reference_casts.cast),
        (triton_casts.restore, reference_casts.restore),
        (triton_casts.fake_cast, reference_casts.fake_cast),
        (triton_matmul.int8_matmul, reference_int8_matmul),
        (triton_optimizers.refresh_copies_, copies.write_copies),
        (triton_optimizers.PreparedAdam, reference_prepared.PreparedAdam),
        (triton_optimizers.PreparedSgd, reference_prepared.PreparedSgd),
    ],
    ids=lambda function: function.__name__,
)
def test_signatures_are_those_of_the_reference(
    ours: Callable[..., object], specification: Callable[..., object]
) -> None:
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(specification).parameters)


def test_steps_take_the_options_of_the_reference() -> None:
    pairs: list[tuple[Callable[..., object], Callable[..., object]]] = [
        (triton_optimizers.PreparedAdam.__call__, reference_steps.fused_adam_),
        (triton_optimizers.PreparedSgd.__call__, reference_steps.fused_sgd_),
    ]
    for ours, specification in pairs:
        options = [
            {p.name: p.default for p in inspect.signature(f).parameters.values() if p.kind is p.KEYWORD_ONLY}
            for f in (ours, specification)
        ]
        del options[1]["copies"]
        assert options[0] == options[1]
