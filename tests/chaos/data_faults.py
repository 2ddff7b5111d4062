"""Faults in what is computed: inf and NaN in inputs, activations, gradients and losses, outliers, no loss at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from autoprec import NonFiniteTrainingError
from tests.chaos.fault import Effect, Fault, Scene
from tests.chaos.settings import MAX_SKIPS, Setting

if TYPE_CHECKING:
    from tests.chaos.invariants import Evidence

BAD = ("inf", "-inf", "nan")


class _Poison(Fault):
    poisons: bool = True
    survives_restart: ClassVar[bool] = True

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"value": chance.choice(BAD), "where": round(chance.random(), 3)}

    @property
    def value(self) -> float:
        return float(self.options["value"])

    def pick(self, among: Any) -> Any:
        items = list(among)
        return items[int(self.options["where"] * len(items))]


class BadInput(_Poison):
    """One entry of the batch is not finite."""

    @classmethod
    def suits(cls, setting: Setting) -> bool:
        return setting.model != "gpt"  # whose input are integers

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        super().on_batch(index, batch, trainer)
        if index != self.batch:
            return batch
        self.strike()
        x = batch[0].clone()
        x.view(-1)[int(self.options["where"] * x.numel())] = self.value
        return [x, *batch[1:]]


class BadActivation(_Poison):
    """The output of a layer is multiplied by something that is not finite, in a hook of the user's."""

    def attach(self, scene: Scene, module: LightningModule) -> None:
        super().attach(scene, module)
        leaves = [part for part in module.modules() if next(part.children(), None) is None]
        self._handle = self.pick(leaves).register_forward_hook(self._hook)

    def detach(self) -> None:
        self._handle.remove()

    def _hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.index != self.batch or not module.training:
            return None
        self.strike()
        if isinstance(output, tuple):
            return (output[0] * self.value, *output[1:])
        return output * self.value


class BadGradient(_Poison):
    """One entry of one gradient is not finite, by a hook of the user's."""

    def attach(self, scene: Scene, module: LightningModule) -> None:
        super().attach(scene, module)
        self._handle = self.pick(module.parameters()).register_hook(self._hook)

    def detach(self) -> None:
        self._handle.remove()

    def _hook(self, gradient: Tensor) -> Tensor | None:
        if self.index != self.batch:
            return None
        self.strike()
        gradient = gradient.clone()
        gradient.view(-1)[0] = self.value
        return gradient


class HugeGradient(BadGradient):
    """One entry of one gradient is finite, and its square may not be."""

    effect = Effect.ANY
    poisons = False

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {**super().draw(chance, setting), "value": chance.choice((1e15, 1e20, 1e30, 3e38))}

    def allows(self, error: BaseException) -> bool:
        return bool(self.struck) and isinstance(error, NonFiniteTrainingError)


class BadLoss(_Poison):
    """The loss is not finite, for one window or for several."""

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"value": chance.choice(BAD), "windows": chance.choice((1, 1, 2, MAX_SKIPS + 1, 2 * MAX_SKIPS + 2))}

    def attach(self, scene: Scene, module: LightningModule) -> None:
        super().attach(scene, module)
        # a long row of lost steps of a short run is more than noise
        self.effect = Effect.RECOVERABLE if self.options["windows"] <= 2 else Effect.ANY

    def on_loss(self, index: int, loss: Tensor) -> Tensor:
        if 0 <= index - self.batch < self.options["windows"] * self.scene.setting.accumulate:
            self.strike()
            return loss * self.value
        return loss


class Outliers(Fault):
    """A batch of the usual form that is ten thousand times as large, or so large that squares leave fp32."""

    effect = Effect.ANY
    survives_restart: ClassVar[bool] = True

    @classmethod
    def suits(cls, setting: Setting) -> bool:
        return setting.model != "gpt"

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        # from 1e19 on the variance that BatchNorm keeps is inf, while gradients are finite: docs/behaviour.md, limits
        larger = (1e10,) if setting.model == "cnn" else (1e10, 1e19, 1e30)
        return {"factor": chance.choice((1e4, 1e4, 1e4, *larger))}

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        super().on_batch(index, batch, trainer)
        if index != self.batch:
            return batch
        self.strike()
        return [batch[0] * self.options["factor"], *batch[1:]]

    def allows(self, error: BaseException) -> bool:
        return bool(self.struck) and isinstance(error, NonFiniteTrainingError)  # the step was finite and ruinous


class NoLoss(Fault):
    """The user leaves a step out."""

    survives_restart: ClassVar[bool] = True
    leaves_out: ClassVar[bool] = True
    accumulate = 1  # in force where it struck, which a request may have changed

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        super().on_batch(index, batch, trainer)
        if index != self.batch:
            return batch
        self.strike()
        self.accumulate = int(trainer.accumulate_grad_batches)
        return None

    def complaints(self, evidence: Evidence) -> Iterator[str]:
        is_whole_window = self.accumulate == 1 and evidence.setting.model != "gan"
        if self.struck and is_whole_window and evidence.error is None and not evidence.user_skipped:
            yield "a window without a loss was not counted as skipped by the user"
