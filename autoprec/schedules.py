"""Holds learning-rate schedules still after a skipped step.

Lightning steps a schedule whether or not the optimizer did. Its schedulers are given a subclass of their own class
while a fit runs, which leaves ``state_dict``, identity and ``isinstance`` as they are and covers manual optimization
as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from autoprec.config import AutoPrecisionConfig
from autoprec.lookalike import lookalike, registers_subclasses, undo_lookalike


@dataclass
class _Held:
    """A schedule, and what its optimizer did since the schedule's last call."""

    scheduler: Any
    attempted: int = 0
    skipped: int = 0

    def should_hold(self) -> bool:
        """Decides about one call: held back if as many steps were skipped as lie between two calls."""
        should = 0 < self.attempted <= self.skipped
        if should:
            self.skipped -= self.attempted
        self.attempted = 0
        return should


class ScheduleHold:
    """Keeps a schedule behind by the skipped steps of its optimizer.

    A schedule that is called after every step misses one call for each skipped step. One that is called after every
    n-th step (``frequency``) misses one call for n skipped steps.

    Args:
        config: ``hold_schedules=False`` makes this object do nothing.
    """

    def __init__(self, config: AutoPrecisionConfig) -> None:
        self._is_on = config.hold_schedules
        self._held: list[_Held] = []

    def attach(self, configs: Sequence[Any], is_automatic: bool, is_in_batch: Callable[[], bool]) -> None:
        """Takes hold of schedules.

        Args:
            configs: Lightning's ``LRSchedulerConfig`` objects. Under automatic optimization only those with
                ``interval="step"`` are held, and never ReduceLROnPlateau.
            is_automatic: Under manual optimization every schedule is held, unless it is called between epochs.
            is_in_batch: Whether a training batch is under way.
        """
        for config in configs if self._is_on else ():
            if config.reduce_on_plateau or (is_automatic and config.interval != "step"):
                continue
            held = _Held(config.scheduler)
            obstacle = self._swap(held, is_in_batch)
            if obstacle is None:
                self._held.append(held)
            else:
                rank_zero_warn(
                    f"autoprec: the schedule `{type(config.scheduler).__qualname__}` moves on skipped steps, too:"
                    f" {obstacle}."
                )

    def detach(self) -> None:
        """Gives all schedules their own class back."""
        for held in self._held:
            undo_lookalike(held.scheduler)
        self._held.clear()

    def note(self, optimizer: object, is_skipped: bool) -> None:
        """Records whether the optimizer's latest step was skipped."""
        for held in self._held:
            if getattr(held.scheduler, "optimizer", None) is optimizer:
                held.attempted += 1
                held.skipped += is_skipped

    def held(self) -> list[Any]:
        """The schedules that miss a call for a skipped step."""
        return [held.scheduler for held in self._held]

    def state(self) -> list[tuple[int, int]]:
        """Returns primitives only."""
        return [(held.attempted, held.skipped) for held in self._held]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Takes over what ``state`` returned, if the schedules are as many as then."""
        if len(state) == len(self._held):
            for held, (attempted, skipped) in zip(self._held, state, strict=True):
                held.attempted, held.skipped = attempted, skipped

    def _swap(self, held: _Held, is_in_batch: Callable[[], bool]) -> str | None:
        """Swaps the class of a schedule; returns why it could not, ``None`` if it could."""
        if "step" in getattr(held.scheduler, "__dict__", {}):
            return "its `step` is replaced on the instance"
        if registers_subclasses(type(held.scheduler)):
            return "its class runs code when it is extended (`__init_subclass__`)"

        def make(base_step: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(base_step)
            def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
                return None if is_in_batch() and held.should_hold() else base_step(scheduler, *args, **kwargs)

            return step

        try:
            held.scheduler.__class__ = lookalike(type(held.scheduler), "step", make)
        except TypeError as error:
            return f"its class cannot be extended ({error})"
        return None
