"""The kernel that finds copies that are no longer what their weights would give, by a few entries of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoprec.ops.staleness import OFFSET
from autoprec.ops.triton_plans import as_int64, build_plans, cached_plans, on_own_device
from autoprec.ops.triton_prepared import is_one_order
from autoprec.ops.triton_rounding import (
    BFLOAT16,
    E4M3,
    FLOAT16,
    INT8,
    bfloat16_bits,
    e4m3_bits,
    float16_bits,
    int8_values,
    random_at,
)

if TYPE_CHECKING:
    from autoprec.ops.reference_steps import WeightCopy

CODES = {"bf16": BFLOAT16.value, "fp16": FLOAT16.value, "e4m3": E4M3.value, "int8": INT8.value}
LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}
# size, weight, values, scale, elements that share a scale, format, position in the list
_WIDTH = tl.constexpr(7)


@triton.jit
def _differ(address, places, mask, expected, NAN_ABOVE: tl.constexpr, MAGNITUDE: tl.constexpr):
    """Lanes where the stored pattern is another one, any NaN like any other."""
    stored = tl.load(address.to(tl.pointer_type(expected.dtype)) + places, mask=mask, other=0)
    are_nan = ((stored & MAGNITUDE) > NAN_ABOVE) & ((expected & MAGNITUDE) > NAN_ABOVE)
    return (mask & (stored != expected) & (are_nan == 0)).to(tl.int32)


@triton.jit
def stale_kernel(table, first, samples, seed: tl.int64, offset: tl.int64, SIZE: tl.constexpr):
    """Lowers ``first`` to the position of one weight if one of the entries drawn for it differs from its copy."""
    row = table + tl.program_id(0) * _WIDTH
    values, code, position = tl.load(row + 2), tl.load(row + 5), tl.load(row + 6)
    lanes = tl.arange(0, SIZE)
    mask = lanes < samples
    word = 2 * (samples * position + lanes)
    upper = (random_at(seed, offset, word) & 0x7FFFFFFF).to(tl.int64)
    places = ((upper << 32) | random_at(seed, offset, word + 1).to(tl.int64)) % tl.load(row)
    x = tl.load(tl.load(row + 1).to(tl.pointer_type(tl.float32)) + places, mask=mask, other=0.0)
    scales = tl.load(row + 3).to(tl.pointer_type(tl.float32)) + places // tl.load(row + 4)
    if code == BFLOAT16:
        differ = _differ(values, places, mask, bfloat16_bits(x, 0, False, False), 0x7F80, 0x7FFF)
    elif code == FLOAT16:
        differ = _differ(values, places, mask, float16_bits(x, 0, False, False), 0x7C00, 0x7FFF)
    elif code == E4M3:
        x = x * tl.load(scales, mask=mask, other=0.0)
        differ = _differ(values, places, mask, e4m3_bits(x, 0, False), 0x7E, 0x7F)
        # half a step beyond the largest value: the scale would have been another one
        differ = tl.where(tl.abs(x) >= 464.0, 1, differ)
    else:
        x = x * tl.load(scales, mask=mask, other=0.0)
        differ = _differ(values, places, mask, int8_values(x, 0, False).to(tl.uint8, bitcast=True), 0xFF, 0xFF)
        differ = tl.where(tl.abs(x) >= 127.5, 1, differ)
    if tl.max(differ, axis=0) > 0:
        tl.atomic_min(first, position)


@on_own_device
def first_stale(params: Sequence[Tensor], copies: Sequence[WeightCopy | None], samples: int, seed: int) -> int | None:
    """:func:`autoprec.ops.staleness.first_stale` in one launch; waits for the answer."""
    present = [(i, param, copy) for i, (param, copy) in enumerate(zip(params, copies, strict=True)) if copy]
    found = [(i, *_in_one_order(param.detach(), copy), copy) for i, param, copy in present if param.numel()]
    if not found:
        return None
    device = found[0][1].device
    first = torch.full((), len(params), dtype=torch.int32, device=device)
    rows = [_row(*entry) for entry in found]
    key = ("stale", device, tuple(rows))
    (plan,) = cached_plans(key, lambda: build_plans(rows, [1] * len(rows), [False] * len(rows), 1, device))
    size = triton.next_power_of_2(samples)
    stale_kernel[(plan.n_tensors,)](plan.table, first, samples, as_int64(seed), as_int64(OFFSET), SIZE=size, **LAUNCH)
    position = int(first)
    return None if position == len(params) else position


def _in_one_order(param: Tensor, copy: WeightCopy) -> tuple[Tensor, Tensor]:
    """Weight and copy with their entries in one order of memory, for int8 that of rows."""
    if copy.format != "int8" and is_one_order([param, copy.values]):
        return param, copy.values
    return param.contiguous(), copy.values.contiguous()


def _row(position: int, param: Tensor, values: Tensor, copy: WeightCopy) -> tuple[int, ...]:
    size, scale = param.numel(), copy.scale
    address, share = (0, 1) if scale is None else (scale.data_ptr(), size // scale.numel())
    return size, param.data_ptr(), values.data_ptr(), address, share, CODES[copy.format], position
