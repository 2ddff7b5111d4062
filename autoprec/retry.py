"""Runs a training step a second time when an operation in it has no low-precision form.

The first window under a new map runs as a trial. A branch that it did not take may fail later; then the step is
repeated as a trial, before it had any effect on weights. What a trial cannot repair (an extension that passes through
no torch function) is answered by raising the unit that ran last, then all of them. Nothing is added to steps that do
not raise.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

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


class StepRetry:
    """Stands in for a strategy's ``training_step``.

    Args:
        strategy: The strategy; its bound method is shadowed by an attribute of the instance.
        prepare: Called with the number of failed attempts and the error; returns whether there may be another attempt.
    """

    def __init__(self, strategy: Any, prepare: Callable[[int, BaseException], bool]) -> None:
        self._strategy = strategy
        self._prepare = prepare
        self._found = strategy.__dict__.get("training_step")
        self._original = strategy.training_step
        strategy.training_step = self._training_step

    def remove(self) -> None:
        """Gives the strategy its own method back."""
        if self._strategy.__dict__.get("training_step") != self._training_step:
            return
        del self._strategy.training_step
        if self._found is not None:  # somebody else's stand-in
            self._strategy.training_step = self._found

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        first: BaseException | None = None
        for attempt in itertools.count(1):
            try:
                return self._original(*args, **kwargs)
            except (RuntimeError, TypeError, AssertionError) as error:
                first = first or error
                if not is_precision_error(error) or not self._prepare(attempt, error):
                    if first is error:
                        raise
                    raise first from error
                line = str(error).strip().splitlines()[0]
                rank_zero_info(f"autoprec: a training step raised and is repeated in wider formats: {line}")
        raise AssertionError("unreachable")
