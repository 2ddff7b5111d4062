"""Two planners that weigh measured rounding errors against cost and leave the choice to an integer program.

``FisherPlanner`` looks for the fastest map within a budget of expected loss. ``SnipPlanner`` looks for the map that
disturbs training least among those that save enough time. docs/policies.md has the papers and what differs from them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

from autoprec.formats import rank
from autoprec.plan_config import PlanConfig
from autoprec.planning import CostTable, FormatErrors, ModelFacts, Plan, UnitFacts
from autoprec.policies.analytic_costs import MultiplicationCosts, describe
from autoprec.policies.analytic_milp import Limit, Table, check_scipy, choose, least, total

_SMALLEST_LOSS = 1e-12


class Option(NamedTuple):
    """What a unit would cost in a format, and what it would do."""

    time: float
    bytes: float
    errors: FormatErrors


Options = Mapping[str, Mapping[str, Option]]


def options_of(facts: ModelFacts, costs: CostTable) -> dict[str, dict[str, Option]]:
    """Returns what is open for each unit; a unit without measured errors, or without a cost, is left out.

    Args:
        facts: What is known.
        costs: What formats cost.
    """
    options: dict[str, dict[str, Option]] = {}
    estimate = MultiplicationCosts(facts.units)
    for unit in facts.units:
        found = {name: option for name in unit.legal if (option := _option(unit, name, costs, estimate)) is not None}
        if found:
            options[unit.name] = found
    return options


def _option(unit: UnitFacts, name: str, costs: CostTable, estimate: MultiplicationCosts) -> Option | None:
    errors, time = unit.errors.formats.get(name), costs.unit_ms(unit.name, name)
    if errors is None or time is None:
        return None
    size = costs.unit_bytes(unit.name, name)
    return Option(time, float(estimate.unit_bytes(unit.name, name) if size is None else size), errors)


def table(options: Options, value: Callable[[str, Option], float]) -> dict[str, dict[str, float]]:
    """Returns one number for each unit and format.

    Args:
        options: What is open.
        value: Takes unit name and option.
    """
    return {unit: {name: value(unit, each) for name, each in row.items()} for unit, row in options.items()}


class _Planner(ABC):
    """What both planners share.

    Args:
        config: Budgets.

    Raises:
        ModuleNotFoundError: If SciPy is not installed.
    """

    name = ""
    needs_errors = True
    measure = ""

    def __init__(self, config: PlanConfig | None = None) -> None:
        check_scipy(self.name)
        self.config = config if config is not None else PlanConfig()

    def plan(self, facts: ModelFacts) -> Plan:
        """Returns the map; a pure function.

        Args:
            facts: What is known.
        """
        costs = facts.costs if facts.costs is not None else MultiplicationCosts(facts.units)
        options = options_of(facts, costs)
        times, harm = table(options, lambda _, option: option.time), self.harm(facts, options)
        limits = self._memory(options)
        formats, goal = self.choose(times, harm, limits)
        if formats is None:
            formats = least(harm, times)
            goal = f"no map meets this ({goal}); the one that harms least is taken"
        widest = total(times, _widest(options))
        share = total(times, formats) / widest if widest else 1.0
        note = (
            f"{len(formats)} of {len(facts.units)} layers planned, {self.measure} {total(harm, formats):.2g}, {goal};"
            f" {share:.0%} of the time in the widest formats by {describe(costs)}"
        )
        return Plan(formats=formats, reasons=self._reasons(facts, formats, times, harm), note=note)

    @abstractmethod
    def harm(self, facts: ModelFacts, options: Options) -> Table:
        """Returns what each format of each unit does to training.

        Args:
            facts: What is known.
            options: What is open.
        """

    @abstractmethod
    def choose(self, times: Table, harm: Table, limits: list[Limit]) -> tuple[dict[str, str] | None, str]:
        """Returns the best map, ``None`` if there is none, and what was looked for.

        Args:
            times: Time by unit and format.
            harm: The same of ``harm``.
            limits: Further limits.
        """

    def _memory(self, options: Options) -> list[Limit]:
        limit = self.config.memory_bytes
        return [] if limit is None else [Limit(table(options, lambda _, option: option.bytes), float(limit))]

    def _reasons(self, facts: ModelFacts, formats: Mapping[str, str], times: Table, harm: Table) -> dict[str, str]:
        reasons = {}
        for unit in facts.units:
            if unit.name not in formats:
                continue
            name = formats[unit.name]
            row, wide = times[unit.name], min(times[unit.name], key=rank)
            share = row[name] / row[wide] if row[wide] else 1.0
            text = f"{self.measure} {harm[unit.name][name]:.2g}, {share:.0%} of its time in {wide}"
            barred = [why for each, why in unit.errors.reasons.items() if rank(each) > rank(name)]
            reasons[unit.name] = "; ".join([text, *barred])
        return reasons


def _widest(options: Options) -> dict[str, str]:
    return {unit: min(row, key=rank) for unit, row in options.items()}


def _size_of(loss: float) -> float:
    return max(abs(loss), _SMALLEST_LOSS) if math.isfinite(loss) else 1.0


class FisherPlanner(_Planner):
    """The fastest map whose roundings may raise the loss by no more than a budget, or the reverse.

    Args:
        config: Budgets: ``loss_budget`` or ``time_share``, ``memory_bytes``, ``score``.
    """

    name = "fisher"
    measure = "expected relative loss increase"

    def harm(self, facts: ModelFacts, options: Options) -> Table:
        """Returns the expected increase of the loss, relative to the loss.

        Args:
            facts: What is known.
            options: What is open.
        """
        size, is_fisher = _size_of(facts.loss), self.config.score == "fisher"
        return table(options, lambda _, each: (each.errors.fisher if is_fisher else each.errors.taylor) / size)

    def choose(self, times: Table, harm: Table, limits: list[Limit]) -> tuple[dict[str, str] | None, str]:
        """Returns the best map, ``None`` if there is none, and what was looked for.

        Args:
            times: Time by unit and format.
            harm: Expected relative increase of the loss by unit and format.
            limits: Further limits.
        """
        share, budget = self.config.time_share, self.config.loss_budget
        if share is None:
            return choose(times, [Limit(harm, budget), *limits], harm), f"budget {budget:.2g}{_also(limits)}"
        bound = share * math.fsum(row[min(row, key=rank)] for row in times.values())
        return choose(harm, [Limit(times, bound), *limits], times), f"time share {share:.0%}{_also(limits)}"


class SnipPlanner(_Planner):
    """The map with the least divergence of loss and weights among those that save enough time.

    Args:
        config: Budgets: ``saving``, ``memory_bytes``.
    """

    name = "snip"
    measure = "divergence"

    def harm(self, facts: ModelFacts, options: Options) -> Table:
        """Returns loss divergence plus weight divergence.

        The weight divergence counts the unit's own weights, and those of the units before it, which its backward
        passes gradients to.

        Args:
            facts: What is known.
            options: What is open.
        """
        size, before, passed = _size_of(facts.loss), {}, 0.0
        own = {unit.name: unit.errors.update_share for unit in facts.units}
        for name, share in own.items():
            before[name] = passed
            passed += share

        def divergence(unit: str, option: Option) -> float:
            errors = option.errors
            weights = errors.own_gradient * own[unit] + errors.passed_gradient * before[unit]
            return errors.loss_divergence / size + weights

        return table(options, divergence)

    def choose(self, times: Table, harm: Table, limits: list[Limit]) -> tuple[dict[str, str] | None, str]:
        """Returns the best map, ``None`` if there is none, and what was looked for.

        Args:
            times: Time by unit and format.
            harm: Divergence by unit and format.
            limits: Further limits.
        """
        slowest = math.fsum(row[min(row, key=rank)] for row in times.values())
        fastest = math.fsum(min(row.values()) for row in times.values())
        bound = slowest - self.config.saving * max(slowest - fastest, 0.0)
        goal = f"{self.config.saving:.0%} of the possible saving{_also(limits)}"
        return choose(harm, [Limit(times, bound), *limits], times), goal


def _also(limits: list[Limit]) -> str:
    return f" within {limits[0].bound:g} bytes" if limits else ""
