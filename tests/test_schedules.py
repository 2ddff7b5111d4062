"""A skipped step leaves learning-rate schedules where they are; nothing else about them changes.

Time budget: 20 s.
"""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim import lr_scheduler

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig
from tests.small_fits import Full, Plain, differences, fp16_plugin, loader, quiet

BAD = (0, 3, 4, 7)
BATCHES = 8
APPLIED = BATCHES - len(BAD)


class OwnSchedule(lr_scheduler.LRScheduler):
    """A class of the user's."""

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [0.05 / (1 + self.last_epoch) for _ in self.optimizer.param_groups]


class Bare:
    """Not torch's at all; Lightning takes it if the module steps it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.count = 0

    def step(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _decay(step: int) -> float:
    return 0.9**step


def sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer: Any) -> Any:
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=BATCHES),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, _decay),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=BATCHES),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "sequential": sequential,
    "chained": chained,
    "own": OwnSchedule,
}


class Skips(Plain):
    """Loss times infinity in some batches."""

    def __init__(self, make_schedule: Callable[[Any], Any], bad: Sequence[int] = BAD, **config: Any) -> None:
        super().__init__()
        self.make_schedule, self.bad, self.config = make_schedule, bad, {"interval": "step", **config}
        self.rates: list[float] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return self.loss(batch) * (math.inf if batch_idx in self.bad else 1.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": self.make_schedule(optimizer), **self.config}]


def expected_rates(make_schedule: Callable[[Any], Any], count: int) -> list[float]:
    """What the schedule gives when it is stepped ``count`` times."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05, momentum=0.9)
    schedule = make_schedule(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(count):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def fit(module: Plain, callback: AutoPrecisionCallback | None = None, **options: Any) -> AutoPrecisionCallback:
    callback = callback or AutoPrecisionCallback(verbose=False)
    others = options.pop("callbacks", [])
    quiet(max_epochs=1, callbacks=[callback, *others], **options).fit(module, loader(8 * BATCHES))
    return callback


@pytest.mark.parametrize("name", SCHEDULES)
def test_a02_skipped_step_holds_the_schedule(name: str) -> None:
    module = Skips(SCHEDULES[name])
    callback = fit(module)
    assert (callback.applied_steps, callback.skipped_steps) == (APPLIED, len(BAD))
    steps = [sum(index not in BAD for index in range(batch + 1)) for batch in range(BATCHES)]
    rates = expected_rates(SCHEDULES[name], APPLIED)
    assert module.rates == [rates[count] for count in steps]


@pytest.mark.parametrize("plugin", [None, fp16_plugin])
@pytest.mark.parametrize("knobs", [(), ("precision", "loss_scale", "clip")])
def test_a02_whatever_skips(knobs: tuple[str, ...], plugin: Any) -> None:
    module = Skips(SCHEDULES["step"])
    fit(module, AutoPrecisionCallback(knobs=knobs, verbose=False), **({"plugins": [plugin()]} if plugin else {}))
    assert module.rates[-1] == expected_rates(SCHEDULES["step"], APPLIED)[-1]


@pytest.mark.filterwarnings(
    "ignore:Detected call of `lr_scheduler.step\\(\\)`:UserWarning"
)  # what Lightning's habit earns
def test_a02_opt_in_to_lightnings_habit() -> None:
    module = Skips(SCHEDULES["cosine"])
    fit(module, AutoPrecisionCallback(config=AutoPrecisionConfig(hold_schedules=False), verbose=False))
    assert module.rates == pytest.approx(expected_rates(SCHEDULES["cosine"], BATCHES)[1:])


def test_a02_accumulation() -> None:
    """Windows of two batches: the first and the third of four hold a bad one."""
    module = Skips(SCHEDULES["lambda"], bad=(1, 4, 5))
    callback = fit(module, accumulate_grad_batches=2)
    assert (callback.applied_steps, callback.skipped_steps) == (2, 2)
    assert module.rates[-1] == expected_rates(SCHEDULES["lambda"], 2)[-1]


@pytest.mark.parametrize(
    ("frequency", "bad", "count"),
    [
        (2, (), 4),
        (2, (1,), 4),  # one skip is less than a call is worth, wherever it falls
        (2, (1, 2), 3),
        (2, (0, 3), 3),
        (2, (0, 1, 2, 3), 2),
        (4, (3, 7), 2),
        (4, (0, 1, 2, 7), 1),
        (3, range(6), 0),
    ],
)
def test_a02_every_nth_step(frequency: int, bad: Sequence[int], count: int) -> None:
    module = Skips(SCHEDULES["lambda"], bad=bad, frequency=frequency)
    assert fit(module).skipped_steps == len(bad)
    assert module.rates[-1] == expected_rates(SCHEDULES["lambda"], count)[-1]


def test_a02_manual_optimization_every_nth_step() -> None:
    class EveryOther(ManualTwo):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            optimizer, schedule = self.optimizers()[0], self.lr_schedulers()[0]  # type: ignore[index]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * (math.inf if batch_idx in (1, 2) else 1.0))
            optimizer.step()
            if batch_idx % 2:
                schedule.step()

        def on_train_epoch_end(self) -> None:
            pass

    module = EveryOther()
    fit(module)
    assert module.trainer.lr_scheduler_configs[0].scheduler.last_epoch == BATCHES // 2 - 1


def test_a02_manual_optimization_schedule_stepped_after_the_batch() -> None:
    class After(ManualTwo):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()[0]  # type: ignore[index]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) * (math.inf if batch_idx in self.bad else 1.0))
            optimizer.step()

        def on_train_batch_end(self, *args: Any) -> None:
            self.lr_schedulers()[0].step()  # type: ignore[index]

        def on_train_epoch_end(self) -> None:
            pass

    module = After()
    fit(module)
    assert module.trainer.lr_scheduler_configs[0].scheduler.last_epoch == APPLIED


def test_a02_manual_optimization_schedule_stepped_more_often_than_the_optimizer() -> None:
    class Rare(ManualTwo):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            optimizer, schedule = self.optimizers()[0], self.lr_schedulers()[0]  # type: ignore[index]
            if batch_idx % 4 == 0:
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch) * (math.inf if batch_idx == 0 else 1.0))
                optimizer.step()
            schedule.step()

        def on_train_epoch_end(self) -> None:
            pass

    module = Rare()
    fit(module)
    assert module.trainer.lr_scheduler_configs[0].scheduler.last_epoch == BATCHES - 1


def test_a02_what_is_owed_survives_a_checkpoint(tmp_path: Path) -> None:
    """One of two skipped steps comes before the checkpoint, in the middle of the schedule's period."""
    path = tmp_path / "first.ckpt"
    saver = LambdaCallback(on_train_epoch_end=lambda trainer, module: trainer.save_checkpoint(path))
    fit(Skips(SCHEDULES["lambda"], bad=(0,), frequency=2), callbacks=[saver])
    resumed = Skips(SCHEDULES["lambda"], bad=(0,), frequency=2)
    quiet(max_epochs=2, callbacks=[AutoPrecisionCallback(verbose=False)]).fit(
        resumed, loader(8 * BATCHES), ckpt_path=path
    )
    assert resumed.rates[-1] == expected_rates(SCHEDULES["lambda"], BATCHES - 1)[-1]


class Slotted:
    """Its class cannot be changed."""

    __slots__ = ("calls", "optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self, *args: Any) -> None:
        self.calls += 1

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Registry(lr_scheduler.LambdaLR):
    """Refuses classes that it does not know."""

    def __init_subclass__(cls) -> None:
        raise ValueError(f"{cls} is not registered")


def wrapped(optimizer: Any) -> Any:
    schedule = lr_scheduler.LambdaLR(optimizer, _decay)
    original = schedule.step
    schedule.step = lambda *args: original(*args)  # type: ignore[method-assign]
    return schedule


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Slotted, "its class cannot be extended"),
        (lambda optimizer: Registry(optimizer, _decay), "__init_subclass__"),
        (wrapped, "replaced on the instance"),
    ],
    ids=["slots", "registry", "instance"],
)
def test_a_schedule_that_cannot_be_held_is_named(make: Callable[[Any], Any], reason: str) -> None:
    class OwnHook(Skips):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step()

    module = OwnHook(make)
    with pytest.warns(UserWarning, match=f"moves on skipped steps, too.*{reason}"):
        fit(module)
    assert module.trainer.global_step == BATCHES


def test_schedule_per_epoch_is_not_held() -> None:
    module = Skips(SCHEDULES["lambda"], bad=(BATCHES - 1,), interval="epoch")
    callback = fit(module)
    assert callback.skipped_steps == 1
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == expected_rates(SCHEDULES["lambda"], 1)[-1]


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_plateau_is_not_held(interval: str) -> None:
    seen: list[float] = []

    def plateau(optimizer: Any) -> Any:
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer)
        original = schedule.step

        def step(metric: Any) -> None:
            seen.append(float(metric))
            original(metric)

        schedule.step = step  # type: ignore[assignment, method-assign]
        return schedule

    class Monitored(Skips):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            self.log("seen", float(batch_idx))
            return super().training_step(batch, batch_idx)

    fit(Monitored(plateau, bad=(BATCHES - 1,), interval=interval, monitor="seen"))
    assert seen[-1] == BATCHES - 1


class ManualTwo(Skips):
    """Two optimizers with a schedule each; the first is stepped with bad gradients now and then."""

    def __init__(self) -> None:
        super().__init__(SCHEDULES["lambda"])
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        pairs = zip(self.optimizers(), self.lr_schedulers(), strict=True)  # type: ignore[arg-type]
        for index, (optimizer, schedule) in enumerate(pairs):
            optimizer.zero_grad()
            is_bad = index == 0 and batch_idx in self.bad
            self.manual_backward(self.loss(batch) * (math.inf if is_bad else 1.0))
            optimizer.step()
            schedule.step()

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()  # not about the last step: never held

    def configure_optimizers(self) -> Any:
        halves = [list(self.net[:1].parameters()), list(self.net[1:].parameters())]
        optimizers = [torch.optim.SGD(half, lr=0.05) for half in halves]
        return optimizers, [{"scheduler": self.make_schedule(optimizer)} for optimizer in optimizers]


def test_a02_manual_optimization_holds_the_schedule_of_the_skipped_optimizer() -> None:
    module = ManualTwo()
    callback = fit(module)
    assert callback.skipped_steps == len(BAD)
    counts = [config.scheduler.last_epoch for config in module.trainer.lr_scheduler_configs]
    assert counts == [APPLIED + 1, BATCHES + 1]


def test_a02_own_hook_for_a_schedule_that_is_not_torchs() -> None:
    class OwnHook(Skips):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(self.trainer.global_step)

    module = OwnHook(Bare)
    fit(module)
    schedule: Any = module.trainer.lr_scheduler_configs[0].scheduler
    assert schedule.count == APPLIED
    assert type(schedule) is Bare


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_looks_the_same_while_fit_runs(name: str) -> None:
    found: list[Any] = []

    def look(trainer: Any, *args: Any) -> None:
        schedule = trainer.lr_scheduler_configs[0].scheduler
        if trainer.global_step == 5:
            plain = SCHEDULES[name](torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05, momentum=0.9))
            assert isinstance(schedule, type(plain))
            assert (type(schedule).__name__, type(schedule).__module__) == (
                type(plain).__name__,
                type(plain).__module__,
            )
            assert set(schedule.state_dict()) == set(plain.state_dict())
            assert set(vars(schedule)) == set(vars(plain))
            found.append((schedule, copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))))

    module = Skips(SCHEDULES[name])
    fit(module, callbacks=[LambdaCallback(on_train_batch_end=look)])
    (schedule, *copies), after = found[0], module.trainer.lr_scheduler_configs[0].scheduler
    assert after is schedule
    plain_class = type(SCHEDULES[name](torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.05, momentum=0.9)))
    assert type(after) is plain_class
    for duplicate in copies:
        # a copy made while fit ran works on its own, in its own class
        assert type(duplicate) is plain_class
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses its own mark on the copied optimizer
            duplicate.step()


def test_checkpoint_holds_the_schedule(tmp_path: Path) -> None:
    class Seen(Skips, Full):
        pass

    states: list[Any] = []

    def save(trainer: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(tmp_path / "five.ckpt")
            states.append(trainer.lr_scheduler_configs[0].scheduler.state_dict())

    fit(Skips(SCHEDULES["cosine"]), callbacks=[LambdaCallback(on_train_batch_end=save)])
    content = torch.load(tmp_path / "five.ckpt", weights_only=True)
    assert not differences(content["lr_schedulers"], states)


def test_learning_rate_monitor_sees_held_rates(tmp_path: Path) -> None:
    module = Skips(SCHEDULES["step"])
    logger = CSVLogger(tmp_path)
    fit(module, callbacks=[LearningRateMonitor("step")], logger=logger, log_every_n_steps=1)
    logged = [row["lr-SGD"] for row in logger.experiment.metrics if "lr-SGD" in row] or _read(logger)
    rates = expected_rates(SCHEDULES["step"], APPLIED)
    steps = [0, *(sum(index not in BAD for index in range(batch + 1)) for batch in range(BATCHES - 1))]
    assert logged == pytest.approx([rates[count] for count in steps])


def _read(logger: CSVLogger) -> list[float]:
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("lr-SGD")
    return [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]


def test_two_fits_hold_as_one() -> None:
    module = Skips(SCHEDULES["step"])
    callback = AutoPrecisionCallback(verbose=False)
    for _ in range(2):
        module.rates.clear()
        fit(module, callback)
        assert module.rates[-1] == expected_rates(SCHEDULES["step"], APPLIED)[-1]
