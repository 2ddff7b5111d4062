"""How often a schedule will still be called, before and after a change of the batch size or of accumulation.

It follows the conditions of Lightning's loops: an optimizer step on every ``accumulate``-th batch of an epoch and on
its last one; a call of a schedule after a step whose batch number is a multiple of its frequency; the end with the last
epoch or with ``max_steps``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How an epoch is divided into batches and optimizer steps.

    Args:
        batches: Batches of an epoch, ``None`` if that is not known.
        accumulate: Batches of an optimizer step.
        batch_size: Samples of a batch. Matters only where lengths are not known, as a ratio of two plans.
    """

    batches: int | None
    accumulate: int = 1
    batch_size: int = 1

    @classmethod
    def of(cls, trainer: Any, batch_size: int = 1) -> EpochPlan:
        """Reads the plan that a Trainer has now.

        Args:
            trainer: The Trainer.
            batch_size: Samples of a batch.
        """
        batches = trainer.num_training_batches
        is_known = isinstance(batches, int) or math.isfinite(batches)
        return cls(
            batches=int(batches) if is_known else None,
            accumulate=trainer.accumulate_grad_batches,
            batch_size=batch_size,
        )

    def steps(self, until: int) -> int:
        """Optimizer steps in the first ``until`` batches of an epoch."""
        return until // self.accumulate + (until == self.batches and until % self.accumulate > 0)

    def calls(self, until: int, frequency: int) -> int:
        """Calls of a schedule in the first ``until`` batches of an epoch."""
        is_extra = until == self.batches and until % self.accumulate > 0 and until % frequency == 0
        return until // self.period(frequency) + is_extra

    def period(self, frequency: int) -> int:
        """Batches between two calls of a schedule, the end of an epoch aside."""
        return math.lcm(self.accumulate, frequency)

    def samples(self, frequency: int) -> int:
        """Samples between two calls of a schedule, the end of an epoch aside."""
        return self.batch_size * self.period(frequency)


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """What is left of a run when its plan changes.

    Args:
        before: The plan up to here.
        now: The plan from here on.
        epochs_left: Whole epochs that are still to begin, ``None`` if nobody limits them.
        done: Batches of the current epoch that are over, ``None`` between two epochs.
        steps_left: Optimizer steps until ``max_steps``, ``None`` if nobody limits them.
    """

    before: EpochPlan
    now: EpochPlan
    epochs_left: int | None
    done: int | None = None
    steps_left: int | None = None

    @classmethod
    def of(cls, trainer: Any, before: EpochPlan, now: EpochPlan | None = None) -> RunLength:
        """Reads from a Trainer how far its fit is.

        Args:
            trainer: The Trainer, in a hook of its fit from ``on_fit_start`` on.
            before: The plan up to here.
            now: The plan from here on; by default the one that the Trainer has, with batches of the same size.
        """
        epochs = trainer.fit_loop.epoch_progress.current
        batches = trainer.fit_loop.epoch_loop.batch_progress
        is_inside = epochs.started > epochs.processed
        has_end = trainer.max_epochs is not None and trainer.max_epochs >= 0
        steps_left = None
        if trainer.max_steps is not None and trainer.max_steps >= 0:
            steps_left = max(trainer.max_steps - trainer.global_step, 0)
            if not trainer.lightning_module.automatic_optimization and trainer.global_step:
                # each optimizer's step counts there, as many in a batch as the module likes
                steps_left = math.ceil(Fraction(steps_left * batches.total.processed, trainer.global_step))
        return cls(
            before=before,
            now=now or EpochPlan.of(trainer, before.batch_size),
            epochs_left=max(trainer.max_epochs - epochs.processed - is_inside, 0) if has_end else None,
            done=batches.current.processed if is_inside else None,
            steps_left=steps_left,
        )

    def calls(self, frequency: int = 1, now_frequency: int | None = None) -> tuple[int, int] | None:
        """Calls of a schedule that were to come before the change, and those that will come now.

        Args:
            frequency: That of the schedule.
            now_frequency: That from here on, ``None`` for the same.

        Returns:
            ``None`` where lengths are not known, nothing ends the run, or ``max_steps`` ends it either way.
        """
        if self._counts_steps:
            return None
        before, now = self._calls(self.before, frequency), self._calls(self.now, now_frequency or frequency)
        return None if before is None or now is None else (before, now)

    def ratio(self, frequency: int = 1, now_frequency: int | None = None) -> Fraction | None:
        """Calls of a schedule that were to come before the change, for each one that will come now.

        Args:
            frequency: That of the schedule.
            now_frequency: That from here on, ``None`` for the same.

        Returns:
            The ratio; 1 where ``max_steps`` ends the run either way, since a run that counts steps keeps its schedule;
            ``None`` where calls were to come and none will. Where lengths are not known or nothing ends the run, the
            ratio of samples between two calls.
        """
        if self._counts_steps:
            return Fraction(1)
        counts = self.calls(frequency, now_frequency)
        if counts is None:
            return Fraction(self.now.samples(now_frequency or frequency), self.before.samples(frequency))
        before, now = counts
        if before == 0:
            return Fraction(1)
        return Fraction(before, now) if now else None

    def steps(self) -> int | None:
        """Optimizer steps until the run ends, ``None`` where nothing ends it or lengths are not known."""
        return self.steps_left if self._ends_by_steps(self.now) else self._steps(self.now)

    @property
    def _counts_steps(self) -> bool:
        return self._ends_by_steps(self.before) and self._ends_by_steps(self.now)

    def _steps(self, plan: EpochPlan) -> int | None:
        """Optimizer steps until the last epoch is over."""
        if self.epochs_left is None or plan.batches is None:
            return None
        per_epoch = plan.steps(plan.batches)
        here = 0 if self.done is None else per_epoch - plan.steps(self.done)
        return here + self.epochs_left * per_epoch

    def _ends_by_steps(self, plan: EpochPlan) -> bool:
        """Whether ``max_steps`` comes before the end of the last epoch."""
        if self.steps_left is None:
            return False
        if self.epochs_left is None:
            return True
        steps = self._steps(plan)
        return steps is not None and self.steps_left < steps

    def _calls(self, plan: EpochPlan, frequency: int) -> int | None:
        """Calls of a schedule until the run ends."""
        steps = self.steps_left if self._ends_by_steps(plan) else self._steps(plan)
        if plan.batches is None or steps is None:
            return None
        # counted from the beginning of the epoch that is under way or comes next
        done = self.done or 0
        steps += plan.steps(done)
        epochs, rest = divmod(steps, plan.steps(plan.batches))
        last = min(rest * plan.accumulate, plan.batches)
        return epochs * plan.calls(plan.batches, frequency) + plan.calls(last, frequency) - plan.calls(done, frequency)
