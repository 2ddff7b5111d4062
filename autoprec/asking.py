"""Asks a controller what it wants; its fault must not end the user's run.

What lives here: the questions, the checks of the answers, and what becomes of an exception. What does not: when a
question is due and who carries out the answer (``callback``), and what controllers answer (``controller``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from autoprec.action import Action
from autoprec.controller import Controller, checked_reasons, checked_state
from autoprec.encoding import decode, encode
from autoprec.history import Decision
from autoprec.knobs import Knobs, steered_units
from autoprec.precision import AutoPrecision
from autoprec.readings import GlobalReading, UnitReading

T = TypeVar("T")


class Answer(NamedTuple):
    """What a controller decided.

    Attributes:
        action: What it asks for, without masked knobs; ``None`` for nothing.
        reasons: Why, by unit name or ``"clip"``.
        is_move: Whether these are moves, relative to what is there.
    """

    action: Action | None
    reasons: Mapping[str, str] = MappingProxyType({})
    is_move: bool = False


class Asking:
    """Puts questions to a controller; its first exception is recorded and warned of, all of them count as no answer.

    Args:
        controller: Who is asked.
        plugin: Knows the fit, if one is under way.

    Attributes:
        is_scripted: Whether it has something to say about single windows. Asking costs a copy of the random states,
            which steps without a script need not pay.
    """

    def __init__(self, controller: Controller, plugin: AutoPrecision) -> None:
        self.is_scripted = type(controller).step_action is not Controller.step_action
        self._controller = controller
        self._plugin = plugin
        self._has_failed = False

    def start(self, knobs: Knobs) -> None:
        """Tells the controller which units there are."""
        units = steered_units(knobs)
        self._ask(lambda: self._controller.start([u.name for u in units], [knobs.steerable(u) for u in units]))

    def first_map(self) -> Action | None:
        """Returns what it wants to begin with."""
        return self._ask(lambda: Action(precision=self._controller.initial_map()))

    def for_epoch(self, epoch: int) -> Action | None:
        """Returns what it wants from an epoch on."""
        return self._ask(lambda: _checked(self._controller.epoch_action(epoch)))

    def for_window(self, window: int) -> Action | None:
        """Returns what it wants from a window on."""
        return self._ask(lambda: _checked(self._controller.step_action(window)))

    def decide(self, units: Sequence[UnitReading], run: GlobalReading, masked: Collection[str]) -> Answer:
        """Returns what it decides.

        Args:
            units: Readings of the units.
            run: The run's reading.
            masked: Knobs that cannot be moved.
        """
        observation = encode(units, run)
        answer = self._ask(lambda: self._controller.decide(observation))
        if is_move := answer is not None and not isinstance(answer, Action):
            moves: Any = answer
            answer = self._ask(lambda: decode(moves, units, run))
        reasons = self._ask(lambda: checked_reasons(self._controller.reasons())) or {}
        return Answer(_without_masked(answer, masked), reasons, is_move)

    def state(self) -> dict[str, Any]:
        """Returns the controller's state, as a checkpoint may hold it."""
        return self._ask(lambda: checked_state(self._controller.state_dict())) or {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Gives the controller the state that a checkpoint held."""
        self._ask(lambda: self._controller.load_state_dict(state))

    def _ask(self, question: Callable[[], T]) -> T | None:
        steering = self._plugin.steering
        device_type = "cpu" if steering is None else steering.runtime.device_type
        try:
            with isolate_rng(), torch.no_grad(), torch.autocast(device_type, enabled=False):
                return question()
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                reason = f"{type(error).__name__}: {error}"
                window = 0 if steering is None else steering.window
                self._plugin.history.append(Decision(window, "policy", None, None, None, None, "refused", reason))
                rank_zero_warn(
                    f"autoprec: policy {self._controller.name!r} failed ({reason}); the run goes on without it."
                )
            return None


def _checked(action: Any) -> Action | None:
    if action is not None and not isinstance(action, Action):
        raise TypeError(f"a policy must return an `autoprec.Action` or None, not {action!r}")
    return action


def _without_masked(action: Action | None, masked: Collection[str]) -> Action | None:
    """Drops what a policy asks of masked knobs; only explicit requests are worth a line in the record."""
    if action is None:
        return None
    return Action(
        precision=None if "precision" in masked else action.precision,
        loss_scale=None if "loss_scale" in masked else action.loss_scale,
        clip=None if "clip" in masked else action.clip,
        batch_size=None if "batch_size" in masked else action.batch_size,
        accumulate=None if "accumulate" in masked else action.accumulate,
    )
