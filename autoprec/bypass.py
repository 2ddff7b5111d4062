"""Notices optimizer steps that do not come through the plugin, past the guard and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from autoprec.loss_scale import LossScale

_TEXT = (
    "An optimizer stepped past autoprec: `self.optimizers(use_pl_optimizer=False).step()`, or `step()` of an optimizer"
    " taken from the Trainer. Such steps are neither unscaled nor guarded nor counted. Call `step()` on what"
    " `self.optimizers()` returns."
)


class StepGuard:
    """Watches the optimizers of a fit through step hooks.

    Args:
        optimizers: All optimizers.
        loss_scale: Under an enabled loss scale a bypassing step would use scaled gradients, so it raises; without one
            it is warned of once.
    """

    def __init__(self, optimizers: Sequence[Any], loss_scale: LossScale) -> None:
        self._loss_scale = loss_scale
        self._is_expected = False
        self._has_warned = False
        self._handles = [o.register_step_pre_hook(self._on_step) for o in optimizers if isinstance(o, Optimizer)]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Surrounds the plugin's own steps."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_expected:
            return
        if self._loss_scale.enabled:
            raise MisconfigurationException(_TEXT)
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(_TEXT)
