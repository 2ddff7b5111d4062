"""Matmuls on a GPU: block-scaled fp8, int8 with fused dequantisation, and torch's own scaled fp8 matmul."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoprec.ops.reference import is_fp8_native
from autoprec.ops.triton_casts import cast
from autoprec.ops.triton_plans import on_own_device
from autoprec.ops.triton_rounding import bfloat16_bits, e4m3_to_float16, e5m2_to_float16

BLOCK = 128
# sizes of a program's tile; the narrow one leaves registers for widening fp8 where no unit reads it
LARGE = {"ROWS": 128, "COLS": 128, "num_warps": 8, "num_stages": 3}
NARROW = {"ROWS": 128, "COLS": 64, "num_warps": 8, "num_stages": 3}
SMALL = {"ROWS": 64, "COLS": 64, "num_warps": 4, "num_stages": 3}
# row tiles that share column tiles while these are in the second-level cache
_GROUP = tl.constexpr(8)


@triton.jit
def _tile_of(rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Tile of this program: groups of row tiles go through the columns together."""
    index = tl.program_id(0)
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(cols, COLS)
    per_group = _GROUP * across
    first = index // per_group * _GROUP
    height = tl.minimum(down - first, _GROUP)
    return first + index % per_group % height, index % per_group // height


@triton.jit
def _operand(bits, IS_E5M2: tl.constexpr, NATIVE: tl.constexpr):
    if NATIVE:
        if IS_E5M2:
            return bits.to(tl.float8e5, bitcast=True)
        else:
            return bits.to(tl.float8e4nv, bitcast=True)
    else:
        if IS_E5M2:
            return e5m2_to_float16(bits)
        else:
            return e4m3_to_float16(bits)


@triton.jit
def block_scaled_matmul_kernel(
    a, b, a_scale, b_scale, y, rows, cols, inner, A_E5M2: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One tile of ``a @ b.t()``, bfloat16; scales of ``a`` belong to 1x128 blocks, of ``b`` to 128x128 blocks.

    The tensor cores of sm_90 add fp8 products in less than float32, so each 128 products leave them and are scaled and
    added in float32 (DeepSeek-V3, arXiv:2412.19437).
    """
    tile_row, tile_col = _tile_of(rows, cols, ROWS, COLS)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    col = tile_col * COLS + tl.arange(0, COLS)
    lanes = tl.arange(0, INNER)
    n_blocks = tl.cdiv(inner, INNER)
    a_pointers = a + row.to(tl.int64)[:, None] * inner + lanes[None, :]
    b_pointers = b + col.to(tl.int64)[None, :] * inner + lanes[:, None]
    a_scales = a_scale + row.to(tl.int64) * n_blocks
    # a tile's columns lie within one block of 128
    b_scales = b_scale + (tile_col * COLS // 128) * n_blocks
    row_mask, col_mask = row < rows, col < cols
    total = tl.zeros((ROWS, COLS), tl.float32)
    for block in range(n_blocks):
        left = inner - block * INNER
        a_bits = tl.load(a_pointers, mask=row_mask[:, None] & (lanes < left)[None, :], other=0)
        b_bits = tl.load(b_pointers, mask=(lanes < left)[:, None] & col_mask[None, :], other=0)
        part = tl.dot(_operand(a_bits, A_E5M2, NATIVE), _operand(b_bits, False, NATIVE))
        inv_scale = (1.0 / tl.load(a_scales + block, mask=row_mask, other=1.0)) * (1.0 / tl.load(b_scales + block))
        total += part * inv_scale[:, None]
        a_pointers += INNER
        b_pointers += INNER
    places = row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(y + places, bfloat16_bits(total, 0, False, False), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit
def int8_matmul_kernel(
    a, b, a_scale, b_scale, bias, y, rows, cols, inner, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """One tile of ``a @ b.t()``: exact int32 sums, divided by the scales of row and column, plus bias, in bfloat16."""
    tile_row, tile_col = _tile_of(rows, cols, ROWS, COLS)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    col = tile_col * COLS + tl.arange(0, COLS)
    lanes = tl.arange(0, INNER)
    a_pointers = a + row.to(tl.int64)[:, None] * inner + lanes[None, :]
    b_pointers = b + col.to(tl.int64)[None, :] * inner + lanes[:, None]
    row_mask, col_mask = row < rows, col < cols
    total = tl.zeros((ROWS, COLS), tl.int32)
    for first in range(0, inner, INNER):
        left = inner - first
        a_tile = tl.load(a_pointers, mask=row_mask[:, None] & (lanes < left)[None, :], other=0)
        b_tile = tl.load(b_pointers, mask=(lanes < left)[:, None] & col_mask[None, :], other=0)
        total = tl.dot(a_tile, b_tile, acc=total, out_dtype=tl.int32)
        a_pointers += INNER
        b_pointers += INNER
    one = tl.zeros((ROWS,), tl.float32) + 1.0
    inv_row = tl.div_rn(one, tl.load(a_scale + row, mask=row_mask, other=1.0))
    inv_col = tl.div_rn(tl.zeros((COLS,), tl.float32) + 1.0, tl.load(b_scale + col, mask=col_mask, other=1.0))
    result = total.to(tl.float32) * inv_row[:, None] * inv_col[None, :]
    if HAS_BIAS:
        result = result + tl.load(bias + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    places = row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(y + places, bfloat16_bits(result, 0, False, False), mask=row_mask[:, None] & col_mask[None, :])


def _tiles(rows: int, cols: int, large: dict[str, int]) -> tuple[tuple[int], dict[str, int]]:
    """Grid and tile: the large one, unless it would leave most of a GPU idle."""
    for tile in (large, SMALL):
        count = triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(cols, tile["COLS"])
        if count >= 128:
            break
    return (count,), tile


@on_own_device
def block_scaled_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """Multiplies block-scaled fp8 matrices, ``a @ b.t()``, with float32 sums of every 128 products.

    Args:
        a: ``[rows, inner]``, e4m3 or e5m2 with 1x128 scales.
        b: ``[cols, inner]``, e4m3 with 128x128 scales.
        a_scale: ``[rows, ceil(inner / 128)]``, float32, as :func:`autoprec.ops.triton_casts.cast` returns it.
        b_scale: ``[ceil(cols / 128), ceil(inner / 128)]``, float32.

    Returns:
        ``[rows, cols]``, bfloat16. Within bfloat16's rounding and float32's sums of the exact product. Devices whose
        units do not read e4m3fn multiply in float16, which holds every 8-bit value.
    """
    _check_inner(a, b)
    y = torch.empty(len(a), len(b), dtype=torch.bfloat16, device=a.device)
    is_native = is_fp8_native(a.device)
    grid, tile = _tiles(len(a), len(b), LARGE if is_native else NARROW)
    if y.numel():
        block_scaled_matmul_kernel[grid](
            a.contiguous().view(torch.uint8),
            b.contiguous().view(torch.uint8),
            a_scale.contiguous(),
            b_scale.contiguous(),
            y.view(torch.uint16),
            *y.shape,
            a.shape[1],
            A_E5M2=a.dtype is torch.float8_e5m2,
            NATIVE=is_native,
            INNER=BLOCK,
            enable_fp_fusion=True,
            **tile,
        )
    return y


@on_own_device
def scaled_int8_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies row-scaled int8 matrices, ``a @ b.t()``, and dequantises in the same launch.

    Args:
        a: ``[rows, inner]``, int8.
        b: ``[cols, inner]``, int8.
        a_scale: ``[rows, 1]``, float32: what the rows were multiplied by.
        b_scale: ``[cols, 1]``, float32.
        bias: ``[cols]``, floating point, or ``None``.

    Returns:
        ``[rows, cols]``, bfloat16: the exact integer sums times both inverse scales, plus bias, rounded once.
    """
    _check_inner(a, b)
    y = torch.empty(len(a), len(b), dtype=torch.bfloat16, device=a.device)
    grid, tile = _tiles(len(a), len(b), LARGE)
    if y.numel():
        int8_matmul_kernel[grid](
            a.contiguous(),
            b.contiguous(),
            a_scale.contiguous(),
            b_scale.contiguous(),
            a if bias is None else bias.float(),
            y.view(torch.uint16),
            *y.shape,
            a.shape[1],
            HAS_BIAS=bias is not None,
            INNER=BLOCK,
            enable_fp_fusion=False,
            **tile,
        )
    return y


def int8_matmul(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`autoprec.ops.int8_matmul` on a GPU, equal bit for bit: quantises rows of ``x``, multiplies; two launches.

    Args:
        x: ``[rows, in_features]``, floating point.
        values: ``[out_features, in_features]``, int8: a weight copy's ``values``, or its ``transposed_values`` for the
            input gradient.
        scale: ``[out_features, 1]``, float32: the scale of those.
        bias: ``[out_features]`` or ``None``.

    Returns:
        ``[rows, out_features]``, bfloat16.
    """
    rows, row_scale, _ = cast(x, "int8", granularity="row")
    assert row_scale is not None
    return scaled_int8_matmul(rows, values.flatten(1), row_scale, scale, bias)


def scaled_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies fp8 matrices with tensorwise or rowwise scales, ``a @ b.t()``, through torch's own kernels.

    Args:
        a: ``[rows, inner]``, e4m3 or e5m2.
        b: ``[cols, inner]``, e4m3 or e5m2, not both e5m2. ``inner`` and ``cols`` must be multiples of 16.
        a_scale: ``[]``, or ``[rows, 1]``, float32: what ``a`` was multiplied by.
        b_scale: ``[]``, or ``[cols, 1]``, float32.
        bias: ``[cols]``, bfloat16, or ``None``.

    Returns:
        ``[rows, cols]``, bfloat16.
    """
    _check_inner(a, b)
    inv_a, inv_b = a_scale.reciprocal(), b_scale.reciprocal()
    is_rowwise = inv_a.numel() > 1 or inv_b.numel() > 1
    if is_rowwise:
        inv_a = inv_a.reshape(-1, 1).expand(len(a), 1).contiguous()
        inv_b = inv_b.reshape(1, -1).expand(1, len(b)).contiguous()
    functional: Any = torch.nn.functional
    if hasattr(functional, "scaled_mm"):
        recipe = functional.ScalingType.RowWise if is_rowwise else functional.ScalingType.TensorWise
        y: Tensor = functional.scaled_mm(a, b.t(), inv_a, recipe, inv_b, recipe, bias=bias, output_dtype=torch.bfloat16)
        return y
    # older versions have the private name only
    return torch._scaled_mm(a, b.t(), scale_a=inv_a, scale_b=inv_b, bias=bias, out_dtype=torch.bfloat16)


def _check_inner(a: Tensor, b: Tensor) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(
            f"Passed matrices {list(a.shape)} and {list(b.shape)}. Both must be [rows, inner] with the same `inner`."
        )
