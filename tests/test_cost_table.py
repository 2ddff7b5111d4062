"""Costs of units and of maps, which formats pay, and the fitted model of a step.

Time budget: 2 s.
"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.cost import CostTable, StepModel, UnitCost

TABLE = CostTable(
    {
        "first": {"fp32": UnitCost(4.0, 100), "bf16": UnitCost(2.0, 50, 30), "int8": UnitCost(1.0, 50, 40)},
        "head": {"bf16": UnitCost(1.1, 5, 3), "fp32": UnitCost(1.0, 10, implementation="onednn")},
        "nothing": {},
    }
)


def test_what_is_known_of_units() -> None:
    assert TABLE.units == ("first", "head")
    assert TABLE.formats("head") == ("fp32", "bf16")
    assert (TABLE.unit_ms("first", "bf16"), TABLE.unit_bytes("first", "bf16")) == (2.0, 80)
    assert TABLE.unit_ms("first", "fp16") is None
    assert TABLE.unit_bytes("gone", "fp32") is None
    assert TABLE.best_implementation("head", "fp32") == "onednn"
    assert TABLE.best_implementation("gone", "fp32") == "default"
    assert TABLE.implementations() == {"head": {"fp32": "onednn"}}
    assert TABLE
    assert not CostTable()


def test_a_map_costs_what_its_units_do() -> None:
    formats = {"first": "int8", "head": "fp32", "other": "bf16"}
    assert TABLE.map_ms(formats) == 2.0
    assert TABLE.map_bytes(formats) == 100
    assert TABLE.covers(formats)
    assert not TABLE.covers({"first": "fp16"})


def test_it_survives_json() -> None:
    assert CostTable.from_dict(json.loads(json.dumps(TABLE.to_dict()))) == TABLE


def test_a_format_pays_if_it_is_faster_than_the_next_wider_one() -> None:
    offered = ("fp32", "bf16", "int8")
    assert TABLE.why_too_slow("first", "bf16", offered) is None
    assert TABLE.why_too_slow("first", "int8", offered) is None
    reason = TABLE.why_too_slow("head", "bf16", offered)
    assert reason == "bf16 does not pay here: 1.1 ms a step in forward and backward, fp32 1 ms"
    assert TABLE.why_too_slow("head", "int8", offered) is None, "nothing is known of it"
    assert TABLE.why_too_slow("first", "fp32", offered) is None, "nothing is wider"


def test_a_format_that_is_not_offered_is_nothing_to_compare_with() -> None:
    table = CostTable({"unit": {"fp32": UnitCost(2.0), "bf16": UnitCost(5.0), "int8": UnitCost(3.0)}})
    assert table.why_too_slow("unit", "int8", ("fp32", "bf16")) is None
    assert table.why_too_slow("unit", "int8", ("fp32",)) is not None


@pytest.mark.parametrize(("others", "pays"), [(0.5, True), (1.0, False), (2.0, False)])
def test_where_two_are_alike_all_units_together_decide(others: float, pays: bool) -> None:
    table = CostTable(
        {
            "unit": {"fp32": UnitCost(1.0), "bf16": UnitCost(1.01)},
            "large": {"fp32": UnitCost(10.0), "bf16": UnitCost(10.0 * others)},
        }
    )
    assert (table.why_too_slow("unit", "bf16", ("fp32",)) is None) is pays


# ---- the model of a step ----


def test_the_first_step_time_fits_the_rest() -> None:
    model = StepModel()
    assert not model.is_fitted
    assert math.isnan(model.predict_ms(1.0))
    assert model.observe(6.0, 10.0) is None
    assert (model.factor, model.rest_ms) == (1.0, 4.0)
    assert model.predict_ms(3.0) == 7.0


def test_layers_that_take_longer_alone_than_in_a_step_leave_no_negative_rest() -> None:
    model = StepModel()
    model.observe(20.0, 10.0)
    assert model.predict_ms(20.0) == pytest.approx(10.0)
    assert (model.factor, model.rest_ms) == (0.5, 0.0)


def test_a_prediction_within_a_fifth_is_no_correction_but_every_map_counts() -> None:
    model = StepModel()
    model.observe(6.0, 10.0)
    assert model.observe(3.0, 8.0) == pytest.approx(1 / 8)
    assert model.corrections == 0
    assert [model.predict_ms(6.0), model.predict_ms(3.0)] == pytest.approx([10.0, 8.0])


def test_of_each_map_the_latest_time_counts() -> None:
    model = StepModel()
    for step_ms in (10.0, 10.5, 11.0):
        model.observe(6.0, step_ms)
    assert (model.factor, model.rest_ms, model.corrections) == (1.0, 5.0, 0)


def test_a_prediction_off_by_more_is_corrected_by_a_factor() -> None:
    model = StepModel()
    model.observe(6.0, 10.0)
    error = (48.4 - 34.0) / 48.4
    assert model.observe(30.0, 48.4) == pytest.approx(error)
    assert model.corrections == 1
    assert model.largest_error == pytest.approx(error)
    assert model.factor == pytest.approx(1.6)
    assert model.predict_ms(6.0) == pytest.approx(10.0), "and what fitted before still does"
    assert model.predict_ms(30.0) == pytest.approx(48.4)


def test_one_map_alone_says_nothing_of_the_factor() -> None:
    model = StepModel()
    model.observe(6.0, 10.0)
    model.observe(6.0, 20.0)
    assert (model.factor, model.rest_ms, model.corrections) == (1.0, 14.0, 1)


positive = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=20))
def test_predictions_stay_usable_whatever_is_measured(seen: list[tuple[float, float]]) -> None:
    model = StepModel()
    for units_ms, step_ms in seen:
        model.observe(units_ms, step_ms)
    assert model.factor > 0.0
    assert model.rest_ms >= 0.0
    copy = StepModel()
    copy.load_state_dict(json.loads(json.dumps(model.state_dict())))
    assert vars(copy) == vars(model)
