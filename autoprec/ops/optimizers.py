"""Optimizer steps as callers see them, whatever implementation runs.

A step that comes again with the same tensors is prepared once: what does not change is checked and looked up at
preparation, and a call costs a few microseconds plus its work.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoprec.ops.prepared import AdamStep, SgdStep
from autoprec.ops.reference_steps import WeightCopy
from autoprec.ops.registry import resolve


def _device_type(tensors: Sequence[Tensor]) -> str:
    return tensors[0].device.type if tensors else "cpu"


def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
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
    implementation: str | None = None,
) -> None:
    """One step of Adam or AdamW on every parameter, in place, in one pass over memory.

    ``cpu`` gives the bits of ``torch.optim.AdamW(fused=True)`` and ``Adam(fused=True)`` for float32 gradients and
    moments and ``grad_factor=1``, except where torch works on the rest of a vector one number at a time: there weights
    differ by at most 4 units in the last place of the update.

    Args:
        params: float32.
        grads: float32, bfloat16 or float16, shapes of ``params``. Not changed.
        exp_avgs: First moments, float32, laid out like ``params``.
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
        copies: Low-precision copies to write in the same pass, one entry for each parameter, see
            :func:`autoprec.ops.new_copy`.
        found_inf: ``[]``, float32. Nothing is written, steps included, where it is not zero.
        seed: Of the random bits for 16-bit second moments.
        offset: Place in the stream of random bits; never the same twice.
        implementation: ``"reference"``, ``"cpu"`` or ``"triton"``, ``None`` for the automatic choice.

    Raises:
        ValueError: If dtypes, devices or layouts do not fit.
    """
    prepare_adam(params, exp_avgs, exp_avg_sqs, steps, copies, implementation=implementation)(
        grads,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        maximize=maximize,
        grad_factor=grad_factor,
        found_inf=found_inf,
        seed=seed,
        offset=offset,
    )


def fused_sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None = None,
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    is_first: bool = False,
    grad_factor: float | Tensor = 1.0,
    copies: Sequence[WeightCopy | None] | None = None,
    found_inf: Tensor | None = None,
    implementation: str | None = None,
) -> None:
    """One step of SGD on every parameter, in place, in one pass over memory.

    ``cpu`` gives the bits of ``torch.optim.SGD(fused=True)`` under the conditions of :func:`fused_adam_`.

    Args:
        params: float32.
        grads: float32, bfloat16 or float16, shapes of ``params``. Not changed.
        momentum_buffers: float32, laid out like ``params``, or ``None`` without momentum.
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
        implementation: As for :func:`fused_adam_`.

    Raises:
        ValueError: If dtypes, devices or layouts do not fit.
    """
    prepare_sgd(params, momentum_buffers, copies, implementation=implementation)(
        grads,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        is_first=is_first,
        grad_factor=grad_factor,
        found_inf=found_inf,
    )


def prepare_adam(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[WeightCopy | None] | None = None,
    *,
    amsgrad: bool = False,
    implementation: str | None = None,
) -> AdamStep:
    """Prepares :func:`fused_adam_` for lists that stay the same; holds references to them.

    Args:
        params: As for :func:`fused_adam_`, as are the other lists.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        steps: Counters of applied steps.
        copies: Copies to write, one entry for each parameter.
        amsgrad: What the optimizer says; there is no fused step with it.
        implementation: As for :func:`fused_adam_`.

    Returns:
        ``step(grads, **options)``. A tensor whose storage was replaced (``.data = ...``) is found and checked again.
        Another list, another copy or another dtype needs a new preparation.

    Raises:
        ValueError: If dtypes, devices or layouts do not fit, or with ``amsgrad``.
    """
    if amsgrad:
        raise ValueError(
            "Passed `prepare_adam(amsgrad=True)`. The fused step keeps no maximum of second moments: construct the"
            " optimizer with `amsgrad=False`, or call its own `step()` and then `refresh_copies_`."
        )
    prepare = resolve("prepare_adam", _device_type(params), implementation)
    step: AdamStep = prepare(params, exp_avgs, exp_avg_sqs, steps, copies)
    return step


def prepare_sgd(
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None = None,
    copies: Sequence[WeightCopy | None] | None = None,
    *,
    implementation: str | None = None,
) -> SgdStep:
    """Prepares :func:`fused_sgd_` for lists that stay the same, as :func:`prepare_adam` does."""
    prepare = resolve("prepare_sgd", _device_type(params), implementation)
    step: SgdStep = prepare(params, momentum_buffers, copies)
    return step


def refresh_copies_(
    params: Sequence[Tensor], copies: Sequence[WeightCopy | None], *, implementation: str | None = None
) -> None:
    """Writes the low-precision copies of weights as they are, for weights that something else than a step has written.

    Args:
        params: float32.
        copies: One entry for each parameter, ``None`` for nothing.
        implementation: As for :func:`fused_adam_`.
    """
    resolve("refresh_copies_", _device_type(params), implementation)(params, copies)
