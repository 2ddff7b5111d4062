"""The specification of every operation in eager PyTorch: quantisation, low-precision matmuls, gradient statistics.

Faster implementations are compared with these functions. ``scale`` multiplies a tensor into the low-precision range.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoprec.formats import TF32

INT8_MAX = 127.0
FP8_MULTIPLE = 16
# the smallest amax that a scale is computed from; keeps scales of all-zero tensors finite (torchao's value)
_AMAX_FLOOR = 1e-12


def quantize_tensor(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantises a whole tensor to an 8-bit float with one scale (tensorwise, dynamic, saturating).

    Args:
        x: Any shape, floating point.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        The quantised tensor in ``dtype`` and ``scale``, ``[]``, float32: ``finfo.max / amax``.
    """
    limit = torch.finfo(dtype).max
    amax = x.detach().abs().amax().double() if x.numel() else torch.zeros((), dtype=torch.float64, device=x.device)
    scale = (limit / amax.clamp(min=_AMAX_FLOOR)).float()
    return (x.detach().float() * scale).clamp(-limit, limit).to(dtype), scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises every row of a matrix to int8, symmetric, rounding half to even.

    Args:
        x: ``[rows, cols]``, floating point.

    Returns:
        int8 values ``[rows, cols]`` in [-127, 127] and ``scale``, ``[rows, 1]``, float32: ``127 / amax``.
    """
    x = x.detach().float()
    amax = x.abs().amax(dim=1, keepdim=True) if x.numel() else x.new_zeros(x.shape[0], 1)
    # of two tensors: torch divides a number by a tensor through the reciprocal, which rounds twice
    scale = torch.full_like(amax, INT8_MAX) / amax.clamp(min=_AMAX_FLOOR)
    # a non-finite row has no int8 value: NaN would turn into an arbitrary integer, so the scale carries it
    scale = torch.where(amax.isfinite(), scale, torch.full_like(scale, float("nan")))
    values = (x * scale).round().clamp(-INT8_MAX, INT8_MAX)
    return values.nan_to_num(0.0).to(torch.int8), scale


def dequantize_rows(values: Tensor, scale: Tensor) -> Tensor:
    """Returns ``values / scale`` in float32, the inverse of :func:`quantize_rows` up to rounding."""
    return values.float() / scale


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor] | None, backward: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        ctx.backward_rounding = backward
        return x.view_as(x) if forward is None else forward(x.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rounding = ctx.backward_rounding
        return (grads[0] if rounding is None else fake_quantize(grads[0], rounding)), None, None


def fake_quantize(
    x: Tensor,
    forward: Callable[[Tensor], Tensor] | None = None,
    backward: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Applies a rounding to the values and another one to the gradient; both are straight-through.

    Args:
        x: Any shape, floating point.
        forward: Rounds the values, ``None`` leaves them.
        backward: Rounds the incoming gradient, ``None`` leaves it.
    """
    rounded: Tensor = _FakeQuantize.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return rounded


def round_fp8(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Returns a function that rounds a tensor through tensorwise fp8 and back to its own dtype."""

    def rounding(x: Tensor) -> Tensor:
        values, scale = quantize_tensor(x, dtype)
        return (values.float() / scale).to(x.dtype)

    return rounding


def round_int8(x: Tensor) -> Tensor:
    """Rounds a tensor through int8 with one scale per index of its first dimension, back to its own dtype."""
    values, scale = quantize_rows(x.detach().flatten(1))
    return dequantize_rows(values, scale).reshape(x.shape).to(x.dtype)


def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies int8 matrices exactly.

    Args:
        a: ``[rows, inner]``, int8.
        b: ``[inner, cols]``, int8.

    Returns:
        ``[rows, cols]``, int32.
    """
    is_cuda = a.device.type == "cuda"
    is_native = a.device.type == "cpu" or (is_cuda and a.shape[0] > 16 and a.shape[1] % 8 == 0 and b.shape[1] % 8 == 0)
    # with a size of 1 the strides are ambiguous, and torch 2.13 then returns uninitialised memory on a CPU
    if is_native and min(*a.shape, *b.shape) > 1:
        return torch._int_mm(a, b)
    return (a.double() @ b.double()).to(torch.int32)


def int8_matmul(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`autoprec.ops.int8_matmul` in eager PyTorch."""
    x_values, x_scale = quantize_rows(x)
    sums = int_matmul(x_values, values.flatten(1).t()).float()
    product = sums * x_scale.reciprocal() * scale.reshape(1, -1).reciprocal()
    return (product if bias is None else product + bias.detach()).to(torch.bfloat16)


class _Int8Linear(torch.autograd.Function):
    """Row-wise int8 forward and input gradient, bf16 weight gradient (SwitchBack, arXiv:2304.13013)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return int8_matmul(x, *quantize_rows(weight), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # manual optimization runs the backward inside the training step, where autocast is on
        grad, (x, weight) = grads[0], ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                is_differentiable = torch.is_grad_enabled()  # create_graph=True
                grad_x = (
                    differentiable_int8_grad(grad, weight)
                    if is_differentiable
                    else int8_matmul(grad, *quantize_rows(weight.t()))
                )
            if ctx.needs_input_grad[1]:
                grad_weight = grad.t() @ x
            if ctx.needs_input_grad[2]:
                grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias


def differentiable_int8_grad(grad: Tensor, weight: Tensor) -> Tensor:
    """The input gradient of an int8 layer in operations that can be differentiated again, bfloat16."""
    columns = fake_quantize(weight.t(), round_int8)
    return (fake_quantize(grad.float(), round_int8) @ columns.float().t()).to(torch.bfloat16)


def is_fp8_native(device: torch.device) -> bool:
    """Whether the device multiplies fp8 matrices itself (CUDA compute capability 8.9 and later)."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def fp8_matmul(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], native: bool) -> Tensor:
    """Multiplies two tensorwise fp8 matrices with fp32 accumulation and returns bfloat16.

    Args:
        a: Values ``[rows, inner]`` and scale ``[]``.
        b: Values ``[inner, cols]`` and scale ``[]``.
        native: Use the device's fp8 instructions; all three sizes must be multiples of 16.
    """
    (a_values, a_scale), (b_values, b_scale) = a, b
    if native:
        columns = b_values.t().contiguous().t()
        return torch._scaled_mm(
            a_values.contiguous(),
            columns,
            scale_a=a_scale.reciprocal(),
            scale_b=b_scale.reciprocal(),
            out_dtype=torch.bfloat16,
        )
    product = a_values.float() @ b_values.float()
    return (product / (a_scale * b_scale)).to(torch.bfloat16)


class _Fp8Linear(torch.autograd.Function):
    """e4m3 forward and e5m2 gradients, tensorwise dynamic scales (arXiv:2209.05433)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, native: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.native = native
        w_values, w_scale = quantize_tensor(weight, torch.float8_e4m3fn)
        return fp8_matmul(quantize_tensor(x, torch.float8_e4m3fn), (w_values.t(), w_scale), native)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        with torch.autocast(grads[0].device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x = _fp8_product(grads[0], weight, ctx.native).to(x.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = _fp8_product(grads[0].t(), x, ctx.native).to(weight.dtype)
        return grad_x, grad_weight, None


def _fp8_product(grad: Tensor, operand: Tensor, native: bool) -> Tensor:
    """An e5m2 gradient times an e4m3 operand; differentiable where a graph of the backward is asked for."""
    if torch.is_grad_enabled():
        left = fake_quantize(grad.float(), round_fp8(torch.float8_e5m2))
        return (left @ fake_quantize(operand.float(), round_fp8(torch.float8_e4m3fn))).to(torch.bfloat16)
    left_q = quantize_tensor(grad, torch.float8_e5m2)
    return fp8_matmul(left_q, quantize_tensor(operand, torch.float8_e4m3fn), native)


class Tf32Linear(torch.autograd.Function):
    """Linear layer whose matmuls read tf32 operands: by the device where it can, by rounding elsewhere."""

    @staticmethod
    def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Runs the layer on ``x`` ``[..., in_features]``, float32 in and out."""
        y: Tensor = Tf32Linear.apply(as_rows(x), weight)  # type: ignore[no-untyped-call]
        y = y.reshape(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(x, weight)
        return tf32_matmul(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: D102
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            grad_x = tf32_matmul(grads[0], weight) if ctx.needs_input_grad[0] else None
            grad_weight = tf32_matmul(grads[0].t(), x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def tf32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with operands rounded to tf32 and float32 accumulation.

    Args:
        a: ``[rows, inner]``, float32.
        b: ``[inner, cols]``, float32.
    """
    if a.device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(a.device) >= (8, 0):
        flag = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return a @ b
        finally:
            torch.backends.cuda.matmul.allow_tf32 = flag
    return fake_quantize(a, TF32.round) @ fake_quantize(b, TF32.round)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, format_name: str) -> Tensor:
    """``torch.nn.functional.linear`` in fp8 or int8, differentiable, bfloat16 out.

    In int8 it specifies :func:`autoprec.ops.int8_linear`, and is what the compiler traces in its place.

    Args:
        x: ``[..., in_features]``, floating point. Rounded to bfloat16 first, as autocast does.
        weight: ``[out_features, in_features]``, float32.
        bias: ``[out_features]`` or ``None``. int8 adds it before it rounds, fp8 after, as torchao does.
        format_name: ``"fp8"`` or ``"int8"``. fp8 needs rows, ``in_features`` and ``out_features`` that are multiples of
            16; any other call runs in bfloat16, bit for bit as under autocast.

    Returns:
        ``[..., out_features]``, bfloat16.
    """
    rows = as_rows(x.to(torch.bfloat16))
    if format_name == "int8":
        y: Tensor = _Int8Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
        return y.reshape(*x.shape[:-1], weight.shape[0])
    narrow = None if bias is None else bias.to(torch.bfloat16)
    if is_fp8_shape(rows.shape[0], weight):
        y = _Fp8Linear.apply(rows, weight, is_fp8_native(x.device))  # type: ignore[no-untyped-call]
        y = y if narrow is None else y + narrow
    else:
        y = torch.nn.functional.linear(rows, weight.to(torch.bfloat16), narrow)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def as_rows(x: Tensor) -> Tensor:
    """``[..., cols]`` as ``[rows, cols]``, also where a size is zero and could not be inferred."""
    return x.flatten(0, -2) if x.ndim > 1 else x[None]


def is_fp8_shape(rows: int, weight: Tensor) -> bool:
    """Whether fp8 matmul units accept the three sizes of this call (multiples of 16, forward and backward)."""
    return rows > 0 and all(size % FP8_MULTIPLE == 0 for size in (rows, *weight.shape))


def embedding(rows: Tensor, format_name: str) -> Tensor:
    """Rounds looked-up embedding rows to a format; the gradient passes unchanged.

    Args:
        rows: ``[..., dim]``, float32.
        format_name: ``"fp8"`` (one scale for the lookup) or ``"int8"`` (one scale per row).

    Returns:
        ``[..., dim]``, bfloat16.
    """
    if format_name == "fp8":
        return fake_quantize(rows, round_fp8(torch.float8_e4m3fn)).to(torch.bfloat16)
    flat = fake_quantize(rows.reshape(-1, rows.shape[-1]), round_int8)
    return flat.reshape(rows.shape).to(torch.bfloat16)
