"""Holds learning-rate schedules still after a skipped step.

Lightning steps a schedule whether or not the optimizer did. Its schedulers are given a subclass of their own class
while a fit runs, which leaves ``state_dict``, identity and ``isinstance`` as they are and covers manual optimization
as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from autoprec.config import AutoPrecisionConfig
from autoprec.lookalike import lookalike, undo_lookalike


class ScheduleHold:
    """Skips one ``step()`` of a schedule for each skipped step of its optimizer.

    Args:
        config: ``hold_schedules=False`` makes this object do nothing.
    """

    def __init__(self, config: AutoPrecisionConfig) -> None:
        self._is_on = config.hold_schedules
        self._skipped: set[int] = set()
        self._schedulers: list[Any] = []
        self.is_in_training_step = False

    def attach(self, configs: Sequence[Any], is_automatic: bool) -> None:
        """Takes hold of schedules.

        Args:
            configs: Lightning's ``LRSchedulerConfig`` objects. Under automatic optimization only those with
                ``interval="step"`` are held, and never ReduceLROnPlateau.
            is_automatic: Under manual optimization every schedule is held, but only for calls from ``training_step``.
        """
        for config in configs if self._is_on else ():
            if config.reduce_on_plateau or (is_automatic and config.interval != "step"):
                continue
            self._swap(config.scheduler, is_automatic)

    def detach(self) -> None:
        """Gives all schedules their own class back."""
        for scheduler in self._schedulers:
            undo_lookalike(scheduler)
        self._schedulers.clear()
        self._skipped.clear()

    def note(self, optimizer: object, is_skipped: bool) -> None:
        """Records whether the optimizer's latest step was skipped."""
        (self._skipped.add if is_skipped else self._skipped.discard)(id(optimizer))

    def _holds(self, scheduler: Any, is_automatic: bool) -> bool:
        optimizer = getattr(scheduler, "optimizer", None)
        return id(optimizer) in self._skipped and (is_automatic or self.is_in_training_step)

    def _swap(self, scheduler: Any, is_automatic: bool) -> None:
        hold = self

        def make(base_step: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(base_step)
            def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                return None if hold._holds(scheduler, is_automatic) else base_step(scheduler, *args, **kwargs)

            return step

        scheduler.__class__ = lookalike(type(scheduler), "step", make)
        self._schedulers.append(scheduler)
