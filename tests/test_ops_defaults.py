"""The operations under a default dtype or default device that the user has set: results stay where and what they are.

Time budget: 5 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from autoprec import ops
from autoprec.ops.reference_scaling import DelayedScaling
from tests.kernels import assert_same_bits, needs_cpu_kernels

IMPLEMENTATIONS = [pytest.param("cpu", marks=needs_cpu_kernels), "reference"]


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def elsewhere() -> torch.device:
    """Memory there has no address: a kernel that was handed it would crash."""
    return torch.device("meta")


def statistics(implementation: str, x: Tensor) -> list[Tensor]:
    tables = [ops.grad_stats(grads, implementation=implementation).table for grads in ([x, x[0]], [])]
    limited = ops.grad_stats([x], [0.5], [0.1], implementation=implementation)
    return [*tables, limited.table, ops.grad_norms([x]), ops.grad_norms([]), ops.global_norm([x])]


def casts(implementation: str, x: Tensor) -> list[Tensor]:
    found: list[Tensor | None] = []
    for granularity in ("tensor", "row", "1x128", "128x128"):
        rounded = ops.cast(x, "int8", granularity=granularity, implementation=implementation)
        back = ops.restore(rounded.values, rounded.scale, granularity=granularity, implementation=implementation)
        found += [*rounded, back]
    plain = ops.cast(x, "bf16", with_amax=True, implementation=implementation)
    found += [*plain, ops.restore(plain.values, implementation=implementation)]
    return [tensor for tensor in found if tensor is not None]


def products(implementation: str, x: Tensor) -> list[Tensor]:
    copy = ops.new_copy(x, "int8")
    ops.refresh_copies_([x], [copy], implementation=implementation)
    assert copy.scale is not None
    rows = [x, x[:0]]
    return [ops.int8_matmul(row, copy.values, copy.scale, implementation=implementation) for row in rows]


def scaling(implementation: str, x: Tensor) -> list[Tensor]:
    delayed = DelayedScaling([448.0])
    delayed.record(0, x.abs().amax())
    delayed.advance()
    return [delayed.scale, *delayed.state_dict().values()]


@pytest.mark.parametrize("default", [double, elsewhere])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("operation", [statistics, casts, products, scaling])
def test_defaults_of_the_user_change_nothing(
    operation: Callable[[str, Tensor], Sequence[Tensor]], implementation: str, default: Callable[[], object]
) -> None:
    x = torch.randn(5, 300)
    expected = operation(implementation, x)
    with default():  # type: ignore[attr-defined]
        found = operation(implementation, x)
    assert len(found) == len(expected)
    for actual, wanted in zip(found, expected, strict=True):
        assert actual.device == wanted.device
        assert_same_bits(actual, wanted)
