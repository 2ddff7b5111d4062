"""What a process that works for another one does first: ends with it, and prints into a file."""

from __future__ import annotations

import os
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread


def end_with_parent() -> None:
    """Ends this process as soon as its parent is gone, also in the middle of a step."""
    parent = parent_process()
    assert parent is not None, "a run has a process of its own"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, name="autoprec-parent", daemon=True).start()


def redirect_output(log: Path) -> None:
    """Sends what this process prints into a file, which is emptied first.

    Args:
        log: The file.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
