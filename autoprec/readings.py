"""What is known when a decision is due.

What lives here: one unit's reading and the run's reading, plain Python numbers in the units that people think in. What
does not: measuring them (telemetry) and turning them into features (encoding).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoprec.formats import rank

LAYER_KINDS = ("linear", "conv", "embedding", "rnn", "attention", "norm", "other")
"""Kinds of layer that a policy can tell apart."""


@dataclass(frozen=True, kw_only=True)
class UnitReading:
    """What is known about a unit when a decision is due. NaN means not known.

    Args:
        name: Unit name.
        kind: One of ``LAYER_KINDS``. Anything else counts as ``"other"``.
        depth: Position in the model, 0 for the first unit and 1 for the last.
        parameter_share: Share of the model's parameters.
        compute_share: Share of the model's compute.
        format: Current format.
        legal: Formats the unit may be given, from wide to narrow.
        grad_amax: Largest absolute unscaled gradient in the window.
        grad_norm: Newest norm of the unscaled gradient.
        grad_norm_history: Norms in the window, newest last.
        nonfinite_count: Non-finite gradient elements in the window.
        underflow_fraction: Share of the gradient that underflows in the current format.
        underflow_fraction_lower: Share that would underflow in the next lower legal format.
        weight_subnormal: Share of the weights that are not zero but below the current format's smallest normal number.
        weight_subnormal_lower: The same in the next lower legal format.
        act_amax: Largest absolute output, if it was sampled.
        act_amax_history: Sampled values, newest last.
        steps_since_change: Applied steps since the format changed, or since the start.
        overflow_count: Outputs outside the format's range in the window.
        held: Whether the guard holds the unit where it is.
        frozen: Whether no parameter of the unit takes gradients.
        emulated: Whether the current format is emulated.
        error: Error of the current format on this unit's tensors, relative to the centred signal; 2 where it overflows.
        error_lower: The same in the next lower legal format.
        error_higher: The same in the next higher one.
        cost_lower: Relative change of the step time if the unit takes the next lower legal format.
        cost_higher: The same for the next higher one.
        proposal: Moves from the current format to the one that a table of costs and errors proposes; positive: higher.
        errors: Error by legal format, as far as it is known.
        times: Time of a step that the unit takes in each legal format, in units of that in the current one, as measured
            or else by a rule of thumb; formats that are not known to pay are left out.
        passed_amax: Largest absolute unscaled gradient of weights and outputs when errors were last measured.
    """

    name: str
    kind: str = "other"
    depth: float = 0.0
    parameter_share: float = 0.0
    compute_share: float = 0.0
    format: str = "fp32"
    legal: tuple[str, ...] = ("fp32",)
    grad_amax: float = math.nan
    grad_norm: float = math.nan
    grad_norm_history: tuple[float, ...] = ()
    nonfinite_count: int = 0
    underflow_fraction: float = math.nan
    underflow_fraction_lower: float = math.nan
    weight_subnormal: float = math.nan
    weight_subnormal_lower: float = math.nan
    act_amax: float = math.nan
    act_amax_history: tuple[float, ...] = ()
    steps_since_change: int = 0
    overflow_count: int = 0
    held: bool = False
    frozen: bool = False
    emulated: bool = False
    error: float = math.nan
    error_lower: float = math.nan
    error_higher: float = math.nan
    cost_lower: float = math.nan
    cost_higher: float = math.nan
    proposal: float = math.nan
    errors: Mapping[str, float] = field(default_factory=dict, hash=False)
    times: Mapping[str, float] = field(default_factory=dict, hash=False)
    passed_amax: float = math.nan

    @property
    def lower(self) -> str | None:
        """Next lower legal format, or ``None`` at the end of the range."""
        narrower = [name for name in self.legal if rank(name) > rank(self.format)]
        return min(narrower, key=rank, default=None)

    @property
    def higher(self) -> str | None:
        """Next higher legal format, or ``None`` at the end of the range."""
        wider = [name for name in self.legal if rank(name) < rank(self.format)]
        return max(wider, key=rank, default=None)


@dataclass(frozen=True, kw_only=True)
class GlobalReading:
    """What is known about the run when a decision is due. NaN means not known.

    Args:
        losses: Loss per batch in the window, newest last.
        loss_scale: Current loss scale. 1.0 if none is in use.
        loss_scale_history: Loss scales in the window, newest last.
        growth_tracker: Clean steps counted towards the next growth.
        applied_share: Share of the optimizer steps in the window that were applied.
        clipped_share: Share of them in which the clip threshold acted.
        norms: Finite global norms of the unscaled gradient before clipping, newest last.
        clip_threshold: Current threshold. ``inf`` if clipping is off.
        progress: Share of the run that is over.
        batch_size: The loader's batch size per rank. 0 if it is not known.
        loss_change_bits: log2 of the loss over that before formats last changed.
        noise_scale: Gradient-noise scale in samples.
        noise_scale_error: Its standard error.
        effective_batch: Samples behind an optimizer step.
        memory_share: Share of the memory that is taken.
        utilization: Share of the time that the processor was busy since the last decision.
        movable: Which of ``"loss_scale"``, ``"batch_size"`` and ``"clip"`` act here. The others are masked.
        loss_scale_limits: Floor and cap of the loss scale.
        step_time_bits: log2 of the step time over that of the run's first steps.
        cost_lower: Relative change of the time per sample at half the batch size.
        cost_higher: The same at twice the batch size.
        proposal: Moves from the current batch size to the proposed one; positive: larger.
        loss_scale_proposal: The same of the loss scale.
        clip_proposal: The same of the clip threshold.
        chosen: Which of ``"loss_scale"`` and ``"clip"`` hold what the user has chosen.
    """

    losses: tuple[float, ...] = ()
    loss_scale: float = 1.0
    loss_scale_history: tuple[float, ...] = ()
    growth_tracker: int = 0
    applied_share: float = 1.0
    clipped_share: float = 0.0
    norms: tuple[float, ...] = ()
    clip_threshold: float = math.inf
    progress: float = math.nan
    batch_size: int = 0
    loss_change_bits: float = math.nan
    noise_scale: float = math.nan
    noise_scale_error: float = math.nan
    effective_batch: float = math.nan
    memory_share: float = math.nan
    utilization: float = math.nan
    movable: frozenset[str] = frozenset({"loss_scale", "batch_size", "clip"})
    loss_scale_limits: tuple[float, float] = (0.0, math.inf)
    step_time_bits: float = math.nan
    cost_lower: float = math.nan
    cost_higher: float = math.nan
    proposal: float = math.nan
    loss_scale_proposal: float = math.nan
    clip_proposal: float = math.nan
    chosen: frozenset[str] = frozenset()

    @functools.cached_property
    def median_norm(self) -> float:
        """Median of the finite global norms. NaN if there is none."""
        finite = [norm for norm in self.norms if math.isfinite(norm)]
        return float(statistics.median(finite)) if finite else math.nan
