"""The precision plugin: what happens to the forward, the backward and the step of a training batch.

It wraps the plugin that the Trainer would have used (its *base*) and adds: units in their formats, one finite check and
one global norm per step, the loss scale, the clip threshold, and a guard that never lets a non-finite gradient reach a
weight. What does not live here: what a fit has counted and decided (``steering``), who decides and when (``callback``).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from autoprec.action import Action
from autoprec.base import Base
from autoprec.bypass import StepGuard
from autoprec.config import AutoPrecisionConfig
from autoprec.gradients import Gradients
from autoprec.history import History
from autoprec.masks import clip_of, has_gradient_hooks, masks_of, restrict_for_bypass, restrict_for_lbfgs
from autoprec.plugins import base_format, check_base, loss_scale_of, sync_scaler
from autoprec.regions import evaluation_region, formats_region, recomputation_region
from autoprec.retry import StepRetry
from autoprec.settings import checked_settings
from autoprec.steering import STATE_VERSION, Steering, check_version
from autoprec.undo import StepUndo
from autoprec.units import find_units
from autoprec.wrapped import WrappedPrecision

_ANOMALY = (
    "This is `Trainer(detect_anomaly=True)`: without it autoprec would skip this step, because its gradient is not"
    " finite. In low precision such steps are normal. Leave `detect_anomaly` off, or look for a fault of the model in"
    " fp32."
)


class _StepSkipped(Exception):
    """Leaves ``optimizer.step`` from inside its closure, before anything was updated."""

    def __init__(self, result: Any) -> None:
        super().__init__("the step is skipped: a gradient is not finite")
        self.result = result


class AutoPrecision(WrappedPrecision):
    """Per-layer precision, loss scale, clipping and a finite-step guard for Lightning's Trainer.

    ``AutoPrecisionCallback`` installs it by itself. Alone, ``Trainer(plugins=[AutoPrecision({"*": "bf16"})])`` trains
    with a fixed map, the loss scale moving as GradScaler moves it and the guard on.

    Args:
        formats: Formats by unit name or pattern from the first window on, ``None`` for those of ``base``.
        base: The plugin whose precision is the starting point, also used in evaluation. Default: ``32-true``.
        config: Settings.
        knobs: Knobs that may be moved, out of ``"precision"``, ``"loss_scale"``, ``"batch_size"``, ``"clip"``. Without
            ``"precision"`` no layer is touched; with ``"clip"`` the threshold follows the running median of the
            gradient norm unless the Trainer has one. The guard is always on.
        eval_precision: ``"base"`` evaluates as the Trainer would without autoprec, ``"current"`` in the units' formats.

    Raises:
        ValueError: If ``formats`` or ``knobs`` hold unknown names.
        MisconfigurationException: If ``base`` does its own precision (TransformerEngine, bitsandbytes, DeepSpeed, XLA).
    """

    def __init__(
        self,
        formats: Mapping[str, str] | None = None,
        *,
        base: Precision | None = None,
        config: AutoPrecisionConfig | None = None,
        knobs: Sequence[str] = ("precision", "loss_scale"),
        eval_precision: Literal["base", "current"] = "base",
    ) -> None:
        self.settings = checked_settings(config, knobs, eval_precision)
        self.initial_formats = Action(precision=formats or {}).precision
        self.base = check_base(base or Precision())
        self.precision = self.base.precision
        self.steering: Steering | None = None
        self._gradients: dict[int, Gradients] = {}
        self._retry: StepRetry | None = None
        self._step_guard: StepGuard | None = None
        self._has_hooks = False
        self._overrides_clipping = False
        self._trainer_clip: tuple[Any, Any] = (None, None)
        self._is_in_batch: Callable[[], bool] = bool

    # ---- set-up ----

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Finds the units of the module in place; parameters and keys stay as they are."""
        module = self.base.convert_module(module)
        trainer = module._trainer if isinstance(module, pl.LightningModule) else None
        if isinstance(module, pl.LightningModule) and trainer is not None and trainer.state.fn == "fit":
            self.release()
            self.steering = self._steering_of(module, trainer)
            self._has_hooks = has_gradient_hooks(module, _callbacks_of(trainer))
            self._overrides_clipping = is_overridden("configure_gradient_clipping", module)
            self._trainer_clip = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
            self._is_in_batch = functools.partial(is_in_batch, trainer)
            if self.initial_formats:
                self.steering.apply(Action(precision=self.initial_formats), "initial formats")
                self.steering.warn_of_unknown_names()
            if "precision" not in self.steering.knobs.masked:
                self._retry = StepRetry(trainer.strategy, self.steering.prepare_retry)
        return module

    def _steering_of(self, root: pl.LightningModule, trainer: pl.Trainer) -> Steering:
        device = trainer.strategy.root_device
        return Steering(
            root,
            find_units(root, device, self.settings.config.granularity),
            device.type,
            self.settings.config,
            masks_of(root, trainer, self.base, self.settings.knobs),
            Base(str(self.base.precision), base_format(self.base), clip_of(trainer)),
            loss_scale_of(self.base, self.settings.config.loss_scale, "loss_scale" in self.settings.knobs),
            root.automatic_optimization,
        )

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Takes hold of optimizers and schedules once they exist."""
        steering = self._active  # `model` may be wrapped by the strategy here
        if steering is not None:
            if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
                restrict_for_lbfgs(steering.knobs)
            steering.schedules.attach(lr_schedulers, steering.is_automatic, self._is_in_batch)
            knobs = steering.knobs
            self._step_guard = StepGuard(
                steering.root, optimizers, knobs.loss_scale, functools.partial(restrict_for_bypass, knobs)
            )
        return self.base.connect(model, optimizers, lr_schedulers)

    def teardown(self) -> None:
        """Leaves module, schedules and the base plugin as they were found."""
        self.release()
        self.base.teardown()

    def release(self) -> None:
        """Ends the steering of a fit; may be called at any time, also twice. What was decided stays readable."""
        self._gradients.clear()
        if self._retry is not None:
            self._retry.remove()
            self._retry = None
        if self._step_guard is not None:
            self._step_guard.remove()
            self._step_guard = None
        if self.steering is not None and not self.steering.is_released:
            self.steering.release()
            sync_scaler(self.base, self.steering.knobs.loss_scale)

    @property
    def history(self) -> History:
        """Every decision of the current or latest fit."""
        return History() if self.steering is None else self.steering.history

    def precision_map(self) -> dict[str, str]:
        """Current format of every unit by name; empty before the first fit."""
        return {} if self.steering is None else self.steering.knobs.precision_map()

    @property
    def _active(self) -> Steering | None:
        """The steering of the fit under way."""
        return None if self.steering is None or self.steering.is_released else self.steering

    # ---- the base plugin keeps its jobs ----

    @property
    def scaler(self) -> Any:
        """The base plugin's GradScaler with the current loss scale, ``None`` if it has none; ``trainer.scaler``."""
        if self._active is not None:
            sync_scaler(self.base, self._active.knobs.loss_scale)
        return getattr(self.base, "scaler", None)

    # ---- forward ----

    def convert_input(self, data: Any) -> Any:
        """Delegates to the base plugin; called with each batch before its step."""
        data = self.base.convert_input(data)
        if self._active is not None:
            self._active.note_batch(data)
        return data

    @contextlib.contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Runs a training step in the units' formats."""
        steering = self._active
        if steering is None:
            with self.base.train_step_context():
                yield
            return
        steering.begin_step()
        steering.is_in_step = True
        try:
            with self.base.train_step_context(), formats_region(steering, is_training=True):
                yield
        finally:
            steering.is_in_step = False

    @contextlib.contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        """Runs a validation step in the base precision, or in the units' formats if asked to."""
        steering = self._active
        if steering is None or self.settings.eval_precision == "base":
            with self.base.val_step_context(), evaluation_region(steering):
                yield
            return
        with self.base.val_step_context(), formats_region(steering, is_training=False):
            yield

    # ---- backward ----

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Notes the loss and scales it."""
        steering = self._active
        if steering is not None:
            steering.backwards += 1
            # Lightning has divided the loss by the number of micro-batches
            parts = module.trainer.accumulate_grad_batches if steering.is_automatic else 1
            steering.telemetry.note_loss(tensor if parts == 1 else tensor * parts)
            self._rescale(steering)
            if steering.knobs.loss_scale.enabled:
                tensor = tensor * steering.knobs.loss_scale.scale
        return super().pre_backward(tensor, module)

    def _rescale(self, steering: Steering) -> None:
        """Takes back what the user's clipping between two backwards has unscaled; the step unscales everything."""
        for gradients in self._gradients.values():
            steering.note_rescaled(gradients.rescale_(steering.knobs.loss_scale.scale))
        self._gradients.clear()

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Runs the backward; recomputations see the formats of the forward."""
        steering = self._active
        if steering is None:
            self.base.backward(tensor, model, optimizer, *args, **kwargs)
            return
        with steering.scaled_backward(model), recomputation_region(steering):
            try:
                self.base.backward(tensor, model, optimizer, *args, **kwargs)
            except RuntimeError as error:
                if torch.is_anomaly_enabled() and "returned nan values" in str(error):
                    raise RuntimeError(f"{error} {_ANOMALY}") from error
                raise

    # ---- step ----

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Takes one optimizer step unless a gradient is not finite.

        The check runs inside the closure, after all hooks and clipping, so whatever the optimizer is, it has not
        updated anything yet. An optimizer that calls its closure again after an update is put back to where it was.
        """
        steering = self._active
        if steering is None:
            return self.base.optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        undo = StepUndo(optimizer)
        wrapped = functools.partial(self._checked_closure, steering, optimizer, model, closure, undo)
        try:
            with self._expecting_steps(True):
                result = optimizer.step(closure=wrapped, **kwargs)
        except _StepSkipped as skip:
            undo.restore()
            steering.schedules.note(optimizer, is_skipped=True)
            steering.on_skipped(self._gradients.pop(id(optimizer), None), _index(model.trainer, optimizer))
            return skip.result
        undo.learn()
        steering.schedules.note(optimizer, is_skipped=False)
        gradients = self._gradients.pop(id(optimizer), None)
        has_backward = steering.backwards > 0 or not steering.is_automatic
        if gradients is None or not gradients.parameters or not has_backward:
            steering.on_empty()
        else:
            steering.on_applied(gradients, _index(model.trainer, optimizer))
        return result

    def _checked_closure(
        self,
        steering: Steering,
        optimizer: Any,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        undo: StepUndo,
    ) -> Any:
        if undo.note_call() > 1:
            self._gradients.pop(id(optimizer), None)
        with self._expecting_steps(False):
            result = closure()
        is_clipped_by_user = id(optimizer) in self._gradients
        gradients = self._unscaled(steering, optimizer)
        if result is None and model.automatic_optimization and not gradients.parameters:
            steering.user_skipped_steps += 1
        trainer = model.trainer
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        # between the user's clipping and the step other code of the user ran
        leaves_traces = not self._has_hooks and not is_clipped_by_user
        gradients.after_foreign_code(leaves_traces, keeps_norms=is_clipped_by_user)
        self._clip(steering, model, optimizer)
        gradients.after_foreign_code(leaves_traces=not self._overrides_clipping, keeps_norms=True)
        if not gradients.is_finite:
            raise _StepSkipped(result)
        if steering.is_sampling and gradients.parameters:
            steering.sample(gradients)
        return result

    def _expecting_steps(self, is_expected: bool) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._step_guard is None else self._step_guard.expecting(is_expected)

    def _unscaled(self, steering: Steering, optimizer: Any) -> Gradients:
        """The optimizer's gradients, brought back to the unscaled loss exactly once per step."""
        known = self._gradients.get(id(optimizer))
        if known is not None:
            return known
        parameters = list(self.main_params(optimizer))
        gradients = Gradients(parameters, steering.knobs.loss_scale.inv_scale, steering.take_bare(parameters))
        self._gradients[id(optimizer)] = gradients
        return gradients

    def _clip(self, steering: Steering, model: pl.LightningModule, optimizer: Any) -> None:
        trainer = model.trainer
        value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if (value, algorithm) != self._trainer_clip:
            self._trainer_clip = (value, algorithm)
            steering.take_trainer_clip(value, algorithm != GradClipAlgorithmType.VALUE)
        if "clip" in steering.knobs.masked:
            self._clip_gradients(model, optimizer, value, gradient_clip_algorithm=algorithm)
        elif math.isfinite(steering.knobs.clip):
            # the module's own hook would refuse values other than the Trainer's; it is not overridden here
            self.clip_gradients(optimizer, steering.knobs.clip)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips unscaled gradients; called by Lightning, and by users under manual optimization.

        Args:
            optimizer: Whose gradients to clip.
            clip_val: Threshold, ``<= 0`` or ``None`` for off.
            gradient_clip_algorithm: By norm or by value.
        """
        if not clip_val or clip_val <= 0:
            return
        steering = self._active
        if steering is None:
            self.base.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
            return
        gradients = self._unscaled(steering, getattr(optimizer, "optimizer", optimizer))
        gradients.after_foreign_code(leaves_traces=True, keeps_norms=False)
        if not gradients.is_finite:
            return
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            gradients.clip_value_(clip_val)
        elif "clip" in steering.knobs.masked and gradients.are_dense:
            with gradients.foreign_clipping(clip_val):  # torch's own, which works in the dtype of the gradients
                self.clip_grad_by_norm(optimizer, clip_val)
        else:
            gradients.clip_norm_(clip_val)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs, as primitives."""
        return {"version": STATE_VERSION} if self.steering is None else self.steering.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` returned."""
        check_version(state_dict)
        if self.steering is not None and "knobs" in state_dict:
            self.steering.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes over the loss scale of a checkpoint that was written under static AMP; says what starts anew."""
        if type(self).__qualname__ in checkpoint or self._active is None:
            return
        scaler_state = checkpoint.get("MixedPrecision")
        if scaler_state:
            self._active.knobs.loss_scale.load_state_dict(scaler_state)
        rank_zero_warn(
            "The checkpoint has no autoprec state: formats start from the Trainer's precision and windows count from 0."
            + (" The loss scale goes on from the checkpoint's GradScaler." if scaler_state else "")
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leaves the loss scale where static AMP looks for it, so that it can go on from this checkpoint."""
        if self.steering is not None and getattr(self.base, "scaler", None) is not None:
            state = self.steering.knobs.loss_scale.state_dict()
            checkpoint["MixedPrecision"] = {key: value for key, value in state.items() if key != "enabled"}


def _callbacks_of(trainer: Any) -> Sequence[pl.Callback]:
    return list(trainer.callbacks)


def _index(trainer: Any, optimizer: object) -> int:
    return next((index for index, each in enumerate(trainer.optimizers) if each is optimizer), 0)


def is_in_batch(trainer: Any) -> bool:
    """Whether a training batch is under way, its hooks included."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.completed < progress.ready)
