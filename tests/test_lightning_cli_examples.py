"""The files of examples/lightning_cli run as they stand, and say all there is.

Time budget: 30 s; the entry point in processes of its own is `slow` (40 s).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI

from autoprec import AutoPrecision, AutoPrecisionConfig
from autoprec.controller import MapController, ScriptedController
from tests.small_fits import callback_of

pytest.importorskip("sklearn.datasets")

FOLDER = Path(__file__).parents[1] / "examples" / "lightning_cli"
PREFIX = "--trainer.callbacks"
pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended:UserWarning"),
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the script with words; returns its Trainer."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    specification = importlib.util.spec_from_file_location("lightning_cli_example", FOLDER / "train.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "lightning_cli_example", module)
    specification.loader.exec_module(module)
    made: list[LightningCLI] = []

    def keep(*args: Any, **kwargs: Any) -> None:
        made.append(LightningCLI(*args, **kwargs))

    monkeypatch.setattr(module, "LightningCLI", keep)

    def call(*words: str) -> Trainer:
        quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
        monkeypatch.setattr(sys, "argv", ["train.py", words[0], "--config", "base.yaml", *words[1:], *quiet])
        module.main()
        return made[-1].trainer

    return call


def configs() -> list[str]:
    return sorted(path.name for path in FOLDER.glob("*.yaml") if path.name not in ("base.yaml", "formats.yaml"))


def test_every_file_is_run_here() -> None:
    assert configs() == ["everything.yaml", "map.yaml", "predict.yaml", "rule.yaml", "script.yaml"]


@pytest.mark.parametrize("name", [name for name in configs() if name != "predict.yaml"])
def test_trains(name: str, run: Callable[..., Any]) -> None:
    trainer = run("fit", "--config", name, f"{PREFIX}.verbose=false")
    callback = callback_of(trainer)
    assert callback.applied_steps + callback.skipped_steps >= 72
    assert len(callback.history) > 0
    assert float(trainer.callback_metrics["val_accuracy"]) > 0.7
    if name == "map.yaml":
        assert type(callback.controller) is MapController
        assert callback.precision_map() == {"body.0": "bf16", "body.2": "bf16", "head": "fp32"}
        assert callback.clip_threshold == 1.0
    if name == "script.yaml":
        assert type(callback.controller) is ScriptedController
        assert callback.batch_size == 32
        assert set(callback.precision_map().values()) == {"fp32"}


def test_predicts_in_a_map(run: Callable[..., Any]) -> None:
    trainer = run("predict", "--config", "predict.yaml")
    plugin = trainer.precision_plugin
    assert type(plugin) is AutoPrecision
    assert plugin.initial_formats == {"body.*": "bf16"}


def test_nested_flags_go_on_top_of_a_file(run: Callable[..., Any]) -> None:
    flags = [f"{PREFIX}.config.guard.hold=7", f"{PREFIX}.config.clip.multiplier=2", f"{PREFIX}.interval=3"]
    callback = callback_of(run("fit", "--config", "everything.yaml", "--trainer.max_steps=4", *flags))
    assert callback.config.guard.hold == 7
    assert callback.config.clip.multiplier == 2
    assert callback.config.tiers == {"linear": "bf16", "*head*": "fp32"}  # of the file
    assert callback.interval == 3


def test_printed_config_is_the_same_run(
    run: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        run("fit", "--config", "everything.yaml", f"{PREFIX}.config.guard.hold=9", "--print_config")
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    first = callback_of(
        run("fit", "--config", "everything.yaml", f"{PREFIX}.config.guard.hold=9", "--trainer.max_steps=1")
    )
    again = callback_of(run("fit", "--config", str(printed), "--trainer.max_steps=1"))
    assert again.config == first.config
    assert again.config.guard.hold == 9
    assert (again.controller.name, again.interval) == (first.controller.name, first.interval)


def fields_of(settings: Any) -> set[str]:
    found = set()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        found |= (
            {f"{field.name}.{name}" for name in fields_of(value)} if dataclasses.is_dataclass(value) else {field.name}
        )
    return found


def keys_of(document: dict[str, Any], sections: set[str]) -> set[str]:
    found = set()
    for key, value in document.items():
        found |= {f"{key}.{name}" for name in keys_of(value, set())} if key in sections else {key}
    return found


def test_everything_is_everything() -> None:
    document = yaml.safe_load((FOLDER / "everything.yaml").read_text())
    arguments = document["trainer"]["callbacks"][0]["init_args"]
    config = arguments["config"]["init_args"]
    sections = {each.name for each in dataclasses.fields(AutoPrecisionConfig) if dataclasses.is_dataclass(each.type)}
    sections |= {name.split(".")[0] for name in fields_of(AutoPrecisionConfig()) if "." in name}
    # what only studies of the table move
    left_out = {"table.batch", "table.probe_every", "table.optimism"}
    assert keys_of(config, sections) == fields_of(AutoPrecisionConfig()) - left_out


def test_what_everything_calls_a_default_is_one() -> None:
    document = yaml.safe_load((FOLDER / "everything.yaml").read_text())
    config = document["trainer"]["callbacks"][0]["init_args"]["config"]["init_args"]
    default = AutoPrecisionConfig()
    for key, value in config.items():
        if key in ("formats", "tiers"):
            continue
        own = getattr(default, key)
        for name, each in value.items() if dataclasses.is_dataclass(own) else [(None, value)]:
            assert each == (own if name is None else getattr(own, name)), f"{key}.{name}"


@pytest.mark.slow
def test_the_entry_point_adds_the_callback_to_a_script_that_does_not_name_it(tmp_path: Path) -> None:
    """As installed: the distribution's entry point is on the path of a process of its own."""
    root = FOLDER.parents[1]
    (tmp_path / "autoprec-0.1.0.dist-info").mkdir()
    (tmp_path / "autoprec-0.1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: autoprec\nVersion: 0.1.0\n"
    )
    (tmp_path / "autoprec-0.1.0.dist-info" / "entry_points.txt").write_text(
        "[lightning.pytorch.callbacks_factory]\nautoprec = autoprec._factory:callbacks\n"
    )
    words = [sys.executable, "train.py", "fit", "--config", "base.yaml", "--trainer.max_epochs=1"]
    for value, is_there in (("1", True), ("0", False)):
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}", "AUTOPREC_AUTO": value}
        done = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert ("autoprec" in done.stderr) is is_there
