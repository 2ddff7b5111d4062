"""One thread that answers questions under a time limit, so that somebody else's code cannot hold up a run.

What lives here: the thread, the wait and its end. What does not: what is asked, and what becomes of a missing answer.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_SLICE_S = 0.1


class LateAnswerError(Exception):
    """No answer came within the time limit."""


class _Abandoned(BaseException):
    """Raised in a thread that nobody waits for any longer."""


class _Question(Generic[T]):
    def __init__(self, ask: Callable[[], T]) -> None:
        self.is_answered = threading.Event()
        self._ask = ask
        self._answer: T | None = None
        self._error: BaseException | None = None

    def answer(self) -> None:
        try:
            self._answer = self._ask()
        except BaseException as error:  # it is raised again where the question came from
            self._error = error
        finally:
            self.is_answered.set()

    def take(self) -> Any:
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._answer


class QuestionThread:
    """Answers one question after another in a daemon thread, which is made for the first one.

    Args:
        name: Name of the thread.
        limit_s: Seconds for each answer, ``inf`` for no limit.

    Attributes:
        is_abandoned: Whether an answer was not waited for. Then the thread is asked nothing more.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self.is_abandoned = False
        self._name = name
        self._limit_s = limit_s
        self._questions: queue.SimpleQueue[_Question[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # threads and queues cannot be copied or sent to another process
        return type(self), (self._name, self._limit_s)

    def ask(self, question: Callable[[], T]) -> T:
        """Returns the answer to a question, or raises what it raised.

        Whatever else ends the wait, as Ctrl-C does, abandons the thread, too.

        Args:
            question: Called in the thread.

        Raises:
            LateAnswerError: If the time is over. The answer is ignored when it comes.
        """
        if threading.current_thread() is self._thread:  # code that is being asked makes us ask: it waits for itself
            return question()
        asked = _Question(question)
        try:
            if self._thread is None:
                self._thread = threading.Thread(target=_run, args=(self._questions,), name=self._name, daemon=True)
                self._thread.start()
            self._questions.put(asked)
            deadline = time.monotonic() + self._limit_s
            # a signal that comes just before a wait does not end it, so that Ctrl-C would have to wait, too
            while not asked.is_answered.wait(min(_SLICE_S, max(deadline - time.monotonic(), 0.0))):
                if time.monotonic() >= deadline:
                    raise LateAnswerError
        except BaseException:
            self._abandon()
            raise
        answer: T = asked.take()
        return answer

    def _abandon(self) -> None:
        self.is_abandoned = True
        thread, self._thread = self._thread, None
        self._questions.put(None)
        # ends code that is still running Python, which would take turns with the run from here on; code that waits in
        # a library is reached when that returns
        if thread is not None and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Abandoned))

    def end(self) -> None:
        """Ends the thread if there is one that answers; a later question makes a new one."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._questions.put(None)
        if thread is threading.current_thread():
            return
        thread.join()


def _run(questions: queue.SimpleQueue[_Question[Any] | None]) -> None:
    try:
        while (question := questions.get()) is not None:
            question.answer()
            del question  # with all that it refers to, the model included
    except _Abandoned:
        pass
