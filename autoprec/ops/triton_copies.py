"""Kernels for the weight copies that need a whole row, column or tensor first: int8 and e4m3.

Two launches for all weights of a list: the first raises the amaxes, the second writes values, transposed values and
scales. Both work on square tiles, so that rows and columns are read and written in runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoprec.ops.triton_plans import Plan, build_plans, cached_plans, identity, is_aligned, on_own_device
from autoprec.ops.triton_rounding import e4m3_bits, float_scale, int8_scale, int8_values, magnitude_bits, pointer

if TYPE_CHECKING:
    from autoprec.ops.reference_steps import WeightCopy

TILE = 64
LAUNCH = {"TILE": TILE, "num_warps": 8, "enable_fp_fusion": False}
# weight, rows, cols, is_int8, amaxes of rows and columns, values, scale, transposed values and scale
_WIDTH = tl.constexpr(10)


@triton.jit
def _tile(row, index, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    n_rows, n_cols = tl.load(row + 1), tl.load(row + 2)
    if ALIGNED:
        n_rows = tl.multiple_of(n_rows, 16)
        n_cols = tl.multiple_of(n_cols, 16)
    across = tl.cdiv(n_cols, TILE)
    rows = index // across * TILE + tl.arange(0, TILE)
    cols = index % across * TILE + tl.arange(0, TILE)
    mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    x = tl.load(
        pointer(tl.load(row), tl.float32, ALIGNED) + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0
    )
    return x, rows, cols, n_rows, n_cols, mask


@triton.jit
def copy_amax_kernel(
    table,
    chunk_tensors,
    chunk_starts,
    found_inf,
    HAS_FOUND_INF: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raises the amaxes of the rows and columns, or of the whole, of one weight by what one tile holds."""
    if HAS_FOUND_INF:
        if tl.load(found_inf) != 0.0:
            return
    chunk = tl.program_id(0)
    row = table + tl.load(chunk_tensors + chunk) * _WIDTH
    x, rows, cols, n_rows, n_cols, _ = _tile(row, tl.load(chunk_starts + chunk), ALIGNED, TILE)
    # patterns of magnitudes are ordered as integers, NaN above all others
    magnitude = magnitude_bits(x)
    row_amaxes = tl.load(row + 4).to(tl.pointer_type(tl.int32))
    col_amaxes = tl.load(row + 5)
    if tl.load(row + 3) == 1:
        tl.atomic_max(row_amaxes + rows, tl.max(magnitude, axis=1), mask=rows < n_rows, sem="relaxed")
    else:
        tl.atomic_max(row_amaxes, tl.max(tl.max(magnitude, axis=1), axis=0), sem="relaxed")
    if col_amaxes != 0:
        address = col_amaxes.to(tl.pointer_type(tl.int32)) + cols
        tl.atomic_max(address, tl.max(magnitude, axis=0), mask=cols < n_cols, sem="relaxed")


@triton.jit
def copy_write_kernel(
    table,
    chunk_tensors,
    chunk_starts,
    found_inf,
    HAS_FOUND_INF: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes one tile of a weight's copy, and the scales if it is the first tile of its row or column."""
    if HAS_FOUND_INF:
        if tl.load(found_inf) != 0.0:
            return
    chunk = tl.program_id(0)
    row = table + tl.load(chunk_tensors + chunk) * _WIDTH
    index = tl.load(chunk_starts + chunk)
    x, rows, cols, n_rows, n_cols, mask = _tile(row, index, ALIGNED, TILE)
    offsets = rows[:, None] * n_cols + cols[None, :]
    amaxes = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    scales = tl.load(row + 7).to(tl.pointer_type(tl.float32))
    if tl.load(row + 3) == 1:
        row_scale = int8_scale(tl.load(amaxes + rows, mask=rows < n_rows, other=0.0))
        values = pointer(tl.load(row + 6), tl.int8, ALIGNED)
        tl.store(values + offsets, int8_values(x * row_scale[:, None], 0, False), mask=mask)
        if index % tl.cdiv(n_cols, TILE) == 0:
            tl.store(scales + rows, row_scale, mask=rows < n_rows)
        if tl.load(row + 5) != 0:
            col_amaxes = tl.load(row + 5).to(tl.pointer_type(tl.float32))
            col_scale = int8_scale(tl.load(col_amaxes + cols, mask=cols < n_cols, other=0.0))
            transposed_values = pointer(tl.load(row + 8), tl.int8, ALIGNED)
            transposed = tl.trans(int8_values(x * col_scale[None, :], 0, False))
            places = cols[:, None] * n_rows + rows[None, :]
            tl.store(transposed_values + places, transposed, mask=(cols < n_cols)[:, None] & (rows < n_rows)[None, :])
            if index < tl.cdiv(n_cols, TILE):
                tl.store(tl.load(row + 9).to(tl.pointer_type(tl.float32)) + cols, col_scale, mask=cols < n_cols)
    else:
        scale = float_scale(tl.load(amaxes), 448.0)
        patterns = pointer(tl.load(row + 6), tl.uint8, ALIGNED)
        tl.store(patterns + offsets, e4m3_bits(x * scale, 0, False), mask=mask)
        if index == 0:
            tl.store(scales, scale)


@on_own_device
def write_scaled_copies(params: Sequence[Tensor], copies: Sequence[WeightCopy], found_inf: Tensor | None) -> None:
    """Writes int8 and e4m3 copies of weights, two launches for all of them.

    Args:
        params: float32, contiguous, none empty.
        copies: One for each, formats ``"int8"`` or ``"e4m3"``, contiguous.
        found_inf: Nothing is written where it is not zero.
    """
    key = (
        "copies",
        identity(params),
        tuple((c.format, *identity(c.tensors)) for c in copies),
        tuple(param.shape[:1] for param in params),
    )
    plans = cached_plans(key, lambda: _plans(params, copies))
    for plan in plans:
        assert plan.scratch is not None
        plan.scratch.zero_()
    for kernel in (copy_amax_kernel, copy_write_kernel):
        for plan in plans:
            flag = plan.table if found_inf is None else found_inf
            kernel[(plan.n_chunks,)](
                plan.table,
                plan.chunk_tensors,
                plan.chunk_starts,
                flag,
                HAS_FOUND_INF=found_inf is not None,
                ALIGNED=plan.is_aligned,
                **LAUNCH,
            )


def _plans(params: Sequence[Tensor], copies: Sequence[WeightCopy]) -> tuple[Plan, ...]:
    device = params[0].device
    shapes = [(len(param), param.numel() // len(param)) if param.ndim else (1, 1) for param in params]
    amaxes = torch.zeros(sum(rows + cols for rows, cols in shapes), dtype=torch.float32, device=device)
    table, tiles, aligned, place = [], [], [], amaxes.data_ptr()
    for param, copy, (rows, cols) in zip(params, copies, shapes, strict=True):
        values, scale, transposed_values, transposed_scale = (0 if t is None else t.data_ptr() for t in copy.tensors)
        col_amaxes = place + amaxes.element_size() * rows if transposed_values else 0
        addresses = (values, scale, transposed_values, transposed_scale)
        table.append((param.data_ptr(), rows, cols, int(copy.format == "int8"), place, col_amaxes, *addresses))
        tiles.append(-(-rows // TILE) * -(-cols // TILE))
        aligned.append(is_aligned(param.data_ptr(), rows, cols, values, transposed_values))
        place += amaxes.element_size() * (rows + cols)
    return build_plans(table, tiles, aligned, 1, device, amaxes)
