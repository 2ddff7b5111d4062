"""Formats: what follows from their bits, and rounding equal to torch's casts bit for bit.

Time budget: 15 s.
"""

from __future__ import annotations

import copy
import math
import pickle
import re

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from autoprec.formats import (
    BF16,
    E4M3,
    E5M2,
    FORMATS,
    FP8,
    FP16,
    FP32,
    INT8,
    TF32,
    NumberFormat,
    get_format,
    nearest,
    rank,
    widest,
)

CASTABLE = (FP32, BF16, FP16, E4M3, E5M2)
SMALL = (FP16, E4M3, E5M2)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-149), 3.4028235e38, -3.4028235e38)
patterns = hnp.arrays(np.int32, st.integers(1, 64), elements=st.integers(-(2**31), 2**31 - 1))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype == torch.float32
    assert torch.equal(actual.isnan(), expected.isnan())
    ordinary = ~expected.isnan()
    assert torch.equal(actual.view(torch.int32)[ordinary], expected.view(torch.int32)[ordinary])


def cast(x: Tensor, number_format: NumberFormat) -> Tensor:
    if number_format is E4M3:
        # torch before 2.13 casts overflow to NaN, torch 2.13 saturates as `round` does
        x = x.clamp(-448, 448)
    return x.to(number_format.dtype).float()


def tie_neighbourhood(number_format: NumberFormat) -> Tensor:
    """All values of the format at both ends of its range, the ties between them, and one ulp around the ties."""
    steps = torch.arange(2.0 ** (number_format.mantissa_bits + 2), dtype=torch.float64)
    low = steps * number_format.smallest_subnormal
    high = number_format.max - steps * number_format.max * number_format.eps / 4
    ties = torch.cat([low, low + number_format.smallest_subnormal / 2, high, high * (1 + number_format.eps / 4)])
    x = ties.float()
    x = torch.cat([x, torch.nextafter(x, torch.tensor(math.inf)), torch.nextafter(x, torch.tensor(-math.inf))])
    return torch.cat([x, -x])


@pytest.mark.parametrize("number_format", CASTABLE, ids=lambda f: f.name)
def test_derived_values_equal_finfo(number_format: NumberFormat) -> None:
    info = torch.finfo(number_format.dtype)
    assert (number_format.max, number_format.tiny, number_format.eps) == (info.max, info.tiny, info.eps)
    assert number_format.bits == info.bits


def test_derived_values_without_finfo() -> None:
    assert (INT8.max, INT8.tiny, INT8.eps, INT8.bits, INT8.bias) == (127.0, 1.0, 1.0, 8, 0)
    assert (TF32.bits, TF32.max, TF32.smallest_subnormal) == (19, (2 - 2.0**-10) * 2.0**127, 2.0**-136)
    assert (E4M3.smallest_subnormal, E5M2.smallest_subnormal, FP16.smallest_subnormal) == (2**-9, 2**-16, 2**-24)


@pytest.mark.parametrize("number_format", CASTABLE, ids=lambda f: f.name)
@given(pattern=patterns)
def test_round_equals_cast_on_any_pattern(number_format: NumberFormat, pattern: NDArray[np.int32]) -> None:
    x = torch.from_numpy(pattern).view(torch.float32)
    assert_same_bits(number_format.round(x), cast(x, number_format))


@pytest.mark.parametrize("number_format", CASTABLE, ids=lambda f: f.name)
@given(values=st.lists(st.sampled_from(SPECIAL) | st.floats(-7e4, 7e4, width=32), min_size=1))
def test_round_equals_cast_on_ordinary_and_special_values(number_format: NumberFormat, values: list[float]) -> None:
    x = torch.tensor(values)
    assert_same_bits(number_format.round(x), cast(x, number_format))


@pytest.mark.parametrize("number_format", [BF16, *SMALL], ids=lambda f: f.name)
def test_round_equals_cast_around_ties_and_ends(number_format: NumberFormat) -> None:
    x = tie_neighbourhood(number_format)
    assert_same_bits(number_format.round(x), cast(x, number_format))


@given(pattern=patterns)
def test_tf32_is_the_nearest_even_multiple(pattern: NDArray[np.int32]) -> None:
    x = torch.from_numpy(pattern).view(torch.float32)
    mantissa, exponent = np.frexp(x[x.isfinite()].numpy().astype(np.float64))
    quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 11)
    expected = np.rint(np.ldexp(mantissa, exponent) / quantum) * quantum
    with np.errstate(over="ignore"):
        assert_same_bits(TF32.round(x)[x.isfinite()], torch.from_numpy(expected.astype(np.float32)))


@pytest.mark.parametrize("number_format", [TF32, BF16, *SMALL, INT8], ids=lambda f: f.name)
@given(pattern=patterns)
def test_round_is_idempotent_odd_and_saturates(number_format: NumberFormat, pattern: NDArray[np.int32]) -> None:
    x = torch.from_numpy(pattern).view(torch.float32)
    once = number_format.round(x)
    assert_same_bits(number_format.round(once), once)
    assert torch.equal(number_format.round(-x).nan_to_num(0.0), -once.nan_to_num(0.0))
    saturated = number_format.round(x, saturate=True)
    assert torch.equal(saturated.isnan(), x.isnan())
    assert (saturated.nan_to_num(0.0).abs() <= number_format.max).all()


def test_round_to_int8() -> None:
    x = torch.tensor([0.5, 1.5, -2.5, -0.3, 126.5, 127.4, 1e9, -1e9, math.inf])
    assert_same_bits(INT8.round(x), torch.tensor([0.0, 2.0, -2.0, 0.0, 126.0, 127.0, 127.0, -127.0, 127.0]))


def test_round_keeps_layout_values_and_graph_alone() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    before = x.detach().clone()
    for strided in (x.t(), x[::2, 1:5], x[:1].expand(4, 6), x[:0]):
        rounded = BF16.round(strided)
        assert not rounded.requires_grad
        assert torch.equal(rounded, strided.detach().bfloat16().float())
    assert torch.equal(x, before)
    assert FP32.round(x) is x


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_round_takes_float32_only(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=re.escape(f"Passed `bf16.round(x)` with {dtype}.")):
        BF16.round(torch.zeros(2, dtype=dtype))


def test_formats_from_wide_to_narrow() -> None:
    assert list(FORMATS) == ["fp32", "tf32", "bf16", "fp16", "fp8", "int8"]
    assert [rank(name) for name in FORMATS] == list(range(6))
    assert widest(["int8", "bf16", "fp8"]) == "bf16"


def test_roles() -> None:
    assert [name for name, f in FORMATS.items() if f.needs_loss_scale] == ["fp16"]
    assert (FP8.gradient_format, INT8.gradient_format, FP16.gradient_format) == (E5M2, BF16, FP16)
    assert FP8.dtype == torch.float8_e4m3fn
    assert (FP8.amax_limit, FP16.amax_limit) == (torch.finfo(torch.bfloat16).max, 65504.0)
    computes = [f.compute_dtype for f in FORMATS.values()]
    assert computes == [torch.float32] * 2 + [torch.bfloat16, torch.float16] + [torch.bfloat16] * 2


@pytest.mark.parametrize(("name", "suggestion"), [("bf61", "bf16"), ("bfloat16", "bf16"), ("FP32", "fp32"), ("", None)])
def test_unknown_name(name: str, suggestion: str | None) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Passed `{name!r}` as a number format.")) as info:
        get_format(name)
    assert str(sorted(FORMATS)) in str(info.value)
    assert ("Did you mean" in str(info.value)) == (suggestion is not None)
    assert nearest(name, FORMATS) == (f" Did you mean {suggestion!r}?" if suggestion else "")


def test_copies_and_pickles() -> None:
    for number_format in FORMATS.values():
        assert copy.deepcopy(number_format) == pickle.loads(pickle.dumps(number_format)) == number_format
