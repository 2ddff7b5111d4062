"""Maps of the planners on models whose best map is known, by enumeration or because one layer is fragile.

Time budget: 15 s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.plan_config import PlanConfig
from autoprec.planning import FormatErrors, ModelFacts, Plan, UnitErrors, UnitFacts
from autoprec.policies.analytic_costs import MultiplicationCosts
from autoprec.policies.analytic_planners import FisherPlanner, SnipPlanner

FORMATS = ("fp32", "bf16", "fp16", "int8")
NONE = FormatErrors(fisher=0.0, taylor=0.0, loss_divergence=0.0, own_gradient=0.0, passed_gradient=0.0)


def errors(value: float) -> FormatErrors:
    return FormatErrors(fisher=value, taylor=value, loss_divergence=value, own_gradient=value, passed_gradient=value)


def unit(name: str, harm: Mapping[str, float], multiplications: float = 1000.0, **changes: Any) -> UnitFacts:
    """A unit whose formats do so much harm; ``inf`` bars one."""
    formats = {each: errors(value) for each, value in harm.items() if math.isfinite(value)}
    reasons = {each: f"no {each} here" for each, value in harm.items() if not math.isfinite(value)}
    measured = UnitErrors(formats=formats, reasons=reasons, multiplications=multiplications, elements=10.0)
    facts = {"legal": tuple(harm), "native": tuple(harm), "parameter_count": 100, "errors": measured, **changes}
    return UnitFacts(name=name, **facts)


class Costs:
    """A table of measured costs."""

    def __init__(self, times: Mapping[str, Mapping[str, float | None]], sizes: Mapping[str, Mapping[str, int]]) -> None:
        self.times, self.sizes = times, sizes

    def unit_ms(self, unit_name: str, format_name: str) -> float | None:
        return self.times[unit_name].get(format_name)

    def unit_bytes(self, unit_name: str, format_name: str) -> int | None:
        return self.sizes[unit_name].get(format_name)


small = st.integers(0, 32)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    """Up to five units with two to four formats, random errors, bars, times and sizes."""
    units, times, sizes = [], {}, {}
    for index in range(draw(st.integers(1, 5))):
        name = f"net.{index}"
        legal = ("fp32", *sorted(draw(st.sets(st.sampled_from(FORMATS[1:]), min_size=1)), key=FORMATS.index))
        harm = {each: draw(small) * 1e-4 for each in legal[1:]}
        harm.update({each: math.inf for each in harm if draw(st.integers(0, 7)) == 0})
        share = draw(small) / 32.0
        facts = unit(name, {"fp32": 0.0, **harm})
        units.append(replace(facts, errors=replace(facts.errors, update_share=share)))
        times[name] = {each: float(draw(small) + 1) for each in legal}
        sizes[name] = {each: draw(small) for each in legal}
    return ModelFacts(units=tuple(units), loss=draw(st.sampled_from([0.5, 2.0])), costs=Costs(times, sizes))


def every_map(facts: ModelFacts) -> Iterator[dict[str, str]]:
    choices = [[each for each in one.legal if each in one.errors.formats] for one in facts.units]
    for names in itertools.product(*choices):
        yield {one.name: each for one, each in zip(facts.units, names, strict=True)}


def sums(facts: ModelFacts, formats: Mapping[str, str]) -> tuple[float, float, float, float]:
    """Time, size, Fisher score and divergence of a map, written down anew."""
    time = size = fisher = divergence = before = 0.0
    for one in facts.units:
        each = formats[one.name]
        measured = one.errors.formats[each]
        assert facts.costs is not None
        time += facts.costs.unit_ms(one.name, each) or 0.0
        size += facts.costs.unit_bytes(one.name, each) or 0.0
        fisher += measured.fisher / facts.loss
        divergence += measured.loss_divergence / facts.loss
        divergence += measured.own_gradient * one.errors.update_share + measured.passed_gradient * before
        before += one.errors.update_share
    return time, size, fisher, divergence


def widest(facts: ModelFacts) -> float:
    return sums(facts, {one.name: "fp32" for one in facts.units})[0]


def check(plan: Plan, facts: ModelFacts, goal: int, bounds: Mapping[int, float], harm: int) -> None:
    """The plan is as good as the best of all maps within bounds, or the least harmful of all where none is."""
    allowed = [
        found
        for formats in every_map(facts)
        if all((found := sums(facts, formats))[index] <= bound * (1 + 1e-9) for index, bound in bounds.items())
    ]
    own = sums(facts, plan.formats)
    if not allowed:
        assert "no map meets this" in plan.note
        assert own[harm] == pytest.approx(min(sums(facts, formats)[harm] for formats in every_map(facts)))
        return
    assert "no map" not in plan.note
    for index, bound in bounds.items():
        assert own[index] <= bound * (1 + 1e-5) + 1e-12
    assert own[goal] == pytest.approx(min(found[goal] for found in allowed), rel=1e-5, abs=1e-9)


budgets = st.integers(0, 40).map(lambda n: n * 2e-4)
limits = st.none() | st.integers(0, 100)


@settings(max_examples=80, deadline=None)
@given(models(), budgets, limits)
def test_fisher_is_the_fastest_map_within_the_budget(facts: ModelFacts, budget: float, memory: int | None) -> None:
    plan = FisherPlanner(PlanConfig(loss_budget=budget, memory_bytes=memory)).plan(facts)
    check(plan, facts, 0, {2: budget, **({} if memory is None else {1: memory})}, harm=2)


@settings(max_examples=80, deadline=None)
@given(models(), st.integers(1, 16).map(lambda n: n / 16.0), limits)
def test_fisher_turned_round_harms_least_within_the_time(facts: ModelFacts, share: float, memory: int | None) -> None:
    plan = FisherPlanner(PlanConfig(time_share=share, memory_bytes=memory)).plan(facts)
    check(plan, facts, 2, {0: share * widest(facts), **({} if memory is None else {1: memory})}, harm=2)


@settings(max_examples=80, deadline=None)
@given(models(), st.integers(0, 16).map(lambda n: n / 16.0), limits)
def test_snip_diverges_least_for_the_saving(facts: ModelFacts, saving: float, memory: int | None) -> None:
    plan = SnipPlanner(PlanConfig(saving=saving, memory_bytes=memory)).plan(facts)
    fastest = min(sums(facts, formats)[0] for formats in every_map(facts))
    bound = widest(facts) - saving * (widest(facts) - fastest)
    check(plan, facts, 3, {0: bound, **({} if memory is None else {1: memory})}, harm=3)


@given(models())
def test_plans_are_functions_of_the_facts(facts: ModelFacts) -> None:
    for planner in (FisherPlanner(), SnipPlanner()):
        assert planner.plan(facts) == planner.plan(facts)


@pytest.mark.parametrize("planner", [FisherPlanner(), FisherPlanner(PlanConfig(score="taylor")), SnipPlanner()])
@pytest.mark.parametrize("harm", [math.inf, 0.5], ids=["barred", "harmful"])
def test_exactly_the_fragile_layer_stays_wide(planner: FisherPlanner | SnipPlanner, harm: float) -> None:
    if planner.name == "snip" and math.isfinite(harm):
        planner = SnipPlanner(PlanConfig(saving=0.7))
    units = [unit(f"net.{index}", {"fp32": 0.0, "bf16": 1e-6}) for index in range(5)]
    units[3] = unit("net.3", {"fp32": 0.0, "bf16": harm})
    plan = planner.plan(ModelFacts(units=tuple(units), loss=1.0))
    assert plan.formats == {f"net.{index}": "fp32" if index == 3 else "bf16" for index in range(5)}
    assert ("no bf16 here" in plan.reasons["net.3"]) == math.isinf(harm)


def test_gradients_that_reach_many_weights_weigh_more() -> None:
    """Two equal layers: the last one's backward feeds all others, so SNIP leaves it wide."""
    units = tuple(unit(f"net.{index}", {"fp32": 0.0, "bf16": 1e-3}) for index in range(4))
    units = tuple(replace(one, errors=replace(one.errors, update_share=0.1)) for one in units)
    plan = SnipPlanner(PlanConfig(saving=0.75)).plan(ModelFacts(units=units, loss=1.0))
    assert [plan.formats[one.name] for one in units] == ["bf16", "bf16", "bf16", "fp32"]


def test_what_was_not_measured_or_has_no_cost_stays_as_it_is() -> None:
    unmeasured = UnitFacts(name="frozen", legal=("fp32", "bf16"), format="bf16")
    held = unit("held", {"fp32": 0.0, "bf16": 0.0}, legal=("fp32",))
    costless = unit("costless", {"fp32": 0.0, "bf16": 0.0})
    times: dict[str, dict[str, float | None]] = {
        "frozen": {},
        "costless": {},
        "held": {"fp32": 2.0, "bf16": 1.0},
    }
    facts = ModelFacts(units=(unmeasured, held, costless), loss=1.0, costs=Costs(times, {name: {} for name in times}))
    plan = FisherPlanner().plan(facts)
    assert plan.formats == {"held": "fp32"}
    assert plan.note.startswith("1 of 3 layers planned")
    assert plan.note.endswith("by measured times")


def test_memory_that_is_not_in_the_table_is_estimated() -> None:
    """100 weights and 10 outputs: 40 bytes in fp32, 220 in bf16."""
    times: dict[str, dict[str, float | None]] = {"net": {"fp32": 2.0, "bf16": 1.0}}
    one = unit("net", {"fp32": 0.0, "bf16": 0.0})
    facts = ModelFacts(units=(one,), loss=1.0, costs=Costs(times, {"net": {}}))
    for memory, expected in ((219, "fp32"), (220, "bf16")):
        assert FisherPlanner(PlanConfig(memory_bytes=memory)).plan(facts).formats == {"net": expected}


def test_a_model_without_units() -> None:
    assert FisherPlanner().plan(ModelFacts()).formats == {}
    assert SnipPlanner().plan(ModelFacts()).formats == {}


@pytest.mark.parametrize("loss", [math.nan, 0.0, -2.0])
def test_any_loss(loss: float) -> None:
    facts = ModelFacts(units=(unit("net", {"fp32": 0.0, "bf16": 1e-6}),), loss=loss)
    assert FisherPlanner().plan(facts).formats["net"] == ("fp32" if loss == 0.0 else "bf16")


# costs where nothing was measured


def test_multiplications_by_relative_rates() -> None:
    native = unit("a", dict.fromkeys(("fp32", "bf16", "fp16", "int8"), 0.0), 1000.0, native=("fp32", "bf16", "int8"))
    unseen = UnitFacts(name="b", parameter_count=50)
    costs = MultiplicationCosts((native, unseen))
    assert [costs.unit_ms("a", each) for each in native.legal] == [3000.0, 1500.0, 4500.0, 750.0]
    assert costs.unit_ms("b", "fp32") == 150.0
    # copies of 100 weights, and 10 outputs in the dtype that comes out
    assert [costs.unit_bytes("a", each) for each in native.legal] == [40, 220, 220, 120]
    plan = FisherPlanner(PlanConfig(loss_budget=0.0)).plan(ModelFacts(units=(native,), loss=1.0))
    assert plan.formats == {"a": "int8"}
    assert "25% of the time in the widest formats by multiplications by relative rates (fp32 1, tf32 2," in plan.note


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_budget": -1.0}, "`loss_budget` must be a finite float >= 0"),
        ({"score": "hessian"}, "`score` must be 'fisher' or 'taylor'"),
        ({"time_share": 0.0}, r"`time_share` must be None or a float in \(0, 1\]"),
        ({"saving": 1.5}, r"`saving` must be a float in \[0, 1\]"),
        ({"memory_bytes": -1}, "`memory_bytes` must be an int >= 0"),
        ({"headroom_bits": math.inf}, "`headroom_bits` must be a finite float >= 0"),
        ({"warmup": -1}, "`warmup` must be an int >= 0"),
        ({"replan": -1}, "`replan` must be an int >= 0"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanConfig(**change)
