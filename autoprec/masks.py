"""Which knobs cannot be moved under a given module, Trainer and optimizer, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from autoprec.accumulation import why_no_accumulation
from autoprec.knobs import CLIPS_BY_VALUE, KNOBS, Knobs
from autoprec.learning_rate import why_not_rule
from autoprec.plugins import base_format


def masks_of(root: pl.LightningModule, trainer: pl.Trainer, base: Precision, wanted: Sequence[str]) -> dict[str, str]:
    """Returns the knobs that cannot be moved in a fit, accumulation among them, each with the reason.

    Args:
        root: The module.
        trainer: Its Trainer.
        base: The base plugin.
        wanted: Knobs that the user lets move.
    """
    masks: dict[str, str] = {knob: "it is not in `knobs`" for knob in KNOBS if knob not in wanted}
    alone = masks.get("batch_size") or why_no_accumulation(root, trainer)
    if alone is not None:
        masks["accumulate"] = alone
    if base_format(base) is None:
        masks["precision"] = f"the Trainer runs in {base.precision}, which fixes the format of every layer"
        masks.setdefault("loss_scale", f"the Trainer runs in {base.precision}")
    if not root.automatic_optimization:
        masks.setdefault("clip", "under manual optimization clipping is the module's own business")
    elif is_overridden("configure_gradient_clipping", root):
        masks.setdefault("clip", "the module overrides `configure_gradient_clipping`")
    elif trainer.gradient_clip_val and trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        masks.setdefault("clip", CLIPS_BY_VALUE)
    return masks


def check_rule(rule: str, optimizers: Sequence[Any]) -> None:
    """Refuses a rule for the learning rate that the optimizers of a run do not fit.

    Raises:
        MisconfigurationException: With the reason.
    """
    reason = why_not_rule(rule, optimizers)
    if reason is not None:
        raise MisconfigurationException(
            f"Passed `BatchConfig(learning_rate={rule!r})` with an optimizer that it does not fit: {reason}. Choose"
            " 'none', 'sqrt', 'linear' or 'adascale', or another optimizer."
        )


def restrict_for_lbfgs(knobs: Knobs) -> None:
    """LBFGS evaluates its closure several times a step, on which a loss scale cannot act."""
    if knobs.uses_fp16 or knobs.loss_scale.enabled:
        raise MisconfigurationException(
            "fp16 and the LBFGS optimizer exclude each other: fp16 needs a loss scale, which cannot act inside LBFGS's"
            " line search. Choose bf16 or fp32, or another optimizer."
        )
    forbid_loss_scale(knobs, "LBFGS evaluates its closure several times a step and excludes a loss scale")
    if "clip" not in knobs.masked:
        knobs.masked["clip"] = "LBFGS compares gradients of several closure calls, which clipping would distort"
        knobs.threshold.leave()


def forbid_loss_scale(knobs: Knobs, reason: str) -> None:
    """Keeps fp16, and with it the loss scale, out of a fit that does without so far.

    Args:
        knobs: Knobs of the fit.
        reason: Why.
    """
    knobs.masked["loss_scale"] = knobs.restrictions["fp16"] = reason
    for unit in knobs.units.values():
        unit.legal = tuple(name for name in unit.legal if name != "fp16")


def restrict_for_bypass(knobs: Knobs, reason: str) -> None:
    """Keeps a loss scale away from steps that nobody would unscale; where it is masked, fp16 may run without one.

    Args:
        knobs: Knobs of the fit.
        reason: What steps how.
    """
    if "loss_scale" not in knobs.masked:
        forbid_loss_scale(knobs, reason)


def clip_of(trainer: pl.Trainer) -> float | None:
    """Returns the Trainer's clip threshold on the norm, ``None`` if it has none."""
    value = trainer.gradient_clip_val
    is_norm = trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE
    return float(value) if value and value > 0 and is_norm else None
