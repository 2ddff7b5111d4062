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
| ``proposal`` | moves from where the knob is to what a table of costs and errors proposes |
| ``cost_lower`` ``cost_higher`` | relative change of the step time by the move, times 10; a batch size: per sample |
| ``cost_known`` | 1 where one of the two is known |
| ``error`` ``error_lower`` ``error_higher`` | (log2(error) + 7) / 7 in the current and in both neighbouring formats |
| ``error_known`` | 1 where it is known; the error is relative to the centred tensors, 2 where one overflows |
| ``step_time`` ``step_time_known`` | log2(step time / that of the run's first steps) / 4, and its flag |

Readings are of unscaled gradients and of the loss per batch. Loss scale and accumulation therefore show nowhere but in
the features that are named after the loss scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoprec.action import Action
from autoprec.feature_rows import (
    FEATURES,
    HEADROOM_BITS,
    INDEX,
    LIMIT,
    READINGS,
    RUN_KNOBS,
    KnobKind,
    Prices,
    RunColumns,
    UnitColumns,
    fill_rows,
    places,
)
from autoprec.formats import get_format, nearest, rank
from autoprec.readings import LAYER_KINDS, GlobalReading, UnitReading
from autoprec.table import CLIP_MULTIPLIERS, Proposal
from autoprec.trends import drift_bits, finite, relative_change, spread, spread_around_drift

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
    "with_proposal",
]

VERSION = 3
"""Version of the layout of observations and actions. A policy made for another one is refused."""

Observation = NDArray[np.float32]


def encode(units: Sequence[UnitReading], globals: GlobalReading) -> Observation:
    """Encodes readings as one row of features per knob.

    Args:
        units: Readings of the units, in the order of their rows. May be empty.
        globals: Reading of the run.

    Returns:
        ``[n_units + 3, n_features]``, float32, finite, in ``[-LIMIT, LIMIT]``. Columns are ``FEATURES``.
    """
    columns = _unit_columns(units)
    return fill_rows(columns, _run_columns(globals), _prices(units, globals), places(columns.run, 1))


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
    if name not in INDEX:
        raise ValueError(
            f"Passed `feature(observation, {name!r})`. Known features: {sorted(FEATURES)}.{nearest(name, FEATURES)}"
        )
    if observation.shape[-1] != len(FEATURES):
        raise ValueError(
            f"Passed `feature(observation, {name!r})` with {observation.shape[-1]} columns."
            f" Version {VERSION} of the observation has {len(FEATURES)}."
        )
    return observation[..., INDEX[name]]


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
    moves = _checked_moves(actions, len(units) + RUN_KNOBS)
    targets = {u.name: u.lower if move < 0 else u.higher for u, move in zip(units, moves, strict=False) if move}
    scale_move, batch_move, clip_move = moves[len(units) :]
    return Action(
        precision={name: target for name, target in targets.items() if target is not None} or None,
        loss_scale=_moved_scale(globals, scale_move),
        batch_size=_moved_batch_size(globals, batch_move),
        clip=_moved_clip(globals, clip_move),
    )


def with_proposal(
    units: Sequence[UnitReading], globals: GlobalReading, proposal: Proposal
) -> tuple[list[UnitReading], GlobalReading]:
    """Returns the readings with what is proposed in them, as moves from where each knob is.

    Args:
        units: Readings of the units.
        globals: Reading of the run.
        proposal: What a table proposes. Names that are not there, formats that are not legal and knobs that do not move
            are left out.
    """
    movable, size = globals.movable, globals.batch_size
    scale = proposal.loss_scale if "loss_scale" in movable else None
    batch_size = proposal.batch_size if "batch_size" in movable and size > 0 else None
    clip = proposal.clip if "clip" in movable and 0 < globals.median_norm < math.inf else None
    run = replace(
        globals,
        proposal=math.nan if batch_size is None else math.log2(batch_size / size),
        loss_scale_proposal=math.nan if scale is None else math.log2(max(scale, 1.0) / max(globals.loss_scale, 1.0)),
        clip_proposal=math.nan if clip is None else _clip_index(globals, clip) - _clip_index(globals),
    )
    return [_with_moves(unit, proposal.formats.get(unit.name)) for unit in units], run


def _with_moves(unit: UnitReading, proposed: str | None) -> UnitReading:
    if proposed not in unit.legal or unit.format not in unit.legal:
        return unit
    ladder = sorted(unit.legal, key=rank)
    return replace(unit, proposal=float(ladder.index(unit.format) - ladder.index(proposed)))


def log_steps(steps: float) -> float:
    """Encodes a number of steps as log2(1 + steps) / 16.

    Args:
        steps: Steps, >= 0.
    """
    return math.log2(1.0 + max(steps, 0)) / 16.0


def _unit_columns(units: Sequence[UnitReading]) -> UnitColumns:
    def column(values: Sequence[float]) -> NDArray[np.float64]:
        return np.array(values, dtype=np.float64)

    def flags(values: Sequence[bool]) -> NDArray[np.bool_]:
        return np.array(values, dtype=np.bool_)

    current = [get_format(unit.format) for unit in units]
    lower = [unit.lower for unit in units]
    below = [get_format(name or unit.format) for name, unit in zip(lower, units, strict=True)]
    norms = [finite(unit.grad_norm_history) for unit in units]
    kinds = [unit.kind if unit.kind in LAYER_KINDS else "other" for unit in units]
    return UnitColumns(
        run=np.zeros(len(units), dtype=np.intp),
        kind=np.array([LAYER_KINDS.index(kind) for kind in kinds], dtype=np.intp),
        format=np.array([rank(unit.format) for unit in units], dtype=np.intp),
        can_lower=flags([name is not None for name in lower]),
        can_raise=flags([unit.higher is not None for unit in units]),
        grad_limit=column([f.gradient_format.amax_limit for f in current]),
        grad_limit_lower=column([f.gradient_format.amax_limit for f in below]),
        act_limit=column([f.amax_limit for f in current]),
        act_limit_lower=column([f.amax_limit for f in below]),
        grad_cv=column([spread_around_drift(values) for values in norms]),
        grad_trend=column([drift_bits(unit.grad_norm_history) for unit in units]),
        grad_readings=column([values.size for values in norms]),
        act_drift=column([drift_bits(unit.act_amax_history) for unit in units]),
        is_nonfinite=flags([_is_nonfinite(unit) for unit in units]),
        **{name: column([getattr(unit, name) for unit in units]) for name in _UNIT_NUMBERS},
        **{name: flags([getattr(unit, name) for unit in units]) for name in ("held", "frozen", "emulated")},
    )


_UNIT_NUMBERS = (
    *("depth", "parameter_share", "compute_share", "grad_amax", "act_amax", "grad_norm"),
    *("underflow_fraction", "underflow_fraction_lower", "weight_subnormal", "weight_subnormal_lower"),
    *("steps_since_change", "overflow_count", "error", "error_lower", "error_higher"),
)
_RUN_NUMBERS = (
    *("loss_change_bits", "loss_scale", "growth_tracker", "applied_share", "clipped_share", "clip_threshold"),
    *("median_norm", "progress", "batch_size", "effective_batch", "noise_scale", "noise_scale_error"),
    *("memory_share", "utilization", "step_time_bits"),
)


def _run_columns(globals: GlobalReading) -> RunColumns:
    losses = finite(globals.losses)
    moved: tuple[Callable[[GlobalReading, int], float | None], ...] = (_moved_scale, _moved_batch_size, _moved_clip)
    numbers = {name: np.array([getattr(globals, name)], dtype=np.float64) for name in _RUN_NUMBERS}
    return RunColumns(
        loss_fast=np.array([relative_change(losses, max(losses.size // 4, 1))]),
        loss_slow=np.array([relative_change(losses, max(losses.size // 2, 1))]),
        loss_cv=np.array([spread(losses)]),
        is_loss_nonfinite=np.array([losses.size < len(globals.losses)]),
        loss_scale_trend=np.array([drift_bits(globals.loss_scale_history)]),
        norm_cv=np.array([spread(finite(globals.norms))]),
        norm_trend=np.array([drift_bits(globals.norms)]),
        is_norm_nonfinite=np.array([not np.isfinite(np.asarray(globals.norms)).all()]),
        can_lower=np.array([[move(globals, -1) is not None for move in moved]]),
        can_raise=np.array([[move(globals, 1) is not None for move in moved]]),
        **numbers,
    )


def _prices(units: Sequence[UnitReading], globals: GlobalReading) -> Prices | None:
    readings: list[UnitReading | GlobalReading] = [*units, globals]
    others = (globals.loss_scale_proposal, globals.clip_proposal)
    known = (*others, *(value for r in readings for value in (r.cost_lower, r.cost_higher, r.proposal)))
    if all(map(math.isnan, known)):
        return None

    def column(name: str, others: tuple[float, float] = (math.nan, math.nan)) -> NDArray[np.float64]:
        shared = {KnobKind.LOSS_SCALE: others[0], KnobKind.BATCH_SIZE: getattr(globals, name), KnobKind.CLIP: others[1]}
        return np.array([*(getattr(unit, name) for unit in units), *(shared[kind] for kind in list(KnobKind)[1:])])

    return Prices(
        proposal=column("proposal", others), cost_lower=column("cost_lower"), cost_higher=column("cost_higher")
    )


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
    index = _clip_index(globals) + move
    return CLIP_MULTIPLIERS[index] * median if 0 <= index < len(CLIP_MULTIPLIERS) else None


def _clip_index(globals: GlobalReading, threshold: float | None = None) -> int:
    """Place in ``CLIP_MULTIPLIERS`` of a threshold, by default the current one."""
    return _nearest_multiplier((globals.clip_threshold if threshold is None else threshold) / globals.median_norm)


def _nearest_multiplier(ratio: float) -> int:
    if math.isinf(ratio):
        return len(CLIP_MULTIPLIERS) - 1
    finite = [m for m in CLIP_MULTIPLIERS if math.isfinite(m)]
    position = math.log2(max(ratio, math.ulp(0.0)))
    return min(range(len(finite)), key=lambda index: abs(position - math.log2(finite[index])))
