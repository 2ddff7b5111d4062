"""LightningCLI builds the callback from YAML and from the command line.

Time budget: 60 s (a parser of LightningCLI takes about a second).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI
from torch import nn

from autoprec import (
    AutoPrecision,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    AutoPrecisionStrategy,
    ClipConfig,
    FixedController,
    GuardConfig,
    LossScaleConfig,
    MapController,
    MonitorConfig,
    RuleController,
    ScriptedController,
)
from tests.small_fits import Full, callback_of, loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended:UserWarning"),
    # lightning 2.6.6 calls what jsonargparse 4.53 has renamed
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

NAME = "autoprec.AutoPrecisionCallback"
QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


class Model(Full):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(16)


class Configured(Model):
    """No argument that a command line cannot hold."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))


def cli(args: list[str], run: bool = False, **options: Any) -> LightningCLI:
    options = {"save_config_callback": None, "seed_everything_default": 0, **options}
    return LightningCLI(Configured, trainer_defaults=QUIET, args=args, run=run, **options)


def built(args: list[str]) -> AutoPrecisionCallback:
    return callback_of(cli(args).trainer)


def from_yaml(folder: Path, init_args: Mapping[str, Any]) -> AutoPrecisionCallback:
    document = {"trainer": {"callbacks": [{"class_path": NAME, "init_args": dict(init_args)}]}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    return built(["--config", str(path)])


WANTED = AutoPrecisionConfig(
    formats=("fp32", "bf16", "int8"),
    granularity="block",
    clamp_output=100.0,
    hold_schedules=False,
    second_moment="bf16",
    second_moment_after=100,
    loss_scale=LossScaleConfig(init_scale=512.0, growth_interval=7),
    clip=ClipConfig(multiplier=2.0, min_norms=4),
    guard=GuardConfig(hold=11),
)


def test_no_arguments() -> None:
    callback = built([f"--trainer.callbacks+={NAME}"])
    assert type(callback.controller) is RuleController
    assert callback.config == AutoPrecisionConfig()


def test_everything_on_the_command_line() -> None:
    prefix = "--trainer.callbacks"
    callback = built(
        [
            f"{prefix}+={NAME}",
            f"{prefix}.policy=fixed:bf16",
            f'{prefix}.knobs=["precision","clip"]',
            f"{prefix}.interval=7",
            f"{prefix}.eval_precision=current",
            f"{prefix}.history_file=record.jsonl",
            f"{prefix}.verbose=false",
            f"{prefix}.config.formats=[fp32,bf16,int8]",
            f"{prefix}.config.granularity=block",
            f"{prefix}.config.clamp_output=100",
            f"{prefix}.config.hold_schedules=false",
            f"{prefix}.config.second_moment=bf16",
            f"{prefix}.config.second_moment_after=100",
            f"{prefix}.config.loss_scale.init_scale=512",
            f"{prefix}.config.loss_scale.growth_interval=7",
            f"{prefix}.config.clip.multiplier=2",
            f"{prefix}.config.clip.min_norms=4",
            f"{prefix}.config.guard.hold=11",
        ]
    )
    assert callback.controller.name == "fixed:bf16"
    assert callback.plugin.settings.knobs == ("precision", "clip")
    assert callback.interval == 7
    assert callback.plugin.settings.eval_precision == "current"
    assert str(callback.history_file) == "record.jsonl"
    assert callback.verbose is False
    assert callback.config == WANTED


def test_everything_in_yaml(tmp_path: Path) -> None:
    callback = from_yaml(
        tmp_path,
        {
            "policy": "fixed:int8",
            "knobs": ["precision", "loss_scale"],
            "interval": 9,
            "eval_precision": "current",
            "history_file": True,
            "verbose": False,
            "config": {
                "formats": ["fp32", "bf16", "int8"],
                "granularity": "block",
                "clamp_output": 100.0,
                "hold_schedules": False,
                "second_moment": "bf16",
                "second_moment_after": 100,
                "loss_scale": {"init_scale": 512.0, "growth_interval": 7},
                "clip": {"multiplier": 2.0, "min_norms": 4},
                "guard": {"hold": 11},
            },
        },
    )
    assert callback.controller.name == "fixed:int8"
    assert callback.plugin.settings.knobs == ("precision", "loss_scale")
    assert callback.interval == 9
    assert callback.history_file is True
    assert callback.config == WANTED


def test_no_knobs_in_yaml(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, {"knobs": []}).plugin.settings.knobs == ()


def test_clip_off_in_yaml(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, {"config": {"clip": {"multiplier": float("inf")}}}).config.clip.multiplier == float(
        "inf"
    )


def test_controller_in_yaml(tmp_path: Path) -> None:
    policy = {"class_path": "autoprec.FixedController", "init_args": {"format": "int8"}}
    assert type(from_yaml(tmp_path, {"policy": policy}).controller) is FixedController


def test_script_in_yaml(tmp_path: Path) -> None:
    steps = {3: {"precision": {"net.0": "bf16"}, "clip": 0.5}}
    policy = {"class_path": "autoprec.ScriptedController", "init_args": {"steps": steps, "epochs": {1: {"clip": 2.0}}}}
    controller = from_yaml(tmp_path, {"policy": policy}).controller
    assert type(controller) is ScriptedController
    assert controller.steps[3].precision == {"net.0": "bf16"}
    assert controller.epochs[1].clip == 2.0


def test_saved_config_builds_the_same_controller(tmp_path: Path) -> None:
    """What LightningCLI writes beside the logs must be good for a second run."""
    policy = {"class_path": "autoprec.ScriptedController", "init_args": {"epochs": {1: {"clip": 2.0}}}}
    document = {"trainer": {"callbacks": [{"class_path": NAME, "init_args": {"policy": policy}}]}}
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(document))
    first = cli(["--config", str(tmp_path / "first.yaml")])
    (tmp_path / "saved.yaml").write_text(first.parser.dump(first.config))
    controller = built(["--config", str(tmp_path / "saved.yaml")]).controller
    assert type(controller) is ScriptedController
    assert controller.epochs[1].clip == 2.0


def test_map_file_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text("version: 1\nprecision: {'net.*': bf16}\n")
    controller = from_yaml(tmp_path, {"policy": str(tmp_path / "map.yaml")}).controller
    assert type(controller) is MapController
    assert controller.initial_map() == {"net.*": "bf16"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["policy=rules"], "Did you mean 'rule'"),
        (["eval_precision=bf16"], "current"),
        (["interval=0"], "must be an int >= 1"),
        (["interval=often"], "interval"),
        (["config.formats=[b16]"], "Did you mean 'bf16'"),
        (["config.loss_scale.growth_factor=0.5"], "growth_factor"),
        (["config.guards.hold=3"], "guards"),
        (["intervall=3"], "intervall"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_named(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        built([f"--trainer.callbacks+={NAME}", *(f"--trainer.callbacks.{arg}" for arg in args)])
    except SystemExit:
        text = capsys.readouterr().err
    except ValueError as error:
        text = str(error)
    else:
        pytest.fail("the mistake was accepted")
    assert message in text


def test_help_explains_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli([f"--trainer.callbacks.help={NAME}"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for argument in ("policy", "knobs", "interval", "eval_precision", "history_file", "verbose"):
        assert f"--trainer.callbacks.{argument}" in text
    for part in ("Applied optimizer steps between decisions", "(type: int, default: 50)", "Print a short table"):
        assert part in text, part


def test_help_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(AutoPrecisionCallback, "callback")
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--callback.config.help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("loss_scale.init_scale", "First loss scale", "guard.hold", "clip.multiplier", "hold_schedules"):
        assert part in text, part


def test_printed_config_builds_the_same_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = "--trainer.callbacks"
    args = [
        f"{prefix}+={NAME}",
        f"{prefix}.policy=fixed:bf16",
        f"{prefix}.config.guard.hold=11",
        f"{prefix}.interval=3",
    ]
    with pytest.raises(SystemExit):
        cli([*args, "--print_config"])
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    callback = built(["--config", str(path)])
    assert (callback.controller.name, callback.interval) == ("fixed:bf16", 3)
    assert callback.config == AutoPrecisionConfig(guard=GuardConfig(hold=11))


def test_saved_config_trains_again(tmp_path: Path) -> None:
    """Lightning writes config.yaml beside the logs; ``fit --config`` with it is the same run."""
    from lightning.pytorch.cli import SaveConfigCallback

    prefix = "--trainer.callbacks"
    folder = tmp_path / "first"
    args = [
        "fit",
        f"--trainer.default_root_dir={folder}",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        f"--trainer.logger.save_dir={folder}",
        f"{prefix}+={NAME}",
        f"{prefix}.policy=fixed:bf16",
        f"{prefix}.verbose=false",
        f"{prefix}.config.clip.multiplier=2",
        "--trainer.log_every_n_steps=1",
    ]
    first = cli(args, run=True, save_config_callback=SaveConfigCallback)
    (saved,) = folder.rglob("config.yaml")
    again = cli(["fit", "--config", str(saved), "--trainer.logger=false"], run=True)
    maps = []
    for run in (first, again):
        callback = callback_of(run.trainer)
        assert callback.applied_steps == 8
        assert callback.config.clip.multiplier == 2
        maps.append(callback.precision_map())
    assert maps[0] == maps[1] == {"net.0": "bf16", "net.2": "bf16"}


def test_plugin_in_yaml(tmp_path: Path) -> None:
    plugin = {"class_path": "autoprec.AutoPrecision", "init_args": {"formats": {"*": "bf16"}, "knobs": ["precision"]}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"plugins": [plugin]}}))
    found = cli(["--config", str(path)]).trainer.precision_plugin
    assert type(found) is AutoPrecision
    assert found.initial_formats == {"*": "bf16"}


def test_strategy_by_name() -> None:
    trainer = cli(["--trainer.strategy=autoprec", "--trainer.precision=bf16-mixed"]).trainer
    assert type(trainer.strategy) is AutoPrecisionStrategy
    assert trainer.precision_plugin.base.precision == "bf16-mixed"  # type: ignore[attr-defined]


def test_monitor() -> None:
    """A port, or settings one by one."""
    add = f"--trainer.callbacks+={NAME}"
    assert built([add, "--trainer.callbacks.monitor=9753"]).monitor == MonitorConfig(port=9753)
    settings = ["--trainer.callbacks.monitor.port=0", "--trainer.callbacks.monitor.run=mine"]
    assert built([add, "--trainer.callbacks.monitor=MonitorConfig", *settings]).monitor == MonitorConfig(run="mine")
    assert built([add]).monitor is None
