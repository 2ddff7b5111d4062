"""Prepared steps in eager PyTorch, which gains nothing from preparation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoprec.ops import reference_steps
from autoprec.ops.copies import write_copies
from autoprec.ops.prepared import AdamOptions, AdamStep, PreparedStep, SgdOptions, SgdStep
from autoprec.ops.reference_steps import WeightCopy
from autoprec.ops.staleness import first_stale


class _Copies(PreparedStep):
    """What both steps do with their copies."""

    _write = staticmethod(write_copies)

    def _first_stale(self, samples: int, seed: int) -> int | None:
        return first_stale(self.params, self.copies, samples, seed)


class PreparedAdam(_Copies, AdamStep):
    """:func:`autoprec.ops.prepare_adam` in eager PyTorch."""

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        steps: Sequence[Tensor],
        copies: Sequence[WeightCopy | None] | None = None,
    ) -> None:
        super().__init__(params, copies)
        self._state = (exp_avgs, exp_avg_sqs, steps)

    def _take(self, grads: Sequence[Tensor], options: AdamOptions) -> None:
        reference_steps.fused_adam_(self.params, grads, *self._state, copies=self.copies, **options._asdict())


class PreparedSgd(_Copies, SgdStep):
    """:func:`autoprec.ops.prepare_sgd` in eager PyTorch."""

    def __init__(
        self,
        params: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor] | None = None,
        copies: Sequence[WeightCopy | None] | None = None,
    ) -> None:
        super().__init__(params, copies)
        self._buffers = momentum_buffers

    def _take(self, grads: Sequence[Tensor], options: SgdOptions) -> None:
        reference_steps.fused_sgd_(self.params, grads, self._buffers, copies=self.copies, **options._asdict())
