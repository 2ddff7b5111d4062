"""Optimizer steps in eager PyTorch, the specification of the fused ones: update, moments and weight copies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoprec.formats import BF16, FP16
from autoprec.ops.reference import quantize_rows, quantize_tensor
from autoprec.ops.reference_random import random_words, round_stochastic

_SIXTEEN_BIT = {torch.bfloat16: BF16, torch.float16: FP16}
# a tensor's random words start at a multiple of this, so that vectors of them never straddle two tensors
STREAM_MULTIPLE = 64


@dataclass(frozen=True)
class WeightCopy:
    """Low-precision copy of a weight, written in the pass that updates the weight.

    Attributes:
        format: ``"bf16"``, ``"fp16"``, ``"e4m3"`` or ``"int8"``.
        values: Shape of the weight, in the format's dtype.
        scale: e4m3: ``[]``; int8: ``[rows, 1]``; float32. A weight has ``shape[0]`` rows.
        transposed_values: int8: ``[cols, rows]``, what the input gradient reads, or ``None``.
        transposed_scale: int8: ``[cols, 1]``.
    """

    format: str
    values: Tensor
    scale: Tensor | None = None
    transposed_values: Tensor | None = None
    transposed_scale: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Values, scale, transposed values and transposed scale."""
        return self.values, self.scale, self.transposed_values, self.transposed_scale


def write_copy(param: Tensor, copy: WeightCopy) -> None:
    """Writes the low-precision copy of a weight."""
    if copy.format in ("bf16", "fp16"):
        copy.values.copy_(param)
        return
    assert copy.scale is not None
    if copy.format == "e4m3":
        values, scale = quantize_tensor(param, torch.float8_e4m3fn)
        copy.values.copy_(values)
        copy.scale.copy_(scale.reshape(copy.scale.shape))
        return
    matrix = param.detach().reshape(len(param), param.shape[1:].numel())
    values, scale = quantize_rows(matrix)
    copy.values.copy_(values.reshape(copy.values.shape))
    copy.scale.copy_(scale.reshape(copy.scale.shape))
    if copy.transposed_values is not None:
        assert copy.transposed_scale is not None
        values, scale = quantize_rows(matrix.t())
        copy.transposed_values.copy_(values)
        copy.transposed_scale.copy_(scale.reshape(copy.transposed_scale.shape))


def stream_starts(sizes: Sequence[int]) -> list[int]:
    """Where each tensor of a list begins in a call's stream of random words."""
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // STREAM_MULTIPLE) * STREAM_MULTIPLE
    return starts


def _places(tensor: Tensor) -> Tensor:
    """Where each element lies in memory, in a tensor that fills one block: its random word goes by that."""
    places = torch.empty_like(tensor, dtype=torch.int64)
    places.as_strided((tensor.numel(),), (1,)).copy_(torch.arange(tensor.numel(), device=tensor.device))
    return places


def _scaled(grad: Tensor, grad_factor: float | Tensor, maximize: bool) -> Tensor:
    grad = grad.detach().float() * grad_factor
    return -grad if maximize else grad


def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
    grad_factor: float | Tensor = 1.0,
    copies: Sequence[WeightCopy | None] | None = None,
    found_inf: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> None:
    """One step of Adam or AdamW on every parameter, in place.

    Args:
        params: float32.
        grads: float32, bfloat16 or float16, shapes of ``params``.
        exp_avgs: First moments, float32.
        exp_avg_sqs: Second moments, float32, or bfloat16 or float16 with stochastic rounding.
        steps: ``[]``, float32: applied steps so far. Counts this one too.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights.
        decoupled: Decays weights as AdamW does, not through the gradient.
        maximize: Steps uphill.
        grad_factor: Multiplies gradients before anything else: ``inv_scale`` times the clip factor. A number or ``[]``.
        copies: Copies to write, one entry for each parameter.
        found_inf: ``[]``, float32. Nothing is written, steps included, where it is not zero.
        seed: Of the random bits for 16-bit second moments.
        offset: Place in the stream of random bits; never the same twice.
    """
    if found_inf is not None and bool(found_inf):
        return
    starts = stream_starts([param.numel() for param in params])
    for i, (param, grad, exp_avg, exp_avg_sq, step) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    ):
        step += 1
        count = float(step)
        scaled, weight = _scaled(grad, grad_factor, maximize), param.detach()
        if decoupled:
            weight.mul_(1 - lr * weight_decay)
        elif weight_decay:
            scaled = scaled.add(weight, alpha=weight_decay)
        exp_avg.lerp_(scaled, 1 - beta1)
        moment = exp_avg_sq.float().mul(beta2).addcmul(scaled, scaled, value=1 - beta2)
        denominator = (moment.sqrt() / math.sqrt(1 - beta2**count)).add_(eps)
        weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**count))
        if exp_avg_sq.dtype in _SIXTEEN_BIT:
            words = random_words(seed, offset, starts[i] + _places(exp_avg_sq))
            # infinity would never come back down
            moment = round_stochastic(moment, _SIXTEEN_BIT[exp_avg_sq.dtype], words, saturate=True)
        exp_avg_sq.copy_(moment)
        _write(param, copies, i)


def fused_sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    is_first: bool = False,
    grad_factor: float | Tensor = 1.0,
    copies: Sequence[WeightCopy | None] | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One step of SGD on every parameter, in place.

    Args:
        params: float32.
        grads: float32, bfloat16 or float16, shapes of ``params``.
        momentum_buffers: float32, or ``None`` without momentum.
        lr: Learning rate.
        momentum: Decay of the buffers.
        dampening: Share of the gradient that does not enter the buffers.
        weight_decay: Decay of the weights through the gradient.
        nesterov: Looks ahead by the momentum.
        maximize: Steps uphill.
        is_first: The buffers hold nothing yet and become the gradient.
        grad_factor: As for :func:`fused_adam_`.
        copies: As for :func:`fused_adam_`.
        found_inf: As for :func:`fused_adam_`.
    """
    if found_inf is not None and bool(found_inf):
        return
    buffers: Sequence[Tensor | None] = [None] * len(params) if momentum_buffers is None else momentum_buffers
    for i, (param, grad, buffer) in enumerate(zip(params, grads, buffers, strict=True)):
        scaled, weight = _scaled(grad, grad_factor, maximize), param.detach()
        if weight_decay:
            scaled = scaled.add(weight, alpha=weight_decay)
        if buffer is not None:
            if is_first:
                buffer.copy_(scaled)
            else:
                buffer.mul_(momentum).add_(scaled, alpha=1 - dampening)
            scaled = scaled.add(buffer, alpha=momentum) if nesterov else buffer
        weight.add_(scaled, alpha=-lr)
        _write(param, copies, i)


def _write(param: Tensor, copies: Sequence[WeightCopy | None] | None, index: int) -> None:
    copy = None if copies is None else copies[index]
    if copy is not None:
        write_copy(param, copy)
