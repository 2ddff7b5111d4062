"""What follows a knob that has moved: learning rate and schedules follow batch and formats.

What lives here: when they follow, and what keeps a batch from being moved because they could not. What does not: the
factors (``learning_rate``), how a schedule is stretched (``schedules``), and the sizes (``batch_size``,
``accumulation``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from autoprec.config import AutoPrecisionConfig
from autoprec.history import Decision
from autoprec.knobs import Knobs
from autoprec.learning_rate import LearningRate
from autoprec.noise_probe import NoiseProbe
from autoprec.run_length import EpochPlan, RunLength
from autoprec.schedules import ScheduleHold

_LOW_PRECISION = "low precision"


class Coupling:
    """Hands changes of batch and formats on to learning rate and schedules of one fit.

    Args:
        root: The model.
        config: Settings.
        knobs: What moves.
        learning_rate: What follows.
        schedules: What follows.

    Attributes:
        has_new_batch: Whether the effective batch has changed since a copy of the run was taken.
        is_resumed: Whether the run goes on from a checkpoint.
    """

    def __init__(
        self,
        root: nn.Module,
        config: AutoPrecisionConfig,
        knobs: Knobs,
        learning_rate: LearningRate,
        schedules: ScheduleHold,
    ) -> None:
        self.has_new_batch = False
        self.is_resumed = False
        self._root: nn.Module | None = root
        self._config = config
        self._knobs = knobs
        self._learning_rate = learning_rate
        self._schedules = schedules
        self._plan: EpochPlan | None = None
        knobs.batch_size.on_change = knobs.accumulation.on_change = self._follow_batch
        knobs.batch_size.on_users_change = knobs.accumulation.on_users_change = self.note_plan
        knobs.batch_size.on_recount = self._follow_plan
        # methods, which can be pickled
        knobs.batch_size.refusal = self._why_not_size
        knobs.accumulation.refusal = self._why_not_accumulation

    def release(self) -> None:
        """Lets go of the model."""
        self._root = None

    @property
    def batch_factor(self) -> float:
        """The effective batch in units of the one that the run began with."""
        return self._knobs.batch_size.factor * self._knobs.accumulation.factor

    def note_plan(self) -> None:
        """Keeps how epochs are divided into steps, before that may change; called when training begins."""
        self._plan = self._current_plan()

    def _current_plan(self) -> EpochPlan:
        assert self._root is not None, "the fit is over"
        return EpochPlan.of(self._root.trainer, self._knobs.batch_size.size or 1)

    def _follow_batch(self, window: int) -> None:
        """The effective batch has changed."""
        gain_before = self._learning_rate.batch_gain
        self._learning_rate.set_batch_factor(self.batch_factor)
        gain = self._learning_rate.batch_gain
        if gain != gain_before:
            why = f"rule {self._learning_rate.rule}: the effective batch is {self.batch_factor:g} times the first"
            decision = Decision(window, "learning_rate", None, gain_before, gain, gain, "applied", why)
            self._knobs.history.append(decision)
        self.has_new_batch = True
        before, now = self._plan, self._current_plan()
        if before is None and self.is_resumed:  # of a checkpoint that is being loaded, or had none
            return
        # a resumed run tells of what was in force before: its schedules go on as they were saved
        if before is None or (before.batch_size, before.accumulate) != (now.batch_size, now.accumulate):
            self._follow_plan()

    def _follow_plan(self) -> None:
        """Epochs are divided otherwise than before: schedules follow."""
        before, self._plan = self._plan, self._current_plan()
        if before is None and self.is_resumed:
            return
        if before is None:
            size, batches = self._knobs.batch_size.first_size or 1, self._knobs.batch_size.first_batches
            before = replace(self._plan, batches=batches, batch_size=size)
            if batches is None:  # how many there would have been is not known
                self._plan = replace(self._plan, batches=None)
        assert self._root is not None, "the fit is over"
        length = RunLength.of(self._root.trainer, before, self._plan)
        reason = self._schedules.why_not_stretched(length)
        if reason is None:
            self._schedules.stretch(length)
        else:
            rank_zero_warn(f"autoprec: the number of steps that are left has changed, but {reason}.")

    def _why_not_size(self, factor: float) -> str | None:
        return self._why_not(factor * self._knobs.accumulation.factor)

    def _why_not_accumulation(self, factor: float) -> str | None:
        return self._why_not(factor * self._knobs.batch_size.factor)

    def _why_not(self, k: float) -> str | None:
        """Says why the effective batch cannot be ``k`` times the first, ``None`` if it can."""
        return self._learning_rate.why_not(k) or self._schedules.why_not_stretched()

    def follow_formats(self, window: int) -> None:
        """The learning rate is lower while layers run in low precision, if that was asked for.

        Args:
            window: Index of the window that begins.
        """
        factor = self._config.low_precision_lr_factor if self._knobs.is_any_low else 1.0
        why = "layers run in low precision" if factor != 1.0 else "no layer runs in low precision"
        self.set_factor(_LOW_PRECISION, factor, window, why)

    def set_factor(self, name: str, factor: float, window: int, why: str) -> None:
        """Sets a factor on the learning rate and puts it on record, unless it is what it was.

        Args:
            name: What the factor is for.
            factor: 1 for none.
            window: Index of the window that begins.
            why: Reason to record.
        """
        before = self._learning_rate.named.get(name, 1.0)
        if factor != before:
            self._learning_rate.set_factor(name, factor)
            decision = Decision(window, "learning_rate", None, before, factor, factor, "applied", why)
            self._knobs.history.append(decision)

    def state_dict(self) -> dict[str, Any] | None:
        """Returns how epochs are divided, as primitives; ``None`` before training begins."""
        return None if self._plan is None else asdict(self._plan)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Takes over what ``state_dict`` returned."""
        self._plan = None if state is None else EpochPlan(**state)

    def follow_noise_scale(self, noise: NoiseProbe) -> None:
        """Hands the gradient-noise scale to the rule that needs it, as far as it is known.

        Args:
            noise: Measures it.
        """
        if noise.effective_batch > 0.0:
            self._learning_rate.set_first_batch(noise.effective_batch / self.batch_factor)
        self._learning_rate.set_noise_scale(noise.scale.estimate[0])
