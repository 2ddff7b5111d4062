"""Actions: types are checked at once, ranges are not.

Time budget: 2 s.
"""

from __future__ import annotations

import copy
import math
import pickle
import re
from typing import Any

import pytest

from autoprec.action import Action


def test_empty() -> None:
    assert Action().is_empty
    assert Action(precision={}).is_empty


@pytest.mark.parametrize(
    "fields",
    [{"precision": {"*": "bf16"}}, {"loss_scale": 0}, {"clip": math.inf}, {"batch_size": 1}, {"accumulate": 2}],
)
def test_not_empty(fields: dict[str, Any]) -> None:
    assert not Action(**fields).is_empty


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_scale": math.nan},
        {"loss_scale": -1.0},
        {"clip": 0.0},
        {"clip": -1},
        {"batch_size": 0},
        {"accumulate": -3},
    ],
)
def test_ranges_are_left_to_the_guard(fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    assert getattr(Action(**fields), name) is value


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"precision": "bf16"}, "'bf16' of type `str`. `precision` must be a mapping"),
        ({"precision": {0: "bf16"}}, "0 of type `int`. `precision` must be a mapping whose keys"),
        ({"precision": {"net": 16}}, "16 of type `int`. `precision` must be a mapping whose values"),
        ({"loss_scale": "2048"}, "'2048' of type `str`. `loss_scale` must be a float or None"),
        ({"loss_scale": True}, "True of type `bool`. `loss_scale` must be a float or None"),
        ({"clip": "off"}, "'off' of type `str`. `clip` must be a float or None"),
        ({"batch_size": 16.0}, "16.0 of type `float`. `batch_size` must be an int or None"),
        ({"accumulate": True}, "True of type `bool`. `accumulate` must be an int or None"),
    ],
)
def test_wrong_type(fields: dict[str, Any], words: str) -> None:
    (name,) = fields
    with pytest.raises(TypeError, match=re.escape(f"Passed `Action({name}=...)` with {words}")):
        Action(**fields)


def test_unknown_format_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=re.escape("Did you mean 'bf16'?")):
        Action(precision={"net.0": "bf61"})


def test_keeps_its_own_copy() -> None:
    mine = {"net.0": "bf16"}
    action = Action(precision=mine)
    mine["net.0"] = "fp8"
    assert action.precision == {"net.0": "bf16"}
    assert copy.deepcopy(action) == pickle.loads(pickle.dumps(action)) == action
