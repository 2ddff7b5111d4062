"""Who listens to a fit: the options of the callback and the Trainer's loggers, as listeners.

A new option adds its listener in :func:`listeners_for`, and imports what it needs there. Options are checked when the
callback is made, not here: a fault from here on must not end a training.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from autoprec.history import History
from autoprec.loggers import logger_listeners
from autoprec.progress_reading import ProgressListener
from autoprec.record_writer import RecordWriter

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a drive of Windows has one letter


def check_path(name: str, value: Any) -> None:
    """Refuses what is neither a bool nor a path on this machine.

    Args:
        name: Argument of the callback.
        value: What was passed.

    Raises:
        TypeError: If it is something else.
        ValueError: If it is a URL.
    """
    if not isinstance(value, (bool, str, Path)):
        raise TypeError(f"Passed `AutoPrecisionCallback({name}={value!r})`. It must be a bool or a path.")
    if not isinstance(value, bool) and _URL.match(str(value)):
        raise ValueError(
            f"Passed `AutoPrecisionCallback({name}={str(value)!r})`. It must be a path on this machine, not a URL; copy"
            " what is written there when training has ended."
        )


def listeners_for(trainer: Any, record: bool | str | Path = False) -> list[ProgressListener]:
    """Returns the listeners of a fit, none on other ranks than zero.

    Args:
        trainer: The Trainer.
        record: Whether, or in which folder, a record of the run is kept.
    """
    if not trainer.is_global_zero:
        return []
    listeners = logger_listeners(trainer)
    folder = _place(trainer, "record", record, "autoprec")
    if folder is not None:
        listeners.append(RecordWriter(folder))
    return listeners


def write_history(history: History, trainer: Any, history_file: bool | str | Path) -> None:
    """Writes every decision as JSON Lines, on rank zero, if that is asked for; a full disk must not cost the run.

    Args:
        history: The decisions.
        trainer: The Trainer.
        history_file: ``True`` for ``autoprec.jsonl`` in its log folder, or a path.
    """
    path = _place(trainer, "history_file", history_file, "autoprec.jsonl") if trainer.is_global_zero else None
    if path is None:
        return
    try:
        history.to_jsonl(path)
    except OSError as error:
        rank_zero_warn(f"autoprec: the history could not be written to {str(path)!r}: {error}")


def _place(trainer: Any, option: str, value: bool | str | Path, name: str) -> Path | None:
    """Returns where an option has something written, ``None`` for nowhere."""
    if not isinstance(value, bool):
        return Path(value)
    if not value:
        return None
    folder = str(trainer.log_dir or trainer.default_root_dir)
    if not _URL.match(folder):
        return Path(folder) / name
    rank_zero_warn(
        f"autoprec: nothing is written for `{option}=True`, because the log folder of the Trainer, {folder!r}, is not"
        f" on this machine; the training goes on. Pass a path: `AutoPrecisionCallback({option}=...)`."
    )
    return None
