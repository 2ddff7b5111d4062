"""The learned policy's decisions on readings: the table's proposal, moved as a network says; and how it is named.

Time budget: 15 s (one process).
"""

from __future__ import annotations

import copy
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, TableConfig, TableSettings
from autoprec.controller import checked_state, resolve_policy
from autoprec.encoding import VERSION, encode, with_proposal
from autoprec.formats import rank
from autoprec.policies import pretrained_policy
from autoprec.policies.network import PolicyNetwork
from autoprec.policies.policy_file import WEIGHTS_FILE, load_policy
from autoprec.policies.pretrained_policy import PretrainedController
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table_policy import TableController
from tests import table_readings as readings
from tests.policy_networks import constant_network, restless_network, rows, saved

ROOT = Path(__file__).resolve().parents[1]
LADDER, ERRORS = readings.LADDER, readings.UNIT.errors
# the table proposes bf16
UNIT = replace(readings.UNIT, times={"fp32": 1.0, "bf16": 0.5, "fp16": 0.6})
RUN = replace(readings.RUN, progress=0.5)


def in_format(format_name: str, **fields: Any) -> UnitReading:
    """The same unit in another format, with times relative to that."""
    times = {other: time / UNIT.times[format_name] for other, time in UNIT.times.items()}
    return replace(UNIT, format=format_name, times=times, **fields)


def policy(
    folder: Path, move: int | PolicyNetwork = 0, config: AutoPrecisionConfig | None = None, **card: Any
) -> PretrainedController:
    network = constant_network(move) if isinstance(move, int) else move
    return PretrainedController(saved(folder, network, **card), config)


def decided(controller: TableController, *units: UnitReading, run: GlobalReading = RUN) -> Action:
    moved_units, moved_run = with_proposal(units, run, controller.propose(units, run))
    action: Any = controller.decide(encode(moved_units, moved_run))
    assert isinstance(action, Action)
    return action


# ---- formats ----


@pytest.mark.parametrize("current", LADDER)
@pytest.mark.parametrize(("move", "expected"), [(-1, "fp16"), (0, "bf16"), (1, "fp32")])
def test_a_unit_takes_the_proposal_moved_along_its_ladder(
    tmp_path: Path, current: str, move: int, expected: str
) -> None:
    action = decided(policy(tmp_path, move), in_format(current))
    assert action.precision == (None if expected == current else {"a": expected})


@pytest.mark.parametrize(("move", "expected"), [(-1, "bf16"), (0, "bf16"), (1, "fp32")])
def test_at_the_end_of_its_ladder_the_proposal_stays(tmp_path: Path, move: int, expected: str) -> None:
    unit = replace(UNIT, legal=("fp32", "bf16"))
    assert decided(policy(tmp_path, move), unit).precision == ({"a": expected} if expected != "fp32" else None)
    widest = replace(UNIT, errors={**ERRORS, "bf16": 1.0, "fp16": 1.0})
    lowered = {"a": "bf16"} if move == -1 else None
    assert decided(policy(tmp_path, move), widest).precision == lowered


@pytest.mark.parametrize("mode", ["offset", "ladder"])
def test_a_format_that_is_not_known_to_pay_is_no_choice(tmp_path: Path, mode: str) -> None:
    unit = replace(in_format("bf16"), times={"fp32": 2.0, "bf16": 1.0})
    assert decided(policy(tmp_path, -1, mode=mode), unit).precision is None
    assert decided(policy(tmp_path, -1, mode=mode), replace(unit, times={**unit.times, "fp16": 1.1})).precision
    unknown = in_format("bf16", errors={})
    assert decided(policy(tmp_path, 1, mode=mode), replace(unknown, times={})).precision == {"a": "fp32"}


@pytest.mark.parametrize("move", [-1, 0, 1])
def test_what_the_guard_holds_stays(tmp_path: Path, move: int) -> None:
    held = in_format("bf16", held=True)
    for unit in (replace(held, legal=("bf16",)), held):
        assert decided(policy(tmp_path, move), unit).precision is None


def test_every_unit_by_its_own_row(tmp_path: Path) -> None:
    """Any ladder, state and move, against the definition in words."""
    controller = policy(tmp_path, restless_network(seed=1))
    generator = np.random.Generator(np.random.PCG64(0))
    units = []
    for index in range(60):
        legal = tuple(name for name in ("fp32", "tf32", "bf16", "fp16", "int8") if generator.random() < 0.7) or (
            "bf16",
        )
        current = str(generator.choice(legal))
        errors = {name: float(generator.choice([0.01, 0.5])) for name in legal}
        times = {name: float(generator.uniform(0.4, 1.2)) for name in legal}
        cv = tuple(generator.uniform(0.1, 3.0, 9).tolist())
        units.append(
            replace(
                UNIT,
                name=str(index),
                legal=legal,
                format=current,
                errors=errors,
                times=times,
                grad_norm_history=cv,
                depth=index / 60,
            )
        )
    proposal = controller.propose(units, RUN)
    observation = encode(*with_proposal(units, RUN, proposal))
    moves = controller.network.moves(observation)
    action = controller.decide(observation)
    expected = {}
    for unit, move in zip(units, moves.tolist(), strict=False):
        ladder = sorted(unit.legal, key=rank)
        place = ladder.index(proposal.formats[unit.name]) - move
        wanted = ladder[min(max(place, 0), len(ladder) - 1)]
        if wanted != unit.format:
            expected[unit.name] = wanted
    assert isinstance(action, Action)
    assert action.precision == expected
    assert set(moves.tolist()) == {-1, 0, 1}
    assert set(controller.reasons()) - {"clip", "loss_scale"} == set(expected)


def test_keeping_everything_is_the_table(tmp_path: Path) -> None:
    mine = policy(tmp_path, PolicyNetwork(hidden=(4,)))
    units = [in_format(name, errors={**ERRORS, "bf16": error}) for name in LADDER for error in (0.01, 0.5)]
    units = [replace(unit, name=str(index)) for index, unit in enumerate(units)]
    assert decided(mine, *units) == decided(TableController(), *units)


def test_the_table_does_not_hold_what_the_policy_raised(tmp_path: Path) -> None:
    raising, plain = policy(tmp_path, 1), TableController()
    assert decided(raising, in_format("bf16")).precision == {"a": "fp32"}
    assert decided(plain, in_format("bf16")).precision is None
    assert raising.state_dict()["raises"] == plain.state_dict()["raises"] == {}
    assert raising.propose([replace(UNIT, steps_since_change=1)], RUN).formats == {"a": "bf16"}


# ---- the other knobs ----


@pytest.mark.parametrize("move", [-1, 0, 1])
def test_loss_scale_and_clip(tmp_path: Path, move: int) -> None:
    fp16 = replace(UNIT, legal=("fp32", "fp16"), format="fp16", times={"fp32": 2.0, "fp16": 1.0})
    run = replace(RUN, loss_scale=2.0**16)
    proposed = decided(TableController(), fp16, run=run)
    action = decided(policy(tmp_path, move), fp16, run=run)
    assert proposed.loss_scale == 2.0**12
    assert proposed.clip == 2.0
    assert action.loss_scale == 2.0 ** (12 + move)
    assert action.clip == {-1: 1.0, 0: 2.0, 1: None}[move]  # 3.0 is there already
    at_the_end = replace(run, loss_scale_limits=(2.0**12, 2.0**12))
    assert decided(policy(tmp_path, move), fp16, run=at_the_end).loss_scale == 2.0**12
    chosen = replace(run, chosen=frozenset({"loss_scale", "clip"}))
    assert decided(policy(tmp_path, move), fp16, run=chosen) == Action(precision={"a": "fp32"} if move == 1 else None)
    still = replace(run, movable=frozenset())
    assert decided(policy(tmp_path, move), fp16, run=still).clip is None


def test_batch_size_moves_only_where_the_table_moves_it(tmp_path: Path) -> None:
    for move in (-1, 0, 1):
        assert decided(policy(tmp_path, move), UNIT).batch_size is None
        config = AutoPrecisionConfig(table=TableConfig(schedule=(0.25,)))
        expected = {-1: None, 0: 64, 1: 128}[move]  # -1 from 64 is what there is
        assert decided(policy(tmp_path, move, config), UNIT).batch_size == expected


def test_no_units(tmp_path: Path) -> None:
    assert decided(policy(tmp_path, -1)) == Action(clip=1.0)


# ---- settings and reasons ----


def test_settings_of_the_table(tmp_path: Path) -> None:
    trained = TableSettings(threshold=0.3, clip=math.inf, schedule=(0.1, 0.2), batch=1)
    controller = policy(tmp_path, table=trained)
    assert load_policy(tmp_path)[1].table_settings() == trained
    assert controller.settings == replace(trained, schedule=None, batch=0)
    moving = policy(tmp_path, 0, AutoPrecisionConfig(table=TableConfig(schedule=(0.5,))), table=trained)
    assert moving.settings == TableConfig(schedule=(0.5,))
    mine = AutoPrecisionConfig(table=TableSettings(threshold=0.2), formats=("fp32", "bf16"))
    controller = policy(tmp_path, 0, mine, table=trained)
    assert controller.settings == mine.table
    assert controller.config.formats == mine.formats


@pytest.mark.parametrize(
    "table", [{"threshold": -1.0}, {"mood": 1}, {"clip": 2.0}, {"schedule": [2.0]}, {"batch": "x"}]
)
def test_settings_that_are_none_are_refused(tmp_path: Path, table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(table))):
        saved(tmp_path, table=table)


def test_reasons_name_both(tmp_path: Path) -> None:
    controller = policy(tmp_path, -1)
    decided(
        controller, UNIT, in_format("fp16", name="b"), in_format("bf16", name="c"), run=replace(RUN, loss_scale=4.0)
    )
    reasons = dict(controller.reasons())
    assert reasons == {
        "a": "table: bf16, error 0.01 (limit 0.1), 0.5 x its time in fp32; policy: fp16",
        "c": "table: bf16; policy: fp16",
        "clip": "table: 1 x the running median; policy: lower",
        "loss_scale": "table: as it is; policy: lower",
    }
    keeping = policy(tmp_path, 0)
    decided(keeping, UNIT)
    assert keeping.reasons()["a"] == "table: bf16, error 0.01 (limit 0.1), 0.5 x its time in fp32"


def test_ladder_moves_from_where_a_knob_is(tmp_path: Path) -> None:
    controller = policy(tmp_path, -1, mode="ladder")
    units, run = (UNIT, in_format("fp16", name="b")), replace(RUN, loss_scale=4.0)
    assert decided(controller, *units, run=run) == Action(precision={"a": "bf16"}, loss_scale=2.0, clip=2.0)
    assert controller.reasons()["a"] == "policy: lower"
    assert decided(controller, *units, run=replace(run, chosen=frozenset({"clip"}))).clip is None
    config = AutoPrecisionConfig(table=TableConfig(schedule=(0.25,)))
    assert decided(policy(tmp_path, -1, config, mode="ladder"), *units, run=run).batch_size == 16


# ---- faults and state ----


def broken(controller: PretrainedController) -> None:
    with torch.no_grad():
        controller.network.head.bias.fill_(math.nan)


def resized(controller: PretrainedController) -> None:
    controller.network.body[0] = torch.nn.Linear(3, 4)


def halved(controller: PretrainedController) -> None:
    controller.network.bfloat16()


@pytest.mark.parametrize("mode", ["offset", "ladder"])
@pytest.mark.parametrize("break_it", [broken, resized, halved])
def test_a_network_that_fails_leaves_it_to_the_table(
    tmp_path: Path, break_it: Callable[[PretrainedController], None], mode: str
) -> None:
    controller = policy(tmp_path, 1, mode=mode)
    break_it(controller)
    with pytest.warns(UserWarning, match="its table decides alone") as caught:
        assert decided(controller, UNIT).precision == {"a": "bf16"}
    assert decided(controller, UNIT).precision == {"a": "bf16"}
    assert len(caught) == 1
    assert "the network failed, the table decided alone" in controller.notes()[-1]
    controller.start(["a"], [LADDER])
    assert len(controller.notes()) == 1


def test_state(tmp_path: Path) -> None:
    first, second = policy(tmp_path / "a", -1), policy(tmp_path / "a", -1)
    decided(first, UNIT)
    state = checked_state(first.state_dict())
    second.load_state_dict(state)
    assert second.state_dict() == state
    other = policy(tmp_path / "b", 1)
    with pytest.warns(UserWarning, match="written under another network"):
        other.load_state_dict(state)
    assert other.state_dict()["looks"] == state["looks"]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_e07_a_copied_callback_decides_alike(tmp_path: Path, again: Callable[[Any], Any]) -> None:
    callback = AutoPrecisionCallback(saved(tmp_path), verbose=False)
    twin = again(callback)
    assert isinstance(callback.controller, PretrainedController)
    assert twin.controller is not callback.controller
    expected = callback.controller.network.moves(rows(50))
    assert (twin.controller.network.moves(rows(50)) == expected).all()
    assert decided(twin.controller, UNIT) == decided(callback.controller, UNIT)


# ---- how it is named ----


def without_shipped(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(pretrained_policy, "SHIPPED", folder)


def test_without_a_shipped_policy_the_message_names_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_shipped(monkeypatch, tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="comes without a trained policy") as caught:
        AutoPrecisionCallback("pretrained")
    assert "`policy='table'` or `policy='rule'`" in str(caught.value)


def test_the_shipped_policy_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_shipped(monkeypatch, saved(tmp_path))
    config = AutoPrecisionConfig(formats=("fp32",))
    controller = resolve_policy("pretrained", config)
    assert isinstance(controller, PretrainedController)
    assert controller.name == "pretrained"
    assert controller.config.formats == ("fp32",)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder_by_path(tmp_path: Path, kind: Callable[[Path], str | Path]) -> None:
    controller = resolve_policy(kind(saved(tmp_path / "mine", name="seed 3")))
    assert isinstance(controller, PretrainedController)
    assert controller.name == "policy:seed 3"


def test_folders_that_cannot_be_used_raise_at_construction(tmp_path: Path) -> None:
    for missing in (tmp_path / "none", str(tmp_path / "none"), Path("none")):
        with pytest.raises(FileNotFoundError, match=re.escape(f"Passed the policy {str(missing)!r}. There is no such")):
            AutoPrecisionCallback(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"It has no file `policy.json`"):
        AutoPrecisionCallback(tmp_path / "empty")
    (saved(tmp_path / "half") / WEIGHTS_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=f"It has no file `{WEIGHTS_FILE}`"):
        AutoPrecisionCallback(tmp_path / "half")
    card = saved(tmp_path / "old") / "policy.json"
    card.write_text(card.read_text().replace(f'"encoding_version": {VERSION}', '"encoding_version": 1'))
    with pytest.raises(ValueError, match=f"observations of version 1, this autoprec understands version {VERSION}"):
        AutoPrecisionCallback(tmp_path / "old")
    with pytest.raises(ValueError, match="Known policies: .*'pretrained'.*the folder of a policy"):
        AutoPrecisionCallback("pretraned")


IMPORTS = """
import sys
from autoprec import AutoPrecisionCallback
AutoPrecisionCallback()
print(sorted(name for name in sys.modules if name.startswith("autoprec.policies") or name == "huggingface_hub"))
before = set(sys.modules)
AutoPrecisionCallback(sys.argv[1])
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"stable_baselines3", "gymnasium", "huggingface_hub", "scipy", "optuna", "matplotlib"}))
"""


def test_the_default_loads_no_policy_and_a_folder_nothing_heavy(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IMPORTS, str(saved(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    default, folder = done.stdout.splitlines()[-2:]
    assert "autoprec.policies" not in default
    assert folder == "[]"
