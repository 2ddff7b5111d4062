"""Workers as tasks of a Ray cluster, which all open the same storage. Ray is imported on use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprec.sweep.config import SweepConfig
from autoprec.sweep.launchers import UserError, WorkerError
from autoprec.sweep.studies import SweepStudy

_WAIT_S = 0.5


class RayTasks:
    """Workers as Ray tasks of ``threads`` CPUs each; on a cluster that is there, else on one of this machine.

    The folder of the sweep must be one that all machines see. Ray starts tasks of a machine that is gone once more on
    another one.

    Args:
        sweep: The study.
        count: How many workers.
        deadline: Value of ``time.time()`` after which no trial begins.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
    """

    def __init__(self, sweep: SweepStudy, count: int, deadline: float) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "The launcher `ray` needs Ray. Run `pip install '.[ray]'` in a checkout of autoprec.", name="ray"
            ) from error
        self._ray: Any = ray
        self._sweep, self._count, self._deadline = sweep, count, deadline
        self._tasks: list[Any] = []
        self._has_begun = False

    def run(self) -> Iterator[dict[str, Any]]:
        """Starts tasks and waits for them; trials are seen in the study."""
        ray = self._ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
            self._has_begun = True
        work = ray.remote(num_cpus=self._sweep.config.threads, max_retries=self._sweep.config.max_retry)(_work)
        document = self._sweep.config.model_dump(mode="json", exclude_defaults=True)
        self._tasks = [work.remote(document, self._deadline, str(Path.cwd())) for _ in range(self._count)]
        while self._tasks:
            done, self._tasks = ray.wait(self._tasks, timeout=_WAIT_S)
            for task in done:
                self._check(task)
            yield {}
        self._close()

    def _check(self, task: Any) -> None:
        try:
            message = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            raise WorkerError(f"A Ray task broke down: {next(iter(str(error).splitlines()), 'no message')}") from error
        if message is not None:
            raise UserError(message)

    def stop(self) -> None:
        """Cancels all tasks."""
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._tasks = []
        time.sleep(_WAIT_S)  # the locks of processes that were killed are free then
        self._sweep.bury()
        self._close()

    def _close(self) -> None:
        if self._has_begun:
            self._ray.shutdown()
            self._has_begun = False


def _work(document: dict[str, Any], deadline: float, here: str) -> str | None:
    """Works in a task; returns why the target cannot be trained, ``None`` where it can."""
    os.chdir(here)  # files of the target may be named from there
    from autoprec.sweep.worker import SweepWorker
    from autoprec.target_functions import TargetError

    sweep = SweepStudy(SweepConfig.model_validate(document))
    try:
        SweepWorker(sweep, deadline=deadline).run()
    except TargetError as error:
        return str(error)
    return None
