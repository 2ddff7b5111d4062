"""The shape rule: a layer runs in the narrowest format for which it is large and even enough. No data is looked at.

For fp8 it is what torchao 0.18 does in ``torchao.float8._auto_filter_for_recipe("tensorwise", ...)``: a linear layer is
converted if both sizes are multiples of 16, unless it has at most 4096 inputs and at most 1024 outputs. The other
formats have the same two kinds of limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.formats import get_format
from autoprec.planning import ModelFacts, Plan, UnitFacts


@dataclass(frozen=True)
class ShapeLimit:
    """From which sizes on a format pays.

    Args:
        multiple: What both sizes of a matrix must be multiples of: 16 bytes of the format.
        inputs: Inputs up to which a layer may be too small.
        outputs: Outputs up to which a layer with so few inputs is too small.
        smallest: Least size of either kind.
        kinds: Kinds of layer, ``None`` for all.
    """

    multiple: int
    inputs: int = 0
    outputs: int = 0
    smallest: int = 0
    kinds: tuple[str, ...] | None = None

    def is_met(self, unit: UnitFacts) -> bool:
        """Whether all matrices of a unit are large and even enough.

        Args:
            unit: The unit.
        """
        if not unit.shapes or (self.kinds is not None and unit.kind not in self.kinds):
            return False
        return all(self._is_met_by(*shape) for shape in unit.shapes)

    def _is_met_by(self, outputs: int, inputs: int) -> bool:
        is_even = outputs % self.multiple == 0 and inputs % self.multiple == 0
        is_small = inputs <= self.inputs and outputs <= self.outputs
        return is_even and not is_small and min(outputs, inputs) >= self.smallest


LIMITS = {
    "tf32": ShapeLimit(multiple=4),
    "bf16": ShapeLimit(multiple=8),
    "fp16": ShapeLimit(multiple=8),
    "fp8": ShapeLimit(multiple=16, inputs=4096, outputs=1024, kinds=("linear",)),
    "int8": ShapeLimit(multiple=16, smallest=256, kinds=("linear",)),
}
"""Limits by format. 256 for int8 is from where on its matrix products were seen to save time on a CPU."""


class ShapePlanner:
    """Gives each unit the narrowest format that the device computes itself and whose limits it meets.

    A unit that meets none keeps what it has, as torchao leaves layers that its filter does not take. Of two formats
    with equally many bits the one with the wider range goes first.
    """

    name = "shape"
    needs_errors = False

    def plan(self, facts: ModelFacts) -> Plan:
        """Returns the map; a pure function of shapes and legal formats.

        Args:
            facts: Only names, kinds, formats and shapes are looked at.
        """
        formats: dict[str, str] = {}
        reasons: dict[str, str] = {}
        for unit in facts.units:
            fitting = [
                name for name in unit.legal if name in LIMITS and name in unit.native and LIMITS[name].is_met(unit)
            ]
            chosen = min([unit.format, *fitting], key=lambda name: get_format(name).bits)
            formats[unit.name] = chosen
            if chosen != unit.format:
                sizes = ", ".join(f"{outputs} x {inputs}" for outputs, inputs in unit.shapes)
                reasons[unit.name] = f"{sizes} is large and even enough for {chosen}"
        changed = len(reasons)
        return Plan(formats=formats, reasons=reasons, note=f"by shape, {changed} of {len(formats)} layers narrowed")
