"""One run of a recipe of the divergence study, and what is left of it.

Every run is a real ``Trainer.fit``. The final loss is that of the weights on held-out data in float32 outside the
Trainer, so that no way of training is judged in its own format; that the Trainer's own validation is finite is noted
beside it.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from autoprec import AutoPrecisionCallback
from benchmarks.convergence_runs import quiet
from benchmarks.divergence_models import Study
from benchmarks.divergence_recipes import BATCH_SIZE, Arm, Recipe
from benchmarks.survival import answers

SCALE = 2.0**16
"""Where GradScaler starts."""


class Watch(pl.Callback):
    """Notes after each step whether weights moved, and since when something is not finite.

    Attributes:
        moved: Steps after which at least one weight was another number than before, all of them finite.
        last_moved: The last of these, counted from 1, 0 for none.
        moved_share: Share of the weights that the last tenth of the run moved at all.
        nonfinite_step: First step, counted from 1, after which a weight was not finite.
        val_loss: What the Trainer's own validation found at the end.
    """

    def __init__(self, steps: int) -> None:
        self.moved = 0
        self.last_moved = 0
        self.moved_share = 0.0
        self.nonfinite_step: int | None = None
        self.val_loss: float | None = None
        self._tail = steps - steps // 10
        self._before: Tensor | None = None
        self._at_tail: Tensor | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keeps the first weights."""
        self._before = _flat(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compares."""
        weights, step = _flat(pl_module), batch_idx + 1
        assert self._before is not None
        if not bool(weights.isfinite().all()):
            self.nonfinite_step = self.nonfinite_step or step
        elif not torch.equal(weights, self._before):
            self.moved, self.last_moved = self.moved + 1, step
        self._before = weights
        if step == self._tail:
            self._at_tail = weights
        elif self._at_tail is not None:
            self.moved_share = float((weights != self._at_tail).float().mean())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads what was logged."""
        if not trainer.sanity_checking:
            self.val_loss = float(trainer.callback_metrics["val_loss"])


def _flat(module: pl.LightningModule) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in module.parameters()])


def precision_options(precision: str) -> dict[str, Any]:
    """Arguments of a Trainer that really runs in a precision; on a CPU Lightning turns 16-mixed into bf16-mixed."""
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    return {"precision": precision}


def run(recipe: Recipe, arm: Arm, seed: int) -> dict[str, Any]:
    """Trains once and returns what JSON can hold.

    Args:
        recipe: What is trained.
        arm: How.
        seed: Seed of the first weights and of the order of the samples.
    """
    material = recipe.clean if arm.is_clean and recipe.clean is not None else recipe.material
    train, held_out = material(recipe.steps * BATCH_SIZE, seed)
    torch.manual_seed(seed)
    module = recipe.module()
    plain = copy.deepcopy(module).eval()
    watch = Watch(recipe.steps)
    callback = AutoPrecisionCallback(verbose=False) if arm.is_steered else None
    started = time.process_time()
    trainer, error = _fit(module, [watch] if callback is None else [watch, callback], train, held_out, recipe, arm)
    found = {
        "steps": recipe.steps,
        "final_loss": _finite_or_none(_evaluate(plain, module, held_out)),
        "val_loss": _finite_or_none(watch.val_loss),
        "error": error,
        "steps_lost": recipe.steps - watch.moved,
        "last_moved": watch.last_moved,
        "moved_share": round(watch.moved_share, 4),
        "largest_weight": _finite_or_none(float(_flat(module).abs().max())),
        "nonfinite_step": watch.nonfinite_step,
        "nonfinite_weights": _nonfinite(module.named_parameters()),
        "nonfinite_buffers": _nonfinite(module.named_buffers()),
        "loss_scale": _loss_scale(trainer),
        "cpu_seconds": round(time.process_time() - started, 1),
    }
    return found if callback is None else found | _of_callback(callback, recipe.steps - watch.moved)


def _of_callback(callback: AutoPrecisionCallback, steps_lost: int) -> dict[str, Any]:
    undone = getattr(callback, "undone_windows", 0)
    return {
        "steps_lost": steps_lost + undone,
        "undone_steps": undone,
        "skipped_steps": callback.skipped_steps,
        "map": callback.precision_map(),
        "answers": answers(callback.history),
    }


def _loss_scale(trainer: pl.Trainer) -> float | None:
    scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else float(scaler.get_scale())


def _fit(
    module: Study, callbacks: list[Any], train: Any, held_out: tuple[Tensor, ...], recipe: Recipe, arm: Arm
) -> tuple[pl.Trainer, str | None]:
    clip = {} if arm.clip is None else {"gradient_clip_val": arm.clip}
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a recipe is meant to go wrong
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # lightning 2.6.6 with torch 2.13
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            num_sanity_val_steps=0,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{**recipe.options, **clip},
            **precision_options(arm.precision),
        )
        whole: Any = [held_out]
        try:
            trainer.fit(module, DataLoader(train, batch_size=BATCH_SIZE), DataLoader(whole, batch_size=None))
        except RuntimeError as stopped:
            return trainer, f"{type(stopped).__name__}: {stopped}"
    return trainer, None


def _evaluate(plain: Study, module: Study, held_out: tuple[Tensor, ...]) -> float:
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        return float(plain.held_out_loss(held_out))


def _nonfinite(tensors: Any) -> list[str]:
    return [name for name, tensor in tensors if tensor.is_floating_point() and not bool(tensor.isfinite().all())]


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
