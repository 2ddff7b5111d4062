"""The runs of a task of the demo in turns; a run that fails ends all of them with its own error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from autoprec.compare.messages import Done, Evaluate, Evaluated, Finish, Ready, Turn
from autoprec.compare.turns import Job, Plan, Worker, open_workers, take_turns
from autoprec.demo.results import RunResult
from autoprec.demo.tasks import Task
from autoprec.demo.worker import train


@contextmanager
def open_task(task: Task, threads: int, logs: Path) -> Iterator[list[Worker]]:
    """Starts one process for each run of the task, in their order, and ends them all on the way out.

    Args:
        task: What is trained.
        threads: Threads for one operation.
        logs: Folder for what the runs print.
    """
    jobs = [
        Job(
            f"{task.name}/{arm.name}/seed {seed}",
            partial(train, task, arm, seed),
            logs / f"{task.name}-{arm.name}-{seed}.log",
            threads,
        )
        for arm, seed in task.runs
    ]
    with open_workers(jobs) as workers:
        yield workers


def run_in_turns(
    task: Task, threads: int, logs: Path, deadline: float, on_turn: Callable[[RunResult], None]
) -> list[RunResult]:
    """Trains every run of the task, a few steps in turn.

    Args:
        task: What is trained.
        threads: Threads for one operation.
        logs: Folder for what the runs print.
        deadline: Value of ``time.monotonic()`` after which no further round starts; all runs then have equally many
            steps, fewer than planned.
        on_turn: Called after each turn with the run's result so far.

    Returns:
        The results in the order of ``task.runs``.

    Raises:
        RunError: If a run failed.
    """
    results = [RunResult(task.name, arm.name, seed, arm.formats) for arm, seed in task.runs]
    with open_task(task, threads, logs) as workers:
        of_worker = dict(zip(workers, results, strict=True))
        for worker, result in of_worker.items():
            result.parameters = worker.receive(Ready).parameters

        def add_points() -> None:
            for worker, result in of_worker.items():
                result.add_point(worker.ask(Evaluate(), Evaluated).loss)

        def add_turn(worker: Worker, turn: Turn) -> None:
            of_worker[worker].add_turn(turn)
            on_turn(of_worker[worker])

        def end_round(before: int, steps: int, is_last: bool) -> None:
            if is_last or steps * task.points // task.steps > before * task.points // task.steps:
                add_points()

        started = time.monotonic()
        add_points()
        evaluation_s = time.monotonic() - started  # once more at the end
        take_turns(workers, Plan(task.steps, task.turn, deadline - evaluation_s), add_turn, end_round)
        for worker, result in of_worker.items():
            result.done = worker.ask(Finish(), Done)
    return results
