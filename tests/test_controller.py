"""Controllers that follow orders, map files, and names of policies.

Time budget: 5 s.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autoprec.action import Action
from autoprec.config import AutoPrecisionConfig, RuleConfig
from autoprec.controller import (
    Controller,
    FixedController,
    MapController,
    ScriptedController,
    load_map,
    resolve_policy,
    save_map,
)
from autoprec.encoding import GlobalReading, Observation, encode
from autoprec.formats import FORMATS
from autoprec.rule import RuleController

NOTHING = encode([], GlobalReading())
positive = st.floats(0.0, exclude_min=True)


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


@given(
    precision=st.dictionaries(st.text(), st.sampled_from(list(FORMATS)), max_size=4),
    loss_scale=st.none() | positive.filter(math.isfinite),
    clip=st.none() | positive,
)
def test_map_round_trip(
    precision: dict[str, str],
    loss_scale: float | None,
    clip: float | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("map") / "map.yaml"
    save_map(path, precision, loss_scale, clip)
    assert load_map(path) == Action(precision=precision, loss_scale=loss_scale, clip=clip)


def test_map_is_yaml_that_people_can_read(tmp_path: Path) -> None:
    path = tmp_path / "made" / "map.yaml"
    save_map(path, {"net.2": "bf16", "0": "fp32"}, loss_scale=2048.0, clip=math.inf)
    text = path.read_text(encoding="utf-8")
    assert text == "version: 1\nprecision:\n  net.2: bf16\n  '0': fp32\nloss_scale: 2048.0\nclip: .inf\n"


def test_map_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text("version: 1\nprecision: {'*': bf16}\nloss_scale: 1024\n", encoding="utf-8")
    assert load_map(path) == Action(precision={"*": "bf16"}, loss_scale=1024.0)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"version": 1}, "precision"),
        ({"precision": {}}, "version"),
        ({"version": 2, "precision": {}}, "version"),
        ({"version": 1, "precision": ["bf16"]}, "precision"),
        ({"version": 1, "precision": {"net.0": "bf61"}}, "precision"),
        ({"version": 1, "precision": {"net.0": 16}}, "precision.net.0"),
        ({"version": 1, "precision": {0: "bf16"}}, "precision.0.[key]"),
        ({"version": 1, "precision": {}, "loss_scale": 0}, "loss_scale"),
        ({"version": 1, "precision": {}, "loss_scale": math.inf}, "loss_scale"),
        ({"version": 1, "precision": {}, "loss_scale": True}, "loss_scale"),
        ({"version": 1, "precision": {}, "clip": -1.0}, "clip"),
        ({"version": 1, "precision": {}, "clip": math.nan}, "clip"),
        ({"version": 1, "precision": {}, "batch": 8}, "batch"),
        ("bf16", "document"),
        (None, "document"),
    ],
)
def test_bad_map_names_file_and_field(document: object, field: str, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"Passed the map {str(path)!r}. A map has the fields")) as info:
        MapController(path)
    assert f" Field {field!r}: " in str(info.value)


def test_map_that_is_not_yaml(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text("version: [1", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(f"Passed the map {str(path)!r}. The file is not YAML:")):
        load_map(path)


def test_bad_map_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    with pytest.raises(ValueError, match=r"Passed `save_map\(.*Field 'clip':"):
        save_map(path, {}, clip=0.0)
    assert not path.exists()


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
        ("shape", None),
    ],
)
def test_unknown_policy_suggests_the_nearest(policy: str, suggestion: str | None) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"Passed `policy={policy!r}`. Known policies: ['fixed:bf16',")
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
