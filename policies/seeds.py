"""Trainings of several seeds, one after the other or in processes side by side, and which of them is the best.

A process ends with its parent. Whatever ends one, its folder is whole, and training goes on from there.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import KVWriter

from autoprec.json_files import read_json, write_json
from autoprec.own_process import end_with_parent, redirect_output
from autoprec.policies.ppo import train_policy
from autoprec.policies.train_settings import SettingsError, TrainSettings
from autoprec.policies.training_state import RESULT_FILE, is_result
from autoprec.policies.training_tasks import bank_tasks
from autoprec.policies.training_watch import Progress

LOG_FILE = "train.log"
SELECTION_FILE = "selection.json"
LAST_LINES = 12

MakeWriters = Callable[[int, Path], Sequence[KVWriter]]
"""From a seed and its folder to where metrics go."""
OnSeed = Callable[[int, Progress], None]


def no_writers(seed: int, folder: Path) -> Sequence[KVWriter]:
    """Keeps metrics in ``training.json`` alone."""
    return ()


def folder_of(out: Path, seed: int) -> Path:
    """Returns the folder of a seed.

    Args:
        out: Folder of all seeds.
        seed: The seed.
    """
    return out / f"seed-{seed}"


def train_seeds(
    settings: TrainSettings,
    seeds: Sequence[int],
    out: Path,
    *,
    jobs: int = 1,
    progress: OnSeed = lambda seed, now: None,
    writers: MakeWriters = no_writers,
) -> dict[int, str]:
    """Trains a policy for each seed; those that are finished stay as they are.

    Args:
        settings: What to train, and how.
        seeds: Different seeds.
        out: Each gets a folder in it.
        jobs: How many are trained at a time, each on one thread in a process of its own; 1 trains in this process.
        progress: Called with a seed and how far it is. The twins of tasks are trained once, for the first seed.
        writers: Where metrics go; importable.

    Returns:
        Why trainings failed, by seed: the last lines of what they printed.

    Raises:
        ValueError: If there is no seed, one comes twice, or ``jobs`` is below 1.
        SettingsError: If trainings of a module were to run side by side.
    """
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0 or jobs < 1:
        raise ValueError(f"Passed seeds={list(seeds)} and jobs={jobs}. Seeds are different and >= 0, jobs >= 1.")
    if jobs > 1 and settings.module is not None:
        raise SettingsError(
            f"Passed jobs={jobs}. Trainings of a module go by the clock and would slow each other down: train one seed"
            " at a time."
        )
    if jobs == 1 or len(seeds) == 1:
        for seed in seeds:
            folder = folder_of(out, seed)
            train_policy(
                settings, seed, folder, progress=partial(progress, seed), writers=partial(writers, seed, folder)
            )
        return {}
    bank_tasks(settings, partial(progress, seeds[0]))
    return _side_by_side(settings, seeds, out, jobs, progress, writers)


@dataclass
class _Job:
    process: Any
    connection: Connection
    log: Path


def _side_by_side(
    settings: TrainSettings, seeds: Sequence[int], out: Path, jobs: int, progress: OnSeed, writers: MakeWriters
) -> dict[int, str]:
    waiting, running, failures = list(seeds), dict[int, _Job](), dict[int, str]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                seed = waiting.pop(0)
                running[seed] = _start(settings, seed, folder_of(out, seed), writers)
            ready = wait([job.connection for job in running.values()])
            for seed, job in [(seed, job) for seed, job in running.items() if job.connection in ready]:
                try:
                    progress(seed, Progress(*job.connection.recv()))
                except (EOFError, OSError):  # it has ended, in the middle of a message perhaps
                    job.process.join()
                    del running[seed]
                    if job.process.exitcode != 0:
                        failures[seed] = f"exit code {job.process.exitcode}\n{_last_lines(job.log)}"
    finally:
        for job in running.values():
            job.process.kill()
            job.process.join()
    return failures


def _start(settings: TrainSettings, seed: int, folder: Path, writers: MakeWriters) -> _Job:
    folder.mkdir(parents=True, exist_ok=True)
    context = get_context("spawn")  # the parent has threads
    connection, other = context.Pipe(duplex=False)
    log = folder / LOG_FILE
    process = context.Process(target=_serve, args=(settings, seed, folder, writers, other, log))
    with _ctrl_c_withheld():
        process.start()
    other.close()
    return _Job(process, connection, log)


@contextmanager
def _ctrl_c_withheld() -> Iterator[None]:
    """Has Ctrl-C reach this process alone: one that is started meanwhile inherits the mask."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _serve(
    settings: TrainSettings, seed: int, folder: Path, writers: MakeWriters, connection: Connection, log: Path
) -> None:
    """Trains one seed; the main function of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    end_with_parent()
    redirect_output(log)

    def tell(now: Progress) -> None:
        with contextlib.suppress(OSError):
            connection.send(tuple(now))

    try:
        train_policy(settings, seed, folder, progress=tell, writers=partial(writers, seed, folder))
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _last_lines(log: Path) -> str:
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
    except OSError:
        return ""


def select(
    out: Path, seeds: Sequence[int], circumstances: Mapping[str, Any], *, failed: Container[int] = ()
) -> dict[str, Any]:
    """Writes which seed is the best in validation, and why, and returns it.

    Args:
        out: Folder of all seeds.
        seeds: Among which to select; those that have not finished are left out.
        circumstances: Command, date and so on, for the record.
        failed: Seeds whose training has failed; what their folders hold may be of other settings.

    Raises:
        ValueError: If none has finished.
    """
    results = {seed: read_json(folder_of(out, seed) / RESULT_FILE) for seed in seeds}
    finished = {seed: result for seed, result in results.items() if is_result(result) and seed not in failed}
    if not finished:
        raise ValueError(f"No training of seeds {list(seeds)} has finished in `{out}`. Run `autoprec train-policy`.")
    scores = {seed: result["best"]["score"] for seed, result in finished.items()}
    chosen = max(sorted(scores), key=lambda seed: scores[seed])
    selection = {
        "selected": chosen,
        "folder": folder_of(out, chosen).name,
        "why": "highest mean score of its best state on the validation bank; test banks were not looked at",
        "seeds": [{"seed": seed, **result["best"], "gain": result["gain"]} for seed, result in finished.items()],
        "unfinished": [seed for seed in seeds if seed not in finished],
        **circumstances,
    }
    write_json(out / SELECTION_FILE, selection, allow_nan=False)
    return selection
