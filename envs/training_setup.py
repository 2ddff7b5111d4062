"""What an episode trains: the user's module, data and Trainer arguments, new each time, changed as little as must be.

What lives here: where they come from, and the arguments of the Trainers. What does not: the fit itself (``episode``).
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import Precision

from autoprec.callback import AutoPrecisionCallback
from autoprec.target_functions import (
    TargetError,
    TrainingSetup,
    checked_setup,
    find_target_function,
    own_path,
)

Source = str | Callable[..., Any] | Sequence[Any]
"""``package.module:function`` or ``file.py:function``; a function that returns module, data and Trainer arguments; or
module, data and, if there are any, Trainer arguments."""

_DROPPED = (AutoPrecisionCallback, Checkpoint, ProgressBar)
"""Callbacks of the user's that are taken out."""


class SetupSource:
    """Makes what is trained, new each time.

    Args:
        source: See ``Source``. A module and data that are passed as they are, are copied now and for each episode.

    Attributes:
        name: How messages call it.

    Raises:
        TargetError: If a text names no function.
        TypeError: If ``source`` is something else, or cannot be copied.
    """

    def __init__(self, source: Source) -> None:
        self._latest: list[weakref.ref[Any]] = []
        if isinstance(source, str):
            self.name, self._build = source, _named(source)
        elif callable(source):
            self.name = getattr(source, "__qualname__", type(source).__qualname__)
            self._build = _called(self.name, source)
        elif isinstance(source, (tuple, list)) and len(source) in (2, 3):
            self.name = type(source[0]).__qualname__
            self._build = _copied(checked_setup(self.name, (*source, {})[:3]))
        else:
            raise TypeError(
                f"Passed `TrainingEnv({source!r})`. It takes a function that returns (LightningModule, data, Trainer"
                " arguments), the text `module:function` of one, or a pair (LightningModule, data)."
            )

    def build(self, seed: int) -> TrainingSetup:
        """Returns what is trained next.

        Args:
            seed: Given to a function that has a parameter ``seed``.

        Raises:
            TargetError: If the user's function returned something else, or the same module or callback as before.
        """
        setup = self._build(seed)
        before = [reference() for reference in self._latest]
        callbacks = [each for each in _listed(setup.arguments.get("callbacks")) if not isinstance(each, _DROPPED)]
        self._check_is_new("module", setup.module, before)
        for callback in callbacks:
            if isinstance(callback, Callback) and callback.state_dict():  # others remember nothing
                self._check_is_new(type(callback).__qualname__, callback, before)
        self._latest = [weakref.ref(each) for each in (setup.module, *callbacks)]
        if isinstance(setup.data, LightningDataModule):
            self._latest.append(weakref.ref(setup.data))
            if _is_among(setup.data, before):  # one fit must not tear down what another one works with
                return setup._replace(data=copy.copy(setup.data))
        return setup

    def _check_is_new(self, what: str, value: Any, before: Sequence[Any]) -> None:
        if _is_among(value, before):
            raise TargetError(
                f"`{self.name}` returned the same {what} twice. Each episode trains a new one: make it inside of the"
                " function, or pass module and data instead of a function, which are copied."
            )


def _named(text: str) -> Callable[[int], TrainingSetup]:
    function = find_target_function(text)
    if function is None:
        raise TargetError(
            f"Passed `{text}`. An environment trains what a function returns: pass `package.module:function` or"
            " `path/to/file.py:function`."
        )
    with own_path(function.file):
        call = function.load()

    def build(seed: int) -> TrainingSetup:
        with own_path(function.file):
            return call(seed)

    return build


def _called(name: str, function: Callable[..., Any]) -> Callable[[int], TrainingSetup]:
    takes_seed = "seed" in inspect.signature(function).parameters

    def build(seed: int) -> TrainingSetup:
        return checked_setup(name, function(seed=seed) if takes_seed else function())

    return build


def _copied(setup: TrainingSetup) -> Callable[[int], TrainingSetup]:
    def copied(of: TrainingSetup) -> TrainingSetup:
        trainer = getattr(of.module, "_trainer", None)  # of an earlier fit
        try:
            return copy.deepcopy(of, {id(trainer): None} if trainer is not None else {})
        except Exception as error:
            raise TypeError(
                f"Passed a `{type(of.module).__qualname__}` and its data, of which something cannot be copied"
                f" ({type(error).__name__}: {error}). Pass a function that makes them instead."
            ) from error

    template = copied(setup)
    return lambda seed: copied(template)


def trainer_arguments(arguments: dict[str, Any], callbacks: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of a Trainer that trains one episode: on one device, silent, without files.

    Loggers swallow what they get, checkpoint callbacks and an ``AutoPrecisionCallback`` are taken out. All else stays
    as the user has it.

    Args:
        arguments: The user's.
        callbacks: What is added.
    """
    own = [callback for callback in _listed(arguments.get("callbacks")) if not isinstance(callback, _DROPPED)]
    edited = dict(arguments)
    edited["callbacks"] = [*own, *callbacks]
    edited["logger"] = DummyLogger() if arguments.get("logger", True) else False
    edited.update(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, barebones=False)
    if arguments.get("devices") in (None, "auto"):
        edited["devices"] = 1
    return edited


def fp32_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the same arguments without a precision of the user's.

    Args:
        arguments: Those of a Trainer.
    """
    plugins = [plugin for plugin in _listed(arguments.get("plugins")) if not isinstance(plugin, Precision)]
    return {**arguments, "precision": "32-true", "plugins": plugins or None}


def endless_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the same arguments without anything that ends a fit early or keeps it from ending.

    Args:
        arguments: Those of a Trainer.
    """
    unlimited = {"max_epochs": -1, "max_steps": -1, "max_time": None, "min_epochs": None, "min_steps": None}
    return {**arguments, **unlimited, "fast_dev_run": False}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _is_among(value: Any, others: Sequence[Any]) -> bool:
    return any(value is other for other in others)
