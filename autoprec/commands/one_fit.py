"""The first fit of a target, in this process: its Trainer is changed, watched, and nothing after the fit runs.

What lives here: how a command gets hold of module, data and Trainer of whatever kind of target. What does not: what
the command does with them.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from autoprec.compare.arms import parse_arm
from autoprec.compare.edits import edit_arguments
from autoprec.compare.targets import Target
from autoprec.target_functions import TargetError

AfterFit = Callable[[Any, dict[str, Any]], None]


class _StopError(BaseException):
    """Ends a target behind its first fit, past handlers of ``Exception`` in its code."""


class OneFit:
    """Decides on the Trainers of a target.

    Args:
        target: What is trained.
        callbacks: Made anew for the Trainer; they stand first.
        arguments: Of the Trainer, in place of the target's own.
        after_fit: Called with the Trainer and the arguments of ``fit``.
        precision: What the Trainer computes in.
    """

    def __init__(
        self,
        target: Target,
        callbacks: Callable[[], list[Any]],
        arguments: dict[str, Any],
        after_fit: AfterFit,
        precision: str = "32-true",
    ) -> None:
        self._target = target
        self._callbacks = callbacks
        self._arguments = arguments
        self._after_fit = after_fit
        self._precision = precision
        self._folder = Path()
        self._has_fitted = False
        self.changes: list[str] = []

    def run(self, threads: int | None = None, prints_to_stderr: bool = False) -> None:
        """Runs the target up to the end of its first fit; loggers and checkpoints write into a folder that goes.

        Args:
            threads: Threads for one operation meanwhile, ``None`` for what torch uses.
            prints_to_stderr: Whether standard output is left to the command.

        Raises:
            TargetError: If it trains nothing.
            KeyboardInterrupt: After Ctrl-C, which Lightning turns into the end of the process.
        """
        output = contextlib.redirect_stdout(sys.stderr) if prints_to_stderr else contextlib.nullcontext()
        with (
            TemporaryDirectory(prefix="autoprec-") as folder,
            output,
            _quiet_lightning(),
            _own_interrupts(),
            _threads(threads),
        ):
            self._folder = Path(folder)
            with contextlib.suppress(_StopError):
                self._target.train(self, seed=0)
        if not self._has_fitted:
            raise TargetError(
                f"The target `{self._target.text}` ended without a `Trainer.fit` of `lightning.pytorch`. A script must"
                " call it when it is run; give arguments that it needs after `--`."
            )

    # ---- what targets.Target.train calls ----

    def on_trainer(self, package: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments that the Trainer is made with."""
        if package != "lightning.pytorch":
            raise TargetError(f"The target makes a Trainer of `{package}`. autoprec belongs to `lightning.pytorch`.")
        base = importlib.import_module(package).Callback
        first = _make_first(base)
        edit = edit_arguments(
            arguments, parse_arm(self._precision), first, self._folder, package=package, interval=None, every=None
        )
        edit.arguments["callbacks"] += self._callbacks()
        self.changes += edit.changes
        return {**edit.arguments, "logger": False, "enable_checkpointing": False, **self._arguments}

    def on_seed(self, seed: Any) -> None:
        """The target's own seed has no effect."""

    def after_fit(self, trainer: Any, arguments: dict[str, Any]) -> None:
        """Hands the fit over, and ends the target."""
        self._has_fitted = True
        self._after_fit(trainer, arguments)
        raise _StopError


def _make_first(base: type) -> Any:
    def setup(self: Any, trainer: Any, pl_module: Any, stage: str) -> None:
        # given by `configure_callbacks` of the module; ours has no such mark
        for callback in [each for each in trainer.callbacks if hasattr(each, "precision_map")]:
            if not getattr(callback, "is_of_command", False):
                trainer.callbacks.remove(callback)

    return type("First", (base,), {"setup": setup})()


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Keeps tips and notes about devices out of what the command prints; warnings stay."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _own_interrupts() -> Iterator[None]:
    """Makes Ctrl-C an exception again where Lightning has ended the process, and gives the signal its handler back."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except (SystemExit, TargetError) as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        if isinstance(error, SystemExit):
            raise TargetError(f"The target ended the process with exit code {error.code}.") from error
        raise
    finally:
        if is_main and handler is not None:
            signal.signal(signal.SIGINT, handler)


def _was_interrupted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
