"""A thread that stands still: whose turn it is, how errors pass, and that nothing is left of it.

Time budget: 5 s.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from autoprec.envs import paused_thread
from autoprec.envs.paused_thread import PausedThread, StoppedThreadError, Turns
from tests.training_envs import ctrl_c, nothing_left


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left(draws=True):
        yield


def count(turns: Turns, seen: list[Any], end: int = 2) -> str:
    for index in range(end):
        seen.append(turns.pause(index))
    return "end"


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_values_pass_both_ways() -> None:
    seen: list[Any] = []
    thread: PausedThread[str] = PausedThread(partial(count, seen=seen), "counting")
    assert thread.resume() == 0
    assert thread.resume("a") == 1
    assert not thread.is_over
    assert thread.resume("b") == "end"
    assert thread.is_over
    assert seen == ["a", "b"]


def test_each_side_has_random_states_flags_and_variables_of_its_own() -> None:
    def body(turns: Turns) -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        os.environ["AUTOPREC_SEEN"] = "thread"
        turns.pause(draw())
        assert torch.get_default_dtype() is torch.float64
        assert os.environ["AUTOPREC_SEEN"] == "thread"
        turns.pause(draw())

    def alone() -> list[tuple[float, float, float]]:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        return [draw(), draw()]

    expected = alone()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    own = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    thread: PausedThread[None] = PausedThread(body, "drawing")
    drawn = []
    for index in range(2):
        found = thread.resume()
        drawn.append(found[0] if isinstance(found[0], tuple) else found)
        assert torch.get_default_dtype() is torch.float32
        assert not torch.are_deterministic_algorithms_enabled()
        assert "AUTOPREC_SEEN" not in os.environ
        assert draw() == own[index]
    thread.stop()
    # float64 by default draws other numbers from torch
    assert [each[:2] for each in drawn] == [each[:2] for each in expected]


def test_gradients_and_the_number_of_threads_are_those_of_a_fresh_thread() -> None:
    def body(turns: Turns) -> tuple[bool, int]:
        return torch.is_grad_enabled(), torch.get_num_threads()

    with torch.no_grad():
        thread: PausedThread[Any] = PausedThread(body, "looking")
        assert thread.resume() == (True, torch.get_num_threads())


def test_an_error_arrives_with_its_own_traceback() -> None:
    def fails_here() -> None:
        raise LookupError("lost")

    def body(turns: Turns) -> None:
        turns.pause(1)
        fails_here()

    thread: PausedThread[None] = PausedThread(body, "failing")
    thread.resume()
    with pytest.raises(LookupError, match="lost") as found:
        thread.resume()
    assert "fails_here" in [frame.name for frame in traceback.extract_tb(found.tb)]
    assert thread.is_over


def test_stopping_unwinds_the_thread() -> None:
    seen: list[str] = []

    def body(turns: Turns) -> None:
        try:
            turns.pause(1)
        except StoppedThreadError:
            seen.append("stopped")
            raise
        finally:
            seen.append("finally")

    thread: PausedThread[None] = PausedThread(body, "stopping")
    thread.resume()
    thread.stop()
    thread.stop()
    assert seen == ["stopped", "finally"]
    assert thread.is_over


def test_it_ends_when_nobody_refers_to_it() -> None:
    thread: PausedThread[str] = PausedThread(partial(count, seen=[]), "forgotten")
    thread.resume()
    del thread
    gc.collect()
    assert "forgotten" not in [each.name for each in threading.enumerate()]


@pytest.mark.parametrize("does_check", [True, False], ids=["checks", "hangs"])
def test_ctrl_c_ends_the_wait_and_the_thread(does_check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that never checks is ended as Ctrl-C would end it."""
    monkeypatch.setattr(paused_thread, "_GRACE_S", 5.0 if does_check else 0.05)

    def body(turns: Turns, press: Callable[[], None]) -> None:
        torch.rand(3)
        press()
        while True:
            time.sleep(0.001)
            torch.rand(3)
            if does_check:
                turns.check()

    with ctrl_c() as press:
        thread: PausedThread[None] = PausedThread(partial(body, press=press), "waiting")
        before = torch.get_rng_state()
        with pytest.raises(KeyboardInterrupt):
            thread.resume()
    assert thread.is_over
    assert torch.equal(torch.get_rng_state(), before)


def test_one_that_was_never_started_has_nothing_to_end() -> None:
    thread: PausedThread[str] = PausedThread(partial(count, seen=[]), "idle")
    thread.stop()
    assert thread.is_over
