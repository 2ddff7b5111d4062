"""Runs that take turns in one process: each in its own thread, all but one of them waiting.

A run calls :meth:`Run.arrive` once before each step, from its data loader, so that nothing is attached to the loop that
is measured. What a run changed in the process (hooks of all optimizers, the precision of float32 matmuls) is put aside
while it waits; otherwise one arm would pay for another's hooks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers


class Lap(NamedTuple):
    """What one step took, the mean of a turn.

    Args:
        thread_s: Processor seconds of the run's own thread.
        wall_s: Seconds on the wall.
        process_s: Processor seconds of the whole process.
    """

    thread_s: float
    wall_s: float
    process_s: float


def time_calls(call: Callable[[], object], count: int) -> Lap:
    """Times a call in this thread.

    Args:
        call: What to call.
        count: How often; the mean is returned.
    """
    begun = _clocks()
    for _ in range(count):
        call()
    return _since(begun, count)


class Abandoned(BaseException):
    """Ends the thread of a run that nobody waits for any more."""


class Run:
    """A run in its own thread that goes on only while it has the turn.

    Args:
        name: For messages.
        body: Called in the thread with this run; must call :meth:`arrive` before each step.
    """

    def __init__(self, name: str, body: Callable[[Run], None]) -> None:
        self.name = name
        self._body = body
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._left = 0
        self._steps = 0
        self._begun: Lap | None = None
        self._lap: Lap | None = None
        self._is_abandoned = False
        self._error: BaseException | None = None
        self._globals = _Globals()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    # ---- called by the one who gives turns ----

    def start(self) -> None:
        """Starts the run and returns when it stands before its first step."""
        self._thread.start()
        self._wait()

    def take(self, steps: int) -> Lap:
        """Gives the run the turn for some steps.

        Args:
            steps: How many.

        Returns:
            What one step took, from one batch to the next.
        """
        self._left = self._steps = steps
        self._go.release()
        self._wait()
        assert self._lap is not None, f"{self.name} ended before its turn was over"
        return self._lap

    def finish(self) -> None:
        """Lets the run go to its end."""
        self._left = self._steps = 1 << 60
        self._go.release()
        self._wait()
        self._thread.join()

    def abandon(self) -> None:
        """Ends the run where it stands; does nothing after its end."""
        self._is_abandoned = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._back.acquire()
        if self._error is not None:
            raise self._error

    # ---- called in the thread ----

    def arrive(self) -> None:
        """Stands before a step: goes on, or hands over the turn and waits for the next one."""
        if self._left == 0:
            if self._begun is not None:
                self._lap = _since(self._begun, self._steps)
            self._globals.leave()
            self._back.release()
            self._go.acquire()
            if self._is_abandoned:
                raise Abandoned
            self._globals.enter()
            self._begun = _clocks()
        self._left -= 1

    def _main(self) -> None:
        self._globals.enter()
        try:
            self._body(self)
        except Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._globals.leave()
            self._back.release()


def _clocks() -> Lap:
    return Lap(time.thread_time(), time.perf_counter(), time.process_time())


def _since(begun: Lap, steps: int) -> Lap:
    return Lap(*((now - then) / steps for now, then in zip(_clocks(), begun, strict=True)))


_HOOKS: tuple[dict[int, Any], ...] = (
    optimizers._global_optimizer_pre_hooks,
    optimizers._global_optimizer_post_hooks,
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)


class _Globals:
    """Process-wide state of torch as one run has it."""

    def __init__(self) -> None:
        self._mine = self._outside = _read_globals()

    def enter(self) -> None:
        self._outside = _read_globals()
        _write_globals(self._mine)

    def leave(self) -> None:
        self._mine = _read_globals()
        _write_globals(self._outside)


def _read_globals() -> tuple[list[dict[int, Any]], str]:
    return [dict(hooks) for hooks in _HOOKS], torch.get_float32_matmul_precision()


def _write_globals(state: tuple[list[dict[int, Any]], str]) -> None:
    for hooks, values in zip(_HOOKS, state[0], strict=True):
        hooks.clear()
        hooks.update(values)
    if torch.get_float32_matmul_precision() != state[1]:
        torch.set_float32_matmul_precision(state[1])
