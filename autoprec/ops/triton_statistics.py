"""Gradient statistics in one pass over memory and one launch, and the factor that a step multiplies gradients by."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
import triton
import triton.language as tl
from torch import Tensor

from autoprec.ops.statistics import GradStats
from autoprec.ops.triton_plans import Plan, build_linear_plans, cached_plans, is_dense, on_own_device
from autoprec.ops.triton_rounding import BFLOAT16, FLOAT16, FLOAT32, INF, load_float, magnitude_bits

CHUNK = 8192
_WIDTH = tl.constexpr(6)
JOIN_BLOCK = 1024
SMALL_LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
# the counts of a chunk share one int64, so that one reduction serves all four
_COUNT_BITS = tl.constexpr(16)
_COUNT_MASK = tl.constexpr((1 << 16) - 1)
_CODES = {torch.float32: FLOAT32.value, torch.bfloat16: BFLOAT16.value, torch.float16: FLOAT16.value}
_KIND = attrgetter("dtype", "layout")
_PLAIN_KINDS = {(dtype, torch.strided) for dtype in _CODES}


@triton.jit
def chunk_stats_kernel(
    table, chunk_tensors, chunk_starts, amaxes, squares, counts, ALIGNED: tl.constexpr, SIZE: tl.constexpr
):
    """Statistics of one chunk; the sum of squares is taken relative to the chunk's own power of two."""
    chunk = tl.program_id(0).to(tl.int64)
    tensor = tl.load(chunk_tensors + chunk)
    start = tl.load(chunk_starts + chunk)
    row = table + tensor * _WIDTH
    size, address, code = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    tiny = tl.load(row + 3).to(tl.int32).to(tl.float32, bitcast=True)
    tiny_lower = tl.load(row + 4).to(tl.int32).to(tl.float32, bitcast=True)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        start = tl.multiple_of(start, 16)
    offsets = start + tl.arange(0, SIZE)
    values = load_float(address, offsets, offsets < size, code, ALIGNED)
    magnitude = tl.abs(values)
    is_finite = magnitude_bits(values) < INF
    clean = tl.where(is_finite, magnitude, 0.0)
    amax = tl.max(clean, axis=0)
    exponent = tl.minimum(tl.maximum(magnitude_bits(amax) >> 23, 1), 253)
    inv_unit = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
    scaled = clean * inv_unit
    is_nonzero = clean > 0.0
    packed = tl.where(is_finite, 0, 1).to(tl.int64)
    packed += tl.where(is_nonzero & (clean < tiny), 1, 0).to(tl.int64) << _COUNT_BITS
    packed += tl.where(is_nonzero & (clean < tiny_lower), 1, 0).to(tl.int64) << (2 * _COUNT_BITS)
    packed += tl.where(is_nonzero, 1, 0).to(tl.int64) << (3 * _COUNT_BITS)
    tl.store(amaxes + chunk, amax)
    tl.store(squares + chunk, tl.sum(scaled * scaled, axis=0).to(tl.float64) * unit * unit)
    tl.store(counts + chunk, tl.sum(packed, axis=0))


@triton.jit
def tensor_stats_kernel(table, boundaries, amaxes, squares, counts, results, n_tensors, BLOCK: tl.constexpr):
    """Joins the chunks of one tensor, in order, so that the result does not depend on which program ran first."""
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(boundaries + tensor)
    last = tl.load(boundaries + tensor + 1)
    slot = tl.load(table + tensor * _WIDTH + 5)
    lanes = tl.arange(0, BLOCK)
    amax = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float64)
    nonfinite = tl.zeros((BLOCK,), tl.int64)
    below = tl.zeros((BLOCK,), tl.int64)
    below_lower = tl.zeros((BLOCK,), tl.int64)
    nonzero = tl.zeros((BLOCK,), tl.int64)
    for chunk in range(first, last, BLOCK):
        mask = chunk + lanes < last
        amax = tl.maximum(amax, tl.load(amaxes + chunk + lanes, mask=mask, other=0.0))
        square += tl.load(squares + chunk + lanes, mask=mask, other=0.0)
        packed = tl.load(counts + chunk + lanes, mask=mask, other=0)
        nonfinite += packed & _COUNT_MASK
        below += (packed >> _COUNT_BITS) & _COUNT_MASK
        below_lower += (packed >> (2 * _COUNT_BITS)) & _COUNT_MASK
        nonzero += packed >> (3 * _COUNT_BITS)
    tl.store(results + slot, tl.max(amax, axis=0))
    tl.store(results + n_tensors + slot, tl.sqrt(tl.sum(square, axis=0)).to(tl.float32))
    tl.store(results + 2 * n_tensors + slot, tl.sum(nonfinite, axis=0).to(tl.float32))
    count = tl.maximum(tl.sum(nonzero, axis=0), 1).to(tl.float32)
    tl.store(results + 3 * n_tensors + slot, tl.div_rn(tl.sum(below, axis=0).to(tl.float32), count))
    tl.store(results + 4 * n_tensors + slot, tl.div_rn(tl.sum(below_lower, axis=0).to(tl.float32), count))


@triton.jit
def total_stats_kernel(results, n_tensors, BLOCK: tl.constexpr):
    """One program: the norm over all tensors, inf if an entry is not finite."""
    lanes = tl.arange(0, BLOCK)
    square = tl.zeros((BLOCK,), tl.float64)
    nonfinite = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n_tensors, BLOCK):
        mask = first + lanes < n_tensors
        norm = tl.load(results + n_tensors + first + lanes, mask=mask, other=0.0).to(tl.float64)
        square += norm * norm
        nonfinite += tl.load(results + 2 * n_tensors + first + lanes, mask=mask, other=0.0)
    total = tl.sqrt(tl.sum(square, axis=0)).to(tl.float32)
    tl.store(results + 5 * n_tensors, tl.where(tl.sum(nonfinite, axis=0) > 0.0, float("inf"), total))


@triton.jit
def grad_factor_kernel(total_norm, inv_scale, max_norm, result, HAS_SCALE: tl.constexpr):
    """One program: ``inv_scale`` times the clip factor, and found_inf."""
    total = tl.load(total_norm)
    factor = tl.load(inv_scale) if HAS_SCALE else total * 0.0 + 1.0
    clip = tl.minimum(tl.div_rn(tl.zeros_like(total) + max_norm, total * factor + 1e-6), 1.0)
    tl.store(result, factor * clip)
    tl.store(result + 1, tl.where(total < float("inf"), 0.0, 1.0))


def _dense_values(grad: Tensor) -> Tensor:
    values = (grad.coalesce().values() if grad.is_sparse else grad).detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values if values.dtype in _CODES else values.float()
    return values if is_dense(values) else values.contiguous()


@on_own_device
def grad_stats(grads: Sequence[Tensor], tiny: Sequence[float] = (), tiny_lower: Sequence[float] = ()) -> GradStats:
    """Measures gradients; :func:`autoprec.ops.grad_stats` on a GPU. The host does not wait for the device.

    amax, counts and fractions equal the reference's; norms agree within a relative 1e-6. The result does not depend on
    the order in which programs run. One launch covers everything that is aligned to 16 bytes, a second one the rest,
    and two small ones join the chunks.

    Args:
        grads: Dense or sparse gradients of any shape and float dtype, all on one device. float64 is read as float32.
        tiny: For each gradient the magnitude below which a value underflows. Empty for no such count.
        tiny_lower: The same for a second count.
    """
    values = grads if _are_plain(grads) else [_dense_values(grad) for grad in grads]
    device = values[0].device if values else torch.device("cpu")
    # tensors without elements have no chunks: their statistics are zero
    results = torch.zeros(5 * len(values) + 1, dtype=torch.float32, device=device)
    for plan in _plans(values, tiny, tiny_lower) if values else ():
        amaxes = torch.empty(plan.n_chunks, dtype=torch.float32, device=device)
        squares = torch.empty(plan.n_chunks, dtype=torch.float64, device=device)
        counts = torch.empty(plan.n_chunks, dtype=torch.int64, device=device)
        chunk_stats_kernel[(plan.n_chunks,)](
            plan.table,
            plan.chunk_tensors,
            plan.chunk_starts,
            amaxes,
            squares,
            counts,
            ALIGNED=plan.is_aligned,
            SIZE=CHUNK,
            num_warps=8,
            enable_fp_fusion=False,
        )
        tensor_stats_kernel[(plan.n_tensors,)](
            plan.table, plan.boundaries, amaxes, squares, counts, results, len(values), BLOCK=JOIN_BLOCK, **SMALL_LAUNCH
        )
    if values:
        total_stats_kernel[(1,)](results, len(values), BLOCK=JOIN_BLOCK, **SMALL_LAUNCH)
    return GradStats(results)


def _are_plain(grads: Sequence[Tensor]) -> bool:
    return all(map(_PLAIN_KINDS.__contains__, map(_KIND, grads))) and all(map(Tensor.is_contiguous, grads))


def _plans(values: Sequence[Tensor], tiny: Sequence[float], tiny_lower: Sequence[float]) -> tuple[Plan, ...]:
    # few calls for each tensor: this is what the statistics cost the host
    what = tuple(map(Tensor.data_ptr, values)), tuple(map(Tensor.numel, values)), tuple(map(_KIND, values))
    key = ("grad_stats", *what, tuple(tiny), tuple(tiny_lower), values[0].device)
    return cached_plans(key, lambda: _build(values, tiny, tiny_lower))


def _build(values: Sequence[Tensor], tiny: Sequence[float], tiny_lower: Sequence[float]) -> tuple[Plan, ...]:
    limits = zip(_patterns(tiny, values, "tiny"), _patterns(tiny_lower, values, "tiny_lower"), strict=True)
    extra = [(_CODES[v.dtype], *pair, slot) for slot, (v, pair) in enumerate(zip(values, limits, strict=True))]
    return build_linear_plans([values], extra, CHUNK)


def _patterns(limits: Sequence[float], grads: Sequence[Tensor], name: str) -> list[int]:
    """float32 patterns of the limits, which travel in the table of integers."""
    if limits and len(limits) != len(grads):
        raise ValueError(f"Passed `grad_stats` {len(grads)} gradients and {len(limits)} values of `{name}`.")
    values = torch.tensor([*limits] or [0.0] * len(grads), dtype=torch.float32, device="cpu")
    patterns: list[int] = values.view(torch.int32).tolist()
    return patterns


@on_own_device
def grad_factor(total_norm: Tensor, inv_scale: Tensor | None, max_norm: float) -> tuple[Tensor, Tensor]:
    """What a step needs to know about all its gradients, on the device and in one launch.

    Args:
        total_norm: ``[]``, float32. Norm of the raw gradients, still multiplied by the loss scale; inf if an entry is
            not finite.
        inv_scale: 1 / loss scale, ``[]``, float32, or ``None`` for 1.
        max_norm: Clip threshold for the unscaled norm, ``math.inf`` for none.

    Returns:
        ``grad_factor`` = ``inv_scale`` x ``min(1, max_norm / (norm + 1e-6))``, meaningless where ``found_inf`` is set,
        and ``found_inf``; each ``[]``, float32.
    """
    result = torch.empty(2, dtype=torch.float32, device=total_norm.device)
    scale = total_norm if inv_scale is None else inv_scale
    limit = min(max_norm, torch.finfo(torch.float32).max)
    grad_factor_kernel[(1,)](total_norm, scale, limit, result, HAS_SCALE=inv_scale is not None, **SMALL_LAUNCH)
    return result[0], result[1]
