"""Trainers that a target makes by itself are made with other arguments, and their fits are noticed.

``Trainer.__init__`` and ``Trainer.fit`` are wrapped, and ``seed_everything`` gives the seed of the run, for the time of
a ``with`` block; `lightning.pytorch` and, where it is loaded, `pytorch_lightning`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class Observer(Protocol):
    """Who decides on the arguments of Trainers and hears of their fits."""

    def on_trainer(self, package: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments that the Trainer is made with instead.

        Args:
            package: ``lightning.pytorch`` or ``pytorch_lightning``.
            arguments: As the target gave them.
        """

    def after_fit(self, trainer: Any, arguments: dict[str, Any]) -> None:
        """Is called when a fit has ended without an exception.

        Args:
            trainer: The Trainer.
            arguments: What ``fit`` was called with, by name.
        """

    def on_seed(self, seed: Any) -> None:
        """Is called where the target sets a seed, which has no effect.

        Args:
            seed: The target's own.
        """


@contextmanager
def observed(observer: Observer, seed: int) -> Iterator[None]:
    """Wraps Trainers and ``seed_everything`` until the end of the block; seeds everything.

    Args:
        observer: Who decides.
        seed: The seed of the run.
    """
    with ExitStack() as stack:
        for package in PACKAGES:
            if package in sys.modules:
                stack.enter_context(_wrapped_trainer(package, observer))
        stack.enter_context(_fixed_seed(observer, seed))
        yield


@contextmanager
def _wrapped_trainer(package: str, observer: Observer) -> Iterator[None]:
    trainer_class = importlib.import_module(package).Trainer
    plain_init, plain_fit = trainer_class.__init__, trainer_class.fit

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **arguments: Any) -> None:
        names = _parameters(plain_init)[1:]
        plain_init(self, **observer.on_trainer(package, {**dict(zip(names, args, strict=False)), **arguments}))

    @functools.wraps(plain_fit)
    def fit(self: Any, *args: Any, **arguments: Any) -> None:
        plain_fit(self, *args, **arguments)
        names = _parameters(plain_fit)[1:]
        observer.after_fit(self, {**dict(zip(names, args, strict=False)), **arguments})

    trainer_class.__init__, trainer_class.fit = init, fit
    try:
        yield
    finally:
        trainer_class.__init__, trainer_class.fit = plain_init, plain_fit


def _parameters(function: Callable[..., Any]) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)


@contextmanager
def _fixed_seed(observer: Observer, seed: int) -> Iterator[None]:
    from lightning.fabric.utilities.seed import seed_everything

    seed_everything(seed, workers=True, verbose=False)
    calls = 0

    @functools.wraps(seed_everything)
    def seed_run(own: Any = None, workers: bool = False, verbose: bool = True) -> int:
        nonlocal calls
        calls += 1
        observer.on_seed(own)
        return seed_everything(seed, workers=True, verbose=False)

    holders = [module for module in list(sys.modules.values()) if _own_seed(module) is not None]
    plain = [(module, _own_seed(module)) for module in holders]
    for module in holders:
        module.__dict__["seed_everything"] = seed_run
    try:
        yield
    finally:
        for module, function in plain:
            module.__dict__["seed_everything"] = function


def _own_seed(module: Any) -> Any:
    # libraries that load on use would load if they were asked
    function = getattr(module, "__dict__", {}).get("seed_everything")
    is_lightnings = str(getattr(function, "__module__", "")).endswith("fabric.utilities.seed")
    return function if is_lightnings else None
