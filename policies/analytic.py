"""Policies that plan a whole map of formats: by shape, by Fisher information, and by divergence as SNIP does.

What lives here: the controller that asks a planner at the right time, and the policies by name. What does not: the
planners (``analytic_shape``, ``analytic_planners``) and the integer program (``analytic_milp``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoprec.action import Action
from autoprec.config import AutoPrecisionConfig
from autoprec.controller import Controller
from autoprec.encoding import Observation
from autoprec.plan_config import PlanConfig
from autoprec.planning import MapPlanner, ModelFacts
from autoprec.policies.analytic_planners import FisherPlanner, SnipPlanner
from autoprec.policies.analytic_shape import ShapePlanner


class PlanningController(Controller):
    """Asks a planner for a map and requests what it says.

    A planner that needs measured errors is asked after ``PlanConfig.warmup`` decisions and then every
    ``PlanConfig.replan``; where nothing could be measured, at the next decision. Another one is asked once, before the
    first window. What the guard holds is not in the facts as a choice, so no plan moves it.

    Args:
        planner: Makes the map.
        config: When to plan.
    """

    needs_facts = True

    def __init__(self, planner: MapPlanner, config: PlanConfig | None = None) -> None:
        self.planner = planner
        self.name = planner.name
        self.looks = planner.needs_errors
        self.config = config if config is not None else PlanConfig()
        self._begin()

    def _begin(self) -> None:
        self._facts = ModelFacts()
        self._wait = self.config.warmup
        self._is_over = not self.planner.needs_errors
        self._reasons: dict[str, str] = {}
        self._note = ""

    def start(self, names: Sequence[str], legal: Sequence[tuple[str, ...]]) -> None:
        """Forgets an earlier run.

        Args:
            names: Not used, facts follow.
            legal: The same.
        """
        self._begin()

    def note_facts(self, facts: ModelFacts) -> None:
        """Keeps the facts if the next question makes a plan of them.

        Args:
            facts: What is known.
        """
        if self.wants_errors() or not self.planner.needs_errors:
            self._facts = facts

    def wants_errors(self) -> bool:
        """Returns whether the next decision makes a plan."""
        return self._wait == 0 and not self._is_over

    def initial_map(self) -> Mapping[str, str] | None:
        """Returns the map of a planner that needs no errors, else ``None``."""
        return None if self.planner.needs_errors else self._planned(self._facts)

    def decide(self, observation: Observation) -> Action | None:
        """Returns what the plan changes, if one is due.

        Args:
            observation: Not used.
        """
        self._reasons = {}
        if not self.wants_errors():
            self._wait = max(self._wait - 1, 0)
            return None
        facts, self._facts = self._facts, ModelFacts()
        if not any(unit.errors.formats for unit in facts.units):
            is_open = any(len(unit.legal) > 1 for unit in facts.units)
            why = "no layer has had a gradient yet" if is_open else "no layer has a choice of formats"
            self._note = f"{why}, nothing is planned"
            return None
        self._wait, self._is_over = max(self.config.replan - 1, 0), self.config.replan == 0
        return Action(precision=self._planned(facts))

    def _planned(self, facts: ModelFacts) -> dict[str, str]:
        plan = self.planner.plan(facts)
        self._reasons, self._note = dict(plan.reasons), plan.note
        return {
            unit.name: plan.formats[unit.name]
            for unit in facts.units
            if plan.formats.get(unit.name, unit.format) != unit.format
        }

    def reasons(self) -> Mapping[str, str]:
        """Returns why the latest plan chose what it did, by unit name."""
        return self._reasons

    def notes(self) -> Sequence[str]:
        """Returns one line about the latest plan."""
        return (self._note,) if self._note else ()

    def state_dict(self) -> dict[str, Any]:
        """Returns when the next plan is due, and what was said of the latest."""
        return {"wait": self._wait, "is_over": self._is_over, "note": self._note}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned.

        Args:
            state: The saved state.
        """
        self._wait, self._is_over = int(state["wait"]), bool(state["is_over"])
        self._note = str(state["note"])


def shape_policy(config: AutoPrecisionConfig | None = None) -> PlanningController:
    """Returns ``policy="shape"``.

    Args:
        config: Not used; what is legal follows from it elsewhere.
    """
    return PlanningController(ShapePlanner())


def fisher_policy(config: AutoPrecisionConfig | None = None) -> PlanningController:
    """Returns ``policy="fisher"``.

    Args:
        config: Its ``plan`` has the budgets.

    Raises:
        ModuleNotFoundError: If SciPy is not installed.
    """
    plan = PlanConfig() if config is None else config.plan
    return PlanningController(FisherPlanner(plan), plan)


def snip_policy(config: AutoPrecisionConfig | None = None) -> PlanningController:
    """Returns ``policy="snip"``.

    Args:
        config: Its ``plan`` has the budgets.

    Raises:
        ModuleNotFoundError: If SciPy is not installed.
    """
    plan = PlanConfig() if config is None else config.plan
    return PlanningController(SnipPlanner(plan), plan)
