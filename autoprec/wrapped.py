"""A precision plugin around another one, which keeps every job that is not taken over."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer


class WrappedPrecision(Precision):
    """Passes calls on to ``base``.

    Attributes:
        base: The plugin that the Trainer would have used.
    """

    base: Precision

    def tensor_init_context(self) -> Any:
        """Delegates to the base plugin."""
        return self.base.tensor_init_context()

    def module_init_context(self) -> Any:
        """Delegates to the base plugin."""
        return self.base.module_init_context()

    def forward_context(self) -> Any:
        """Delegates to the base plugin: outside training steps the base precision holds."""
        return self.base.forward_context()

    def convert_output(self, data: Any) -> Any:
        """Delegates to the base plugin."""
        return self.base.convert_output(data)

    def main_params(self, optimizer: Optimizer) -> Any:
        """Delegates to the base plugin."""
        return self.base.main_params(optimizer)
