"""The callback: collects readings when a decision is due, has the controller asked, and has its request carried out.

What does not live here: how a controller is asked and what its faults lead to (``asking``), and how the plugin comes
into a Trainer (``installation``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from autoprec.action import Action
from autoprec.asking import Answer, Asking
from autoprec.collect import Unoffered, find_unoffered, read_globals, read_units, record_unoffered
from autoprec.config import AutoPrecisionConfig
from autoprec.controller import Controller, resolve_policy
from autoprec.history import History
from autoprec.installation import Installation
from autoprec.knobs import KNOBS, steered_units
from autoprec.listeners import check_path, listeners_for, write_history
from autoprec.machine_load import MachineLoad
from autoprec.map_file import save_map
from autoprec.monitoring.config import MonitorConfig, checked
from autoprec.monitoring.monitor import Monitor, monitor_for
from autoprec.plan_facts import read_facts
from autoprec.precision import AutoPrecision
from autoprec.progress_feed import ProgressFeed
from autoprec.run_log import RunLog
from autoprec.saved_state import STATE_VERSION, check_version
from autoprec.steering import Steering
from autoprec.summary import no_decision, summarize
from autoprec.trainer_facts import (
    check_alone,
    check_trainer,
    expected_training_s,
    first_epoch,
    has_adaptive_optimizer,
    is_over,
    learning_rate,
    loader_batch_size,
    progress,
)


class AutoPrecisionCallback(Callback):
    """Steers per-layer precision, loss scale, gradient clipping and, on request, batch size while a model trains.

    ``Trainer(callbacks=[AutoPrecisionCallback()])`` is all there is to write. The module, its ``state_dict`` and the
    Trainer are the same afterwards as before.

    Args:
        policy: Who decides. ``"rule"``, ``"table"``, ``"pretrained"``, ``"shape"``, ``"fisher"``, ``"snip"``,
            ``"fixed:<format>"``, the folder of a learned policy, the path of a map written by :meth:`save_map`, or a
            :class:`~autoprec.controller.Controller`.
        knobs: What may be moved, out of ``"precision"``, ``"loss_scale"``, ``"batch_size"`` and ``"clip"``. With none
            the callback only observes, counts and guards, and training is bit-identical to training without it. With
            ``"clip"`` the threshold follows the running median of the gradient norm unless the Trainer has one.
        interval: Applied optimizer steps between decisions.
        config: Settings, see :class:`~autoprec.config.AutoPrecisionConfig`.
        eval_precision: ``"base"`` validates as the Trainer would without autoprec, units in fp32 that the guard has
            raised because they failed so; ``"current"`` in the units' formats.
        history_file: Write every decision as JSON Lines when fit ends: ``True`` for ``autoprec.jsonl`` in the Trainer's
            log folder, or a path.
        verbose: Print a short table when fit ends.
        record: Keep a record of the run while it trains: ``True`` for a folder ``autoprec`` in the Trainer's log
            folder, or a path. ``autoprec report`` makes a page of it.
        monitor: Shows the run to Prometheus while it trains: a port (0 takes a free one and says which), or a
            :class:`~autoprec.monitoring.config.MonitorConfig`. ``None`` goes by ``AUTOPREC_MONITOR_PORT``.

    Raises:
        ValueError: If an argument is out of range; the message says what is allowed.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[AutoPrecisionCallback()], logger=False, enable_checkpointing=False)
    """

    # Lightning attaches these to every callback
    log: Callable[..., None]
    log_dict: Callable[..., None]

    def __init__(
        self,
        policy: Controller | str | Path = "rule",
        knobs: Sequence[str] = KNOBS,
        interval: int = 50,
        config: AutoPrecisionConfig | None = None,
        eval_precision: Literal["base", "current"] = "base",
        history_file: bool | str | Path = False,
        verbose: bool = True,
        record: bool | str | Path = False,
        monitor: MonitorConfig | int | None = None,
    ) -> None:
        if isinstance(interval, bool) or not hasattr(interval, "__index__") or interval < 1:
            raise ValueError(f"Passed `AutoPrecisionCallback(interval={interval!r})`. `interval` must be an int >= 1.")
        check_path("history_file", history_file)
        check_path("record", record)
        # made here so that bad arguments raise at once; setup gives it the Trainer's plugin
        self.plugin = AutoPrecision(config=config, knobs=knobs, eval_precision=eval_precision)
        self._settings = self.plugin.settings
        self.config = self._settings.config
        self.controller = resolve_policy(policy, self.config)
        self.interval = operator.index(interval)
        self.history_file = history_file
        self.verbose = verbose
        self.record = record
        self.monitor = checked(monitor)
        self._monitor: Monitor | None = None
        self._installation = Installation()
        self._asking = Asking(self.controller, self.plugin)
        self._reset()

    def _reset(self) -> None:
        self._close_monitor()
        self._last_decision = 0
        self._largest_rate = 0.0
        self._seen_samples = 0
        self._next_script = 0
        self._next_epoch = 0
        self._asking.end()
        self._asking = Asking(self.controller, self.plugin)
        self._asked_ahead: tuple[int, Action] | None = None
        self._first_map: Action | None = None
        self._is_ready = False
        self._load: MachineLoad | None = None
        self._feed = ProgressFeed()
        self._log = RunLog(self._feed)
        self._saved_controller: dict[str, Any] | None = None
        self._has_new_policy = False

    # ---- what users and tests read ----

    @property
    def history(self) -> History:
        """Every decision of the current or latest fit."""
        return self.plugin.history

    @property
    def steering(self) -> Steering | None:
        """State of the current or latest fit, ``None`` before the first."""
        return self.plugin.steering

    @property
    def applied_steps(self) -> int:
        """Optimizer steps taken."""
        return 0 if self.steering is None else self.steering.applied_steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps not taken because a gradient was not finite."""
        return 0 if self.steering is None else self.steering.skipped_steps

    @property
    def lost_windows(self) -> int:
        """Windows in which memory ran out, so that no step was attempted."""
        return 0 if self.steering is None else self.steering.lost_windows

    @property
    def lost_samples(self) -> int:
        """Samples that did not train because memory ran out."""
        return 0 if self.steering is None else self.steering.lost_samples

    @property
    def undone_windows(self) -> int:
        """Applied steps that a rollback has undone; ``applied_steps`` counts them no more."""
        return 0 if self.steering is None else self.steering.undone_windows

    @property
    def loss_scale(self) -> float:
        """Current loss scale, 1.0 if none is in use."""
        return 1.0 if self.steering is None else self.steering.knobs.loss_scale.scale

    @property
    def batch_size(self) -> int | None:
        """The batch size per rank in force, of the first loader if there are several; ``None`` if it is not known."""
        size = None if self.steering is None else self.steering.knobs.batch_size.size
        return loader_batch_size(self._installation.owner) if size is None else size

    @property
    def clip_threshold(self) -> float:
        """Threshold on the global norm of the unscaled gradients, ``math.inf`` if clipping is off."""
        return math.inf if self.steering is None else self.steering.knobs.clip

    @property
    def noise_scale(self) -> tuple[float, float]:
        """Gradient-noise scale and its standard error in samples, NaN while they are not known."""
        return (math.nan, math.nan) if self.steering is None else self.steering.telemetry.noise.scale.estimate

    @property
    def monitor_url(self) -> str | None:
        """Where Prometheus can read the metrics of the fit under way; ``None`` where nothing listens."""
        return None if self._monitor is None else self._monitor.url

    def precision_map(self) -> dict[str, str]:
        """Current format of every unit by name; empty before the first fit.

        It is what was asked for and granted; the table at the end of fit says where something else ran: emulation,
        calls that fell back, units whose forward nobody calls.

        Units that are left alone (the table at the end of fit says which, and why) keep the entry ``"fp32"``; they
        run in the precision of what is before them. The same holds for units without a weight matrix that nobody has
        named.
        """
        return self.plugin.precision_map()

    def request(self, action: Action) -> None:
        """Asks for a change from user code; checked at once, applied at the next boundary.

        Args:
            action: What is asked for.

        Raises:
            RuntimeError: If no fit is under way.
            TypeError: If ``action`` is not an :class:`~autoprec.action.Action`.
        """
        if not isinstance(action, Action):
            raise TypeError(f"Passed `request({action!r})`. It takes an `autoprec.Action`.")
        if self._installation.owner is None or self.steering is None:
            raise RuntimeError("Called `request(...)` while no fit is under way. Call it from a hook or a step.")
        self.steering.request(action)

    def save_map(self, path: str | Path) -> None:
        """Writes the current formats and knob values as YAML; ``policy=path`` trains with them.

        Args:
            path: File to write.

        Raises:
            RuntimeError: If there was no fit yet.
        """
        if self.steering is None:
            raise RuntimeError("Called `save_map(...)` before the first fit: there is no map yet.")
        save_map(path, *self.steering.knobs.map_to_save())

    # ---- set-up and clean-up ----

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Puts the plugin in place of the Trainer's own, for fit only."""
        check_trainer(trainer)
        if stage != "fit":
            return
        check_alone(trainer, AutoPrecisionCallback)
        self.plugin = self._installation.install(trainer, self._settings)
        self._reset()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tells the controller which units there are."""
        knobs = self._fit.knobs
        if not steered_units(knobs) and "precision" not in knobs.masked and self.verbose:
            rank_zero_info("autoprec: no layer of this model can be steered; loss scale and clipping still are.")
        self._asking.start(knobs)
        if self.controller.needs_facts:
            self._asking.note_facts(read_facts(self._fit))
        self._fit.costs.begin(self.controller.looks)
        if self.config.rule.batch != "leave" and not torch.are_deterministic_algorithms_enabled():
            self._load = MachineLoad(trainer.strategy.root_device)
        knobs.accumulation.attach(trainer)
        knobs.batch_size.attach(trainer, self._make_ready)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restores what a checkpoint held, or applies the controller's first map."""
        self._make_ready()
        steering = self._fit
        steering.knobs.batch_size.begin_epoch(steering.window)
        steering.coupling.note_plan()
        if self._is_new and self.controller.looks and (below := steering.knobs.unit_formats.below_their_tier()):
            steering.apply(Action(precision=below), "no layer begins below its tier")
        if self._first_map is not None:
            reasons = self._asking.reasons() if self.controller.needs_facts else {}
            self._apply(Answer(self._first_map, reasons), f"first map of policy {self.controller.name!r}")
            self._first_map = None
            steering.requests.warn_of_unknown_names()
        self._log.begin(steering.window)
        listeners = listeners_for(trainer, self.record)
        self._monitor = monitor_for(self.monitor, trainer, steering)
        if self._monitor is not None:
            listeners.append(self._monitor)
        self._feed.start(listeners, trainer, steering, self._settings, self.controller.name, self.interval)

    @property
    def _is_new(self) -> bool:
        return self._fit.window == 0 and self._next_script == 0

    def _make_ready(self) -> None:
        """Called once per fit when the first loaders are set up, which is before training starts."""
        if self._is_ready:
            return
        self._is_ready = True
        if self._saved_controller is not None:
            self._asking.load(self._saved_controller)
        if self._is_new or self._has_new_policy:
            self._first_map = self._asking.first_map()
        epoch = first_epoch(self._installation.owner)
        if epoch is not None:
            self._ask_ahead(epoch)

    @property
    def _fit(self) -> Steering:
        assert self.steering is not None, "the plugin was not asked to convert the module"
        return self.steering

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Gives the Trainer its own plugin back."""
        self._feed.end(self._summary)
        self._close_monitor()
        self._asking.end()
        self._installation.remove(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Gives the Trainer its own plugin back; Lightning does not call ``teardown`` after an exception."""
        try:
            self._write_history(trainer)
            self._feed.end(self._summary, exception)
        finally:
            self._close_monitor()
            self._asking.end()
            self._installation.remove(trainer)

    # ---- boundaries ----

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Applies what the controller wants from this epoch on."""
        self._fit.begin_epoch()
        self._ask_for_epoch(trainer.current_epoch)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Asks for the next epoch's batch size, which must be known before its loaders are set up."""
        self._fit.finish_window()
        if not is_over(trainer):
            self._ask_ahead(trainer.current_epoch + 1)
        self._fit.knobs.batch_size.end_epoch()

    def _ask_ahead(self, epoch: int) -> None:
        is_known = self._asked_ahead is not None and self._asked_ahead[0] == epoch
        if epoch < self._next_epoch or is_known:
            return
        action = self._asking.for_epoch(epoch) or Action()
        self._asked_ahead = epoch, replace(action, batch_size=None)
        if action.batch_size is not None:
            self._fit.knobs.batch_size.plan(action.batch_size, self._fit.window, f"epoch {epoch}")

    def _ask_for_epoch(self, epoch: int) -> None:
        if epoch < self._next_epoch:
            return
        self._next_epoch = epoch + 1
        if self._asked_ahead is not None and self._asked_ahead[0] == epoch:
            action: Action | None = self._asked_ahead[1]
        else:
            action = self._asking.for_epoch(epoch)
        self._asked_ahead = None
        self._apply(Answer(action), f"epoch {epoch}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Decides, if the last window is complete."""
        steering = self._fit
        steering.finish_window()
        if not steering.is_at_boundary:
            return
        if not self.plugin.has_begun_batch:  # the plugin does not see batches that `training_step` draws itself
            self.plugin.begin_batch()
        self._feed.begin_window()
        if self._monitor is not None:
            self._monitor.begin_step()
        steering.apply_pending()
        self._ask_for_epoch(trainer.current_epoch)  # Lightning leaves out the epoch's hook after some resumes
        if steering.window >= self._next_script:
            self._next_script = steering.window + 1
            if self._asking.is_scripted:
                self._apply(Answer(self._asking.for_window(steering.window)), f"window {steering.window}")
        self._decide_if_due(trainer)

    def _decide_if_due(self, trainer: pl.Trainer) -> None:
        steering = self._fit
        self._last_decision = min(self._last_decision, steering.applied_steps)  # the run may have gone back
        if steering.applied_steps - self._last_decision < self.interval:
            return
        if steering.samples == self._seen_samples:
            steering.is_sampling = True  # the next window is measured, the decision follows it
            steering.rounding.is_wanted = self._asking.wants_errors()
            return
        self._last_decision, self._seen_samples = steering.applied_steps, steering.samples
        self._decide(trainer)

    def _decide(self, trainer: pl.Trainer) -> None:
        steering, knobs = self._fit, self._fit.knobs
        self._feed.begin_decision()
        steering.telemetry.flush()
        steering.coupling.follow_noise_scale(steering.telemetry.noise)
        steering.costs.clock.note_size(knobs.batch_size.size)
        steering.costs.update(lambda step_s: expected_training_s(trainer, steering.window, step_s))
        unoffered = find_unoffered(knobs, steering.telemetry, steering.costs)
        record_unoffered(knobs, steering.telemetry, steering.costs, steering.window, unoffered)
        if not self._asking.is_indifferent:
            self._ask(trainer, unoffered)
        self._feed.progress()
        steering.telemetry.start_window()

    def _ask(self, trainer: pl.Trainer, unoffered: Unoffered) -> None:
        steering, knobs = self._fit, self._fit.knobs
        telemetry, costs, errors = steering.telemetry, steering.costs, steering.rounding.errors
        units = read_units(knobs, telemetry, steering.applied_steps, unoffered, costs, errors)
        run = replace(
            read_globals(knobs, telemetry, self._progress(trainer), self._load, costs),
            learning_rate_bits=self._learning_rate_bits(trainer),
            is_adaptive=has_adaptive_optimizer(trainer),
        )
        if self.controller.needs_facts:
            self._asking.note_facts(
                read_facts(steering, {unit.name: unit.legal for unit in units}, costs.table or None)
            )
        self._apply(self._asking.decide(units, run, knobs.masked), f"policy {self.controller.name!r}")

    def _learning_rate_bits(self, trainer: pl.Trainer) -> float:
        rate = learning_rate(trainer)
        if rate > self._largest_rate:
            self._largest_rate = rate
        return math.log2(rate / self._largest_rate) if rate > 0 else math.nan

    def _progress(self, trainer: pl.Trainer) -> float:
        return progress(trainer)

    def _apply(self, answer: Answer, why: str) -> None:
        if answer.action is not None and not answer.action.is_empty:
            self._fit.apply(answer.action, why, answer.reasons, answer.is_move)

    # ---- reports ----

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Closes the window and logs."""
        self._fit.finish_window()
        if self._monitor is not None and self._fit.is_at_boundary:
            self._monitor.end_step()
        self._log.write(self, trainer, self._fit)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Goes back once more if training would end on weights that are not finite."""
        self.plugin.end_training()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the table and writes the history and the record, if asked to."""
        self._write_history(trainer)
        steering = self._fit
        if steering.skipped_steps and not steering.applied_steps:
            rank_zero_warn(
                f"autoprec: no step was applied, all {steering.skipped_steps} were skipped as non-finite; the weights"
                " are those that training started with."
            )
        if self.verbose and not trainer.barebones:
            rank_zero_info(self._summary())
        self._feed.end(self._summary)

    def _summary(self) -> str:
        text = summarize(self._fit, self.controller.name, self._asking.notes())
        return text + no_decision(self._fit, self.interval) if self.controller.looks else text

    def _close_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()

    def _write_history(self, trainer: pl.Trainer) -> None:
        if self._installation.owner is trainer:
            write_history(self.history, trainer, self.history_file)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a resumed run needs, as primitives and the controller's tensors."""
        ahead = self._asked_ahead
        return {
            "version": STATE_VERSION,
            "policy": self.controller.name,
            "controller": self._asking.state(),
            "last_decision": self._last_decision,
            "largest_rate": self._largest_rate,
            "seen_samples": self._seen_samples,
            "next_script": self._next_script,
            "next_epoch": self._next_epoch,
            "asked_ahead": None if ahead is None else [ahead[0], asdict(ahead[1])],
        }

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the plugin's state to a checkpoint written after fit, when the Trainer has its own plugin back."""
        key = AutoPrecision.__qualname__
        if key not in checkpoint and self.steering is not None:
            checkpoint[key] = self.plugin.state_dict()
            self.plugin.on_save_checkpoint(checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what ``state_dict`` returned. The plugin restores its own part."""
        check_version(state_dict)
        self._last_decision = int(state_dict["last_decision"])
        self._largest_rate = float(state_dict.get("largest_rate", 0.0))
        self._seen_samples = int(state_dict["seen_samples"])
        self._next_script = int(state_dict["next_script"])
        self._next_epoch = int(state_dict["next_epoch"])
        ahead = state_dict.get("asked_ahead")
        if state_dict["policy"] == self.controller.name:
            self._saved_controller = state_dict["controller"]  # None if it could not be had
            self._asked_ahead = None if ahead is None else (int(ahead[0]), Action(**ahead[1]))
        else:
            self._has_new_policy = True
            rank_zero_warn(
                f"The checkpoint was written under policy {state_dict['policy']!r}; {self.controller.name!r} starts"
                " anew. The formats that it begins with are applied; what it leaves open stays as in the checkpoint."
            )
