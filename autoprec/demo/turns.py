"""Runs that take turns: each in a process of its own, one at a time, so that a slow spell of the machine hits all.

The order is reversed every round. A run that fails ends all of them with its own error; nothing waits for a process
that is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar

from autoprec.demo.messages import Command, Done, Evaluate, Evaluated, Failed, Finish, Go, Ready, Reply, Turn
from autoprec.demo.results import RunResult
from autoprec.demo.tasks import Arm, Task
from autoprec.demo.worker import serve

MIN_ROUNDS = 3
"""Rounds that are made whatever the time."""

_R = TypeVar("_R", Ready, Turn, Evaluated, Done)


class RunError(RuntimeError):
    """A run of the demo failed; the message holds what it raised and where its output is."""


class Worker:
    """The parent's side of a run's process.

    Args:
        task: What is trained.
        arm: How it is trained.
        seed: The run's seed.
        threads: Threads for one operation.
        logs: Folder of the file that receives what the run prints.
    """

    def __init__(self, task: Task, arm: Arm, seed: int, threads: int, logs: Path) -> None:
        self.result = RunResult(task.name, arm.name, seed, arm.formats)
        self._log = logs / f"{task.name}-{arm.name}-{seed}.log"
        # every run is forked from one server that has imported torch and lightning; elsewhere that is not safe
        context = get_context("forkserver") if sys.platform == "linux" else get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(task, arm, seed, threads, other, self._log), daemon=True)
        self._process.start()
        other.close()

    @property
    def name(self) -> str:
        """Name of the run in messages."""
        return f"{self.result.task}/{self.result.arm}/seed {self.result.seed}"

    def ask(self, command: Command, kind: type[_R]) -> _R:
        """Sends a command and returns the reply, which must be of the given kind.

        Raises:
            RunError: If the run failed or its process is gone.
        """
        with suppress(BrokenPipeError):  # why the run is gone is still to be read
            self._connection.send(command)
        return self.receive(kind)

    def receive(self, kind: type[_R]) -> _R:
        """Returns the next reply, which must be of the given kind.

        Raises:
            RunError: If the run failed or its process is gone.
        """
        wait([self._connection, self._process.sentinel])
        try:
            reply: Reply | None = self._connection.recv() if self._connection.poll() else None
        except (EOFError, ConnectionResetError):
            reply = None
        if reply is None:
            self._process.join()
            raise RunError(
                f"The run {self.name} is gone: its process ended with exit code {self._process.exitcode}."
                f" What it printed is in `{self._log}`."
            )
        if isinstance(reply, Failed):
            raise RunError(f"The run {self.name} failed. What it printed is in `{self._log}`.\n\n{reply.traceback}")
        assert isinstance(reply, kind), f"{self.name}: expected {kind.__name__}, got {reply!r}"
        return reply

    def kill(self) -> None:
        """Ends the process, whatever it does; SIGTERM would not, because Lightning only takes note of it."""
        self._connection.close()
        self._process.kill()
        self._process.join()


@contextmanager
def open_workers(task: Task, threads: int, logs: Path) -> Iterator[list[Worker]]:
    """Starts one process for each run of the task and ends them all on the way out."""
    with ExitStack() as stack:
        workers = []
        with _passive_waiting():
            if sys.platform == "linux":
                _start_server()
            for arm, seed in task.runs:
                workers.append(Worker(task, arm, seed, threads, logs))
                stack.callback(workers[-1].kill)
        yield workers


@contextmanager
def _passive_waiting() -> Iterator[None]:
    """Has the OpenMP threads of new processes sleep while they wait, unless the user chose something else.

    By default they spin, and on a machine with anything else to do that makes a step of two threads up to four times
    as long, at random.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def _start_server() -> None:
    forkserver.set_forkserver_preload(["torch", "lightning.pytorch", "autoprec.demo.worker"])
    resource_tracker.ensure_running()
    # the server inherits the mask: Ctrl-C is for this process alone, also while the server imports
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


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
    with open_workers(task, threads, logs) as workers:
        for worker in workers:
            worker.result.parameters = worker.receive(Ready).parameters
        started = time.monotonic()
        _add_points(workers)
        evaluation_s = time.monotonic() - started  # once more at the end
        _take_turns(task, workers, deadline - evaluation_s, on_turn)
        for worker in workers:
            worker.result.done = worker.ask(Finish(), Done)
        return [worker.result for worker in workers]


def _take_turns(task: Task, workers: list[Worker], deadline: float, on_turn: Callable[[RunResult], None]) -> None:
    steps, round_s = 0, 0.0
    for index in range(-(-task.steps // task.turn)):
        started = time.monotonic()
        before, steps = steps, min(steps + task.turn, task.steps)
        is_last = steps == task.steps or (index + 1 >= MIN_ROUNDS and started + 2 * round_s > deadline)
        for worker in workers if index % 2 == 0 else reversed(workers):
            worker.result.add_turn(worker.ask(Go(steps - before, is_last), Turn))
            on_turn(worker.result)
        round_s = time.monotonic() - started
        if is_last or steps * task.points // task.steps > before * task.points // task.steps:
            _add_points(workers)
        if is_last:
            return


def _add_points(workers: list[Worker]) -> None:
    for worker in workers:
        worker.result.add_point(worker.ask(Evaluate(), Evaluated).loss)
