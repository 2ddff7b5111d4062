"""What a policy that plans a whole map is told of the model, and what it answers.

What lives here: plain data and two protocols. What does not: measuring the errors (``rounding_probe``), gathering the
facts (``plan_facts``) and planning (``autoprec.policies.analytic``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class FormatErrors:
    """What rounding to a format does to one unit, as far as a measured window tells. ``inf`` where it cannot be used.

    Args:
        fisher: Expected increase of the loss, half the empirical Fisher information times squared errors.
        taylor: Magnitude of the first-order change of the loss, of weights and of outputs.
        loss_divergence: Spread of the change of the loss if errors were independent of gradients.
        own_gradient: Relative error of the unit's own weight gradient.
        passed_gradient: Relative error of the gradient that the unit passes on to those before it.
    """

    fisher: float
    taylor: float
    loss_divergence: float
    own_gradient: float
    passed_gradient: float


@dataclass(frozen=True, kw_only=True)
class UnitErrors:
    """What one measured window tells about a unit.

    Args:
        formats: Errors by format; empty if nothing could be measured.
        reasons: Format to the reason why it cannot be used.
        relative: Largest error of the unit's tensors by format, relative to the centred tensor, 2 where one overflows.
            Known even where there was no gradient and for formats that cannot be used.
        gradient_amax: Largest absolute unscaled gradient of outputs and weights, NaN if there was none.
        update_share: Norm of the part of an optimizer step that is linear in the gradient, relative to that of the
            weights. 0 for a unit that is not trained.
        multiplications: Per forward, in all calls of the window.
        elements: Of its outputs in the window.
    """

    formats: Mapping[str, FormatErrors] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    relative: Mapping[str, float] = field(default_factory=dict)
    gradient_amax: float = math.nan
    update_share: float = 0.0
    multiplications: float = 0.0
    elements: float = 0.0


@dataclass(frozen=True, kw_only=True)
class UnitFacts:
    """What is known about a unit when a plan is due.

    Args:
        name: Unit name.
        kind: Kind of layer.
        format: Current format.
        legal: Formats it may be given now, widest first; only the current one while the guard holds it.
        native: Formats that the device computes itself for it.
        shapes: First two sizes of each of its weight matrices.
        parameter_count: Its parameters.
        errors: What was measured.
    """

    name: str
    kind: str = "linear"
    format: str = "fp32"
    legal: tuple[str, ...] = ("fp32",)
    native: tuple[str, ...] = ("fp32",)
    shapes: tuple[tuple[int, int], ...] = ()
    parameter_count: int = 0
    errors: UnitErrors = field(default_factory=UnitErrors)


class CostTable(Protocol):
    """What a unit costs in a format; ``None`` where that is not known."""

    def unit_ms(self, unit_name: str, format_name: str) -> float | None:
        """Returns milliseconds per step: forward, backward and casts.

        Args:
            unit_name: Unit name.
            format_name: One of ``autoprec.formats.FORMATS``.
        """

    def unit_bytes(self, unit_name: str, format_name: str) -> int | None:
        """Returns bytes of weight copies and kept activations.

        Args:
            unit_name: Unit name.
            format_name: One of ``autoprec.formats.FORMATS``.
        """


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is known about a model when a plan is due.

    Args:
        units: Units that can be steered, in the model's order.
        loss: Mean of the latest losses, NaN if there was none.
        costs: Measured costs, ``None`` where nothing was measured.
    """

    units: tuple[UnitFacts, ...] = ()
    loss: float = math.nan
    costs: CostTable | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A map of formats and why.

    Args:
        formats: Format by unit name; units that are not in it stay as they are.
        reasons: Why, by unit name.
        note: One line about the plan as a whole.
    """

    formats: Mapping[str, str]
    reasons: Mapping[str, str]
    note: str = ""


class MapPlanner(Protocol):
    """Makes a map from facts; a pure function.

    Attributes:
        name: Short name for records and reports.
        needs_errors: Whether it plans from measured errors. Otherwise it plans once, before the first window.
    """

    name: str
    needs_errors: bool

    def plan(self, facts: ModelFacts) -> Plan:
        """Returns a map within what is legal.

        Args:
            facts: What is known.
        """
