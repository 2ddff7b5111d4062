"""Faults from outside: kill -9, a full disk, a damaged copy of the run in memory."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from autoprec import NonFiniteTrainingError
from tests.chaos.fault import Effect, Fault
from tests.chaos.features import HAS_ROLLBACK
from tests.chaos.settings import SNAPSHOT_EVERY, Setting

if TYPE_CHECKING:
    from tests.chaos.invariants import Evidence


class Kill(Fault):
    """``kill -9`` at a point of a step, while a checkpoint is made, or after some milliseconds.

    It strikes only where ``is_armed``, which is in a process of its own.
    """

    effect = Effect.NONE
    HOOKS = ("on_after_backward", "on_train_batch_end", "on_save_checkpoint", "on_validation_batch_start")

    @classmethod
    def suits(cls, setting: Setting) -> bool:
        return setting.is_resumable and setting.saves_every > 0

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"place": chance.choice((*cls.HOOKS, "training_step", "clock")), "ms": chance.randint(100, 800)}

    def attach(self, scene: Any, module: LightningModule) -> None:
        super().attach(scene, module)
        if self.is_armed and self.options["place"] == "clock":
            signal.signal(signal.SIGALRM, lambda *args: self._die())
            signal.setitimer(signal.ITIMER_REAL, self.options["ms"] / 1000)

    def callbacks(self) -> Sequence[Callback]:
        # the run that goes through has the same hooks, which decide what is private
        place = self.options["place"]
        return [LambdaCallback(**{place: self._hook})] if place in self.HOOKS else []

    def _hook(self, trainer: Trainer, *args: Any) -> None:
        self._maybe_die(trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        if self.options["place"] == "training_step":
            self._maybe_die(index)
        return super().on_batch(index, batch, trainer)

    def _maybe_die(self, index: int) -> None:
        if self.is_armed and index >= self.batch:
            self._die()

    @staticmethod
    def _die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class DiskFull(Fault):
    """From one batch on, or from the end of training on, no file can grow beyond a few bytes (RLIMIT_FSIZE)."""

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"place": chance.choice(("training", "end")), "bytes": chance.choice((0, 1000))}

    @property
    def effect(self) -> Effect:  # type: ignore[override]
        return Effect.ANY if self.options["place"] == "training" else Effect.NONE

    def callbacks(self) -> Sequence[Callback]:
        return [LambdaCallback(on_train_end=lambda *args: self._fill())] if self.options["place"] == "end" else []

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        super().on_batch(index, batch, trainer)
        if index == self.batch and self.options["place"] == "training":
            self._fill()
        return batch

    def _fill(self) -> None:
        if not self.struck:
            self.strike()
            self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.options["bytes"], self._before[1]))

    def detach(self) -> None:
        if self.struck:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._before)

    def allows(self, error: BaseException) -> bool:
        is_saving = self.options["place"] == "training" and self.scene.setting.saves_every > 0
        return bool(self.struck) and is_saving and isinstance(error, OSError) and error.errno == errno.EFBIG


class CorruptSnapshot(Fault):
    """The copies of the run in host memory are damaged, and then a row of losses asks for one of them."""

    effect = Effect.ANY
    poisons = True
    _damaged = 0
    _is_late = False

    @classmethod
    def is_enabled(cls) -> bool:
        return HAS_ROLLBACK

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"windows": chance.choice((9, 12))}

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        super().on_batch(index, batch, trainer)
        callback = self.scene.callback
        if index == self.batch and callback is not None:
            self._damaged = damage(getattr(callback.plugin, "_rollback", None))
            self._is_late = callback.applied_steps > 2 * SNAPSHOT_EVERY
        return batch

    def complaints(self, evidence: Evidence) -> Iterator[str]:
        if self.struck and self._is_late and not self._damaged:
            yield "there was no copy of the run to damage"

    def on_loss(self, index: int, loss: Tensor) -> Tensor:
        if 0 <= index - self.batch < self.options["windows"] * self.scene.setting.accumulate:
            self.strike()
            return loss * float("nan")
        return loss

    def allows(self, error: BaseException) -> bool:
        return bool(self.struck) and isinstance(error, NonFiniteTrainingError)


def damage(holder: Any) -> int:
    """Overwrites the first bytes of every copy of a tensor that rollback holds; returns how many there were."""
    found = {id(tensor): tensor for tensor in _tensors_in(holder, 8)}
    for tensor in found.values():
        tensor.view(-1).view(torch.uint8)[:8].bitwise_not_()
    return len(found)


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.numel() and not value.requires_grad:
            yield value
        return
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (list, tuple, deque)):
        inside = value
    elif type(value).__module__ in ("autoprec.snapshots", "autoprec.rollback"):  # else live tensors would be among them
        inside = vars(value).values() if hasattr(value, "__dict__") else ()
    for item in inside if depth else ():
        yield from _tensors_in(item, depth - 1)
