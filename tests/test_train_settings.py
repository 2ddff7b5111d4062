"""Settings of trainings: what the shipped file says, what a user's may say, and what is refused before any work.

Time budget: 2 s.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from autoprec.policies.train_settings import SettingsError, Stage, TrainSettings, load_settings, schedule
from tests.tiny_training import TASKS, tiny


def test_the_shipped_file_says_what_the_defaults_are() -> None:
    assert load_settings() == TrainSettings()
    assert load_settings(section="ladder") == TrainSettings(mode="ladder")
    assert load_settings(section="quick").decisions < TrainSettings().decisions / 10


def test_settings_survive_json() -> None:
    settings = tiny(curriculum=({"until": 1.0},), table={"clip": 1.5}, reward={"memory": 0.5})
    again = TrainSettings.model_validate(settings.model_dump(mode="json"))
    assert again == settings
    assert again.table.clip == 1.5
    assert again.reward.memory == 0.5
    assert settings.differences(tiny()) != []


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "mine:\n  learning_rate: 1e-3\n  policy_kwargs: {net_arch: [8, 8]}\n"
        "  env_kwargs: {mode: ladder, table: {threshold: 0.2}}\n  train: {distribution: {regimes: [0, 0, 1]}}\n"
    )
    settings = load_settings(path, gamma=0.9)
    assert (settings.net_arch, settings.mode, settings.table.threshold, settings.gamma) == ((8, 8), "ladder", 0.2, 0.9)
    assert schedule(settings.learning_rate)(0.7) == 1e-3
    assert settings.train.distribution is not None
    assert settings.train.distribution.regimes == (0, 0, 1)


def test_the_file_in_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "training_policies.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (block,) = [text for text in blocks if "decisions:" in text]
    path = tmp_path / "late.yaml"
    path.write_text(block)
    settings = load_settings(path)
    assert settings.table.threshold == 0.2
    assert [stage.until for stage in settings.curriculum] == [0.3, 1.0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: {}\nb: {}\n", r"no section 'default' in .*\['a', 'b'\]"),
        ("gamma: 0.9\n", "Write a name"),
        ("[1, 2]", "Write a name"),
        ("a: {", "Cannot read"),
        ("a: {lerning_rate: 1}", "`lerning_rate`: there is no such setting. Did you mean `learning_rate`"),
        ("a: {policy_kwargs: [1]}", "must be a mapping"),
        ("a: {gamma: 1.5}", r"`gamma`: passed 1\.5.*less than or equal to 1"),
    ],
    ids=["sections", "flat", "list", "broken", "misspelt", "kwargs", "range"],
)
def test_files_that_say_nothing_usable_are_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=match):
        load_settings(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"Cannot read .*none\.yaml"):
        load_settings(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batch_size": 1}, "batch_size"),
        ({"n_steps": 8, "n_envs": 1, "batch_size": 64}, r"has 56 rows at most.*lower `batch_size`"),
        ({"n_steps": 0}, "n_steps"),
        ({"learning_rate": 0.0}, "Pass a number above 0"),
        ({"learning_rate": "cos_1e-3"}, "lin_"),
        ({"clip_range": "lin_-1"}, "Pass a number above 0"),
        ({"clip_range": float("inf")}, "Pass a number above 0"),
        ({"ent_coef": float("nan")}, "ent_coef"),
        ({"net_arch": ()}, "one width at least"),
        ({"net_arch": (0,)}, "one width at least"),
        ({"net_arch": (8,) * 9}, "8 at most"),
        ({"net_arch": (1024,) * 8}, "fewer or narrower layers"),
        ({"n_steps": 10**12}, r"`n_steps=1000000000000`.*Lower one of them"),
        ({"statistics_steps": 10**12}, r"`statistics_steps=1000000000000`.*Lower one of them"),
        ({"learning_rate": 1e300}, "below 1e[+]38"),
        ({"mode": "absolute"}, "mode"),
        ({"train": {"name": "trian"}}, "Banks are"),
        ({"train": {"size": 0}}, "size"),
        ({"table": {"clip": 2.0}}, "must be one of"),
        ({"reward": {"time": -1.0}}, "not negative"),
        ({"curriculum": ({"until": 0.5},)}, r"the last one at 1\.0"),
        ({"curriculum": ({"until": 1.0}, {"until": 0.5})}, "Each stage ends later"),
        ({"curriculum": ({"until": 1.0, "tables": ("right",)},)}, "Choose at least one"),
        ({"curriculum": ({"until": 1.0, "regimes": ()},)}, "Choose at least one"),
    ],
    ids=str,
)
def test_settings_that_no_training_can_have_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        tiny(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": {"mlp": 0.0}}, "their sum is above 0"),
        ({"architectures": {"mlp": -1.0}}, "not negative"),
        ({"architectures": {"mlp": 0.0, "recurrent": 1.0}, "units": (3, 5)}, "None that can have 5 units"),
        ({"regimes": (0, 0, 0)}, "their sum is above 0"),
        ({"tables": (-1, 1, 1)}, "not negative"),
        ({"ladders": (1.0,)}, "there are 5"),
        ({"ladders": (float("nan"), 1, 1, 1, 1)}, "finite"),
        ({"units": ()}, "Give one at least"),
        ({"widths": ()}, "Give one at least"),
        ({"label_noise": {"low": 0.5, "high": 0.1}}, "The lower end comes first"),
        ({"label_noise": {"low": float("nan"), "high": 1.0}}, "finite"),
        ({"loss_decades": {"low": 400, "high": 500}}, r"lies within -30\.0 to 30\.0"),
        ({"probe_cost": {"low": -2, "high": 1}}, "lies within 0"),
        ({"table_error": -1.0}, "table_error"),
        ({"table_error": float("nan")}, "table_error"),
        ({"costly_probes": float("nan")}, "costly_probes"),
        ({"budget": 10**30}, "budget"),
    ],
    ids=str,
)
def test_tasks_that_cannot_be_drawn_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        tiny(train={"distribution": {**TASKS, **changes}})


def test_rollouts_are_cut_into_equal_parts_without_a_single_row() -> None:
    settings = tiny(batch_size=7, n_envs=4)
    assert settings.minibatch(48) == 7
    for batch_size in (2, 3, 7, 64):
        for rows in range(batch_size, 300):
            size = tiny(batch_size=batch_size).minibatch(rows)
            assert size >= 2
            assert rows % size != 1
            assert size <= 1.5 * batch_size + 5


def test_schedules_follow_the_share_of_decisions() -> None:
    assert [schedule("lin_0.2")(share) for share in (0.0, 0.5, 1.0)] == [0.2, 0.1, 0.0]
    assert [schedule(0.2)(share) for share in (0.0, 1.0)] == [0.2, 0.2]
    assert [schedule("1e-3")(share) for share in (0.0, 1.0)] == [1e-3, 1e-3]


def test_stages_follow_each_other() -> None:
    stages = (Stage(until=0.25), Stage(until=1.0))
    settings = tiny(curriculum=stages)
    assert [settings.stage(share) for share in (0.0, 0.2, 0.25, 0.99)] == [stages[0], stages[0], stages[1], stages[1]]
    assert tiny().stage(0.5) is None
