"""What a command trains: a function, a LightningCLI config or a script, resolved from the text of the command line.

:func:`load_target` checks what can be checked without running anything of the user's; :meth:`Target.train` runs it.
Both serve every command that trains something of the user's.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autoprec.compare.trainers import Observer, observed
from autoprec.target_functions import (
    KINDS,
    TargetError,
    TargetFunction,
    check_file,
    find_target_function,
    fit_arguments,
    own_path,
)


@dataclass(frozen=True)
class Target:
    """Something that trains.

    Args:
        kind: How it is run.
        text: As on the command line.
        file: The file, or the name of the module of a function.
        function: Name of the function; empty for other kinds.
        arguments: Words after ``--``: those of a script or config, ``name=value`` for a function.
    """

    kind: Literal["function", "config", "script"]
    text: str
    file: str
    function: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name for titles."""
        return self.function or Path(self.file).stem

    def train(self, observer: Observer, seed: int) -> None:
        """Runs the target in this process; every Trainer that it makes is the observer's.

        Args:
            observer: Decides on the arguments of Trainers and hears of fits.
            seed: Seed of the run; the target's own ``seed_everything`` gives it too.

        Raises:
            TargetError: If it is not what it must be.
        """
        _load_other_package(self)
        words = self.arguments if self.kind == "script" else ()
        with own_path(self.file, self.kind == "script", words), observed(observer, seed):
            {"function": _train_function, "config": _train_config, "script": _run_script}[self.kind](self, seed)

    def sources(self) -> list[Path]:
        """Returns the user's files that are loaded here: that of the target, and modules below its folder."""
        start = Path(self.file) if Path(self.file).suffix else None
        found = {start.resolve()} if start is not None else set()
        module = sys.modules.get(self.file)
        roots = {Path.cwd(), *(path.parent for path in found)}
        if module is not None and module.__file__:
            found.add(Path(module.__file__).resolve())
        for other in list(sys.modules.values()):
            file = getattr(other, "__file__", None)
            if file and _is_users(Path(file).resolve(), roots):
                found.add(Path(file).resolve())
        return sorted(found)


def load_target(text: str, arguments: Sequence[str] = ()) -> Target:
    """Returns what a text on the command line names, without running it.

    Args:
        text: ``package.module:function``, ``path/to/file.py:function``, the path of a YAML file or of a script.
        arguments: Words after ``--`` on the command line.

    Raises:
        TargetError: If there is no such thing; the message says what there may be.
    """
    words = tuple(arguments)
    found = find_target_function(text, words)
    if found is not None:
        return Target("function", text, found.file, found.function, words)
    kinds: dict[str, Literal["config", "script"]] = {".yaml": "config", ".yml": "config", ".py": "script"}
    kind = kinds.get(Path(text).suffix)
    if kind is None:
        raise TargetError(f"Passed `{text}`. {KINDS}")
    check_file(text, Path(text))
    return Target(kind, text, str(Path(text).resolve()), "", words)


def _is_users(file: Path, roots: set[Path]) -> bool:
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    ours = Path(__file__).resolve().parents[1]
    return not installed and any(file.is_relative_to(root) for root in roots) and not file.is_relative_to(ours)


def _load_other_package(target: Target) -> None:
    """Loads `pytorch_lightning` where the target's code names it, because only a loaded package can be wrapped."""
    file = Path(target.file)
    if not file.suffix or "pytorch_lightning" in sys.modules or importlib.util.find_spec("pytorch_lightning") is None:
        return
    sources = [file, *file.parent.glob("*.py")] if file.is_file() else []
    if any("pytorch_lightning" in source.read_text(errors="replace") for source in sources):
        importlib.import_module("pytorch_lightning")


def _run_script(target: Target, seed: int) -> None:
    try:
        runpy.run_path(target.file, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise TargetError(
                f"The script `{target.text}` ended with exit code {end.code}. It was called with the arguments"
                f" {list(target.arguments)}; give it those it needs after `--`."
            ) from end


def _train_config(target: Target, seed: int) -> None:
    try:
        import jsonargparse
    except ModuleNotFoundError as error:
        raise TargetError(
            f"Passed `{target.text}`. The config of a LightningCLI needs `pip install 'jsonargparse[signatures]'`."
        ) from error
    from lightning.pytorch.cli import LightningCLI

    words = ["fit", "--config", target.file, *target.arguments]
    raises = {"exit_on_error": False}  # an exit would have no message
    try:
        LightningCLI(args=words, save_config_callback=None, parser_kwargs={**raises, "fit": raises})
    except (SystemExit, jsonargparse.ArgumentError) as error:
        raise TargetError(
            f"The config `{target.text}` cannot be read by `LightningCLI`: {error}. Supported are `model` and `data`"
            " with `class_path` and `init_args`, `trainer`, `optimizer`, `lr_scheduler` and `seed_everything`. If the"
            " config belongs to a CLI of your own, pass its script: `script.py -- fit --config file.yaml`."
        ) from error


def _train_function(target: Target, seed: int) -> None:
    function = TargetFunction(target.text, target.file, target.function, target.arguments)
    module, data, options = function.build(seed)
    package = _package_of(target, module)
    package.Trainer(**options).fit(module, **fit_arguments(target.text, data))


def _package_of(target: Target, module: Any) -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        loaded = sys.modules.get(package)
        if loaded is not None and isinstance(module, loaded.LightningModule):
            return loaded
    raise TargetError(
        f"`{target.text}` returned a `{type(module).__qualname__}`, which is no LightningModule of `lightning.pytorch`."
    )
