"""Turns what was measured into the readings that a decision rests on, and says what policies are not offered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from autoprec.config import ClipConfig, LossScaleConfig
from autoprec.cost import CostTable, Product, why_unprofitable
from autoprec.cost_watch import CostWatch
from autoprec.formats import get_format, rank
from autoprec.history import Decision
from autoprec.knobs import Knobs, steered_units
from autoprec.machine_load import MachineLoad
from autoprec.planning import UnitErrors
from autoprec.readings import GlobalReading, UnitReading
from autoprec.run_record import UNOFFERED
from autoprec.telemetry import Telemetry, UnitTelemetry
from autoprec.units import Unit

Unoffered = Mapping[str, Mapping[str, str]]
"""Unit name to the formats that its policy may not choose although the user lets it, each with the reason."""


def find_unoffered(knobs: Knobs, telemetry: Telemetry, costs: CostWatch) -> Unoffered:
    """Finds the formats that cannot save time in a unit, for all steered units.

    Args:
        knobs: Current values.
        telemetry: Measurements, flushed.
        costs: What formats cost, where that was measured.
    """
    return {unit.name: _unoffered(unit, knobs, telemetry, costs) for unit in steered_units(knobs)}


def read_units(
    knobs: Knobs,
    telemetry: Telemetry,
    applied_steps: int,
    unoffered: Unoffered,
    costs: CostWatch | None = None,
    errors: Mapping[str, UnitErrors] = MappingProxyType({}),
) -> list[UnitReading]:
    """Readings of all steered units, in the order of their rows.

    Args:
        knobs: Current values.
        telemetry: Measurements, flushed.
        applied_steps: Applied optimizer steps so far.
        unoffered: What :func:`find_unoffered` returned.
        costs: What formats cost; where all units were timed, their shares of compute are shares of time.
        errors: What formats were seen to do to tensors, by unit name.
    """
    units = steered_units(knobs)
    parameters = sum(unit.parameter_count for unit in units) or 1
    compute = _compute_shares(units, knobs, telemetry, None if costs is None else costs.table)
    readings = [
        _read_unit(unit, knobs, telemetry, applied_steps, parameters, compute[unit.name], unoffered[unit.name])
        for unit in units
    ]
    readings = [_with_errors(each, errors[each.name]) if each.name in errors else each for each in readings]
    return readings if costs is None else [_with_costs(reading, costs) for reading in readings]


def _with_costs(reading: UnitReading, costs: CostWatch) -> UnitReading:
    times = costs.relative_times(reading.name, reading.legal)
    if not costs.table:
        return replace(reading, times=times)
    lower, higher = (
        math.nan if other is None else costs.relative_cost(reading.name, other)
        for other in (reading.lower, reading.higher)
    )
    return replace(reading, cost_lower=lower, cost_higher=higher, times=times)


def _with_errors(reading: UnitReading, measured: UnitErrors) -> UnitReading:
    errors = {name: measured.relative[name] for name in reading.legal if name in measured.relative}
    current, lower, higher = (
        errors.get(name or reading.format, math.nan) for name in (reading.format, reading.lower, reading.higher)
    )
    return replace(
        reading,
        error=current,
        error_lower=lower,
        error_higher=higher,
        errors=errors,
        passed_amax=measured.gradient_amax,
    )


def _compute_shares(
    units: Sequence[Unit], knobs: Knobs, telemetry: Telemetry, table: CostTable | None
) -> dict[str, float]:
    """Shares of the time of all units, or of their multiplications while not all of them were timed."""
    work = {unit.name: telemetry.units[unit.name].compute for unit in units}
    if table:
        times = {name: table.unit_ms(name, knobs.formats[name]) for name, compute in work.items() if compute}
        if times and None not in times.values():
            work = {name: times.get(name) or 0.0 for name in work}
    total = sum(work.values()) or 1.0
    return {name: value / total for name, value in work.items()}


def record_unoffered(knobs: Knobs, telemetry: Telemetry, costs: CostWatch, window: int, unoffered: Unoffered) -> None:
    """Puts on record, once for each unit, which formats its policy may not choose because they cannot pay.

    Args:
        knobs: Current values.
        telemetry: Measurements, flushed.
        costs: What formats cost, where that was measured.
        window: Index of the window that begins.
        unoffered: What :func:`find_unoffered` returned.
    """
    known = {(d.unit, d.requested) for d in knobs.history if d.outcome == "refused" and d.reason.startswith(UNOFFERED)}
    for unit, reasons in unoffered.items():
        for name, reason in reasons.items():
            if (unit, name) not in known and (telemetry.units[unit].calls or costs.has_seen(unit)):
                current = knobs.formats[unit]
                why = f"{UNOFFERED}: {reason}"
                knobs.history.append(Decision(window, "precision", unit, current, name, current, "refused", why))


def _unoffered(unit: Unit, knobs: Knobs, telemetry: Telemetry, costs: CostWatch) -> dict[str, str]:
    products = costs.products(unit.name) or _products(unit, telemetry.units[unit.name])
    reasons: dict[str, str] = {}
    legal = knobs.steerable(unit)
    for name in legal:
        if name == knobs.formats[unit.name]:
            continue
        if costs.knows(unit.name, name):
            reason = costs.why_not(unit.name, name, [other for other in legal if other not in reasons])
        elif get_format(name).bits > 8 and rank(name) < rank(knobs.formats[unit.name]):
            continue  # a unit is raised to bf16 for other reasons than to save time
        else:
            reason = why_unprofitable(name, knobs.runtime.device_type, unit.is_emulated(name), products)
        if reason is not None:
            reasons[name] = reason
    return reasons


def _products(unit: Unit, measured: UnitTelemetry) -> list[Product]:
    """What the linear layers of a unit multiply in a call, if all of them are called equally often."""
    sizes = [(m.in_features, m.out_features) for m in unit.modules if isinstance(m, nn.Linear)]
    weights = sum(inner * outer for inner, outer in sizes) * measured.calls
    rows = measured.compute * len(sizes) / weights if weights else math.nan
    return [Product(rows, *size) for size in sizes]


def _read_unit(
    unit: Unit,
    knobs: Knobs,
    telemetry: Telemetry,
    applied_steps: int,
    parameters: int,
    compute_share: float,
    unoffered: Mapping[str, str],
) -> UnitReading:
    measured = telemetry.units[unit.name]
    current = knobs.formats[unit.name]
    held = knobs.guard.is_held(unit.name, applied_steps)
    return UnitReading(
        name=unit.name,
        kind=unit.kind,
        depth=unit.depth,
        parameter_share=unit.parameter_count / parameters,
        compute_share=compute_share,
        format=current,
        legal=(current,) if held else tuple(name for name in knobs.steerable(unit) if name not in unoffered),
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
        steps_since_change=applied_steps - knobs.unit_formats.changed_at[unit.name],
        overflow_count=measured.overflow_count,
        held=held,
        frozen=unit.is_frozen,
        emulated=unit.is_emulated(current),
    )


def read_globals(
    knobs: Knobs,
    telemetry: Telemetry,
    progress: float,
    load: MachineLoad | None = None,
    costs: CostWatch | None = None,
) -> GlobalReading:
    """The run's reading.

    Args:
        knobs: Current values.
        telemetry: Measurements, flushed.
        progress: Share of the run that is over, NaN if unknown.
        load: Reads the machine, ``None`` where no choice may rest on it.
        costs: Knows the times of steps.
    """
    applied = sum(telemetry.outcomes)
    clipped = list(telemetry.clipped)[-applied:] if applied else []
    noise_scale, noise_scale_error = telemetry.noise.scale.estimate
    size = knobs.batch_size.size or 0
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
        loss_change_bits=telemetry.loss_change_bits,
        noise_scale=noise_scale,
        noise_scale_error=noise_scale_error,
        effective_batch=telemetry.noise.effective_batch,
        batch_size=size,
        memory_share=math.nan if load is None else load.memory_share(),
        utilization=math.nan if load is None else load.utilization(),
        movable=frozenset(_movable(knobs)),
        loss_scale_limits=(knobs.loss_scale.config.floor, knobs.loss_scale.config.cap),
        step_time_bits=math.nan if costs is None else costs.clock.time_bits,
        cost_lower=math.nan if costs is None else costs.clock.cost_of_size(size, size // 2),
        cost_higher=math.nan if costs is None else costs.clock.cost_of_size(size, size * 2),
        chosen=frozenset(_chosen(knobs)),
    )


def _movable(knobs: Knobs) -> set[str]:
    """Knobs of the run that a policy may move."""
    movable = {knob for knob in ("loss_scale", "batch_size", "clip") if knob not in knobs.masked}
    if not knobs.loss_scale.enabled:
        movable.discard("loss_scale")  # nothing needs it, so it would have no effect
    if knobs.base.clip is not None:
        movable.discard("clip")  # the user chose a threshold; scripts and requests may still move it
    return movable


def _chosen(knobs: Knobs) -> set[str]:
    """Knobs of the run that hold what the user has chosen, by a setting or by a request."""
    chosen = set()
    if not knobs.threshold.follows_median or knobs.threshold.config.multiplier != ClipConfig().multiplier:
        chosen.add("clip")
    if knobs.loss_scale.is_pinned or knobs.loss_scale.config.init_scale != LossScaleConfig().init_scale:
        chosen.add("loss_scale")
    return chosen
