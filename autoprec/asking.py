"""Asks a controller what it wants; its fault must not end the user's run.

What lives here: the questions, the checks of the answers, and what becomes of an exception or of no answer. What does
not: when a question is due and who carries out the answer (``callback``), the thread in which other people's
controllers answer (``question_thread``), and what controllers answer (``controller``).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng

from autoprec.action import Action
from autoprec.controller import Controller, checked_reasons, checked_state
from autoprec.encoding import decode, encode, with_proposal
from autoprec.history import Decision
from autoprec.knobs import Knobs, steered_units
from autoprec.planning import ModelFacts
from autoprec.precision import AutoPrecision
from autoprec.question_thread import LateAnswerError, QuestionThread
from autoprec.readings import GlobalReading, UnitReading

T = TypeVar("T")

_QUESTIONS = (
    *("start", "initial_map", "step_action", "epoch_action"),
    *("decide", "reasons", "state_dict", "load_state_dict"),
    *("note_facts", "wants_errors", "notes", "propose"),
)
_LONGEST_REASON = 500


class Answer(NamedTuple):
    """What a controller decided.

    Attributes:
        action: What it asks for, without masked knobs; ``None`` for nothing.
        reasons: Why, by name of the unit or knob.
        is_move: Whether it is relative to what is there, as moves are.
    """

    action: Action | None
    reasons: Mapping[str, str] = MappingProxyType({})
    is_move: bool = False


class _FailedError(Exception):
    """Why there is no answer; caused by what the controller raised.

    Attributes:
        details: What it raised, with its traceback.
    """

    def __init__(self, reason: str, details: str) -> None:
        super().__init__(reason)
        self.details = details


class Asking:
    """Puts questions to a controller. A fault counts as no answer; the first one is recorded and warned of.

    A controller that is not one of autoprec's answers in a thread of its own under a time limit. If it exceeds the
    limit, it is not asked again, which is recorded and warned of, too.

    Args:
        controller: Who is asked.
        plugin: Knows the fit, if one is under way.

    Attributes:
        is_scripted: Whether it has something to say about single windows. Asking costs a copy of the random states,
            which steps without a script need not pay.
        is_indifferent: Whether it is one of autoprec's own that ignores observations, so that none need be made: one
            takes as long as a small step.
    """

    def __init__(self, controller: Controller, plugin: AutoPrecision) -> None:
        self.is_scripted = _answers(controller, "step_action")
        self._controller = controller
        self._plugin = plugin
        self._has_failed = False
        limit_s = plugin.settings.config.decision_timeout_s
        self._thread = QuestionThread("autoprec-policy", limit_s) if is_foreign(controller) else None
        self.is_indifferent = self._thread is None and not controller.looks

    def end(self) -> None:
        """Ends the controller's thread, if there is one; called when a fit is over."""
        if self._thread is not None:
            self._thread.end()

    def start(self, knobs: Knobs) -> None:
        """Tells the controller which units there are."""
        units = steered_units(knobs)
        names, legal = [unit.name for unit in units], [knobs.steerable(unit) for unit in units]
        self._ask("start", lambda: self._controller.start(names, legal))

    def note_facts(self, facts: ModelFacts) -> None:
        """Tells it what is known about the model.

        Args:
            facts: What is known.
        """
        self._ask("note_facts", lambda: self._controller.note_facts(facts))

    def wants_errors(self) -> bool:
        """Returns whether it wants errors to be measured before the next decision."""
        is_asked = _answers(self._controller, "wants_errors")
        return is_asked and bool(self._ask("wants_errors", self._controller.wants_errors))

    def notes(self) -> list[str]:
        """Returns what it has to say at the end."""
        if not _answers(self._controller, "notes"):
            return []
        return self._ask("notes", lambda: [str(line) for line in self._controller.notes()]) or []

    def first_map(self) -> Action | None:
        """Returns what it wants to begin with."""
        return self._ask("initial_map", lambda: Action(precision=self._controller.initial_map()))

    def for_epoch(self, epoch: int) -> Action | None:
        """Returns what it wants from an epoch on."""
        return self._ask("epoch_action", lambda: _checked(self._controller.epoch_action(epoch)))

    def for_window(self, window: int) -> Action | None:
        """Returns what it wants from a window on."""
        return self._ask("step_action", lambda: _checked(self._controller.step_action(window)))

    def decide(self, units: Sequence[UnitReading], run: GlobalReading, masked: Collection[str]) -> Answer:
        """Returns what it decides.

        Args:
            units: Readings of the units.
            run: The run's reading.
            masked: Knobs that cannot be moved.
        """
        units, run = self._with_proposal(units, run)
        observation = encode(units, run)  # nobody else reads it, so the controller may write to it

        def decision() -> Answer:
            moves: Any = self._controller.decide(observation)
            is_move = moves is not None and not isinstance(moves, Action)
            action = decode(moves, units, run) if is_move else _checked(moves)
            return Answer(_without_masked(action, masked), is_move=is_move or self._controller.is_relative)

        answer = self._ask("decide", decision) or Answer(None)
        return answer._replace(reasons=self.reasons())

    def _with_proposal(
        self, units: Sequence[UnitReading], run: GlobalReading
    ) -> tuple[Sequence[UnitReading], GlobalReading]:
        if not _answers(self._controller, "propose"):
            return units, run

        def proposal() -> tuple[Sequence[UnitReading], GlobalReading]:
            proposed = self._controller.propose(units, run)
            return (units, run) if proposed is None else with_proposal(units, run, proposed)

        return self._ask("propose", proposal) or (units, run)

    def reasons(self) -> Mapping[str, str]:
        """Returns why it asked for what it asked for last."""
        return self._ask("reasons", lambda: checked_reasons(self._controller.reasons())) or {}

    def state(self) -> dict[str, Any] | None:
        """Returns the controller's state, as a checkpoint may hold it; ``None`` if it is not known."""
        return self._ask("state_dict", lambda: checked_state(self._controller.state_dict()))

    def load(self, state: Mapping[str, Any]) -> None:
        """Gives the controller the state that a checkpoint held."""
        self._ask("load_state_dict", lambda: self._controller.load_state_dict(state))

    def _ask(self, name: str, question: Callable[[], T]) -> T | None:
        thread = self._thread
        if thread is not None and thread.is_abandoned:
            return None
        try:
            with _untouched(may_draw=thread is not None):
                if thread is None:
                    return self._answer(question, Exception)
                # what a signal's handler raises arrives here, so whatever is raised in there is the controller's own
                return thread.ask(lambda: self._answer(question, BaseException))
        except (_FailedError, LateAnswerError) as error:
            self._note(name, error)
            return None
        finally:
            if self._plugin.steering is None or self._plugin.steering.is_released:
                self.end()

    def _answer(self, question: Callable[[], T], faults: type[BaseException]) -> T:
        """Has a question answered where gradients and autocast are off; both belong to a thread."""
        steering = self._plugin.steering
        device_type = "cpu" if steering is None else steering.runtime.device_type
        try:
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                return question()
        except KeyboardInterrupt:
            raise
        except faults as error:
            described = traceback.TracebackException.from_exception(error)
            raise _FailedError("".join(described.format_exception_only()), "".join(described.format())) from error

    def _note(self, name: str, error: Exception) -> None:
        is_late = isinstance(error, LateAnswerError)
        steering = self._plugin.steering
        if steering is not None:
            steering.policy_failures += 1
        if self._has_failed and not is_late:
            return
        self._has_failed = True
        limit_s = self._plugin.settings.config.decision_timeout_s
        late = f"no answer to `{name}` within {limit_s:g} s, it is not asked again"
        reason = late if is_late else _shortened(str(error))
        window = 0 if steering is None else steering.window
        self._plugin.history.append(Decision(window, "policy", None, None, None, None, "refused", reason))
        if isinstance(error, _FailedError):
            rank_zero_info(f"autoprec: policy {self._controller.name!r} raised in `{name}`\n{error.details}")
        advice = (
            " Its thread is left behind; should it still draw from a global random generator, the run's numbers change."
            " `AutoPrecisionConfig(decision_timeout_s=...)` sets the limit."
        )
        rank_zero_warn(
            f"autoprec: policy {self._controller.name!r} failed ({reason}); the run goes on without it."
            f"{advice if is_late else ''}"
        )


def is_foreign(controller: Controller) -> bool:
    """Whether code from outside of autoprec answers for a controller."""
    is_ours = (type(controller).__module__ or "").partition(".")[0] == __name__.partition(".")[0]
    return not is_ours or any(question in vars(controller) for question in _QUESTIONS)


def _answers(controller: Controller, question: str) -> bool:
    """Whether a controller has an answer of its own to a question, not that of the base class."""
    return getattr(getattr(controller, question), "__func__", None) is not getattr(Controller, question)


@contextmanager
def _untouched(may_draw: bool) -> Iterator[None]:
    """Has a controller find float32 as the default, and puts back what it might change for everybody.

    Args:
        may_draw: Whether it might draw from global random generators; autoprec's own do not.
    """
    error, dtype = None, torch.get_default_dtype()
    with isolate_rng() if may_draw else nullcontext():  # which puts nothing back after an exception
        torch.set_default_dtype(torch.float32)
        try:
            yield
        except BaseException as raised:
            error = raised
    torch.set_default_dtype(dtype)
    if error is not None:
        raise error


def _shortened(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."


def _checked(action: Any) -> Action | None:
    """Returns a plain copy, whatever subclass it was."""
    if action is None:
        return None
    if not isinstance(action, Action):
        raise TypeError(f"a policy must return an `autoprec.Action` or None, not {action!r}")
    return Action(**{field.name: getattr(action, field.name) for field in fields(Action)})


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
