"""The held-out loss of a module in the middle of its fit, measured so that the fit cannot tell.

A second module takes over the weights and a second Trainer validates it: the fit logs, draws and counts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from autoprec.envs.process_state import isolated
from autoprec.envs.training_setup import SetupSource, trainer_arguments
from autoprec.target_functions import fit_arguments


class HeldOut:
    """Measures held-out losses. The second module is made when it is first needed.

    Args:
        source: Makes modules and data.
        metric: Name of the loss; ``None`` for ``val_loss``, else the first metric with a loss in its name.

    Attributes:
        is_there: Whether validation gives a loss; ``None`` while that is not known.
    """

    def __init__(self, source: SetupSource, metric: str | None = None) -> None:
        self.is_there: bool | None = None
        self._source, self._metric = source, metric
        self._module: LightningModule | None = None
        self._loader = _WeightsOf()
        self._trainer: Trainer | None = None
        self._data: dict[str, Any] = {}

    def loss(self, trainer: Trainer, module: LightningModule) -> float:
        """Returns the held-out loss, NaN where validation gives none.

        Args:
            trainer: The Trainer of the fit.
            module: The module in training.

        Raises:
            ValueError: If the metric that was asked for was not logged.
        """
        if self.is_there is None and not trainer.enable_validation:
            self.is_there = False
            self._check_not_asked("there is no validation: a `validation_step` and a loader for it")
        if self.is_there is False:
            return math.nan
        with isolated():
            seed_everything(0, workers=True, verbose=False)  # what validation draws is always the same
            metrics = self._validate(module)
        name = self._chosen(metrics)
        self.is_there = name is not None
        return math.nan if name is None else float(metrics[name])

    def close(self) -> None:
        """Lets go of the second module and its data."""
        self._module = self._trainer = None
        self._data = {}

    def _validate(self, module: LightningModule) -> Mapping[str, Any]:
        if self._module is None or self._trainer is None:
            setup = self._source.build(0)
            arguments = {**trainer_arguments(setup.arguments, ()), "callbacks": [self._loader], "logger": False}
            self._module, self._trainer = setup.module, Trainer(**arguments)
            self._data = _validation_arguments(self._source.name, setup.data)
        self._loader.module = module
        try:
            self._trainer.validate(self._module, verbose=False, **self._data)
        finally:
            self._loader.module = None
        return self._trainer.callback_metrics

    def _chosen(self, metrics: Mapping[str, Any]) -> str | None:
        if self._metric is not None:
            if self._metric not in metrics:
                logged = ", ".join(sorted(metrics)) or "nothing"
                self._check_not_asked(f"validation logged {logged}")
            return self._metric
        return "val_loss" if "val_loss" in metrics else next((name for name in metrics if "loss" in name.lower()), None)

    def _check_not_asked(self, found: str) -> None:
        if self._metric is not None:
            raise ValueError(
                f"Passed `TrainingEnv(metric={self._metric!r})`, but {found}. Log it in `validation_step`, or leave"
                " `metric` out to go by the training loss where there is no held-out one."
            )


class _WeightsOf(Callback):
    """Loads the weights of another module when validation begins, when all parameters are there."""

    def __init__(self) -> None:
        self.module: LightningModule | None = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.module is not None:
            pl_module.load_state_dict(self.module.state_dict(), strict=pl_module.strict_loading)


def _validation_arguments(name: str, data: Any) -> dict[str, Any]:
    arguments = fit_arguments(name, data)
    if "datamodule" in arguments:
        return arguments
    loaders = arguments.get("val_dataloaders")
    return {} if loaders is None else {"dataloaders": loaders}
