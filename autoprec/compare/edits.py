"""Changes to the arguments of a Trainer, so that it trains as one arm and touches no file of the user's.

What is not named here stays as the user has it. Every change is reported in a line.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoprec.compare.arms import Arm, make_callback

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


@dataclass
class Edit:
    """Arguments of a Trainer on their way to those that an arm trains with.

    Args:
        arguments: As the target gave them; changed in place.
        package: ``lightning.pytorch`` or ``pytorch_lightning``.
        changes: What was changed so far.
    """

    arguments: dict[str, Any]
    package: str = "lightning.pytorch"
    changes: list[str] = field(default_factory=list)

    def replace(self, name: str, value: Any, why: str = "") -> None:
        """Sets an argument and notes it if it was another one.

        Args:
            name: Name of the argument.
            value: What it is set to.
            why: Reason, for the reader.
        """
        before = self.arguments.get(name)
        self.arguments[name] = value
        if before is not None and before != value:
            self.changes.append(f"{name}={_words(before)} -> {_words(value)}{f' ({why})' if why else ''}")

    def named(self, name: str) -> Any:
        """Returns a class of the Trainer's own package.

        Args:
            name: Such as ``callbacks.Checkpoint``.
        """
        module, _, attribute = f"{self.package}.{name}".rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def edit_arguments(
    arguments: dict[str, Any],
    arm: Arm,
    gate: Any,
    folder: Path,
    *,
    package: str,
    interval: int | None,
    every: int | None,
) -> Edit:
    """Returns the arguments with which a Trainer trains as the arm does.

    Args:
        arguments: As the target gave them.
        arm: How to train.
        gate: The callback that stands first.
        folder: Where checkpoints and logs go.
        package: Package of the Trainer.
        interval: Steps between decisions of a callback that is added.
        every: Steps between validations, ``None`` for the target's own.
    """
    edit = Edit(dict(arguments), package)
    callbacks = _listed(edit.arguments.get("callbacks"))
    own = [callback for callback in callbacks if hasattr(callback, "precision_map")]
    uses_own = bool(own) and arm.is_steered and arm.policy is None and arm.options is None
    if uses_own:
        edit.changes.append("kept: the AutoPrecisionCallback and the precision of the target")
    else:
        if own:
            edit.changes.append("taken out: the AutoPrecisionCallback of the target")
        callbacks = [callback for callback in callbacks if callback not in own]
        _replace_precision(edit, arm)
        callbacks += [make_callback(arm, interval)] if arm.is_steered else []
    edit.arguments["callbacks"] = [gate, *_redirected(edit, callbacks, folder)]
    _replace_place(edit)
    _replace_loggers(edit, folder)
    edit.arguments["default_root_dir"] = str(folder)
    edit.arguments.update(QUIET)
    edit.replace("min_epochs", None, "a run ends where the comparison ends")
    edit.replace("min_steps", None, "a run ends where the comparison ends")
    if edit.arguments.get("barebones"):
        edit.replace("barebones", False, "it forbids callbacks")
    if edit.arguments.get("fast_dev_run"):
        edit.replace("fast_dev_run", False, "it trains a batch only")
    if every is not None:
        edit.replace("val_check_interval", every)
        edit.arguments["check_val_every_n_epoch"] = None
    return edit


def _replace_precision(edit: Edit, arm: Arm) -> None:
    edit.replace("precision", arm.precision)
    edit.arguments["precision"] = arm.precision
    plugin_class = edit.named("plugins.precision.Precision")
    plugins = _listed(edit.arguments.get("plugins"))
    dropped = [plugin for plugin in plugins if isinstance(plugin, plugin_class)]
    if dropped:
        names = ", ".join(type(plugin).__qualname__ for plugin in dropped)
        edit.changes.append(f"taken out: the plugin {names}, because a Trainer takes `precision` or a precision plugin")
        edit.arguments["plugins"] = [plugin for plugin in plugins if plugin not in dropped] or None


def _replace_place(edit: Edit) -> None:
    why = "a comparison runs on one device"
    if edit.arguments.get("devices") not in (None, "auto", 1, "1") or _is_auto_on_many(edit.arguments):
        edit.replace("devices", 1, why)
    edit.arguments["devices"] = 1 if edit.arguments.get("devices") in (None, "auto") else edit.arguments["devices"]
    if edit.arguments.get("strategy") not in (None, "auto"):
        edit.replace("strategy", "auto", why)
    if edit.arguments.get("num_nodes") not in (None, 1):
        edit.replace("num_nodes", 1, why)


def _is_auto_on_many(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("devices") == -1)


def _replace_loggers(edit: Edit, folder: Path) -> None:
    before = edit.arguments.get("logger")
    if before is None or isinstance(before, bool):
        return
    csv_class = edit.named("loggers.CSVLogger")
    loggers: list[Any] = []
    for logger in _listed(before):
        kind = type(logger) if type(logger).__name__ in ("TensorBoardLogger", "CSVLogger") else csv_class
        loggers.append(kind(str(folder / "logs"), name=f"logger{len(loggers)}"))
        where = "" if kind is type(logger) else f" -> {kind.__name__}"
        edit.changes.append(f"logger {type(logger).__qualname__}{where}, into the folder of the run")
    edit.arguments["logger"] = loggers


def _redirected(edit: Edit, callbacks: list[Any], folder: Path) -> list[Any]:
    bar_class = edit.named("callbacks.ProgressBar")
    checkpoint_class = edit.named("callbacks.ModelCheckpoint")
    kept: list[Any] = []
    for callback in callbacks:
        if isinstance(callback, bar_class):
            edit.changes.append(f"taken out: {type(callback).__qualname__}, the comparison shows progress itself")
            continue
        if isinstance(callback, checkpoint_class) and callback.dirpath is not None:
            callback.dirpath = str(folder / "checkpoints" / str(len(kept)))
            edit.changes.append(f"{type(callback).__qualname__} writes into the folder of the run")
        kept.append(callback)
    return kept


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _words(value: Any) -> str:
    plain = value is None or isinstance(value, (str, int, float, bool, list, tuple, dict))
    return repr(value) if plain else type(value).__qualname__
