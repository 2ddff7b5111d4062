"""The gate of a fit: turns, step times, losses, energy and operations, with a pipe that is made up here.

Time budget: 5 s.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from autoprec.compare.batches import digest_of_batch
from autoprec.compare.flops import count_flops
from autoprec.compare.gate import make_gate
from autoprec.compare.messages import Command, Finish, Go, Ready, Turn
from tests.small_fits import Full, loader, quiet


class Pipe:
    """Gives commands, keeps replies."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)
        self.sent: list[Any] = []

    def recv(self) -> Command:
        return self.commands.pop(0)

    def send(self, reply: Any) -> None:
        self.sent.append(reply)


class Meter:
    """Counts how often it is entered and left."""

    source = "made up"

    def __init__(self) -> None:
        self.entered = self.left = 0

    def __enter__(self) -> Meter:
        self.entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.left += 1


def fit(gate: Any, **options: Any) -> Full:
    torch.manual_seed(0)
    module = Full()
    trainer = quiet(callbacks=[gate], **{"max_epochs": 2, **options})
    trainer.fit(module, loader(), loader(16))
    return module


def test_a_fit_takes_the_steps_that_it_is_told() -> None:
    pipe, meter = Pipe(Go(3, False), Go(2, True), Finish()), Meter()
    gate: Any = make_gate(pl.Callback, pipe)
    gate.meter = meter
    fit(gate)
    ready, first, last = pipe.sent
    assert isinstance(ready, Ready)
    assert (ready.steps, ready.parameters) == (16, sum(each.numel() for each in Full().parameters()))
    assert isinstance(first, Turn)
    assert [len(first.step_s), len(first.losses), first.is_over] == [3, 3, False]
    assert [len(last.step_s), len(last.losses), last.is_over] == [2, 2, True]
    assert not pipe.commands
    assert (meter.entered, meter.left) == (2, 2)
    assert gate.step == 5
    assert gate.elapsed_s == pytest.approx(sum(first.step_s) + sum(last.step_s))


def test_a_fit_that_ends_by_itself_says_so() -> None:
    pipe = Pipe(Go(100, False), Finish())
    fit(make_gate(pl.Callback, pipe), max_epochs=1)
    _, turn = pipe.sent
    assert turn.is_over
    assert len(turn.step_s) == 8
    assert [found.step for found in turn.evaluations] == [8]


def test_a_free_fit_is_bounded() -> None:
    gate: Any = make_gate(pl.Callback, None)
    gate.free_steps = 3
    fit(gate)
    assert gate.step == 3


def test_operations_are_those_of_one_step() -> None:
    gate: Any = make_gate(pl.Callback, None)
    gate.counts_flops = True
    module = fit(gate, max_epochs=1)
    batch = next(iter(loader()))
    assert gate.flops == count_flops(lambda: module.loss(batch).backward())
    plain: Any = make_gate(pl.Callback, None)
    fit(plain, max_epochs=1)
    assert plain.flops is None


def test_a_digest_is_of_values_not_of_their_type() -> None:
    batch = [torch.randn(4, 3), torch.arange(4)]
    same = {"x": batch[0].bfloat16(), "y": batch[1]}
    assert digest_of_batch(batch) == digest_of_batch(same)
    assert digest_of_batch(batch) != digest_of_batch([batch[0], batch[1] + 1])
    assert digest_of_batch(batch) != digest_of_batch([batch[0].T, batch[1]])
    assert digest_of_batch("no tensors") == digest_of_batch([])
