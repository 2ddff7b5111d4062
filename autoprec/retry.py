"""Catches what a training step raises: low precision that an operation does not take, and memory that runs out.

A step in which an operation has no low-precision form is run a second time. The first window under a new map runs as a
trial. A branch that it did not take may fail later; then the step is repeated as a trial, before it had any effect on
weights. What a trial cannot repair (an extension that passes through no torch function) is answered by raising the unit
that ran last, then all of them.

Where memory runs out, in the forward or in the backward, the window is given up if there is a smaller batch size to go
to. Else the error goes on as it came. Nothing is added to steps that do not raise.
"""

from __future__ import annotations

import itertools
import re
import sys
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from autoprec.memory_errors import is_out_of_memory

# what torch and typical extensions say when they meet a dtype that they do not support
_WORDS = re.compile(
    r"\bHalf\b|\bhalf precision\b|bfloat16|float16|float32|\bdtypes?\b|scalar type|without overflow|primitive"
    r"|same type"
)


def is_precision_error(error: BaseException) -> bool:
    """Whether an error reads as if a dtype was its cause."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error).replace("BFloat16", "bfloat16").replace("Float16", "float16")
    return isinstance(error, (RuntimeError, TypeError, AssertionError)) and _WORDS.search(text) is not None


class Window(Protocol):
    """What decides about a step that raised."""

    is_automatic: bool

    def prepare_retry(self, failed_attempts: int, error: BaseException) -> bool:
        """Called with the number of failed attempts and the error; returns whether there may be another attempt."""

    def lose_window(self, error: BaseException, outer: BaseException | None) -> bool:
        """Called when memory ran out; returns whether the run goes on without this window."""

    def skips_micro_batch(self) -> bool:
        """Whether the micro-batch that comes belongs to a window that is lost."""


class StepRetry:
    """Stands in for a strategy's ``training_step`` and ``backward``.

    Args:
        strategy: The strategy; its bound methods are shadowed by attributes of the instance.
        window: Decides about a step that raised.
    """

    def __init__(self, strategy: Any, window: Window) -> None:
        self._strategy = strategy
        self._window = window
        self._training_step_before = strategy.training_step
        self._backward_before = strategy.backward
        self._own = {"training_step": self._training_step, "backward": self._backward}
        self._found = {name: strategy.__dict__[name] for name in self._own if name in strategy.__dict__}
        for name, method in self._own.items():
            setattr(strategy, name, method)

    def remove(self) -> None:
        """Gives the strategy its own methods back."""
        for name, method in self._own.items():
            if self._strategy.__dict__.get(name) != method:
                continue
            delattr(self._strategy, name)
            if name in self._found:  # somebody else's stand-in
                setattr(self._strategy, name, self._found[name])

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._window.skips_micro_batch():
            return None
        outer = sys.exc_info()[1]
        first: BaseException | None = None
        for attempt in itertools.count(1):
            try:
                return self._training_step_before(*args, **kwargs)
            except Exception as error:
                has_no_memory = is_out_of_memory(error, outer)
                if has_no_memory and self._window.lose_window(error, outer):
                    first = None  # its traceback holds this frame, and so the batch
                    return None
                first = first or error
                if has_no_memory or not is_precision_error(error) or not self._window.prepare_retry(attempt, error):
                    if first is error:
                        raise
                    raise first from error
                line = str(error).strip().splitlines()[0]
                rank_zero_info(f"autoprec: a training step raised and is repeated in wider formats: {line}")
        raise AssertionError("unreachable")

    def _backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        outer = sys.exc_info()[1]
        try:
            return self._backward_before(closure_loss, *args, **kwargs)
        except Exception as error:
            # under manual optimization the training step, which called this, is left as a whole
            if self._window.is_automatic and is_out_of_memory(error, outer) and self._window.lose_window(error, outer):
                return closure_loss.detach()
            raise
