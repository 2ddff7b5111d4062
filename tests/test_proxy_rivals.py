"""Planners of whole maps inside proxy runs: the facts they are told, and their maps against all maps.

Time budget: 10 s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autoprec.envs.baselines import Table, play
from autoprec.envs.engine import FORMATS
from autoprec.envs.proxies import Bank, Distribution, Task
from autoprec.envs.simulation import Simulation
from autoprec.envs.twins import Twin, run_twins
from autoprec.plan_config import PlanConfig
from autoprec.planning import FormatErrors, ModelFacts
from autoprec.table import OVERFLOW_ERROR, TableSettings
from tests.kernels import needs_cpu_kernels

pytest.importorskip("scipy")
from autoprec.policies.proxy_rivals import STAND_INS, Planned, facts_of, fisher, snip

pytestmark = needs_cpu_kernels

SMALL = Distribution(
    units=(3,), widths=(32,), regimes=(1, 0, 0), tables=(1, 0, 0), costly_probes=0.0, budget=64, steps=8
)
PLAIN = TableSettings(schedule=())


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    tasks = list(Bank("train", 6, SMALL))
    made = Simulation(tasks)
    made.restart(dict(enumerate(tasks)))
    yield made
    made.close()


def all_maps(task: Task) -> Iterator[tuple[int, ...]]:
    yield from itertools.product(range(len(task.ladder)), repeat=task.units)


def price(simulation: Simulation, run: int, levels: tuple[int, ...]) -> float:
    ladder = simulation.tasks[run].ladder
    return float(sum(simulation.table.cost[run, unit, ladder[level]] for unit, level in enumerate(levels)))


def errors_of(facts: ModelFacts, levels: tuple[int, ...]) -> list[FormatErrors]:
    pairs = zip(facts.units, levels, strict=True)
    return [unit.errors.formats[STAND_INS[level]] for unit, level in pairs]


def increase(facts: ModelFacts, levels: tuple[int, ...]) -> float:
    return sum(found.fisher for found in errors_of(facts, levels)) / abs(facts.loss)


def divergence(facts: ModelFacts, levels: tuple[int, ...]) -> float:
    total = before = 0.0
    for unit, found in zip(facts.units, errors_of(facts, levels), strict=True):
        own = unit.errors.update_share
        passed = found.passed_gradient * before if before else 0.0
        total += found.loss_divergence / abs(facts.loss) + found.own_gradient * own + passed
        before += own
    return total


def test_the_fisher_map_is_the_fastest_within_its_budget(simulation: Simulation) -> None:
    plan = PlanConfig(loss_budget=0.02)
    fisher(plan, PLAIN)(simulation)
    for run, task in enumerate(simulation.tasks):
        facts = facts_of(simulation, run)
        allowed = [levels for levels in all_maps(task) if increase(facts, levels) <= plan.loss_budget]
        chosen = tuple(simulation.level[run].tolist())
        assert increase(facts, chosen) <= plan.loss_budget * (1 + 1e-6)
        assert price(simulation, run, chosen) == pytest.approx(min(price(simulation, run, each) for each in allowed))
    assert simulation.level.any()


def test_the_snip_map_disturbs_least_among_those_that_save_enough(simulation: Simulation) -> None:
    snip(PlanConfig(saving=0.5), PLAIN)(simulation)
    for run, task in enumerate(simulation.tasks):
        facts = facts_of(simulation, run)
        prices = {levels: price(simulation, run, levels) for levels in all_maps(task)}
        slowest = prices[(0,) * task.units]
        bound = slowest - 0.5 * max(slowest - min(prices.values()), 0.0)
        allowed = [levels for levels in prices if prices[levels] <= bound * (1 + 1e-9)]
        least = min(divergence(facts, levels) for levels in allowed)
        chosen = tuple(simulation.level[run].tolist())
        if math.isfinite(least):  # else no map meets it, and the planner says so
            assert prices[chosen] <= bound * (1 + 1e-6)
            assert divergence(facts, chosen) == pytest.approx(least, rel=1e-6)
    assert simulation.level.any()


def test_facts_are_those_of_the_probes(simulation: Simulation) -> None:
    task = simulation.tasks[0]
    simulation.errors[0, 1, :, task.ladder[1]] = (0.3, 0.4, 0.1)
    simulation.underflow[0, 1, 2, task.ladder[1]] = 0.0
    facts = facts_of(simulation, 0, headroom_bits=0.0)
    assert [unit.name for unit in facts.units] == ["0", "1", "2"]
    assert facts.units[0].legal == STAND_INS[: len(task.ladder)]
    found = facts.units[1].errors.formats[STAND_INS[1]]
    factor = float(task.spec["loss_factor"])
    spread = simulation.gradient_norm[0, 1, -1] / factor * simulation.windows["weight_amax"][0, 1] / 3.0 * 0.5
    assert found.taylor == pytest.approx(spread, rel=1e-5)
    assert found.fisher == pytest.approx(32 / 2 * spread**2, rel=1e-5)
    assert (found.own_gradient, found.passed_gradient) == pytest.approx((math.hypot(0.1, 0.3), math.hypot(0.1, 0.4)))
    widest = facts.units[1].errors.formats[STAND_INS[0]]
    assert widest.fisher == widest.own_gradient == 0.0
    assert facts.costs is not None
    assert facts.costs.unit_ms("1", STAND_INS[1]) == simulation.table.cost[0, 1, task.ladder[1]]
    assert facts.loss == pytest.approx(simulation.losses[0, -1] / factor, rel=1e-6)


@pytest.mark.parametrize("what", ["overflow", "flushed", "no headroom"])
def test_what_cannot_be_used_is_out(simulation: Simulation, what: str) -> None:
    run = next(r for r, task in enumerate(simulation.tasks) if task.ladder[2] == FORMATS.index("fp16"))
    place, name = 2, STAND_INS[2]
    simulation.errors[run, 0], simulation.underflow[run, 0], headroom = 0.01, 0.0, 0.0
    simulation.activation_amax[run, 0, -1] = 40_000.0
    assert math.isfinite(facts_of(simulation, run, 0.0).units[0].errors.formats[name].taylor)
    if what == "overflow":
        simulation.errors[run, 0, 1, simulation.tasks[run].ladder[place]] = OVERFLOW_ERROR
    elif what == "flushed":
        simulation.underflow[run, 0, 2, simulation.tasks[run].ladder[place]] = 0.3
    else:
        headroom = 1.0
    facts = facts_of(simulation, run, headroom)
    assert math.isinf(facts.units[0].errors.formats[name].taylor)
    assert math.isfinite(facts.units[0].errors.formats[STAND_INS[0]].taylor)
    assert facts.units[1].errors == facts_of(simulation, run, headroom).units[1].errors


def test_a_unit_that_overflows_goes_up_between_plans(simulation: Simulation) -> None:
    choose = fisher(PlanConfig(replan=4), PLAIN)
    choose(simulation)
    simulation.level[:] = np.where(simulation.is_unit, 2, 0)
    simulation.since_probe[:] = 1
    simulation.windows["first_unit"] = [1, -1, -1, -1, -1, -1]
    choose(simulation)
    assert simulation.level[0].tolist() == [2, 1, 2]
    assert (simulation.level[1:] == 2).all()
    simulation.since_probe[:] = 3
    choose(simulation)
    assert simulation.probes.all()


@pytest.mark.parametrize("make", [fisher, snip], ids=["fisher", "snip"])
def test_runs_are_planned_to_their_end(make: object) -> None:
    drawn = list(Bank("train", 6, SMALL))
    pairs = [(task, Twin(t.first_loss, t.first_loss / 1.5)) for task, t in zip(drawn, run_twins(drawn), strict=True)]
    choose = make(settings=PLAIN)  # type: ignore[operator]  # two functions of one signature
    assert isinstance(choose, Planned)
    found = play(pairs, choose)
    np.testing.assert_array_equal(found.score, play(pairs, replace(choose)).score)  # nothing is remembered
    assert (found.level > 0).any()
    wide = play(pairs, Table(settings=PLAIN))
    assert not np.array_equal(found.level, wide.level)
