"""Case A-02: a skipped step moves nothing.

Time budget: 10 s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from autoprec import (
    AutoPrecisionConfig,
)
from autoprec.knobs import KNOBS
from tests.support import (
    Lin,
    Manual,
    Watch,
    assert_finite,
    cpu,
    fp16cpu,
    loader,
    reported,
    scripted,
    squares_but,
    weights_of,
)

# many runs here are so short that no step is left
pytestmark = pytest.mark.filterwarnings("ignore:autoprec. no step was applied")


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    return reported(caplog, monkeypatch)


def halving(interval: str = "step", **extra: Any) -> Callable[[Optimizer], dict[str, Any]]:
    return lambda optimizer: {"scheduler": StepLR(optimizer, 1, 0.5), "interval": interval, **extra}


def sgd_one(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=1.0)


def lin_with_bad(bad: Iterable[int], n: int = 16, schedule: Any = None, factor: float = math.inf, **kwargs: Any) -> Lin:
    loss = functools.partial(squares_but, bad=tuple(bad), factor=factor)
    return Lin(n, 8, loss=loss, optimizer=sgd_one, schedule=schedule or halving(), **kwargs)


def test_a02_skipped_step_moves_neither_weights_nor_schedule() -> None:
    ap, task = scripted(), lin_with_bad([0, 1])
    before = weights_of(task)
    trainer = cpu(plugins=fp16cpu(1024), callbacks=[ap])
    trainer.fit(task)
    assert all(map(torch.equal, weights_of(task), before))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0
    assert (ap.skipped_steps, ap.applied_steps) == (2, 0)
    assert trainer.global_step == 2  # Lightning counts attempts


def test_a02_report_counts_applied_steps(report: Callable[[], str]) -> None:
    cpu(plugins=fp16cpu(1024), callbacks=[scripted()]).fit(lin_with_bad([0, 1, 3], n=40))
    assert "2 applied, 3 skipped" in report()


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("plugins", [{}, {"precision": "bf16-mixed"}, {"plugins": "fp16"}])
def test_a02_schedule_counts_applied_steps_in_every_precision(factor: float, plugins: dict[str, Any]) -> None:
    """Without a scaler a non-finite gradient would ruin the weights; it is skipped all the same."""
    kwargs = {"plugins": fp16cpu(1024)} if "plugins" in plugins else plugins
    ap = scripted()
    watch, task = Watch(ap), lin_with_bad([0, 2], n=32, factor=factor)
    cpu(callbacks=[ap, watch], **kwargs).fit(task)
    assert watch.rates == [1.0, 0.5, 0.5, 0.25]
    assert (ap.skipped_steps, ap.applied_steps) == (2, 2)
    assert_finite(task)


def test_a02_gradient_that_only_the_hooks_made_non_finite() -> None:
    """The loss is finite; a tensor hook of the user ruins the gradient."""
    ap, task = scripted(), lin_with_bad([])
    next(task.net.parameters()).register_hook(lambda grad: grad * math.nan)
    before = weights_of(task)
    trainer = cpu(callbacks=[ap])
    trainer.fit(task)
    assert all(map(torch.equal, weights_of(task), before))
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1.0
    assert ap.skipped_steps == 2


def test_a02_gradient_ruined_in_the_last_hook_before_the_step() -> None:
    class Ruin(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
            for parameter in pl_module.parameters():
                assert parameter.grad is not None
                parameter.grad.fill_(math.inf)

    ap, task = scripted(), lin_with_bad([])
    before = weights_of(task)
    cpu(callbacks=[ap, Ruin()]).fit(task)
    assert all(map(torch.equal, weights_of(task), before))
    assert (ap.skipped_steps, ap.applied_steps) == (2, 0)


def test_a02_the_search_for_the_layer_at_fault_ends_with_an_applied_step() -> None:
    """Its hook reads every layer's output, and what it found is about batches that are over."""
    hooks: list[int] = []

    class Counting(Lin):
        def training_step(self, *args: Any) -> Any:
            hooks.append(len(torch_module._global_forward_hooks))
            return super().training_step(*args)

    ap, loss = scripted(), functools.partial(squares_but, bad=(1, 2, 3, 4), factor=math.inf)
    cpu(callbacks=[ap]).fit(Counting(56, 8, loss=loss, optimizer=sgd_one, schedule=halving()))
    assert (ap.skipped_steps, ap.applied_steps) == (4, 3)
    assert hooks == [0, 0, 0, 0, 1, 1, 0]
    assert not torch_module._global_forward_hooks


def test_a02_accumulation_skips_whole_windows() -> None:
    ap = scripted()
    watch, task = Watch(ap), lin_with_bad([1], n=48)  # windows (0, 1), (2, 3), (4, 5)
    trainer = cpu(plugins=fp16cpu(1024), callbacks=[ap, watch], accumulate_grad_batches=2)
    trainer.fit(task)
    assert (ap.skipped_steps, ap.applied_steps, trainer.global_step) == (1, 2, 3)
    assert watch.rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_a02_manual_optimization() -> None:
    ap, loss = scripted(), functools.partial(squares_but, bad=(0, 2))
    watch = Watch(ap)
    task = Manual(nn.Linear(4, 1), torch.ones(32, 4), loss=loss, optimizer=sgd_one, schedule=halving())
    trainer = cpu(plugins=fp16cpu(1024), callbacks=[ap, watch])
    trainer.fit(task)
    assert watch.rates == [1.0, 0.5, 0.5, 0.25]
    assert (ap.skipped_steps, ap.applied_steps, trainer.global_step) == (2, 2, 4)


def test_a02_manual_schedule_of_an_epoch_is_not_held_back() -> None:
    class PerEpoch(Manual):
        def on_train_epoch_end(self) -> None:
            scheduler: Any = self.lr_schedulers()
            scheduler.step()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self._loss(self.net, batch, batch_idx))
            optimizer.step()

    loss = functools.partial(squares_but, bad=(0, 1))
    task = PerEpoch(nn.Linear(4, 1), torch.ones(16, 4), loss=loss, optimizer=sgd_one, schedule=halving())
    trainer = cpu(callbacks=[scripted()], max_epochs=2)
    trainer.fit(task)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


class TwoOptimizers(LightningModule):
    """Two nets with an optimizer and a schedule each; the loss of the second is bad in batch 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        factors = (1.0, math.inf if batch_idx == 0 else 1.0)
        for net, optimizer, schedule, factor in zip((self.a, self.b), optimizers, schedules, factors, strict=True):
            optimizer.zero_grad()
            self.manual_backward((net(batch) ** 2).mean() * factor)
            optimizer.step()
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [SGD(self.a.parameters(), lr=1.0), SGD(self.b.parameters(), lr=1.0)]
        return optimizers, [StepLR(optimizer, 1, 0.5) for optimizer in optimizers]

    def train_dataloader(self) -> Any:
        return loader(torch.ones(16, 4), 8)


def test_a02_only_the_skipped_optimizer_is_held_back() -> None:
    ap, task = scripted(), TwoOptimizers()
    before = weights_of(task.b)
    trainer = cpu(callbacks=[ap])
    trainer.fit(task)
    assert [o.param_groups[0]["lr"] for o in trainer.optimizers] == [0.25, 0.5]
    assert (ap.skipped_steps, ap.applied_steps) == (1, 3)
    assert_finite(task)
    assert not any(map(torch.equal, weights_of(task.b), before))


def one_cycle(optimizer: Optimizer) -> dict[str, Any]:
    return {"scheduler": OneCycleLR(optimizer, 1.0, total_steps=8), "interval": "step"}


def warm_up_then_decay(optimizer: Optimizer) -> dict[str, Any]:
    parts = [LinearLR(optimizer, 0.25, total_iters=2), ExponentialLR(optimizer, 0.5)]
    return {"scheduler": SequentialLR(optimizer, parts, [2]), "interval": "step"}


def chained(optimizer: Optimizer) -> dict[str, Any]:
    return {
        "scheduler": ChainedScheduler([StepLR(optimizer, 2, 0.5), ExponentialLR(optimizer, 0.9)]),
        "interval": "step",
    }


@pytest.mark.parametrize("schedule", [one_cycle, warm_up_then_decay, chained, halving()])
def test_a02_schedule_ends_where_its_applied_steps_lead(schedule: Callable[[Optimizer], dict[str, Any]]) -> None:
    """Four applied steps out of six move the schedule as four steps out of four do."""
    rates = []
    for n, bad in ((48, (0, 3)), (32, ())):
        task = lin_with_bad(bad, n=n, schedule=schedule)
        trainer = cpu(callbacks=[scripted()])
        trainer.fit(task)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1]


def test_a02_overridden_lr_scheduler_step_is_held_too() -> None:
    class Own(Lin):
        calls = 0

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.calls += 1
            scheduler.step()

    task = Own(32, 8, loss=functools.partial(squares_but, bad=(0, 1)), optimizer=sgd_one, schedule=halving())
    trainer = cpu(callbacks=[scripted()])
    trainer.fit(task)
    assert task.calls == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a02_epoch_schedule_is_not_held_back() -> None:
    ap, task = scripted(), lin_with_bad([1], schedule=halving("epoch"))
    trainer = cpu(callbacks=[ap], max_epochs=2)  # the last batch of each epoch is skipped
    trainer.fit(task)
    assert ap.skipped_steps == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a02_reduce_on_plateau_is_not_held_back(interval: str) -> None:
    """It follows a metric, not the number of steps."""

    class Plateau(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("metric", torch.tensor(1.0))  # never improves
            return loss

    def schedule(optimizer: Optimizer) -> dict[str, Any]:
        scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"scheduler": scheduler, "interval": interval, "monitor": "metric"}

    rates = []
    for callbacks in ([], [scripted()]):
        # a finite loss for the plain run, whose weights would be NaN otherwise
        bad = (1, 3) if callbacks else ()
        task = Plateau(16, 8, loss=functools.partial(squares_but, bad=bad), optimizer=sgd_one, schedule=schedule)
        trainer = cpu(callbacks=callbacks, max_epochs=3)
        trainer.fit(task)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1] < 1.0


def test_a02_following_the_framework_is_opt_in() -> None:
    ap = scripted(config=AutoPrecisionConfig(hold_schedules=False))
    task = lin_with_bad([0, 1])
    before = weights_of(task)
    trainer = cpu(plugins=fp16cpu(1024), callbacks=[ap])
    trainer.fit(task)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    assert all(map(torch.equal, weights_of(task), before))


def test_a02_following_the_framework_under_manual_optimization() -> None:
    ap = scripted(config=AutoPrecisionConfig(hold_schedules=False))
    loss = functools.partial(squares_but, bad=(0, 1))
    task = Manual(nn.Linear(4, 1), torch.ones(16, 4), loss=loss, optimizer=sgd_one, schedule=halving())
    trainer = cpu(callbacks=[ap])
    trainer.fit(task)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a02_schedule_is_its_own_class_and_moves_again_after_fit() -> None:
    task = lin_with_bad([0, 1])
    trainer = cpu(callbacks=[scripted()])
    trainer.fit(task)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert type(scheduler) is StepLR
    trainer.optimizers[0].step()
    scheduler.step()
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("knobs", [KNOBS, ()])
@pytest.mark.parametrize("optimizer", [Adam, AdamW, RMSprop])
def test_a02_a_finite_gradient_whose_square_is_not_stays_out_of_the_moments(
    optimizer: Any, knobs: tuple[str, ...], private: bool
) -> None:
    """The second moment would be inf for ever, and the weight would never move again."""
    ap = scripted(knobs=knobs)
    task = Lin(40, 8, loss=functools.partial(squares_but, bad=(2,), factor=1e25), optimizer=optimizer)
    trainer = cpu(callbacks=[ap] if private else [ap, Watch()])
    trainer.fit(task)
    assert (ap.applied_steps, ap.skipped_steps) == (4, 1)
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    assert all(bool(torch.isfinite(value).all()) for value in moments if isinstance(value, Tensor))


@pytest.mark.parametrize("private", [True, False])
def test_a02_sgd_squares_nothing_and_takes_such_a_step(private: bool) -> None:
    ap = scripted(knobs=())
    sgd = functools.partial(SGD, lr=1e-30, momentum=0.9)
    task = Lin(40, 8, loss=functools.partial(squares_but, bad=(2,), factor=1e25), optimizer=sgd)
    cpu(callbacks=[ap] if private else [ap, Watch()]).fit(task)
    assert (ap.applied_steps, ap.skipped_steps) == (5, 0)
    assert_finite(task)


@pytest.mark.parametrize("knobs", [KNOBS, ()])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a02_clipping_saves_such_a_step(algorithm: str, knobs: tuple[str, ...]) -> None:
    ap = scripted(knobs=knobs)
    task = Lin(40, 8, loss=functools.partial(squares_but, bad=(2,), factor=1e25), optimizer=Adam)
    cpu(callbacks=[ap], gradient_clip_val=0.5, gradient_clip_algorithm=algorithm).fit(task)
    assert (ap.applied_steps, ap.skipped_steps) == (5, 0)
    assert_finite(task)


def test_a02_moments_of_the_optimizer_stay_too() -> None:
    """Momentum must not decay in a step that did not count."""
    momentum: list[float] = []

    class Momentum(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            states = trainer.optimizers[0].state.values()
            momentum.append(sum(float(s["exp_avg"].sum()) + float(s["step"]) for s in states))

    task = Lin(32, 8, loss=functools.partial(squares_but, bad=(2,)), optimizer=torch.optim.Adam)
    cpu(callbacks=[scripted(), Momentum()]).fit(task)
    assert momentum[1] == momentum[2] != momentum[3]
