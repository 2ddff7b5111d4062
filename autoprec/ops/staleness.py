"""Finds low-precision copies that are no longer what their weights would give, in eager PyTorch.

Nothing tells about a write to a weight through ``.data``, so that what a step knows of its copies has to be compared
with the weights now and then: all of it, or a few entries of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from autoprec.ops.reference import INT8_MAX
from autoprec.ops.reference_random import random_words
from autoprec.ops.reference_steps import WeightCopy

# the stream of random words that places are drawn from; no step gets there
OFFSET = 1 << 63
_E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
# half a step beyond the largest value: what is scaled to there would have had another scale
_LIMITS = {"int8": INT8_MAX + 0.5, "e4m3": _E4M3_MAX + 16}


def first_stale(params: Sequence[Tensor], copies: Sequence[WeightCopy | None], samples: int, seed: int) -> int | None:
    """Compares some entries of each weight with its copy; :meth:`PreparedStep.stale` for ``samples >= 1``."""
    for position, (param, copy) in enumerate(zip(params, copies, strict=True)):
        if copy is not None and param.numel():
            places = sampled_places(position, param.numel(), samples, seed).to(param.device)
            if not _is_current(param.detach(), copy, places):
                return position
    return None


def sampled_places(position: int, size: int, samples: int, seed: int) -> Tensor:
    """Where the tensor at a position of a list is looked at: ``[samples]``, int64, in the order of its memory."""
    words = random_words(seed, OFFSET, 2 * samples * position + torch.arange(2 * samples)).view(samples, 2)
    return (((words[:, 0] & 0x7FFFFFFF) << 32) | words[:, 1]) % size


def first_different(
    params: Sequence[Tensor],
    copies: Sequence[WeightCopy | None],
    write: Callable[[Sequence[Tensor], Sequence[WeightCopy | None]], None],
) -> int | None:
    """Makes all copies again, one at a time, and returns the position of the first that comes out differently."""
    for position, (param, copy) in enumerate(zip(params, copies, strict=True)):
        if copy is not None:
            values, *others = copy.tensors
            empty = (None if tensor is None else torch.empty_like(tensor) for tensor in others)
            fresh = WeightCopy(copy.format, torch.empty_like(values), *empty)
            write([param], [fresh])
            pairs = zip(copy.tensors, fresh.tensors, strict=True)
            if not all(_is_same(old, new) for old, new in pairs if old is not None and new is not None):
                return position
    return None


def _is_current(weight: Tensor, copy: WeightCopy, places: Tensor) -> bool:
    # rows of int8 are those of a contiguous matrix
    order = list(range(weight.ndim)) if copy.format == "int8" else _memory_order(weight)
    entries, stored = (tensor.permute(order).reshape(-1)[places] for tensor in (weight, copy.values))
    if copy.scale is not None:
        row = places // (weight.numel() // copy.scale.numel())
        entries = entries * copy.scale.reshape(-1)[row]
        if bool((entries.abs() >= _LIMITS[copy.format]).any()):
            return False
    if copy.format == "int8":
        entries = entries.round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0)
    if copy.format == "e4m3":
        entries = entries.clamp(-_E4M3_MAX, _E4M3_MAX)
    return _is_same(stored, entries.to(stored.dtype))


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same, any NaN like any other."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    a, b = a.float(), b.float()
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


def _memory_order(x: Tensor) -> list[int]:
    """Dimensions from the one that memory changes last to the one that it changes first."""
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda dimension: -strides[dimension])
