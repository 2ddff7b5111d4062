"""What observations and policy outputs mean. The only place that knows.

What lives here: the encoding of readings as one row of features per knob, and the decoding of one move per knob into a
request. What does not: measuring (telemetry), deciding (controllers) and judging (guard).

Every knob is a row: the units in their order, then loss scale, batch size and clip. All rows have all features. What a
row has no use for is 0, so that one small policy serves every row of every model, a model without units included.

| features | meaning |
|---|---|
| ``knob_*`` ``layer_*`` ``format_*`` | kind of knob, kind of layer, current format, each one-hot |
| ``can_lower`` ``can_raise`` | 1 where the move leads somewhere |
| ``depth`` ``parameter_share`` ``compute_share`` | where the unit is and how much of the model it is, 0 to 1 |
| ``grad_headroom`` ``act_headroom`` | log2(limit / amax) in the current format, in units of ``HEADROOM_BITS`` |
| ``*_headroom_lower`` | the same in the next lower legal format, the current one if there is none |
| ``grad_known`` ``act_known`` | 1 where that amax is known |
| ``grad_cv`` ``grad_trend`` ``act_drift`` | relative spread (around the drift), and drift over the window in bits |
| ``grad_readings`` | finite gradient norms in the window, in units of ``READINGS`` |
| ``grad_share`` | log2(norm of the unit / global norm), in units of 16 bits |
| ``underflow`` ``underflow_lower`` | share of the gradient that underflows now and in the next lower format |
| ``underflow_lower_known`` | 1 where the latter is known |
| ``weight_subnormal`` ``weight_subnormal_lower`` | share of the weights below the smallest normal number |
| ``steps_since_change`` | ``log_steps`` of the applied steps since the unit changed |
| ``overflows`` | log2(1 + overflows in the window) / 4 |
| ``nonfinite`` ``held`` ``frozen`` ``emulated`` | flags of the unit |
| ``loss_fast`` ``loss_slow`` | change of the loss over a quarter and over half of the window, relative, times 10 |
| ``loss_cv`` ``norm_cv`` ``norm_trend`` ``norm_median`` | of the losses and the global norms, as above; log2 / 16 |
| ``loss_since_change`` | log2(loss / loss before formats last changed) |
| ``loss_since_change_known`` | 1 where it is known |
| ``loss_scale`` ``loss_scale_trend`` ``growth_tracker`` | log2 / 24, its change over the window, ``log_steps`` |
| ``applied_share`` ``clipped_share`` | of the optimizer steps in the window |
| ``clip`` ``clip_off`` | log2(threshold / median norm) / 4, and 1 if clipping is off |
| ``progress`` ``progress_known`` ``batch_size`` | 0 to 1, its flag, log2 / 16 |
| ``memory`` ``memory_known`` ``utilization`` ``utilization_known`` | shares, 0 to 1, and their flags |
| ``noise_scale`` | log2(gradient-noise scale / samples in a step) / 16 |
| ``noise_known`` ``noise_error`` | 1 where it is known, and its standard error, relative |
| ``loss_nonfinite`` ``norm_nonfinite`` | flags of the window |
| ``pool_*`` | over the units: count (log2 / 8), mean rank by compute, least headroom, most underflow, overflows |

Readings are of unscaled gradients and of the loss per batch. Loss scale and accumulation therefore show nowhere but in
the features that are named after the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoprec.action import Action
from autoprec.formats import FORMATS, get_format, nearest, rank
from autoprec.readings import LAYER_KINDS, GlobalReading, UnitReading
from autoprec.trends import drift_bits, finite, log2_or_zero, relative_change, spread, spread_around_drift

__all__ = [
    "CLIP_MULTIPLIERS",
    "FEATURES",
    "HEADROOM_BITS",
    "LIMIT",
    "READINGS",
    "VERSION",
    "GlobalReading",
    "KnobKind",
    "Observation",
    "UnitReading",
    "decode",
    "encode",
    "feature",
    "log_steps",
]

VERSION = 2
"""Version of the layout of observations and actions. A policy made for another one is refused."""

LIMIT = 10.0
"""Features lie in ``[-LIMIT, LIMIT]``."""

HEADROOM_BITS = 16.0
"""Bits of headroom that make 1.0 in a headroom feature."""

READINGS = 64.0
"""Readings in the window that make 1.0 in ``grad_readings``."""

CLIP_MULTIPLIERS = (0.5, 1.0, 1.5, 3.0, 8.0, math.inf)
"""Clip thresholds in units of the median norm between which a move steps."""

Observation = NDArray[np.float32]


class KnobKind(str, Enum):
    """Kinds of knob. Every unit has a precision knob, the others exist once and follow the units in this order."""

    PRECISION = "precision"
    LOSS_SCALE = "loss_scale"
    BATCH_SIZE = "batch_size"
    CLIP = "clip"


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
FEATURES: tuple[str, ...] = (*_KNOBS, "can_lower", "can_raise", *_UNIT_FEATURES, *_GLOBAL_FEATURES)
"""Names of the columns of an observation, in order."""

_INDEX = {name: index for index, name in enumerate(FEATURES)}


def encode(units: Sequence[UnitReading], globals: GlobalReading) -> Observation:
    """Encodes readings as one row of features per knob.

    Args:
        units: Readings of the units, in the order of their rows. May be empty.
        globals: Reading of the run.

    Returns:
        ``[n_units + 3, n_features]``, float32, finite, in ``[-LIMIT, LIMIT]``. Columns are ``FEATURES``.
    """
    rows = np.zeros((len(units) + len(KnobKind) - 1, len(FEATURES)))
    shared = _global_features(units, globals)
    median_bits = log2_or_zero(globals.median_norm)
    for row, unit in zip(rows, units, strict=False):
        _write(row, {"knob_precision": 1.0, "can_lower": unit.lower is not None and not unit.held})
        _write(row, {"can_raise": unit.higher is not None, **_unit_features(unit, median_bits)})
    for row, kind in zip(rows[len(units) :], list(KnobKind)[1:], strict=True):
        _write(row, {f"knob_{kind.value}": 1.0, **_global_moves(kind, globals)})
    rows[:, [_INDEX[name] for name in shared]] = list(shared.values())
    return np.clip(np.nan_to_num(rows, nan=0.0, posinf=LIMIT, neginf=-LIMIT), -LIMIT, LIMIT).astype(np.float32)


def feature(observation: Observation, name: str) -> Observation:
    """Returns one column of an observation.

    Args:
        observation: ``[..., n_features]``, as ``encode`` returns it.
        name: One of ``FEATURES``.

    Returns:
        ``[...]``, a view.

    Raises:
        ValueError: If there is no such feature, or the observation has another number of columns.
    """
    if name not in _INDEX:
        raise ValueError(
            f"Passed `feature(observation, {name!r})`. Known features: {sorted(FEATURES)}.{nearest(name, FEATURES)}"
        )
    if observation.shape[-1] != len(FEATURES):
        raise ValueError(
            f"Passed `feature(observation, {name!r})` with {observation.shape[-1]} columns."
            f" Version {VERSION} of the observation has {len(FEATURES)}."
        )
    return observation[..., _INDEX[name]]


def decode(actions: ArrayLike, units: Sequence[UnitReading], globals: GlobalReading) -> Action:
    """Turns one move per knob into a request.

    -1 lowers, 0 keeps, 1 raises. A precision knob moves to the next legal format, the loss scale and the batch size by
    a factor of 2, the clip threshold to the next of ``CLIP_MULTIPLIERS`` times the median norm. A move that leads
    nowhere, because the range ends or the value is not known, asks for nothing.

    Args:
        actions: ``[n_units + 3]``, whole numbers -1, 0 or 1.
        units: The readings that were encoded.
        globals: The reading of the run that was encoded.

    Raises:
        ValueError: If there is another number of moves, or one of them is not -1, 0 or 1.
    """
    moves = _checked_moves(actions, len(units) + len(KnobKind) - 1)
    targets = {u.name: u.lower if move < 0 else u.higher for u, move in zip(units, moves, strict=False) if move}
    scale_move, batch_move, clip_move = moves[len(units) :]
    return Action(
        precision={name: target for name, target in targets.items() if target is not None} or None,
        loss_scale=_moved_scale(globals, scale_move),
        batch_size=_moved_batch_size(globals, batch_move),
        clip=_moved_clip(globals, clip_move),
    )


def log_steps(steps: float) -> float:
    """Encodes a number of steps as log2(1 + steps) / 16.

    Args:
        steps: Steps, >= 0.
    """
    return math.log2(1.0 + max(steps, 0)) / 16.0


def _write(row: NDArray[np.float64], values: dict[str, float]) -> None:
    for name, value in values.items():
        row[_INDEX[name]] = value


def _unit_features(unit: UnitReading, median_bits: float) -> dict[str, float]:
    current = get_format(unit.format)
    lower = get_format(unit.lower or unit.format)
    norms = finite(unit.grad_norm_history)
    return {
        f"layer_{unit.kind if unit.kind in LAYER_KINDS else 'other'}": 1.0,
        f"format_{unit.format}": 1.0,
        "depth": unit.depth,
        "parameter_share": unit.parameter_share,
        "compute_share": unit.compute_share,
        "grad_headroom": _headroom(unit.grad_amax, current.gradient_format.amax_limit),
        "grad_headroom_lower": _headroom(unit.grad_amax, lower.gradient_format.amax_limit),
        "act_headroom": _headroom(unit.act_amax, current.amax_limit),
        "act_headroom_lower": _headroom(unit.act_amax, lower.amax_limit),
        "grad_known": not math.isnan(unit.grad_amax),
        "act_known": not math.isnan(unit.act_amax),
        "grad_cv": spread_around_drift(norms),
        "grad_trend": drift_bits(unit.grad_norm_history),
        "grad_readings": norms.size / READINGS,
        "grad_share": (log2_or_zero(unit.grad_norm) - median_bits) / 16.0,
        "act_drift": drift_bits(unit.act_amax_history),
        "underflow": unit.underflow_fraction,
        "underflow_lower": unit.underflow_fraction_lower,
        "underflow_lower_known": not math.isnan(unit.underflow_fraction_lower),
        "weight_subnormal": unit.weight_subnormal,
        "weight_subnormal_lower": unit.weight_subnormal_lower,
        "steps_since_change": log_steps(unit.steps_since_change),
        "overflows": math.log2(1.0 + max(unit.overflow_count, 0)) / 4.0,
        "nonfinite": _is_nonfinite(unit),
        "held": unit.held,
        "frozen": unit.frozen,
        "emulated": unit.emulated,
    }


def _global_features(units: Sequence[UnitReading], globals: GlobalReading) -> dict[str, float]:
    median_bits = log2_or_zero(globals.median_norm)
    is_clip_off = math.isinf(globals.clip_threshold)
    losses = finite(globals.losses)
    return {
        "loss_fast": 10.0 * relative_change(losses, max(losses.size // 4, 1)),
        "loss_slow": 10.0 * relative_change(losses, max(losses.size // 2, 1)),
        "loss_cv": spread(losses),
        "loss_nonfinite": losses.size < len(globals.losses),
        "loss_since_change": globals.loss_change_bits,
        "loss_since_change_known": not math.isnan(globals.loss_change_bits),
        "loss_scale": log2_or_zero(globals.loss_scale) / 24.0,
        "loss_scale_trend": drift_bits(globals.loss_scale_history) / 24.0,
        "growth_tracker": log_steps(globals.growth_tracker),
        "applied_share": globals.applied_share,
        "clipped_share": globals.clipped_share,
        "clip": LIMIT if is_clip_off else (log2_or_zero(globals.clip_threshold) - median_bits) / 4.0,
        "clip_off": is_clip_off,
        "norm_cv": spread(finite(globals.norms)),
        "norm_trend": drift_bits(globals.norms),
        "norm_median": median_bits / 16.0,
        "norm_nonfinite": not np.isfinite(np.asarray(globals.norms)).all(),
        "progress": globals.progress,
        "progress_known": not math.isnan(globals.progress),
        "batch_size": log2_or_zero(globals.batch_size) / 16.0,
        "memory": globals.memory_share,
        "memory_known": not math.isnan(globals.memory_share),
        "utilization": globals.utilization,
        "utilization_known": not math.isnan(globals.utilization),
        **_noise_features(globals),
        **_pooled_features(units),
    }


def _noise_features(globals: GlobalReading) -> dict[str, float]:
    scale, error, batch = globals.noise_scale, globals.noise_scale_error, globals.effective_batch
    if not 0.0 <= scale < math.inf or not 0.0 < batch < math.inf:
        return {"noise_scale": 0.0, "noise_known": 0.0, "noise_error": 0.0}
    bits = math.log2(max(scale / batch, 2.0**-16))  # all samples alike have no noise at all
    return {"noise_scale": bits / 16.0, "noise_known": 1.0, "noise_error": error / scale if scale else 1.0}


def _pooled_features(units: Sequence[UnitReading]) -> dict[str, float]:
    grad = [_headroom(u.grad_amax, get_format(u.format).gradient_format.amax_limit) for u in units]
    act = [_headroom(u.act_amax, get_format(u.format).amax_limit) for u in units]
    return {
        "pool_units": math.log2(1.0 + len(units)) / 8.0,
        "pool_rank": sum(u.compute_share * rank(u.format) for u in units) / (len(FORMATS) - 1),
        "pool_grad_headroom": min((h for h, u in zip(grad, units, strict=True) if u.grad_amax > 0), default=0.0),
        "pool_act_headroom": min((h for h, u in zip(act, units, strict=True) if u.act_amax > 0), default=0.0),
        "pool_underflow": max((u.underflow_fraction for u in units if u.underflow_fraction > 0), default=0.0),
        "pool_overflows": math.log2(1.0 + sum(max(u.overflow_count, 0) for u in units)) / 4.0,
    }


def _global_moves(kind: KnobKind, globals: GlobalReading) -> dict[str, float]:
    moved: dict[KnobKind, Callable[[GlobalReading, int], float | None]] = {
        KnobKind.LOSS_SCALE: _moved_scale,
        KnobKind.BATCH_SIZE: _moved_batch_size,
        KnobKind.CLIP: _moved_clip,
    }
    return {
        "can_lower": moved[kind](globals, -1) is not None,
        "can_raise": moved[kind](globals, 1) is not None,
    }


def _is_nonfinite(unit: UnitReading) -> bool:
    # before the first gradient and in a frozen unit NaN only says that there is nothing to know
    expects_gradient = bool(unit.grad_norm_history) and not unit.frozen
    gradients = (unit.grad_amax, unit.grad_norm)
    return (
        unit.nonfinite_count > 0
        or any(math.isinf(value) for value in (*gradients, unit.act_amax))
        or (expects_gradient and any(math.isnan(value) for value in gradients))
        or not all(map(math.isfinite, (*unit.grad_norm_history, *unit.act_amax_history)))
    )


def _checked_moves(actions: ArrayLike, expected: int) -> list[int]:
    moves: NDArray[Any] = np.asarray(actions)
    if moves.shape != (expected,):
        raise ValueError(
            f"Passed `decode(actions, ...)` with shape {list(moves.shape)}."
            f" `actions` must have shape [{expected}]: one move per unit, then loss scale, batch size and clip."
        )
    if moves.dtype.kind not in "iuf" or not np.isin(moves, (-1, 0, 1)).all():
        raise ValueError(f"Passed `decode(actions, ...)` with {moves.tolist()}. Moves must be the numbers -1, 0 or 1.")
    return [int(move) for move in moves]


def _moved_scale(globals: GlobalReading, move: int) -> float | None:
    low, high = globals.loss_scale_limits
    moved = globals.loss_scale * 2.0**move
    return moved if move and "loss_scale" in globals.movable and low <= moved <= high else None


def _moved_batch_size(globals: GlobalReading, move: int) -> int | None:
    batch_size = globals.batch_size
    if not move or "batch_size" not in globals.movable or batch_size < 1 or (move < 0 and batch_size == 1):
        return None
    return batch_size * 2 if move > 0 else batch_size // 2


def _moved_clip(globals: GlobalReading, move: int) -> float | None:
    median = globals.median_norm
    if "clip" not in globals.movable or not move or not 0 < median < math.inf or not globals.clip_threshold > 0:
        return None
    index = _nearest_multiplier(globals.clip_threshold / median) + move
    return CLIP_MULTIPLIERS[index] * median if 0 <= index < len(CLIP_MULTIPLIERS) else None


def _nearest_multiplier(ratio: float) -> int:
    if math.isinf(ratio):
        return len(CLIP_MULTIPLIERS) - 1
    finite = [m for m in CLIP_MULTIPLIERS if math.isfinite(m)]
    position = math.log2(max(ratio, math.ulp(0.0)))
    return min(range(len(finite)), key=lambda index: abs(position - math.log2(finite[index])))


def _headroom(amax: float, limit: float) -> float:
    if math.isnan(amax):
        return 0.0
    if math.isinf(amax):
        return -LIMIT
    return (math.log2(limit) - math.log2(amax)) / HEADROOM_BITS if amax > 0 else LIMIT
