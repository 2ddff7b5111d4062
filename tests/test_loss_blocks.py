"""Losses that come in blocks: other data, other tasks, and not weights that have gone bad.

Time budget: 60 s.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, RollbackConfig, ScriptedController
from tests.small_fits import clone, differences
from tests.support import Task, cpu, rows, squares
from tests.test_rollback import States, Writes, adam, data, enlarge, net

PATIENCE = 24
NOISE = random.Random(0)
LEVELS: list[float] = [1 + 0.05 * NOISE.gauss(0, 1) for _ in range(10_000)]


def callback(**kwargs: Any) -> AutoPrecisionCallback:
    rollback = RollbackConfig(**{"every": 20, "patience": PATIENCE, "quarantine": 20, **kwargs})
    config = AutoPrecisionConfig(rollback=rollback)
    return AutoPrecisionCallback(ScriptedController(), knobs=("precision", "loss_scale"), config=config, verbose=False)


def slow(parameters: Any) -> torch.optim.Optimizer:
    """Too slow to mend what went wrong: a high loss that falls is given more time."""
    return torch.optim.Adam(parameters, lr=1e-6)


def given(level: Callable[[int], float]) -> Any:
    """A loss of the value that is asked for, whatever the weights are, with an ordinary gradient."""

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        value = squares(net, batch, index)
        return value - value.detach() + level(index) * LEVELS[index]

    return loss


@pytest.mark.filterwarnings("ignore:autoprec:UserWarning")
@pytest.mark.parametrize("length", [PATIENCE - 8, PATIENCE - 1, *range(PATIENCE, PATIENCE + 20, 3), 3 * PATIENCE])
def test_blocks_of_about_patience_cost_one_rollback_at_most(length: int) -> None:
    """What is not known at the first block, that it will end, is known at the second one."""
    count = 60 + 10 * length
    module = Task(net(), data(count * 8), loss=given(_in_turn(length)), optimizer=adam)
    ap = callback(max_rollbacks=1)
    cpu(callbacks=[ap]).fit(module)
    steering = ap.steering
    assert steering is not None
    assert len(rows(ap.history, "rollback", "applied")) <= 1
    refused = rows(ap.history, "rollback", "refused")
    if refused:  # what was undone came back, but for the windows that it took to see that
        assert steering.undone_windows <= 4
        assert "goes on from where it was" in refused[0].reason
    assert steering.applied_steps + steering.undone_windows == steering.window == count


def _in_turn(length: int) -> Callable[[int], float]:
    return lambda index: 2.3 if index >= 60 and (index - 60) // length % 2 == 0 else 0.05


def test_blocks_that_end_in_time_are_given_more_of_it_later() -> None:
    """Lengths that grow: each block is told by the one before it."""
    starts = [(60, 20), (110, 22), (160, 40), (240, 60)]

    def level(index: int) -> float:
        return 2.3 if any(start <= index < start + length for start, length in starts) else 0.05

    module, ap = Task(net(), data(360 * 8), loss=given(level), optimizer=adam), callback()
    cpu(callbacks=[ap]).fit(module)
    assert not rows(ap.history, "rollback")


@pytest.mark.filterwarnings("ignore:autoprec:UserWarning")
def test_a_run_that_goes_on_from_where_it_was_has_the_weights_it_had() -> None:
    def level(index: int) -> float:
        return 0.05 if index < 110 else 2.3

    states, kept = States(), []
    keeps = Writes(lambda module, optimizer: kept.append(clone(dict(module.named_parameters()))), *range(160))
    module, ap = Task(net(), data(160 * 8), loss=given(level), optimizer=adam), callback()
    cpu(callbacks=[ap, states, keeps]).fit(module)
    (back,) = rows(ap.history, "rollback", "applied")
    (again,) = rows(ap.history, "rollback", "refused")
    assert again.step - back.step == 4
    assert again.applied == back.before == ap.applied_steps - (160 - again.step)
    assert not differences(states.at[again.step][0], kept[back.step - 1])
    assert differences(states.at[again.step - 1][0], kept[back.step - 1])


@pytest.mark.filterwarnings("ignore:autoprec:UserWarning")
def test_weights_that_went_bad_with_the_data_are_not_taken_up_again() -> None:
    """Other data from window 105 on and ruined weights: those of the copy are the better ones for them."""

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return squares(net, batch, index) * (100.0 if index >= 106 else 1.0)

    module, ap = Task(net(), data(200 * 8), loss=loss, optimizer=slow), callback()
    cpu(callbacks=[ap, Writes(enlarge, 105)]).fit(module)
    assert len(rows(ap.history, "rollback", "applied")) == 1
    (refused,) = rows(ap.history, "rollback", "refused")
    assert "goes on from where it was" not in refused.reason
    assert ap.steering is not None
    assert ap.undone_windows > 20
    assert max(float(p.detach().abs().max()) for p in module.parameters()) < 100.0


@pytest.mark.filterwarnings("ignore:autoprec:UserWarning")
def test_without_memory_for_a_third_copy_what_was_undone_stays_undone() -> None:
    module = Task(net(), data(160 * 8), loss=given(lambda index: 0.05 if index < 110 else 2.3), optimizer=adam)
    ap = callback(max_bytes=4_000)
    cpu(callbacks=[ap]).fit(module)
    (refused,) = rows(ap.history, "rollback", "refused")
    assert "goes on from where it was" not in refused.reason
    assert ap.undone_windows > 10


@pytest.mark.parametrize("write_at", [105, 150])
def test_a_real_divergence_is_caught_in_the_same_time(write_at: int) -> None:
    module, ap = Task(net(), data(220 * 8), optimizer=slow), callback()
    with pytest.warns(UserWarning, match="goes back to its copy"):
        cpu(callbacks=[ap, Writes(enlarge, write_at)]).fit(module)
    (row,) = rows(ap.history, "rollback")
    assert write_at + 1 + PATIENCE <= row.step <= write_at + 1 + PATIENCE + 16
    assert bool(next(module.parameters()).isfinite().all())


# ---- one loss a window ----


class Calls(torch.optim.SGD):
    """Calls its closure as often as it is told, as a line search does."""

    def __init__(self, parameters: Any, calls: Callable[[int], int]) -> None:
        super().__init__(parameters, lr=1e-9)
        self._calls = calls
        self._steps = 0

    def step(self, closure: Any = None) -> Any:
        losses = [closure() for _ in range(self._calls(self._steps))]
        self._steps += 1
        super().step()
        return losses[0]


@pytest.mark.parametrize("calls", [lambda step: 5, lambda step: 20 if step == 40 else 1, lambda step: 1 + step % 7])
def test_closures_that_are_called_again_count_one_loss_a_window(calls: Callable[[int], int]) -> None:
    """Six high windows are fewer than the patience, however many losses they have."""

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        value = squares(net, batch, index)
        return value - value.detach() + (50.0 if 40 <= index < 46 else 1.0)

    module = Task(net(), data(80 * 8), loss=loss, optimizer=lambda parameters: Calls(parameters, calls))
    ap = callback(patience=8)
    cpu(callbacks=[ap]).fit(module)
    assert not rows(ap.history, "rollback")


def test_patience_counts_windows_where_closures_are_called_again() -> None:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        value = squares(net, batch, index)
        is_ruined = max(float(p.detach().abs().max()) for p in net.parameters()) > 10.0
        return value - value.detach() + (50.0 if is_ruined else 1.0)

    module = Task(net(), data(60 * 8), loss=loss, optimizer=lambda parameters: Calls(parameters, lambda step: 5))
    ap = callback(patience=8)
    with pytest.warns(UserWarning, match="goes back to its copy"):
        cpu(callbacks=[ap, Writes(enlarge, 40)]).fit(module)
    row = rows(ap.history, "rollback")[0]
    assert 41 + 8 <= row.step <= 41 + 8 + 4  # sixteen losses are read at once


def test_micro_batches_share_the_loss_of_their_window() -> None:
    """One micro-batch in four has high losses, as one part of the data may."""
    module = Task(net(), data(400 * 8), loss=given(lambda i: 5.0 if i >= 200 and i % 4 == 0 else 0.5), optimizer=adam)
    ap = callback(patience=8)
    cpu(callbacks=[ap], accumulate_grad_batches=4).fit(module)
    assert not rows(ap.history, "rollback")
