"""Logs one run to one logger: metrics of decision points while it trains, and the whole run when it has ended.

What lives here: what every logger gets, and a file ``autoprec.json`` in the log folder of those without tables. What
does not: loggers that have a place for tables (``loggers``, ``wandb_logging``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoprec.history import Decision
from autoprec.json_files import write_json
from autoprec.progress_reading import ProgressReading, RunInfo, RunTotals
from autoprec.run_tables import FormatMap, document, end_metrics, reading_metrics, settings_of

FILE = "autoprec.json"
"""Name of the file or artifact of loggers that have no tables."""


class LoggerListener:
    """Logs the metrics of decision points, and what the whole run was when it has ended.

    Args:
        trainer: The Trainer.
        logger: One of its loggers.
    """

    def __init__(self, trainer: Any, logger: Any) -> None:
        self.logger = logger
        self._trainer = trainer
        self._restored = 0

    @property
    def name(self) -> str:
        """What a warning calls it."""
        return f"the logging to {type(self.logger).__qualname__}"

    @property
    def step(self) -> int:
        """Where Lightning's own values of this moment go, which is not ``global_step`` with several optimizers."""
        return int(self._trainer.fit_loop.epoch_loop._batches_that_stepped)

    def started(self, info: RunInfo) -> None:
        """Stores the settings and the first shares of formats."""
        self.info, self.formats = info, FormatMap(info)
        self._restored = info.restored_decisions
        self.log_settings(settings_of(info))
        self._log(self.formats.shares())

    def decided(self, decisions: Sequence[Decision]) -> None:
        """Notes which formats have changed, and when."""
        self.formats.note_decisions(decisions[self._restored :])
        self._restored = 0

    def progressed(self, reading: ProgressReading) -> None:
        """Logs one decision point."""
        self.formats.note(reading.formats, reading.window)
        self._log({**reading_metrics(reading), **self.formats.shares()})

    def ended(self, totals: RunTotals) -> None:
        """Stores tables, also of a run that has failed."""
        self.formats.note(totals.formats, totals.window)
        self._log({**end_metrics(totals), **self.formats.shares()})
        self.log_end(totals)

    def log_row(self, metrics: dict[str, float]) -> None:
        """Logs a row as Lightning does, of values that belong to a step.

        Args:
            metrics: Values by name.
        """
        self.logger.log_metrics({**metrics, "epoch": self._trainer.current_epoch}, step=self.step)
        self.logger.save()

    def _log(self, metrics: dict[str, float]) -> None:
        if metrics:
            self.logger.log_metrics(metrics, step=self.step)

    def log_settings(self, settings: dict[str, Any]) -> None:
        """Stores the settings where the logger has a place for them.

        Args:
            settings: What JSON can hold.
        """

    def log_end(self, totals: RunTotals) -> None:
        """Stores history and format map.

        Args:
            totals: How training ended.
        """
        folder = getattr(self.logger, "log_dir", None) or self.logger.save_dir
        if folder is not None and "://" not in str(folder):
            write_json(Path(folder) / FILE, document(self.info, totals, self.formats), allow_nan=False)
