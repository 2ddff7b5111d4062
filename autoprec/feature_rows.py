"""The layout of an observation and the formulas that fill it, for any number of runs at once.

What lives here: from columns of numbers, one entry for each unit or run, to rows of features. What does not: the
meaning of the features (``encoding`` lists them) and where the numbers come from. A live run and thousands of proxy
runs go through this one function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.formats import FORMATS
from autoprec.readings import LAYER_KINDS

LIMIT = 10.0
"""Features lie in ``[-LIMIT, LIMIT]``."""

HEADROOM_BITS = 16.0
"""Bits of headroom that make 1.0 in a headroom feature."""

READINGS = 64.0
"""Readings in the window that make 1.0 in ``grad_readings``."""

Column = NDArray[Any]


class KnobKind(str, Enum):
    """Kinds of knob. Every unit has a precision knob, the others exist once and follow the units in this order."""

    PRECISION = "precision"
    LOSS_SCALE = "loss_scale"
    BATCH_SIZE = "batch_size"
    CLIP = "clip"


RUN_KNOBS = len(KnobKind) - 1
"""Knobs that a run has once."""

_KNOBS = tuple(f"knob_{kind.value}" for kind in KnobKind)
_UNIT_FEATURES = (
    *(f"layer_{kind}" for kind in LAYER_KINDS),
    *(f"format_{name}" for name in FORMATS),
    *("depth", "parameter_share", "compute_share"),
    *("grad_headroom", "grad_headroom_lower", "act_headroom", "act_headroom_lower", "grad_known", "act_known"),
    *("grad_cv", "grad_trend", "grad_readings", "grad_share", "act_drift"),
    *("underflow", "underflow_lower", "underflow_lower_known", "weight_subnormal", "weight_subnormal_lower"),
    *("steps_since_change", "overflows", "nonfinite", "held", "frozen", "emulated"),
)
_POOLED = ("pool_units", "pool_rank", "pool_grad_headroom", "pool_act_headroom", "pool_underflow", "pool_overflows")
_GLOBAL_FEATURES = (
    *("loss_fast", "loss_slow", "loss_cv", "loss_nonfinite", "loss_since_change", "loss_since_change_known"),
    *("loss_scale", "loss_scale_trend", "growth_tracker", "applied_share", "clipped_share", "clip", "clip_off"),
    *("norm_cv", "norm_trend", "norm_median", "norm_nonfinite", "progress", "progress_known", "batch_size"),
    *("noise_scale", "noise_known", "noise_error"),
    *("memory", "memory_known", "utilization", "utilization_known"),
    *_POOLED,
)
_PRICE_FEATURES = ("proposal", "cost_lower", "cost_higher", "cost_known")
_ERROR_FEATURES = ("error", "error_lower", "error_higher", "error_known")
FEATURES: tuple[str, ...] = (
    *(*_KNOBS, "can_lower", "can_raise", *_UNIT_FEATURES, *_GLOBAL_FEATURES),
    *(*_PRICE_FEATURES, *_ERROR_FEATURES, "step_time", "step_time_known"),
    *("cost_lower_spread", "cost_higher_spread", "learning_rate", "adaptive"),
)
"""Names of the columns of an observation, in order."""

INDEX = {name: index for index, name in enumerate(FEATURES)}
"""Column of each feature."""


@dataclass(frozen=True, kw_only=True)
class UnitColumns:
    """What is known about units: one entry each, those of a run side by side. NaN means not known.

    Fields without a line here are fields of ``UnitReading``.

    Args:
        run: Index of the run a unit belongs to, ascending.
        kind: Index in ``LAYER_KINDS``.
        format: Index in ``FORMATS``; -1 for a format that is not in it.
        can_lower: Whether there is a lower legal format.
        can_raise: Whether there is a higher one.
        grad_limit: Largest magnitude of gradients in the current format; ``_lower`` in the next lower one.
        act_limit: The same of activations.
        grad_cv: Spread of the gradient norms around their drift.
        grad_trend: Drift of the gradient norms in bits.
        grad_readings: Finite gradient norms in the window.
        act_drift: Drift of the activations' amax in bits.
        is_nonfinite: Whether something about the unit was not finite.
    """

    run: Column
    kind: Column
    format: Column
    can_lower: Column
    can_raise: Column
    depth: Column
    parameter_share: Column
    compute_share: Column
    grad_amax: Column
    grad_limit: Column
    grad_limit_lower: Column
    act_amax: Column
    act_limit: Column
    act_limit_lower: Column
    grad_norm: Column
    grad_cv: Column
    grad_trend: Column
    grad_readings: Column
    act_drift: Column
    underflow_fraction: Column
    underflow_fraction_lower: Column
    weight_subnormal: Column
    weight_subnormal_lower: Column
    steps_since_change: Column
    overflow_count: Column
    is_nonfinite: Column
    held: Column
    frozen: Column
    emulated: Column
    error: Column
    error_lower: Column
    error_higher: Column


@dataclass(frozen=True, kw_only=True)
class RunColumns:
    """What is known about runs, one entry each. NaN means not known.

    Fields without a line here are fields of ``GlobalReading``.

    Args:
        loss_fast: Relative change of the loss over a quarter of the window.
        loss_slow: The same over half of it.
        loss_cv: Relative spread of the losses.
        is_loss_nonfinite: Whether a loss was not finite.
        loss_scale_trend: Drift of the loss scale in bits.
        norm_cv: Relative spread of the global norms.
        norm_trend: Their drift in bits.
        is_norm_nonfinite: Whether one was not finite.
        can_lower: ``[runs, 3]``: whether loss scale, batch size and clip can be lowered.
        can_raise: The same for raising.
    """

    loss_fast: Column
    loss_slow: Column
    loss_cv: Column
    is_loss_nonfinite: Column
    loss_change_bits: Column
    loss_scale: Column
    loss_scale_trend: Column
    growth_tracker: Column
    applied_share: Column
    clipped_share: Column
    clip_threshold: Column
    norm_cv: Column
    norm_trend: Column
    median_norm: Column
    is_norm_nonfinite: Column
    progress: Column
    batch_size: Column
    effective_batch: Column
    noise_scale: Column
    noise_scale_error: Column
    memory_share: Column
    utilization: Column
    step_time_bits: Column
    learning_rate_bits: Column
    is_adaptive: Column
    can_lower: Column
    can_raise: Column


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What moves of knobs would change, one entry for each row. NaN means not known.

    Args:
        proposal: Moves from where the knob is to what the table proposes.
        cost_lower: Relative change of the step time if the knob is lowered; per sample for the batch size.
        cost_higher: The same if it is raised.
        cost_lower_spread: Standard deviation of ``cost_lower``; NaN where it was measured well.
        cost_higher_spread: The same of ``cost_higher``.
    """

    proposal: Column
    cost_lower: Column
    cost_higher: Column
    cost_lower_spread: Column
    cost_higher_spread: Column


@dataclass(frozen=True)
class Places:
    """Where rows are: those of a run's units, then its three others; run after run.

    Attributes:
        units: Row of each unit.
        knobs: ``[runs, 3]``: rows of the others.
        run: Run of each row.
    """

    units: NDArray[np.intp]
    knobs: NDArray[np.intp]
    run: NDArray[np.intp]


def places(run_of_unit: Column, runs: int) -> Places:
    """Returns where the rows of units and runs are.

    Args:
        run_of_unit: Run of each unit, ascending.
        runs: How many runs there are; some may have no units.
    """
    counts = np.bincount(run_of_unit, minlength=runs)
    first_knob = np.cumsum(counts) + RUN_KNOBS * np.arange(runs)
    unit_rows = np.arange(len(run_of_unit)) + RUN_KNOBS * run_of_unit
    knob_rows = first_knob[:, None] + np.arange(RUN_KNOBS)
    return Places(unit_rows, knob_rows, np.repeat(np.arange(runs), counts + RUN_KNOBS))


@np.errstate(over="ignore", invalid="ignore")
def fill_rows(units: UnitColumns, runs: RunColumns, prices: Prices | None, at: Places) -> NDArray[np.float32]:
    """Turns columns into rows of features.

    Args:
        units: The units of all runs.
        runs: The runs.
        prices: What moves would change, or ``None`` where nothing is known.
        at: From :func:`places`.

    Returns:
        ``[rows, features]``, float32, finite, in ``[-LIMIT, LIMIT]``.
    """
    rows = np.zeros((len(at.run), len(FEATURES)))
    _fill_moves(rows, units, runs, at)
    unit_features = _unit_features(units, _log2_or_zero(runs.median_norm)[units.run])
    columns = np.array([INDEX[name] for name in unit_features])
    rows[np.ix_(at.units, columns)] = np.stack([*unit_features.values()], axis=1)
    rows[at.units, INDEX["layer_" + LAYER_KINDS[0]] + units.kind] = 1.0
    named = units.format >= 0
    rows[at.units[named], INDEX["format_" + next(iter(FORMATS))] + units.format[named]] = 1.0
    shared = {**_global_features(runs), **_pooled_features(units, len(runs.progress))}
    rows[:, [INDEX[name] for name in shared]] = np.stack([*shared.values()], axis=1)[at.run]
    if prices is not None:
        _fill_prices(rows, prices)
    return np.clip(np.nan_to_num(rows, nan=0.0, posinf=LIMIT, neginf=-LIMIT), -LIMIT, LIMIT).astype(np.float32)


def _fill_moves(rows: Column, units: UnitColumns, runs: RunColumns, at: Places) -> None:
    rows[at.units, INDEX["knob_precision"]] = 1.0
    rows[at.units, INDEX["can_lower"]] = units.can_lower & ~units.held
    rows[at.units, INDEX["can_raise"]] = units.can_raise
    rows[at.knobs, INDEX["knob_precision"] + 1 + np.arange(RUN_KNOBS)] = 1.0
    rows[at.knobs, INDEX["can_lower"]] = runs.can_lower
    rows[at.knobs, INDEX["can_raise"]] = runs.can_raise


def _fill_prices(rows: Column, prices: Prices) -> None:
    rows[:, INDEX["proposal"]] = prices.proposal
    rows[:, INDEX["cost_lower"]] = 10.0 * prices.cost_lower
    rows[:, INDEX["cost_higher"]] = 10.0 * prices.cost_higher
    rows[:, INDEX["cost_lower_spread"]] = 10.0 * prices.cost_lower_spread
    rows[:, INDEX["cost_higher_spread"]] = 10.0 * prices.cost_higher_spread
    rows[:, INDEX["cost_known"]] = ~np.isnan(prices.cost_lower) | ~np.isnan(prices.cost_higher)


def _unit_features(units: UnitColumns, median_bits: Column) -> Mapping[str, Column]:
    return {
        "depth": units.depth,
        "parameter_share": units.parameter_share,
        "compute_share": units.compute_share,
        "grad_headroom": _headroom(units.grad_amax, units.grad_limit),
        "grad_headroom_lower": _headroom(units.grad_amax, units.grad_limit_lower),
        "act_headroom": _headroom(units.act_amax, units.act_limit),
        "act_headroom_lower": _headroom(units.act_amax, units.act_limit_lower),
        "grad_known": ~np.isnan(units.grad_amax),
        "act_known": ~np.isnan(units.act_amax),
        "grad_cv": units.grad_cv,
        "grad_trend": units.grad_trend,
        "grad_readings": units.grad_readings / READINGS,
        "grad_share": (_log2_or_zero(units.grad_norm) - median_bits) / 16.0,
        "act_drift": units.act_drift,
        "underflow": units.underflow_fraction,
        "underflow_lower": units.underflow_fraction_lower,
        "underflow_lower_known": ~np.isnan(units.underflow_fraction_lower),
        "weight_subnormal": units.weight_subnormal,
        "weight_subnormal_lower": units.weight_subnormal_lower,
        "steps_since_change": _log_steps(units.steps_since_change),
        "overflows": _log2(1.0 + np.maximum(units.overflow_count, 0)) / 4.0,
        "nonfinite": units.is_nonfinite,
        "held": units.held,
        "frozen": units.frozen,
        "emulated": units.emulated,
        "error": _error_bits(units.error),
        "error_lower": _error_bits(units.error_lower),
        "error_higher": _error_bits(units.error_higher),
        "error_known": ~np.isnan(units.error),
    }


def _global_features(runs: RunColumns) -> Mapping[str, Column]:
    median_bits = _log2_or_zero(runs.median_norm)
    is_clip_off = np.isinf(runs.clip_threshold)
    clip = (_log2_or_zero(runs.clip_threshold) - median_bits) / 4.0
    return {
        "loss_fast": 10.0 * runs.loss_fast,
        "loss_slow": 10.0 * runs.loss_slow,
        "loss_cv": runs.loss_cv,
        "loss_nonfinite": runs.is_loss_nonfinite,
        "loss_since_change": runs.loss_change_bits,
        "loss_since_change_known": ~np.isnan(runs.loss_change_bits),
        "loss_scale": _log2_or_zero(runs.loss_scale) / 24.0,
        "loss_scale_trend": runs.loss_scale_trend / 24.0,
        "growth_tracker": _log_steps(runs.growth_tracker),
        "applied_share": runs.applied_share,
        "clipped_share": runs.clipped_share,
        "clip": np.where(is_clip_off, LIMIT, clip),
        "clip_off": is_clip_off,
        "norm_cv": runs.norm_cv,
        "norm_trend": runs.norm_trend,
        "norm_median": median_bits / 16.0,
        "norm_nonfinite": runs.is_norm_nonfinite,
        "progress": runs.progress,
        "progress_known": ~np.isnan(runs.progress),
        "batch_size": _log2_or_zero(runs.batch_size) / 16.0,
        "memory": runs.memory_share,
        "memory_known": ~np.isnan(runs.memory_share),
        "utilization": runs.utilization,
        "utilization_known": ~np.isnan(runs.utilization),
        "step_time": runs.step_time_bits / 4.0,
        "step_time_known": ~np.isnan(runs.step_time_bits),
        "learning_rate": runs.learning_rate_bits / 8.0,
        "adaptive": runs.is_adaptive,
        **_noise_features(runs),
    }


def _noise_features(runs: RunColumns) -> Mapping[str, Column]:
    scale, error, batch = runs.noise_scale, runs.noise_scale_error, runs.effective_batch
    known = (scale >= 0.0) & (scale < math.inf) & (batch > 0.0) & (batch < math.inf)
    with np.errstate(all="ignore"):
        ratio = np.where(known, scale / batch, 1.0)
        relative = np.where(scale != 0, error / scale, 1.0)
    bits = _log2(np.maximum(ratio, 2.0**-16))  # all samples alike have no noise at all
    return {
        "noise_scale": np.where(known, bits / 16.0, 0.0),
        "noise_known": known,
        "noise_error": np.where(known, relative, 0.0),
    }


def _pooled_features(units: UnitColumns, runs: int) -> Mapping[str, Column]:
    def total(values: Column) -> Column:
        return np.bincount(units.run, weights=values, minlength=runs)

    grad = _headroom(units.grad_amax, units.grad_limit)
    act = _headroom(units.act_amax, units.act_limit)
    ranks = np.maximum(units.format, 0)  # a format without a rank does not count
    underflow = _extreme(np.maximum, units.underflow_fraction, units.underflow_fraction > 0, units.run, runs)
    with np.errstate(invalid="ignore", over="ignore"):
        weighted = units.compute_share * ranks
    return {
        "pool_units": _log2(1.0 + np.bincount(units.run, minlength=runs)) / 8.0,
        "pool_rank": total(weighted) / (len(FORMATS) - 1),
        "pool_grad_headroom": _extreme(np.minimum, grad, units.grad_amax > 0, units.run, runs),
        "pool_act_headroom": _extreme(np.minimum, act, units.act_amax > 0, units.run, runs),
        "pool_underflow": underflow,
        "pool_overflows": _log2(1.0 + total(np.maximum(units.overflow_count, 0))) / 4.0,
    }


def _extreme(pick: np.ufunc, values: Column, counts: Column, run: Column, runs: int) -> Column:
    """The least or largest value of each run among those that count, 0 if there is none."""
    empty = math.inf if pick is np.minimum else -math.inf
    found = np.full(runs, empty)
    pick.at(found, run[counts], values[counts])
    return np.where(found == empty, 0.0, found)


def _headroom(amax: Column, limit: Column) -> Column:
    with np.errstate(invalid="ignore"):
        is_measured = (amax > 0) & (amax < math.inf)
        bits = (_log2(limit) - _log2(np.where(is_measured, amax, 1.0))) / HEADROOM_BITS
        headroom = np.where(is_measured, bits, LIMIT)
    headroom = np.where(np.isinf(amax), -LIMIT, headroom)
    return np.where(np.isnan(amax), 0.0, headroom)


def _error_bits(error: Column) -> Column:
    bits = _log2(np.where(error > 0, error, 2.0**-14))
    return np.where(np.isnan(error), 0.0, (np.maximum(bits, -14.0) + 7.0) / 7.0)


def _log_steps(steps: Column) -> Column:
    return _log2(1.0 + np.maximum(steps, 0)) / 16.0


def _log2_or_zero(values: Column) -> Column:
    return _log2(np.where((values > 0) & (values < math.inf), values, 1.0))


def _log2(values: Column) -> Column:
    # numpy's own differs from math.log2 in the last bit, and between machines
    return np.fromiter(map(math.log2, values), np.float64, len(values))
