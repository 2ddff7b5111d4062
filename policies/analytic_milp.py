"""The choice of one format for each unit as an integer program, solved by HiGHS through ``scipy.optimize.milp``.

Variables are 0 or 1, one for each unit and format; those of a unit add up to 1. What lives here: the program. What does
not: where its numbers come from (``analytic_planners``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Table = Mapping[str, Mapping[str, float]]
"""A number >= 0 for each format of each unit. ``inf`` where it must not be chosen."""

_NODES = 10_000  # a limit by the clock would make the answer depend on the machine
_SLACK = 1e-6  # what the solver lets a constraint be off by, relative
_NEEDS_SCIPY = "It needs SciPy. Run `pip install '.[plan]'` in a checkout of autoprec."


class Limit(NamedTuple):
    """The sum of a table over the chosen formats must not exceed a bound."""

    values: Table
    bound: float


def check_scipy(policy: str) -> None:
    """Raises if the solver is not there.

    Args:
        policy: What needs it.

    Raises:
        ModuleNotFoundError: If SciPy is not installed.
    """
    try:
        import scipy.optimize  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"Passed `policy={policy!r}`. {_NEEDS_SCIPY}", name=error.name) from error


def total(values: Table, formats: Mapping[str, str]) -> float:
    """Returns the sum of a table over the formats of a map.

    Args:
        values: The table.
        formats: Format by unit name.
    """
    return math.fsum(values[unit][name] for unit, name in formats.items())


def choose(objective: Table, limits: Sequence[Limit], tie_break: Table) -> dict[str, str] | None:
    """Returns the map with the smallest objective within limits, ``None`` if there is none.

    Args:
        objective: What to minimise.
        limits: What must hold.
        tie_break: What to minimise among the maps whose objective is equally small.
    """
    best = _solved(objective, limits)
    if best is None:
        return None
    ceiling = Limit(objective, total(objective, best) * (1.0 + _SLACK))
    among = _solved(tie_break, [*limits, ceiling])
    return best if among is None else among


def least(values: Table, tie_break: Table) -> dict[str, str]:
    """Returns the map with the smallest sum, which needs no solver.

    Args:
        values: What to minimise.
        tie_break: What to minimise among equals.
    """
    return {unit: min(row, key=lambda name: (row[name], tie_break[unit][name])) for unit, row in values.items()}


def _solved(objective: Table, limits: Sequence[Limit]) -> dict[str, str] | None:
    keys = [
        (unit, name)
        for unit, row in objective.items()
        for name, value in row.items()
        # nothing is below zero, so what exceeds a bound alone is out
        if math.isfinite(value) and all(limit.values[unit][name] <= limit.bound for limit in limits)
    ]
    units = list(objective)
    if {unit for unit, _ in keys} != set(units):
        return None
    if not units:
        return {}
    values = _optimum(keys, units, objective, limits)
    if values is None:
        return None
    chosen: dict[str, tuple[float, str]] = {}
    for (unit, name), value in zip(keys, values, strict=True):
        if unit not in chosen or value > chosen[unit][0]:
            chosen[unit] = (float(value), name)
    return {unit: chosen[unit][1] for unit in units}


def _optimum(keys: Sequence[tuple[str, str]], units: Sequence[str], objective: Table, limits: Sequence[Limit]) -> Any:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    places = {unit: index for index, unit in enumerate(units)}
    rows = [places[unit] for unit, _ in keys]
    one_each = coo_array((np.ones(len(keys)), (rows, range(len(keys)))), shape=(len(units), len(keys)))
    constraints = [LinearConstraint(one_each, 1, 1)]
    for limit in limits:
        row = np.array([limit.values[unit][name] for unit, name in keys])
        scale = limit.bound or row.max() or 1.0
        constraints.append(LinearConstraint(row[None] / scale, -np.inf, limit.bound / scale))
    costs = np.array([objective[unit][name] for unit, name in keys])
    result = milp(
        costs / (costs.max() or 1.0),
        integrality=np.ones(len(keys)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0, "node_limit": _NODES},
    )
    return result.x
