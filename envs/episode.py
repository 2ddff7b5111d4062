"""One fit of the user's module as an episode: it pauses at each decision, hands out a report and waits for moves.

What lives here: the callback that does so, the time that is charged, and what a report says. What does not: rewards and
spaces (``training_env``), and the thread that stands still (``paused_thread``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Timer
from numpy.typing import NDArray

from autoprec.action import Action
from autoprec.callback import AutoPrecisionCallback
from autoprec.config import AutoPrecisionConfig
from autoprec.controller import Moves, ScriptedController
from autoprec.encoding import Observation
from autoprec.envs.heldout import HeldOut
from autoprec.envs.paused_thread import Turns
from autoprec.envs.process_state import quieten
from autoprec.envs.step_cost import Clock, StepCost
from autoprec.envs.training_setup import SetupSource, endless_arguments, fp32_arguments, trainer_arguments
from autoprec.feature_rows import INDEX
from autoprec.guard import DivergedTrainingError, NonFiniteTrainingError
from autoprec.knobs import KNOBS, steered_units
from autoprec.moved_table import Mode, MovedTableController
from autoprec.summary import mean_bits
from autoprec.target_functions import fit_arguments


@dataclass(frozen=True, kw_only=True)
class EpisodeSettings:
    """How episodes are trained.

    Args:
        interval: Applied optimizer steps between decisions.
        budget: Optimizer steps of the fp32 twin in whose time an episode must do; ``None`` for as many as the Trainer's
            arguments say, however long they take.
        knobs: What may be moved.
        config: The callback's settings.
        cost: Time of a batch; ``None`` for the clock's.
        mode: What moves are relative to.
    """

    interval: int = 50
    budget: int | None = None
    knobs: Sequence[str] = KNOBS
    config: AutoPrecisionConfig = field(default_factory=AutoPrecisionConfig)
    cost: StepCost | None = None
    mode: Mode = "offset"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where an episode stands.

    Attributes:
        observation: ``[rows, features]``, ``None`` before the first decision.
        masks: ``[rows, 3]``: which moves lead somewhere; ``None`` where no move is asked for.
        loss: Held-out loss; where there is none, the mean of the training losses since the report before.
        first_loss: Loss before training, as above; NaN before it was measured.
        time: Time charged since the beginning.
        memory: Bits of the formats relative to fp32, averaged over the parameters.
        facts: What else is known, as plain values.
        ending: Why the fit is over, ``None`` while it is not: ``"finished"``, ``"budget"`` or ``"diverged"``.
    """

    observation: Observation | None
    loss: float
    time: float
    first_loss: float = math.nan
    masks: NDArray[np.bool_] | None = None
    memory: float = 1.0
    facts: dict[str, Any] = field(default_factory=dict)
    ending: str | None = None


class EpisodeController(MovedTableController):
    """Hands observations out and moves in.

    Args:
        callback: Whose run it decides for.
        settings: How it is trained.
    """

    name = "environment"

    def __init__(self, callback: EpisodeCallback, settings: EpisodeSettings) -> None:
        super().__init__(settings.config, settings.mode)
        self._callback = callback

    def moves_for(self, observation: Observation) -> NDArray[np.int64]:
        """Waits for the environment's moves.

        Args:
            observation: ``[rows, features]``.
        """
        if not self.is_ladder:
            return self._callback.ask(observation, self.masks())
        low, high = (observation[:, INDEX[name]] > 0 for name in ("can_lower", "can_raise"))
        return self._callback.ask(observation, np.stack([low, np.ones_like(low), high], axis=1))

    def decide(self, observation: Observation) -> Moves | Action | None:
        """Returns the environment's moves, or what the moved proposal changes.

        Args:
            observation: ``[rows, features]``.
        """
        action = super().decide(observation)
        # an agent on a ladder may try what is not known to pay
        return self._moves if self.is_ladder else action


class EpisodeCallback(AutoPrecisionCallback):
    """The callback of an episode.

    Args:
        role: ``"episode"``; ``"twin"`` for the fp32 twin, which nobody steers and which never pauses; ``"probe"`` to
            pause with the names of the units before the first step.
        settings: How it is trained.
        turns: Pauses the thread.
        held_out: Measures held-out losses.
        budget: Time after which the fit ends, ``None`` for no limit of time.
        check_units: Is told of the names of the units before the first step.

    Attributes:
        first_loss: Loss before training; where there is no held-out one, that of the first stretch.
        report: The latest one.
    """

    def __init__(
        self,
        role: Literal["episode", "twin", "probe"],
        settings: EpisodeSettings,
        turns: Turns,
        held_out: HeldOut,
        budget: float | None = None,
        check_units: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        self.role, self._check_units = role, check_units
        self._turns, self._held_out, self._budget, self._cost = turns, held_out, budget, settings.cost
        self._clock = Clock(is_real=settings.cost is None)
        self._is_spent = self._was_running = False
        self._seen_losses = 0
        self._limit = settings.budget if role == "twin" else None
        self.first_loss = self._loss = math.nan
        self.report = Report(observation=None, loss=math.nan, time=0.0)
        knobs = () if role == "twin" else settings.knobs
        controller = ScriptedController() if role == "twin" else EpisodeController(self, settings)
        super().__init__(controller, knobs, settings.interval, settings.config, verbose=False)

    # ---- hooks ----

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tells which units there are."""
        super().on_fit_start(trainer, pl_module)
        names = tuple(unit.name for unit in steered_units(self._fit.knobs))
        if self._check_units is not None:
            self._check_units(names)
        if self.role == "probe":
            self._turns.pause(names)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measures the loss to begin with, and starts the clock."""
        super().on_train_start(trainer, pl_module)
        self.first_loss = self._held_out.loss(trainer, pl_module)
        self._clock.start(pl_module.device)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Decides, unless the episode was ended from outside."""
        self._turns.check()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Charges the batch, and ends the fit where the budget is spent."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._cost is not None:
            self._clock.charge(self._cost(self.precision_map(), self.batch_size or 0))
        self._is_spent = self._budget is not None and self._clock.time >= self._budget
        if self._is_spent or (self._limit is not None and self._fit.window >= self._limit):
            trainer.should_stop = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock: validation is not charged."""
        self._was_running = self._clock.is_running
        self._clock.stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts it again."""
        if self._was_running:
            self._clock.start(pl_module.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes what was achieved."""
        self._clock.stop()
        super().on_train_end(trainer, pl_module)
        self._measure(trainer)
        self.report = self._reported(self.report.observation, "budget" if self._is_spent else "finished")

    # ---- decisions ----

    def ask(self, observation: Observation, masks: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the environment's moves.

        Args:
            observation: ``[rows, features]``.
            masks: ``[rows, 3]``: which moves lead somewhere.
        """
        self.report = replace(self._reported(observation.copy(), None), masks=masks)
        moves: NDArray[np.int64] = self._turns.pause(self.report)
        return moves

    def diverged(self) -> Report:
        """Returns the report of a fit that was given up because numbers were not finite."""
        self._clock.stop()
        self._loss = math.inf
        return self._reported(self.report.observation, "diverged")

    def _decide(self, trainer: pl.Trainer) -> None:
        self._clock.stop()
        # before the controller is asked, whose errors end no fit: errors of validation do
        if self.role == "twin":
            self._note_training_loss()
        else:
            self._measure(trainer)
        super()._decide(trainer)
        self._fit.costs.clock.note_pause()  # what happened meanwhile belongs to no step
        self._clock.start(trainer.strategy.root_device)

    def _progress(self, trainer: pl.Trainer) -> float:
        return super()._progress(trainer) if self._budget is None else min(self._clock.time / self._budget, 1.0)

    # ---- measurements ----

    def _measure(self, trainer: Any) -> None:
        self._note_training_loss()
        if self._held_out.is_there:
            self._loss = self._held_out.loss(trainer, trainer.lightning_module)

    def _note_training_loss(self) -> None:
        telemetry = self._fit.telemetry
        telemetry.flush_losses()
        new, self._seen_losses = telemetry.loss_count - self._seen_losses, telemetry.loss_count
        losses = list(telemetry.losses)[-max(new, 1) :]
        mean = sum(losses) / len(losses) if losses else math.nan
        self._loss = mean if math.isfinite(mean) else math.inf
        if math.isnan(self.first_loss):
            self.first_loss = self._loss

    def _reported(self, observation: Observation | None, ending: str | None) -> Report:
        facts = {
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "precision_map": self.precision_map(),
            "loss_scale": self.loss_scale,
            "batch_size": self.batch_size,
            "clip_threshold": self.clip_threshold,
        }
        return Report(
            observation=observation,
            loss=self._loss,
            first_loss=self.first_loss,
            time=self._clock.time,
            memory=mean_bits(self._fit.knobs) / 32.0,
            facts=facts,
            ending=ending,
        )


@dataclass(frozen=True)
class Course:
    """What all fits of an environment have in common.

    Args:
        source: Makes what is trained.
        held_out: Measures held-out losses.
        settings: How it is trained.
        units: Units that every model must have, ``None`` while that is not known.
    """

    source: SetupSource
    held_out: HeldOut
    settings: EpisodeSettings
    units: int | None = None

    def probe(self, turns: Turns) -> Any:
        """Pauses with the names of the units before the first step.

        Args:
            turns: Pauses the thread.
        """
        self._fit(EpisodeCallback("probe", self.settings, turns, self.held_out), seed=0)

    def run_twin(self, turns: Turns) -> Report:
        """Trains the fp32 twin, without a pause; always with the same seed.

        Args:
            turns: Ends the thread early if need be.
        """
        callback = EpisodeCallback("twin", self.settings, turns, self.held_out)
        self._fit(callback, seed=0)
        return callback.report

    def run_episode(self, turns: Turns, *, seed: int, budget: float | None) -> Report:
        """Trains one episode to its end.

        Args:
            turns: Pauses the thread.
            seed: Seed of everything.
            budget: Time that it may take, ``None`` for no limit.
        """
        callback = EpisodeCallback("episode", self.settings, turns, self.held_out, budget, self._check_units)
        try:
            self._fit(callback, seed)
        except (NonFiniteTrainingError, DivergedTrainingError):
            return callback.diverged()
        return callback.report

    def _check_units(self, names: Sequence[str]) -> None:
        if self.units is not None and len(names) != self.units:
            raise RuntimeError(
                f"`{self.source.name}` returned a model with {len(names)} units where the first one had {self.units}."
                " An environment trains models of one shape."
            )

    def _fit(self, callback: EpisodeCallback, seed: int) -> None:
        quieten()
        os.environ.pop("AUTOPREC_AUTO", None)  # would add a second callback
        pl.seed_everything(seed, workers=True, verbose=False)
        setup = self.source.build(seed)
        arguments = trainer_arguments(setup.arguments, [callback])
        if self.settings.budget is not None:
            arguments = endless_arguments(arguments)
        if callback.role == "twin":
            arguments = fp32_arguments(arguments)
        trainer = pl.Trainer(**arguments)
        if self.settings.budget is None and _is_endless(trainer):
            raise ValueError(
                f"`{self.source.name}` trains without end. Give its Trainer `max_epochs` or `max_steps`, or pass"
                " `TrainingEnv(budget=...)`, a number of optimizer steps."
            )
        try:
            trainer.fit(setup.module, **fit_arguments(self.source.name, setup.data))
        except ValueError as error:
            interrupt = error.__context__
            if not isinstance(interrupt, KeyboardInterrupt):
                raise
            # raised by code of the user's; Lightning wants to end that with a signal handler, for which this is the
            # wrong thread
            callback.on_exception(trainer, setup.module, interrupt)
            raise interrupt from None


def _is_endless(trainer: Any) -> bool:
    has_timer = any(isinstance(callback, Timer) for callback in trainer.callbacks)
    return trainer.max_epochs == -1 and trainer.max_steps == -1 and not has_timer
