"""Holds learning-rate schedules still after a skipped step, and stretches them when the number of steps changes.

Lightning steps a schedule whether or not the optimizer did, and as often as there are steps. Its schedulers are given a
subclass of their own class while a fit runs, which leaves ``state_dict``, identity and ``isinstance`` as they are and
covers manual optimization as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from autoprec.config import AutoPrecisionConfig
from autoprec.lookalike import lookalike, registers_subclasses, undo_lookalike
from autoprec.run_length import RunLength

State = tuple[int, int, str, str, bool, int]


@dataclass
class _Held:
    """A schedule, and what its optimizer did since the schedule's last call."""

    scheduler: Any
    frequency: int = 1
    config: Any = None  # Lightning's, where it decides by that when the schedule is called
    found: int = 1  # its frequency
    attempted: int = 0
    skipped: int = 0
    rate: Fraction | None = None  # calls of the schedule for one of Lightning's, as long as that is not 1
    credit: Fraction = Fraction(0)  # what is left over of them
    is_stepwise: bool = True
    is_counted: bool = True  # whether it is known when it is called

    def should_hold(self) -> bool:
        """Decides about one call: held back if as many steps were skipped as lie between two calls."""
        should = 0 < self.attempted <= self.skipped
        if should:
            self.skipped -= self.attempted
        self.attempted = 0
        return should

    def calls(self) -> int:
        """How often the schedule is called where Lightning calls it once."""
        if self.rate is None or not self.is_stepwise:
            return 1
        self.credit += self.rate
        count = int(self.credit)
        self.credit -= count
        return count

    def stretch(self, length: RunLength) -> None:
        """Spreads what is left, the credit included, over the calls that will come."""
        frequency = self.frequency
        if length.ratio(frequency) is None:  # no batch will have a number that it divides
            self.set_frequency(1)
        ratio, counts = length.ratio(frequency, self.frequency), length.calls(frequency, self.frequency)
        if ratio is None:  # the run is over
            return
        rate = self.rate or Fraction(1)
        if self.is_counted and counts is not None and all(counts):
            # a whole number but for calls that were held; without rounding fractions would grow with every change
            rate, self.credit = Fraction(round(self.credit + rate * counts[0]), counts[1]), Fraction(0)
        else:
            rate *= ratio
        self.rate = None if rate == 1 and not self.credit else rate

    def set_frequency(self, frequency: int) -> None:
        """Has Lightning call the schedule after every so many batches, where it is Lightning that calls it."""
        self.frequency = frequency
        if self.config is not None:
            self.config.frequency = frequency

    def state(self) -> State:
        return self.attempted, self.skipped, str(self.rate or 1), str(self.credit), self.is_stepwise, self.frequency

    def load(
        self,
        attempted: int,
        skipped: int,
        rate: str = "1",
        credit: str = "0",
        is_stepwise: bool = True,
        frequency: int | None = None,
    ) -> None:
        if frequency == 1 != self.frequency:  # it was left without any other call
            self.set_frequency(1)
        self.attempted, self.skipped, self.is_stepwise = attempted, skipped, is_stepwise
        self.credit = Fraction(credit)
        self.rate = None if rate == "1" and not self.credit else Fraction(rate)


class ScheduleHold:
    """Keeps a schedule behind by the skipped steps of its optimizer, and in step with the data when batches change.

    A schedule that is called after every step misses one call for each skipped step. One that is called after every
    n-th step (``frequency``) misses one call for n skipped steps.

    After a change of the number of steps that are left, the calls that were left before are spread evenly over those
    that will come: some of them do nothing, or each stands for several. The last one gets where it would have got.
    A schedule that its ``frequency`` leaves without any call is called after every step from then on.

    Args:
        config: With ``hold_schedules=False`` a skipped step changes nothing.
    """

    def __init__(self, config: AutoPrecisionConfig) -> None:
        self._is_on = config.hold_schedules
        self._held: list[_Held] = []
        self._obstacles: list[str] = []

    def attach(
        self,
        configs: Sequence[Any],
        is_automatic: bool,
        is_in_batch: Callable[[], bool],
        is_last_batch: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes hold of schedules.

        Args:
            configs: Lightning's ``LRSchedulerConfig`` objects. Under automatic optimization only those with
                ``interval="step"`` are held, and never ReduceLROnPlateau.
            is_automatic: Under manual optimization every schedule is held, unless it is called between epochs.
            is_in_batch: Whether a training batch is under way.
            is_last_batch: Whether it is the last one of its epoch. Under manual optimization a schedule that is called
                in no other batch is one of epochs, and not stretched.
        """
        for config in configs:
            if config.reduce_on_plateau or (is_automatic and config.interval != "step"):
                continue
            # under manual optimization the module calls schedules when it likes
            frequency, own = (config.frequency, config) if is_automatic else (1, None)
            held = _Held(config.scheduler, frequency, own, frequency, is_stepwise=is_automatic, is_counted=is_automatic)
            obstacle = self._swap(held, is_in_batch, is_last_batch)
            if obstacle is None:
                self._held.append(held)
                continue
            name = type(config.scheduler).__qualname__
            self._obstacles.append(f"the schedule `{name}` cannot be stretched: {obstacle}")
            if self._is_on:
                rank_zero_warn(f"autoprec: the schedule `{name}` moves on skipped steps, too: {obstacle}.")

    def detach(self) -> None:
        """Gives all schedules their own class back."""
        for held in self._held:
            undo_lookalike(held.scheduler)
            if held.frequency != held.found:
                held.set_frequency(held.found)
        self._held.clear()
        self._obstacles.clear()

    def note(self, optimizer: object, is_skipped: bool) -> None:
        """Records whether the optimizer's latest step was skipped."""
        for held in self._held if self._is_on else ():
            if getattr(held.scheduler, "optimizer", None) is optimizer:
                held.attempted += 1
                held.skipped += is_skipped

    def why_not_stretched(self, length: RunLength | None = None) -> str | None:
        """Says why a change of the batch size or of accumulation would spoil a schedule, ``None`` if it would not.

        Args:
            length: What would be left of the run. Without it only schedules are named that cannot be stretched at all.
        """
        if self._obstacles and (length is None or length.ratio() != 1):
            return self._obstacles[0]
        return None

    def stretch(self, length: RunLength) -> None:
        """Spreads the calls that were left over those that will come; called when the change takes effect.

        Args:
            length: What is left of the run, before the change and now.

        Raises:
            ValueError: If :meth:`why_not_stretched` has a reason.
        """
        reason = self.why_not_stretched(length)
        if reason is not None:
            raise ValueError(f"Passed `stretch({length})`, but {reason}.")
        for held in self._held:
            held.stretch(length)

    def held(self) -> list[Any]:
        """The schedules that miss a call for a skipped step."""
        return [held.scheduler for held in self._held] if self._is_on else []

    def state(self) -> list[State]:
        """Returns primitives only."""
        return [held.state() for held in self._held]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Takes over what ``state`` returned, if the schedules are as many as then."""
        if len(state) == len(self._held):
            for held, values in zip(self._held, state, strict=True):
                held.load(*values)

    def _swap(self, held: _Held, is_in_batch: Callable[[], bool], is_last_batch: Callable[[], bool]) -> str | None:
        """Swaps the class of a schedule; returns why it could not, ``None`` if it could."""
        if "step" in getattr(held.scheduler, "__dict__", {}):
            return "its `step` is replaced on the instance"
        if registers_subclasses(type(held.scheduler)):
            return "its class runs code when it is extended (`__init_subclass__`)"

        def make(base_step: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(base_step)
            def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                if not is_in_batch():
                    return base_step(scheduler, *args, **kwargs)
                held.is_stepwise = held.is_stepwise or not is_last_batch()
                if held.should_hold():
                    return None
                if args or kwargs:  # a position of the user's own
                    return base_step(scheduler, *args, **kwargs)
                result = None
                for _ in range(held.calls()):
                    result = base_step(scheduler)
                return result

            return step

        try:
            held.scheduler.__class__ = lookalike(type(held.scheduler), "step", make)
        except TypeError as error:
            return f"its class cannot be extended ({error})"
        return None
