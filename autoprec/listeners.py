"""Who listens to a fit: the options of the callback and the Trainer's loggers, as listeners.

A new option adds its listener in :func:`listeners_for`, and imports what it needs there. Options are checked when the
callback is made, not here: a fault from here on must not end a training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from autoprec.history import History
from autoprec.progress_reading import ProgressListener
from autoprec.record_writer import RecordWriter


def check_record(record: Any) -> None:
    """Refuses what is neither a bool nor a path.

    Raises:
        TypeError: If it is something else.
    """
    if not isinstance(record, (bool, str, Path)):
        raise TypeError(f"Passed `AutoPrecisionCallback(record={record!r})`. It must be a bool or a path.")


def listeners_for(trainer: Any, record: bool | str | Path = False) -> list[ProgressListener]:
    """Returns the listeners of a fit, none on other ranks than zero.

    Args:
        trainer: The Trainer.
        record: Whether, or in which folder, a record of the run is kept.
    """
    if not trainer.is_global_zero:
        return []
    listeners: list[ProgressListener] = []
    if record is not False:
        folder = Path(trainer.log_dir or trainer.default_root_dir) / "autoprec" if record is True else Path(record)
        listeners.append(RecordWriter(folder))
    return listeners


def write_history(history: History, trainer: Any, history_file: bool | str | Path) -> None:
    """Writes every decision as JSON Lines, on rank zero, if that is asked for; a full disk must not cost the run.

    Args:
        history: The decisions.
        trainer: The Trainer.
        history_file: ``True`` for ``autoprec.jsonl`` in its log folder, or a path.
    """
    if history_file is False or not trainer.is_global_zero:
        return
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    path = folder / "autoprec.jsonl" if history_file is True else Path(history_file)
    try:
        history.to_jsonl(path)
    except OSError as error:
        rank_zero_warn(f"autoprec: the history could not be written to {str(path)!r}: {error}")
