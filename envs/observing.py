"""What a simulation shows, in the columns that ``autoprec.encoding`` turns into features for live runs too."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.engine import FORMATS as ENGINE_FORMATS
from autoprec.envs.proxies import BATCH_SIZES
from autoprec.envs.simulation import Simulation
from autoprec.feature_rows import Places, Prices, RunColumns, UnitColumns, fill_rows
from autoprec.formats import E4M3, E5M2, FORMATS, get_format
from autoprec.trends import Rows

Array = NDArray[Any]

_LIVE_NAMES = {"fp8-unscaled": "fp8"}
_WIDE = get_format("bf16")


def _limits(unscaled_fp8: float) -> Array:
    known = {name: get_format(name).max for name in ("fp32", "bf16", "fp16")} | {"fp8-unscaled": unscaled_fp8}
    return np.array([known.get(name, _WIDE.max) for name in ENGINE_FORMATS])  # scaled ones come from and go to bf16


ACTIVATION_LIMIT = _limits(E4M3.max)
"""Largest activation that each of the engine's formats can take."""
GRADIENT_LIMIT = _limits(E5M2.max)
"""The same of gradients."""
NEEDS_SCALE = np.array([name in ("fp16", "fp8-unscaled") for name in ENGINE_FORMATS])
"""Whether a format needs a loss scale."""
_FORMAT_INDEX = np.array(
    [list(FORMATS).index(_LIVE_NAMES.get(n, n)) if _LIVE_NAMES.get(n, n) in FORMATS else -1 for n in ENGINE_FORMATS]
)
_BITS = np.array([32, 16, 16, 8, 8, 8, 4, 4])


def memory_share(simulation: Simulation) -> Array:
    """Returns the bits of each run's units, weighted by their parameters, relative to fp32."""
    share = np.zeros(simulation.is_unit.shape)
    for index, task in enumerate(simulation.tasks):
        share[index, : task.units] = task.parameter_share
    return np.asarray((share * _BITS[np.maximum(simulation.formats, 0)]).sum(axis=1) / 32.0)


def observe(
    simulation: Simulation, at: Places, held: Array, proposal: Array, can_lower: Array, can_raise: Array
) -> NDArray[np.float32]:
    """Returns the rows of all runs.

    Args:
        simulation: The runs.
        at: From ``feature_rows.places``.
        held: ``[runs, units]``: units that the guard holds.
        proposal: ``[rows]``: moves from where each knob is to what is proposed.
        can_lower: ``[rows]``: whether a knob may be lowered.
        can_raise: The same for raising.
    """
    units = _unit_columns(simulation, held, can_lower[at.units], can_raise[at.units])
    runs = _run_columns(simulation, can_lower[at.knobs], can_raise[at.knobs])
    return fill_rows(units, runs, _prices(simulation, at, proposal), at)


def neighbours(simulation: Simulation) -> tuple[Array, Array]:
    """Returns the next lower and next higher format of each unit; at the end of the ladder the current one."""
    last = (simulation.levels - 1)[:, None]
    below = np.take_along_axis(simulation.ladder, np.minimum(simulation.level + 1, last), axis=1)
    above = np.take_along_axis(simulation.ladder, np.maximum(simulation.level - 1, 0), axis=1)
    return below, above


def _unit_columns(s: Simulation, held: Array, can_lower: Array, can_raise: Array) -> UnitColumns:
    own, formats = s.is_unit, s.formats[s.is_unit]
    below, above = (other[own] for other in neighbours(s))
    errors, window = s.worst_errors()[own], s.windows
    units = own.shape[1]
    norms, amaxes = Rows(s.gradient_norm[own]), Rows(s.activation_amax[own])
    overflows = window["overflows"][:, :units].sum(axis=2)[own]
    at = np.arange(len(formats))
    with np.errstate(all="ignore"):
        act_amax = np.fmax.reduce(np.where(s.activation_amax[own] > 0, s.activation_amax[own], np.nan)[:, -16:], axis=1)
    tasks = s.tasks
    return UnitColumns(
        run=np.repeat(np.arange(len(s)), own.sum(axis=1)),
        kind=np.concatenate([task.kinds for task in tasks]),
        format=_FORMAT_INDEX[formats],
        can_lower=can_lower,
        can_raise=can_raise,
        depth=np.concatenate([task.depth for task in tasks]),
        parameter_share=np.concatenate([task.parameter_share for task in tasks]),
        compute_share=np.concatenate([task.compute_share for task in tasks]),
        grad_amax=window["gradient_amax"][:, :units][own].astype(np.float64),
        grad_limit=GRADIENT_LIMIT[formats],
        grad_limit_lower=GRADIENT_LIMIT[below],
        act_amax=act_amax,
        act_limit=ACTIVATION_LIMIT[formats],
        act_limit_lower=ACTIVATION_LIMIT[below],
        grad_norm=s.gradient_norm[own][:, -1],
        grad_cv=norms.spread_around_drift(),
        grad_trend=norms.drift_bits(),
        grad_readings=norms.count,
        act_drift=amaxes.drift_bits(),
        underflow_fraction=s.underflow[own][:, 2][at, formats],
        underflow_fraction_lower=s.underflow[own][:, 2][at, below],
        weight_subnormal=s.subnormal[own][at, formats],
        weight_subnormal_lower=s.subnormal[own][at, below],
        steps_since_change=s.since_change[own],
        overflow_count=overflows,
        is_nonfinite=overflows > 0,
        held=held[own],
        frozen=np.zeros(len(formats), dtype=bool),
        emulated=np.zeros(len(formats), dtype=bool),
        error=errors[at, formats],
        error_lower=errors[at, below],
        error_higher=errors[at, above],
    )


def _run_columns(s: Simulation, can_lower: Array, can_raise: Array) -> RunColumns:
    losses, norms, scales = Rows(s.losses), Rows(s.norms), Rows(s.scales)
    median, window = norms.median(), s.windows
    steps = np.maximum(window["steps"], 1)
    sizes = np.array(BATCH_SIZES)[s.batch_index].astype(np.float64)
    unknown = np.full(len(s), np.nan)
    return RunColumns(
        loss_fast=losses.relative_change(4),
        loss_slow=losses.relative_change(2),
        loss_cv=losses.spread(),
        is_loss_nonfinite=~np.isfinite(s.losses[:, -1]),
        loss_change_bits=unknown,
        loss_scale=s.loss_scale,
        loss_scale_trend=scales.drift_bits(),
        growth_tracker=window["growth_tracker"],
        applied_share=1.0 - window["skipped"] / steps,
        clipped_share=window["clipped"] / steps,
        clip_threshold=_clip_threshold(s.clip_index, median),
        norm_cv=norms.spread(),
        norm_trend=norms.drift_bits(),
        median_norm=median,
        is_norm_nonfinite=window["skipped"] > 0,
        progress=s.share,
        batch_size=sizes,
        effective_batch=sizes,
        noise_scale=window["noise_scale"].astype(np.float64),
        noise_scale_error=np.zeros(len(s)),
        memory_share=unknown,
        utilization=unknown,
        step_time_bits=np.log2(s.measured_time / s.first_step_time),
        learning_rate_bits=np.log2(s.learning_rate / s.largest_learning_rate),
        is_adaptive=np.array([task.spec["optimizer"] != 0 for task in s.tasks]),
        can_lower=can_lower,
        can_raise=can_raise,
    )


def _clip_threshold(index: Array, median: Array) -> Array:
    multiplier = np.array(CLIP_MULTIPLIERS)[index]
    # off stays off where gradients underflow altogether, whose median is 0
    threshold: Array = np.full(len(median), np.inf)
    np.multiply(multiplier, median, where=np.isfinite(multiplier), out=threshold)
    return threshold


def _prices(s: Simulation, at: Places, proposal: Array) -> Prices:
    columns = {field.name: np.full(len(proposal), np.nan) for field in fields(Prices)} | {"proposal": proposal}
    last = s.levels - 1
    expected = s.estimate.step_time(s.level, s.batch_index, s.cast_time())
    for side, step in (("lower", 1), ("higher", -1)):
        other = np.clip(s.level + step, 0, last[:, None])
        change, spread = s.estimate.move(s.level, other, s.batch_index)
        casts = s.table.casts_moved(s.formats, s.batch_index, np.take_along_axis(s.ladder, other, axis=1))
        columns[f"cost_{side}"][at.units] = ((change + casts) / expected[:, None])[s.is_unit]
        columns[f"cost_{side}_spread"][at.units] = (spread / expected[:, None])[s.is_unit]
    for side, step in (("lower", -1), ("higher", 1)):
        columns[f"cost_{side}"][at.knobs[:, 1]] = _elasticity(s, expected, step)
    return Prices(**columns)


def _elasticity(s: Simulation, expected: Array, step: int) -> Array:
    """Relative change of the time per sample at the next batch size, NaN beyond the range."""
    other = s.batch_index + step
    inside = np.clip(other, 0, len(BATCH_SIZES) - 1)
    time = s.estimate.step_time(s.level, inside, s.table.cast_time(s.formats, inside))
    sizes = np.array(BATCH_SIZES)
    change = (time / sizes[inside]) / (expected / sizes[s.batch_index]) - 1.0
    return np.where(inside == other, change, np.nan)
