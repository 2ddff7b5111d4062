"""Controllers of the user's that hang, raise, return nonsense or interfere: none of them can ruin a run.

Time budget: 30 s.
"""

from __future__ import annotations

import copy
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from autoprec import (
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    Controller,
    FixedController,
    RuleController,
    ScriptedController,
)
from autoprec.asking import Asking, is_foreign
from autoprec.encoding import FEATURES
from autoprec.precision import AutoPrecision
from autoprec.readings import GlobalReading, UnitReading
from tests.small_fits import Plain, assert_identical, loader, outcome, quiet, seed
from tests.support import reported, rows

QUESTIONS = ("start", "initial_map", "step_action", "epoch_action", "decide", "reasons", "state_dict")
FAILED = "policy 'mine' failed"


class Mine(Controller):
    """Does nothing, in the way of a user's controller."""

    name = "mine"

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.asked = 0

    def decide(self, observation: Any) -> Any:
        self.asked += 1
        self.threads.add(threading.current_thread().name)
        return np.zeros(len(observation), dtype=np.int64)


class Hangs(Mine):
    """Waits in one question for as long as a test lets it, and answers ``late`` then."""

    def __init__(self, question: str, late: Any = None) -> None:
        super().__init__()
        self.released = threading.Event()
        self.calls = 0
        self.thread: threading.Thread | None = None

        def hang(*args: Any) -> Any:
            self.calls += 1
            self.thread = threading.current_thread()
            random.random(), np.random.rand(), torch.rand(1)
            self.released.wait()
            return late

        setattr(self, question, hang)

    def finish(self) -> None:
        self.released.set()
        if self.thread is not None and self.thread is not threading.main_thread():
            self.thread.join()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not own_threads()


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("autoprec")]


def callback_for(controller: Controller, limit_s: float = 60.0, **options: Any) -> AutoPrecisionCallback:
    config = AutoPrecisionConfig(decision_timeout_s=limit_s)
    arguments = {"knobs": ("precision", "loss_scale"), "interval": 2, "verbose": False, **options}
    return AutoPrecisionCallback(controller, config=config, **arguments)


def fit(callback: AutoPrecisionCallback | None, *others: Any) -> tuple[Trainer, Plain]:
    seed()
    module = Plain()
    callbacks = [*others] if callback is None else [callback, *others]
    trainer = quiet(max_epochs=2, callbacks=callbacks)
    trainer.fit(module, loader())
    return trainer, module


def assert_trained_as_without(trainer: Trainer, module: Plain) -> None:
    got = outcome(trainer, module)
    assert_identical(outcome(*fit(None)), got)


# ---- whose code runs where ----


@pytest.mark.parametrize(
    "controller", [RuleController(), FixedController("bf16"), ScriptedController({1: Action(clip=1.0)})]
)
def test_no_thread_for_our_own_controllers(controller: Controller) -> None:
    during: list[int] = []
    fit(callback_for(controller), LambdaCallback(on_train_batch_end=lambda *_: during.append(len(own_threads()))))
    assert during == [0] * 16


def test_one_thread_for_a_foreign_controller_and_none_after_fit(tmp_path: Path) -> None:
    mine, during = Mine(), set()
    look = LambdaCallback(on_train_batch_end=lambda *_: during.update(own_threads()))
    trainer, _ = fit(callback_for(mine), look)
    assert len(during) == 1
    assert mine.threads == {"autoprec-policy"}
    trainer.save_checkpoint(tmp_path / "after.ckpt")  # asks for the state once more
    assert not own_threads()


def test_a_second_fit_asks_again() -> None:
    mine = Mine()
    callback = callback_for(mine)
    fit(callback)
    asked = mine.asked
    fit(callback)
    assert mine.asked == 2 * asked > 0


def test_a_callback_with_a_foreign_controller_can_be_copied_and_sent_to_another_process() -> None:
    callback = callback_for(Mine())
    copies: list[Any] = [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]
    for copied in copies:
        fit(copied)
        assert copied.applied_steps == 16
        assert copied.controller.threads == {"autoprec-policy"}


def test_no_thread_after_an_exception_in_fit() -> None:
    def fail(*args: Any) -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        fit(callback_for(Mine()), LambdaCallback(on_train_batch_end=fail))


def test_who_is_foreign() -> None:
    class Named(RuleController):
        name = "named"

    patched = RuleController()
    assert not is_foreign(patched)
    patched.decide = lambda observation: None  # type: ignore[assignment,method-assign,return-value]
    assert is_foreign(patched)
    assert is_foreign(Named())
    assert is_foreign(Mine())


# ---- hangs ----


@pytest.mark.parametrize("question", QUESTIONS[:-1])
def test_a_hung_question_is_given_up_once_and_the_run_goes_on(question: str) -> None:
    hangs = Hangs(question)
    callback = callback_for(hangs, limit_s=0.5)
    with pytest.warns(UserWarning, match=FAILED) as caught:
        trainer, module = fit(callback)
    assert len([each for each in caught if "failed" in str(each.message)]) == 1
    assert hangs.calls == 1
    (row,) = rows(callback.history, "policy")
    assert f"no answer to `{question}` within 0.5 s" in row.reason
    assert callback.applied_steps == 16
    assert_trained_as_without(trainer, module)
    assert own_threads() == [hangs.thread]  # the one that is left behind
    hangs.finish()


def test_a_hung_state_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    hangs, path = Hangs("state_dict", late={"x": 1}), tmp_path / "last.ckpt"
    callback = callback_for(hangs, limit_s=0.5)
    trainer, _ = fit(callback)
    with pytest.warns(UserWarning, match=FAILED):
        trainer.save_checkpoint(path)
    trainer.save_checkpoint(path)
    assert hangs.calls == 1
    hangs.finish()
    # a controller whose state is not known begins anew instead of being given nothing
    loaded: list[Any] = []

    class Loads(Mine):
        def load_state_dict(self, state: Any) -> None:
            loaded.append(state)

    resumed = quiet(max_epochs=3, callbacks=[callback_for(Loads())])
    resumed.fit(Plain(), loader(), ckpt_path=path, weights_only=True)
    assert loaded == []


def test_a_late_answer_is_ignored() -> None:
    hangs = Hangs("decide", late=Action(precision={"*": "bf16"}))
    callback = callback_for(hangs, limit_s=0.5)

    def release(trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, index: int) -> None:
        if rows(callback.history, "policy"):
            hangs.finish()

    with pytest.warns(UserWarning, match=FAILED):
        fit(callback, LambdaCallback(on_train_batch_end=release))
    assert hangs.released.is_set()
    assert set(callback.precision_map().values()) == {"fp32"}
    assert not rows(callback.history, "precision")


def test_python_code_that_runs_for_ever_is_ended() -> None:
    class Loops(Mine):
        def decide(self, observation: Any) -> None:
            self.thread = threading.current_thread()
            while True:
                time.sleep(0.001)

    loops = Loops()
    with pytest.warns(UserWarning, match=FAILED):
        fit(callback_for(loops, limit_s=0.5))
    loops.thread.join()


@pytest.fixture
def _heeds_interrupts() -> Iterator[None]:
    """Lightning ignores them from the first one on."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeds_interrupts")
def test_interrupt_while_a_controller_thinks() -> None:
    hangs = Hangs("decide")
    wait = hangs.decide

    def interrupt(observation: Any) -> Any:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        return wait(observation)

    hangs.decide = interrupt  # type: ignore[method-assign]
    callback = callback_for(hangs)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(callback)
    assert callback.applied_steps == 3
    assert not rows(callback.history, "policy")
    hangs.finish()


def test_what_a_signal_raises_while_a_controller_thinks_is_the_users() -> None:
    hangs = Hangs("decide")
    wait = hangs.decide

    def stop(*args: Any) -> None:
        raise OSError("stopped by the scheduler")

    def signalled(observation: Any) -> Any:
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR2)
        return wait(observation)

    hangs.decide = signalled  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR2, stop)
    try:
        with pytest.raises(OSError, match="stopped by the scheduler"):
            fit(callback_for(hangs))
    finally:
        signal.signal(signal.SIGUSR2, before)
    hangs.finish()


# ---- raises ----


class Refuses(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


@pytest.mark.parametrize("question", QUESTIONS[:-1])
@pytest.mark.parametrize(
    "error", [SystemExit(3), GeneratorExit(), StopIteration(), Refuses()], ids=lambda e: type(e).__name__
)
def test_whatever_a_controller_raises_the_run_goes_on(question: str, error: BaseException) -> None:
    def fail(*args: Any) -> None:
        random.random(), np.random.rand(), torch.rand(1)
        raise error

    mine = Mine()
    setattr(mine, question, fail)
    callback = callback_for(mine)
    with pytest.warns(UserWarning, match=FAILED):
        trainer, module = fit(callback)
    (row,) = rows(callback.history, "policy")
    assert type(error).__name__ in row.reason
    assert_trained_as_without(trainer, module)


def test_failures_are_counted_and_the_first_is_told_with_its_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Mine):
        def decide(self, observation: Any) -> None:
            try:
                raise KeyError("cause")
            except KeyError as error:
                self.asked += 1
                raise ValueError(f"call {self.asked}") from error

    said, fails = reported(caplog, monkeypatch), Fails()
    callback = callback_for(fails, verbose=True)
    with pytest.warns(UserWarning, match="call 1") as caught:
        fit(callback)
    assert len([each for each in caught if "failed" in str(each.message)]) == 1
    assert fails.asked > 1
    assert f"POLICY FAILED {fails.asked} times in all" in said()
    assert "call 2" not in said()
    assert "KeyError: 'cause'" in said()
    assert "in decide" in said()


def test_the_count_goes_through_a_checkpoint(tmp_path: Path) -> None:
    mine = Mine()
    mine.decide = lambda observation: "garbage"  # type: ignore[method-assign]
    callback = callback_for(mine)
    with pytest.warns(UserWarning, match=FAILED):
        trainer, _ = fit(callback)
    assert callback.steering is not None
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = callback_for(Mine())
    quiet(max_epochs=3, callbacks=[again]).fit(Plain(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert again.steering is not None
    assert again.steering.policy_failures == callback.steering.policy_failures > 1


# ---- nonsense ----


class OddAction(Action):
    @property
    def is_empty(self) -> bool:
        raise RuntimeError("odd")


class Endless(Sequence[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        return self

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RecursionError("endless")


GARBAGE: dict[str, Callable[[], Any]] = {
    "text": lambda: "lower",
    "generator": lambda: (0 for _ in range(5)),
    "halves": lambda: [0.5, 0, 0, 0, 0],
    "infinities": lambda: np.full(5, -np.inf),
    "objects": lambda: np.array([0, 0, 0, 0, None], dtype=object),
    "complex": lambda: np.zeros(5, dtype=complex),
    "large": lambda: np.zeros((5, 10**6)),
    "long": lambda: np.ones(10**7, dtype=np.int8),
    "many": lambda: np.full(5, 10**18),
    "endless": Endless,
    "a class": lambda: Action,
    "a mapping": lambda: {"precision": {"*": "bf16"}},
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_changes_nothing(name: str) -> None:
    mine = Mine()
    mine.decide = lambda observation: GARBAGE[name]()  # type: ignore[method-assign]
    callback = callback_for(mine)
    with pytest.warns(UserWarning, match=FAILED):
        trainer, module = fit(callback)
    assert len(rows(callback.history, "policy")[0].reason) < 600
    assert_trained_as_without(trainer, module)


@pytest.mark.parametrize(
    "action",
    [
        Action(precision={"nowhere": "bf16", "net.9*": "fp16"}),
        Action(loss_scale=-1.0),
        Action(loss_scale=float("nan")),
        Action(loss_scale=float("inf")),
        Action(clip=float("nan")),
        Action(clip=-1.0),
        Action(batch_size=0),
        Action(accumulate=-3),
    ],
    ids=lambda action: str({key: value for key, value in vars(action).items() if value is not None}),
)
@pytest.mark.parametrize("question", ["decide", "step_action", "epoch_action"])
def test_actions_out_of_range_are_refused(question: str, action: Action) -> None:
    mine = type("Asks", (Mine,), {question: lambda *_: action})()
    callback = callback_for(mine, knobs=("precision", "loss_scale", "batch_size", "clip"))
    fit(callback)
    assert {d.outcome for d in callback.history if d.requested is not None and d.reason[:4] != "from"} <= {"refused"}
    assert callback.applied_steps == 16
    assert set(callback.precision_map().values()) == {"fp32"}


@pytest.mark.parametrize("question", ["decide", "step_action", "epoch_action"])
def test_a_subclass_of_action_counts_as_what_it_says(question: str) -> None:
    action = OddAction(precision={"net.0": "bf16"})
    mine = type("Odd", (Mine,), {question: lambda *_: action})()
    callback = callback_for(mine)
    fit(callback)
    assert callback.precision_map() == {"net.0": "bf16", "net.2": "fp32"}


@pytest.mark.parametrize("move", [-1, 1])
def test_moves_of_masked_knobs_and_out_of_range_lead_nowhere(move: int) -> None:
    class Moves(Mine):
        def decide(self, observation: Any) -> Any:
            self.asked += 1
            return np.full(len(observation), move)

    moves = Moves()
    callback = callback_for(moves, knobs=())
    trainer, module = fit(callback)
    assert moves.asked > 3
    assert not callback.history
    assert_trained_as_without(trainer, module)


# ---- interferes ----


def test_what_a_controller_writes_into_an_observation_is_gone() -> None:
    seen: list[Any] = []

    class Writes(Mine):
        def decide(self, observation: Any) -> Any:
            seen.append(observation.copy())
            observation[:] = np.nan
            return np.zeros(len(observation), dtype=np.int64)

    trainer, module = fit(callback_for(Writes()))
    assert len(seen) > 1
    assert all(np.isfinite(each).all() for each in seen)
    assert_trained_as_without(trainer, module)


def test_a_controller_may_request_and_save_while_it_is_asked(tmp_path: Path) -> None:
    class Meddles(Mine):
        def decide(self, observation: Any) -> Any:
            callback.request(Action(precision={"net.0": "bf16"}))
            trainer.save_checkpoint(tmp_path / "inside.ckpt")  # asks for its state from its own thread
            return super().decide(observation)

        def state_dict(self) -> dict[str, Any]:
            return {"asked": self.asked}

    callback = callback_for(Meddles())
    trainer = quiet(max_epochs=1, callbacks=[callback])
    trainer.fit(Plain(), loader())
    assert callback.precision_map()["net.0"] == "bf16"
    assert not rows(callback.history, "policy")
    assert (tmp_path / "inside.ckpt").is_file()


def test_a_controller_draws_and_changes_the_default_dtype() -> None:
    class Draws(Mine):
        def decide(self, observation: Any) -> Any:
            random.random(), np.random.rand(), torch.rand(1)
            torch.set_default_dtype(torch.float64)
            return super().decide(observation)

    trainer, module = fit(callback_for(Draws()))
    assert_trained_as_without(trainer, module)


def asked_once(controller: Controller) -> Any:
    asking = Asking(controller, AutoPrecision())
    units = [UnitReading(name="net.0", legal=("fp32", "bf16"))]
    return asking.decide(units, GlobalReading(), ()).action


class Network(Controller):
    """Lowers its only unit or not by the last bits of a network's output."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(len(FEATURES), 64, generator=generator).requires_grad_()

    def decide(self, observation: Any) -> Any:
        assert not torch.is_inference_mode_enabled()
        output = (torch.from_numpy(observation) + torch.linspace(0, 1, len(FEATURES))) @ self.weight
        self.outputs.append(output.numpy())  # neither bfloat16 nor a tensor with a graph can
        return [-1, 0, 0, 0]


def test_e07_same_answer_whatever_surrounds_the_question() -> None:
    network = Network()
    plain = asked_once(network)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = asked_once(network)
    torch.set_default_dtype(torch.bfloat16)
    try:
        half = asked_once(network)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.inference_mode():
        inference = asked_once(network)
    assert plain == mixed == half == inference == Action(precision={"net.0": "bf16"})
    assert all(np.array_equal(each, network.outputs[0]) for each in network.outputs)
    assert {each.dtype for each in network.outputs} == {np.dtype("float32")}


def test_e07_asked_from_within_a_mixed_step(tmp_path: Path) -> None:
    class Saves(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 3:
                self.trainer.save_checkpoint(tmp_path / "inside.ckpt")
            return loss

    states: list[Any] = []

    def state(self: Network) -> dict[str, Any]:
        product = self.weight.T @ self.weight
        states.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled(), product.dtype))
        return {"product": product}

    callback = callback_for(type("Stateful", (Network,), {"state_dict": state, "decide": lambda *_: None})())
    quiet(max_epochs=1, precision="bf16-mixed", callbacks=[callback]).fit(Saves(), loader())
    assert states == [(False, False, torch.float32)]
