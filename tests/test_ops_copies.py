"""Low-precision copies of weights that a step writes, against what the reference makes of the same weights.

Time budget: 15 s.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autoprec import ops
from autoprec.ops.reference_steps import write_copy
from tests.kernels import NONFINITE, SPECIAL, assert_same_bits, isa, needs_cpu_kernels, threads, unaligned

pytestmark = needs_cpu_kernels
__all__ = ["isa", "threads"]
FORMATS = ["bf16", "fp16", "e4m3", "int8"]
SHAPES = [(1, 1), (3, 5), (64, 64), (65, 130), (200, 17), (16, 300), (1, 70), (70, 1), (8, 3, 5, 5), (2, 20000)]


def tensors_of(copy: ops.WeightCopy) -> list[Tensor]:
    found = (copy.values, copy.scale, copy.transposed_values, copy.transposed_scale)
    return [tensor for tensor in found if tensor is not None]


def assert_is_copy_of(copy: ops.WeightCopy, weight: Tensor) -> None:
    expected = ops.new_copy(weight, copy.format, transposed=copy.transposed_values is not None)
    write_copy(weight, expected)
    for actual, wanted in zip(tensors_of(copy), tensors_of(expected), strict=True):
        assert_same_bits(actual, wanted)


def poisoned(weight: Tensor, format_name: str) -> ops.WeightCopy:
    """A copy full of NaN, or of the one number that int8 values never are."""
    copy = ops.new_copy(weight, format_name)
    for tensor in tensors_of(copy):
        tensor.fill_(torch.nan) if tensor.dtype.is_floating_point else tensor.fill_(-128)
    return copy


@pytest.mark.parametrize("format_name", FORMATS)
def test_refreshed_copies(isa: str, format_name: str) -> None:
    weights = [torch.randn(shape) for shape in SHAPES]
    weights[3][5] = 0.0
    weights[3][:, 7] = 0.0
    copies = [poisoned(weight, format_name) for weight in weights]
    ops.refresh_copies_(weights, copies, implementation="cpu")
    for weight, copy in zip(weights, copies, strict=True):
        assert_is_copy_of(copy, weight)


@pytest.mark.parametrize("format_name", FORMATS)
def test_copies_written_by_a_step(threads: int, format_name: str) -> None:
    weights = [torch.randn(shape) for shape in SHAPES]
    copies = [poisoned(weight, format_name) if index != 2 else None for index, weight in enumerate(weights)]
    grads = [torch.randn_like(weight).bfloat16() for weight in weights]
    ops.fused_sgd_(weights, grads, lr=0.1, copies=copies, implementation="cpu")
    for weight, copy in zip(weights, copies, strict=True):
        if copy is not None:
            assert_is_copy_of(copy, weight)


def test_copies_that_go_past_the_caches(isa: str) -> None:
    """From 2**21 elements on, copies whose chunks are aligned are not kept in the caches."""
    weights = [torch.randn(2**21 + 5), torch.randn(70_001)]
    copies = [poisoned(weight, "bf16") for weight in weights]
    copies[1] = ops.WeightCopy("bf16", unaligned(copies[1].values))
    grads = [torch.randn_like(weight).bfloat16() for weight in weights]
    ops.fused_sgd_(weights, grads, lr=0.1, copies=copies, implementation="cpu")
    for weight, copy in zip(weights, copies, strict=True):
        assert_same_bits(copy.values, weight.bfloat16())


@pytest.mark.parametrize("format_name", FORMATS)
def test_special_and_non_finite_weights(isa: str, format_name: str) -> None:
    rows = [SPECIAL, SPECIAL[::-1], *([1.0] * 13 + [bad] for bad in NONFINITE), [0.0] * 14]
    for weight in (torch.tensor(rows), torch.tensor(rows[:2]), torch.zeros(3, 4)):
        copy = poisoned(weight, format_name)
        ops.refresh_copies_([weight], [copy], implementation="cpu")
        assert_is_copy_of(copy, weight)


def test_empty_weights_and_copies_without_transposition() -> None:
    for shape in ((0, 4), (0,), (3, 0)):
        weight = torch.zeros(shape)
        for format_name in FORMATS:
            copy = poisoned(weight, format_name)
            ops.refresh_copies_([weight], [copy], implementation="cpu")
            assert_is_copy_of(copy, weight)
    weight = torch.randn(20, 30)
    copy = ops.new_copy(weight, "int8", transposed=False)
    assert copy.transposed_values is None
    ops.refresh_copies_([weight], [copy], implementation="cpu")
    assert_is_copy_of(copy, weight)


def test_the_reference_writes_the_same_through_the_same_call() -> None:
    weight = torch.randn(5, 6)
    copy = poisoned(weight, "int8")
    ops.refresh_copies_([weight, weight], [copy, None], implementation="reference")
    assert_is_copy_of(copy, weight)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_a_prepared_step_refreshes_copies_of_weights_whose_storage_was_replaced(implementation: str) -> None:
    weight = nn.Parameter(torch.randn(5, 6))
    copy = poisoned(weight, "bf16")
    step = ops.prepare_sgd([weight], copies=[copy], implementation=implementation)
    for _ in range(2):
        weight.data = torch.randn(5, 6)
        step.refresh()
        assert_is_copy_of(copy, weight)


def test_unknown_format() -> None:
    with pytest.raises(ValueError, match=r"Passed `new_copy\(weight, 'int4'\)`.*Did you mean 'int8'"):
        ops.new_copy(torch.ones(2, 2), "int4")


def test_an_int8_copy_of_a_weight_that_is_not_row_major_is_refused() -> None:
    weight = torch.randn(4, 6).t()
    with pytest.raises(ValueError, match="contiguous for int8"):
        ops.refresh_copies_([weight], [ops.new_copy(weight, "int8")], implementation="cpu")
