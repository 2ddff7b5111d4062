"""B-04: schedules that were built for a number of steps, in runs that then take another number.

Time budget: 30 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import Optimizer, lr_scheduler

from autoprec import AutoPrecisionConfig
from tests.resized import Change, Record, Run, assert_even, assert_follows, calls
from tests.support import Manual, Task, squares_but


def one_cycle(optimizer: Optimizer, total: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)


def cosine(optimizer: Optimizer, total: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=total, eta_min=0.001)


def warm_up_and_decay(optimizer: Optimizer, total: int) -> Any:
    warm_up = max(total // 4, 1)
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm_up),
        lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total - warm_up),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[warm_up])


def chained(optimizer: Optimizer, total: int) -> Any:
    parts: list[Any] = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), cosine(optimizer, total)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


def closed_form(optimizer: Optimizer, total: int) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total)))


def _linear_with_warm_up(step: int, *, warm_up: int, total: int) -> float:
    return step / warm_up if step < warm_up else max(0.0, (total - step) / (total - warm_up))


def of_transformers(optimizer: Optimizer, total: int) -> Any:
    return lr_scheduler.LambdaLR(optimizer, partial(_linear_with_warm_up, warm_up=2, total=total))


def polynomial(optimizer: Optimizer, total: int) -> Any:
    return lr_scheduler.PolynomialLR(optimizer, total_iters=total)


def exponential(optimizer: Optimizer, total: int) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


SCHEDULES = (one_cycle, cosine, warm_up_and_decay, chained, closed_form, of_transformers, polynomial, exponential)
every_schedule = pytest.mark.parametrize("make", SCHEDULES)
MORE, FEWER = Change(bs=4), Change(bs=16)


def of(make: Callable[..., Any], total: int = 16, **options: Any) -> Run:
    return Run(partial(make, total=total), **options)


@every_schedule
@pytest.mark.parametrize(("change", "places"), [(MORE, 16), (FEWER, 12)], ids=["smaller", "larger"])
def test_b04_batch_size(make: Callable[..., Any], change: Change, places: int) -> None:
    run = of(make)
    changed, _ = run.fit(change)
    plain, _ = run.fit()
    assert assert_follows(changed, plain) == places
    assert plain.positions[128] == changed.positions[128] == 16


@every_schedule
def test_b04_accumulation(make: Callable[..., Any]) -> None:
    run = of(make)
    plain, _ = run.fit()
    changed, ap = run.fit(Change(accumulate=2))
    assert ap.applied_steps == 8 + 4
    assert [changed.rates[n] for n in range(80, 129, 16)] == [plain.rates[n] for n in range(80, 129, 16)]


@every_schedule
def test_b04_less_accumulation(make: Callable[..., Any]) -> None:
    run = of(make, 4, accumulate=4)
    plain, _ = run.fit()
    changed, ap = run.fit(Change(accumulate=1))
    assert ap.applied_steps == 2 + 8
    assert [changed.rates[n] for n in (32, 64, 96, 128)] == [plain.rates[n] for n in (32, 64, 96, 128)]


@pytest.mark.parametrize("change", [MORE, FEWER], ids=["smaller", "larger"])
def test_b04_without_stretching_the_schedule_would_break(change: Change) -> None:
    """What the tests above would find."""
    run = of(one_cycle, is_told=False)
    if change is MORE:
        with pytest.raises(ValueError, match="Tried to step 17 times"):
            run.fit(change)
    else:
        assert run.fit(change)[0].positions[128] == 12


@pytest.mark.parametrize(
    ("accumulate", "change", "frequency"),
    [
        (1, Change(accumulate=3), 1),  # steps after batches 3, 6 and 8 of an epoch
        (3, Change(accumulate=1), 1),
        (3, Change(accumulate=2, batch=6), 1),
        (1, Change(accumulate=2, batch=4), 1),
        (1, MORE, 3),
        (1, FEWER, 3),
        (2, MORE, 3),
        (1, Change(bs=12), 1),  # 64 rows are 5 batches of 12 and one of 4
        (1, Change(bs=7), 2),
    ],
)
@pytest.mark.parametrize("make", [one_cycle, cosine])
def test_b04_odd_numbers(make: Any, accumulate: int, change: Change, frequency: int) -> None:
    total = 2 * calls(8, accumulate, frequency)
    run = of(make, total, accumulate=accumulate, frequency=frequency)
    plain, _ = run.fit()
    changed, _ = run.fit(change)
    assert changed.positions[128] == plain.positions[128] == total
    assert changed.last == plain.last


def test_b04_calls_are_spread_evenly() -> None:
    changed, _ = of(closed_form).fit(Change(bs=5))
    assert_even(changed, 64, 128)


def test_b04_several_changes() -> None:
    run = of(one_cycle, 32, epochs=4)
    plain, _ = run.fit()
    steps = [Change(1, bs=4), Change(1, 8, accumulate=4), Change(2, bs=12), Change(3, 0, accumulate=1), Change(3, bs=5)]
    changed, _ = run.fit(*steps)
    assert changed.positions[256] == plain.positions[256] == 32
    assert changed.last == plain.last


def test_b04_what_is_owed_at_a_change_is_paid_after_it() -> None:
    """16 calls over 6, then two thirds of a call are owed after the first of them."""
    run = of(one_cycle, 24, epochs=3)
    changed, _ = run.fit(Change(1, accumulate=3), Change(1, 3, accumulate=1))
    assert changed.positions[88] == 8 + 2
    assert changed.positions[192] == 24


def test_b04_and_back_again() -> None:
    run = of(cosine, 24, epochs=3)
    changed, ap = run.fit(Change(1, bs=4), Change(2, bs=8))
    assert assert_follows(changed, run.fit()[0]) == 24


def test_b04_another_size_from_the_first_epoch_on() -> None:
    run = of(one_cycle)
    plain, _ = run.fit()
    changed, ap = run.fit(Change(0, accumulate=2))
    assert ap.applied_steps == 8
    assert [changed.rates[n] for n in range(16, 129, 16)] == [plain.rates[n] for n in range(16, 129, 16)]


# ---- where the run ends ----


@pytest.mark.parametrize("change", [MORE, FEWER], ids=["smaller", "larger"])
def test_b04_a_run_that_counts_steps_keeps_its_schedule(change: Change) -> None:
    run = of(one_cycle, 14, epochs=-1, options={"max_steps": 14})
    changed, ap = run.fit(change)
    assert ap.applied_steps == 14
    assert list(changed.rates.values()) == list(run.fit()[0].rates.values())


def test_b04_steps_end_the_run_only_after_the_change() -> None:
    """24 steps would follow, 16 may."""
    run = of(one_cycle, 24, epochs=3, options={"max_steps": 24})
    changed, ap = run.fit(MORE)
    assert ap.applied_steps == 24
    assert list(changed.positions.values())[-1] == 24

    run = of(one_cycle, 24, epochs=3, options={"max_steps": 30})
    changed, ap = run.fit(MORE)
    assert ap.applied_steps == 30
    assert list(changed.positions.values())[-1] == 24
    assert changed.last == run.fit()[0].last


def test_b04_steps_end_the_run_only_before_the_change() -> None:
    run = of(one_cycle, 20, epochs=3, options={"max_steps": 20})
    changed, ap = run.fit(FEWER)
    assert ap.applied_steps == 8 + 8
    assert list(changed.positions.values())[-1] == 20


class Endless(torch.utils.data.IterableDataset[Any]):
    """Rows of ones, and nobody knows how many."""

    def __iter__(self) -> Any:
        return iter(torch.ones(64, 4))


def test_b04_unknown_lengths_go_by_the_effective_batch() -> None:
    run = Run(partial(closed_form, total=16))
    data: Any = torch.utils.data.DataLoader(Endless(), batch_size=8)
    changed, _ = run.fit(Change(accumulate=4), train_dataloaders=data)
    plain, _ = run.fit(train_dataloaders=data)
    assert [changed.rates[n] for n in (96, 128)] == [plain.rates[n] for n in (96, 128)]


# ---- what is not stretched ----


def test_b04_schedule_of_epochs_is_left_alone() -> None:
    run = of(exponential, interval="epoch")
    changed, _ = run.fit(MORE)
    assert changed.last == run.fit()[0].last == pytest.approx(0.05 * 0.81)


def test_b04_position_of_the_users_own_passes_through() -> None:
    def step(module: Any, scheduler: Any, metric: Any) -> None:
        with pytest.warns(UserWarning, match="The epoch parameter"):
            scheduler.step(module.trainer.global_step)

    task = type("Own", (Task,), {"lr_scheduler_step": step})
    changed, ap = of(closed_form, 24, task=task).fit(MORE)
    assert changed.positions[128] == ap.applied_steps == 24


@pytest.mark.parametrize("make", [one_cycle, cosine, polynomial])
@pytest.mark.parametrize("change", [Change(accumulate=4), Change(bs=32)], ids=["accumulation", "size"])
def test_b04_a_frequency_that_leaves_no_call_gives_way(make: Any, change: Change) -> None:
    """Batches 3 and 6 of 8 call the schedule; of the batches after which steps come then none has such a number."""

    class Keeps(Record):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.trainer = trainer

    run, keeps = of(make, 2 * calls(8, 1, 3), frequency=3), Keeps()
    changed, _ = run.fit(change, others=[keeps])
    assert changed.last == pytest.approx(run.fit()[0].last)
    assert changed.positions[128] == 4
    assert changed.positions[96] == 3  # not all at once
    assert keeps.trainer.lr_scheduler_configs[0].frequency == 3  # the user's own again


def test_b04_a_frequency_that_gave_way_does_so_in_a_resumed_run() -> None:
    class Saves(Record):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            schedules = trainer.precision_plugin.steering.schedules
            state, config = schedules.state(), trainer.lr_scheduler_configs[0]
            found.append(config.frequency)
            config.frequency = 3  # as a resumed run begins
            schedules._held[0].frequency = 3
            schedules.load(state)
            found.append(config.frequency)

    found: list[int] = []
    run = of(one_cycle, 2 * calls(8, 1, 3), frequency=3)
    changed, _ = run.fit(Change(accumulate=4), others=[Saves()])
    assert found == [3, 3, 1, 1]
    assert changed.positions[128] == 4


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.filterwarnings("ignore:autoprec. the schedule .* moves on skipped steps:UserWarning")
def test_b04_a_schedule_that_cannot_be_stretched_is_a_reason(is_held: bool) -> None:
    def replaced(optimizer: Optimizer) -> Any:
        schedule = closed_form(optimizer, 16)
        original = schedule.step
        schedule.step = lambda *args: original(*args)
        return schedule

    found: list[Any] = []

    class Ask(Record):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found.append(trainer.precision_plugin.steering.schedules.why_not_stretched())

    Run(replaced, config=AutoPrecisionConfig(hold_schedules=is_held)).fit(others=[Ask()])
    assert found == ["the schedule `LambdaLR` cannot be stretched: its `step` is replaced on the instance"]


# ---- skipped steps ----


@pytest.mark.parametrize(("change", "position"), [(MORE, 16 - 1), (FEWER, 16 - 4)], ids=["smaller", "larger"])
def test_b04_skipped_steps_hold_a_stretched_schedule(change: Change, position: int) -> None:
    """Batches 1 and 2 of the second epoch are skipped: each is worth half a call or two."""

    def bad(net: Any, batch: Any, index: int) -> Any:
        return squares_but(net, batch, index, bad=(1, 2) if len(batch) != 8 else ())

    changed, ap = of(one_cycle, loss=bad).fit(change)
    assert ap.skipped_steps == 2
    assert changed.positions[128] == position


@pytest.mark.parametrize("change", [MORE, FEWER], ids=["smaller", "larger"])
def test_b04_stretching_without_holding(change: Change) -> None:
    def bad(net: Any, batch: Any, index: int) -> Any:
        return squares_but(net, batch, index, bad=(1, 2) if len(batch) != 8 else ())

    run = of(one_cycle, loss=bad, config=AutoPrecisionConfig(hold_schedules=False))
    changed, ap = run.fit(change)
    assert (ap.skipped_steps, changed.positions[128]) == (2, 16)


# ---- manual optimization ----


class LastBatch(Manual):
    """Steps its schedule at the end of an epoch, from inside the last batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self._loss(self.net, batch, batch_idx))
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr]


@every_schedule
@pytest.mark.parametrize("change", [MORE, FEWER], ids=["smaller", "larger"])
def test_b04_manual_optimization(make: Callable[..., Any], change: Change) -> None:
    run = of(make, task=Manual)
    assert assert_follows(run.fit(change)[0], run.fit()[0]) >= 12


@pytest.mark.parametrize("change", [MORE, FEWER], ids=["smaller", "larger"])
def test_b04_manual_optimization_schedule_of_epochs(change: Change) -> None:
    run = of(exponential, task=LastBatch, epochs=3)
    assert run.fit(change)[0].last == run.fit()[0].last == pytest.approx(0.05 * 0.9**3)


def test_b04_manual_optimization_that_counts_steps() -> None:
    run = of(one_cycle, 20, task=Manual, epochs=3, options={"max_steps": 20})
    changed, _ = run.fit(FEWER)
    assert list(changed.positions.values())[-1] == 20


@pytest.mark.parametrize(("change", "position"), [(MORE, 16 - 1), (FEWER, 16 - 4)], ids=["smaller", "larger"])
def test_b04_manual_optimization_skipped_steps(change: Change, position: int) -> None:
    def bad(net: Any, batch: Any, index: int) -> Any:
        return squares_but(net, batch, index, bad=(1, 2) if len(batch) != 8 else ())

    changed, ap = of(one_cycle, task=Manual, loss=bad).fit(change)
    assert (ap.skipped_steps, changed.positions[128]) == (2, position)
