"""Fused optimizer steps on a GPU: argument checks, memory order, and the launches of `triton_steps`."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoprec.ops.reference_steps import WeightCopy, stream_starts
from autoprec.ops.triton_copies import write_scaled_copies
from autoprec.ops.triton_plans import Plan, is_dense, linear_plans
from autoprec.ops.triton_rounding import BFLOAT16, FLOAT16, FLOAT32
from autoprec.ops.triton_steps import adam_kernel, sgd_kernel

CHUNK = 2048
_CODES = {torch.float32: FLOAT32.value, torch.bfloat16: BFLOAT16.value, torch.float16: FLOAT16.value}
_COPY_CODES = {"bf16": BFLOAT16.value, "fp16": FLOAT16.value}
LAUNCH = {"SIZE": CHUNK, "num_warps": 4, "enable_fp_fusion": False}


class _SameOrder:
    """Lists whose tensors lie in memory in one order at each position; others are worked on in contiguous clones.

    Args:
        grads: Read only.
        columns: What a step writes.
    """

    def __init__(self, grads: Sequence[Tensor], *columns: Sequence[Tensor | None]) -> None:
        self.columns: list[list[Tensor | None]] = [list(column) for column in (columns[0], grads, *columns[1:])]
        self._clones: list[tuple[Tensor, Tensor]] = []
        for position, tensors in enumerate(zip(*self.columns, strict=True)):
            if not _is_one_order([t for t in tensors if t is not None]):
                for column in self.columns:
                    original = column[position]
                    if original is not None:
                        column[position] = clone = original.detach().clone(memory_format=torch.contiguous_format)
                        if original is not grads[position]:
                            self._clones.append((original, clone))

    def write_back(self) -> None:
        for original, clone in self._clones:
            original.detach().copy_(clone)


def _is_one_order(tensors: Sequence[Tensor]) -> bool:
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    stride = tensors[0].stride()
    return is_dense(tensors[0]) and all(tensor.stride() == stride for tensor in tensors)


def _as_signed(number: int) -> int:
    """64 bits as the kernel's int64."""
    number &= 0xFFFFFFFFFFFFFFFF
    return number - (1 << 64) if number >= 1 << 63 else number


def _float64_bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _checked(grads: Sequence[Tensor], found_inf: Tensor | None, device: torch.device) -> None:
    for grad in grads:
        if grad.dtype not in _CODES:
            raise TypeError(f"Passed a gradient of {grad.dtype}. Gradients must be float32, bfloat16 or float16.")
    if found_inf is not None and found_inf.device != device:
        raise ValueError(f"Passed `found_inf` on {found_inf.device}. It must be on {device}, where the parameters are.")


def _plain_copies(copies: Sequence[WeightCopy | None]) -> tuple[list[Tensor | None], list[int]]:
    """The copies that an update writes itself, and their codes; the scaled ones follow it."""
    plain = [None if c is None or c.format not in _COPY_CODES else c for c in copies]
    return [None if c is None else c.values for c in plain], [0 if c is None else _COPY_CODES[c.format] for c in plain]


def _write_scaled(params: Sequence[Tensor], copies: Sequence[WeightCopy | None], found_inf: Tensor | None) -> None:
    pairs = [
        (param.detach().contiguous(), copy)
        for param, copy in zip(params, copies, strict=True)
        if copy is not None and copy.format not in _COPY_CODES and param.numel()
    ]
    if pairs:
        write_scaled_copies([param for param, _ in pairs], [copy for _, copy in pairs], found_inf)


def _launch(
    kernel: Any, plans: Sequence[Plan], arguments: Sequence[Any], found_inf: Tensor | None, **flags: Any
) -> None:
    for plan in plans:
        kernel[(plan.n_chunks,)](
            plan.table,
            plan.chunk_tensors,
            plan.chunk_starts,
            plan.table if found_inf is None else found_inf,
            *arguments,
            HAS_FOUND_INF=found_inf is not None,
            ALIGNED=plan.is_aligned,
            **flags,
            **LAUNCH,
        )


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
    """One step of Adam or AdamW on every parameter; see :func:`autoprec.ops.reference_steps.fused_adam_`.

    One launch moves all parameters, one more for each further dtype of second moments, for tensors that are not aligned
    to 16 bytes, and for step counters on the host that differ. int8 and e4m3 copies take two more launches. The host
    never waits for the device. Products enter sums through fused multiply-add; eager torch rounds in between.

    Args:
        params: float32, on one device.
        grads: float32, bfloat16 or float16.
        exp_avgs: First moments, float32.
        exp_avg_sqs: Second moments, float32, bfloat16 or float16.
        steps: ``[]``, float32, all on the host or all on the device. With ``found_inf`` they must be on the device.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights.
        decoupled: AdamW.
        maximize: Steps uphill.
        grad_factor: A number, or ``[]`` on the device.
        copies: Copies to write, one entry for each parameter.
        found_inf: ``[]``, float32, on the device. Nothing is written where it is not zero.
        seed: Of the random bits for 16-bit second moments.
        offset: Place in the stream of random bits; never the same twice.
    """
    if not params:
        return
    device = params[0].device
    _checked(grads, found_inf, device)
    is_on_host = steps[0].device.type == "cpu" and found_inf is None
    if not is_on_host and steps[0].device != device:
        raise ValueError(
            f"Passed `found_inf` and `steps` on {steps[0].device}. With `found_inf` the counters must be on {device}:"
            " construct the optimizer with `fused=True` or `capturable=True`."
        )
    torch._foreach_add_(list(steps), 1.0)
    copies = [None] * len(params) if copies is None else copies
    copy_values, copy_codes = _plain_copies(copies)
    ordered = _SameOrder(grads, params, exp_avgs, exp_avg_sqs, copy_values)
    columns = [*ordered.columns, [None] * len(params) if is_on_host else list(steps)]
    starts = stream_starts([param.numel() for param in params])
    extra = [(_CODES[grad.dtype], code, start) for grad, code, start in zip(grads, copy_codes, starts, strict=True)]
    counts = [float(step) if is_on_host else 1.0 for step in steps]
    kinds = list(zip((moment.dtype for moment in exp_avg_sqs), counts, strict=True))
    for kind in dict.fromkeys(kinds):
        chosen = [i for i, other in enumerate(kinds) if other == kind]
        dtype, count = kind
        arguments = (
            grad_factor,
            *map(_float64_bits, (lr, beta1, beta2)),
            lr / (1 - beta1**count),
            math.sqrt(1 - beta2**count),
            1 - lr * weight_decay if decoupled else 1.0,
            0.0 if decoupled else weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            eps,
            -1.0 if maximize else 1.0,
            _as_signed(seed),
            _as_signed(offset),
        )
        _launch(
            adam_kernel,
            linear_plans("adam", [[c[i] for i in chosen] for c in columns], [extra[i] for i in chosen], CHUNK),
            arguments,
            found_inf,
            MOMENT=_CODES[dtype],
            GROUPED=True,
            HAS_FACTOR_TENSOR=isinstance(grad_factor, Tensor),
            HAS_STEP_TENSOR=not is_on_host,
        )
    ordered.write_back()
    if found_inf is not None:
        torch._foreach_sub_(list(steps), [found_inf] * len(steps))
    _write_scaled(params, copies, found_inf)


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
    """One step of SGD on every parameter; see :func:`autoprec.ops.reference_steps.fused_sgd_`.

    Launches, accuracy and ``found_inf`` are those of :func:`fused_adam_`. Where the very first step may be skipped on
    the device, let the buffers be zero: ``is_first`` says what the host knows.

    Args:
        params: float32, on one device.
        grads: float32, bfloat16 or float16.
        momentum_buffers: float32, or ``None`` without momentum.
        lr: Learning rate.
        momentum: Decay of the buffers.
        dampening: Share of the gradient that does not enter the buffers.
        weight_decay: Decay of the weights through the gradient.
        nesterov: Looks ahead by the momentum.
        maximize: Steps uphill.
        is_first: The buffers hold nothing yet and become the gradient.
        grad_factor: A number, or ``[]`` on the device.
        copies: Copies to write, one entry for each parameter.
        found_inf: ``[]``, float32, on the device. Nothing is written where it is not zero.
    """
    if not params:
        return
    _checked(grads, found_inf, params[0].device)
    copies = [None] * len(params) if copies is None else copies
    copy_values, copy_codes = _plain_copies(copies)
    buffers: Sequence[Tensor | None] = [None] * len(params) if momentum_buffers is None else momentum_buffers
    ordered = _SameOrder(grads, params, buffers, copy_values)
    extra = [(_CODES[grad.dtype], code) for grad, code in zip(grads, copy_codes, strict=True)]
    _launch(
        sgd_kernel,
        linear_plans("sgd", ordered.columns, extra, CHUNK),
        (grad_factor, lr, momentum, 1 - dampening, weight_decay, -1.0 if maximize else 1.0),
        found_inf,
        HAS_MOMENTUM=momentum_buffers is not None,
        IS_NESTEROV=nesterov,
        IS_FIRST=is_first,
        HAS_FACTOR_TENSOR=isinstance(grad_factor, Tensor),
    )
    ordered.write_back()
    _write_scaled(params, copies, found_inf)
