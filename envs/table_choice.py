"""What the table of costs and errors proposes for simulated runs; environment and baselines go by it alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.observing import GRADIENT_LIMIT, NEEDS_SCALE
from autoprec.envs.proxies import BATCH_SIZES
from autoprec.envs.simulation import Simulation
from autoprec.table import TableSettings, propose_batch, propose_clip, propose_levels, propose_scale

Array = NDArray[Any]


def proposed_levels(simulation: Simulation, settings: TableSettings) -> Array:
    """Returns the level ``[runs, units]`` that the table proposes for each unit.

    Args:
        simulation: The runs.
        settings: The table's parameters.
    """
    s = simulation
    costs, casts = s.assumed_costs(settings.optimism)
    return propose_levels(s.worst_errors(), costs, s.ladder, s.level, settings.threshold, casts)


def proposed_knobs(simulation: Simulation, settings: TableSettings, level: Array) -> tuple[Array, Array, Array]:
    """Returns the loss scale, and the indices of batch size and clip, that the table proposes; each ``[runs]``.

    Args:
        simulation: The runs.
        settings: The table's parameters.
        level: ``[runs, units]``: where units will be, which the loss scale depends on.
    """
    s = simulation
    formats = np.take_along_axis(s.ladder, level, axis=1)
    amax = s.windows["gradient_amax"][:, : s.is_unit.shape[1]].astype(np.float64)
    needs = NEEDS_SCALE[formats] & s.is_unit
    scale = propose_scale(amax, GRADIENT_LIMIT[formats], needs, s.loss_scale, settings.headroom_bits)
    batch = np.clip(propose_batch(s.share, settings), 0, len(BATCH_SIZES) - 1)
    return scale, batch, propose_clip(len(s), settings)
