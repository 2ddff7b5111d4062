"""Casts on a GPU: to and from narrow formats with scales of every granularity, and the proxies' rounding of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoprec.ops.reference import is_fp8_native
from autoprec.ops.reference_casts import FORMATS, Cast, block_shape
from autoprec.ops.triton_plans import as_int64, on_own_device
from autoprec.ops.triton_rounding import (
    BFLOAT16,
    E4M3,
    E5M2,
    FLOAT16,
    FLOAT32,
    INF,
    INT8,
    TF32,
    e4m3_to_float16,
    e5m2_to_float16,
    encode,
    magnitude_bits,
    random_at,
    random_run,
    scale_of,
)

CHUNK = 4096
LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}
_INPUT_CODES = {torch.float32: FLOAT32.value, torch.bfloat16: BFLOAT16.value, torch.float16: FLOAT16.value}
_FORMAT_CODES = {
    "bf16": BFLOAT16.value,
    "fp16": FLOAT16.value,
    "e4m3": E4M3.value,
    "e5m2": E5M2.value,
    "int8": INT8.value,
    "tf32": TF32.value,
}
# what kernels load and store instead: patterns
_READ = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
_WRITTEN = {**_READ, torch.float16: torch.uint16}


@triton.jit
def _as_float32(raw, INPUT: tl.constexpr):
    """Widens what was loaded; bfloat16 travels as a pattern, which the interpreter's casts would not keep."""
    if INPUT == BFLOAT16:
        return (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float32)


@triton.jit
def amax_kernel(x, amax, size, INPUT: tl.constexpr, SIZE: tl.constexpr):
    """Raises a tensor's amax by what one chunk holds; patterns of magnitudes are ordered as integers, NaN on top."""
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = _as_float32(tl.load(x + offsets, mask=offsets < size, other=0), INPUT)
    tl.atomic_max(amax, tl.max(magnitude_bits(values), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["seed", "offset"])
def cast_flat_kernel(
    x, y, scale, amax, size, seed: tl.int64, offset: tl.int64, INPUT: tl.constexpr, FORMAT: tl.constexpr,
    SCALING: tl.constexpr, HAS_AMAX: tl.constexpr, SATURATE: tl.constexpr, IS_STOCHASTIC: tl.constexpr,
    NATIVE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Casts one chunk with one scale for the tensor or none.

    ``SCALING`` is ``"none"``, ``"given"``, or ``"current"``: the scale follows from the amax, which is complete, and is
    stored for the caller. With ``HAS_AMAX`` this pass raises the amax itself.
    """
    start = tl.program_id(0).to(tl.int64) * SIZE
    offsets = start + tl.arange(0, SIZE)
    mask = offsets < size
    values = _as_float32(tl.load(x + offsets, mask=mask, other=0), INPUT)
    if HAS_AMAX:
        tl.atomic_max(amax, tl.max(magnitude_bits(values), axis=0), sem="relaxed")
    if SCALING == "given":
        values = values * tl.load(scale)
    if SCALING == "current":
        factor = scale_of(tl.load(amax).to(tl.float32, bitcast=True), FORMAT)
        values = values * factor
        if start == 0:
            tl.store(scale, factor)
    random = random_run(seed, offset, start, SIZE) if IS_STOCHASTIC else 0
    tl.store(y + offsets, encode(values, random, FORMAT, SATURATE, IS_STOCHASTIC, NATIVE), mask=mask)


@triton.jit(do_not_specialize=["seed", "offset"])
def cast_blocks_kernel(
    x, y, scales, amaxes, rows, cols, width, seed: tl.int64, offset: tl.int64, INPUT: tl.constexpr,
    FORMAT: tl.constexpr, SATURATE: tl.constexpr, IS_STOCHASTIC: tl.constexpr, NATIVE: tl.constexpr,
    IS_SQUARE: tl.constexpr, IS_SINGLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Casts ``ROWS`` rows of one block column: each row has its own scale, or with ``IS_SQUARE`` the tile has one.

    A block is ``width`` columns wide. With ``IS_SINGLE`` it fits the tile and is read once, else twice.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    first = block * width
    last = tl.minimum(first + width, cols)
    lanes = tl.arange(0, COLS)
    row_mask = (row < rows)[:, None]
    starts = (row * cols)[:, None]
    magnitude = tl.zeros((ROWS, COLS), tl.int32)
    values = tl.zeros((ROWS, COLS), tl.float32)
    for col in range(first, last, COLS):
        places = col + lanes
        raw = tl.load(x + starts + places[None, :], mask=row_mask & (places < last)[None, :], other=0)
        values = _as_float32(raw, INPUT)
        magnitude = tl.maximum(magnitude, magnitude_bits(values))
    amax = tl.max(magnitude, axis=1)
    if IS_SQUARE:
        amax = tl.zeros_like(amax) + tl.max(amax, axis=0)
    amax = amax.to(tl.float32, bitcast=True)
    scale = scale_of(amax, FORMAT)
    for col in range(first, last, COLS):
        places = col + lanes
        mask = row_mask & (places < last)[None, :]
        if not IS_SINGLE:
            values = _as_float32(tl.load(x + starts + places[None, :], mask=mask, other=0), INPUT)
        random = random_at(seed, offset, starts + places[None, :]) if IS_STOCHASTIC else 0
        bits = encode(values * scale[:, None], random, FORMAT, SATURATE, IS_STOCHASTIC, NATIVE)
        tl.store(y + starts + places[None, :], bits, mask=mask)
    down = row // ROWS if IS_SQUARE else row
    slot = down * tl.num_programs(1) + block
    # of a square block only the first row speaks
    is_owner = (row < rows) & (row % ROWS == 0) if IS_SQUARE else row < rows
    tl.store(scales + slot, scale, mask=is_owner)
    tl.store(amaxes + slot, amax, mask=is_owner)


@triton.jit
def restore_kernel(
    x, y, scales, size, cols, down, across, n_across, FORMAT: tl.constexpr, HAS_SCALE: tl.constexpr,
    IS_FLAT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Brings one chunk back to float32."""
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < size
    raw = tl.load(x + offsets, mask=mask, other=0)
    if FORMAT == E4M3:
        values = e4m3_to_float16(raw).to(tl.float32)
    elif FORMAT == E5M2:
        values = e5m2_to_float16(raw).to(tl.float32)
    else:
        values = _as_float32(raw, FORMAT)
    if HAS_SCALE:
        if IS_FLAT:
            scale = tl.zeros((SIZE,), tl.float32) + tl.load(scales)
        else:
            place = offsets // cols // down * n_across + offsets % cols // across
            scale = tl.load(scales + place, mask=mask, other=1.0)
        values = tl.div_rn(values, scale)
    tl.store(y + offsets, values, mask=mask)


@triton.jit
def fake_cast_kernel(x, y, exponent_bits, mantissa_bits, is_finite_only, cols, SIZE: tl.constexpr):
    """Rounds one chunk of one row to the row's format."""
    row = tl.program_id(1).to(tl.int64)
    exponent_width = tl.load(exponent_bits + row).to(tl.int32)
    mantissa_width = tl.load(mantissa_bits + row).to(tl.int32)
    is_finite = tl.load(is_finite_only + row).to(tl.int32)
    min_exponent = 129 - (1 << (exponent_width - 1))
    # patterns of float32: the largest number, and what follows it
    top = ((1 << exponent_width) - 2 + min_exponent - 1 + is_finite) << 23
    largest = top + (((1 << mantissa_width) - 1 - is_finite) << (23 - mantissa_width))
    past = tl.where(is_finite == 1, largest, INF)
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < cols
    values = tl.load(x + row * cols + offsets, mask=mask, other=0.0)
    magnitude = magnitude_bits(values)
    exponent = magnitude >> 23
    significand = tl.where(exponent > 0, (magnitude & 0x7FFFFF) | 0x800000, magnitude)
    exponent = tl.maximum(exponent, 1)
    dropped = tl.minimum(23 - mantissa_width + tl.maximum(min_exponent - exponent, 0), 25)
    half_below = (1 << tl.maximum(dropped - 1, 0)) - 1
    kept = (significand + half_below + ((significand >> dropped) & 1)) >> dropped
    rounded = tl.where(kept > 0, ((exponent - 1) << 23) + (kept << dropped), 0)
    # nothing is dropped from float32 itself
    rounded = tl.where(dropped > 0, rounded, magnitude)
    rounded = tl.where(rounded > largest, past, rounded)
    rounded = tl.where(magnitude > INF, magnitude, rounded)
    sign = values.to(tl.uint32, bitcast=True) & 0x80000000
    tl.store(y + row * cols + offsets, (rounded.to(tl.uint32) | sign).to(tl.float32, bitcast=True), mask=mask)


@on_own_device
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
    """Rounds a tensor to a narrow format; see :func:`autoprec.ops.reference_casts.cast`, equal bit for bit.

    One launch, two with a scale that follows from the whole tensor. Rows longer than 4096 are read twice. The host
    never waits for the device.

    Args:
        x: Any shape, float32, bfloat16 or float16; another dtype is read as float32.
        format_name: ``bf16``, ``fp16``, ``tf32``, ``e4m3``, ``e5m2`` or ``int8``.
        granularity: ``tensor``, ``row``, ``1x128`` or ``128x128``; ``None`` for no scale or the one that is passed.
        scale: ``[]``, float32: a scale known beforehand.
        saturate: Too large becomes the largest value, not infinity. What its own amax scales saturates always.
        seed: Rounds stochastically with the random words of this seed.
        offset: Place in the stream of random words.
        with_amax: Returns the amax even without a granularity, as a by-product of the same launch.
    """
    code = _FORMAT_CODES[format_name]
    x = (x if x.dtype in _INPUT_CODES else x.float()).detach().contiguous()
    values = torch.empty_like(x, dtype=FORMATS[format_name].dtype)
    cols = x.shape[-1] if x.ndim and x.numel() else 1
    rows = x.numel() // cols
    flags = {
        "INPUT": _INPUT_CODES[x.dtype],
        "FORMAT": code,
        "SATURATE": saturate or granularity is not None,
        "IS_STOCHASTIC": seed is not None,
        "NATIVE": is_fp8_native(x.device),
        **LAUNCH,
    }
    random = (as_int64(seed or 0), as_int64(offset))
    if granularity not in (None, "tensor"):
        return _cast_blocks(x, values, block_shape(granularity, rows, cols), (rows, cols), random, flags)
    is_current = granularity is not None
    amax = torch.zeros((), dtype=torch.float32, device=x.device) if is_current or with_amax else None
    if is_current:
        scale = torch.empty((), dtype=torch.float32, device=x.device)
    pointers = (
        x.view(_READ.get(x.dtype, x.dtype)),
        values.view(_WRITTEN.get(values.dtype, values.dtype)),
        values if scale is None else scale,
        _pattern(amax, x),
    )
    grid = (max(triton.cdiv(x.numel(), CHUNK), 1),)
    if is_current:
        amax_kernel[grid](pointers[0], pointers[3], x.numel(), INPUT=flags["INPUT"], SIZE=CHUNK, **LAUNCH)
    cast_flat_kernel[grid](
        *pointers,
        x.numel(),
        *random,
        SCALING="current" if is_current else "none" if scale is None else "given",
        HAS_AMAX=with_amax and not is_current,
        SIZE=CHUNK,
        **flags,
    )
    return Cast(values, scale, amax)


def _cast_blocks(
    x: Tensor,
    values: Tensor,
    block: tuple[int, int],
    shape: tuple[int, int],
    random: tuple[int, int],
    flags: dict[str, int],
) -> Cast:
    (rows, cols), (down, across) = shape, block
    is_square = down > 1
    tile_cols = min(triton.next_power_of_2(across), CHUNK)
    tile_rows = down if is_square else max(CHUNK // tile_cols, 1)
    grid = (triton.cdiv(rows, tile_rows), triton.cdiv(cols, across))
    scales = torch.empty(triton.cdiv(rows, down), grid[1], dtype=torch.float32, device=x.device)
    amaxes = torch.empty_like(scales)
    if rows:
        cast_blocks_kernel[grid](
            x.view(_READ.get(x.dtype, x.dtype)),
            values.view(_WRITTEN.get(values.dtype, values.dtype)),
            scales,
            amaxes,
            rows,
            cols,
            across,
            *random,
            IS_SQUARE=is_square,
            IS_SINGLE=across <= tile_cols,
            ROWS=tile_rows,
            COLS=tile_cols,
            **flags,
        )
    return Cast(values, scales, amaxes)


@on_own_device
def restore(values: Tensor, scale: Tensor | None = None, *, granularity: str | None = None) -> Tensor:
    """Back to float32: ``values / scale``; see :func:`autoprec.ops.reference_casts.restore`, equal bit for bit."""
    values = values.detach().contiguous()
    cols = values.shape[-1] if values.ndim and values.numel() else 1
    down, across = block_shape(granularity, values.numel() // cols, cols)
    restored = torch.empty_like(values, dtype=torch.float32)
    names = {number_format.dtype: name for name, number_format in FORMATS.items()}
    restore_kernel[(max(triton.cdiv(values.numel(), CHUNK), 1),)](
        values.view(_READ.get(values.dtype, values.dtype)),
        restored,
        restored if scale is None else scale.contiguous(),
        values.numel(),
        cols,
        down,
        across,
        triton.cdiv(cols, across),
        FORMAT=_FORMAT_CODES[names[values.dtype]],
        HAS_SCALE=scale is not None,
        IS_FLAT=granularity in (None, "tensor"),
        SIZE=CHUNK,
        **LAUNCH,
    )
    return restored


@on_own_device
def fake_cast(x: Tensor, exponent_bits: Tensor, mantissa_bits: Tensor, is_finite_only: Tensor) -> Tensor:
    """Rounds each row of a stacked tensor to its own format; see :func:`autoprec.ops.reference_casts.fake_cast`.

    Equal bit for bit; one launch.

    Args:
        x: ``[n, ...]``, float32.
        exponent_bits: ``[n]``, int64, from 2 to 8.
        mantissa_bits: ``[n]``, int64, from 1 to 23.
        is_finite_only: ``[n]``, bool.
    """
    x = x.detach().contiguous()
    rounded = torch.empty_like(x)
    if x.numel():
        cols = x.numel() // len(x)
        fake_cast_kernel[(triton.cdiv(cols, CHUNK), len(x))](
            x,
            rounded,
            exponent_bits.to(torch.int64).contiguous(),
            mantissa_bits.to(torch.int64).contiguous(),
            is_finite_only.to(torch.uint8).contiguous(),
            cols,
            SIZE=CHUNK,
            **LAUNCH,
        )
    return rounded


def _pattern(amax: Tensor | None, other: Tensor) -> Tensor:
    return other if amax is None else amax.view(torch.int32)
