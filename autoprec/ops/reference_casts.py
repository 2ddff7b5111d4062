"""Casts to narrow formats with scales of every granularity, in eager PyTorch: the specification of the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autoprec.formats import BF16, E4M3, E5M2, FP16, INT8, TF32, NumberFormat, nearest
from autoprec.ops.reference_random import random_words, round_stochastic

FORMATS = {number_format.name: number_format for number_format in (BF16, FP16, E4M3, E5M2, INT8, TF32)}
SCALED = ("e4m3", "e5m2", "int8")
GRANULARITIES = ("tensor", "row", "1x128", "128x128")
AMAX_FLOOR = 1e-12


class Cast(NamedTuple):
    """A tensor in a narrow format.

    Attributes:
        values: Shape of the input, in the format's dtype.
        scale: What the input was multiplied by, float32: ``[]`` for ``tensor``, else ``[blocks down, blocks across]``.
        amax: Of the input, float32, the shape of ``scale``. NaN if an entry is NaN.
    """

    values: Tensor
    scale: Tensor | None
    amax: Tensor | None


def block_shape(granularity: str | None, rows: int, cols: int) -> tuple[int, int]:
    """Rows and columns of a block that shares a scale; a tensor is a matrix of its last dimension's columns.

    Raises:
        ValueError: If there is no such granularity.
    """
    if granularity in (None, "tensor"):
        return max(rows, 1), max(cols, 1)
    if granularity == "row":
        return 1, max(cols, 1)
    if granularity not in GRANULARITIES:
        raise ValueError(
            f"Passed `granularity={granularity!r}`. Known granularities: {sorted(GRANULARITIES)}, or None for no scale."
            f"{nearest(str(granularity), GRANULARITIES)}"
        )
    down, across = granularity.split("x")
    return int(down), int(across)


def scale_of(amax: Tensor, number_format: NumberFormat) -> Tensor:
    """Factor that brings ``amax`` to the largest value of a format, float32.

    int8 has no value for what is not finite, so its scale becomes NaN; the 8-bit floats get 0 for an infinite amax.
    """
    if number_format.is_integer:
        scale = torch.full_like(amax, number_format.max) / amax.clamp(min=AMAX_FLOOR)
        return torch.where(amax.isfinite(), scale, torch.full_like(scale, torch.nan))
    return (number_format.max / amax.double().clamp(min=AMAX_FLOOR)).float()


def as_matrix(x: Tensor) -> Tensor:
    """``x`` as float32 ``[rows, cols]``; a tensor without dimensions is one entry."""
    return (
        x.detach().float().reshape(-1, x.shape[-1] if x.ndim else 1) if x.numel() else x.detach().float().reshape(0, 1)
    )


def expand_blocks(blocks: Tensor, block: tuple[int, int], rows: int, cols: int) -> Tensor:
    """Repeats one number for each block over the matrix, ``[rows, cols]``."""
    down, across = min(block[0], max(rows, 1)), min(block[1], max(cols, 1))
    spread = blocks.reshape(-1, -(-cols // across) if cols else 1)
    return spread.repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :cols]


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    rows, cols = x.shape
    down, across = -(-rows // block[0]), -(-cols // block[1])
    padded = torch.nn.functional.pad(x.abs(), (0, across * block[1] - cols, 0, down * block[0] - rows))
    return padded.view(down, block[0], across, block[1]).amax(dim=(1, 3))


def cast(
    x: Tensor,
    format_name: str,
    *,
    granularity: str | None = None,
    scale: Tensor | None = None,
    saturate: bool = True,
    seed: int | None = None,
    offset: int = 0,
    with_amax: bool = False,
) -> Cast:
    """Rounds a tensor to a narrow format.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        format_name: ``bf16``, ``fp16``, ``tf32``, ``e4m3``, ``e5m2`` or ``int8``.
        granularity: What shares a scale: ``tensor``, ``row``, ``1x128`` or ``128x128``. ``None`` for no scale, or for
            the one that is passed.
        scale: ``[]``, float32: a scale known beforehand, as in delayed scaling.
        saturate: Too large becomes the largest value, not infinity. e4m3 and int8 saturate always.
        seed: Rounds stochastically with the random words of this seed; ``None`` rounds to nearest, ties to even.
        offset: Place in the stream of random words.
        with_amax: Returns the amax even without a granularity.
    """
    number_format = FORMATS[format_name]
    matrix = as_matrix(x)
    block = block_shape(granularity, *matrix.shape)
    amax = None
    if granularity is not None or with_amax:
        is_flat = granularity in (None, "tensor")
        amax = (
            (matrix.abs().amax() if matrix.numel() else matrix.new_zeros(())) if is_flat else _block_amax(matrix, block)
        )
    if granularity is not None:
        assert amax is not None
        scale = scale_of(amax, number_format)
    scaled = matrix
    if scale is not None:
        scaled = matrix * (scale if scale.numel() == 1 else expand_blocks(scale, block, *matrix.shape))
    words = None
    if seed is not None:
        words = random_words(seed, offset, torch.arange(x.numel(), device=x.device).reshape(scaled.shape))
    values = _rounded(scaled, number_format, saturate, words).to(number_format.dtype).reshape(x.shape)
    return Cast(values, scale, amax)


def _rounded(x: Tensor, number_format: NumberFormat, saturate: bool, words: Tensor | None) -> Tensor:
    if number_format.is_integer:
        clamped = x.nan_to_num(nan=0.0).clamp(-number_format.max, number_format.max)
        if words is None:
            return clamped.round()
        below = clamped.floor()
        return below + ((words >> 8).float() * 2.0**-24 < clamped - below)
    if words is None:
        return number_format.round(x.contiguous(), saturate=saturate)
    return round_stochastic(x, number_format, words, saturate=saturate)


def restore(values: Tensor, scale: Tensor | None = None, *, granularity: str | None = None) -> Tensor:
    """Back to float32: ``values / scale``.

    Args:
        values: What :func:`cast` returned.
        scale: What it returned or was given.
        granularity: What it was given.
    """
    matrix = as_matrix(values)
    if scale is not None:
        block = block_shape(granularity, *matrix.shape)
        matrix = matrix / (scale if scale.numel() == 1 else expand_blocks(scale, block, *matrix.shape))
    return matrix.reshape(values.shape)


def fake_cast(x: Tensor, exponent_bits: Tensor, mantissa_bits: Tensor, is_finite_only: Tensor) -> Tensor:
    """Rounds each row of a stacked tensor to its own format; values stay in float32.

    Args:
        x: ``[n, ...]``, float32.
        exponent_bits: ``[n]``, int64, from 2 to 8.
        mantissa_bits: ``[n]``, int64, from 1 to 23.
        is_finite_only: ``[n]``, bool: no infinity, one NaN, saturating, as e4m3fn.
    """
    rows = []
    for row, exponent, mantissa, finite in zip(
        x.detach(), exponent_bits.tolist(), mantissa_bits.tolist(), is_finite_only.tolist(), strict=True
    ):
        number_format = NumberFormat(
            name="row",
            exponent_bits=exponent,
            mantissa_bits=mantissa,
            has_inf=not finite,
            dtype=torch.float32,
            compute_dtype=torch.float32,
        )
        rows.append(number_format.round(row.contiguous()))
    return torch.stack(rows) if rows else x.detach().clone()
