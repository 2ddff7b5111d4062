"""The ``cpu`` implementation of optimizer steps: one call into the C library for a whole list of parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from autoprec.ops import native
from autoprec.ops.cpu_prepared import Prepared
from autoprec.ops.prepared import AdamOptions, AdamStep, PreparedStep, SgdOptions, SgdStep
from autoprec.ops.reference_steps import WeightCopy


def refresh_copies_(params: Sequence[Tensor], copies: Sequence[WeightCopy | None]) -> None:
    """Writes the copies of weights as they are; :func:`autoprec.ops.refresh_copies_` in C."""
    Prepared(params, {}, (), copies).refresh()


class _Copies(PreparedStep):
    """What both steps do with their copies."""

    _prepared: Prepared
    _write = staticmethod(refresh_copies_)

    def refresh(self) -> None:
        """Writes the copies of weights as they are."""
        self._prepared.refresh()

    def _first_stale(self, samples: int, seed: int) -> int | None:
        return self._prepared.stale(samples, seed)


class PreparedAdam(_Copies, AdamStep):
    """:func:`autoprec.ops.prepare_adam` in C.

    Args:
        params: float32 on a CPU, each filling one block of memory in any order of its dimensions.
        exp_avgs: First moments, float32, laid out like ``params``.
        exp_avg_sqs: Second moments, float32, bfloat16 or float16, laid out like ``params``.
        steps: ``[]``, float32.
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
        super().__init__(params, copies)
        self._prepared = Prepared(params, {"exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs}, steps, self.copies)

    def _take(self, grads: Sequence[Tensor], options: AdamOptions) -> None:
        if options.found_inf is not None and bool(options.found_inf):
            return
        rows = self._prepared.rows()
        pointers, codes, _alive = self._prepared.pointers(grads)
        numbers = native.AdamOptions(
            float(options.lr),
            options.beta1,
            options.beta2,
            options.eps,
            options.weight_decay,
            _factor(options),
            options.decoupled,
            options.seed & native.MASK64,
            options.offset & native.MASK64,
        )
        native.library().ap_adam(
            len(pointers), rows, pointers.buffer_info()[0], codes, ctypes.byref(numbers), torch.get_num_threads()
        )


class PreparedSgd(_Copies, SgdStep):
    """:func:`autoprec.ops.prepare_sgd` in C.

    Args:
        params: As for :class:`PreparedAdam`.
        momentum_buffers: float32, laid out like ``params``, or ``None`` without momentum.
        copies: Copies to write, one entry for each parameter.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor] | None = None,
        copies: Sequence[WeightCopy | None] | None = None,
    ) -> None:
        super().__init__(params, copies)
        states = {} if momentum_buffers is None else {"exp_avg": momentum_buffers}
        self._prepared = Prepared(params, states, (), self.copies)

    def _take(self, grads: Sequence[Tensor], options: SgdOptions) -> None:
        if options.found_inf is not None and bool(options.found_inf):
            return
        rows = self._prepared.rows()
        pointers, codes, _alive = self._prepared.pointers(grads)
        numbers = native.SgdOptions(
            float(options.lr),
            options.momentum,
            options.dampening,
            options.weight_decay,
            _factor(options),
            options.nesterov,
            options.is_first,
        )
        native.library().ap_sgd(
            len(pointers), rows, pointers.buffer_info()[0], codes, ctypes.byref(numbers), torch.get_num_threads()
        )


def _factor(options: AdamOptions | SgdOptions) -> float:
    """What multiplies the gradients, with the sign of the direction."""
    return -float(options.grad_factor) if options.maximize else float(options.grad_factor)
