"""``autoprec train-policy`` in this process.

Time budget: 10 s.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from autoprec import cli
from autoprec.json_files import read_json
from autoprec.policies.policy_file import load_policy
from tests.kernels import needs_cpu_kernels
from tests.tiny_training import VALUES

pytest.importorskip("stable_baselines3")
from autoprec.policies import seeds as seeds_module

pytestmark = needs_cpu_kernels


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    values = {**VALUES, "decisions": 64, "net_arch": [16]}
    plain = json.loads(json.dumps(values))
    path.write_text(yaml.safe_dump({"default": plain, "quick": {**plain, "decisions": 32}}))
    return path


def call(*words: object) -> Result:
    return CliRunner().invoke(cli.build_app(), ["train-policy", *map(str, words)])


def test_trains_and_goes_on_and_forgets(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call("--config", config, "--quick", "--out", out)
    assert done.exit_code == 0, done.output
    assert "seed 0: score" in done.stdout
    assert "32 of 32" in done.stdout
    assert ", start " in done.stdout
    assert f'AutoPrecisionCallback(policy="{out}/seed-0")' in done.stdout.replace("\n", "")
    assert load_policy(out / "seed-0")[1].training["seed"] == 0
    again = call("--config", config, "--quick", "--out", out)
    assert again.exit_code == 0
    assert "of 32" not in again.stdout  # nothing was left to do
    other = call("--config", config, "--out", out)
    assert other.exit_code == 1
    assert "decisions: 32 -> 64" in other.output
    fresh = call("--config", config, "--out", out, "--fresh", "--set", "gamma=0.9", "--json", "--tensorboard")
    assert fresh.exit_code == 0, fresh.output
    selection = json.loads(fresh.stdout)
    assert selection == read_json(out / "selection.json")
    assert selection["selected"] == 0
    assert {"command", "date", "why"} <= selection.keys()
    assert list((out / "seed-0" / "tensorboard").glob("events*"))


def test_seeds_are_named_one_after_the_other(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def train(settings: Any, seeds: Any, out: Path, **options: Any) -> dict[int, str]:
        seen.update(seeds=seeds, jobs=options["jobs"], decisions=settings.decisions)
        return dict.fromkeys(seeds, "exit code -9\nlast words")

    monkeypatch.setattr(seeds_module, "train_seeds", train)
    done = call("--seeds", 0, 1, "2,3", "--jobs", 2, "--config", config, "--out", tmp_path / "out")
    assert seen == {"seeds": [0, 1, 2, 3], "jobs": 2, "decisions": 64}
    assert done.exit_code == 1
    assert "Seed 3 failed: exit code -9\nlast words" in done.output


def test_ctrl_c_says_how_to_go_on(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: Any, **__: Any) -> dict[int, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(seeds_module, "train_seeds", train)
    done = call("--config", config, "--out", tmp_path / "out")
    assert done.exit_code == 130
    assert "Run the same command again to go on" in done.output


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--seeds", "1", "1"], "different whole numbers"),
        (["--seeds", "one"], "different whole numbers"),
        (["--set", "gamma"], "name=value"),
        (["--set", "gama=0.9"], "Did you mean"),
        (["--set", "batch_size=1"], "batch_size"),
        (["--config", "none.yaml"], "Cannot read"),
        (["--section", "slow"], "no section"),
        (["--seeds", "0,00"], "Seeds are"),
        (["--seeds", "1" * 30], "Seeds are"),
        (["--set", "gamma=["], "no YAML"),
        (["--set", "path=3"], "There is"),
        (["--set", "section=x"], "There is"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else None,
)
def test_wrong_words_are_named(words: list[str], match: str) -> None:
    done = call(*words)
    assert done.exit_code == 2
    assert match.split()[0] in done.output


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.commands.train_policy.importlib.util.find_spec", lambda name: None)
    done = call("--wandb", "mine")
    assert done.exit_code == 1
    assert "gymnasium, stable_baselines3, wandb" in done.output
    assert "pip install '.[rl]' '.[wandb]'" in done.output


def test_a_file_in_the_way_is_named(config: Path, tmp_path: Path) -> None:
    (tmp_path / "seed-0").write_text("mine")
    for words in ([], ["--fresh"]):
        done = call("--config", config, "--out", tmp_path, *words)
        assert done.exit_code == 1
        assert isinstance(done.exception, SystemExit)
        assert "seed-0" in done.output
    assert (tmp_path / "seed-0").read_text() == "mine"
