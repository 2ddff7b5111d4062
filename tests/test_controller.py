"""Controllers that follow orders, and names of policies.

Time budget: 5 s.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoprec.action import Action
from autoprec.config import AutoPrecisionConfig, RuleConfig
from autoprec.controller import (
    Controller,
    FixedController,
    MapController,
    ScriptedController,
    resolve_policy,
)
from autoprec.encoding import GlobalReading, Observation, encode
from autoprec.formats import FORMATS
from autoprec.map_file import save_map
from autoprec.rule import RuleController

NOTHING = encode([], GlobalReading())


def test_fixed() -> None:
    controller = FixedController("bf16")
    controller.start(["net.0"], [("fp32", "bf16")])
    assert controller.name == "fixed:bf16"
    assert controller.initial_map() == {"*": "bf16"}
    assert (controller.step_action(0), controller.epoch_action(0)) == (None, None)
    with pytest.raises(ValueError, match=re.escape("Did you mean 'bf16'?")):
        FixedController("bf61")


def test_scripted() -> None:
    action, batch = Action(precision={"net.0": "bf16"}, loss_scale=2048.0, clip=0.5), Action(batch_size=16)
    controller = ScriptedController(steps={3: action}, epochs={1: batch})
    assert [controller.step_action(window) for window in range(5)] == [None, None, None, action, None]
    assert [controller.epoch_action(epoch) for epoch in range(3)] == [None, batch, None]
    assert controller.decide(NOTHING) is None
    assert controller.initial_map() is None
    assert controller.state_dict() == {}
    assert ScriptedController().step_action(0) is None


def test_scripted_subclass_may_look_at_the_observation() -> None:
    class Mine(ScriptedController):
        def decide(self, observation: Observation) -> Action:
            return Action(clip=float(len(observation)))

    controller = Mine(steps={0: Action(clip=1.0)})
    assert controller.decide(NOTHING) == Action(clip=3.0)
    assert controller.step_action(0) == Action(clip=1.0)


@pytest.mark.parametrize("field", ["steps", "epochs"])
@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        ({-1: Action()}, ValueError, "{-1: Action("),
        ({"3": Action()}, TypeError, "Keys must be of type `int`, not `str`."),
        ({3.0: Action()}, TypeError, "Keys must be of type `int`, not `float`."),
        ({True: Action()}, TypeError, "Keys must be of type `int`, not `bool`."),
        ({3: {"clip": 1.0}}, TypeError, "Values must be of type `Action`, not `dict`."),
        ({3: None}, TypeError, "Values must be of type `Action`, not `NoneType`."),
        ([Action()], TypeError, "with type `list`."),
    ],
)
def test_bad_script(field: str, script: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(f"Passed `ScriptedController({field}=")) as info:
        ScriptedController(**{field: script})
    assert words in str(info.value)


def test_map_controller(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    save_map(path, {"net.0": "bf16"}, loss_scale=2048.0, clip=0.5)
    controller = MapController(path)
    assert controller.initial_map() == {"net.0": "bf16"}
    assert controller.step_action(0) == Action(loss_scale=2048.0, clip=0.5)
    assert controller.step_action(1) is None
    assert controller.name == f"map:{path}"


def test_map_controller_from_a_mapping() -> None:
    controller = MapController({"*": "bf16"})
    assert controller.initial_map() == {"*": "bf16"}
    assert controller.step_action(0) is None
    with pytest.raises(ValueError, match=re.escape("Did you mean 'bf16'?")):
        MapController({"*": "bf61"})


def test_resolve_by_name() -> None:
    config = AutoPrecisionConfig(rule=RuleConfig(stable_cv=0.1))
    rule = resolve_policy("rule", config)
    assert isinstance(rule, RuleController)
    assert rule.config is config
    for name in FORMATS:
        assert resolve_policy(f"fixed:{name}").initial_map() == {"*": name}


def test_resolve_controller_and_path(tmp_path: Path) -> None:
    mine = ScriptedController()
    assert resolve_policy(mine) is mine
    save_map(tmp_path / "saved", {"*": "bf16"})
    for path in (tmp_path / "saved", str(tmp_path / "saved")):
        assert isinstance(resolve_policy(path), MapController)
    with pytest.raises(FileNotFoundError, match=re.escape("Passed the map 'missing.yaml'. There is no such file.")):
        resolve_policy("missing.yaml")


@pytest.mark.parametrize(
    ("policy", "suggestion"),
    [
        ("fixd:bf16", "fixed:bf16"),
        ("fixed:bf61", "fixed:bf16"),
        ("fixed", "fixed:"),
        ("rules", "rule"),
        ("quantum", None),
    ],
)
def test_unknown_policy_suggests_the_nearest(policy: str, suggestion: str | None) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"Passed `policy={policy!r}`. Known policies: ['fisher', 'fixed:bf16',")
    ) as info:
        resolve_policy(policy)
    assert (f"Did you mean '{suggestion}" in str(info.value)) == (suggestion is not None)


@pytest.mark.parametrize("policy", [None, 3, {"*": "bf16"}])
def test_policy_of_a_wrong_type(policy: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"with type `{type(policy).__qualname__}`")):
        resolve_policy(policy)


def test_protocol_needs_decide_only() -> None:
    class Still(Controller):
        def decide(self, observation: Observation) -> Any:
            return np.zeros(len(observation), dtype=int)

    controller = Still()
    controller.load_state_dict(controller.state_dict())
    assert controller.decide(NOTHING).tolist() == [0, 0, 0]
    with pytest.raises(TypeError, match="abstract"):
        Controller()  # type: ignore[abstract]
