"""The settings of a sweep: what they may be, how mistakes are said, and what a trial makes of them.

Time budget: 10 s.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, ClipConfig, RuleConfig
from autoprec.compare.targets import Target
from autoprec.sweep import SweepConfig, SweepError, load_config
from autoprec.sweep.config import Constraint, Objective
from autoprec.sweep.options import OptionError, as_init_args, callback_arguments, default_of
from autoprec.sweep.plan import make_plan, start_params, trial_arm, trial_target, word_of
from autoprec.sweep.reading import checked_config
from autoprec.sweep.space import Dimension, load_yaml
from tests.compared import write_training

CLIP = "config.clip.multiplier"


@pytest.fixture(autouse=True)
def _training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")  # gymnasium sets it when reward weights are read
    write_training(tmp_path)


def read(tmp_path: Path, text: str, **changes: Any) -> SweepConfig:
    path = tmp_path / "sweep.yaml"
    path.write_text(f"target: {tmp_path / 'training.py'}:build\n{text}")
    return load_config(path, **changes)


def test_a_target_is_all_that_is_needed(tmp_path: Path) -> None:
    config = read(tmp_path, "")
    assert config.study_name == "build"
    assert config.space() == {}
    assert config.objectives == (Objective(name="val_loss"),)
    assert config.baselines[0] == "32-true"


def test_everything_in_yaml(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
arguments:
  width: 16
  lr: {low: 1e-4, high: 1e-2, log: true, default: 1e-3}
callback:
  policy: {choices: [rule, "fixed:bf16", "map:mixed"]}
  config.clip.multiplier: {low: 1.0, high: 4.0}
  config.rule.stages: {low: 1, high: 4}
maps: {mixed: {"*": bf16}}
objectives: [val_accuracy, {name: step_time_ratio}]
constraints: [{name: peak_bytes, max: 2e9}]
sampler: random
minutes: null
""",
    )
    space = config.space()
    assert list(space) == [
        "arguments.lr",
        "callback.policy",
        "callback.config.clip.multiplier",
        "callback.config.rule.stages",
    ]
    assert space["arguments.lr"] == Dimension(low=1e-4, high=1e-2, log=True, default=1e-3)
    assert space["callback.config.rule.stages"].is_whole
    assert [one.aim for one in config.objectives] == ["maximize", "minimize"]
    assert config.needs_reference
    assert config.minutes is None


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("trails: 3", "trails", "Did you mean `trials`?"),
        ("trials: 0", "trials", "passed 0"),
        ("callback: {intervall: 5}", "callback.intervall", "Did you mean 'interval'?"),
        ("callback: {config.clip.multiplyer: 2.0}", "callback.config.clip.multiplyer", "`config.clip` has floor,"),
        ("callback: {config.clip: 2.0}", "callback.config.clip", "is a group"),
        ("callback: {config.clip.floor.x: 2.0}", "callback.config.clip.floor.x", "is a value"),
        ("callback: {config.clip.multiplier: {low: -1.0, high: 2.0}}", f"callback.{CLIP}", "multiplier=-1.0"),
        ("callback: {policy: {choices: [rule, rul]}}", "callback.policy", "Known policies"),
        ("callback: {policy: 'map:none'}", "callback.policy", "there is no map 'none'"),
        ("callback: {verbose: true}", "callback.verbose", "no such option to set"),
        ("callback: {interval: {low: 2}}", "callback.interval", "a range needs `low` and `high`"),
        ("arguments: {lr: {low: 2, high: 1}}", "arguments.lr", "low < high"),
        ("arguments: {lr: {low: 0, high: 1, log: true}}", "arguments.lr", "needs low > 0"),
        ("arguments: {lr: {choices: []}}", "arguments.lr", "one at least"),
        ("arguments: {lr: {choices: [1, 2], low: 1}}", "arguments.lr", "stand alone"),
        ("arguments: {lr: {low: 1, high: 5, step: 0.5}}", "arguments.lr", "whole step"),
        ("arguments: {lr: {low: 1.0, high: 5.0, default: 9.0}}", "arguments.lr", "not among its values"),
        ("arguments: {lr: {low: 1, high: 2, lgo: true}}", "arguments.lr.lgo", "there is no such key"),
        ("map: {'*': {choices: [fp32, bf17]}}", "map.*", "['bf17']"),
        ("maps: {a: {'*': bf17}}", "maps", "the format 'bf17'"),
        ("reward: {speed: 1.0}", "", "Weights are"),
        ("reward: {time: {low: -1.0, high: 1.0}}", "reward.time", "not negative"),
        ("map: {'*': bf16}\ncallback: {policy: rule}", "", "Keep one of them"),
        ("baselines: [bf16]", "baselines", "Static precisions are"),
        ("reference: fp8", "reference", "Static precisions are"),
        ("arm: {choices: [autoprec, bf16]}", "arm", "passed ['bf16']"),
        ("objectives: []", "", "one at least"),
        ("objectives: [val_loss, val_loss]", "", "none twice"),
        ("objectives: [val_loss, step_ms]\npruner: median", "", "ended early by one objective"),
        ("objectives: [val_loss]\npick: step_ms", "", "must be one of the objectives"),
        ("constraints: [{name: val_loss}]", "constraints.0", "needs `min` or `max`"),
        ("sampler: gp", "sampler.name", "passed 'gp'"),
        ("sampler: grid\narguments: {lr: {low: 1.0, high: 2.0}}", "arguments.lr", "needs `choices` or a `step`"),
        ("precision: bf16", "precision", "passed 'bf16'"),
    ],
)
def test_mistakes_are_said_with_their_key(tmp_path: Path, text: str, key: str, said: str) -> None:
    with pytest.raises(SweepError) as error:
        read(tmp_path, text)
    message = str(error.value)
    assert "sweep.yaml" in message
    assert f"`{key}`" in message or not key
    assert said in message


@pytest.mark.parametrize("text", ["- a list", "target: [", "", "target: none.py:build"])
def test_files_that_are_no_sweep(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    with pytest.raises(SweepError, match=r"other\.yaml"):
        load_config(path)
    with pytest.raises(SweepError, match="Cannot read"):
        load_config(tmp_path / "missing.yaml")


def test_a_target_is_found_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweep.yaml").write_text("target: training.py:build")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Path(load_config(tmp_path / "sweep.yaml").load_target().file) == tmp_path / "training.py"


def test_what_is_written_down_reads_back_the_same(tmp_path: Path) -> None:
    text = "arguments: {lr: {low: 1e-4, high: 1e-2}, n: {low: 1, high: 3}}\nminutes: null\nobjectives: val_loss"
    config = read(tmp_path, text)
    document = yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
    assert checked_config(document) == config
    assert checked_config(document).identity() == config.identity()


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("-2E+4", -2e4), ("1.5e3", 1.5e3), ("12", 12), ("e3", "e3")]
)
def test_numbers_without_a_point_are_numbers(text: str, value: Any) -> None:
    read_back = load_yaml(f"a: {text}")["a"]
    assert read_back == value
    assert type(read_back) is type(value)


def test_ranges() -> None:
    assert Dimension(low=1, high=9).start() == 5
    assert Dimension(low=1e-4, high=1e-2, log=True).start() == pytest.approx(1e-3)
    assert Dimension(low=0.0, high=1.0, step=0.4).start() == pytest.approx(0.4)
    assert Dimension(choices=("a", "b")).start() == "a"
    assert Dimension(choices=("a", "b")).start("b") == "b"
    assert Dimension(low=1.0, high=4.0).start(1.5) == 1.5
    assert Dimension(low=1.0, high=4.0).start(9.0) == 2.5
    assert Dimension(low=1, high=7, step=3).grid() == (1, 4, 7)
    assert Dimension(low=0.1, high=0.9, step=0.2).grid() == pytest.approx((0.1, 0.3, 0.5, 0.7, 0.9))
    assert not Dimension(choices=(1, 2)).holds(True)
    assert not Dimension(low=1, high=4).holds(2.0)


def test_constraints_know_both_bounds() -> None:
    between = Constraint(name="val_loss", min=1.0, max=2.0)
    assert between.excess(1.5) == -0.5
    assert between.excess(2.5) == 0.5
    assert between.excess(0.25) == 0.75


def test_options_become_arguments_of_the_callback() -> None:
    options = {
        "interval": 7,
        "knobs": ["precision"],
        CLIP: 2.0,
        "config.rule.stages": 3,
        "config.formats": ["fp32", "bf16"],
    }
    callback = AutoPrecisionCallback(**callback_arguments(options))
    assert callback.interval == 7
    assert callback.plugin.settings.knobs == ("precision",)
    assert callback.config == AutoPrecisionConfig(
        formats=("fp32", "bf16"), clip=ClipConfig(multiplier=2.0), rule=RuleConfig(stages=3)
    )
    assert callback_arguments({"interval": 7}) == {"interval": 7}
    assert default_of(CLIP) == 1.5
    with pytest.raises(OptionError):
        callback_arguments({"config.clip.nothing": 1})


def test_a_recipe_is_where_the_config_begins() -> None:
    callback = AutoPrecisionCallback(**callback_arguments({"recipe": "staged", "config.rule.stages": 5}))
    assert callback.config.rule.stages == 5
    assert callback.config.rule.warmup_steps == 500
    written = as_init_args({"recipe": "staged", "config.rule.stages": 5, "interval": 3})
    assert written == {
        "interval": 3,
        "config": {
            "low_precision_lr_factor": 0.8,
            "rule": {"warmup_steps": 500, "settled_cv": 0.25, "stages": 5},
        },
    }


@pytest.mark.parametrize("value", [1e-5, 3, True, None, "text", "1e-5", "true", [1, 2.5], {"a": [None]}, 1e20])
def test_words_read_back_as_the_same_value(value: Any) -> None:
    assert yaml.safe_load(word_of(value)) == value
    assert type(yaml.safe_load(word_of(value))) is type(value)


@pytest.mark.parametrize(
    ("kind", "words"), [("function", ("lr=0.5",)), ("config", ("--lr=0.5",)), ("script", ("--lr=0.5",))]
)
def test_arguments_are_given_as_each_kind_of_target_takes_them(kind: Any, words: tuple[str, ...]) -> None:
    assert trial_target(Target(kind, "text", "file"), {"lr": 0.5}).arguments == words


def test_baselines_take_the_users_defaults_and_nothing_of_the_callback(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
arguments: {lr: {low: 1e-4, high: 1e-2, log: true}, depth: {choices: [2, 3], default: 3}, width: 8}
callback: {interval: {low: 5, high: 100}, config.clip.multiplier: {low: 2.0, high: 4.0}}
""",
    )
    static = start_params(config, "bf16-mixed")
    assert static == {"arguments.lr": pytest.approx(1e-3), "arguments.depth": 3}
    steered = start_params(config, "autoprec")
    assert steered["callback.interval"] == 50  # the callback's own
    assert steered[f"callback.{CLIP}"] == 3.0  # its own, 1.5, is outside
    plan = make_plan(config, "bf16-mixed", static)
    assert plan.is_static
    assert plan.options == {}
    assert plan.arguments == {"lr": pytest.approx(1e-3), "depth": 3, "width": 8}
    assert trial_arm(config, plan, tmp_path).precision == "bf16-mixed"


@pytest.mark.parametrize(
    "text", ["map: {'*': {choices: [fp32, bf16]}}", "callback: {policy: 'map:a'}\nmaps: {a: {'*': bf16}}"]
)
def test_a_map_is_what_the_callback_trains_with(tmp_path: Path, text: str) -> None:
    config = read(tmp_path, text)
    plan = make_plan(config, "autoprec", {"map.*": "bf16"})
    assert plan.map == {"*": "bf16"}
    arm = trial_arm(config, plan, tmp_path)
    assert arm.options is not None
    assert AutoPrecisionCallback(**arm.options).controller.initial_map() == {"*": "bf16"}


def test_identity_leaves_out_what_may_change(tmp_path: Path) -> None:
    one = read(tmp_path, "trials: 5\nworkers: 2\nminutes: 3")
    other = read(tmp_path, "trials: 50\nout: elsewhere\nseed: 4")
    assert one.identity() == other.identity()
    assert one.identity() != read(tmp_path, "seeds: 2").identity()


CHECKOUT = Path(__file__).parents[1]


def test_the_example_is_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT)
    config = load_config("examples/sweep.yaml")
    assert set(config.space()) == {"arguments.learning_rate", "callback.policy", "callback.config.clip.multiplier"}


def test_the_example_of_the_docs_is_a_sweep() -> None:
    page = (CHECKOUT / "docs" / "sweep.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    config = checked_config({**load_yaml(block), "target": "training.py:build"})
    assert len(config.space()) == 3
    described = set(re.findall(r"`(\w+)`", page))
    assert set(SweepConfig.model_fields) <= described


@pytest.mark.slow
def test_a_policy_is_trained_for_reward_weights_once(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    text = """
policy_training: {decisions: 6000, tasks: 48, validation: 16}
reward: {time: {low: 0.5, high: 2.0}, accuracy: 1.0}
"""
    config = read(tmp_path, text, out=str(tmp_path / "out"))
    assert set(config.space()) == {"reward.time"}
    plan = make_plan(config, "autoprec", {"reward.time": 1.5})
    assert plan.reward == {"time": 1.5, "accuracy": 1.0}
    arm = trial_arm(config, plan, tmp_path)
    assert arm.options is not None
    folder = Path(arm.options["policy"])
    trained = (folder / "policy.safetensors").stat().st_mtime_ns
    assert trial_arm(config, plan, tmp_path).options == arm.options
    assert (folder / "policy.safetensors").stat().st_mtime_ns == trained
    assert AutoPrecisionCallback(**arm.options).interval == 50
