"""The ``cpu`` implementation of casts: to and from every format, and rounding in place of a real cast."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from autoprec.ops import native
from autoprec.ops.cpu import MEASURED
from autoprec.ops.reference_casts import FORMATS, Cast, block_shape

_FORMAT_CODES = {
    "bf16": native.BF16,
    "fp16": native.FP16,
    "tf32": native.TF32,
    "e4m3": native.E4M3,
    "e5m2": native.E5M2,
    "int8": native.INT8,
}
_MASK64 = 2**64 - 1


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
    """Rounds a tensor to a narrow format; :func:`autoprec.ops.cast` in C, equal to the reference bit for bit."""
    x = _readable(x)
    rows, cols = _matrix_shape(x)
    block = block_shape(granularity, rows, cols)
    number_format = FORMATS[format_name]
    values = x.new_empty(x.shape, dtype=number_format.dtype)
    scales = _block_table(granularity, block, rows, cols)
    has_amax = granularity is not None or with_amax
    amaxes = None if not has_amax else _float32_zeros() if scales is None else scales.clone()
    random = None if seed is None else (ctypes.c_uint64 * 2)(seed & _MASK64, offset & _MASK64)
    native.library().ap_cast(
        x.data_ptr(),
        MEASURED[x.dtype],
        rows,
        cols,
        *block,
        _FORMAT_CODES[format_name],
        saturate or scales is not None,
        1.0 if scale is None else float(scale),
        random,
        values.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if amaxes is None else amaxes.data_ptr(),
        torch.get_num_threads(),
    )
    return Cast(values, scale if scales is None else scales, amaxes)


def restore(values: Tensor, scale: Tensor | None = None, *, granularity: str | None = None) -> Tensor:
    """Back to float32: ``values / scale``; :func:`autoprec.ops.restore` in C."""
    values = values.detach().contiguous()
    rows, cols = _matrix_shape(values)
    block = block_shape(granularity, rows, cols)
    scales = _float32_zeros().fill_(1.0) if scale is None else scale.contiguous()
    restored = values.new_empty(values.shape, dtype=torch.float32)
    native.library().ap_restore(
        values.data_ptr(),
        native.CODES[values.dtype],
        rows,
        cols,
        *block,
        scales.data_ptr(),
        restored.data_ptr(),
        torch.get_num_threads(),
    )
    return restored


def fake_cast(x: Tensor, exponent_bits: Tensor, mantissa_bits: Tensor, is_finite_only: Tensor) -> Tensor:
    """Rounds each row of a stacked tensor to its own format; :func:`autoprec.ops.fake_cast` in C."""
    x = x.detach().contiguous()
    formats = [column.contiguous() for column in (exponent_bits.long(), mantissa_bits.long(), is_finite_only.bool())]
    rounded = torch.empty_like(x)
    native.library().ap_fake_cast(
        x.data_ptr(),
        len(x),
        x[0].numel() if len(x) else 0,
        *(column.data_ptr() for column in formats),
        rounded.data_ptr(),
        torch.get_num_threads(),
    )
    return rounded


def _readable(x: Tensor) -> Tensor:
    """A contiguous tensor in a dtype that the kernel reads."""
    x = x.detach()
    return (x if x.dtype in MEASURED else x.float()).contiguous()


def _matrix_shape(x: Tensor) -> tuple[int, int]:
    if x.numel() == 0:
        return 0, 1
    cols = x.shape[-1] if x.ndim else 1
    return x.numel() // cols, cols


def _block_table(granularity: str | None, block: tuple[int, int], rows: int, cols: int) -> Tensor | None:
    """Room for one number for each block."""
    if granularity is None:
        return None
    if granularity == "tensor":
        return _float32_zeros()
    return _float32_zeros(-(-rows // block[0]), -(-cols // block[1]))


def _float32_zeros(*shape: int) -> Tensor:
    """Memory for the kernel, whatever default dtype and device the user has set."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")
