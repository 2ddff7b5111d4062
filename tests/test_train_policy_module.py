"""Training of policies on a module of the user's own: real fits behind the same PPO.

Time budget: 25 s.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from autoprec import AutoPrecisionCallback, cli
from autoprec.json_files import read_json
from autoprec.policies.policy_file import load_policy
from autoprec.policies.train_settings import SettingsError, TrainSettings, load_settings
from autoprec.policies.training_state import TWIN_FILE
from autoprec.table import TableConfig
from tests.training_envs import nothing_left

pytest.importorskip("stable_baselines3")
from autoprec.envs.training_env import TrainingEnv
from autoprec.policies import seeds, training_tasks
from autoprec.policies.ppo import train_policy

MODULE: dict[str, Any] = {
    "target": "tests.module_target:make",
    "interval": 4,
    "formats": ("fp32", "bf16", "fp16"),
    "validation": 2,
}
SMALL: dict[str, Any] = {"decisions": 16, "segment": 1, "n_steps": 8, "statistics_steps": 3, "net_arch": (8,)}


def small(module: dict[str, Any] | None = None, **changes: Any) -> TrainSettings:
    return load_settings(None, "module", module={**MODULE, **(module or {})}, **{**SMALL, **changes})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of the environments that a training makes."""
    made: list[dict[str, Any]] = []

    def noted(target: str, **options: Any) -> TrainingEnv:
        made.append({"target": target, **options})
        return TrainingEnv(target, **options)

    monkeypatch.setattr(training_tasks, "TrainingEnv", noted)
    return made


def test_a_module_is_trained_on_and_the_training_goes_on(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    folder = tmp_path / "policy"
    with nothing_left():
        train_policy(small(), 0, folder)
    result = read_json(folder / "training.json")
    assert result["decisions"] == 16
    assert [one["decisions"] for one in result["validations"]] == [0, 8, 16]
    assert all(len(one["scores"]) == 2 for one in result["validations"])
    assert result["best"]["diverged"] == 0.0
    # what is learnt from is what the policy will meet: its own table, with the batch size left to the user
    assert {env["config"].table for env in made} == {replace(small().table, schedule=TableConfig().schedule, batch=0)}
    network, card = load_policy(folder)
    assert card.training["settings"]["module"]["target"] == MODULE["target"]  # type: ignore[index,call-overload]
    assert network.features == len(card.features)
    AutoPrecisionCallback(policy=str(folder))

    twin = read_json(folder / TWIN_FILE)
    (folder / "training.json").unlink()  # as if it had been killed at the very end
    made.clear()
    train_policy(small(), 0, folder)
    assert read_json(folder / TWIN_FILE) == twin
    assert made[-1]["twin"].time == twin["time"]
    assert read_json(folder / "training.json")["validations"] == result["validations"]


def test_trainings_side_by_side_begin_with_a_policy(tmp_path: Path) -> None:
    first = train_policy(small(decisions=8), 0, tmp_path / "first")
    start = {"start": str(first)}
    second = train_policy(small({"trainings": 2}, decisions=16, **start), 0, tmp_path / "second")
    result = read_json(second / "training.json")
    assert result["rollouts"] == 1  # 8 decisions of each of 2 trainings
    assert result["decisions"] == 16


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ({"target": "tests.module_target:lost"}, "lost"),
        ({"target": "tests.module_target:nothing"}, "nothing"),
        ({"target": "train.yaml"}, r"package\.module:function"),
    ],
    ids=["no_function", "no_training", "no_target"],
)
def test_what_cannot_be_trained_is_named(module: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"Cannot train on `{module['target']}`.*{message}"):
        train_policy(small(module), 0, tmp_path / "policy")


def test_seeds_side_by_side_would_slow_each_other_down(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"Passed jobs=2.*one seed at a time"):
        seeds.train_seeds(small(), [0, 1], tmp_path, jobs=2)


@pytest.mark.parametrize("other", [{"guard": False}, {"curriculum": [{"until": 1.0}]}], ids=["guard", "curriculum"])
def test_settings_of_proxies_alone_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"Passed `module` together with `curriculum` or `guard: false`"):
        small(**other)


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.build_app(), ["train-policy", *map(str, words)])


def test_the_command_trains_on_a_module(tmp_path: Path) -> None:
    inner = {key: value for key, value in MODULE.items() if key != "target"}
    words = [f"module.{key}={json.dumps(value)}" for key, value in inner.items()]
    words += [f"{key}={json.dumps(value)}" for key, value in {**SMALL, "decisions": 8}.items()]
    changes = [part for word in words for part in ("--set", word)]
    done = call("--module", MODULE["target"], "--out", tmp_path, "--json", *changes)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["selected"] == 0
    settings = read_json(tmp_path / "seed-0/settings.json")["settings"]
    assert settings["module"]["interval"] == 4
    assert settings["learning_rate"] == "lin_3.0e-4"  # of the section for modules


def test_a_dotted_setting_needs_a_module() -> None:
    done = call("--set", "module.interval=4")
    assert done.exit_code == 2
    assert "Only settings of a module have a dot" in " ".join(done.output.split()).replace("│ ", "").replace(" │", "")
