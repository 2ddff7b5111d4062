"""Turns what was measured into the readings that a decision rests on."""

from __future__ import annotations

import math

from autoprec.knobs import Knobs, steered_units
from autoprec.readings import GlobalReading, UnitReading
from autoprec.telemetry import Telemetry
from autoprec.units import Unit


def read_units(knobs: Knobs, telemetry: Telemetry, applied_steps: int) -> list[UnitReading]:
    """Readings of all steered units, in the order of their rows.

    Args:
        knobs: Current values.
        telemetry: Measurements, flushed.
        applied_steps: Applied optimizer steps so far.
    """
    units = steered_units(knobs)
    parameters = sum(unit.parameter_count for unit in units) or 1
    compute = sum(telemetry.units[unit.name].compute for unit in units) or 1.0
    return [_read_unit(unit, knobs, telemetry, applied_steps, parameters, compute) for unit in units]


def _read_unit(
    unit: Unit, knobs: Knobs, telemetry: Telemetry, applied_steps: int, parameters: int, compute: float
) -> UnitReading:
    measured = telemetry.units[unit.name]
    current = knobs.formats[unit.name]
    held = knobs.guard.is_held(unit.name, applied_steps)
    return UnitReading(
        name=unit.name,
        kind=unit.kind,
        depth=unit.depth,
        parameter_share=unit.parameter_count / parameters,
        compute_share=measured.compute / compute,
        format=current,
        legal=(current,) if held else knobs.steerable(unit),
        grad_amax=measured.amax,
        grad_norm=measured.norms[-1] if measured.norms else math.nan,
        grad_norm_history=tuple(measured.norms),
        nonfinite_count=measured.nonfinite_count,
        underflow_fraction=measured.underflow_fraction,
        underflow_fraction_lower=measured.underflow_fraction_lower,
        weight_subnormal=measured.weight_subnormal,
        weight_subnormal_lower=measured.weight_subnormal_lower,
        act_amax=measured.act_amax[-1] if measured.act_amax else math.nan,
        act_amax_history=tuple(measured.act_amax),
        steps_since_change=applied_steps - knobs.changed_at[unit.name],
        overflow_count=measured.overflow_count,
        held=held,
        frozen=unit.is_frozen,
        emulated=unit.is_emulated(current),
    )


def read_globals(knobs: Knobs, telemetry: Telemetry, progress: float) -> GlobalReading:
    """The run's reading.

    Args:
        knobs: Current values.
        telemetry: Measurements, flushed.
        progress: Share of the run that is over, NaN if unknown.
    """
    applied = sum(telemetry.outcomes)
    clipped = list(telemetry.clipped)[-applied:] if applied else []
    return GlobalReading(
        losses=tuple(telemetry.losses),
        loss_scale=knobs.loss_scale.scale,
        loss_scale_history=tuple(telemetry.loss_scales),
        growth_tracker=knobs.loss_scale.growth_tracker,
        applied_share=applied / len(telemetry.outcomes) if telemetry.outcomes else 1.0,
        clipped_share=sum(clipped) / len(clipped) if clipped else 0.0,
        norms=tuple(telemetry.norms),
        clip_threshold=knobs.clip,
        progress=progress,
        movable=frozenset(_movable(knobs)),
        loss_scale_limits=(knobs.loss_scale.config.floor, knobs.loss_scale.config.cap),
    )


def _movable(knobs: Knobs) -> set[str]:
    """Knobs of the run that a policy may move."""
    movable = {knob for knob in ("loss_scale", "batch_size", "clip") if knob not in knobs.masked}
    if not knobs.loss_scale.enabled:
        movable.discard("loss_scale")  # nothing needs it, so it would have no effect
    if knobs.base.clip is not None:
        movable.discard("clip")  # the user chose a threshold; scripts and requests may still move it
    return movable
