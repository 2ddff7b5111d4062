"""What a unit costs in a format where nothing was measured: multiplications, at rates that go with the format's width.

Times are in multiplications at the rate of fp32. They say how maps compare, not how long a step takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.formats import get_format
from autoprec.planning import CostTable, UnitFacts

RATES = {"fp32": 1.0, "tf32": 2.0, "bf16": 2.0, "fp16": 2.0, "fp8": 4.0, "int8": 4.0}
"""Multiplications in the time of one in fp32, where the device computes the format itself."""

_EMULATED = 1.5  # times the time of fp32: the same arithmetic, and the casts
_PASSES = 3.0  # one forward, two backward
_LABEL = "multiplications by relative rates ({})".format(", ".join(f"{name} {rate:g}" for name, rate in RATES.items()))


class MultiplicationCosts:
    """A cost table from what a measured window has counted.

    Args:
        units: Units; those whose calls were not seen count with their parameters.
    """

    label = _LABEL

    def __init__(self, units: Sequence[UnitFacts]) -> None:
        self._units = {unit.name: unit for unit in units}

    def unit_ms(self, unit_name: str, format_name: str) -> float:
        """Returns the time of forward and backward, in multiplications at the rate of fp32.

        Args:
            unit_name: Unit name.
            format_name: One of ``autoprec.formats.FORMATS``.
        """
        unit = self._units[unit_name]
        seen = unit.errors.elements > 0
        multiplications = unit.errors.multiplications if seen else float(unit.parameter_count)
        is_native = format_name in unit.native
        return _PASSES * multiplications * (1.0 / RATES[format_name] if is_native else _EMULATED)

    def unit_bytes(self, unit_name: str, format_name: str) -> int:
        """Returns bytes of the weight's low-precision copy and of the output.

        Args:
            unit_name: Unit name.
            format_name: One of ``autoprec.formats.FORMATS``.
        """
        unit, number_format = self._units[unit_name], get_format(format_name)
        copy = 0 if number_format.dtype.itemsize == 4 else unit.parameter_count * number_format.dtype.itemsize
        return int(copy + unit.errors.elements * number_format.compute_dtype.itemsize)


def describe(costs: CostTable) -> str:
    """Says what the costs of a table are.

    Args:
        costs: A table.
    """
    return costs.label if isinstance(costs, MultiplicationCosts) else "measured times"
