"""What a command trains: a function, a LightningCLI config or a script, resolved from the text of the command line.

:func:`load_target` checks what can be checked without running anything of the user's; :meth:`Target.train` runs it.
Both serve every command that trains something of the user's.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autoprec.compare.child import TargetError
from autoprec.compare.trainers import Observer, observed

KINDS = (
    "A target is `package.module:function` or `path/to/file.py:function` (returns module, data and Trainer arguments),"
    " the YAML file of a LightningCLI, or a Python script that calls `Trainer.fit`."
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
        with _own_path(self), observed(observer, seed):
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
    path, colon, function = text.rpartition(":")
    words = tuple(arguments)
    if colon and function.isidentifier():
        _check_names(text, words)
        file = str(Path(path).resolve()) if path.endswith(".py") else path
        if path.endswith(".py"):
            _check_file(text, Path(path))
        elif not all(part.isidentifier() for part in path.split(".")):
            raise TargetError(f"Passed `{text}`. `{path}` is no name of a module. {KINDS}")
        return Target("function", text, file, function, words)
    kinds: dict[str, Literal["config", "script"]] = {".yaml": "config", ".yml": "config", ".py": "script"}
    kind = kinds.get(Path(text).suffix)
    if kind is None:
        raise TargetError(f"Passed `{text}`. {KINDS}")
    _check_file(text, Path(text))
    return Target(kind, text, str(Path(text).resolve()), "", words)


def _check_file(text: str, path: Path) -> None:
    if not path.is_file():
        raise TargetError(f"Passed `{text}`. There is no file `{path}` in `{Path.cwd()}`. {KINDS}")


def _check_names(text: str, words: Sequence[str]) -> None:
    bad = [word for word in words if not word.partition("=")[0].isidentifier() or "=" not in word]
    if bad:
        raise TargetError(
            f"Passed `{text} -- {' '.join(words)}`. What follows `--` goes to the function by name: write"
            f" `name=value` instead of {', '.join(f'`{word}`' for word in bad)}."
        )


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


@contextmanager
def _own_path(target: Target) -> Iterator[None]:
    """Has imports and ``sys.argv`` as Python would for the target alone."""
    before, argv = sys.path[:], sys.argv[:]
    folder = str(Path(target.file).parent) if Path(target.file).suffix else None
    here = str(Path.cwd())
    sys.path[:0] = [folder] if target.kind == "script" and folder else [entry for entry in (here, folder) if entry]
    sys.argv[:] = [target.file, *(target.arguments if target.kind == "script" else ())]
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = before, argv


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
    function = _find_function(target)
    arguments = _parsed(target.arguments)
    if "seed" in inspect.signature(function).parameters:
        arguments.setdefault("seed", seed)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise TargetError(
            f"`{target.text}` cannot be called with {arguments}: {error}. Give its arguments as `-- name=value`."
        ) from error
    module, data, options = _checked(target, function(**arguments))
    package = _package_of(target, module)
    package.Trainer(**options).fit(module, **_loaders(target, data))


def _find_function(target: Target) -> Any:
    try:
        if target.file.endswith(".py"):
            module = _module_of_file(Path(target.file))
        else:
            module = importlib.import_module(target.file)
    except ModuleNotFoundError as error:
        if error.name is None or not target.file.startswith(error.name):
            raise
        raise TargetError(
            f"Passed `{target.text}`. There is no module `{error.name}` in `{Path.cwd()}` or among what is installed."
            f" {KINDS}"
        ) from error
    function = getattr(module, target.function, None)
    if not callable(function):
        names = sorted(name for name, value in vars(module).items() if inspect.isfunction(value))
        found = f"It has: {', '.join(names)}." if names else "It has none; a script is passed without `:function`."
        raise TargetError(f"Passed `{target.text}`. `{target.file}` has no function `{target.function}`. {found}")
    return function


def _module_of_file(path: Path) -> Any:
    # workers of its loaders look for it by name, and nobody else must
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_target"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _parsed(words: Sequence[str]) -> dict[str, Any]:
    import yaml

    return {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}


def _checked(target: Target, returned: Any) -> tuple[Any, Any, dict[str, Any]]:
    if isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], Mapping):
        module, data, options = returned
        if hasattr(module, "training_step") and hasattr(module, "configure_optimizers"):
            return module, data, dict(options)
    got = type(returned).__qualname__
    if isinstance(returned, tuple):
        got = f"({', '.join(type(part).__qualname__ for part in returned)})"
    raise TargetError(
        f"`{target.text}` returned {got}. It must return (LightningModule, data, Trainer arguments): data is a"
        " LightningDataModule, a loader, a pair (training loader, validation loader) or None where the module has its"
        " own, and the Trainer arguments are a dict, `{}` at least."
    )


def _package_of(target: Target, module: Any) -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        loaded = sys.modules.get(package)
        if loaded is not None and isinstance(module, loaded.LightningModule):
            return loaded
    raise TargetError(
        f"`{target.text}` returned a `{type(module).__qualname__}`, which is no LightningModule of `lightning.pytorch`."
    )


def _loaders(target: Target, data: Any) -> dict[str, Any]:
    if data is None:
        return {}
    if hasattr(data, "train_dataloader") and hasattr(data, "prepare_data"):
        return {"datamodule": data}
    if isinstance(data, tuple) and len(data) == 2:
        return {"train_dataloaders": data[0], "val_dataloaders": data[1]}
    if hasattr(data, "__iter__"):
        return {"train_dataloaders": data}
    raise TargetError(
        f"`{target.text}` returned data of type `{type(data).__qualname__}`. It must be a LightningDataModule, a"
        " loader, a pair (training loader, validation loader) or None."
    )
