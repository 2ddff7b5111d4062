"""A run's monitoring: a listener that keeps what it is told as plain numbers, and shows them to whoever asks.

What lives here: when it opens and closes, and what each event changes. What does not: the metrics (``metrics``), and
how they leave the process (``server``, ``sending``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from autoprec.history import Decision
from autoprec.monitoring.config import PORT_VARIABLE, MonitorConfig, from_environment
from autoprec.monitoring.metrics import RUN_LABELS, RunValues, as_label
from autoprec.monitoring.values import StepReader
from autoprec.progress_reading import ProgressReading, RunInfo, RunTotals
from autoprec.steering import Steering
from autoprec.trainer_facts import loader_batch_size, progress

if TYPE_CHECKING:
    from autoprec.monitoring.sending import Sender
    from autoprec.monitoring.server import MetricsServer


class Monitor:
    """Shows one fit.

    Args:
        config: Where.
        trainer: The Trainer.
        steering: State of the fit.

    Attributes:
        url: Where the metrics can be read, ``None`` while nothing listens.
    """

    def __init__(self, config: MonitorConfig, trainer: Any, steering: Steering) -> None:
        self.url: str | None = None
        self._config = config
        self._trainer = trainer
        self._reader = StepReader(steering, loader_batch_size(trainer))
        self._values: RunValues | None = None
        self._server: MetricsServer | None = None
        self._sender: Sender | None = None
        self._observe: Callable[[float], None] | None = None
        self._begun = 0.0

    # ---- what the feed tells ----

    def started(self, info: RunInfo) -> None:
        """Opens.

        Args:
            info: The run.
        """
        try:
            self._open(info)
        except BaseException:
            self.close()
            raise

    def _open(self, info: RunInfo) -> None:
        from prometheus_client import CollectorRegistry

        from autoprec.monitoring.collector import RunCollector, step_histogram

        device = self._trainer.strategy.root_device
        labels = (as_label(self._config.run or run_name(self._trainer, info.model)), str(device))
        self._values = RunValues(info, self._config.max_units, started_at=time.time())
        self._values.step, self._values.progress = self._reader.read(), progress(self._trainer)
        registry = CollectorRegistry()
        registry.register(RunCollector(self._values, device, labels))
        self._observe = step_histogram(registry, labels).observe
        if self._config.port is not None:
            self._listen(self._config.port, registry)
        if self._config.push_url is not None or self._config.textfile is not None:
            from autoprec.monitoring.sending import Sender

            self._sender = Sender(self._config, registry, dict(zip(RUN_LABELS, labels, strict=True)))

    def _listen(self, port: int, registry: Any) -> None:
        from autoprec.monitoring.server import MetricsServer

        try:
            self._server = MetricsServer(self._config.address, port, registry)
        except OSError as error:
            rank_zero_warn(
                f"autoprec: metrics are not shown, because nothing can listen on {self._config.address} port {port}:"
                f" {error.strerror or error}. Training goes on. Port 0 takes a free one."
            )
            return
        self.url = self._server.url
        rank_zero_info(f"autoprec: metrics for Prometheus at {self.url}")

    def decided(self, decisions: Sequence[Decision]) -> None:
        """Counts decisions.

        Args:
            decisions: The new ones.
        """
        if self._values is None:
            return
        counts = dict(self._values.decisions)
        for decision in decisions:
            key = decision.knob, decision.outcome
            counts[key] = counts.get(key, 0) + 1
        self._values.decisions = counts

    def progressed(self, reading: ProgressReading) -> None:
        """Keeps what was measured for a decision.

        Args:
            reading: The run as it is.
        """
        if self._values is not None:
            self._values.reading, self._values.progress = reading, progress(self._trainer)
        if self._sender is not None:
            _say(self._sender)

    def ended(self, totals: RunTotals) -> None:
        """Closes.

        Args:
            totals: How training ended.
        """
        self.close()

    # ---- what the callback tells ----

    def begin_step(self) -> None:
        """Called when an optimizer window opens."""
        self._begun = time.perf_counter()

    def end_step(self) -> None:
        """Called when it is over; reads nothing from the device."""
        if self._values is None or self._observe is None:
            return
        try:
            self._observe(time.perf_counter() - self._begun)
            self._values.step = self._reader.read()
        except Exception as error:  # a report must not cost the run
            self.close()
            rank_zero_warn(f"autoprec: metrics are off from here on, training goes on: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends threads and sockets, after what is sent has been sent once more; a second call does nothing."""
        self.url = self._observe = None
        server, self._server = self._server, None
        sender, self._sender = self._sender, None
        if self._values is not None:
            self._values.is_running = False
        if server is not None:
            server.close()
        if sender is not None:
            sender.close()
            _say(sender)


def _say(sender: Sender) -> None:
    for fault in sender.faults():
        rank_zero_warn(f"autoprec: {fault}. Training goes on; it is tried again.")


def monitor_for(monitor: MonitorConfig | None, trainer: Any, steering: Steering) -> Monitor | None:
    """Returns the monitoring of a fit that begins; ``None`` where nobody asks for it, and on other ranks than zero.

    Args:
        monitor: What the callback was given. Where that is nothing, the environment may ask.
        trainer: The Trainer.
        steering: State of the fit.
    """
    if monitor is None:
        monitor, fault = from_environment()
        if fault:
            rank_zero_warn(
                f"autoprec: no metrics are shown for {PORT_VARIABLE}={os.environ[PORT_VARIABLE]!r}: {fault}."
            )
    return None if monitor is None or not trainer.is_global_zero else Monitor(monitor, trainer, steering)


def run_name(trainer: Any, model: str) -> str:
    """Returns a name for a run: its logger's name and version, else the class of the module.

    Args:
        trainer: The Trainer.
        model: The class.
    """
    logger = trainer.logger
    parts = () if logger is None else (logger.name, logger.version)
    known = [f"version_{part}" if isinstance(part, int) else str(part) for part in parts if part not in (None, "")]
    return "/".join(known) or model
