"""How workers come about: processes of this machine, this process itself, or tasks of a Ray cluster."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from autoprec.sweep.studies import SweepStudy
from autoprec.sweep.worker import SweepWorker

LAUNCHERS = ("processes", "inline", "ray")
_MOST_RESTARTS = 5


class WorkerError(RuntimeError):
    """No worker can work."""


class UserError(WorkerError):
    """No worker can work, because what is to be trained cannot be."""


class Launcher(Protocol):
    """Runs workers until there is nothing left for them to do."""

    def run(self) -> Iterator[dict[str, Any]]:
        """Yields what workers say, and ``{}`` at least every half second; ends when they have ended.

        Raises:
            UserError: If the target cannot be trained at all.
            WorkerError: If workers break down again and again.
        """

    def stop(self) -> None:
        """Ends all workers now."""


class Inline:
    """Works in this process, for debugging; nothing is said between two trials.

    Args:
        sweep: The study.
        deadline: Value of ``time.time()`` after which no trial begins.
    """

    def __init__(self, sweep: SweepStudy, deadline: float) -> None:
        self._sweep, self._deadline = sweep, deadline

    def run(self) -> Iterator[dict[str, Any]]:
        """Works; see :class:`Launcher`."""
        from autoprec.target_functions import TargetError

        try:
            SweepWorker(self._sweep, deadline=self._deadline).run()
        except TargetError as error:
            raise UserError(str(error)) from error
        yield {}

    def stop(self) -> None:
        """Has nothing to do: an exception has ended the work."""


@dataclass
class _Process:
    """A worker's process and its name, which it says itself."""

    popen: subprocess.Popen[str]
    names: list[str] = field(default_factory=list)
    has_ended_a_trial: bool = False
    error: dict[str, Any] | None = None


class Processes:
    """Workers in processes of this machine. One that is gone is replaced, and its trial is queued again.

    Args:
        sweep: The study.
        count: How many.
        deadline: Value of ``time.time()`` after which no trial begins.
    """

    def __init__(self, sweep: SweepStudy, count: int, deadline: float) -> None:
        self._sweep, self._count, self._deadline = sweep, count, deadline
        self._said: queue.Queue[tuple[_Process, dict[str, Any] | None]] = queue.Queue()
        self._processes: list[_Process] = []
        self._restarts = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [process.popen.pid for process in self._processes]

    def run(self) -> Iterator[dict[str, Any]]:
        """Starts workers and passes on what they say; see :class:`Launcher`."""
        for _ in range(self._count):
            self._start()
        while self._processes:
            try:
                process, event = self._said.get(timeout=0.5)
            except queue.Empty:
                yield {}
                continue
            if event is None:
                self._end(process)
                yield {}
                continue
            self._note(process, event)
            yield event

    def _start(self) -> None:
        # not by `-m`, which takes modules from the folder of the shell first: that may be a checkout, without kernels
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from autoprec.sweep.worker_process import main;"
            " sys.exit(main(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, str(self._sweep.folder), str(self._deadline)]
        # a group of its own: Ctrl-C is for the parent alone, which ends its workers
        popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        process = _Process(popen)
        self._processes.append(process)
        Thread(target=self._listen, args=(process,), name="autoprec-worker", daemon=True).start()

    def _listen(self, process: _Process) -> None:
        assert process.popen.stdout is not None
        for line in process.popen.stdout:
            with suppress(json.JSONDecodeError):  # the last line of a process that was killed
                self._said.put((process, json.loads(line)))
        self._said.put((process, None))

    def _note(self, process: _Process, event: dict[str, Any]) -> None:
        if event["kind"] == "hello":
            process.names.append(event["worker"])
        elif event["kind"] == "end":
            process.has_ended_a_trial = True
        elif event["kind"] == "error":
            process.error = event

    def _end(self, process: _Process) -> None:
        code = process.popen.wait()
        self._close(process)
        self._processes.remove(process)
        if code == 0:
            return
        self._sweep.bury(tuple(process.names))
        if process.error is not None and process.error["is_users"]:
            raise UserError(process.error["message"])
        self._restarts = 0 if process.has_ended_a_trial else self._restarts + 1
        if self._restarts > _MOST_RESTARTS:
            why = f"exit code {code}" if process.error is None else process.error["message"]
            raise WorkerError(
                f"Workers broke down {self._restarts} times without a finished trial, the last one with {why}. What"
                f" they printed is in `{self._log(process)}`."
            )
        self._start()

    def _log(self, process: _Process) -> Path:
        return self._sweep.folder / "workers" / f"worker-{process.popen.pid}.log"

    def _close(self, process: _Process) -> None:
        for stream in (process.popen.stdin, process.popen.stdout):
            if stream is not None:
                stream.close()

    def stop(self) -> None:
        """Ends all workers now; their trials are queued again."""
        names: list[str] = []
        for process in self._processes:
            process.popen.kill()
            process.popen.wait()
            self._close(process)
            names += process.names
        self._processes.clear()
        self._sweep.bury(tuple(names))


def make_launcher(name: str, sweep: SweepStudy, count: int, deadline: float) -> Launcher:
    """Returns a launcher.

    Args:
        name: One of ``LAUNCHERS``.
        sweep: The study.
        count: Workers.
        deadline: Value of ``time.time()`` after which no trial begins.

    Raises:
        ValueError: If there is no such launcher.
        ModuleNotFoundError: If Ray is wanted and not installed.
    """
    if name == "processes":
        return Processes(sweep, count, deadline)
    if name == "inline":
        return Inline(sweep, deadline)
    if name == "ray":
        from autoprec.sweep.ray_launcher import RayTasks

        return RayTasks(sweep, count, deadline)
    raise ValueError(f"Passed `launcher={name!r}`. It must be one of {', '.join(LAUNCHERS)}.")
