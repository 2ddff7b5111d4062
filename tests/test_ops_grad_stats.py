"""One-pass gradient statistics in C against the reference, on every instruction set.

Time budget: 20 s.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoprec import ops
from autoprec.ops import GradStats, native
from tests.kernels import (
    ISAS,
    NONFINITE,
    SPECIAL,
    assert_same_bits,
    awkward_sizes,
    every_pattern,
    isa,
    needs_cpu_kernels,
    threads,
    unaligned,
)

pytestmark = needs_cpu_kernels
__all__ = ["isa", "threads"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compare(grads: list[Tensor], tiny: list[float] | None = None, lower: list[float] | None = None) -> GradStats:
    """Checks ``cpu`` against ``reference``: exact but for the norms, which are summed in another order."""
    limits = (tiny or [0.5] * len(grads), lower or [1e-3] * len(grads))
    actual = ops.grad_stats(grads, *limits, implementation="cpu")
    expected = ops.grad_stats(grads, *limits, implementation="reference")
    for name in ("amax", "nonfinite_count", "underflow_fraction", "underflow_fraction_lower"):
        assert_same_bits(getattr(actual, name), getattr(expected, name))
    exact = [finite64(grad).norm().float() for grad in grads]  # inf beyond the largest float32
    for norm, wanted in zip(actual.norm.tolist(), exact, strict=True):
        assert norm == pytest.approx(float(wanted), rel=1e-6, abs=1.5e-45)
    if not actual.nonfinite_count.any():
        total = torch.stack([finite64(grad).norm() for grad in grads]).norm().float()
        assert float(actual.total_norm) == pytest.approx(float(total), rel=1e-6, abs=1.5e-45)
    return actual


def finite64(grad: Tensor) -> Tensor:
    wide = grad.double()
    return torch.where(wide.isfinite(), wide, torch.zeros_like(wide))


@pytest.mark.parametrize("size", [*awkward_sizes(), 40_000, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_measures_the_same_in_half_precision_as_widened(isa: str, dtype: torch.dtype, size: int) -> None:
    """Bit for bit, so that no decision depends on where a gradient is kept."""
    grad = torch.randn(size).to(dtype)
    assert_same_bits(ops.grad_stats([grad], [0.5], [1e-3]).table, ops.grad_stats([grad.float()], [0.5], [1e-3]).table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size(isa: str, dtype: torch.dtype) -> None:
    compare([torch.randn(size).to(dtype) for size in awkward_sizes()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(isa: str, dtype: torch.dtype) -> None:
    patterns = every_pattern(dtype)
    compare([patterns, patterns[patterns.isfinite()], patterns[:777]])


@given(
    rows=st.lists(st.lists(st.sampled_from(SPECIAL + NONFINITE), max_size=140), min_size=1, max_size=4),
    tiny=st.sampled_from([0.0, 1e-42, 2.0**-126, 2.0**-14, 1.0, 1e38]),
    which=st.sampled_from(ISAS or ["none"]),
)
def test_special_values(rows: list[list[float]], tiny: float, which: str) -> None:
    native.select_isa(which)
    compare([torch.tensor(row) for row in rows], [tiny] * len(rows), [2 * tiny] * len(rows))
    native.select_isa(None)


@pytest.mark.parametrize("value", [1e30, 1e-30, 3e38, 1e-44, 2.0**-50, 2.0**50])
def test_squares_that_overflow_or_vanish(isa: str, value: float) -> None:
    compare([torch.full((5000,), value), torch.tensor([value, 1.0]), torch.tensor([0.0, value])])


def test_total_norm_shows_a_single_bad_entry(isa: str) -> None:
    for bad in NONFINITE:
        grads = [torch.randn(100), torch.randn(40000)]
        grads[1][39999] = bad
        stats = compare(grads)
        assert stats.nonfinite_count.tolist() == [0.0, 1.0]
        assert float(stats.total_norm) == math.inf


def test_all_instruction_sets_and_thread_counts_give_the_same_bits() -> None:
    grads = [torch.randn(size).to(dtype) for size in (100_003, 65_536, 7) for dtype in DTYPES]
    tables = []
    for which in ISAS:
        native.select_isa(which)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            tables.append(ops.grad_stats(grads, [0.1] * 9, [0.01] * 9).table)
    torch.set_num_threads(1)
    native.select_isa(None)
    for table in tables[1:]:
        assert_same_bits(table, tables[0])


def test_views_are_read_in_place_or_copied(threads: int) -> None:
    base = torch.randn(64, 48)
    image = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    views = [unaligned(base), base.t(), base[::2, 1:40:3], base[3].expand(5, 48), image, torch.tensor(2.5), base[5:5]]
    before = base.clone()
    compare([*views, *(unaligned(view.contiguous().to(torch.bfloat16)) for view in views)])
    assert torch.equal(base, before)


def test_sparse_complex_and_float64_gradients() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([3.0, 3.0, 8.0]), (4,), check_invariants=True
    )
    stats = ops.grad_stats([sparse, torch.tensor([3 + 4j]), torch.tensor([1e-3], dtype=torch.float64)], [7.0] * 3)
    assert stats.norm.tolist() == pytest.approx([10.0, 5.0, 1e-3])
    assert stats.underflow_fraction.tolist() == [0.5, 1.0, 1.0]


def test_nothing_and_wrong_lengths() -> None:
    assert ops.grad_stats([]).table.tolist() == [0.0]
    assert ops.grad_stats([torch.zeros(0)]).table.tolist() == [0.0] * 6
    with pytest.raises(ValueError, match="2 gradients and 1 values of `tiny_lower`"):
        ops.grad_stats([torch.ones(1)] * 2, [0.0, 0.0], [0.0])


def test_without_limits_nothing_underflows(isa: str) -> None:
    stats = ops.grad_stats([torch.randn(100) * 1e-6])
    assert not stats.underflow_fraction.any()
    assert not stats.underflow_fraction_lower.any()


def test_a_result_outlives_the_next_call() -> None:
    first = ops.grad_stats([torch.tensor([3.0, 4.0])])
    ops.grad_stats([torch.tensor([5.0, 12.0])])
    assert first.norm.tolist() == [5.0]


def test_more_entries_than_32_bits_count() -> None:
    """Memory that was never written reads as zeros from one shared page, so this takes an address range, not memory."""
    size = 2**31 + 70
    grad = torch.from_numpy(np.zeros(size, dtype=np.int16)).view(torch.bfloat16)
    grad[-1] = 3.0
    stats = ops.grad_stats([grad, torch.ones(1)], implementation="cpu")
    assert stats.amax.tolist() == [3.0, 1.0]
    assert float(stats.total_norm) == pytest.approx(math.sqrt(10.0))
