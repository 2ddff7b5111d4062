"""Early stopping on the loss that the model has in its current formats.

Time budget: 5 s.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import EarlyStopping

from autoprec import Action, AutoPrecisionCallback, ScriptedController
from tests.small_fits import Full, loader, quiet, seed


def fit(name: str, eval_precision: Literal["base", "current"], epochs: int = 12) -> tuple[EarlyStopping, Any]:
    """Trains in fp32 but for the formats of epoch 4 on, which are asked for at its beginning."""
    seed(3)
    script = ScriptedController(epochs={4: Action(precision={"*": name})})
    callback = AutoPrecisionCallback(script, eval_precision=eval_precision, verbose=False)
    stopping = EarlyStopping("val_loss", patience=3, min_delta=0.0)
    trainer = quiet(max_epochs=epochs, callbacks=[callback, stopping], num_sanity_val_steps=0)
    trainer.fit(Full(torch_adam), loader(64), loader(64))
    return stopping, trainer


def torch_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-6)


def test_the_loss_of_the_quantised_model_stops_a_run_that_the_loss_in_fp32_lets_go_on() -> None:
    on_quantised, stopped = fit("int8", "current")
    on_base, went_on = fit("int8", "base")
    # after the change the quantised model is not better than the best before; the weights themselves still improve
    assert on_base.stopped_epoch == 0
    assert went_on.current_epoch == 12
    assert on_quantised.stopped_epoch > 4
    assert stopped.current_epoch < 12
    assert math.isfinite(float(on_quantised.best_score))
