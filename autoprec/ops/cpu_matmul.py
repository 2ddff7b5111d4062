"""The ``cpu`` implementation of int8 matmuls: quantisation and scaling in C around torch's exact int8 product."""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.ops import native
from autoprec.ops.cpu_casts import cast
from autoprec.ops.reference import int_matmul


def int8_matmul(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`autoprec.ops.int8_matmul` in C around ``torch._int_mm``."""
    rows = cast(x, "int8", granularity="row")
    if x.numel() == 0 or values.numel() == 0:
        return _without_products(x, values, bias)
    assert rows.scale is not None
    sums = int_matmul(rows.values, values.flatten(1).t())
    if bias is not None:
        bias = bias.detach().float().contiguous()
    product = sums.new_empty(sums.shape, dtype=torch.bfloat16)
    failed = native.library().ap_dequantize(
        sums.data_ptr(),
        *sums.shape,
        rows.scale.data_ptr(),
        scale.contiguous().data_ptr(),
        None if bias is None else bias.data_ptr(),
        product.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("There is no memory for the scales of `int8_matmul`.")
    return product


def _without_products(x: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """The result where one of the sizes is zero: zeros, plus the bias."""
    product = x.new_zeros(len(x), len(values), dtype=torch.float32)
    return (product if bias is None else product + bias.detach()).to(torch.bfloat16)
