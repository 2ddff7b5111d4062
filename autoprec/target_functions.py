"""A function of the user's that returns what to train: module, data and the arguments of a Trainer.

What lives here: finding the function that a text names, calling it, and what it may return. What does not: other kinds
of targets, and who trains (``compare.targets``, ``envs``).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

KINDS = (
    "A target is `package.module:function` or `path/to/file.py:function` (returns module, data and Trainer arguments),"
    " the YAML file of a LightningCLI, or a Python script that calls `Trainer.fit`."
)


class PlainError(Exception):
    """An error whose message says all: what was passed, what is allowed and what to do."""


class TargetError(PlainError):
    """What is to be trained cannot be."""


class TrainingSetup(NamedTuple):
    """What to train.

    Attributes:
        module: A LightningModule.
        data: A LightningDataModule, a loader, a pair (training loader, validation loader), or ``None`` where the module
            has its own.
        arguments: Those of the Trainer, by name.
    """

    module: Any
    data: Any
    arguments: dict[str, Any]


@dataclass(frozen=True)
class TargetFunction:
    """A function that a text names.

    Args:
        text: As on the command line.
        file: The file, or the name of the module.
        function: Name of the function.
        arguments: ``name=value`` each.
    """

    text: str
    file: str
    function: str
    arguments: tuple[str, ...] = ()

    def build(self, seed: int) -> TrainingSetup:
        """Calls the function; see :meth:`load`."""
        return self.load()(seed)

    def load(self) -> Callable[[int], TrainingSetup]:
        """Finds the function.

        Returns:
            What calls it, with a seed that is passed as ``seed`` if the function takes one, and raises ``TargetError``
            if it returns anything but what can be trained.

        Raises:
            TargetError: If there is no such function.
        """
        return partial(self._call, _find_function(self))

    def _call(self, function: Callable[..., Any], seed: int) -> TrainingSetup:
        arguments = _parsed(self.arguments)
        if "seed" in inspect.signature(function).parameters:
            arguments.setdefault("seed", seed)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise TargetError(
                f"`{self.text}` cannot be called with {arguments}: {error}. Give its arguments as `-- name=value`."
            ) from error
        return checked_setup(self.text, function(**arguments))


def find_target_function(text: str, arguments: Sequence[str] = ()) -> TargetFunction | None:
    """Returns the function that a text names, without running anything; ``None`` if it names no function.

    Args:
        text: ``package.module:function`` or ``path/to/file.py:function``.
        arguments: Words after ``--`` on the command line.

    Raises:
        TargetError: If there is no such file, or a word is not ``name=value``.
    """
    path, colon, function = text.rpartition(":")
    words = tuple(arguments)
    if not colon or not function.isidentifier():
        return None
    _check_names(text, words)
    if path.endswith(".py"):
        check_file(text, Path(path))
        return TargetFunction(text, str(Path(path).resolve()), function, words)
    if not all(part.isidentifier() for part in path.split(".")):
        raise TargetError(f"Passed `{text}`. `{path}` is no name of a module. {KINDS}")
    return TargetFunction(text, path, function, words)


def check_file(text: str, path: Path) -> None:
    """Refuses a text whose file does not exist.

    Args:
        text: As on the command line.
        path: The file.

    Raises:
        TargetError: If there is none.
    """
    if not path.is_file():
        raise TargetError(f"Passed `{text}`. There is no file `{path}` in `{Path.cwd()}`. {KINDS}")


@contextmanager
def own_path(file: str, is_script: bool = False, arguments: Sequence[str] = ()) -> Iterator[None]:
    """Has imports and ``sys.argv`` as Python would for the target alone.

    Args:
        file: The target's file, or the name of its module.
        is_script: Whether it is run as a script.
        arguments: Words that a script is called with.
    """
    before, argv = sys.path[:], sys.argv[:]
    folder = str(Path(file).parent) if Path(file).suffix else None
    here = str(Path.cwd())
    sys.path[:0] = [folder] if is_script and folder else [entry for entry in (here, folder) if entry]
    sys.argv[:] = [file, *arguments]
    try:
        yield
    finally:
        sys.path[:], sys.argv[:] = before, argv


def checked_setup(text: str, returned: Any) -> TrainingSetup:
    """Returns what a function of the user's has returned, if that can be trained.

    Args:
        text: How the user names the function.
        returned: What it returned.

    Raises:
        TargetError: If it is something else.
    """
    if isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], Mapping):
        module, data, options = returned
        if hasattr(module, "training_step") and hasattr(module, "configure_optimizers"):
            return TrainingSetup(module, data, dict(options))
    got = type(returned).__qualname__
    if isinstance(returned, tuple):
        got = f"({', '.join(type(part).__qualname__ for part in returned)})"
    raise TargetError(
        f"`{text}` returned {got}. It must return (LightningModule, data, Trainer arguments): data is a"
        " LightningDataModule, a loader, a pair (training loader, validation loader) or None where the module has its"
        " own, and the Trainer arguments are a dict, `{}` at least."
    )


def fit_arguments(text: str, data: Any) -> dict[str, Any]:
    """Returns the arguments by which ``Trainer.fit`` takes data.

    Args:
        text: How the user names the function that returned them.
        data: See :class:`TrainingSetup`.

    Raises:
        TargetError: If it is something else.
    """
    if data is None:
        return {}
    if hasattr(data, "train_dataloader") and hasattr(data, "prepare_data"):
        return {"datamodule": data}
    if isinstance(data, tuple) and len(data) == 2:
        return {"train_dataloaders": data[0], "val_dataloaders": data[1]}
    if hasattr(data, "__iter__"):
        return {"train_dataloaders": data}
    raise TargetError(
        f"`{text}` returned data of type `{type(data).__qualname__}`. It must be a LightningDataModule, a"
        " loader, a pair (training loader, validation loader) or None."
    )


def _check_names(text: str, words: Sequence[str]) -> None:
    bad = [word for word in words if not word.partition("=")[0].isidentifier() or "=" not in word]
    if bad:
        raise TargetError(
            f"Passed `{text} -- {' '.join(words)}`. What follows `--` goes to the function by name: write"
            f" `name=value` instead of {', '.join(f'`{word}`' for word in bad)}."
        )


def _find_function(target: TargetFunction) -> Callable[..., Any]:
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
    found: Any = getattr(module, target.function, None)
    if not callable(found):
        names = sorted(name for name, value in vars(module).items() if inspect.isfunction(value))
        has = f"It has: {', '.join(names)}." if names else "It has none; a script is passed without `:function`."
        raise TargetError(f"Passed `{target.text}`. `{target.file}` has no function `{target.function}`. {has}")
    function: Callable[..., Any] = found
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
