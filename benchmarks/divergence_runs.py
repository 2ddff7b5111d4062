"""One run of a recipe of the divergence study, what it leaves, and whether it survived."""

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

from autoprec import AutoPrecisionCallback, NonFiniteTrainingError
from benchmarks.convergence_runs import quiet
from benchmarks.divergence_models import Study
from benchmarks.divergence_recipes import Recipe

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
        if self._at_tail is not None:
            self.moved_share = float((weights != self._at_tail).float().mean())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reads what was logged."""
        if not trainer.sanity_checking:
            self.val_loss = float(trainer.callback_metrics["val_loss"])


def _flat(module: pl.LightningModule) -> Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in module.parameters()])


def trainer_options(precision: str) -> dict[str, Any]:
    """Arguments of a Trainer that really runs in a precision; on a CPU Lightning turns 16-mixed into bf16-mixed."""
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    return {"precision": precision}


def run(recipe: Recipe, arm: str, seed: int) -> dict[str, Any]:
    """Trains once and returns what JSON can hold.

    Args:
        recipe: What is trained.
        arm: ``fp32``, ``clean``, ``static`` or ``autoprec``.
        seed: Seed of the first weights and of the order of the samples.
    """
    precision = {"static": recipe.static, "autoprec": recipe.autoprec or recipe.static}.get(arm, "32-true")
    material = recipe.clean if arm == "clean" and recipe.clean is not None else recipe.material
    train, held_out = material(seed)
    torch.manual_seed(seed)
    module = recipe.module()
    plain = copy.deepcopy(module).eval()
    watch = Watch(recipe.steps)
    callback = AutoPrecisionCallback(**recipe.settings, verbose=False) if arm == "autoprec" else None
    started = time.process_time()
    options = {**recipe.options, **trainer_options(precision)}
    trainer, error = _fit(module, watch, callback, train, held_out, recipe.batch_size, options)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    undone = getattr(callback, "undone_windows", 0)
    return {
        "precision": precision,
        "steps": recipe.steps,
        "final_loss": _finite_or_none(_evaluate(plain, module, held_out)),
        "val_loss": _finite_or_none(watch.val_loss),
        "error": error,
        "steps_lost": recipe.steps - watch.moved + undone,
        "last_moved": watch.last_moved,
        "moved_share": round(watch.moved_share, 4),
        "nonfinite_step": watch.nonfinite_step,
        "nonfinite_weights": _nonfinite(module.named_parameters()),
        "nonfinite_buffers": _nonfinite(module.named_buffers()),
        "loss_scale": None if scaler is None else float(scaler.get_scale()),
        "skipped_steps": None if callback is None else callback.skipped_steps,
        "undone_steps": undone,
        "map": None if callback is None else callback.precision_map(),
        "decisions": None if callback is None else _decisions(callback),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def _fit(
    module: Study,
    watch: Watch,
    callback: AutoPrecisionCallback | None,
    train: Any,
    held_out: tuple[Tensor, ...],
    batch_size: int,
    options: dict[str, Any],
) -> tuple[pl.Trainer, str | None]:
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a recipe is meant to go wrong
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            num_sanity_val_steps=0,
            callbacks=[watch, *([] if callback is None else [callback])],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        try:
            trainer.fit(module, DataLoader(train, batch_size=batch_size), DataLoader([held_out], batch_size=None))
        except (NonFiniteTrainingError, RuntimeError) as stopped:
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


def _decisions(callback: AutoPrecisionCallback) -> list[str]:
    """What was done in the run, the first of each kind, for the table and for whoever reads the file."""
    kinds: dict[tuple[Any, ...], str] = {}
    for one in callback.history:
        text = f"{one.step}: {one.knob} {one.unit or ''} {one.before} -> {one.applied} ({one.outcome}: {one.reason})"
        kinds.setdefault((one.knob, one.unit, one.applied if one.knob == "precision" else None), text)
    return list(kinds.values())
