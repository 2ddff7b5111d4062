"""The precision plugin: what happens to the forward, the backward and the step of a training batch.

It wraps the plugin that the Trainer would have used (its *base*) and adds: units in their formats, one finite check and
one global norm per step, the loss scale, the clip threshold, and a guard that never lets a non-finite gradient reach a
weight. What does not live here: what a fit has counted and decided (``steering``), who decides and when (``callback``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from autoprec.action import Action
from autoprec.applied import AppliedMap, is_applied
from autoprec.base import Base
from autoprec.config import AutoPrecisionConfig
from autoprec.history import History
from autoprec.masks import check_rule, clip_of, masks_of, restrict_for_lbfgs
from autoprec.plugins import base_format, check_base, loss_scale_of, sync_scaler
from autoprec.recovery import Recovery
from autoprec.regions import evaluation_region, formats_region, recomputation_region
from autoprec.retry import StepRetry
from autoprec.rollback import Rollback
from autoprec.saved_state import STATE_VERSION, check_version
from autoprec.settings import checked_settings
from autoprec.steering import Steering
from autoprec.stepping import Stepping
from autoprec.tiers import describe_unused
from autoprec.units import find_units
from autoprec.wrapped import WrappedPrecision

_ANOMALY = (
    "This is `Trainer(detect_anomaly=True)`: without it autoprec would skip this step, because its gradient is not"
    " finite. In low precision such steps are normal. Leave `detect_anomaly` off, or look for a fault of the model in"
    " fp32."
)
_NOTHING = contextlib.nullcontext()


class AutoPrecision(WrappedPrecision):
    """Per-layer precision, loss scale, clipping and a finite-step guard for Lightning's Trainer.

    ``AutoPrecisionCallback`` installs it by itself. Alone, ``Trainer(plugins=[AutoPrecision({"*": "bf16"})])`` trains
    with a fixed map, the loss scale moving as GradScaler moves it and the guard on. ``validate``, ``test`` and
    ``predict`` of a Trainer that has not trained compute in the map, too; after a fit ``eval_precision`` decides.

    Args:
        formats: Formats by unit name or pattern from the first window on, ``None`` for those of ``base``.
        base: The plugin whose precision is the starting point, also used in evaluation. Default: ``32-true``.
        config: Settings.
        knobs: Knobs that may be moved, out of ``"precision"``, ``"loss_scale"``, ``"batch_size"``, ``"clip"``. Without
            ``"precision"`` no layer is touched; with ``"clip"`` the threshold follows the running median of the
            gradient norm unless the Trainer has one. The guard is always on.
        eval_precision: ``"base"`` validates as the Trainer would without autoprec, units in fp32 that the guard has
            raised because they failed so; ``"current"`` in the units' formats. After a fit it counts for ``validate``,
            ``test`` and ``predict`` as well.

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
        self._recovery: Recovery | None = None
        self._retry: StepRetry | None = None
        self._stepping: Stepping | None = None
        self._rollback: Rollback | None = None
        self._applied: AppliedMap | None = None
        self.has_begun_batch = False  # so that it is not asked again before its step
        self._is_in_batch: Callable[[], bool] = bool
        self._is_last_batch: Callable[[], bool] = bool

    # ---- set-up ----

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Finds the units of the module in place; parameters and keys stay as they are."""
        module = self.base.convert_module(module)
        trainer = module._trainer if isinstance(module, pl.LightningModule) else None
        if isinstance(module, pl.LightningModule) and trainer is not None and trainer.state.fn != "fit":
            self.release()
            formats = self._formats_to_evaluate()
            self._applied = AppliedMap(module, formats, device=trainer.strategy.root_device) if formats else None
        elif isinstance(module, pl.LightningModule) and trainer is not None:
            self.release()
            _check_plain(module)
            self.steering = self._steering_of(module, trainer)
            self._is_in_batch = functools.partial(is_in_batch, trainer)
            self._is_last_batch = functools.partial(is_last_batch, trainer)
            if "precision" not in self.steering.knobs.masked:
                unused = describe_unused(self.settings.config.tiers, [*self.steering.knobs.units.values()])
                if unused is not None:
                    rank_zero_warn(unused)
            if self.initial_formats:
                self.steering.apply(Action(precision=self.initial_formats), "initial formats")
                self.steering.requests.warn_of_unknown_names()
            self._recovery = Recovery(self.steering)
            self._retry = StepRetry(trainer.strategy, self._recovery)
        return module

    def _formats_to_evaluate(self) -> Mapping[str, str]:
        """Formats of ``validate``, ``test`` and ``predict``."""
        if self.steering is None:
            return self.initial_formats or {}
        if self.settings.eval_precision == "base":
            return {}
        formats = self.steering.knobs.unit_formats
        return {name: each for name, each in formats.current.items() if name in formats.named}

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
        if steering is not None and self._recovery is not None:
            if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
                restrict_for_lbfgs(steering.knobs)
            check_rule(steering.config.batch.learning_rate, optimizers)
            steering.learning_rate.attach(optimizers)
            steering.schedules.attach(lr_schedulers, steering.is_automatic, self._is_in_batch, self._is_last_batch)
            self._stepping = Stepping(self, steering, optimizers, self._recovery)
            is_watching = steering.is_automatic and len(self.settings.knobs) > 0
            self._rollback = Rollback(steering, optimizers, lr_schedulers, is_watching, self._stepping.distrust)
        return self.base.connect(model, optimizers, lr_schedulers)

    def teardown(self) -> None:
        """Leaves module, schedules and the base plugin as they were found."""
        self.release()
        self.base.teardown()

    def release(self) -> None:
        """Ends the steering of a fit; may be called at any time, also twice. What was decided stays readable."""
        if self._applied is not None:
            self._applied.remove()
            self._applied = None
        if self._retry is not None:
            self._retry.remove()
            self._retry = self._recovery = None
        if self._rollback is not None:
            self._rollback.release()
        if self._stepping is not None:
            self._stepping.release()
            self._stepping = None
        if self.steering is not None and not self.steering.is_released:
            self.steering.release()
            sync_scaler(self.base, self.steering.knobs.loss_scale)

    @property
    def history(self) -> History:
        """Every decision of the current or latest fit."""
        return History() if self.steering is None else self.steering.history

    def precision_map(self) -> dict[str, str]:
        """Format asked of every unit by name; empty before the first fit. In a prediction, those that the map names."""
        if self._applied is not None:
            return dict(self._applied.formats)
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
            self.begin_batch()
            self.has_begun_batch = True
        return data

    def begin_batch(self) -> None:
        """Called before each batch of any stage: copies of the run are taken and used between training batches."""
        if self._rollback is not None:
            self._rollback.at_boundary()

    def end_training(self) -> None:
        """Called after the last training batch: training must not end on weights that are not finite."""
        if self._rollback is not None:
            self._rollback.at_end()

    @contextlib.contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Runs a training step in the units' formats."""
        steering = self._active
        self.has_begun_batch = False
        if steering is None:
            with self.base.train_step_context():
                yield
            return
        steering.begin_step()
        steering.is_in_step = True
        probe = steering.rounding
        looking = probe.region(steering.is_compiled) if probe.is_open else _NOTHING
        try:
            is_fast = self._stepping is not None and self._stepping.hand_out()
            with (
                self.base.train_step_context(),
                formats_region(steering, is_training=True, runs_on_copies=is_fast),
                looking,
            ):
                yield
        finally:
            steering.is_in_step = False

    @contextlib.contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        """Runs a validation step in the base precision but for what has failed in it, or in the units' formats."""
        steering = self._active
        self.has_begun_batch = False
        if self._stepping is not None:
            self._stepping.begin_evaluation()
        if self._applied is not None:
            with self.base.val_step_context(), self._applied.region():
                yield
            return
        if steering is None or self.settings.eval_precision == "base":
            with self.base.val_step_context(), evaluation_region(steering):
                yield
            return
        with self.base.val_step_context(), formats_region(steering, is_training=False):
            yield

    @contextlib.contextmanager
    def test_step_context(self) -> Generator[None, None, None]:
        """Runs a test step in the map of a Trainer that does not train, else in the base precision."""
        with self.base.test_step_context(), _NOTHING if self._applied is None else self._applied.region():
            yield

    @contextlib.contextmanager
    def predict_step_context(self) -> Generator[None, None, None]:
        """Runs a predict step as a test step."""
        with self.base.predict_step_context(), _NOTHING if self._applied is None else self._applied.region():
            yield

    # ---- backward ----

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Notes the loss and scales it."""
        steering = self._active
        if steering is not None:
            steering.backwards += 1
            # Lightning has divided the loss by the number of micro-batches
            parts = module.trainer.accumulate_grad_batches if steering.is_automatic else 1
            steering.runtime.record_loss(steering.telemetry.note_loss(tensor if parts == 1 else tensor * parts))
            if self._stepping is not None:
                self._stepping.rescale()
            if steering.knobs.loss_scale.enabled:
                tensor = tensor * steering.knobs.loss_scale.scale
        return super().pre_backward(tensor, module)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Runs the backward; recomputations see the formats of the forward."""
        steering = self._active
        if steering is None or self._stepping is None:
            self.base.backward(tensor, model, optimizer, *args, **kwargs)
            return
        scaled = steering.manual_scaling.scaled_backward(model)
        with scaled, recomputation_region(steering), self._stepping.backward(tensor):
            try:
                self.base.backward(tensor, model, optimizer, *args, **kwargs)
            except RuntimeError as error:
                if torch.is_anomaly_enabled() and "returned nan values" in str(error):
                    raise RuntimeError(f"{error} {_ANOMALY}") from error
                raise
        if steering.telemetry.noise.is_open:
            self._stepping.measure_micro_batch()

    # ---- step ----

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Takes one optimizer step unless a gradient is not finite."""
        if self._stepping is None:
            return self.base.optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        return self._stepping.take(optimizer, model, closure, **kwargs)

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
        if self._stepping is None:
            self.base.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        else:
            self._stepping.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs, as primitives."""
        if self.steering is None:
            return {"version": STATE_VERSION}
        state = self.steering.state_dict()
        return state if self._rollback is None else {**state, "rollback": self._rollback.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` returned."""
        check_version(state_dict)
        if self.steering is not None and "knobs" in state_dict:
            self.steering.load_state_dict(state_dict)
            if self._rollback is not None:
                self._rollback.load_state_dict(state_dict.get("rollback", {}))

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
            checkpoint["MixedPrecision"] = self.steering.knobs.loss_scale.scaler_state()


def _check_plain(module: nn.Module) -> None:
    if is_applied(module):
        raise MisconfigurationException(
            "A map is applied to this model for predictions (`autoprec.apply_map`), so it cannot be steered. Call"
            " `.remove()` on what `apply_map` returned, then `fit`."
        )


def is_in_batch(trainer: Any) -> bool:
    """Whether a training batch is under way, its hooks included."""
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.completed < progress.ready)


def is_last_batch(trainer: Any) -> bool:
    """Whether the training batch under way is the last one of its epoch."""
    return bool(trainer.is_last_batch)
