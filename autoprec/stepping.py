"""One optimizer step: closure, unscaling, hooks, finite check, clipping, and a kernel in place of the update.

A step is *private* where nobody can look at gradients between the backward and the end of the batch: then they stay as
the backward left them, and one factor (inverse loss scale times clip factor) goes into the kernel. Else they are fp32,
unscaled and clipped in place, in ``.grad``, and the kernel takes them from there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import SGD, Optimizer

from autoprec.bypass import Expecting, StepGuard
from autoprec.fast_path import FastPath
from autoprec.fused import FusedStep, TorchsStep, is_fusible
from autoprec.gradients import ADDED_BY_TORCH, Gradients
from autoprec.masks import restrict_for_bypass
from autoprec.memory_errors import is_out_of_memory
from autoprec.moments import narrow_moments
from autoprec.onlookers import Onlookers, has_step_hooks
from autoprec.recovery import Recovery
from autoprec.steering import Steering
from autoprec.undo import StepUndo

Closure = Callable[[], Any]


class _StepSkipped(Exception):
    """Leaves ``optimizer.step`` from inside its closure, before anything was updated."""

    def __init__(self, result: Any) -> None:
        super().__init__("the step is skipped: a gradient is not finite, or the window is lost")
        self.result = result


class Stepping:
    """Takes the optimizer steps of one fit.

    Args:
        plugin: The precision plugin in whose name steps are taken.
        steering: State of the fit.
        optimizers: All optimizers of the Trainer.
        recovery: Decides what happens when memory runs out.
    """

    def __init__(
        self, plugin: Precision, steering: Steering, optimizers: Sequence[Optimizer], recovery: Recovery
    ) -> None:
        root = steering.root
        assert isinstance(root, pl.LightningModule)
        trainer = root.trainer
        self._plugin = plugin
        self._steering = steering
        self._gradients: dict[int, Gradients] = {}
        self._onlookers = Onlookers(root, trainer, (trainer.strategy, getattr(plugin, "base", plugin)))
        self._overrides_clipping = is_overridden("configure_gradient_clipping", root)
        self._trainer_clip = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        self._is_in_closure = False
        self._is_without_loss = False
        self._has_torchs_step = {id(each): TorchsStep(each) for each in optimizers}
        self._latest: Gradients | None = None
        knobs = steering.knobs
        self._guard = StepGuard(root, optimizers, knobs.loss_scale, functools.partial(restrict_for_bypass, knobs))
        is_fused = steering.config.fused_step and "precision" not in knobs.masked
        self._fused = {id(each): FusedStep(each) for each in optimizers if is_fused and is_fusible(each)}
        self._optimizers = list(optimizers)
        if steering.config.second_moment != "fp32":
            masked = knobs.masked.get("precision")
            moments, steering.wide_reason = narrow_moments(optimizers, self._fused, steering.config, masked)
            for key, fused_step in self._fused.items():
                fused_step.moments = moments.get(key)
        self._fast_path: FastPath | None = None
        self._recovery = recovery
        recovery.drop_gradients = self.drop_gradients

    def release(self) -> None:
        """Ends everything that lasts as long as a fit."""
        self._guard.remove()
        for fused in self._fused.values():
            if fused.moments is not None:
                fused.moments.release()
                fused.moments = None
        self._gradients.clear()
        self._end_privacy()

    def _end_privacy(self) -> None:
        if self._fast_path is not None:
            self._fast_path.release()  # of the memory that gradients are about to take
            self._fast_path = None
        # Lightning has emptied `.grad` for a validation
        if self._latest is not None and not self._steering.root.trainer.validating:  # type: ignore[union-attr]
            with torch.no_grad():
                self._latest.show()
        self._latest = None

    def _choose_privacy(self) -> None:
        """Called when training begins, which others may have prepared for, and when somebody has joined or left."""
        self._end_privacy()
        steering, others = self._steering, self._onlookers
        steering.onlooker = others.name
        if self._fused and others.name is None and steering.is_automatic:
            fused = self._fused[id(self._optimizers[0])]
            self._fast_path = FastPath(steering.root, steering.knobs, fused, others.run_between)
        steering.costs.keeps_copies = steering.costs.is_wanted and self._fast_path is not None

    # ---- forward and backward ----

    def hand_out(self) -> bool:
        """Gives layers the copies that they run on in the training step that begins.

        Returns:
            Whether the classes of layers must be swapped for it.
        """
        steering = self._steering
        if self._onlookers.have_changed():
            self._choose_privacy()
        self._latest = None  # before the forward, whose activations they would add to
        if self._fast_path is None or steering.trial is not None or steering.is_compiled:
            return False
        if any(map(has_step_hooks, self._optimizers)):
            self._fast_path.distrust()  # they may have written weights
        return self._fast_path.hand_out()

    def begin_evaluation(self) -> None:
        """Called at each validation step: Lightning has emptied ``.grad``, and weights may have been swapped."""
        self._latest = None
        self.distrust()

    def distrust(self) -> None:
        """Called where weights were written: low-precision copies of them are written anew before the next step."""
        if self._fast_path is not None:
            self._fast_path.distrust()

    @contextlib.contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Surrounds a backward from a loss."""
        if self._fast_path is None:
            yield
            return
        table = self._fast_path.table
        self._fast_path.look_at_graph(loss)
        with table.open(loss):
            yield
        self._fast_path.take_back()
        if self._is_in_closure:
            table.merge()
        else:
            table.materialize()

    def measure_micro_batch(self) -> None:
        """Called after a backward where the noise scale is being measured."""
        steering = self._steering
        factor = steering.knobs.loss_scale.inv_scale * self._parts
        parameters = list(self._plugin.main_params(self._optimizers[0]))
        steering.telemetry.noise.note_micro_batch(steering.rows, parameters, factor, is_last=self._is_in_closure)

    @property
    def _parts(self) -> int:
        """By how many micro-batches Lightning divides a loss."""
        return int(self._steering.root.trainer.accumulate_grad_batches)  # type: ignore[union-attr,arg-type]

    def rescale(self) -> None:
        """Takes back what the user's clipping between two backwards has unscaled; the step unscales everything."""
        for gradients in self._gradients.values():
            self._steering.manual_scaling.note_rescaled(gradients.rescale_(self._steering.knobs.loss_scale.scale))
        self._gradients.clear()

    def drop_gradients(self) -> None:
        """Lets go of all gradients, wherever they are, and of what holds the graph."""
        self._gradients.clear()
        self._latest = None
        if self._fast_path is not None:  # its layers are taken back before the next step, when the graph is gone
            self._fast_path.table.clear()
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        for parameter in itertools.chain(self._steering.root.parameters(), *groups):
            parameter.grad = None

    # ---- step ----

    def take(self, optimizer: Any, model: pl.LightningModule, closure: Closure, **kwargs: Any) -> Any:
        """Takes one optimizer step unless a gradient is not finite.

        The check runs inside the closure, after all hooks and clipping, so whatever the optimizer is, it has not
        updated anything yet. An optimizer that calls its closure again after an update is put back to where it was.
        """
        steering = self._steering
        if steering.is_lost:  # an earlier micro-batch did not fit, and this one does not run
            return self._end_lost_window(optimizer, closure())
        fused = self._fused.get(id(optimizer))
        undo, outer = StepUndo(optimizer), sys.exc_info()[1]
        self._is_without_loss = False
        wrapped = functools.partial(self._checked_closure, optimizer, model, closure, undo)
        rates = steering.learning_rate
        try:
            with Expecting(True), contextlib.nullcontext() if fused is None else fused.standing_in():
                if rates.is_neutral:
                    result = optimizer.step(closure=wrapped, **kwargs)
                else:
                    result = rates.take(optimizer, wrapped, **kwargs)
        except _StepSkipped as skip:
            undo.restore()
            if steering.is_lost:
                return self._end_lost_window(optimizer, skip.result)
            steering.schedules.note(optimizer, is_skipped=True)
            gradients = self._gradients.pop(id(optimizer), None)
            steering.on_skipped(gradients, _index(model.trainer, optimizer))
            self._forget(gradients)
            return skip.result
        except Exception as error:
            if not is_out_of_memory(error, outer) or not self._goes_on_after(error, outer, undo):
                raise
            return self._end_lost_window(optimizer, None)
        undo.learn()
        if fused is not None and fused.updated:
            steering.kernel_steps += 1
            steering.narrow_steps += fused.moments is not None and fused.moments.has_stepped
        if fused is not None and self._fast_path is not None:
            self._fast_path.note_step()
            steering.copied_layers = len(self._fast_path.layers)
        steering.schedules.note(optimizer, is_skipped=False)
        gradients = self._gradients.pop(id(optimizer), None)
        has_backward = steering.backwards > 0 or not steering.is_automatic
        if gradients is None or not gradients.parameters or not has_backward:
            steering.on_empty(is_by_user=self._is_without_loss)
        else:
            steering.on_applied(gradients, _index(model.trainer, optimizer))
        self._forget(gradients)
        return result

    def _goes_on_after(self, error: Exception, outer: BaseException | None, undo: StepUndo) -> bool:
        """Whether the run goes on after memory ran out in ``optimizer.step``."""
        is_automatic = self._steering.is_automatic
        if is_automatic and undo.is_in_closure:
            return False  # it was asked where it was raised
        is_undone = undo.take_back()
        self._recovery.note_broken_step(is_undone)
        # under manual optimization the training step, which called this, is left as a whole
        return is_undone and is_automatic and self._recovery.lose_window(error, outer)

    def _end_lost_window(self, optimizer: Any, result: Any) -> Any:
        """Ends a window that was lost to memory, without a step."""
        self._steering.schedules.note(optimizer, is_skipped=True)
        self._steering.on_empty()
        return result

    def _forget(self, gradients: Gradients | None) -> None:
        if self._fast_path is None:
            return
        self._fast_path.table.clear()
        if gradients is not None:
            gradients.hide()
            self._latest = gradients

    def _checked_closure(self, optimizer: Any, model: pl.LightningModule, closure: Closure, undo: StepUndo) -> Any:
        steering = self._steering
        calls = undo.note_call()
        if calls > 1:
            self._gradients.pop(id(optimizer), None)
        with Expecting(False):
            self._is_in_closure = True
            try:
                result = closure()
            finally:
                self._is_in_closure = False
        if not steering.is_lost:
            self._get_ready(optimizer, model, result, is_first_call=calls == 1)
        if steering.is_lost:
            raise _StepSkipped(result)
        undo.is_in_closure = False
        return result

    def _get_ready(self, optimizer: Any, model: pl.LightningModule, result: Any, is_first_call: bool) -> None:
        """Prepares the update, which follows; nothing was written yet."""
        outer = sys.exc_info()[1]
        try:
            self._check(optimizer, model, result, is_first_call)
        except Exception as error:
            is_ours = model.automatic_optimization and is_out_of_memory(error, outer)
            if not is_ours or not self._recovery.lose_window(error, outer):
                raise

    def _check(self, optimizer: Any, model: pl.LightningModule, result: Any, is_first_call: bool) -> None:
        """Unscales, lets hooks run, clips, and leaves the step if a gradient is not finite."""
        is_clipped_by_user = id(optimizer) in self._gradients
        gradients = self._unscaled(optimizer, model.trainer)
        self._measure(optimizer, gradients, is_first_call)
        self._is_without_loss = result is None and model.automatic_optimization and not gradients.parameters
        call._call_callback_hooks(model.trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(model.trainer, "on_before_optimizer_step", optimizer)
        # between the user's clipping and the step other code of the user ran
        leaves_traces = not self._onlookers.write_gradients and not is_clipped_by_user
        gradients.after_foreign_code(leaves_traces, keeps_norms=is_clipped_by_user)
        self._clip(model, optimizer)
        gradients.after_foreign_code(leaves_traces=not self._overrides_clipping, keeps_norms=True)
        is_usable = gradients.is_finite if isinstance(optimizer, SGD) else gradients.has_finite_squares
        if not is_usable:
            raise _StepSkipped(result)
        self._arm(optimizer, gradients)

    def _measure(self, optimizer: Any, gradients: Gradients, is_first_call: bool) -> None:
        """Looks at gradients in detail where a decision will rest on them."""
        steering, noise = self._steering, self._steering.telemetry.noise
        if noise.is_open and is_first_call:
            grads = dict(zip(map(id, gradients.parameters), gradients.grads(), strict=True))
            noise.note_step(list(self._plugin.main_params(optimizer)), grads, gradients.factor * self._parts)
        if steering.is_sampling and gradients.parameters and gradients.is_finite:
            steering.sample(gradients, optimizer)

    def _arm(self, optimizer: Any, gradients: Gradients) -> None:
        """Lets the kernel take the step, if it can."""
        fused = self._fused.get(id(optimizer))
        if fused is None:
            return
        if not gradients.is_private:
            # hooks may have given gradients to further parameters
            pairs = [(parameter, parameter.grad) for parameter in fused.parameters() if parameter.grad is not None]
            fused.plan([parameter for parameter, _ in pairs], [grad for _, grad in pairs], are_in_grad=True)
        fused.arm(gradients.factor)

    def _unscaled(self, optimizer: Any, trainer: Any) -> Gradients:
        """The optimizer's gradients, brought back to the unscaled loss exactly once per step."""
        known = self._gradients.get(id(optimizer))
        if known is not None:
            return known
        steering, inv_scale = self._steering, self._steering.knobs.loss_scale.inv_scale
        parameters = list(self._plugin.main_params(optimizer))
        gradients = None
        is_known = id(optimizer) in self._fused  # it may have been replaced in mid-run
        if self._fast_path is not None and is_known and self._is_private(optimizer, trainer):
            gradients = self._private(optimizer, parameters, self._fast_path, inv_scale)
        if gradients is None:
            if self._fast_path is not None:
                self._fast_path.table.materialize()
            gradients = Gradients(parameters, inv_scale, steering.manual_scaling.take_bare(parameters))
        self._gradients[id(optimizer)] = gradients
        return gradients

    def _is_private(self, optimizer: Any, trainer: Any) -> bool:
        """Whether nobody looks at the gradients of this very step."""
        if trainer.gradient_clip_val and _is_by_value(trainer.gradient_clip_algorithm):
            return False
        if has_step_hooks(optimizer) or not self._has_torchs_step[id(optimizer)]():
            return False
        # else one product of scale and clip factor would round otherwise than one after the other
        return math.frexp(self._steering.knobs.loss_scale.scale)[0] == 0.5

    def _private(
        self, optimizer: Any, parameters: Sequence[Any], fast_path: FastPath, inv_scale: float
    ) -> Gradients | None:
        held = fast_path.table.held
        pairs = [(p, grad) for p in parameters if (grad := held.get(id(p), p.grad)) is not None]
        parameters, grads = [p for p, _ in pairs], [grad for _, grad in pairs]
        if not self._fused[id(optimizer)].plan(parameters, grads):
            return None
        return Gradients(parameters, inv_scale, private=grads)

    # ---- clipping ----

    def _clip(self, model: pl.LightningModule, optimizer: Any) -> None:
        trainer, steering = model.trainer, self._steering
        value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if (value, algorithm) != self._trainer_clip:
            self._trainer_clip = (value, algorithm)
            steering.take_trainer_clip(value, not _is_by_value(algorithm))
        if "clip" in steering.knobs.masked:
            self._plugin._clip_gradients(model, optimizer, value, gradient_clip_algorithm=algorithm)
        elif math.isfinite(steering.knobs.clip):
            # the module's own hook would refuse values other than the Trainer's; it is not overridden here
            self._plugin.clip_gradients(optimizer, steering.knobs.clip)

    def clip_gradients(self, optimizer: Any, clip_val: int | float, algorithm: GradClipAlgorithmType) -> None:
        """Clips unscaled gradients.

        Args:
            optimizer: Whose gradients to clip.
            clip_val: Threshold, > 0.
            algorithm: By norm or by value.
        """
        optimizer = getattr(optimizer, "optimizer", optimizer)
        gradients = self._unscaled(optimizer, self._steering.root.trainer)
        gradients.after_foreign_code(leaves_traces=True, keeps_norms=False)
        if not gradients.is_finite:
            return
        if _is_by_value(algorithm):
            gradients.clip_value_(clip_val)
        elif "clip" in self._steering.knobs.masked and not self._fused and gradients.are_dense:
            with gradients.foreign_clipping(clip_val):  # torch's own, which works in the dtype of the gradients
                self._plugin.clip_grad_by_norm(optimizer, clip_val)
        else:
            knobs = self._steering.knobs
            is_own = knobs.threshold.follows_median and clip_val == knobs.clip
            gradients.clip_norm_(clip_val, not self._fused, 0.0 if is_own else ADDED_BY_TORCH)


def _is_by_value(algorithm: Any) -> bool:
    # most are the very object, and comparing these strings without regard to case takes time
    return algorithm is not GradClipAlgorithmType.NORM and algorithm == GradClipAlgorithmType.VALUE


def _index(trainer: Any, optimizer: object) -> int:
    return next((index for index, each in enumerate(trainer.optimizers) if each is optimizer), 0)
