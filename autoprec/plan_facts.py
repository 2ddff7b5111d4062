"""Gathers what a policy is told that plans a whole map of formats."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch.nn.parameter import is_lazy

from autoprec.knobs import steered_units
from autoprec.planning import CostTable, ModelFacts, UnitErrors, UnitFacts
from autoprec.steering import Steering
from autoprec.telemetry import LEVEL
from autoprec.units import Unit


def read_facts(
    steering: Steering, legal: Mapping[str, tuple[str, ...]] | None = None, costs: CostTable | None = None
) -> ModelFacts:
    """Returns what is known about the units that can be steered.

    Args:
        steering: State of the fit, with its losses flushed.
        legal: Formats by unit name that a policy may choose now, ``None`` for what a run may choose at all.
        costs: What was measured, ``None`` where nothing was.
    """
    knobs, errors = steering.knobs, steering.rounding.errors
    losses = [loss for loss in list(steering.telemetry.losses)[-LEVEL:] if math.isfinite(loss)]
    units = tuple(
        UnitFacts(
            name=unit.name,
            kind=unit.kind,
            format=knobs.formats[unit.name],
            legal=knobs.steerable(unit) if legal is None else legal[unit.name],
            native=unit.native,
            shapes=_shapes(unit),
            parameter_count=unit.parameter_count,
            errors=errors.get(unit.name, UnitErrors()),
        )
        for unit in steered_units(knobs)
    )
    return ModelFacts(units=units, loss=sum(losses) / len(losses) if losses else math.nan, costs=costs)


def _shapes(unit: Unit) -> tuple[tuple[int, int], ...]:
    """First two sizes of each weight matrix; of an embedding its width alone, since nothing is multiplied."""
    matrices = [p for p in unit.parameters if not is_lazy(p) and p.ndim > 1]
    is_lookup = unit.kind == "embedding"
    return tuple((p.shape[1] if is_lookup else p.shape[0], p.shape[1]) for p in matrices)
