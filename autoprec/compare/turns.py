"""Runs that take turns: each in a process of its own, one at a time, so that a slow spell of the machine hits all.

The order is reversed every round. Nothing waits for a process that is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TypeVar

from autoprec.compare.child import Body, serve
from autoprec.compare.messages import Command, Done, Evaluated, Failed, Go, Ready, Reply, Turn

MIN_ROUNDS = 3
"""Rounds that are made whatever the time."""

TURN_S = 1.0
"""Seconds that a turn should take where its number of steps is left open."""

MAX_TURN = 20
"""Most steps of such a turn."""

_R = TypeVar("_R", Ready, Turn, Evaluated, Done)


class RunError(RuntimeError):
    """A run failed; the message holds what it raised and where its output is.

    Args:
        message: All of it.
        reason: In a line, for a table.
        is_target: Whether what is to be trained is at fault, not the run.
    """

    def __init__(self, message: str, reason: str = "", is_target: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_target = is_target


@dataclass(frozen=True)
class Job:
    """What one process trains.

    Args:
        name: Name of the run in messages.
        body: Trains; importable, because it runs in another process.
        log: File that receives what the run prints.
        threads: Threads for one operation.
        environment: Variables that must be set before the libraries are loaded.
    """

    name: str
    body: Body
    log: Path
    threads: int
    environment: Mapping[str, str] | None = None


class Worker:
    """The parent's side of a run's process.

    Args:
        job: What it trains.
    """

    def __init__(self, job: Job) -> None:
        self.name = job.name
        self._log = job.log
        # a run is forked from one server that has imported torch and lightning; elsewhere, and where variables decide
        # how libraries load, that is no way
        is_forked = sys.platform == "linux" and job.environment is None
        context = get_context("forkserver") if is_forked else get_context("spawn")
        self._connection, other = context.Pipe()
        # no daemon: the loaders of a run may have processes of their own
        self._process = context.Process(target=serve, args=(job.body, job.threads, other, job.log))
        with _variables(job.environment or {}):
            self._process.start()
        other.close()

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
            code = self._process.exitcode
            raise RunError(
                f"The run {self.name} is gone: its process ended with exit code {code}."
                f" What it printed is in `{self._log}`.",
                f"its process ended with exit code {code}",
            )
        if isinstance(reply, Failed):
            raise RunError(
                f"The run {self.name} failed. What it printed is in `{self._log}`.\n\n{reply.traceback}",
                reply.message,
                reply.is_target,
            )
        assert isinstance(reply, kind), f"{self.name}: expected {kind.__name__}, got {reply!r}"
        return reply

    def end(self) -> None:
        """Ends the process from another thread; who waits for a reply hears that it is gone."""
        self._process.kill()

    def kill(self) -> None:
        """Ends the process, whatever it does; SIGTERM would not, because Lightning only takes note of it."""
        self._connection.close()
        self._process.kill()
        self._process.join()


@contextmanager
def open_workers(jobs: Sequence[Job]) -> Iterator[list[Worker]]:
    """Starts one process for each job and ends them all on the way out."""
    with ExitStack() as stack:
        workers = []
        with _variables({} if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE"}):
            # OpenMP threads spin while they wait, and on a machine with anything else to do that makes a step of two
            # threads up to four times as long, at random
            if sys.platform == "linux":
                _start_server()
            for job in jobs:
                workers.append(Worker(job))
                stack.callback(workers[-1].kill)
        yield workers


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start_server() -> None:
    forkserver.set_forkserver_preload(["torch", "lightning.pytorch", "autoprec.callback", "autoprec.compare.child"])
    resource_tracker.ensure_running()
    # the server inherits the mask: Ctrl-C is for this process alone, also while the server imports
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _in_folder(Path(__file__).resolve().parents[2]):
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """Has the server import what this process has imported.

    Its first place for modules is the folder that it starts in, and in a checkout that is another autoprec than the one
    that is installed, without kernels. Runs go back to the folder of this process.
    """
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@dataclass(frozen=True)
class Plan:
    """How long runs go on, and how they take turns.

    Args:
        steps: Steps of every run, ``None`` for until it ends by itself.
        turn: Steps of a turn, ``None`` for as many as take about :data:`TURN_S`.
        deadline: Value of ``time.monotonic()`` after which no further round starts; all runs then have equally many
            steps, fewer than planned.
    """

    steps: int | None
    turn: int | None
    deadline: float


OnTurn = Callable[[Worker, Turn], None]
OnFailure = Callable[[Worker, RunError], None]


def raise_failure(worker: Worker, error: RunError) -> None:
    """Ends all runs with the error of one."""
    raise error


def take_turns(
    workers: Sequence[Worker],
    plan: Plan,
    on_turn: OnTurn,
    on_round: Callable[[int, int, bool], object] = lambda before, steps, is_last: None,
    on_failure: OnFailure = raise_failure,
) -> tuple[int, int]:
    """Lets every run step to the end of the plan, a few steps in turn.

    Args:
        workers: Runs that stand before their first step.
        plan: How long.
        on_turn: Called after each turn.
        on_round: Called after each round with the steps before it, those after it, and whether it was the last one.
        on_failure: Called with a run that failed, which then has no further turn.

    Returns:
        The steps that runs took which did not end by themselves, and those of the last turn but one.
    """
    active = list(workers)
    steps, round_s, index = 0, 0.0, 0
    turn = plan.turn or 1
    while active:
        started = time.monotonic()
        before, steps = steps, steps + turn if plan.steps is None else min(steps + turn, plan.steps)
        is_last = steps == plan.steps or (index + 1 >= MIN_ROUNDS and started + 2 * round_s > plan.deadline)
        slowest_s = 0.0
        for worker in active if index % 2 == 0 else active[::-1]:
            try:
                reply = worker.ask(Go(steps - before, is_last), Turn)
            except RunError as error:
                on_failure(worker, error)
                active = [other for other in active if other is not worker]
                continue
            on_turn(worker, reply)
            slowest_s = max(slowest_s, sum(reply.step_s) / max(1, len(reply.step_s)))
            if reply.is_over:
                active = [other for other in active if other is not worker]
        round_s = time.monotonic() - started
        on_round(before, steps, is_last)
        index += 1
        if is_last:
            return steps, turn
        if plan.turn is None and index == 2:  # the first steps of a run are slow
            turn = min(MAX_TURN, max(1, int(TURN_S / max(slowest_s, 1e-6))))
    return steps, turn
