"""Statistics and norms of gradients: amax, counts, underflow, global norm in float32, scaling in place.

Time budget: 10 s.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autoprec import ops


def test_grad_stats_is_the_definition() -> None:
    grads = [torch.randn(5, 7), torch.randn(3).bfloat16(), torch.randn(4, 4).double(), torch.zeros(3), torch.zeros(0)]
    stats = ops.grad_stats(grads, [0.5, 0.0, 1e9, 1.0, 1.0])
    for index, (grad, tiny) in enumerate(zip(grads, [0.5, 0.0, 1e9, 1.0, 1.0], strict=True)):
        size = grad.double().abs()
        nonzero = int((size > 0).sum())
        share = int(((size > 0) & (size < tiny)).sum()) / nonzero if nonzero else 0.0
        assert float(stats.amax[index]) == pytest.approx(float(size.max()) if size.numel() else 0.0)
        assert float(stats.norm[index]) == pytest.approx(float(grad.double().norm()), rel=1e-5)
        assert float(stats.underflow_fraction[index]) == pytest.approx(share)
    assert not stats.nonfinite_count.any()
    assert {t.dtype for t in vars(stats).values()} == {torch.float32}


def test_grad_stats_counts_bad_entries_and_measures_the_others() -> None:
    grad = torch.tensor([3.0, math.inf, 4.0, math.nan, -math.inf, 1e-30])
    before = grad.clone()
    stats = ops.grad_stats([grad], [1e-20])
    assert (float(stats.nonfinite_count[0]), float(stats.amax[0])) == (3.0, 4.0)
    assert float(stats.norm[0]) == pytest.approx(5.0)
    assert float(stats.underflow_fraction[0]) == pytest.approx(1 / 3)
    assert torch.equal(grad.nan_to_num(), before.nan_to_num())


def test_grad_stats_survives_squares_that_overflow_and_underflow() -> None:
    stats = ops.grad_stats([torch.full((4,), 1e30), torch.full((4,), 1e-30)], [0.0, 0.0])
    assert stats.norm.tolist() == pytest.approx([2e30, 2e-30])


def test_grad_stats_merges_the_duplicates_of_a_sparse_gradient() -> None:
    stats = ops.grad_stats([sparse([0, 0, 2], [[3.0, 0.0], [3.0, 0.0], [0.0, 8.0]])], [7.0])
    assert (float(stats.amax[0]), float(stats.norm[0])) == (8.0, 10.0)
    assert float(stats.underflow_fraction[0]) == 0.5
    nothing = ops.grad_stats([], [])
    assert nothing.amax.shape == (0,)


def sparse(rows: list[int], values: list[list[float]]) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), torch.tensor(values), (4, 2), check_invariants=True)


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]), min_size=5, max_size=5
    ),
    exponent=st.integers(-3, 3),
)
def test_global_norm_equals_fp64(shapes: list[list[int]], dtypes: list[torch.dtype], exponent: int) -> None:
    grads = [(torch.randn(shape) * 10.0**exponent).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    expected = math.sqrt(sum(float(grad.double().pow(2).sum()) for grad in grads))
    assert float(ops.global_norm(grads)) == pytest.approx(expected, rel=1e-5)
    norms = ops.grad_norms(grads)
    assert norms.dtype == (torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32)
    assert norms.tolist() == pytest.approx([float(grad.double().norm()) for grad in grads], rel=1e-5)


def test_global_norm_has_torchs_bits_on_float32() -> None:
    grads = [torch.randn(17, 5), torch.randn(3), torch.randn(2, 2, 2)]
    assert torch.equal(ops.global_norm(grads), nn.utils.get_total_norm(grads))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c07_global_norm_of_half_gradients_is_float32(dtype: torch.dtype) -> None:
    grads = [torch.full((4,), 40000.0, dtype=dtype)]
    exact = float(grads[0].double().norm())
    assert float(ops.global_norm(grads)) == pytest.approx(exact)
    mixed = [torch.full((4,), 40000.0), torch.full((12,), 2.0, dtype=dtype), torch.full((1,), 3.0)]
    assert float(ops.global_norm(mixed)) == pytest.approx(math.sqrt(4 * 40000.0**2 + 48 + 9))


def test_c07_global_norm_of_finite_gradients_is_finite_where_their_squares_are_not() -> None:
    assert float(ops.global_norm([torch.full((4,), 1e30), torch.full((1,), -1e30)])) == pytest.approx(5**0.5 * 1e30)
    assert float(ops.global_norm([torch.full((9,), 1e25), torch.zeros(0), torch.zeros(2)])) == pytest.approx(3e25)


@pytest.mark.parametrize(("bad", "expected"), [([math.inf], math.inf), ([math.nan], math.nan)])
def test_global_norm_shows_a_non_finite_entry(bad: list[float], expected: float) -> None:
    for grads in ([torch.ones(3), torch.tensor([1.0, *bad])], [torch.tensor([1.0, *bad]).half(), torch.ones(3)]):
        found = float(ops.global_norm(grads))
        assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert math.isnan(float(ops.global_norm([torch.tensor([math.inf, math.nan])])))


def test_global_norm_of_nothing_is_zero() -> None:
    assert float(ops.global_norm([])) == 0.0
    assert float(ops.global_norm([torch.zeros(0)])) == 0.0


def test_c05_global_norm_merges_the_duplicates_of_a_sparse_gradient() -> None:
    grads = [sparse([0, 0], [[3.0, 0.0], [1.0, 0.0]]), torch.tensor([3.0])]
    assert float(ops.global_norm(grads)) == 5.0
    biggest = torch.finfo(torch.float32).max
    overflowing = sparse([1, 1], [[biggest, 0.0], [biggest, 0.0]])
    assert float(ops.global_norm([overflowing])) == math.inf


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5)])
def test_scale_multiplies_dense_and_sparse_gradients_in_place(factor: float | Tensor) -> None:
    dense, wide, merged = (
        torch.ones(3).half(),
        torch.ones(2, 4)[:, ::2],
        sparse([1, 2], [[2.0, 4.0], [6.0, 8.0]]).coalesce(),
    )
    unmerged = sparse([0, 0], [[2.0, 0.0], [4.0, 0.0]])
    ops.scale_([dense, merged, wide, unmerged], factor)
    assert dense.tolist() == [0.5] * 3
    assert wide.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert merged.to_dense()[1:3].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert unmerged.to_dense()[0].tolist() == [3.0, 0.0]
    ops.scale_([], factor)


@pytest.mark.parametrize("bad", [complex(1, math.inf), complex(-math.inf, 1), complex(0, math.nan)])
def test_complex_gradients_hide_nothing_in_their_imaginary_part(bad: complex) -> None:
    assert not math.isfinite(float(ops.global_norm([torch.tensor([1 + 1j, bad]), torch.ones(2)])))
    stats = ops.grad_stats([torch.tensor([3 + 4j, bad])], [0.0])
    assert float(stats.nonfinite_count[0]) > 0


def test_complex_gradients_are_measured_as_pairs() -> None:
    grads = [torch.tensor([3 + 4j, 0j]), torch.tensor([12.0])]
    assert float(ops.global_norm(grads)) == 13.0
    assert float(ops.global_norm([torch.tensor([1e30 + 1e30j])])) == pytest.approx(2**0.5 * 1e30)
    stats = ops.grad_stats([torch.tensor([0 + 4j, 3 + 0j])], [0.0])
    assert (float(stats.amax[0]), float(stats.norm[0])) == (4.0, 5.0)
