"""Float32 linear layers on oneDNN's matrix products, which on some CPUs are twice as fast as those of MKL.

Torch reaches oneDNN's float32 products only through a process-wide flag that also permits bfloat16 arithmetic. The
operation that the compiler uses for linear layers calls them without a flag, so nothing is set that another thread
could see, and the arithmetic stays float32 unless the user's own flag permits less.

oneDNN adds up long sums in one go, which costs accuracy: they are cut into pieces here. What does not live here:
whether it pays (a calibration decides) and when a layer runs this way (``runners``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

# sums of 512 products are within 1.7 times MKL's error, those of 2048 are at 2.3 times
_PIECE = 512
_PLAIN = (Tensor, nn.Parameter)
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def is_available() -> bool:
    """Whether this build of torch has the operation, on a CPU."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def can_run(x: Any, weight: Any, bias: Any) -> bool:
    """Whether a call is one that behaves as torch's own in everything but its rounding.

    Args:
        x: What the layer was called with.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or ``None``.
    """
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or type(bias) not in (*_PLAIN, type(None)):
        return False
    if x.dtype not in _INPUTS or x.layout is not torch.strided or x.is_nested or not x.is_cpu or not weight.is_cpu:
        return False
    if weight.dtype is not torch.float32 or not weight.is_contiguous():
        return False
    if bias is not None and bias.dtype is not torch.float32:
        return False
    if x.ndim < 1 or x.numel() == 0 or weight.numel() == 0 or x.shape[-1] != weight.shape[1]:
        return False
    return not is_watched()


def is_watched() -> bool:
    """Whether operations are counted, replaced or differentiated forward: then torch's own must be what runs."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch.autograd.forward_ad._current_level >= 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``torch.nn.functional.linear`` on oneDNN's float32 products, for calls that :func:`can_run` accepts.

    Args:
        x: ``[..., in_features]``, floating point. Widened to float32 first.
        weight: ``[out_features, in_features]``, float32.
        bias: ``[out_features]``, float32, or ``None``.

    Returns:
        ``[..., out_features]``, float32.
    """
    rows = x.float().reshape(-1, x.shape[-1])
    y: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled():  # with create_graph: products that can be differentiated once more
            with torch.autocast("cpu", enabled=False):
                grad_x = grad @ weight if needs_x else None
                grad_weight = grad.t() @ x if needs_weight else None
        else:
            grad_x = product(grad, weight.t()) if needs_x else None
            grad_weight = product(grad.t(), x.t()) if needs_weight else None
        return grad_x, grad_weight, grad.sum(0) if needs_bias else None


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """``left @ right.T + bias`` by oneDNN.

    Args:
        left: ``[rows, inner]``, float32.
        right: ``[cols, inner]``, float32, contiguous or the transpose of what is contiguous.
        bias: ``[cols]``, float32.
    """
    inner = left.shape[1]
    whole = torch.ops.mkldnn._linear_pointwise
    if inner <= _PIECE:
        total: Tensor = whole(left, right, bias, "none", [], "")
        return total
    total = whole(left[:, :_PIECE], _piece(right, 0), bias, "none", [], "")
    for start in range(_PIECE, inner, _PIECE):
        total = whole.binary(left[:, start : start + _PIECE], total, _piece(right, start), None, "add")
    return total


def _piece(right: Tensor, start: int) -> Tensor:
    """A piece as oneDNN reads it fast: rows with gaps between them take it a hundred times as long."""
    piece = right[:, start : start + _PIECE]
    return piece if piece.t().is_contiguous() else piece.contiguous()
