"""Reads a fit for those who listen to it: one reading for each decision point, and every decision once.

What lives here: where the numbers come from, and what becomes of a listener that raises. What does not: the data
(``progress_reading``) and which listeners there are (``listeners``).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from autoprec.cost_table import CostTable
from autoprec.hardware import describe
from autoprec.json_files import primitive
from autoprec.logger_listener import LoggerListener
from autoprec.machine import circumstances, command_line
from autoprec.machine_load import MachineLoad
from autoprec.progress_reading import Costs, HowEnded, ProgressListener, ProgressReading, RunInfo, RunTotals, UnitInfo
from autoprec.resident_memory import peak_resident_bytes, resident_bytes
from autoprec.settings import PluginSettings
from autoprec.steering import Steering
from autoprec.trainer_facts import learning_rate, loader_batch_size

_STEPS = 256  # step times that are kept between two readings
_INTERRUPTIONS = (KeyboardInterrupt, SIGTERMException)


P = ParamSpec("P")


def _harmless(method: Callable[Concatenate[ProgressFeed, P], None]) -> Callable[Concatenate[ProgressFeed, P], None]:
    """Keeps what goes wrong while a run is read from its training: listeners are told nothing more."""

    @wraps(method)
    def guarded(feed: ProgressFeed, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(feed, *args, **kwargs)
        except Exception as error:
            feed.give_up(error)

    return guarded


class ProgressFeed:
    """Tells listeners how one fit goes; does nothing before ``start``, and nothing at all where there are none.

    Attributes:
        has_lost_a_logger: Whether a logger has failed, so that it gets nothing more.
    """

    _trainer: Any
    _steering: Steering
    _device: torch.device
    _load: MachineLoad
    _formats: Mapping[str, str]
    _costs: CostTable

    def __init__(self) -> None:
        self._listeners: list[ProgressListener] = []
        self._loggers: list[LoggerListener] = []
        self.has_lost_a_logger = False
        self._begun_s = self._last_s = self._decision_begun_s = self._decision_s = 0.0
        self._step_s: deque[float] = deque(maxlen=_STEPS)
        self._seen_decisions = self._seen_losses = 0

    @_harmless
    def start(
        self,
        listeners: Sequence[ProgressListener],
        trainer: Any,
        steering: Steering,
        settings: PluginSettings,
        policy: str,
        interval: int,
    ) -> None:
        """Called when training begins and the first formats are in force.

        Args:
            listeners: Who is told.
            trainer: The Trainer.
            steering: The fit.
            settings: Settings of the callback.
            policy: Name of the policy.
            interval: Applied steps between decisions.
        """
        if not listeners:
            return
        self._listeners = list(listeners)
        self._loggers = [listener for listener in listeners if isinstance(listener, LoggerListener)]
        self._trainer, self._steering = trainer, steering
        self._device = trainer.strategy.root_device
        self._load = MachineLoad(self._device)
        self._seen_losses = steering.telemetry.loss_count
        self._formats = steering.knobs.precision_map()
        self._costs = CostTable()
        info = _run_info(trainer, steering, settings, policy, interval)
        self._tell(lambda listener: listener.started(info))
        self._tell_decisions()
        self._begun_s = self._last_s = time.monotonic()

    def begin_window(self) -> None:
        """Called at each boundary, before anything is decided there."""
        if not self._listeners:
            return
        now = time.monotonic()
        self._step_s.append(now - self._last_s)
        self._last_s = now
        if len(self._steering.history) != self._seen_decisions:
            self._tell_decisions()

    def begin_decision(self) -> None:
        """Called when a decision is due."""
        if self._listeners:
            self._decision_begun_s = time.monotonic()

    @_harmless
    def progress(self) -> None:
        """Called when a decision was made, before what it rested on is forgotten."""
        if not self._listeners:
            return
        now = time.monotonic()
        decision_s = now - self._decision_begun_s
        self._decision_s += decision_s
        self._tell_decisions()
        reading = self._reading(now, decision_s)
        self._step_s.clear()
        self._tell(lambda listener: listener.progressed(reading))
        self._last_s = time.monotonic()  # neither the decision nor the listeners belong to a step

    def log(self, values: dict[str, float]) -> None:
        """Logs a row of values to every logger that has not failed.

        Args:
            values: By name of the metric.
        """
        for logger in list(self._loggers):
            self._try(logger, partial(logger.log_row, values))

    @_harmless
    def end(self, summary: Callable[[], str], error: BaseException | None = None) -> None:
        """Called when training has ended; a second call does nothing.

        Args:
            summary: Returns what is printed at the end.
            error: What ended it, if something did.
        """
        if not self._listeners:
            return
        self._tell_decisions()
        totals = self._totals(summary(), error)
        self._tell(lambda listener: listener.ended(totals))
        self._loggers.clear()
        self._forget()

    def give_up(self, error: Exception) -> None:
        """Called when the run could not be read: there will be no more reports.

        Args:
            error: Why.
        """
        names = ", ".join(_name(listener) for listener in self._listeners)
        self._forget()  # but loggers go on with the values of steps
        rank_zero_warn(
            f"autoprec: the run could not be read ({type(error).__name__}: {error}), so that {names or 'reports'} get"
            " nothing more; the training goes on."
        )

    # ---- inside ----

    def _tell_decisions(self) -> None:
        history, seen = self._steering.history, self._seen_decisions
        new = list(history[seen:])
        self._seen_decisions = len(history)
        if new:
            self._tell(lambda listener: listener.decided(new))

    def _forget(self) -> None:
        """Lets go of the run, so that a callback that is kept or copied does not bring the Trainer with it."""
        self._listeners.clear()
        for name in ("_trainer", "_steering"):
            self.__dict__.pop(name, None)

    def _tell(self, tell: Callable[[ProgressListener], None]) -> None:
        for listener in list(self._listeners):
            self._try(listener, partial(tell, listener))

    def _try(self, listener: ProgressListener, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a report must not cost the run
            self._listeners = [each for each in self._listeners if each is not listener]
            self._loggers = [each for each in self._loggers if each is not listener]
            self.has_lost_a_logger |= isinstance(listener, LoggerListener)
            rank_zero_warn(
                f"autoprec: {_name(listener)} failed ({type(error).__name__}: {error}) and is off from here on; the"
                " training goes on."
            )

    def _reading(self, now: float, decision_s: float) -> ProgressReading:
        trainer, steering, knobs = self._trainer, self._steering, self._steering.knobs
        telemetry = steering.telemetry
        formats, before = knobs.precision_map(), self._formats
        self._formats = formats
        step_s = statistics.median(self._step_s) if self._step_s else None
        size = self._batch_size()
        rows = None if size is None else size * knobs.accumulation.value
        return ProgressReading(
            window=steering.window,
            global_step=trainer.global_step,
            epoch=trainer.current_epoch,
            elapsed_s=now - self._begun_s,
            loss=self._mean_loss(),
            loss_scale=knobs.loss_scale.scale,
            clip_threshold=knobs.clip,
            batch_size=size,
            accumulate=knobs.accumulation.value,
            grad_norm=telemetry.norms[-1] if telemetry.norms else None,
            noise_scale=_finite(telemetry.noise.scale.estimate[0]),
            learning_rate=_finite(learning_rate(trainer)),
            applied=steering.applied_steps,
            skipped=steering.skipped_steps,
            undone=steering.undone_windows,
            rollbacks=steering.rollbacks,
            step_ms=None if step_s is None else step_s * 1e3,
            samples_per_s=rows / step_s if rows is not None and step_s else None,
            decision_ms=decision_s * 1e3,
            memory_bytes=self._memory_bytes(),
            utilisation=self._utilisation(),
            formats=formats,
            changed={name: value for name, value in formats.items() if before.get(name) != value},
            activation_amax={name: unit.act_amax[-1] for name, unit in telemetry.units.items() if unit.act_amax},
            grad_norms={name: unit.norms[-1] for name, unit in telemetry.units.items() if unit.norms},
            overflows={name: unit.overflow_count for name, unit in telemetry.units.items() if unit.overflow_count},
            costs=self._new_costs(),
        )

    def _mean_loss(self) -> float | None:
        telemetry = self._steering.telemetry
        count, self._seen_losses = telemetry.loss_count - self._seen_losses, telemetry.loss_count
        new = list(telemetry.losses)[-count:] if count > 0 else []
        if not new:
            return None
        finite = [loss for loss in new if math.isfinite(loss)]
        return sum(finite) / len(finite) if finite else math.nan

    def _batch_size(self) -> int | None:
        size = self._steering.knobs.batch_size.size
        return loader_batch_size(self._trainer) if size is None else size

    def _memory_bytes(self) -> int | None:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return resident_bytes()

    def _utilisation(self) -> float | None:
        busy = self._load.utilization()
        return min(max(busy, 0.0), 1.0) if math.isfinite(busy) else None

    def _new_costs(self) -> Costs | None:
        table = self._steering.costs.table
        if not table or table == self._costs:
            return None
        self._costs = table
        found = {unit: {name: table.cost(unit, name) for name in table.formats(unit)} for unit in table.units}
        return {
            unit: {name: cost._asdict() for name, cost in formats.items() if cost is not None}
            for unit, formats in found.items()
        }

    def _totals(self, summary: str, error: BaseException | None) -> RunTotals:
        steering = self._steering
        ended: HowEnded = (
            "finished" if error is None else "interrupted" if isinstance(error, _INTERRUPTIONS) else "failed"
        )
        words = "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
        is_cuda = self._device.type == "cuda"
        return RunTotals(
            ended=ended,
            error=words,
            window=steering.window,
            applied=steering.applied_steps,
            skipped=steering.skipped_steps,
            undone=steering.undone_windows,
            rollbacks=steering.rollbacks,
            lost_windows=steering.lost_windows,
            wall_s=time.monotonic() - self._begun_s,
            decision_s=self._decision_s,
            peak_bytes=int(torch.cuda.max_memory_allocated(self._device)) if is_cuda else peak_resident_bytes(),
            metrics=_metrics(self._trainer),
            formats=steering.knobs.precision_map(),
            overflows=dict(steering.fallback.overflows),
            summary=summary,
            history=tuple(steering.history),
        )


def _run_info(trainer: Any, steering: Steering, settings: PluginSettings, policy: str, interval: int) -> RunInfo:
    knobs = steering.knobs
    device = describe(trainer.strategy.root_device)
    now = circumstances(torch.get_num_threads())
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    return RunInfo(
        model=type(trainer.lightning_module).__qualname__,
        started_at=now["date"],
        command=command_line(),
        versions=now["versions"],
        device=device.name,
        device_type=trainer.strategy.root_device.type,
        machine={**now["machine"], "threads": now["threads"]},
        policy=policy,
        interval=interval,
        knobs=tuple(knob for knob in settings.knobs if knob not in knobs.masked),
        masked=dict(knobs.masked),
        settings=primitive(asdict(settings.config)),
        base_precision=str(knobs.base.precision),
        units=tuple(
            UnitInfo(
                name=unit.name,
                kind=unit.kind,
                parameter_count=unit.parameter_count,
                depth=unit.depth,
                left_alone=unit.reason,
                emulated=tuple(name for name in unit.legal if unit.is_emulated(name)),
            )
            for unit in knobs.units.values()
        ),
        formats=knobs.precision_map(),
        parameter_count=sum(_size(parameter) for parameter in steering.root.parameters()),
        seed=int(seed) if seed.lstrip("-").isdigit() else None,
        window=steering.window,
        restored_decisions=steering.history.restored,
        max_steps=trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else None,
        max_epochs=trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None,
    )


def _name(listener: ProgressListener) -> str:
    return str(getattr(listener, "name", type(listener).__qualname__))


def _size(parameter: torch.nn.Parameter) -> int:
    return 0 if torch.nn.parameter.is_lazy(parameter) else parameter.numel()


def _metrics(trainer: Any) -> dict[str, float]:
    """Last values of what the module has logged."""
    values = {}
    for name, value in trainer.callback_metrics.items():
        if not name.startswith("autoprec/") and (not isinstance(value, torch.Tensor) or value.numel() == 1):
            with suppress(TypeError, ValueError, RuntimeError):  # of a text, or of a complex number
                values[str(name)] = float(value)
    return values


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
