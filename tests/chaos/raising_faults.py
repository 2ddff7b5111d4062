"""Faults that raise: out of memory, optimizers, hooks of the user's, Ctrl-C. What was raised must reach the user."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tests.chaos.fault import Effect, Fault
from tests.chaos.features import HAS_MEMORY_RECOVERY
from tests.chaos.models import BATCH
from tests.chaos.settings import Setting

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_batch_start",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
)


class _InStep(Fault):
    """Raises in the forward or the backward of one step, once."""

    effect = Effect.ANY
    ends_fit: ClassVar[bool] = True
    _loss_hooks = 0

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"place": chance.choice(("forward", "backward"))}

    def error(self) -> BaseException:
        raise NotImplementedError

    def is_due(self, batch: Any) -> bool:
        return self.index == self.batch and not self.struck

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        super().on_batch(index, batch, trainer)
        self._is_due = self.is_due(batch)
        if self._is_due and self.options["place"] == "forward":
            self.throw(self.error())
        return batch

    def on_loss(self, index: int, loss: Tensor) -> Tensor:
        if self._is_due and self.options["place"] == "backward" and loss.requires_grad:
            self._is_due = False
            loss = loss * 1.0
            loss.register_hook(lambda *args: self.throw(self.error()))
        return loss


class OutOfMemory(_InStep):
    """The device's error, or the CPU allocator's; once, or whenever a batch is larger than at the beginning."""

    ends_fit: ClassVar[bool] = not HAS_MEMORY_RECOVERY
    WORDS = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
        " allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
    )

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        kinds = {"kind": chance.choice(("device", "cpu")), "is_once": chance.random() < 0.6}
        return {**super().draw(chance, setting), **kinds}

    def error(self) -> BaseException:
        if self.options["kind"] == "device":
            return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return RuntimeError(self.WORDS)

    def is_due(self, batch: Any) -> bool:
        return super().is_due(batch) if self.options["is_once"] else len(batch[0]) > BATCH


class Interrupt(_InStep):
    """Ctrl-C inside a step."""

    def error(self) -> BaseException:
        return KeyboardInterrupt()


class StepRaises(_InStep):
    """An error of the user's inside a step."""

    def error(self) -> BaseException:
        return ValueError("injected into training_step")


class OptimizerRaises(Fault):
    """An optimizer's hook raises before or after its update."""

    effect = Effect.ANY
    ends_fit: ClassVar[bool] = True
    _handle: RemovableHandle | None = None

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"place": chance.choice(("before", "after"))}

    def detach(self) -> None:
        if self._handle is not None:  # the fit may have ended before the optimizer's step
            self._handle.remove()
            self._handle = None

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        super().on_batch(index, batch, trainer)
        if index == self.batch and not self.struck:
            optimizer = trainer.optimizers[self.options.get("optimizer", 0)]
            if self.options["place"] == "before":
                self._handle = optimizer.register_step_pre_hook(self._raise)
            else:
                self._handle = optimizer.register_step_post_hook(self._raise)
            self.strike()
        return batch

    def _raise(self, *args: Any) -> None:
        self.detach()
        self.throw(RuntimeError("injected into the optimizer"))


class HookRaises(Fault):
    """A hook of a callback of the user's raises, or somebody presses Ctrl-C in it."""

    effect = Effect.ANY
    ends_fit: ClassVar[bool] = True

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"hook": chance.choice(HOOKS), "is_interrupt": chance.random() < 0.3}

    def callbacks(self) -> Sequence[Callback]:
        return [LambdaCallback(**{self.options["hook"]: self._hook})]

    def _hook(self, trainer: Trainer, *args: Any) -> None:
        if self.struck or trainer.sanity_checking or trainer.fit_loop.epoch_loop.total_batch_idx < self.batch:
            return
        self.throw(KeyboardInterrupt() if self.options["is_interrupt"] else ValueError("injected into a hook"))
