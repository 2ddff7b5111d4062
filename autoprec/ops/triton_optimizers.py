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

from autoprec.ops.prepared import AdamOptions, AdamStep, PreparedStep, SgdOptions, SgdStep
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
from autoprec.ops.triton_staleness import first_stale
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


def refresh_copies_(params: Sequence[Tensor], copies: Sequence[WeightCopy | None]) -> None:
    """:func:`autoprec.ops.refresh_copies_` on a GPU: two launches for scaled copies, torch's own for the others."""
    scaled = []
    for position, (param, copy) in enumerate(zip(params, copies, strict=True)):
        if copy is not None and copy.format in PLAIN_COPIES:
            copy.values.copy_(param.detach())
        elif copy is not None:
            scaled.append(position)
    write_scaled(params, copies, scaled)


class _Copies(PreparedStep):
    """What both steps do with their copies."""

    _write = staticmethod(refresh_copies_)

    def _first_stale(self, samples: int, seed: int) -> int | None:
        return first_stale(self.params, self.copies, samples, seed)


class PreparedAdam(_Copies, AdamStep):
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

    A call raises ``TypeError`` if a gradient has another dtype than float32, bfloat16 and float16, and ``ValueError``
    if ``found_inf`` is on another device, or is passed while step counters are on the host.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        copies: Sequence[WeightCopy | None] | None = None,
    ) -> None:
        super().__init__(params, copies)
        self._prepared = Prepared(params, (exp_avgs, exp_avg_sqs), self.copies, steps)
        self._steps = list(steps)
        self._moments = [CODES[moment.dtype] for moment in exp_avg_sqs]
        self._starts = stream_starts([param.numel() for param in params])

    @on_own_device
    def _take(self, grads: Sequence[Tensor], options: AdamOptions) -> None:
        prepared, steps, found_inf, grad_factor = self._prepared, self._steps, options.found_inf, options.grad_factor
        lr, beta1, beta2 = float(options.lr), options.beta1, options.beta2
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
                1 - lr * options.weight_decay if options.decoupled else 1.0,
                0.0 if options.decoupled else options.weight_decay,
                1 - beta1,
                beta2,
                1 - beta2,
                options.eps,
                -1.0 if options.maximize else 1.0,
                as_int64(options.seed),
                as_int64(options.offset),
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


class PreparedSgd(_Copies, SgdStep):
    """:func:`autoprec.ops.prepare_sgd` on a GPU. Launches, accuracy and errors are those of :class:`PreparedAdam`.

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
        super().__init__(params, copies)
        self._has_momentum = momentum_buffers is not None
        buffers: Column = [None] * len(params) if momentum_buffers is None else momentum_buffers
        self._prepared = Prepared(params, (buffers,), self.copies)

    @on_own_device
    def _take(self, grads: Sequence[Tensor], options: SgdOptions) -> None:
        prepared, found_inf, grad_factor = self._prepared, options.found_inf, options.grad_factor
        if not prepared.params:
            return
        check_found_inf(found_inf, prepared.params)
        ((_, _, plans),), clones = prepared.launches(grads, None, lambda columns: self._groups(grads, columns))
        _launch(
            sgd_kernel,
            plans,
            (
                grad_factor,
                float(options.lr),
                options.momentum,
                1 - options.dampening,
                options.weight_decay,
                -1.0 if options.maximize else 1.0,
            ),
            found_inf,
            HAS_MOMENTUM=self._has_momentum,
            IS_NESTEROV=options.nesterov,
            IS_FIRST=options.is_first,
            HAS_FACTOR_TENSOR=isinstance(grad_factor, Tensor),
        )
        write_back(clones)
        prepared.write_scaled(found_inf)

    def _groups(self, grads: Sequence[Tensor], columns: list[list[Tensor | None]]) -> list[Group]:
        codes = [CODES[grad.dtype] for grad in grads]
        extra = list(zip(codes, self._prepared.copy_codes, strict=True))
        return [Group(FLOAT32.value, 0, linear_plans("sgd", columns, extra, CHUNK))]
