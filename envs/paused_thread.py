"""A thread that stands still while its owner runs: one of the two moves at any time, each in its own process state.

It turns code that calls back, such as ``Trainer.fit``, into code that is called. What lives here: whose turn it is, how
values and exceptions pass, and how the thread ends. What does not: what runs in it.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from autoprec.envs.process_state import ProcessState

R = TypeVar("R")

_SLICE_S = 0.1
_GRACE_S = 5.0


class StoppedThreadError(BaseException):
    """Raised in a thread that is to end; nothing that handles ordinary errors catches it."""


class Turns:
    """What the code in the thread sees: :meth:`pause` and :meth:`check`."""

    def __init__(self) -> None:
        self.sent: Any = None
        self.received: Any = None
        self.error: BaseException | None = None
        self.is_stopping = self.is_over = False
        self.owners_turn, self.threads_turn = threading.Event(), threading.Event()

    def pause(self, value: Any) -> Any:
        """Hands a value to the owner and waits for the answer; called in the thread.

        Args:
            value: What ``PausedThread.resume`` returns.

        Raises:
            StoppedThreadError: If the thread is to end.
        """
        self.sent = value
        self.owners_turn.set()
        self.threads_turn.wait()
        self.threads_turn.clear()
        self.check()
        answer, self.received = self.received, None
        return answer

    def check(self) -> None:
        """Raises if the thread is to end; to be called now and then in the thread.

        Raises:
            StoppedThreadError: If it is.
        """
        if self.is_stopping:
            raise StoppedThreadError


class PausedThread(Generic[R]):
    """Runs a function in a thread of its own, from one pause to the next.

    The thread ends with the function, with :meth:`stop`, with whatever ends a wait (Ctrl-C, say), or when nobody refers
    to this object any longer. It sees the caller's number of threads and context variables, and begins with gradients
    on and autocast off, as every thread does.

    Args:
        body: Called in the thread. It must not refer to this object.
        name: Name of the thread.

    Attributes:
        is_over: Whether the function has returned or raised, or was stopped.
    """

    def __init__(self, body: Callable[[Turns], R], name: str) -> None:
        self._turns = Turns()
        self._states: dict[str, ProcessState] = {}
        context, threads = contextvars.copy_context(), torch.get_num_threads()
        arguments = (context, body, self._turns, threads)
        self._thread = threading.Thread(target=_run, args=arguments, name=name, daemon=True)
        self._end = weakref.finalize(self, _stop, self._turns, self._thread, self._states)

    @property
    def is_over(self) -> bool:
        """Whether the function has returned or raised, or was stopped."""
        return self._turns.is_over or not self._end.alive

    def resume(self, value: Any = None) -> Any:
        """Lets the thread run until it pauses or ends.

        Args:
            value: What ``pause`` returns in the thread.

        Returns:
            What the function paused with, or returned.

        Raises:
            BaseException: What the function raised, with its own traceback.
        """
        assert not self.is_over, "the thread has ended"
        turns = self._turns
        turns.received = value
        with _in_its_state(self._states):
            _run_on(turns, self._thread)
        if turns.is_over:
            self._end.detach()
            self._thread.join()
        error, turns.error = turns.error, None
        sent, turns.sent = turns.sent, None
        try:
            if error is not None:
                raise error
            return sent
        finally:
            del error  # its traceback refers to this frame

    def stop(self) -> None:
        """Ends the thread where it is; does nothing if it has ended. What it raises on its way out is dropped."""
        self._end()


@contextmanager
def _in_its_state(states: dict[str, ProcessState]) -> Iterator[None]:
    """Has the thread find the state that it left, and its owner afterwards the one it has now."""
    own = ProcessState.take()
    if "thread" in states:
        states.pop("thread").put_back()
    try:
        yield
    finally:
        states["thread"] = ProcessState.take()
        own.put_back()


def _run_on(turns: Turns, thread: threading.Thread) -> None:
    """Lets the thread run until it is the owner's turn again; ends it if the wait is ended."""
    try:
        turns.owners_turn.clear()
        if thread.ident is None:
            thread.start()
        else:
            turns.threads_turn.set()
        # a signal that comes just before a wait does not end it, so that Ctrl-C would have to wait, too
        while not turns.owners_turn.wait(_SLICE_S):
            pass
    except BaseException:
        _end(turns, thread)
        raise


def _stop(turns: Turns, thread: threading.Thread, states: dict[str, ProcessState]) -> None:
    with _in_its_state(states):
        _end(turns, thread)


def _end(turns: Turns, thread: threading.Thread) -> None:
    if turns.is_over or thread.ident is None:
        return
    turns.is_stopping = True
    turns.threads_turn.set()
    thread.join(_GRACE_S)
    while thread.is_alive():  # it neither pauses nor checks: end it as Ctrl-C would end it in the main thread
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(StoppedThreadError))
        thread.join(_GRACE_S)


def _run(context: contextvars.Context, body: Callable[[Turns], Any], turns: Turns, threads: int) -> None:
    torch.set_num_threads(threads)  # a number of the thread's own where OpenMP runs operations
    try:
        turns.sent = context.run(body, turns)
    except StoppedThreadError:
        pass
    except BaseException as error:  # it is raised again in the owner's thread
        turns.error = error
    finally:
        turns.is_over = True
        turns.owners_turn.set()
