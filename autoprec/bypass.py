"""Notices optimizer steps that do not come through the plugin, past the guard and the loss scale."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoprec.loss_scale import LossScale

_KNOWN = (
    "An optimizer stepped past autoprec: `self.optimizers(use_pl_optimizer=False).step()`, or `step()` of an optimizer"
    " taken from the Trainer. Such steps are neither unscaled nor guarded nor counted. Call `step()` on what"
    " `self.optimizers()` returns."
)
_PRIVATE = (
    "An optimizer that Lightning does not know (`{name}`) stepped weights of the model. Such steps are neither unscaled"
    " nor guarded nor counted. Return it from `configure_optimizers`, or train without fp16 and without a loss scale."
)

# of this thread, and for every fit in it: one may run inside another
_here = threading.local()


def _is_expected() -> bool:
    return bool(getattr(_here, "is_expected", False))


class Expecting:
    """Surrounds the plugin's own steps, with all that an optimizer steps inside its own, and their closures.

    Args:
        is_expected: ``False`` for a closure, whose backward may step optimizers in hooks of its own.
    """

    def __init__(self, is_expected: bool) -> None:
        self._is_expected = is_expected
        self._was = False

    def __enter__(self) -> None:
        self._was, _here.is_expected = _is_expected(), self._is_expected

    def __exit__(self, *exception: object) -> None:
        _here.is_expected = self._was


class StepGuard:
    """Watches all optimizers that hold weights of a model, those that Lightning does not know included.

    Args:
        root: The model.
        optimizers: All optimizers of the fit.
        loss_scale: Under an enabled loss scale a bypassing step would use scaled gradients, so it raises; without one
            it is warned of once.
        on_bypass: Called with the reason at the first such step, so that no loss scale comes into use later.
    """

    def __init__(
        self, root: nn.Module, optimizers: Sequence[Any], loss_scale: LossScale, on_bypass: Callable[[str], None]
    ) -> None:
        self._loss_scale = loss_scale
        self._on_bypass = on_bypass
        self._has_warned = False
        self._weights = {id(parameter) for parameter in root.parameters()}
        self._known = {id(optimizer) for optimizer in optimizers}
        self._is_ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._handle = register_optimizer_step_pre_hook(self._on_step)

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_expected() or not self._holds_weights(optimizer):
            return
        text = _KNOWN if id(optimizer) in self._known else _PRIVATE.format(name=type(optimizer).__qualname__)
        if self._loss_scale.enabled:
            raise MisconfigurationException(text)
        if not self._has_warned:
            self._has_warned = True
            self._on_bypass("an optimizer steps past autoprec, with gradients that nobody would unscale")
            rank_zero_warn(text)

    def _holds_weights(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._is_ours:
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._is_ours[optimizer] = any(id(parameter) in self._weights for parameter in held)
        return self._is_ours[optimizer]
