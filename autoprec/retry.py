"""Runs a training step a second time when an operation in it has no low-precision form.

The first window under a new map runs as a trial. A branch that it did not take may fail later; then the step is
repeated once as a trial, before it had any effect on weights. Nothing is added to steps that do not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# what torch and typical extensions say when they meet a dtype that they do not support
_WORDS = ("half", "bfloat16", "float16", "dtype", "scalar type", "overflow", "primitive", "same type")


def is_precision_error(error: BaseException) -> bool:
    """Whether an error reads as if a dtype was its cause."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error).lower()
    return isinstance(error, (RuntimeError, TypeError, AssertionError)) and any(word in text for word in _WORDS)


class StepRetry:
    """Stands in for a strategy's ``training_step``.

    Args:
        strategy: The strategy; its bound method is shadowed by an attribute of the instance.
        prepare: Called before the second attempt; returns whether there may be one.
    """

    def __init__(self, strategy: Any, prepare: Callable[[], bool]) -> None:
        self._strategy = strategy
        self._prepare = prepare
        self._original = strategy.training_step
        strategy.training_step = self._training_step

    def remove(self) -> None:
        """Gives the strategy its own method back."""
        if self._strategy.__dict__.get("training_step") == self._training_step:
            del self._strategy.training_step

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._original(*args, **kwargs)
        except (RuntimeError, TypeError, AssertionError) as error:
            if not is_precision_error(error) or not self._prepare():
                raise
            first = error
        try:
            return self._original(*args, **kwargs)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise first from error
