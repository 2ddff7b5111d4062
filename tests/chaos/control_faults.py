"""Faults of those who steer: controllers that fail, and requests at any time, legal and not."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from autoprec import Action, AutoPrecisionCallback, Controller
from tests.chaos.fault import Asked, Effect, Fault
from tests.chaos.features import HAS_TIME_LIMIT
from tests.chaos.models import BATCHES
from tests.chaos.settings import Setting

if TYPE_CHECKING:
    from tests.chaos.invariants import Evidence

HANG_S = 30.0  # a run that waits for it is killed by the campaign's own limit


class Erratic(Controller):
    """Begins with a map, and decides nothing until its fault has it do something.

    Args:
        first: Its first map.
        fault: ``None`` for a healthy one.
    """

    name = "erratic"
    looks = False

    def __init__(self, first: Mapping[str, str] | None, fault: BadController | None = None) -> None:
        self._first = first
        self._fault = fault

    def initial_map(self) -> Mapping[str, str] | None:
        return self._first

    def step_action(self, window: int) -> Action | None:
        return None if self._fault is None else self._fault.on_script(window)

    def decide(self, observation: Any) -> Any:
        return None if self._fault is None else self._fault.on_decision(observation)

    def reasons(self) -> Any:
        return {} if self._fault is None else self._fault.on_reasons()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._fault is None else self._fault.on_save()


class BadController(Fault):
    """A controller that raises, returns what it must not return, or does not answer."""

    KINDS: ClassVar[tuple[str, ...]] = (
        "raises",
        "script raises",
        "state",
        "garbage",
        "shape",
        "nan",
        "moves",
        "action",
        "reasons",
    )
    # what these return is an answer, parts of which are legal
    ANSWERS: ClassVar[tuple[str, ...]] = ("action",)

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        return {"kind": chance.choice(cls.KINDS), "is_for_good": chance.random() < 0.5}

    @property
    def effect(self) -> Effect:  # type: ignore[override]
        return Effect.ANY if self.options["kind"] in self.ANSWERS else Effect.NONE

    def _is_due(self) -> bool:
        if self.index < self.batch or (self.struck and not self.options["is_for_good"]):
            return False
        self.strike()
        return True

    def on_script(self, window: int) -> Action | None:
        if self.options["kind"] == "script raises" and self._is_due():
            raise ValueError("injected into step_action")
        return None

    def on_save(self) -> dict[str, Any]:
        return {"array": np.zeros(2)} if self.options["kind"] == "state" and self._is_due() else {}

    def on_reasons(self) -> Any:
        return {"net.0": object()} if self.options["kind"] == "reasons" and self._is_due() else {}

    def on_decision(self, observation: Any) -> Any:
        kind = self.options["kind"]
        if kind in ("script raises", "state", "reasons") or not self._is_due():
            return None
        if kind == "raises":
            raise ValueError("injected into decide")
        answers: dict[str, Any] = {
            "garbage": "lower everything",
            "shape": np.ones(len(observation) + 1),
            "nan": np.full(len(observation), np.nan),
            "moves": np.full(len(observation), 7),
            "action": Action(precision={"nowhere": "bf16", "*": "fp16"}, loss_scale=-1.0, clip=math.nan, batch_size=-2),
        }
        return answers[kind]

    def complaints(self, evidence: Evidence) -> Iterator[str]:
        kind = self.options["kind"]
        if not self.struck:
            return
        knobs = {decision.knob for decision in evidence.history if decision.outcome == "refused"}
        if not knobs & ({"precision", "clip", "loss_scale"} if kind in self.ANSWERS else {"policy"}):
            # what a masked knob is asked for by a policy is left out of the record
            if kind in self.ANSWERS and not evidence.setting.knobs:
                return
            yield f"the controller's fault ({kind}) is not on record"


class HangingController(BadController):
    """A controller that does not answer within the limit."""

    KINDS = ("hangs",)

    @classmethod
    def is_enabled(cls) -> bool:
        return HAS_TIME_LIMIT

    def on_decision(self, observation: Any) -> Any:
        if self._is_due():
            threading.Event().wait(HANG_S)

    def on_script(self, window: int) -> Action | None:
        return None


class Request(Fault):
    """``callback.request`` from somewhere in the user's code."""

    PLACES = (
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    )
    survives_restart = True
    LEGAL: Mapping[str, Sequence[Any]] = {
        "precision": ({"*": "bf16"}, {"*": "fp16"}, {"*": "int8"}, {"*": "fp32"}, {"*.0": "fp8"}, {"n*": "bf16"}),
        "loss_scale": (1.0, 256.0, 2.0**20, 1e30),
        "clip": (0.5, 5.0, math.inf),
    }
    ILLEGAL: Mapping[str, Sequence[Any]] = {
        "precision": ({"nowhere": "bf16"},),
        "loss_scale": (0.0, -1.0, math.nan, math.inf),
        "clip": (0.0, -1.0, math.nan),
    }

    @classmethod
    def draw(cls, chance: random.Random, setting: Setting) -> dict[str, Any]:
        is_legal = chance.random() < 0.6
        values = cls.LEGAL if is_legal else cls.ILLEGAL
        fields = chance.sample(sorted(values), chance.randint(1, len(values)))
        action = {name: chance.choice(values[name]) for name in fields}
        return {"action": action, "is_legal": is_legal, "place": chance.choice(cls.PLACES)}

    @property
    def effect(self) -> Effect:  # type: ignore[override]
        return Effect.ANY if self.options["is_legal"] else Effect.NONE

    def callbacks(self) -> Sequence[Callback]:
        place = self.options["place"]
        return [] if place == "training_step" else [LambdaCallback(**{place: self._hook})]

    def _hook(self, trainer: Trainer, *args: Any) -> None:
        self.index = trainer.fit_loop.epoch_loop.total_batch_idx
        self._ask()

    def on_batch(self, index: int, batch: Any, trainer: Trainer) -> Any:
        super().on_batch(index, batch, trainer)
        if self.options["place"] == "training_step":
            self._ask()
        return batch

    def _ask(self) -> None:
        # at the end of the epoch of its batch, and not of a later one: a resumed run must not ask again
        reach = BATCHES if self.options["place"] == "on_train_epoch_end" else 1
        if self.struck or not 0 <= self.index - self.batch < reach:
            return
        self.strike()
        callback: AutoPrecisionCallback | None = self.scene.callback
        if callback is not None:
            action = Action(**self.options["action"])
            self.scene.asked.append(Asked(action, self.scene.window))
            callback.request(action)


class SizeRequest(Request):
    """The same for batch size and accumulation."""

    LEGAL = {"batch_size": (4, 8, 16, 32, 10**6), "accumulate": (1, 2, 4)}
    ILLEGAL = {"batch_size": (0, -3), "accumulate": (0, -1)}
