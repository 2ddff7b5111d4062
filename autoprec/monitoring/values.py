"""What the training thread tells of a run after each optimizer step, as plain numbers.

Nothing here reads from a device: these numbers are on the host already. Another thread sees one step or the next, never
half of each, because a :class:`StepValues` is handed over as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from autoprec.steering import Steering


class StepValues(NamedTuple):
    """A run after an optimizer step.

    Attributes:
        at: When that was, Unix time.
        applied: Steps taken, without those that were undone.
        skipped: Steps not taken.
        undone: Steps undone.
        rollbacks: How often the run went back.
        lost_windows: Windows lost to memory.
        loss_scale: The loss scale, ``None`` while none is in use.
        loss_scale_floor: Its smallest value.
        grad_norm: Global norm of the latest applied step, ``None`` before the first.
        clip_threshold: Threshold on it, infinite for off.
        batch_size: Samples in a batch, ``None`` if not known.
        accumulate: Batches per step.
        formats: Format of every unit; not changed in place.
        overflows: Outputs outside their format's range, by unit; read with ``get`` only, it may grow meanwhile.
    """

    at: float
    applied: int
    skipped: int
    undone: int
    rollbacks: int
    lost_windows: int
    loss_scale: float | None
    loss_scale_floor: float
    grad_norm: float | None
    clip_threshold: float
    batch_size: int | None
    accumulate: int
    formats: Mapping[str, str]
    overflows: Mapping[str, int]


class StepReader:
    """Reads a fit after each step.

    Args:
        steering: State of the fit.
        batch_size: The loader's batch size where no other is set.
    """

    def __init__(self, steering: Steering, batch_size: int | None) -> None:
        self._steering = steering
        self._batch_size = batch_size
        self._changes = -1
        self._formats: Mapping[str, str] = {}

    def read(self) -> StepValues:
        """Returns the numbers as they are."""
        steering, knobs = self._steering, self._steering.knobs
        if knobs.changes != self._changes:
            self._changes, self._formats = knobs.changes, dict(knobs.formats)
        scale, norms = knobs.loss_scale, steering.telemetry.norms
        return StepValues(
            at=time.time(),
            applied=steering.applied_steps,
            skipped=steering.skipped_steps,
            undone=steering.undone_windows,
            rollbacks=steering.rollbacks,
            lost_windows=steering.lost_windows,
            loss_scale=scale.scale if scale.enabled else None,
            loss_scale_floor=scale.config.floor,
            grad_norm=norms[-1] if norms else None,
            clip_threshold=knobs.clip,
            batch_size=knobs.batch_size.size or self._batch_size,
            accumulate=knobs.accumulation.value,
            formats=self._formats,
            overflows=steering.fallback.overflows,
        )
