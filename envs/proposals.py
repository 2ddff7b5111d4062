"""What a plain table of costs and errors proposes for every knob. Actions of the environment are offsets to it.

The format: the cheapest whose measured error is small enough. The loss scale: as large as leaves headroom. The clip: a
multiple of the running median. The batch size: a schedule over the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.proxies import BASE_BATCH

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Parameters of the table.

    Args:
        threshold: Largest error, relative to the centred tensor, that a format may make.
        headroom_bits: Bits between the largest gradient and the end of the range.
        clip: Clip in units of the median norm, one of ``CLIP_MULTIPLIERS``.
        batch: Moves of the batch size from where it starts.
        schedule: Shares of the budget from which on the batch size is one move larger.
        probe_every: Decisions from one look at errors to the next, where a look costs time.
        optimism: Standard deviations that costs are taken below what step times let expect; ``None`` takes the table of
            costs as it is and learns nothing.
    """

    threshold: float = 0.1
    headroom_bits: float = 3.0
    clip: float = 1.0
    batch: int = 0
    schedule: tuple[float, ...] = (0.25, 0.75)
    probe_every: int = 8
    optimism: float | None = 1.0

    def __post_init__(self) -> None:
        if self.clip not in CLIP_MULTIPLIERS:
            raise ValueError(f"Passed `TableSettings(clip={self.clip})`. Clips are {CLIP_MULTIPLIERS}.")
        if not self.threshold > 0:
            raise ValueError(f"Passed `TableSettings(threshold={self.threshold})`. It must be above 0.")


def propose_levels(errors: Array, cost: Array, ladder: Array, level: Array, threshold: float) -> Array:
    """Returns the proposed level of each unit.

    Args:
        errors: ``[runs, units, formats]``: largest error of a unit's tensors; NaN if it was never measured.
        cost: ``[runs, units, formats]``, as the table tells it.
        ladder: ``[runs, levels]``: formats from wide to narrow, -1 behind the end.
        level: ``[runs, units]``: the current one, which stays where nothing was measured.
        threshold: Largest error.
    """
    formats = np.maximum(ladder, 0)[:, None, :]
    error = np.take_along_axis(errors, np.broadcast_to(formats, (*errors.shape[:2], ladder.shape[1])), axis=2)
    price = np.take_along_axis(cost, np.broadcast_to(formats, error.shape), axis=2)
    allowed = (error < threshold) & (ladder >= 0)[:, None, :]
    allowed[:, :, 0] = True  # the widest is always there
    cheapest = np.where(allowed, price, np.inf).argmin(axis=2)
    return np.where(np.isnan(error).all(axis=2), level, cheapest)


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
    bits = np.clip(np.floor(room - headroom_bits), 0.0, 24.0)
    return np.where(np.isfinite(room), np.exp2(np.where(np.isfinite(room), bits, 0.0)), current)


def propose_clip(runs: int, settings: TableSettings) -> Array:
    """Returns the index of the proposed clip in ``CLIP_MULTIPLIERS`` of each run."""
    return np.full(runs, CLIP_MULTIPLIERS.index(settings.clip))


def propose_batch(share: Array, settings: TableSettings) -> Array:
    """Returns the index of the proposed batch size of each run.

    Args:
        share: ``[runs]``: share of the budget that is over.
        settings: The table's parameters.
    """
    rises = np.array(settings.schedule, dtype=np.float64)
    index: Array = BASE_BATCH + settings.batch + (share[:, None] >= rises).sum(axis=1)
    return index
