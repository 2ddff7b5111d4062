"""What a fault is: something that strikes at one batch of a run, and what must follow from it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from autoprec import Action, AutoPrecisionCallback
from tests.chaos.settings import Setting

if TYPE_CHECKING:
    from tests.chaos.invariants import Evidence


class Effect(IntEnum):
    """What a fault may do to what was learnt, compared with the same run without it."""

    NONE = 0  # not a bit
    RECOVERABLE = 1  # less than another seed
    ANY = 2


@dataclass
class Asked:
    """A request and the window in which it was made."""

    action: Action
    window: int


@dataclass
class Scene:
    """What faults act on, and what they note down.

    Args:
        setting: What is trained.
        folder: Where files of the run go.
        callback: ``None`` where the run goes without.
    """

    setting: Setting
    folder: Path
    callback: AutoPrecisionCallback | None
    raised: list[BaseException] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    @property
    def window(self) -> int:
        """Index of the current window."""
        steering = None if self.callback is None else self.callback.steering
        return 0 if steering is None else steering.window


class Fault:
    """One fault; the base class does nothing.

    Args:
        batch: Training batch that it strikes at, counted over epochs.
        options: What its ``draw`` returned.

    Attributes:
        effect: What may become of what is learnt.
        poisons: Whether gradients of the windows that it struck are not finite.
        survives_restart: Whether a run that is killed and resumed meets the same fault again.
        leaves_out: Whether the batches that it strikes have no loss, with or without the callback.
        ends_fit: Whether it usually ends the fit.
        struck: Batches that it struck.
        is_armed: Whether this process may be killed.
    """

    effect: Effect = Effect.RECOVERABLE
    poisons: bool = False
    survives_restart: ClassVar[bool] = False
    leaves_out: ClassVar[bool] = False
    ends_fit: ClassVar[bool] = False

    def __init__(self, batch: int, **options: Any) -> None:
        self.batch = batch
        self.options = options
        self.struck: set[int] = set()
        self.index = -1
        self.is_armed = False
        self.scene: Scene

    # ---- what a schedule draws ----

    @classmethod
    def is_enabled(cls) -> bool:
        """Whether this version of autoprec answers the fault."""
        return True

    @classmethod
    def suits(cls, setting: Setting) -> bool:
        """Whether the fault can strike in a setting."""
        return True

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        """Returns options, as JSON holds them."""
        return {}

    # ---- what it does in a run ----

    def attach(self, scene: Scene, module: LightningModule) -> None:
        """Called before the Trainer is made."""
        self.scene = scene

    def callbacks(self) -> Sequence[Callback]:
        """Returns callbacks of the user's that it needs."""
        return ()

    def detach(self) -> None:
        """Called after the fit, whatever came of it."""

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        """Called at the beginning of each training step, again where the step is repeated."""
        self.index = index
        return batch

    def on_loss(self, index: int, loss: Tensor) -> Tensor:
        """Called with each loss."""
        return loss

    def strike(self) -> None:
        """Notes that it has struck at the current batch."""
        self.struck.add(self.index)

    def throw(self, error: BaseException) -> None:
        """Raises and notes down what was raised."""
        self.strike()
        self.scene.raised.append(error)
        raise error

    # ---- what must follow ----

    def allows(self, error: BaseException) -> bool:
        """Whether an error that no fault raised by itself may end the fit because of it."""
        return False

    def complaints(self, evidence: Evidence) -> Iterator[str]:
        """Yields what should have followed in the counters or the record and did not."""
        yield from ()
