"""What a plain table of measured costs and errors proposes for every knob, in live runs and in proxies alike.

The format: the cheapest whose measured error is small enough. The loss scale: as large as leaves headroom. The clip: a
multiple of the running median. The batch size: a schedule over the run. What lives here: arithmetic on arrays, in which
the first axis is independent rows (runs, or units that each have formats of their own). What does not: where costs and
errors come from, and what a run does with a proposal (``table_policy``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.config_checks import check_int, check_range, check_real, check_type, make_plain

Array = NDArray[Any]

CLIP_MULTIPLIERS = (0.5, 1.0, 1.5, 3.0, 8.0, math.inf)
"""Clip thresholds in units of the median norm between which a move steps."""
BASE_BATCH = 2
"""Place of the batch size that proxies begin with among those that they can take."""
OVERFLOW_ERROR = 2.0
"""The error of a format that a tensor does not fit into."""
MAX_SCALE_BITS = 24.0


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Parameters of the table.

    Args:
        threshold: Largest error that a format may make, relative to the centred tensor.
        headroom_bits: Bits between the largest gradient and the end of the range, from which the loss scale follows.
        clip: Clip threshold in units of the median norm, one of ``CLIP_MULTIPLIERS``.
        batch: Moves of the batch size from where it starts.
        schedule: Shares of the run from which on the batch size is one move larger. ``None`` for none.
        probe_every: Decisions between two looks at errors, where a look costs time.
        optimism: Standard deviations that costs are taken below what the times of steps let expect. ``None`` takes a
            table of costs as it is and learns nothing from times.
    """

    threshold: float = 0.1
    headroom_bits: float = 3.0
    clip: float = 1.0
    batch: int = 0
    schedule: tuple[float, ...] | None = (0.25, 0.75)
    probe_every: int = 8
    optimism: float | None = 1.0

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_real(self, "threshold", lambda v: 0.0 < v < math.inf, "a finite float > 0")
        check_real(self, "headroom_bits", lambda v: 0.0 <= v < math.inf, "a finite float >= 0")
        make_plain(self, "clip")
        check_range(self, "clip", lambda v: v in CLIP_MULTIPLIERS, f"one of {CLIP_MULTIPLIERS}")
        make_plain(self, "batch")
        check_type(self, "batch", int)
        self._check_schedule()
        check_int(self, "probe_every", minimum=1)
        if self.optimism is not None:
            check_real(self, "optimism", lambda v: 0.0 <= v < math.inf, "a finite float >= 0, or None")

    def _check_schedule(self) -> None:
        if self.schedule is None:
            return
        check_type(self, "schedule", (tuple, list))  # files know lists only
        is_share = [isinstance(share, (int, float)) and 0.0 <= share <= 1.0 for share in self.schedule]
        check_range(self, "schedule", lambda _: all(is_share), "shares of the run in [0, 1], or None")
        object.__setattr__(self, "schedule", tuple(float(share) for share in self.schedule))

    def __eq__(self, other: object) -> bool:
        # a file of settings makes the one class where the defaults are of the other
        return isinstance(other, TableSettings) and astuple(self) == astuple(other)

    def __hash__(self) -> int:
        return hash(astuple(self))


@dataclass(frozen=True, kw_only=True, eq=False)
class TableConfig(TableSettings):
    """The table's parameters in a live run: those of :class:`TableSettings`, but the batch size stays the user's.

    Args:
        schedule: Shares of the run from which on the batch size is doubled once more. ``None`` leaves it alone.
    """

    schedule: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a table proposes for the knobs of a run. ``None`` where it proposes nothing.

    Args:
        formats: Format by unit name.
        loss_scale: Loss scale.
        clip: Clip threshold on the global norm, ``math.inf`` for off.
        batch_size: Batch size per rank.
    """

    formats: Mapping[str, str] = field(default_factory=dict, hash=False)
    loss_scale: float | None = None
    clip: float | None = None
    batch_size: int | None = None


def propose_levels(
    errors: Array, cost: Array, ladder: Array, level: Array, threshold: float, casts: Array | None = None
) -> Array:
    """Returns the proposed level of each unit: all together the cheapest of those whose errors are small enough.

    Args:
        errors: ``[runs, units, formats]``: largest error of a unit's tensors; NaN if it was never measured.
        cost: ``[runs, units, formats]``, as the table tells it; ``inf`` for a format that is not known to pay.
        ladder: ``[runs, levels]``: formats from wide to narrow, -1 behind the end.
        level: ``[runs, units]``: the current one, which stays where nothing was measured.
        threshold: Largest error.
        casts: ``[runs, units - 1]``: what it costs if a unit and the next one differ in format. ``None`` if that is in
            ``cost`` already.
    """
    formats = np.maximum(ladder, 0)[:, None, :]
    error = np.take_along_axis(errors, np.broadcast_to(formats, (*errors.shape[:2], ladder.shape[1])), axis=2)
    price = np.take_along_axis(cost, np.broadcast_to(formats, error.shape), axis=2)
    allowed = (error < threshold) & (ladder >= 0)[:, None, :]
    allowed[:, :, 0] = True  # the widest is always there
    is_unknown = np.isnan(error).all(axis=2)
    if casts is None:
        return np.where(is_unknown, level, np.where(allowed, price, np.inf).argmin(axis=2))
    is_current = np.arange(ladder.shape[1]) == level[:, :, None]
    price = np.where(is_unknown[:, :, None], np.where(is_current, 0.0, np.inf), np.where(allowed, price, np.inf))
    return _cheapest_chain(price, casts)


def _cheapest_chain(price: Array, casts: Array) -> Array:
    """The levels ``[runs, units]`` whose prices and casts add up to the least (Viterbi, 1967)."""
    runs, units, levels = price.shape
    differs = 1.0 - np.eye(levels)
    best, before = price[:, 0], np.zeros((runs, units, levels), dtype=np.int64)
    for unit in range(1, units):
        total = best[:, :, None] + casts[:, unit - 1, None, None] * differs
        before[:, unit] = total.argmin(axis=1)
        best = total.min(axis=1) + price[:, unit]
    chosen = np.zeros((runs, units), dtype=np.int64)
    chosen[:, -1] = best.argmin(axis=1)
    for unit in range(units - 1, 0, -1):
        chosen[:, unit - 1] = np.take_along_axis(before[:, unit], chosen[:, unit, None], axis=1)[:, 0]
    return chosen


def propose_scale(amax: Array, limit: Array, needs_scale: Array, current: Array, headroom_bits: float) -> Array:
    """Returns the proposed loss scale of each run.

    Args:
        amax: ``[runs, units]``: largest unscaled gradient, NaN if unknown.
        limit: ``[runs, units]``: largest value of its format.
        needs_scale: ``[runs, units]``: whether the format needs a loss scale at all.
        current: ``[runs]``: what stays where nothing needs one.
        headroom_bits: Bits to leave.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        room = np.where(needs_scale & (amax > 0) & np.isfinite(amax), np.log2(limit / amax), np.inf).min(axis=1)
    bits = np.clip(np.floor(room - headroom_bits), 0.0, MAX_SCALE_BITS)
    return np.where(np.isfinite(room), np.exp2(np.where(np.isfinite(room), bits, 0.0)), current)


def propose_clip(runs: int, settings: TableSettings) -> Array:
    """Returns the index of the proposed clip in ``CLIP_MULTIPLIERS`` of each run.

    Args:
        runs: How many runs there are.
        settings: The table's parameters.
    """
    return np.full(runs, CLIP_MULTIPLIERS.index(settings.clip))


def propose_batch(share: Array, settings: TableSettings, base: int = BASE_BATCH) -> Array:
    """Returns the index of the proposed batch size of each run, which may lie outside of what a run can take.

    Args:
        share: ``[runs]``: share of the run that is over; NaN if it is not known, which counts as the beginning.
        settings: The table's parameters.
        base: Index of the batch size that runs begin with; 0 for moves.
    """
    rises = np.array(settings.schedule or (), dtype=np.float64)
    index: Array = base + settings.batch + (share[:, None] >= rises).sum(axis=1)
    return index
