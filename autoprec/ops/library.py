"""The operations as ``torch.library`` operators, for ``torch.compile``, ``torch.export`` and ``opcheck``.

Importing this module registers them as ``torch.ops.autoprec.*``. One kernel serves every device: at each call it runs
what :mod:`autoprec.ops.registry` has for the device of its tensors, Triton's included where that is chosen. Eager code
calls :mod:`autoprec.ops` directly, which costs a few microseconds a call: the dispatcher costs several times that for
lists of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoprec.ops import int8, interface, optimizers
from autoprec.ops.copies import DTYPES
from autoprec.ops.reference_casts import FORMATS, as_matrix, block_shape
from autoprec.ops.reference_steps import WeightCopy

_FORMAT_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@torch.library.custom_op("autoprec::grad_stats", mutates_args=())
def grad_stats(grads: Sequence[Tensor], tiny: Sequence[float], tiny_lower: Sequence[float]) -> Tensor:
    """:func:`autoprec.ops.grad_stats`; returns the table, ``[5 * n + 1]``."""
    return interface.grad_stats(grads, tiny, tiny_lower).table


@grad_stats.register_fake
def _(grads: Sequence[Tensor], tiny: Sequence[float], tiny_lower: Sequence[float]) -> Tensor:
    return grads[0].new_empty(5 * len(grads) + 1, dtype=torch.float32) if grads else torch.empty(1)


@torch.library.custom_op("autoprec::cast", mutates_args=())
def cast(
    x: Tensor,
    format_name: str,
    granularity: str | None,
    scale: Tensor | None,
    saturate: bool,
    seed: int | None,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`autoprec.ops.cast`; returns values, scale (one without any) and amax."""
    values, used, amax = interface.cast(
        x,
        format_name,
        granularity=granularity,
        scale=scale,
        saturate=saturate,
        seed=seed,
        offset=offset,
        with_amax=True,
    )
    assert amax is not None, "it was asked for"
    # an operator may not return what it was given
    return values, torch.ones_like(amax) if used is None else used.clone() if used is scale else used, amax


@cast.register_fake
def _(
    x: Tensor,
    format_name: str,
    granularity: str | None,
    scale: Tensor | None,
    saturate: bool,
    seed: int | None,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    values = x.new_empty(x.shape, dtype=FORMATS[format_name].dtype)
    if granularity in (None, "tensor"):
        table: tuple[int, ...] = ()
    else:
        rows, cols = as_matrix(x).shape
        down, across = block_shape(granularity, rows, cols)
        table = (-(-rows // down), -(-cols // across))
    return values, x.new_empty(table, dtype=torch.float32), x.new_empty(table, dtype=torch.float32)


@torch.library.custom_op("autoprec::restore", mutates_args=())
def restore(values: Tensor, scale: Tensor | None, granularity: str | None) -> Tensor:
    """:func:`autoprec.ops.restore`."""
    return interface.restore(values, scale, granularity=granularity)


@restore.register_fake
def _(values: Tensor, scale: Tensor | None, granularity: str | None) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.float32)


@torch.library.custom_op("autoprec::fake_cast", mutates_args=())
def fake_cast(x: Tensor, exponent_bits: Tensor, mantissa_bits: Tensor, is_finite_only: Tensor) -> Tensor:
    """:func:`autoprec.ops.fake_cast`; the gradient passes unchanged."""
    return interface.fake_cast(x, exponent_bits, mantissa_bits, is_finite_only)


@fake_cast.register_fake
def _(x: Tensor, exponent_bits: Tensor, mantissa_bits: Tensor, is_finite_only: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _pass_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


fake_cast.register_autograd(_pass_gradient)


@torch.library.custom_op("autoprec::int8_matmul", mutates_args=())
def int8_matmul(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`autoprec.ops.int8_matmul`; carries no gradient."""
    return int8.int8_matmul(x, values, scale, bias)


@int8_matmul.register_fake
def _(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], values.shape[0]), dtype=torch.bfloat16)


@torch.library.custom_op("autoprec::int8_linear", mutates_args=())
def int8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    values: Tensor,
    scale: Tensor,
    transposed_values: Tensor,
    transposed_scale: Tensor,
) -> Tensor:
    """:func:`autoprec.ops.int8_linear` on bfloat16 rows with a copy of the weight, differentiable once."""
    return int8.int8_matmul(x, values, scale, bias)


@int8_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    values: Tensor,
    scale: Tensor,
    transposed_values: Tensor,
    transposed_scale: Tensor,
) -> Tensor:
    return x.new_empty((x.shape[0], values.shape[0]), dtype=torch.bfloat16)


def _save_for_int8_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _, _, transposed_values, transposed_scale = inputs
    ctx.save_for_backward(x, transposed_values, transposed_scale)
    ctx.dtypes = weight.dtype, None if bias is None else bias.dtype


def _int8_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, transposed_values, transposed_scale = ctx.saved_tensors
    weight_dtype, bias_dtype = ctx.dtypes
    grad_x = grad_weight = grad_bias = None
    # manual optimization runs the backward inside the training step, where autocast is on
    with torch.autocast(grad.device.type, enabled=False):
        if ctx.needs_input_grad[0]:
            grad_x = int8_matmul(grad, transposed_values, transposed_scale, None).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.t() @ x).to(weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0).to(bias_dtype)
    return grad_x, grad_weight, grad_bias, None, None, None, None


int8_linear.register_autograd(_int8_backward, setup_context=_save_for_int8_backward)


@torch.library.custom_op(
    "autoprec::refresh_copy_", mutates_args=("values", "scale", "transposed_values", "transposed_scale")
)
def refresh_copy_(
    weight: Tensor,
    values: Tensor,
    scale: Tensor | None,
    transposed_values: Tensor | None,
    transposed_scale: Tensor | None,
) -> None:
    """:func:`autoprec.ops.refresh_copies_` for one weight; the dtype of ``values`` says the format."""
    copy = WeightCopy(_FORMAT_NAMES[values.dtype], values, scale, transposed_values, transposed_scale)
    optimizers.refresh_copies_([weight], [copy])


@torch.library.custom_op("autoprec::fused_adam_", mutates_args=("params", "exp_avgs", "exp_avg_sqs", "steps"))
def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    grad_factor: float,
    seed: int,
    offset: int,
) -> None:
    """:func:`autoprec.ops.fused_adam_` without copies."""
    optimizers.fused_adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        grad_factor=grad_factor,
        seed=seed,
        offset=offset,
    )


@torch.library.custom_op("autoprec::fused_sgd_", mutates_args=("params", "momentum_buffers"))
def fused_sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    is_first: bool,
    grad_factor: float,
) -> None:
    """:func:`autoprec.ops.fused_sgd_` without copies; ``momentum_buffers`` is empty without momentum."""
    optimizers.fused_sgd_(
        params,
        grads,
        momentum_buffers or None,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        is_first=is_first,
        grad_factor=grad_factor,
    )
