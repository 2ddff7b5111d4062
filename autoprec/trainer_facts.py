"""What the callback reads from a Trainer."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from autoprec.plugins import check_base
from autoprec.precision import AutoPrecision
from autoprec.run_length import EpochPlan, RunLength


def check_trainer(trainer: Any) -> None:
    """Refuses what autoprec cannot run under.

    Raises:
        MisconfigurationException: For the Trainer of another package, several processes, or a precision plugin that
            does its own precision.
    """
    if not isinstance(trainer, pl.Trainer):
        raise MisconfigurationException(
            f"AutoPrecisionCallback belongs to `lightning.pytorch`, but the Trainer is a"
            f" `{type(trainer).__module__}.{type(trainer).__qualname__}`. The two packages do not mix: gradients would"
            " silently not be clipped. Import Trainer and LightningModule from `lightning.pytorch`."
        )
    if trainer.world_size > 1:
        raise MisconfigurationException(
            f"AutoPrecisionCallback runs on one process, but `Trainer(strategy=..., devices=...)` starts"
            f" {trainer.world_size}. Use `devices=1`, or train without the callback."
        )
    if not isinstance(trainer.strategy.precision_plugin, AutoPrecision):
        check_base(trainer.strategy.precision_plugin)


def check_alone(trainer: Any, kind: type) -> None:
    """Refuses several callbacks of a kind in one Trainer.

    Raises:
        MisconfigurationException: If there is more than one.
    """
    names = [type(callback).__qualname__ for callback in trainer.callbacks if isinstance(callback, kind)]
    if len(names) > 1:
        raise MisconfigurationException(
            f"Passed `Trainer(callbacks=[...])` with {' and '.join(f'`{name}`' for name in names)}, which would steer"
            " the same layers. Choose one."
        )


def check_idle(trainer: Any) -> None:
    """Refuses a callback that another Trainer is using.

    Raises:
        MisconfigurationException: If the fit of ``trainer`` is under way.
    """
    if trainer.state.status == TrainerStatus.RUNNING:
        raise MisconfigurationException(
            "One AutoPrecisionCallback was given to two Trainers, and the fit of the first is under way. Make one for"
            " each."
        )


def log_interval(trainer: Any) -> int:
    """Steps between two logged values; set by a connector where type checkers do not see it."""
    return int(trainer.log_every_n_steps)


def progress(trainer: pl.Trainer) -> float:
    """Share of the fit that is over, 0 to 1; NaN if its end is not known."""
    if trainer.max_steps and trainer.max_steps > 0:
        return min(trainer.global_step / trainer.max_steps, 1.0)
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    if not epochs or epochs < 0 or not batches or math.isinf(batches):
        return math.nan
    done = trainer.current_epoch + trainer.fit_loop.epoch_loop.batch_progress.current.ready / batches
    return min(done / epochs, 1.0)


def learning_rate(trainer: pl.Trainer) -> float:
    """The largest learning rate of all optimizers, as their schedules have set it; NaN where none has one."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [float(group["lr"]) for group in groups if group.get("lr") is not None]  # some optimizers find their own
    return max(rates, default=math.nan)


def has_adaptive_optimizer(trainer: pl.Trainer) -> bool:
    """Whether an optimizer divides by the gradients' own size, as Adam, Adagrad, RMSprop and others with an epsilon."""
    return any("eps" in group for optimizer in trainer.optimizers for group in optimizer.param_groups)


def expected_training_s(trainer: Any, done: int, step_s: float) -> float:
    """Seconds that a fit trains in all; as long again as it has, where its end is not known.

    Args:
        trainer: The Trainer.
        done: Optimizer steps that are over.
        step_s: Seconds of a step.
    """
    left = RunLength.of(trainer, EpochPlan.of(trainer)).steps()
    left_s = step_s * (done if left is None else left)
    limits = [callback.time_remaining() for callback in trainer.callbacks if isinstance(callback, Timer)]
    return done * step_s + min([left_s, *(limit for limit in limits if limit is not None)])


def is_over(trainer: pl.Trainer) -> bool:
    """Whether the epoch that has just ended was the last."""
    epochs, steps = trainer.max_epochs, trainer.max_steps
    return (epochs is not None and -1 < epochs <= trainer.current_epoch + 1) or -1 < steps <= trainer.global_step


def first_epoch(trainer: Any) -> int | None:
    """Index of the epoch that a fit begins with, ``None`` if it goes on in the middle of one."""
    progress = trainer.fit_loop.epoch_progress.current
    is_inside = trainer.fit_loop.restarting or progress.started > progress.processed
    return None if is_inside else int(progress.processed)


def loader_batch_size(trainer: Any) -> int | None:
    """Batch size of the loader in use, ``None`` if it is not known."""
    loader = getattr(trainer, "train_dataloader", None)
    size = getattr(loader, "batch_size", None)
    return size if isinstance(size, int) else None
