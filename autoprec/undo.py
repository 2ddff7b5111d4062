"""Puts an optimizer back that had written weights before its closure turned out non-finite."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map

# class of optimizers to whether it writes weights before, or between, calls of its closure; torch's own do not
_writes_early: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


class StepUndo:
    """Undoes one step, if it is left from inside the closure after something was written.

    Torch's own optimizers but LBFGS evaluate the closure once, before any update, and need nothing. A foreign optimizer
    is copied at its first step to learn whether it does the same, and at every step from the first on in which it did
    not (sharpness-aware optimizers, look-ahead before the closure).

    Args:
        optimizer: The optimizer about to step.

    Attributes:
        is_in_closure: Whether the closure was entered and not left by its end.
    """

    def __init__(self, optimizer: Any) -> None:
        cls = type(optimizer)
        self._optimizer = optimizer
        self.is_in_closure = False
        self._calls = 0
        self._has_written = False
        self._is_foreign = isinstance(optimizer, Optimizer) and (
            not cls.__module__.startswith("torch.optim") or isinstance(optimizer, LBFGS)
        )
        self._versions: list[int] = []
        self._copies: tuple[list[Tensor], Any] | None = None
        if self._is_foreign:
            self._versions = self._read_versions()
            if _writes_early.get(cls, True):
                weights = [parameter.detach().clone() for parameter in self._parameters()]
                self._copies = weights, _cloned(optimizer.state_dict())

    def note_call(self) -> int:
        """Called at each entry of the closure; looks whether something was written by now.

        Returns:
            The calls so far, this one included.
        """
        self._calls += 1
        self.is_in_closure = True
        if self._is_foreign and (self._calls > 1 or self._read_versions() != self._versions):
            self._has_written = True
            _writes_early[type(self._optimizer)] = True
        return self._calls

    def learn(self) -> None:
        """Called after a step that was not skipped."""
        if self._is_foreign:
            cls = type(self._optimizer)
            _writes_early[cls] = _writes_early.get(cls, False) or isinstance(self._optimizer, LBFGS)

    def restore(self) -> None:
        """Puts weights and state back; called when the step was left from inside its closure."""
        if not self._has_written:
            return
        if self._copies is None:
            rank_zero_warn(
                f"autoprec: a skipped step of `{type(self._optimizer).__qualname__}` could not be taken back: it wrote"
                " weights before its closure, which it did not do in the steps before. From now on it will be."
            )
            return
        self._put_back(*self._copies)

    def take_back(self) -> bool:
        """Called when memory ran out in the step, wherever that was.

        Returns:
            Whether weights and state are what they were. From the first update on nobody knows what was written, so
            that only copies help.
        """
        if self.is_in_closure and not self._has_written:
            return True
        if self._copies is None:
            return False
        self._put_back(*self._copies)
        return True

    def _put_back(self, weights: list[Tensor], state: Any) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), weights, strict=True):
                parameter.copy_(value)
        self._optimizer.load_state_dict(state)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _read_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters()]


def _cloned(state: Any) -> Any:
    return tree_map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, state)
