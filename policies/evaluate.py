"""Plays policies and all their rivals on held-out tasks; goes on where it was stopped.

What lives here: which cells there are (a rival on a bank), running them in processes, and a small file for each, named
after everything that it depends on. What does not: what follows from the scores (``evaluation_results``).
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import autoprec
from autoprec.encoding import VERSION
from autoprec.envs.baselines import Scores
from autoprec.envs.proxies import Distribution, Task
from autoprec.envs.twins import Twin
from autoprec.json_files import read_json, write_json
from autoprec.ops import native
from autoprec.policies.raising import Raises, count_raises
from autoprec.policies.rivals import Rival
from autoprec.policies.task_groups import BANK_NAMES, evaluation_tasks, twin_digest

Tasks = Sequence[tuple[Task, Twin]]
CELLS = "cells"


class Progress(NamedTuple):
    """How far an evaluation is.

    Attributes:
        done: Cells that are done.
        total: All cells.
        seconds_left: What the others will take, by those that were played in this run; ``None`` before the first.
        what: What has just been done.
    """

    done: int
    total: int
    seconds_left: float | None
    what: str


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """What to play on what.

    Args:
        rivals: All rivals and, for each seed of the policy, one with the name ``policy``.
        banks: Banks of tasks, of ``task_groups.BANK_NAMES``.
        tasks: Tasks of the first bank that count.
        other_tasks: The same of each further bank.
        out: Folder for results; what is there already is not played again.
        processes: Cells that are played at a time, on one thread each.
        distribution: Instead of the banks' own; for tests.

    Raises:
        ValueError: If there is no such bank, or a number is too small.
    """

    rivals: tuple[Rival, ...]
    banks: tuple[str, ...] = ("test",)
    tasks: int = 400
    other_tasks: int = 150
    out: Path = Path("autoprec-evaluation")
    processes: int = 1
    distribution: Distribution | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Validates the fields."""
        unknown = [bank for bank in self.banks if bank not in BANK_NAMES]
        if unknown or not self.banks:
            raise ValueError(f"Passed the banks {list(self.banks)}. Banks are {sorted(BANK_NAMES)}.")
        for name in ("tasks", "other_tasks", "processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"Passed `{name}={getattr(self, name)}`. It must be 1 or more.")

    def count(self, bank: str) -> int:
        """Returns how many tasks of a bank are played.

        Args:
            bank: One of the banks.
        """
        return self.tasks if bank == self.banks[0] else self.other_tasks


@dataclass(frozen=True)
class Cell:
    """A rival on a bank.

    Attributes:
        rival: What is played.
        bank: Where.
        path: The file with its result.
    """

    rival: Rival
    bank: str
    path: Path


@dataclass(frozen=True)
class Played:
    """The result of a cell.

    Attributes:
        rival: What was played.
        bank: Where.
        scores: In the order of the tasks.
        raises: What a policy raised; ``None`` for others.
    """

    rival: Rival
    bank: str
    scores: Scores
    raises: Raises | None


def evaluate(
    settings: EvaluationSettings,
    *,
    progress: Callable[[Progress], None] | None = None,
    twins: Callable[[int, int], None] | None = None,
) -> list[Played]:
    """Plays what has not been played yet.

    Args:
        settings: What to play on what.
        progress: Called at first and after each cell.
        twins: Called as twins of tasks are trained, with how many are known and how many will be.

    Returns:
        All results, bank by bank in the order of the rivals.
    """
    tell = progress or (lambda now: None)
    cells = list(_cells(settings, twins))
    missing = [cell for cell in cells if _load(cell) is None]
    started, done = time.monotonic(), len(cells) - len(missing)
    tell(Progress(done, len(cells), None, "results that are there already"))
    for count, cell in enumerate(_run(settings, missing), start=1):
        left = (time.monotonic() - started) / count * (len(missing) - count)
        tell(Progress(done + count, len(cells), left, f"{cell.rival.description} on {cell.bank}"))
    found = [_load(cell) for cell in cells]
    assert all(found), "a cell that was played has a file"
    return [played for played in found if played is not None]


def code_digest() -> str:
    """Returns a short name of all code that results depend on, so that none of an older version is taken for new."""
    root = Path(autoprec.__file__).parent  # policies and envs lie in it once installed, and are links in a checkout
    paths = sorted(path for folder in (root, root / "policies", root / "envs") for path in folder.glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(text + f"{native.ABI_VERSION} {VERSION}".encode()).hexdigest()[:16]


def _cells(settings: EvaluationSettings, twins: Callable[[int, int], None] | None) -> Iterator[Cell]:
    code = code_digest()
    for bank in settings.banks:
        tasks = evaluation_tasks(bank, settings.count(bank), progress=twins, distribution=settings.distribution)
        of_tasks = twin_digest(tasks)
        for rival in settings.rivals:
            mark = hashlib.sha256(f"{code} {of_tasks} {rival.digest()}".encode()).hexdigest()[:16]
            yield Cell(rival, bank, settings.out / CELLS / f"{bank}-{rival.name}-{mark}.json")


def _run(settings: EvaluationSettings, cells: Sequence[Cell]) -> Iterator[Cell]:
    """Plays cells and yields each when it is done."""
    play = functools.partial(_play, distribution=settings.distribution)
    if settings.processes == 1 or len(cells) < 2:
        for cell in cells:
            play(cell, count=settings.count(cell.bank))
            yield cell
        return
    # spawned, because a fork of a process with threads may stand still
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(settings.processes, len(cells)), context, initializer=_use_one_thread)
    try:
        futures = {pool.submit(play, cell, count=settings.count(cell.bank)): cell for cell in cells}
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@functools.lru_cache(maxsize=4)
def _tasks(bank: str, count: int, distribution_json: str | None) -> Tasks:
    distribution = None if distribution_json is None else Distribution.model_validate_json(distribution_json)
    return evaluation_tasks(bank, count, distribution=distribution)


def _play(cell: Cell, count: int, distribution: Distribution | None) -> None:
    tasks = _tasks(cell.bank, count, None if distribution is None else distribution.model_dump_json())
    started = time.monotonic()
    scores, recording = cell.rival.play(tasks)
    raises = None if recording is None else asdict(count_raises(recording))
    columns = {name: values.tolist() for name, values in scores._asdict().items()}
    result = {
        "rival": cell.rival.name,
        "bank": cell.bank,
        "seconds": round(time.monotonic() - started, 1),
        "scores": columns,
        "raises": raises,
    }
    write_json(cell.path, result, allow_nan=False)


def _load(cell: Cell) -> Played | None:
    found = read_json(cell.path)
    if not isinstance(found, dict):
        return None
    scores = Scores(**{name: np.array(values) for name, values in found["scores"].items()})
    return Played(cell.rival, cell.bank, scores, _raises(found["raises"]))


def _raises(found: dict[str, Any] | None) -> Raises | None:
    return None if found is None else Raises(**{name: tuple(counts) for name, counts in found.items()})
