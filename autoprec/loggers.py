"""The Trainer's loggers, each with the listener that knows what the logger has a place for.

Metrics of decision points go to every logger, on the step axis that Lightning itself logs on. Tables and settings go to
Weights & Biases (``wandb_logging``), into TensorBoard as text, to MLflow as an artifact, and into a file in the log
folder of any other logger (``logger_listener``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoprec import metric_names
from autoprec.logger_listener import FILE, LoggerListener
from autoprec.map_file import save_map
from autoprec.progress_reading import ProgressListener, RunTotals
from autoprec.run_tables import FORMAT_COLUMNS, HISTORY_COLUMNS, document, history_rows, markdown
from autoprec.wandb_logging import SaveMap, WandbListener

_TEXT_ROWS = 500  # TensorBoard draws no more rows of a text in a time that anybody waits


class TensorBoardListener(LoggerListener):
    """The same, with settings, history and format map as text."""

    def log_settings(self, settings: dict[str, Any]) -> None:
        """Adds the settings as a table."""
        rows: list[Any] = [[name, value] for name, value in _flat(settings)]
        self._add(metric_names.SETTINGS, ["setting", "value"], rows)

    def log_end(self, totals: RunTotals) -> None:
        """Adds the tables."""
        self._add(metric_names.FORMAT_MAP, FORMAT_COLUMNS, self.formats.rows(totals.window))
        self._add(metric_names.HISTORY, HISTORY_COLUMNS, history_rows(totals.history))

    def _add(self, tag: str, columns: Sequence[str], rows: list[Any]) -> None:
        said = f"\n\nThe last {_TEXT_ROWS} of {len(rows)} rows." if len(rows) > _TEXT_ROWS else ""
        self.logger.experiment.add_text(tag, markdown(columns, rows[-_TEXT_ROWS:]) + said, self.step)


class MLFlowListener(LoggerListener):
    """The same, with an artifact of the run in place of a file."""

    def log_end(self, totals: RunTotals) -> None:
        """Adds the artifact."""
        self.logger.experiment.log_dict(self.logger.run_id, document(self.info, totals, self.formats), FILE)


def logger_listeners(trainer: Any) -> list[ProgressListener]:
    """Returns a listener for each logger of a Trainer whose fit has begun.

    Args:
        trainer: The Trainer.
    """
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
    from lightning.pytorch.loggers.logger import DummyLogger

    listeners: list[ProgressListener] = []
    for logger in trainer.loggers:
        if isinstance(logger, DummyLogger):  # of `fast_dev_run`
            continue
        if isinstance(logger, WandbLogger):
            listeners.append(WandbListener(trainer, logger, _map_saver(trainer)))
        elif isinstance(logger, TensorBoardLogger):
            listeners.append(TensorBoardListener(trainer, logger))
        elif isinstance(logger, MLFlowLogger):
            listeners.append(MLFlowListener(trainer, logger))
        else:
            listeners.append(LoggerListener(trainer, logger))
    return listeners


def others_log(trainer: Any) -> bool:
    """Whether a row goes to the loggers with the next step that Lightning logs, with or without values of autoprec.

    Args:
        trainer: The Trainer, in a training step.
    """
    metas = (result.meta for result in trainer._results.values())
    return any(meta.logger and meta.on_step and not meta.name.startswith(metric_names.PREFIX) for meta in metas)


def take_back(trainer: Any) -> None:
    """Takes what autoprec has logged in the epoch so far from what Lightning logs again with every such step.

    Args:
        trainer: The Trainer, in a training step.
    """
    results = trainer._results
    for key in [key for key, result in results.items() if result.meta.name.startswith(metric_names.PREFIX)]:
        del results[key]


def _map_saver(trainer: Any) -> SaveMap:
    knobs = trainer.strategy.precision_plugin.steering.knobs  # the plugin is gone when the run has ended
    return lambda path: save_map(path, *knobs.map_to_save())


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return pairs
