"""Gradient statistics and launch plans under Triton's interpreter.

Time budget: 10 s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_ops_triton.py starts it under Triton's interpreter", allow_module_level=True)

from autoprec.ops import statistics, triton_plans, triton_statistics

# numpy, which carries out the interpreter's arithmetic, warns where a GPU goes on with inf and NaN
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def unaligned(x: Tensor) -> Tensor:
    """The same values in a view that starts one element into its storage."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


# ---- statistics ----


def assert_stats(grads: Sequence[Tensor], tiny: Sequence[float]) -> None:
    lower = [limit / 2 for limit in tiny]
    actual, expected = triton_statistics.grad_stats(grads, tiny, lower), statistics.grad_stats(grads, tiny, lower)
    for name in ("amax", "nonfinite_count", "underflow_fraction", "underflow_fraction_lower"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    torch.testing.assert_close(actual.norm, expected.norm, rtol=1e-6, atol=1e-45)
    torch.testing.assert_close(actual.total_norm, expected.total_norm, rtol=1e-6, atol=1e-45)


def test_statistics_of_many_tensors_are_the_reference() -> None:
    grads = [
        torch.randn(70, 33),
        torch.randn(3).bfloat16(),
        torch.randn(64, 64).half() * 1e-6,
        torch.zeros(0),
        torch.tensor(-2.0),
        torch.randn(33, 17).t(),
        torch.randn(3, 1).expand(3, 5),
        unaligned(torch.randn(9000)),
        torch.randn(5).double(),
        torch.zeros(16),
    ]
    assert_stats(grads, [0.5, 0.1, 1e-6, 1.0, 1.0, 0.1, 0.5, 0.3, 0.7, 1.0])


def test_statistics_of_bad_and_extreme_values_are_the_reference() -> None:
    bad = torch.tensor([3.0, math.inf, 4.0, math.nan, -math.inf, 1e-30])
    subnormal = torch.tensor([1e-42, -3e-45, 0.0, -0.0])
    extreme = [torch.full((4,), 1e30), torch.full((20000,), 1e-30), torch.full((3,), torch.finfo(torch.float32).max)]
    assert_stats([bad, subnormal, *extreme], [1e-20, 1e-44, 0.0, 1.0, 0.0])


def test_statistics_of_sparse_and_no_gradients() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 8.0]]), (4, 2), check_invariants=True
    )
    assert_stats([sparse], [7.0])
    assert triton_statistics.grad_stats([], []).amax.shape == (0,)
    with pytest.raises(ValueError, match="Passed `grad_stats` 1 gradients and 2 values of `tiny`"):
        triton_statistics.grad_stats([torch.ones(1)], [0.1, 0.2])


@pytest.mark.parametrize("inv_scale", [None, torch.tensor(0.25)])
@pytest.mark.parametrize("max_norm", [1.0, 1e9, math.inf])
def test_grad_factor_is_inv_scale_times_clip(inv_scale: Tensor | None, max_norm: float) -> None:
    scale, norm = 1.0 if inv_scale is None else float(inv_scale), 7.3
    factor, found_inf = triton_statistics.grad_factor(torch.tensor(norm), inv_scale, max_norm)
    assert float(factor) == pytest.approx(scale * min(1.0, max_norm / (norm * scale + 1e-6)), rel=1e-6)
    assert float(found_inf) == 0.0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_grad_factor_reports_a_norm_that_is_not_finite(norm: float) -> None:
    assert float(triton_statistics.grad_factor(torch.tensor(norm), None, 1.0)[1]) == 1.0


# ---- plans ----


def test_chunks_of_a_huge_tensor_have_64_bit_starts() -> None:
    size = 2**33 + 5
    tensors, starts, boundaries = triton_plans.chunk_map([3, size], 1 << 20)
    assert tensors[:2].tolist() == [0, 1]
    assert int(starts[-1]) == 2**33
    assert boundaries.tolist() == [0, 1, 2 + 2**13]


def test_addresses_beyond_32_bits_reach_the_right_elements() -> None:
    """The table points 2**33 elements before a small tensor, the only chunk starts there."""
    start, grad = 2**33, torch.randn(48)
    row = [start + 48, grad.data_ptr() - 4 * start, triton_statistics._CODES[torch.float32], 0, 0, 0]
    table, amax = torch.tensor([row]), torch.full((1,), math.nan)
    triton_statistics.chunk_stats_kernel[(1,)](
        table,
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([start]),
        amax,
        torch.empty(1, dtype=torch.float64),
        torch.empty(1, dtype=torch.int64),
        ALIGNED=False,
        SIZE=64,
    )
    assert float(amax) == float(grad.abs().max())


def test_plans_are_kept_and_dropped() -> None:
    x = [torch.randn(20), unaligned(torch.randn(32)), torch.randn(32)]
    first = triton_plans.linear_plans("test", [x], [()] * 3, 16)
    assert [plan.is_aligned for plan in first] == [True, False]
    assert triton_plans.linear_plans("test", [x], [()] * 3, 16) is first
    for size in range(1, 100):
        triton_plans.linear_plans("test", [[torch.zeros(size)]], [()], 16)
    assert triton_plans.linear_plans("test", [x], [()] * 3, 16) is not first
