"""What the tests of the kernels share: runs under every instruction set, tensors that are awkward to read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autoprec.ops import native

needs_cpu_kernels = pytest.mark.skipif(native.missing() is not None, reason="needs the compiled CPU kernels")
ISAS = native.available_isas() if native.missing() is None else []
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-24, 6e-8, 1.0, -1.5, 448.0, 464.0, 65504.0, 65520.0, 3.4e38]
NONFINITE = [math.inf, -math.inf, math.nan]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with the kernels of each instruction set that this machine has."""
    yield native.select_isa(request.param)
    native.select_isa(None)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Runs the test on one and on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def bits(x: Tensor) -> Tensor:
    """The patterns of a tensor, every NaN as the same one."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    patterns = x.contiguous().view(whole)
    if not x.dtype.is_floating_point:
        return patterns
    return torch.where(x.float().isnan(), torch.full_like(patterns, 77), patterns)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(bits(actual), bits(expected))


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


def awkward_sizes() -> list[int]:
    """Around the widths of vectors, tiles, blocks and chunks."""
    return [0, 1, 3, 15, 16, 17, 63, 64, 65, 127, 129, 1023, 1025, 2049, 16385, 32769, 70001]


def unaligned(x: Tensor) -> Tensor:
    """The same tensor one element into its storage."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype)
    view = storage[1:].view(x.shape)
    view.copy_(x)
    return view
