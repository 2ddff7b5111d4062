"""Ways of training by name, and the arguments of a Trainer that trains in one of them.

Time budget: 5 s.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision

from autoprec import AutoPrecisionCallback, FixedController
from autoprec.compare.arms import DEFAULT, NotRunnableError, check_runnable, make_callback, parse_arm, parse_arms
from autoprec.compare.edits import Edit, edit_arguments
from autoprec.map_file import save_map


def edited(arm: str, folder: Path, **arguments: Any) -> Edit:
    return edit_arguments(
        arguments, parse_arm(arm), Callback(), folder, package="lightning.pytorch", interval=5, every=None
    )


def own_controller() -> FixedController:
    return FixedController("bf16")


def own_callback() -> AutoPrecisionCallback:
    return AutoPrecisionCallback("fixed:bf16", interval=77)


def no_controller() -> int:
    return 3


# names


@pytest.mark.parametrize(
    ("name", "precision", "matmul", "policy"),
    [
        ("32-true", "32-true", "highest", None),
        ("32-true-medium", "32-true", "medium", None),
        ("bf16-mixed", "bf16-mixed", None, None),
        ("16-mixed", "16-mixed", None, None),
        ("autoprec", "32-true", None, None),
        ("autoprec:fixed:bf16", "32-true", None, "fixed:bf16"),
        ("autoprec:package.module:make", "32-true", None, "package.module:make"),
    ],
)
def test_names(name: str, precision: str, matmul: str | None, policy: str | None) -> None:
    arm = parse_arm(name)
    assert (arm.name, arm.precision, arm.matmul, arm.policy) == (name, precision, matmul, policy)
    assert arm.is_steered is name.startswith("autoprec")


def test_a_map_is_found_from_any_folder(tmp_path: Path) -> None:
    save_map("map.yaml", {"*": "bf16"})
    assert parse_arm("autoprec:map.yaml").policy == str((tmp_path / "map.yaml").resolve())


@pytest.mark.parametrize("name", ["bf16", "autoprecision", "autoprec:", "32"])
def test_an_unknown_arm_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Passed `--arms {name}`. Arms are 32-true, 32-true-medium")):
        parse_arm(name)


def test_a_policy_is_checked_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=re.escape("Passed `policy='fixed:bf17'`")):
        parse_arm("autoprec:fixed:bf17")
    with pytest.raises(FileNotFoundError):
        parse_arm("autoprec:missing.yaml")


@pytest.mark.parametrize("names", [[], ["32-true", "32-true"]])
def test_arms_are_some_and_none_twice(names: list[str]) -> None:
    with pytest.raises(ValueError, match="none twice"):
        parse_arms(names)


def test_fp16_is_refused_where_it_is_not_native() -> None:
    for arm in parse_arms(DEFAULT):
        if arm.name == "16-mixed":
            with pytest.raises(NotRunnableError, match="fp16 is not native on cpu"):
                check_runnable(arm, torch.device("cpu"))
        else:
            check_runnable(arm, torch.device("cpu"))


# callbacks


def test_controllers_by_name_and_of_the_users_own() -> None:
    assert make_callback(parse_arm("autoprec"), 5).interval == 5
    assert make_callback(parse_arm("autoprec"), None).interval == AutoPrecisionCallback().interval
    here = f"autoprec:{__name__}"
    assert isinstance(make_callback(parse_arm(f"{here}:own_controller"), 5).controller, FixedController)
    assert make_callback(parse_arm(f"{here}:own_callback"), 5).interval == 77  # as the user made it
    with pytest.raises(NotRunnableError, match="returned a `int`"):
        make_callback(parse_arm(f"{here}:no_controller"), 5)
    with pytest.raises(NotRunnableError, match="names no function"):
        make_callback(parse_arm(f"{here}:missing"), 5)


def test_the_users_own_callback_trains_its_arm_and_no_other(tmp_path: Path) -> None:
    own = AutoPrecisionCallback(interval=9)
    arguments: dict[str, Any] = {"callbacks": [own], "precision": "bf16-mixed"}
    kept = edited("autoprec", tmp_path, **arguments)
    assert kept.arguments["callbacks"][1:] == [own]
    assert kept.arguments["precision"] == "bf16-mixed"
    assert any(change.startswith("kept:") for change in kept.changes)
    static = edited("32-true", tmp_path, **arguments)
    assert static.arguments["callbacks"][1:] == []
    assert "taken out: the AutoPrecisionCallback of the target" in static.changes
    ruled = edited("autoprec:rule", tmp_path, **arguments)
    (callback,) = ruled.arguments["callbacks"][1:]
    assert callback is not own
    assert callback.interval == 5
    assert ruled.arguments["precision"] == "32-true"


# what a Trainer is made with


def test_precision_is_replaced_and_said(tmp_path: Path) -> None:
    edit = edited("bf16-true", tmp_path, precision="16-mixed", max_epochs=3)
    assert edit.arguments["precision"] == "bf16-true"
    assert edit.arguments["max_epochs"] == 3
    assert "precision='16-mixed' -> 'bf16-true'" in edit.changes
    assert edited("bf16-true", tmp_path).changes == []


def test_a_precision_plugin_gives_way(tmp_path: Path) -> None:
    edit = edited("32-true", tmp_path, plugins=[MixedPrecision("bf16-mixed", "cpu")])
    assert edit.arguments["plugins"] is None
    assert any("taken out: the plugin MixedPrecision" in change for change in edit.changes)


def test_files_of_the_user_are_not_touched(tmp_path: Path) -> None:
    checkpoint, monitor = ModelCheckpoint("users/checkpoints"), LearningRateMonitor()
    edit = edited(
        "32-true",
        tmp_path / "run",
        callbacks=[checkpoint, monitor, TQDMProgressBar()],
        logger=[CSVLogger("users/logs"), DummyLogger()],
        default_root_dir="users",
        enable_progress_bar=True,
    )
    assert edit.arguments["callbacks"][1:] == [checkpoint, monitor]
    assert Path(str(checkpoint.dirpath)).is_relative_to(tmp_path / "run")
    assert all(Path(logger.save_dir).is_relative_to(tmp_path / "run") for logger in edit.arguments["logger"])
    assert [type(logger) for logger in edit.arguments["logger"]] == [CSVLogger, CSVLogger]
    assert edit.arguments["default_root_dir"] == str(tmp_path / "run")
    assert "logger DummyLogger -> CSVLogger, into the folder of the run" in edit.changes
    Trainer(**edit.arguments, accelerator="cpu")  # Lightning takes it


def test_a_comparison_runs_on_one_device_and_may_end_early(tmp_path: Path) -> None:
    edit = edited("32-true", tmp_path, devices=4, strategy="ddp", num_nodes=2, min_epochs=3, fast_dev_run=True)
    assert [edit.arguments[name] for name in ("devices", "strategy", "num_nodes")] == [1, "auto", 1]
    assert edit.arguments["min_epochs"] is None
    assert edit.arguments["fast_dev_run"] is False
    assert any(change.startswith("devices=4 -> 1") for change in edit.changes)
    assert "devices" not in " ".join(edited("32-true", tmp_path, devices="auto").changes)
