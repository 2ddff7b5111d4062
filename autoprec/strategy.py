"""``Trainer(strategy="autoprec")``: one device, with AutoPrecision as its precision plugin."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from autoprec.precision import AutoPrecision


class AutoPrecisionStrategy(SingleDeviceStrategy):
    """A single-device strategy whose precision plugin is always :class:`~autoprec.precision.AutoPrecision`.

    Lightning hands every strategy the plugin that ``precision=`` stands for; here it becomes the starting point. The
    device comes from ``accelerator`` and ``devices``.

    Args:
        device: Used until the Trainer names one.
        accelerator: Passed on to Lightning.
        checkpoint_io: Passed on to Lightning.
        precision_plugin: An ``AutoPrecision``, or the plugin to start from.

    Raises:
        MisconfigurationException: If the Trainer asks for more than one device.
    """

    strategy_name = "autoprec"

    def __init__(
        self,
        device: str | int | torch.device = "cpu",
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(device, accelerator, checkpoint_io, None)
        self._devices: list[torch.device] = []
        if precision_plugin is not None:
            self.precision_plugin = precision_plugin

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device, once the Trainer has named it; Lightning's connector assigns it."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[Any]) -> None:
        if len(devices) > 1:
            raise MisconfigurationException(
                f"`Trainer(strategy='autoprec', devices={len(devices)})`: this strategy runs on one device. Use"
                " `devices=1`; several devices need `strategy='ddp'`, for now without autoprec."
            )
        self._devices = [device if isinstance(device, torch.device) else torch.device(device) for device in devices]
        if self._devices:
            self._root_device = self._devices[0]

    @property
    def num_nodes(self) -> int:
        """Always 1; Lightning's connector assigns what the Trainer was given."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes > 1:
            raise MisconfigurationException(
                f"`Trainer(strategy='autoprec', num_nodes={num_nodes})`: this strategy runs on one device. Use"
                " `num_nodes=1`; several nodes need `strategy='ddp'`, for now without autoprec."
            )

    @property
    def precision_plugin(self) -> Precision:
        """The ``AutoPrecision`` plugin."""
        if not isinstance(self._precision_plugin, AutoPrecision):
            self._precision_plugin = AutoPrecision(base=self._precision_plugin)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        is_ours = isinstance(precision_plugin, AutoPrecision)
        self._precision_plugin = precision_plugin if is_ours else AutoPrecision(base=precision_plugin)


StrategyRegistry.register(
    AutoPrecisionStrategy.strategy_name, AutoPrecisionStrategy, "One device, steered by autoprec", override=True
)
