"""The fp32 twins of tasks: what each makes of its budget in fp32 without clipping. Computed once, kept on disk."""

from __future__ import annotations

import itertools
import json
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import platformdirs

from autoprec.envs.costs import learning_rate
from autoprec.envs.engine import MAX_STEPS, Engine
from autoprec.envs.proxies import BASE_BATCH, BATCH_SIZES, Bank, Task
from autoprec.envs.reward import LEAST_PROGRESS
from autoprec.json_files import write_whole
from autoprec.ops import native

CHUNK = 64
"""Tasks whose twins are run together and then written to disk."""


class Twin(NamedTuple):
    """What the fp32 twin of a task made of its budget.

    Attributes:
        first_loss: Held-out loss before training.
        last_loss: The same after it.
    """

    first_loss: float
    last_loss: float

    @property
    def progress(self) -> float:
        """Fall of the log loss."""
        return float(np.log(self.first_loss / self.last_loss)) if self.last_loss > 0 else 0.0

    @property
    def is_usable(self) -> bool:
        """Whether it made enough progress to be a unit of measure."""
        return LEAST_PROGRESS <= self.progress < np.inf


def run_twins(tasks: Sequence[Task], *, threads: int = 1) -> list[Twin]:
    """Trains the twins of some tasks.

    Args:
        tasks: Tasks, of any kind together.
        threads: Threads to share them out to.
    """
    if not tasks:
        return []
    with Engine(len(tasks), threads=threads) as engine:
        for index, task in enumerate(tasks):
            engine.start(index, task.spec)
        knobs = engine.knobs
        knobs["batch"], knobs["clip_multiplier"] = BATCH_SIZES[BASE_BATCH], np.inf
        knobs["is_evaluated"], knobs["loss_scale"] = 1, 1.0
        first = last = engine.run()["evaluation_loss"].astype(float)
        budget = np.array([task.budget for task in tasks])
        done = np.zeros(len(tasks), dtype=np.int64)
        while (done < budget).any():
            steps = np.minimum(MAX_STEPS, budget - done)
            knobs["steps"], knobs["is_evaluated"] = steps, done + steps == budget
            knobs["lr_begin"] = learning_rate(tasks, done / budget)
            knobs["lr_end"] = learning_rate(tasks, (done + steps) / budget)
            losses = engine.run()["evaluation_loss"].astype(float)
            last = np.where(knobs["is_evaluated"] == 1, losses, last)
            done += steps
    return [Twin(float(before), float(after)) for before, after in zip(first, last, strict=True)]


def cache_folder() -> Path:
    """Returns where twins are kept: in ``AUTOPREC_CACHE_DIR``, else in the user's folder for caches."""
    return Path(os.environ.get("AUTOPREC_CACHE_DIR") or platformdirs.user_cache_dir("autoprec")) / "twins"


def bank_twins(
    bank: Bank, *, folder: Path | None = None, threads: int = 1, progress: Callable[[int, int], None] | None = None
) -> list[Twin]:
    """Returns the twin of each task of a bank; what is not on disk yet is trained and written, chunk by chunk.

    Args:
        bank: The bank.
        folder: Where twins are kept; the user's cache by default.
        threads: Threads to share a chunk out to.
        progress: Called with how many are known and how many there are.
    """
    path = (folder or cache_folder()) / f"{bank.distribution.digest()}-{native.ABI_VERSION}-{bank.first_seed}.json"
    tasks = list(bank)
    marks = [_mark(task) for task in tasks]
    stored = _load(path)
    good = sum(1 for _ in itertools.takewhile(lambda pair: pair[0][0] == pair[1], zip(stored, marks, strict=False)))
    rows = stored if good == len(bank) else stored[:good]  # those of a longer bank are kept
    is_kept = True
    for start in range(len(rows), len(bank), CHUNK):
        chunk = range(start, min(start + CHUNK, len(bank)))
        trained = run_twins([tasks[index] for index in chunk], threads=threads)
        rows += [[marks[index], *twin] for index, twin in zip(chunk, trained, strict=True)]
        if is_kept:
            is_kept = _is_saved(path, rows)
        if progress is not None:
            progress(len(rows), len(bank))
    return [Twin(float(first), float(last)) for _, first, last in rows[: len(bank)]]


def _mark(task: Task) -> int:
    """A number that changes with everything a twin depends on, so that no stale one is taken for it."""
    return zlib.crc32(task.spec.tobytes() + repr((task.lr, task.warmup, task.decays, task.budget)).encode())


def _load(path: Path) -> list[list[Any]]:
    try:
        return [[int(mark), float(first), float(last)] for mark, first, last in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return []  # nothing there yet, or half a file of another program: it is made anew


def _is_saved(path: Path, rows: list[list[Any]]) -> bool:
    try:
        _save(path, rows)
    except OSError as error:
        warnings.warn(
            f"The fp32 twins of proxy tasks could not be kept in `{path.parent}` ({error.strerror or error}), so they"
            " are trained anew each time. Set AUTOPREC_CACHE_DIR to a folder that can be written.",
            stacklevel=4,
        )
        return False
    return True


def _save(path: Path, rows: list[list[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(rows).encode())
