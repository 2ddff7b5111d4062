"""Fused optimizer steps on a GPU: checks, memory order, and the launches of `triton_steps`.

What does not change from step to step is looked up once, at preparation; a call then compares addresses and launches.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoprec.ops.reference_steps import WeightCopy, stream_starts
from autoprec.ops.triton_plans import Plan, as_int64, linear_plans, on_own_device
from autoprec.ops.triton_prepared import (
    CODES,
    PLAIN_COPIES,
    Column,
    Group,
    Prepared,
    check_found_inf,
    write_back,
    write_scaled,
)
from autoprec.ops.triton_rounding import FLOAT32
from autoprec.ops.triton_steps import adam_kernel, sgd_kernel

CHUNK = 1024
LAUNCH = {"SIZE": CHUNK, "num_warps": 4, "enable_fp_fusion": False}


def _float64_bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


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


class PreparedAdam:
    """:func:`autoprec.ops.prepare_adam` on a GPU: called with gradients and the options of a step.

    One launch moves all parameters, one more for each further dtype of second moments, for tensors that are not aligned
    to 16 bytes, and for step counters on the host that differ. int8 and e4m3 copies take two more launches. The host
    waits for the device only if ``lr`` is a tensor there. The bits are those of the ``cpu`` implementation, 16-bit
    moments included; eager torch rounds where these use a fused multiply-add.

    Args:
        params: float32, on one device.
        exp_avgs: First moments, float32.
        exp_avg_sqs: Second moments, float32, bfloat16 or float16.
        steps: ``[]``, float32, all on the host or all on the device.
        copies: Copies to write, one entry for each parameter.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        copies: Sequence[WeightCopy | None] | None = None,
    ) -> None:
        self._prepared = Prepared(params, (exp_avgs, exp_avg_sqs), copies, steps)
        self._steps = list(steps)
        self._moments = [CODES[moment.dtype] for moment in exp_avg_sqs]
        self._starts = stream_starts([param.numel() for param in params])

    @on_own_device
    def __call__(
        self,
        grads: Sequence[Tensor],
        *,
        lr: float | Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        maximize: bool = False,
        grad_factor: float | Tensor = 1.0,
        found_inf: Tensor | None = None,
        seed: int = 0,
        offset: int = 0,
    ) -> None:
        """One step; options as for :func:`autoprec.ops.fused_adam_`.

        Raises:
            TypeError: If a gradient has another dtype than float32, bfloat16 and float16.
            ValueError: If ``found_inf`` is on another device, or is passed while step counters are on the host.
        """
        prepared, steps, lr = self._prepared, self._steps, float(lr)
        if not steps:
            return
        check_found_inf(found_inf, prepared.params)
        is_on_host = steps[0].device.type == "cpu" and found_inf is None
        if not is_on_host and steps[0].device != prepared.params[0].device:
            raise ValueError(
                f"Passed `found_inf` and `steps` on {steps[0].device}. With `found_inf` the counters must be on"
                f" {prepared.params[0].device}: construct the optimizer with `fused=True` or `capturable=True`."
            )
        torch._foreach_add_(steps, 1.0)
        counts = list(map(Tensor.item, steps)) if is_on_host else [1.0] * len(steps)
        pattern = (is_on_host, len(set(counts)) > 1 and tuple(count - counts[0] for count in counts))
        groups, clones = prepared.launches(
            grads, pattern, lambda columns: self._groups(grads, columns, counts, is_on_host)
        )
        for moment, first, plans in groups:
            count = counts[first]
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
                as_int64(seed),
                as_int64(offset),
            )
            _launch(
                adam_kernel,
                plans,
                arguments,
                found_inf,
                MOMENT=moment,
                HAS_FACTOR_TENSOR=isinstance(grad_factor, Tensor),
                HAS_STEP_TENSOR=not is_on_host,
            )
        write_back(clones)
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        prepared.write_scaled(found_inf)

    def _groups(
        self, grads: Sequence[Tensor], columns: list[list[Tensor | None]], counts: Sequence[float], is_on_host: bool
    ) -> list[Group]:
        counters = [0 if is_on_host else step.data_ptr() for step in self._steps]
        codes = [CODES[grad.dtype] for grad in grads]
        extra = list(zip(counters, codes, self._prepared.copy_codes, self._starts, strict=True))
        kinds = list(zip(self._moments, counts, strict=True))
        groups = []
        for kind in dict.fromkeys(kinds):
            chosen = [i for i, other in enumerate(kinds) if other == kind]
            picked = [[column[i] for i in chosen] for column in columns]
            groups.append(Group(kind[0], chosen[0], linear_plans("adam", picked, [extra[i] for i in chosen], CHUNK)))
        return groups


class PreparedSgd:
    """:func:`autoprec.ops.prepare_sgd` on a GPU. Launches and accuracy are those of :class:`PreparedAdam`.

    Args:
        params: float32, on one device.
        momentum_buffers: float32, or ``None`` without momentum. Where the very first step may be skipped on the device,
            let them be zero: ``is_first`` says what the host knows.
        copies: Copies to write, one entry for each parameter.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor] | None = None,
        copies: Sequence[WeightCopy | None] | None = None,
    ) -> None:
        self._has_momentum = momentum_buffers is not None
        buffers: Column = [None] * len(params) if momentum_buffers is None else momentum_buffers
        self._prepared = Prepared(params, (buffers,), copies)

    @on_own_device
    def __call__(
        self,
        grads: Sequence[Tensor],
        *,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        is_first: bool = False,
        grad_factor: float | Tensor = 1.0,
        found_inf: Tensor | None = None,
    ) -> None:
        """One step; options as for :func:`autoprec.ops.fused_sgd_`.

        Raises:
            TypeError: If a gradient has another dtype than float32, bfloat16 and float16.
            ValueError: If ``found_inf`` is on another device.
        """
        prepared = self._prepared
        if not prepared.params:
            return
        check_found_inf(found_inf, prepared.params)
        ((_, _, plans),), clones = prepared.launches(grads, None, lambda columns: self._groups(grads, columns))
        _launch(
            sgd_kernel,
            plans,
            (grad_factor, float(lr), momentum, 1 - dampening, weight_decay, -1.0 if maximize else 1.0),
            found_inf,
            HAS_MOMENTUM=self._has_momentum,
            IS_NESTEROV=nesterov,
            IS_FIRST=is_first,
            HAS_FACTOR_TENSOR=isinstance(grad_factor, Tensor),
        )
        write_back(clones)
        prepared.write_scaled(found_inf)

    def _groups(self, grads: Sequence[Tensor], columns: list[list[Tensor | None]]) -> list[Group]:
        codes = [CODES[grad.dtype] for grad in grads]
        extra = list(zip(codes, self._prepared.copy_codes, strict=True))
        return [Group(FLOAT32.value, 0, linear_plans("sgd", columns, extra, CHUNK))]


def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    copies: Sequence[WeightCopy | None] | None = None,
    **options: Any,
) -> None:
    """:func:`autoprec.ops.fused_adam_` on a GPU; see :class:`PreparedAdam`."""
    PreparedAdam(params, exp_avgs, exp_avg_sqs, steps, copies)(grads, **options)


def fused_sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None = None,
    *,
    copies: Sequence[WeightCopy | None] | None = None,
    **options: Any,
) -> None:
    """:func:`autoprec.ops.fused_sgd_` on a GPU; see :class:`PreparedSgd`."""
    PreparedSgd(params, momentum_buffers, copies)(grads, **options)


def refresh_copies_(params: Sequence[Tensor], copies: Sequence[WeightCopy | None]) -> None:
    """:func:`autoprec.ops.refresh_copies_` on a GPU: two launches for scaled copies, torch's own for the others."""
    scaled = []
    for position, (param, copy) in enumerate(zip(params, copies, strict=True)):
        if copy is not None and copy.format in PLAIN_COPIES:
            copy.values.copy_(param.detach())
        elif copy is not None:
            scaled.append(position)
    write_scaled(params, copies, scaled)
