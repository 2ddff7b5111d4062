"""Casts in C against the reference, bit for bit, on every instruction set; random words; stochastic rounding.

Time budget: 30 s.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoprec import ops
from autoprec.formats import E4M3, E5M2
from autoprec.ops import native
from autoprec.ops.reference_casts import GRANULARITIES
from autoprec.ops.reference_random import random_words
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
FORMATS = ["bf16", "fp16", "tf32", "e4m3", "e5m2", "int8"]


def compare(x: Tensor, format_name: str, **options: object) -> ops.Cast:
    actual = ops.cast(x, format_name, implementation="cpu", **options)  # type: ignore[arg-type]
    expected = ops.cast(x, format_name, implementation="reference", **options)  # type: ignore[arg-type]
    assert_same_bits(actual.values, expected.values)
    for mine, wanted in ((actual.scale, expected.scale), (actual.amax, expected.amax)):
        assert (mine is None) == (wanted is None)
        if mine is not None and wanted is not None:
            assert_same_bits(mine, wanted)
    return actual


def wide_range(size: int) -> Tensor:
    """Numbers of every magnitude, with all the special ones in between."""
    x = torch.randn(size) * torch.exp2(torch.randint(-140, 120, (size,)).float())
    special = torch.tensor(SPECIAL + NONFINITE)
    x[torch.randint(0, max(size, 1), (min(size, 17),))] = special[: min(size, 17)]
    return x


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("format_name", FORMATS)
def test_every_magnitude(isa: str, format_name: str, saturate: bool) -> None:
    for size in (0, 1, 17, 1025, 20011):
        compare(wide_range(size), format_name, saturate=saturate)


@pytest.mark.parametrize("format_name", FORMATS)
def test_halfway_points_and_their_neighbours(isa: str, format_name: str) -> None:
    """Every bf16 and fp16 number, and the midpoints that fp32 can hold between them."""
    numbers = torch.cat([every_pattern(dtype).float() for dtype in (torch.bfloat16, torch.float16)])
    patterns = numbers.view(torch.int32)
    for shift in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001):
        compare((patterns + shift).view(torch.float32), format_name, saturate=False)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format_name", FORMATS)
def test_16_bit_sources(isa: str, source: torch.dtype, format_name: str) -> None:
    compare(every_pattern(source), format_name, with_amax=True)
    compare(every_pattern(source)[:777].unsqueeze(0), format_name, granularity="1x128")


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format_name", FORMATS)
def test_scales(threads: int, format_name: str, granularity: str) -> None:
    for shape in ((1, 1), (3, 130), (130, 257), (300, 40), (5,), (2, 3, 129), (0, 4)):
        x = torch.randn(shape) * 3
        if x.numel() > 3:
            x.view(-1, x.shape[-1])[-1] = 0.0
        cast = compare(x, format_name, granularity=granularity)
        restored = [
            ops.restore(cast.values, cast.scale, granularity=granularity, implementation=i)
            for i in ("cpu", "reference")
        ]
        assert_same_bits(*restored)


@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("format_name", ["e4m3", "int8"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_non_finite_entry_stays_visible(format_name: str, granularity: str, bad: float) -> None:
    x = torch.randn(130, 140)
    x[2, 3] = bad
    cast = compare(x, format_name, granularity=granularity)
    restored = ops.restore(cast.values, cast.scale, granularity=granularity)
    assert not torch.isfinite(restored[2, 3])


def test_views_and_sizes(isa: str) -> None:
    base = torch.randn(40, 60)
    for view in (unaligned(base), base.t(), base[::2, 1::3], base[0].expand(7, 60), torch.tensor(3.0), base[:0]):
        for format_name in FORMATS:
            compare(view, format_name, with_amax=True)
    for size in awkward_sizes():
        compare(torch.randn(size), "e5m2", granularity="tensor")


def test_a_known_scale() -> None:
    compare(torch.randn(50, 3), "e4m3", scale=torch.tensor(100.0))
    compare(torch.randn(50, 3), "int8", scale=torch.tensor(1000.0), with_amax=True)


@pytest.mark.parametrize("number_format", [E4M3, E5M2])
def test_restore_reads_every_code(isa: str, number_format: object) -> None:
    dtype = number_format.dtype  # type: ignore[attr-defined]
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    assert_same_bits(ops.restore(codes, implementation="cpu"), codes.float())


def test_unknown_granularity() -> None:
    with pytest.raises(ValueError, match="Passed `granularity='rows'`.*Did you mean 'row'"):
        ops.cast(torch.ones(2), "int8", granularity="rows")


# ---- random words ----


def test_random_words_are_those_of_the_reference(isa: str) -> None:
    for seed, offset, first, count in ((0, 0, 0, 200), (2**63 + 5, 2**40 + 1, 37, 1000), (7, 1, 2**34 + 63, 66)):
        words = torch.empty(count, dtype=torch.int32)
        native.library().ap_random(seed, offset, first, count, words.data_ptr())
        expected = random_words(seed, offset, torch.arange(first, first + count))
        assert torch.equal(words.long() & 0xFFFFFFFF, expected)


@pytest.mark.parametrize("format_name", FORMATS)
def test_stochastic_rounding_is_that_of_the_reference(isa: str, format_name: str) -> None:
    for saturate in (False, True):
        compare(wide_range(5003), format_name, seed=3, offset=9, saturate=saturate)
    compare(torch.randn(131, 45), format_name, seed=3, granularity="row")
    compare(torch.randn(131, 145), format_name, seed=2**64 - 1, granularity="1x128")


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("value", [0.7, 0.3, -5.1, 1.0 + 2.0**-12])
def test_stochastic_rounding_is_unbiased(format_name: str, value: float) -> None:
    count = 40_000
    values, *_ = ops.cast(torch.full((count,), value), format_name, seed=11)
    rounded = values.double()
    above, below = float(rounded.max()), float(rounded.min())
    # the mean of `count` draws from {below, above} is within 5 standard deviations of the value
    slack = 5 * (above - below) / 2 / math.sqrt(count)
    assert abs(float(rounded.mean()) - value) <= slack + 1e-12
    assert above > below or above == value


def test_tiny_values_reach_the_smallest_subnormal_as_often_as_they_should() -> None:
    """2**-34 is a 1024th of fp16's smallest number: to nearest it is always zero."""
    count = 400_000
    values, *_ = ops.cast(torch.full((count,), 2.0**-34), "fp16", seed=5)
    hits = int((values != 0).sum())
    assert abs(hits - count / 1024) <= 5 * math.sqrt(count / 1024)


def test_random_bits_leave_torchs_generators_alone() -> None:
    before = torch.get_rng_state()
    ops.cast(torch.randn(0), "bf16", seed=1)
    ops.cast(torch.ones(100), "bf16", seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_reproducible_for_any_number_of_threads() -> None:
    x = torch.full((200_001,), 0.3)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(ops.cast(x, "bf16", seed=1, offset=2).values)
    torch.set_num_threads(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], ops.cast(x, "bf16", seed=1, offset=3).values)


# ---- rounding that stays in float32 ----


@given(
    formats=st.lists(
        st.tuples(st.integers(2, 8), st.integers(1, 22), st.booleans()).filter(lambda f: f[0] < 8 or not f[2]),
        min_size=1,
        max_size=6,
    ),
    which=st.sampled_from(ISAS or ["none"]),
    seed=st.integers(0, 99),
)
def test_fake_cast_to_any_format(formats: list[tuple[int, int, bool]], which: str, seed: int) -> None:
    torch.manual_seed(seed)
    columns = [torch.tensor(column) for column in zip(*formats, strict=True)]
    x = torch.stack([wide_range(83) for _ in formats])
    native.select_isa(which)
    actual = ops.fake_cast(x, *columns, implementation="cpu")
    native.select_isa(None)
    assert_same_bits(actual, ops.fake_cast(x, *columns, implementation="reference"))


def test_fake_cast_leaves_fp32_rows_and_takes_any_shape(threads: int) -> None:
    x = torch.randn(3, 4, 5)
    columns = torch.tensor([8, 4, 5]), torch.tensor([23, 3, 10]), torch.tensor([False, True, False])
    rounded = ops.fake_cast(x, *columns)
    assert torch.equal(rounded[0], x[0])
    assert torch.equal(rounded[1], x[1].to(torch.float8_e4m3fn).float())
    assert torch.equal(rounded[2], x[2].half().float())
    assert ops.fake_cast(x[:0], *(column[:0] for column in columns)).shape == (0, 4, 5)
