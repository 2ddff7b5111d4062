"""Linear layers in int8: forward and input gradient row-wise in int8, weight gradient in bf16 (arXiv:2304.13013)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.ops.copies import new_copy
from autoprec.ops.optimizers import refresh_copies_
from autoprec.ops.reference import differentiable_int8_grad, int_matmul, quantize_rows
from autoprec.ops.reference_steps import WeightCopy
from autoprec.ops.registry import resolve


def int8_matmul(
    x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None, *, implementation: str | None = None
) -> Tensor:
    """``x @ weight.t() + bias`` with both operands in int8: quantise rows, multiply exactly, scale back.

    Carries no gradient. ``cpu`` equals the reference bit for bit.

    Args:
        x: ``[rows, in_features]``, bfloat16, float16 or float32. Each row is quantised with its own scale.
        values: ``[out_features, in_features]``, int8.
        scale: ``[out_features, 1]``, float32: what each row of the weight was multiplied by.
        bias: ``[out_features]``, float32, added before the result is rounded.
        implementation: ``"reference"``, ``"cpu"`` or ``"triton"``, ``None`` for the automatic choice.

    Returns:
        ``[rows, out_features]``, bfloat16. NaN in the rows of ``x`` that hold a non-finite entry.
    """
    product: Tensor = resolve("int8_matmul", x.device.type, implementation)(x, values, scale, bias)
    return product


def reference_int8_matmul(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`int8_matmul` in eager PyTorch."""
    x_values, x_scale = quantize_rows(x)
    sums = int_matmul(x_values, values.flatten(1).t()).float()
    product = sums * x_scale.reciprocal() * scale.reshape(1, -1).reciprocal()
    return (product if bias is None else product + bias.detach()).to(torch.bfloat16)


def int8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    copy: WeightCopy | None = None,
    *,
    implementation: str | None = None,
) -> Tensor:
    """``torch.nn.functional.linear`` in int8, differentiable, bfloat16 out.

    Args:
        x: ``[..., in_features]``, floating point. Rounded to bfloat16 first, as autocast does.
        weight: ``[out_features, in_features]``, float32. Gets its gradient in bfloat16 arithmetic.
        bias: ``[out_features]``, float32, or ``None``.
        copy: An int8 copy of the weight as it is, with its transposition if ``x`` needs a gradient. ``None`` to
            quantise the weight in this call.
        implementation: As for :func:`int8_matmul`.

    Returns:
        ``[..., out_features]``, bfloat16.
    """
    rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    if copy is None:
        copy = new_copy(weight, "int8", transposed=rows.requires_grad and torch.is_grad_enabled())
        refresh_copies_([weight.detach().contiguous()], [copy], implementation=implementation)
    y: Tensor = _Int8Linear.apply(rows, weight, bias, copy, implementation)  # type: ignore[no-untyped-call]
    return y.reshape(*x.shape[:-1], weight.shape[0])


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, copy: WeightCopy, implementation: str | None
    ) -> Tensor:
        assert copy.scale is not None, "an int8 copy has a scale"
        ctx.save_for_backward(x, weight)
        ctx.copy, ctx.implementation = copy, implementation
        return int8_matmul(x, copy.values, copy.scale, bias, implementation=implementation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x, weight) = grads[0], ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x = _grad_x(ctx, grad, weight)
            if ctx.needs_input_grad[1]:
                grad_weight = grad.t() @ x
            if ctx.needs_input_grad[2]:
                grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None


def _grad_x(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # create_graph=True
        return differentiable_int8_grad(grad, weight).to(torch.bfloat16)
    values, scale = ctx.copy.transposed_values, ctx.copy.transposed_scale
    if values is None:
        fresh = new_copy(weight.detach().t().contiguous(), "int8", transposed=False)
        refresh_copies_([weight.detach().t().contiguous()], [fresh], implementation=ctx.implementation)
        values, scale = fresh.values, fresh.scale
    return int8_matmul(grad, values, scale, implementation=ctx.implementation)
