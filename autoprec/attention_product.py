"""Attention as two matrix products around a softmax, with the precision of torch's fused attention on a CPU.

Scores, softmax and its backward are in float32 whatever the inputs are, as in the fused one; only what enters a product
with values or gradients is rounded to the dtype of the call. Work goes through blocks that stay in the cache. A causal
call leaves out the keys that no row of a block sees.

The probabilities are kept for the backward, which the fused one computes anew. What does not live here: which calls run
this way (``attention``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_F32 = torch.float32
# float32 scores of a block, about what a core has as its own cache
_BLOCK_BYTES = 1024 * 1024
_CAUSAL_ROWS = 128
_NOT_TWICE = (
    "attention on a CPU cannot be differentiated twice, neither by torch's fused kernel nor by matrix products; use"
    " torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
)


class _Sizes(NamedTuple):
    """How a call is cut into blocks: of rows (each with the keys it needs), and of heads over the whole batch."""

    batch: int
    heads: int
    length: int
    keys: int
    is_causal: bool

    @property
    def rows(self) -> int:
        limit = _CAUSAL_ROWS if self.is_causal else max(32, _BLOCK_BYTES // (4 * self.keys))
        return min(limit, self.length)

    def keys_of(self, stop: int) -> int:
        """How many keys the rows before ``stop`` see."""
        return min(stop, self.keys) if self.is_causal else self.keys

    def row_blocks(self) -> Iterator[tuple[int, int, int]]:
        """First row, row after the last one, and number of keys of each block."""
        for start in range(0, self.length, self.rows):
            stop = min(start + self.rows, self.length)
            yield start, stop, self.keys_of(stop)

    def head_blocks(self) -> Iterator[tuple[int, int]]:
        """First head and the one after the last of each block; no block reaches over the end of a sample."""
        limit = max(1, _BLOCK_BYTES // (4 * self.rows * self.keys))
        count = next(size for size in range(min(limit, self.heads), 0, -1) if self.heads % size == 0)
        if count == self.heads:  # whole samples
            count *= max(1, limit // count)
        total = self.batch * self.heads
        return ((start, min(start + count, total)) for start in range(0, total, count))


def _sizes(query: Sequence[int], key: Sequence[int], is_causal: bool) -> _Sizes:
    return _Sizes(query[0], query[1], query[2], key[2], is_causal)


def saved_elements(query: Sequence[int], key: Sequence[int], is_causal: bool) -> int:
    """How many probabilities a call keeps for its backward.

    Args:
        query: Shape ``[batch, heads, length, width]``.
        key: Shape ``[batch, heads, keys, width]``.
        is_causal: As in the call.
    """
    sizes = _sizes(query, key, is_causal)
    return sizes.batch * sizes.heads * sum((stop - start) * keys for start, stop, keys in sizes.row_blocks())


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Computes what ``scaled_dot_product_attention`` computes without dropout.

    Args:
        query: ``[batch, heads, length, width]``, float32 or bfloat16, no size 0.
        key: ``[batch, heads, keys, width]``, of the same dtype.
        value: ``[batch, heads, keys, width]``, of the same dtype.
        mask: bool (True takes part) or floating (added to the scores); broadcasts to ``[batch, heads, length, keys]``.
            It gets no gradient.
        is_causal: Row i sees keys 0 to i only.
        scale: Factor on the scores.

    Returns:
        ``[batch, heads, length, width]``, laid out as the queries are, which is what the fused attention does. Rows
        that see no key are 0.
    """
    output: Tensor = _Attention.apply(query, key, value, mask, is_causal, scale)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        sizes = _sizes(query.shape, key.shape, is_causal)
        with torch.autocast("cpu", enabled=False):
            output, probabilities = _forward(query, key, value, mask, sizes, scale)
        ctx.save_for_backward(query, key, value, *probabilities)
        ctx.sizes, ctx.scale = sizes, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *probabilities = ctx.saved_tensors
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            grads = _backward(grad, query, key, value, probabilities, ctx.sizes, ctx.scale)
        if torch.is_grad_enabled():  # with create_graph
            grads = _NotTwice.apply(4, grad, query, key, value, *grads)  # type: ignore[no-untyped-call]
        return (*grads, None, None, None)


class _NotTwice(torch.autograd.Function):
    """Marks gradients as made from what comes first, and raises when they are differentiated.

    ``once_differentiable`` would cut them off from it, so that who asks for their gradients could get none, silently.
    """

    @staticmethod
    def forward(ctx: Any, sources: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.clone() for each in tensors[sources:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(_NOT_TWICE)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[2:])


def _part(scratch: Tensor, *shape: int) -> Tensor:
    """A piece of memory that is used again and again: fresh pages cost as much as a product."""
    return scratch[: math.prod(shape)].view(shape)


def _scratch(sizes: _Sizes, dtype: torch.dtype) -> Tensor:
    first, stop = next(sizes.head_blocks())
    return torch.empty((stop - first) * sizes.rows * sizes.keys, dtype=dtype)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sizes: _Sizes, scale: float
) -> tuple[Tensor, list[Tensor]]:
    dtype, total = query.dtype, sizes.batch * sizes.heads
    q = _flat(torch.empty(query.shape, dtype=_F32).copy_(query).mul_(scale))
    k, v = _flat(key.float()).transpose(1, 2), _flat(value)
    masks = None if mask is None else _Masks(mask, sizes)
    future = torch.ones(sizes.rows, sizes.rows, dtype=torch.bool).triu_(1) if sizes.is_causal else None
    kept = [torch.empty(total, stop - start, keys, dtype=dtype) for start, stop, keys in sizes.row_blocks()]
    output, scratch = torch.empty(total, sizes.length, v.shape[2], dtype=dtype), _scratch(sizes, _F32)
    for first, last in sizes.head_blocks():
        for (start, stop, keys), whole in zip(sizes.row_blocks(), kept, strict=True):
            p = whole[first:last]
            scores = p if dtype is _F32 else _part(scratch, *p.shape)
            torch.bmm(q[first:last, start:stop], k[first:last, :, :keys], out=scores)
            if future is not None and keys > start:
                scores[:, :, start:].masked_fill_(future[: stop - start, : keys - start], -math.inf)
            if masks is not None:
                masks.apply_(scores, first, start, stop)
            torch.softmax(scores, -1, out=scores)
            if masks is not None:
                masks.blank_(scores, first, start, stop)
            if scores is not p:
                p.copy_(scores)
            output[first:last, start:stop] = torch.bmm(p, v[first:last, :keys])
    return torch.empty_like(query).copy_(output.view(query.shape)), kept


class _Masks:
    """A mask by blocks, and the rows that see nothing."""

    def __init__(self, mask: Tensor, sizes: _Sizes) -> None:
        is_bool = mask.dtype is torch.bool
        mask = ~mask if is_bool else mask.float()
        blank = (mask if is_bool else mask == -math.inf).all(-1, keepdim=True)
        self._is_bool = is_bool
        self._heads = sizes.heads
        self._is_shared = mask.ndim < 3 or mask.shape[:-2].numel() == 1
        self._mask = mask.expand(sizes.batch, sizes.heads, sizes.length, sizes.keys)
        self._blank = blank.expand(sizes.batch, sizes.heads, sizes.length, 1) if bool(blank.any()) else None

    def _of(self, whole: Tensor, count: int, first: int, start: int, stop: int) -> Tensor:
        if self._is_shared:
            return whole[0, :1, start:stop]
        sample, head = divmod(first, self._heads)
        if count <= self._heads:
            return whole[sample, head : head + count, start:stop]
        return whole[sample : sample + count // self._heads, :, start:stop].flatten(0, 1)

    def apply_(self, scores: Tensor, first: int, start: int, stop: int) -> None:
        """Takes hidden keys out of scores ``[heads, rows, keys]``, or adds what the mask holds."""
        block = self._of(self._mask, len(scores), first, start, stop)
        if self._is_bool:
            scores.masked_fill_(block, -math.inf)
        else:
            scores.add_(block)

    def blank_(self, probabilities: Tensor, first: int, start: int, stop: int) -> None:
        """Rows that see nothing are 0, not NaN."""
        if self._blank is not None:
            probabilities.masked_fill_(self._of(self._blank, len(probabilities), first, start, stop), 0.0)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, kept: Sequence[Tensor], sizes: _Sizes, scale: float
) -> tuple[Tensor, ...]:
    dtype = query.dtype
    q, k, v, g = map(_flat, (query, key, value, grad))
    grad_q = torch.empty(q.shape, dtype=dtype)
    # sums over blocks of rows are rounded once; keys that no row sees stay 0
    kind = _F32 if len(kept) > 1 else dtype
    fill = torch.zeros if len(kept) > 1 or sizes.keys_of(sizes.length) < sizes.keys else torch.empty
    grad_k, grad_v = fill(k.shape, dtype=kind), fill(v.shape, dtype=kind)
    low = _scratch(sizes, dtype)
    wide, wide_p = (_scratch(sizes, _F32), _scratch(sizes, _F32)) if dtype is not _F32 else (low, low)
    for first, last in sizes.head_blocks():
        heads = slice(first, last)
        for (start, stop, keys), whole in zip(sizes.row_blocks(), kept, strict=True):
            p, rows = whole[heads], slice(start, stop)
            into_k, into_v = grad_k[heads, :keys], grad_v[heads, :keys]
            _add_product(into_v, p.transpose(1, 2), g[heads, rows], len(kept) > 1)
            grad_s = torch.bmm(g[heads, rows], v[heads, :keys].transpose(1, 2), out=_part(low, *p.shape))
            if dtype is _F32:
                _softmax_backward_(grad_s, p)
            else:
                wide_s, wide_ps = _part(wide, *p.shape).copy_(grad_s), _part(wide_p, *p.shape).copy_(p)
                grad_s.copy_(_softmax_backward_(wide_s, wide_ps).mul_(scale))
            grad_q[heads, rows] = torch.bmm(grad_s, k[heads, :keys])
            _add_product(into_k, grad_s.transpose(1, 2), q[heads, rows], len(kept) > 1)
    if dtype is _F32:
        grad_q.mul_(scale)
        grad_k.mul_(scale)
    shapes = zip((grad_q, grad_k, grad_v), (query, key, value), strict=True)
    return tuple(found.to(dtype).view(each.shape) for found, each in shapes)


def _softmax_backward_(grad: Tensor, probabilities: Tensor) -> Tensor:
    return torch.ops.aten._softmax_backward_data.out(grad, probabilities, -1, _F32, grad_input=grad)  # type: ignore[no-any-return]


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_sum: bool) -> None:
    if not is_sum:
        torch.bmm(left, right, out=total)
    elif total.dtype is left.dtype:
        total.baddbmm_(left, right)
    else:
        total.add_(torch.bmm(left, right))
