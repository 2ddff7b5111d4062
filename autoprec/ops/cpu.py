"""The ``cpu`` implementation of what looks at gradients: argument checks, pointer arrays, calls into the C library."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from operator import attrgetter

import torch
from torch import Tensor

from autoprec.ops import native
from autoprec.ops.statistics import GradStats, values_of

MEASURED = {torch.float32: native.FP32, torch.bfloat16: native.BF16, torch.float16: native.FP16}
_IS_CPU = attrgetter("is_cpu")


def grad_stats(grads: Sequence[Tensor], tiny: Sequence[float] = (), tiny_lower: Sequence[float] = ()) -> GradStats:
    """Measures gradients in one pass; :func:`autoprec.ops.grad_stats` in C.

    ``amax``, counts and fractions equal the reference bit for bit; norms are sums of float32 squares over short ranges,
    added in float64, within 1e-6 of the exact value and the same for any number of threads and any instruction set.
    """
    count = len(grads)
    codes = codes_of(grads)
    if codes is None:
        grads = [_measurable(grad) for grad in grads]
        codes = bytes(MEASURED[grad.dtype] for grad in grads)
    pointers = array("Q", map(Tensor.data_ptr, grads))
    sizes = array("q", map(Tensor.numel, grads))
    limits, lower = _floats(tiny, count, "tiny"), _floats(tiny_lower, count, "tiny_lower")
    table = torch.empty(5 * count + 1, dtype=torch.float32, device="cpu")
    failed = native.library().ap_grad_stats(
        count,
        pointers.buffer_info()[0],
        sizes.buffer_info()[0],
        codes,
        limits.buffer_info()[0],
        lower.buffer_info()[0],
        table.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("There is no memory for the intermediate sums of `grad_stats`.")
    return GradStats(table)


def codes_of(grads: Sequence[Tensor]) -> bytes | None:
    """The library's codes of the dtypes, ``None`` unless the kernels can read every tensor as it is."""
    try:  # on the way of every step: as few calls for each tensor as can be
        codes = bytes([MEASURED[grad.dtype] for grad in grads])
        is_readable = all(map(_IS_CPU, grads)) and all(map(Tensor.is_contiguous, grads))
    except (KeyError, RuntimeError):  # another dtype, or sparse, which has no contiguity
        return None
    return codes if is_readable else None


def _floats(values: Sequence[float], count: int, name: str) -> array[float]:
    if not values:
        return _zeros(count)
    if len(values) != count:
        raise ValueError(f"Passed `grad_stats` {count} gradients and {len(values)} values of `{name}`.")
    return array("f", values)


@cache
def _zeros(count: int) -> array[float]:
    return array("f", bytes(4 * count))


def _measurable(grad: Tensor) -> Tensor:
    """A contiguous CPU tensor with the same entries in a dtype that the kernel reads."""
    if not grad.is_cpu:
        raise ValueError(f"Passed `grad_stats` a gradient on {grad.device}. `cpu` needs CPU tensors.")
    values = values_of(grad).detach()
    return (values if values.dtype in MEASURED else values.float()).contiguous()
