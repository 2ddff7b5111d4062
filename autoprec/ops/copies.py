"""Room for the low-precision copies of weights that a step writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoprec.formats import nearest
from autoprec.ops.reference_steps import WeightCopy, write_copy

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def new_copy(weight: Tensor, format_name: str, *, transposed: bool = True) -> WeightCopy:
    """Allocates a copy of a weight; nothing is written until the next step or :func:`refresh_copies_`.

    Args:
        weight: The weight. int8 takes ``shape[0]`` rows and the rest as columns.
        format_name: ``bf16``, ``fp16``, ``e4m3`` or ``int8``.
        transposed: int8 only: whether there is a second copy, transposed and with its own scales, for the input
            gradient.

    Raises:
        ValueError: If there is no such copy.
    """
    if format_name not in DTYPES:
        raise ValueError(
            f"Passed `new_copy(weight, {format_name!r})`. Known formats of copies: {sorted(DTYPES)}."
            f"{nearest(format_name, DTYPES)}"
        )
    weight = weight.detach()
    values = torch.empty_like(weight, dtype=DTYPES[format_name])
    if format_name in ("bf16", "fp16"):
        return WeightCopy(format_name, values)
    if format_name == "e4m3":
        return WeightCopy(format_name, values, weight.new_empty(()))
    rows = weight.shape[0]
    cols = weight.shape[1:].numel()
    scale = weight.new_empty(rows, 1)
    if not transposed:
        return WeightCopy(format_name, values, scale)
    return WeightCopy(format_name, values, scale, values.new_empty(cols, rows), weight.new_empty(cols, 1))


def write_copies(params: Sequence[Tensor], copies: Sequence[WeightCopy | None]) -> None:
    """Writes the copies of weights as they are; :func:`autoprec.ops.refresh_copies_` in eager PyTorch."""
    for param, copy in zip(params, copies, strict=True):
        if copy is not None:
            write_copy(param, copy)
