"""Linear layers in int8: forward and input gradient row-wise in int8, weight gradient in bf16 (arXiv:2304.13013)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoprec.ops.copies import new_copy
from autoprec.ops.optimizers import refresh_copies_
from autoprec.ops.reference import as_rows, differentiable_int8_grad
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


def int8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    copy: WeightCopy | None = None,
    *,
    master: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """``torch.nn.functional.linear`` in int8, differentiable, bfloat16 out.

    Equals ``autoprec.ops.linear(x, weight, bias, "int8")`` bit for bit, gradients included.

    Args:
        x: ``[..., in_features]``, floating point. Rounded to bfloat16 first, as autocast does.
        weight: ``[out_features, in_features]``, float32. Gets its gradient in bfloat16 arithmetic. With ``copy`` and
            ``master`` a tensor of that shape that only takes the gradient, in bfloat16 if it is bfloat16.
        bias: ``[out_features]``, float32, or ``None``.
        copy: An int8 copy of the weight as it is, with its transposition if ``x`` needs a gradient. ``None`` to
            quantise the weight in this call.
        master: What ``weight`` stands in for; read where the backward is differentiated. Default ``weight``.
        implementation: As for :func:`int8_matmul`.

    Returns:
        ``[..., out_features]``, bfloat16.
    """
    rows = as_rows(x.to(torch.bfloat16))
    if copy is None:
        copy = _quantised(weight, rows.requires_grad and torch.is_grad_enabled(), implementation)
    hidden = (weight if master is None else master,)  # from autograd, which would lead an edge to it
    y: Tensor = _Int8Linear.apply(rows, weight, bias, copy, hidden, implementation)  # type: ignore[no-untyped-call]
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _quantised(weight: Tensor, transposed: bool, implementation: str | None) -> WeightCopy:
    """A copy of a weight of any layout."""
    matrix = weight.detach().contiguous()
    copy = new_copy(matrix, "int8", transposed=transposed)
    refresh_copies_([matrix], [copy], implementation=implementation)
    return copy


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        copy: WeightCopy,
        hidden: tuple[Tensor],
        implementation: str | None,
    ) -> Tensor:
        assert copy.scale is not None, "an int8 copy has a scale"
        # saved, not kept: checkpointing and hooks on saved tensors then know of the transposed copy too; as many
        # whether a copy was given or is made in the call, which a recomputation may change
        transposed = (copy.transposed_values, copy.transposed_scale) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(x, *transposed)
        # kept, not saved: most backwards do not need it, and a step may write it before them as under autocast
        (ctx.weight,), ctx.version = hidden, _version(*hidden)
        ctx.implementation = implementation
        return int8_matmul(x, copy.values, copy.scale, bias, implementation=implementation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x, *transposed) = grads[0], ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x = _grad_x(ctx, grad, *transposed)
            if ctx.needs_input_grad[1]:
                grad_weight = grad.t() @ x
            if ctx.needs_input_grad[2]:
                grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def _grad_x(ctx: Any, grad: Tensor, values: Tensor | None, scale: Tensor | None) -> Tensor:
    if torch.is_grad_enabled():  # create_graph=True
        return differentiable_int8_grad(grad, _unwritten(ctx))
    if values is None:
        fresh = _quantised(_unwritten(ctx).t(), False, ctx.implementation)
        values, scale = fresh.values, fresh.scale
    assert scale is not None, "an int8 copy has a scale"
    # a tensor of another library may have no memory of its own
    implementation = ctx.implementation if type(grad) is Tensor else "reference"
    return int8_matmul(grad, values, scale, implementation=implementation)


def _unwritten(ctx: Any) -> Tensor:
    weight: Tensor = ctx.weight
    if _version(weight) != ctx.version:
        raise RuntimeError(
            "The weight of `int8_linear` has been modified by an inplace operation between its forward and a backward"
            " that needs it. Run the backward before the optimizer's step."
        )
    return weight


def _version(weight: Tensor) -> int:
    return -1 if weight.is_inference() else weight._version
