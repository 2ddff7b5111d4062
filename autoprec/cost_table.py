"""What units cost in formats, as plain data: milliseconds, bytes and implementation, and the same for a whole map.

What lives here: the table, what follows from it for a map of formats, and the model of a whole step that is fitted to
measured step times. What does not: measuring (``calibration``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from autoprec.formats import rank

NOISE = 0.03
"""Relative difference between two times below which they count as equal."""


class UnitCost(NamedTuple):
    """What a unit costs in a format.

    Attributes:
        ms: Forward, backward and casts of all its calls in a step.
        activation_bytes: What its calls keep for the backward.
        copy_bytes: Low-precision copies of its weights.
        implementation: The fastest one whose error is small enough.
        error: Relative error of outputs and gradients against float64.
    """

    ms: float
    activation_bytes: int = 0
    copy_bytes: int = 0
    implementation: str = "default"
    error: float = 0.0


class CostTable:
    """Costs by unit and format.

    Args:
        costs: By unit name, then by format name. Units and formats that were not measured are left out.

    Example:
        >>> table = CostTable({"head": {"fp32": UnitCost(2.0), "bf16": UnitCost(1.0)}})
        >>> table.unit_ms("head", "bf16"), table.unit_ms("head", "int8")
        (1.0, None)
    """

    def __init__(self, costs: Mapping[str, Mapping[str, UnitCost]] | None = None) -> None:
        self._costs = {unit: dict(formats) for unit, formats in (costs or {}).items() if formats}

    def __bool__(self) -> bool:
        return bool(self._costs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CostTable) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    @property
    def units(self) -> tuple[str, ...]:
        """Units of which something is known."""
        return tuple(self._costs)

    def formats(self, unit_name: str) -> tuple[str, ...]:
        """Formats in which a unit was measured, widest first."""
        return tuple(sorted(self._costs.get(unit_name, ()), key=rank))

    def cost(self, unit_name: str, format_name: str) -> UnitCost | None:
        """Everything that is known of a unit in a format."""
        return self._costs.get(unit_name, {}).get(format_name)

    def unit_ms(self, unit_name: str, format_name: str) -> float | None:
        """Milliseconds of forward, backward and casts in a step; ``None`` if that was not measured."""
        cost = self.cost(unit_name, format_name)
        return None if cost is None else cost.ms

    def unit_bytes(self, unit_name: str, format_name: str) -> int | None:
        """Bytes of saved activations and of copies of weights; ``None`` if that was not measured."""
        cost = self.cost(unit_name, format_name)
        return None if cost is None else cost.activation_bytes + cost.copy_bytes

    def best_implementation(self, unit_name: str, format_name: str) -> str:
        """The fastest implementation whose error is small enough; ``"default"`` where nothing was measured."""
        cost = self.cost(unit_name, format_name)
        return "default" if cost is None else cost.implementation

    def implementations(self) -> dict[str, dict[str, str]]:
        """Implementations by unit and format, where they are not torch's own."""
        chosen = {
            unit: {name: cost.implementation for name, cost in formats.items() if cost.implementation != "default"}
            for unit, formats in self._costs.items()
        }
        return {unit: formats for unit, formats in chosen.items() if formats}

    # ---- whole maps ----

    def map_ms(self, formats: Mapping[str, str]) -> float:
        """Milliseconds of all units that are known in their formats.

        Args:
            formats: Format by unit name.
        """
        return sum(self.unit_ms(unit, formats[unit]) or 0.0 for unit in self.units if unit in formats)

    def map_bytes(self, formats: Mapping[str, str]) -> int:
        """Bytes of saved activations and copies of weights of all units that are known in their formats.

        Args:
            formats: Format by unit name.
        """
        return sum(self.unit_bytes(unit, formats[unit]) or 0 for unit in self.units if unit in formats)

    def covers(self, formats: Mapping[str, str]) -> bool:
        """Whether all units of the table were measured in the formats of a map.

        Args:
            formats: Format by unit name.
        """
        return all(self.cost(unit, formats[unit]) is not None for unit in self.units if unit in formats)

    # ---- which formats pay ----

    def why_too_slow(self, unit_name: str, format_name: str, offered: Iterable[str]) -> str | None:
        """Says why a format does not pay, ``None`` where it does or where that is not known.

        It pays if it is faster than the next wider format, by more than noise. Where the two are alike, the choice that
        is faster for all units together decides, since a change of dtype between layers costs something, too.

        Args:
            unit_name: The unit.
            format_name: The format that is judged.
            offered: Formats that the unit may be given otherwise.
        """
        mine = self.unit_ms(unit_name, format_name)
        wider = [name for name in offered if rank(name) < rank(format_name) and self.cost(unit_name, name) is not None]
        if mine is None or not wider:
            return None
        other = max(wider, key=rank)
        theirs = self.unit_ms(unit_name, other)
        assert theirs is not None, "it was looked up above"
        if mine < theirs * (1.0 - NOISE):
            return None
        if mine <= theirs * (1.0 + NOISE) and self._is_faster_overall(format_name, other):
            return None
        return f"{format_name} does not pay here: {mine:.3g} ms a step in forward and backward, {other} {theirs:.3g} ms"

    def _is_faster_overall(self, format_name: str, other: str) -> bool:
        both = [unit for unit in self.units if {format_name, other} <= self._costs[unit].keys()]
        mine, theirs = (sum(self._costs[unit][name].ms for unit in both) for name in (format_name, other))
        return mine < theirs * (1.0 - NOISE)

    # ---- state ----

    def to_dict(self) -> dict[str, dict[str, list[Any]]]:
        """Returns primitives."""
        return {unit: {name: list(cost) for name, cost in formats.items()} for unit, formats in self._costs.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Iterable[Any]]]) -> CostTable:
        """Makes a table from what ``to_dict`` returned.

        Args:
            data: The same primitives.
        """
        return cls(
            {unit: {name: UnitCost(*fields) for name, fields in formats.items()} for unit, formats in data.items()}
        )


class StepModel:
    """Predicts the time of a whole step from what units cost: a factor times their sum, plus a rest.

    The rest is what is no unit's: operations between units, the optimizer's step, the loop. Both numbers are fitted to
    the latest step time of every map that was seen; while that is only one, the factor is 1.

    Attributes:
        factor: What the sum of the units is multiplied by.
        rest_ms: The rest.
        largest_error: Largest relative error of a prediction so far.
        corrections: How many predictions were off by more than 20 %.
    """

    TOLERANCE = 0.2
    _MOST = 16

    def __init__(self) -> None:
        self.factor = 1.0
        self.rest_ms = math.nan
        self.largest_error = 0.0
        self.corrections = 0
        self._seen: list[list[float]] = []

    @property
    def is_fitted(self) -> bool:
        """Whether a step time was measured yet."""
        return not math.isnan(self.rest_ms)

    def predict_ms(self, units_ms: float) -> float:
        """Milliseconds of a step; NaN before a step time was measured.

        Args:
            units_ms: What all units cost together.
        """
        return self.factor * units_ms + self.rest_ms

    def observe(self, units_ms: float, step_ms: float) -> float | None:
        """Compares a prediction with what was measured, and fits the model anew.

        Args:
            units_ms: What all units cost together.
            step_ms: Median of measured step times.

        Returns:
            Relative error of the prediction, ``None`` if there was none.
        """
        error = abs(self.predict_ms(units_ms) - step_ms) / step_ms if self.is_fitted else None
        self._seen = [*[pair for pair in self._seen if pair[0] != units_ms], [units_ms, step_ms]][-self._MOST :]
        self._fit()
        if error is not None:
            self.largest_error = max(self.largest_error, error)
            self.corrections += error > self.TOLERANCE
        return error

    def _fit(self) -> None:
        """Least squares of the relative errors, with a factor between 1/4 and 4 and no negative rest."""
        weights = [1.0 / (step * step) for _, step in self._seen]
        total = sum(weights)
        units = sum(w * u for w, (u, _) in zip(weights, self._seen, strict=True)) / total
        steps = sum(w * s for w, (_, s) in zip(weights, self._seen, strict=True)) / total
        spread = sum(w * (u - units) ** 2 for w, (u, _) in zip(weights, self._seen, strict=True))
        product = sum(w * (u - units) * (s - steps) for w, (u, s) in zip(weights, self._seen, strict=True))
        # one point, or several that are alike, say nothing of the factor
        is_known = spread / total > (NOISE * units) ** 2
        self.factor = min(max(product / spread, 0.25), 4.0) if is_known else 1.0
        self.rest_ms = steps - self.factor * units
        if self.rest_ms < 0.0:
            self.factor, self.rest_ms = steps / units, 0.0

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {**vars(self), "_seen": [list(pair) for pair in self._seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned.

        Args:
            state: The saved state.
        """
        vars(self).update({**state, "_seen": [list(pair) for pair in state["_seen"]]})
