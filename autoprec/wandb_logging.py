"""What goes to Weights & Biases: tables, settings and the map of a run, and the runs that autoprec opens itself.

A run of the user's is never opened, renamed or finished here: ``WandbListener`` writes into the one that a WandbLogger
has. ``open_run`` is for commands that train by themselves. wandb's own step is never set, so that no row is dropped,
whoever else logs and wherever a resumed run goes on; the axis is a metric.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from autoprec import metric_names
from autoprec.history import History
from autoprec.logger_listener import LoggerListener
from autoprec.progress_reading import RunTotals
from autoprec.run_tables import FORMAT_COLUMNS, HISTORY_COLUMNS, history_rows

SaveMap: TypeAlias = Callable[[Path], None]

ARTIFACT_TYPE: Final = "policy"
JOB_TYPES: Final = {
    "32-true": "fp32",
    "32-true-medium": "fp32-medium",
    "bf16-mixed": "amp-bf16",
    "16-mixed": "amp-fp16",
    "bf16-true": "bf16-true",
}
"""Job type of a run with a static precision, by the Trainer's ``precision``."""

COMPARISON: Final = "comparison"
"""Job type of the one run in a group that has the verdict."""

VERDICT_COLUMNS: Final = [
    "arm",
    "seeds",
    "step_ms",
    "time_ratio",
    "metric",
    "difference",
    "relation",
    "peak_MiB",
    "skipped",
]

_INIT_TIMEOUT_S = 30.0


class WandbListener(LoggerListener):
    """Logs into the run of a WandbLogger.

    Args:
        trainer: The Trainer.
        logger: Its WandbLogger.
        save: Writes the map in force.
    """

    def __init__(self, trainer: Any, logger: Any, save: SaveMap) -> None:
        super().__init__(trainer, logger)
        self._save = save

    def log_settings(self, settings: dict[str, Any]) -> None:
        """Puts the settings under one key of the config, and autoprec's metrics on the logger's own axis."""
        run = self.logger.experiment
        run.config.update({metric_names.CONFIG: settings}, allow_val_change=True)
        prefix = f"{self.logger._prefix}{self.logger.LOGGER_JOIN_CHAR}" if self.logger._prefix else ""
        if not self.logger._wandb_init.get("sync_tensorboard"):  # it has an axis of its own
            run.define_metric(f"{prefix}{metric_names.PREFIX}*", step_metric=metric_names.STEP, step_sync=True)

    def log_end(self, totals: RunTotals) -> None:
        """Logs both tables in one row, and the map as an artifact."""
        import wandb

        tables = {
            metric_names.HISTORY: wandb.Table(columns=[*HISTORY_COLUMNS], data=history_rows(totals.history)),
            metric_names.FORMAT_MAP: wandb.Table(columns=[*FORMAT_COLUMNS], data=self.formats.rows(totals.window)),
        }
        self.logger.log_metrics(tables, step=self.step)
        self._log_artifact(totals)

    def _log_artifact(self, totals: RunTotals) -> None:
        import wandb

        run = self.logger.experiment
        metadata = {"policy": self.info.policy, "ended": totals.ended, "windows": totals.window}
        artifact = wandb.Artifact(f"autoprec-{run.id}", type=ARTIFACT_TYPE, metadata=metadata)
        with tempfile.TemporaryDirectory() as folder:
            self._save(Path(folder, "map.yaml"))
            History(totals.history).to_jsonl(Path(folder, "history.jsonl"))
            artifact.add_dir(folder)
            run.log_artifact(artifact)


def open_run(
    project: str,
    *,
    group: str,
    job_type: str,
    name: str,
    folder: Path,
    config: Mapping[str, Any],
    say: Callable[[str], None],
) -> Any:
    """Opens a run that autoprec finishes itself, beside any that is open; the environment's group and job type win.

    Without a login, or where the server is not reached, the run is offline, for ``wandb sync`` to send later.

    Args:
        project: Project of Weights & Biases.
        group: What runs belong to that are compared.
        job_type: What the run is in its group.
        name: Name of the run.
        folder: Where wandb keeps its files.
        config: Settings, under the one key ``autoprec``.
        say: Is told why a run is offline where nobody asked for that.

    Returns:
        The run, ``wandb.sdk.wandb_run.Run``.
    """
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "project": project,
        "group": os.environ.get("WANDB_RUN_GROUP") or group,
        "job_type": os.environ.get("WANDB_JOB_TYPE") or job_type,
        "name": name,
        "dir": str(folder.resolve()),  # wandb's service may have another working directory
        "config": {metric_names.CONFIG: dict(config)},
        "reinit": "create_new",
        "settings": wandb.Settings(init_timeout=_INIT_TIMEOUT_S, silent=True),
    }
    if os.environ.get("WANDB_MODE"):
        return wandb.init(**options)
    if not wandb.login(prompt=False, verify=False):
        say("Weights & Biases: no login (`wandb login`), so that runs are stored offline.")
        return wandb.init(**options, mode="offline")
    try:
        return wandb.init(**options)
    except (wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
        say(f"Weights & Biases cannot be reached ({str(error).splitlines()[0]}), so that runs are stored offline.")
        return wandb.init(**options, mode="offline")
