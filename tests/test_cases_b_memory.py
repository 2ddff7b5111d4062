"""Cases B-06 and B-07: memory that runs out costs a window, not the run, where there is a smaller size to go to.

Time budget: 60 s.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from autoprec import AutoPrecision, AutoPrecisionCallback
from autoprec.history import Decision
from autoprec.steering import Steering
from tests.support import (
    Task,
    Watch,
    all_in,
    assert_same_state,
    cpu,
    fp16cpu,
    reported,
    rows,
    scripted,
    squares,
    state_of,
    weights_of,
)

# Lightning says so once in a process
pytestmark = [
    pytest.mark.filterwarnings("ignore:.training_step. returned .None."),
    pytest.mark.filterwarnings("ignore:autoprec. a batch of .* did not fit into memory"),
]
SMALL, BIG = 4, 12
Raise = Callable[[], Any]


def wording_of_torch() -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def wording_of_a_backend() -> Any:
    raise RuntimeError("MPS backend out of memory (MPS allocated: 17.99 GB)")


def wrapped_by_the_user() -> Any:
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        raise ValueError("the attention failed") from error


ERRORS: dict[str, Raise] = {
    "torch": wording_of_torch,
    "backend": wording_of_a_backend,
    "allocator": lambda: torch.empty(2**60),
    "python": lambda: bytearray(2**62),
    "wrapped": wrapped_by_the_user,
}


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Raise | None) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.fail is not None:
            ctx.fail()
        return grad, None


class Limited(nn.Module):
    """Runs out of memory above ``limit`` rows, in the forward or in the backward."""

    def __init__(self, where: str = "forward", limit: int = 8, fail: Raise = wording_of_torch) -> None:
        super().__init__()
        self.where, self.limit, self.fail = where, limit, fail
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        is_too_large = len(x) > self.limit
        if is_too_large and self.where == "forward":
            self.fail()
        fail = self.fail if is_too_large and self.where == "backward" else None
        return _RaiseInBackward.apply(x, fail)  # type: ignore[no-any-return,no-untyped-call]


def net(limited: Limited) -> nn.Sequential:
    """The first layer has a gradient only where the backward got past the module that fails."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), limited, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def batches(sizes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 4, generator=generator) for size in sizes]


class Lowers(Callback):
    """Stands in for whoever lowers the batch size: says yes as often as it may, and writes what it did down."""

    def __init__(self, ap: Any, answers: Iterable[bool] | None = None) -> None:
        self.ap = ap
        self.answers = None if answers is None else list(answers)
        self.asked: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steering.lower_batch_size = self.lower

    @property
    def steering(self) -> Steering:
        steering: Steering = self.ap.steering
        return steering

    def lower(self, count: int) -> bool:
        self.asked.append(count)
        answer = True if self.answers is None else self.answers.pop(0)
        if answer:
            row = Decision(self.steering.window, "batch_size", None, count, SMALL, SMALL, "applied", "out of memory")
            self.steering.history.append(row)
        return answer


class Looks(Callback):
    """Counts hooks, and what gradients are left when a batch ends."""

    def __init__(self) -> None:
        self.hooks: list[str] = []
        self.left: list[int] = []

    def on_before_zero_grad(self, *args: Any) -> None:
        self.hooks.append("zero")

    def on_after_backward(self, *args: Any) -> None:
        self.hooks.append("backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.hooks.append("step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.left.append(sum(p.grad is not None for p in pl_module.parameters()))


def make_task(limited: Limited, data: Sequence[Tensor], optimizer: Any, schedule: Any = None) -> Task:
    torch.manual_seed(0)
    return Task(net(limited), list(data), None, optimizer=optimizer, schedule=schedule)  # type: ignore[arg-type]


def losses_of(ap: AutoPrecisionCallback) -> list[float]:
    assert ap.steering is not None
    ap.steering.telemetry.flush()
    return list(ap.steering.telemetry.losses)


def plain_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


def lbfgs(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return LBFGS(parameters, lr=0.01, max_iter=3)


class Sharp(SGD):
    """Perturbs the weights, evaluates again, and goes on from where it was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad, alpha=0.01)
        with torch.enable_grad():
            closure()
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


Sharp.__module__ = "elsewhere"
OPTIMIZERS: dict[str, Any] = {
    "sgd": plain_sgd,
    "adam": functools.partial(Adam, lr=1e-2),
    "adamw": functools.partial(AdamW, lr=1e-2),
    "adamw foreach": functools.partial(AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "lbfgs": lbfgs,
    "sharp": functools.partial(Sharp, lr=0.05),
}


# ---- the step is undone ----


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("knobs", [(), ("precision", "loss_scale")], ids=["masked", "steered"])
def test_b07_weights_moments_and_buffers_are_those_of_a_run_without_the_window(
    optimizer: str, where: str, knobs: tuple[str, ...]
) -> None:
    data = batches([SMALL, SMALL, BIG, SMALL, SMALL])
    ap = AutoPrecisionCallback(policy="fixed:bf16", knobs=knobs)
    lowers = Lowers(ap)
    task = make_task(Limited(where), data, OPTIMIZERS[optimizer])
    trainer = cpu(callbacks=[ap, lowers])
    trainer.fit(task)
    assert (ap.applied_steps, ap.skipped_steps, ap.lost_windows, ap.lost_samples) == (4, 0, 1, BIG)
    assert lowers.asked == [BIG]
    assert trainer.global_step == 5  # Lightning counts attempts

    other = AutoPrecisionCallback(policy="fixed:bf16", knobs=knobs)
    reference = make_task(Limited(where), data[:2] + data[3:], OPTIMIZERS[optimizer])
    again = cpu(callbacks=[other])
    again.fit(reference)
    assert_same_state(state_of(task), state_of(reference))
    for mine, theirs in zip(trainer.optimizers, again.optimizers, strict=True):
        assert str(mine.state_dict()) == str(theirs.state_dict())
    assert losses_of(ap) == losses_of(other)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("knobs", [(), ("precision", "loss_scale")], ids=["masked", "steered"])
def test_b07_the_rest_of_an_accumulation_does_not_run(where: str, place: int, knobs: tuple[str, ...]) -> None:
    sizes = [SMALL] * 12
    sizes[6 + place] = BIG
    data, looks = batches(sizes), Looks()
    limited = Limited(where)
    ap = AutoPrecisionCallback(policy="fixed:bf16", knobs=knobs)
    task = make_task(limited, data, OPTIMIZERS["adam"])
    trainer = cpu(callbacks=[ap, Lowers(ap), looks], accumulate_grad_batches=3)
    trainer.fit(task)
    assert (ap.applied_steps, ap.lost_windows, ap.lost_samples) == (3, 1, BIG + 2 * SMALL)
    assert limited.calls == 12 - (2 - place)
    assert looks.hooks.count("step") == 3
    assert looks.hooks.count("backward") == 9 + place  # of the micro-batches before
    assert looks.left[6 + place : 9] == [0] * (3 - place)
    assert trainer.global_step == 4
    assert ap.steering is not None
    assert ap.steering.window == 4

    reference = make_task(Limited(where), data[:6] + data[9:], OPTIMIZERS["adam"])
    cpu(callbacks=[AutoPrecisionCallback(policy="fixed:bf16", knobs=knobs), Looks()], accumulate_grad_batches=3).fit(
        reference
    )
    assert_same_state(state_of(task), state_of(reference))


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b07_any_wording_is_caught(name: str, where: str) -> None:
    ap = scripted()
    task = make_task(Limited(where, fail=ERRORS[name]), batches([SMALL, BIG, SMALL]), plain_sgd)
    cpu(callbacks=[ap, Lowers(ap)]).fit(task)
    assert (ap.applied_steps, ap.lost_windows) == (2, 1)


def test_b07_recomputation_may_run_out_again_and_again() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def body(self, x: Tensor) -> Tensor:
            if len(x) > 8 and torch._C._current_graph_task_id() != -1:
                wording_of_torch()
            return torch.relu(self.layer(x))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = checkpoint(self.body, x, use_reentrant=False)
            return output

    ap = scripted({0: all_in("bf16")})
    lowers = Lowers(ap)
    task = Task(Recomputed(), batches([SMALL, BIG, SMALL, BIG, BIG, SMALL]), None)  # type: ignore[arg-type]
    cpu(callbacks=[ap, lowers]).fit(task)
    assert (ap.applied_steps, ap.lost_windows, ap.lost_samples) == (3, 3, 3 * BIG)
    assert lowers.asked == [BIG] * 3


# ---- what does not move ----


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b07_schedule_loss_scale_and_guard_stay(where: str) -> None:
    def halving(optimizer: Optimizer) -> dict[str, Any]:
        return {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}

    ap = scripted()
    watch = Watch(ap)
    task = make_task(Limited(where), batches([SMALL, SMALL, BIG, BIG, SMALL]), plain_sgd, halving)
    cpu(callbacks=[ap, Lowers(ap), watch], plugins=fp16cpu(128.0, growth_interval=3)).fit(task)
    assert watch.rates == [0.05, 0.025, 0.025, 0.025, 0.0125]
    assert watch.scales == [128.0, 128.0, 128.0, 128.0, 256.0]
    assert ap.steering is not None
    assert ap.steering.knobs.guard.consecutive_skips == 0
    assert list(ap.steering.telemetry.outcomes) == [1, 1, 1]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b07_a_trial_under_way_starts_anew(where: str) -> None:
    class Masked(nn.Sequential):
        """Its mask constant does not fit into fp16."""

        def forward(self, x: Tensor) -> Tensor:
            hidden = self[0](x)
            hidden = self[1](hidden)
            return self[2](hidden.masked_fill(hidden > 5, -1e9).relu())  # type: ignore[no-any-return]

    ap = scripted({1: all_in("fp16")})
    model = Masked(nn.Linear(4, 8), Limited(where), nn.Linear(8, 1))
    task = Task(model, batches([SMALL, BIG, SMALL, SMALL]), None)  # type: ignore[arg-type]
    trials: list[bool] = []

    class LooksAtTrials(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            assert ap.steering is not None
            trials.append(ap.steering.trial is not None)

    cpu(callbacks=[ap, Lowers(ap), LooksAtTrials()]).fit(task)
    assert (ap.applied_steps, ap.lost_windows) == (3, 1)
    assert trials[2]  # the window after the lost one
    assert not trials[3] or where == "forward"
    assert ap.precision_map()["net.0"] == "fp32"  # the mask was found


# ---- memory is given back ----


class Mark:
    """Something that can be watched."""


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("knobs", [(), ("precision", "loss_scale")], ids=["masked", "steered"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_b07_nothing_of_the_failed_batch_is_kept(where: str, knobs: tuple[str, ...], accumulate: int) -> None:
    kept: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(model: nn.Module, batch: Any, index: int) -> Tensor:
        if index == 4:
            hidden = model[0](batch)  # type: ignore[index]
            node = Mark()
            hidden.grad_fn.metadata["mark"] = node  # lives as long as the graph
            kept.extend([weakref.ref(batch), weakref.ref(hidden), weakref.ref(node)])
            return squares(model[1:], hidden, index)  # type: ignore[index]
        return squares(model, batch, index)

    class Counts(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx > 4:  # without waiting for the garbage collector
                alive.append(sum(each() is not None for each in kept))

    class Made(torch.utils.data.Dataset[Tensor]):
        """Hands out batches that nobody else holds."""

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            if index >= 8:
                raise IndexError
            return torch.randn(BIG if index == 4 else SMALL, 4)

    ap = AutoPrecisionCallback(policy="fixed:bf16", knobs=knobs)
    torch.manual_seed(0)
    task = Task(net(Limited(where)), Made(), None, loss=watched)  # type: ignore[arg-type]
    cpu(callbacks=[ap, Lowers(ap), Counts()], accumulate_grad_batches=accumulate).fit(task)
    assert ap.lost_windows == 1
    assert len(kept) == 3
    assert alive == [0, 0, 0]


# ---- the run ends where there is nothing smaller ----


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("answers", [None, [True, False]], ids=["nobody to ask", "nothing smaller"])
def test_b07_else_the_error_goes_on_as_it_came(where: str, accumulate: int, answers: list[bool] | None) -> None:
    raised: list[BaseException] = []

    def fail() -> None:
        raised.append(torch.OutOfMemoryError("CUDA out of memory"))
        raise raised[-1]

    ap = scripted()
    task = make_task(Limited(where, fail=fail), batches([SMALL, SMALL, BIG, SMALL, BIG, BIG]), plain_sgd)
    lowers = Lowers(ap, answers)
    trainer = cpu(callbacks=[ap, lowers] if answers else [ap], accumulate_grad_batches=accumulate)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(task)
    assert caught.value is raised[-1]
    assert caught.traceback[-1].name == "fail"
    assert caught.value.__context__ is None
    assert len(raised) == (2 if answers else 1)
    assert lowers.asked == ([BIG, BIG] if answers else [])
    assert {"training_step", "backward"}.isdisjoint(vars(trainer.strategy))
    assert type(trainer.precision_plugin) is not AutoPrecision


def test_b07_an_error_in_the_first_step_leaves_everything_as_found() -> None:
    ap = scripted()
    task = make_task(Limited(), batches([BIG, SMALL]), plain_sgd)
    before, trainer = weights_of(task), cpu(callbacks=[ap, Lowers(ap, [False])])
    plugin, classes = trainer.precision_plugin, [type(module) for module in task.modules()]
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(task)
    assert all(map(torch.equal, weights_of(task), before))
    assert trainer.precision_plugin is plugin
    assert [type(module) for module in task.modules()] == classes
    assert (ap.applied_steps, ap.lost_windows, ap.lost_samples) == (0, 0, 0)


def test_b07_other_errors_are_nobodys_memory() -> None:
    def fail() -> None:
        raise RuntimeError("the replay memory is full")

    ap = scripted()
    lowers = Lowers(ap)
    with pytest.raises(RuntimeError, match="the replay memory is full"):
        cpu(callbacks=[ap, lowers]).fit(make_task(Limited(fail=fail), batches([SMALL, BIG]), plain_sgd))
    assert lowers.asked == []


def test_b07_a_fit_inside_the_handling_of_an_earlier_error_is_judged_by_its_own() -> None:
    def fail() -> None:
        raise ValueError("a bug")

    ap = scripted()
    lowers = Lowers(ap)
    try:
        wording_of_torch()
    except RuntimeError:
        with pytest.raises(ValueError, match="a bug"):
            cpu(callbacks=[ap, lowers]).fit(make_task(Limited(fail=fail), batches([SMALL, BIG]), plain_sgd))
    assert lowers.asked == []


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"])
def test_b07_hooks_outside_of_a_step_end_the_run(hook: str) -> None:
    ap = scripted()
    lowers, bad = Lowers(ap), FailsInHook(hook)
    with pytest.raises(torch.OutOfMemoryError):
        cpu(callbacks=[ap, lowers, bad]).fit(make_task(Limited(), batches([SMALL] * 4), plain_sgd))
    assert lowers.asked == []


def test_b07_validation_ends_the_run() -> None:
    class Validated(Task):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.net(batch)

    ap = scripted()
    lowers = Lowers(ap)
    task = Validated(net(Limited()), batches([SMALL] * 4), None)  # type: ignore[arg-type]
    trainer = cpu(callbacks=[ap, lowers], num_sanity_val_steps=0, val_check_interval=2)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(task, val_dataloaders=DataLoader(batches([BIG]), batch_size=None))  # type: ignore[arg-type]
    assert lowers.asked == []


# ---- hooks inside of a step ----


class FailsInHook(Callback):
    """Runs out of memory in the third call of a hook."""

    def __init__(self, hook: str) -> None:
        self.calls = 0
        setattr(self, hook, self._on_hook)

    def _on_hook(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            wording_of_torch()


@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward", "on_before_optimizer_step"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw foreach"])
def test_b07_hooks_inside_of_a_step_cost_a_window(hook: str, optimizer: str) -> None:
    data, ap = batches([SMALL, SMALL, 6, SMALL]), scripted({0: all_in("bf16")})
    lowers, bad = Lowers(ap), FailsInHook(hook)
    task = make_task(Limited(), data, OPTIMIZERS[optimizer])
    cpu(callbacks=[ap, lowers, bad]).fit(task)
    assert bad.calls == 4
    assert (lowers.asked, ap.applied_steps, ap.lost_windows, ap.lost_samples) == ([6], 3, 1, 6)
    reference = make_task(Limited(), data[:2] + data[3:], OPTIMIZERS[optimizer])
    cpu(callbacks=[scripted({0: all_in("bf16")})]).fit(reference)
    assert_same_state(state_of(task), state_of(reference))


# ---- inside the update ----


class BreaksOff(SGD):
    """Runs out of memory after it has updated the first weight, in the step named."""

    def __init__(self, parameters: Any, at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.at = at
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        self.calls += 1
        if self.calls == self.at:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            wording_of_torch()
        super().step()
        return loss


class BreaksOffForeign(BreaksOff):
    """The same from elsewhere: copied in its first step, and in all if it ever wrote weights before its closure."""


BreaksOff.__module__ = "torch.optim.sgd"
BreaksOffForeign.__module__ = "elsewhere"


@pytest.mark.parametrize("kind", [BreaksOff, BreaksOffForeign])
def test_b07_a_half_written_update_ends_the_run(kind: type[BreaksOff]) -> None:
    ap = scripted()
    lowers = Lowers(ap)
    task = make_task(Limited(), batches([SMALL] * 4), functools.partial(kind, at=3))
    with pytest.raises(torch.OutOfMemoryError):
        cpu(callbacks=[ap, lowers]).fit(task)
    assert lowers.asked == []
    assert (ap.applied_steps, ap.lost_windows) == (2, 0)


def test_b07_an_update_that_was_copied_is_undone() -> None:
    class FirstOfItsKind(BreaksOffForeign):
        """Nothing is known of it, so that it is copied."""

    FirstOfItsKind.__module__ = "elsewhere"
    data, ap = batches([SMALL] * 4), scripted()
    lowers = Lowers(ap)
    task = make_task(Limited(), data, functools.partial(FirstOfItsKind, at=1))
    cpu(callbacks=[ap, lowers]).fit(task)
    assert (lowers.asked, ap.applied_steps, ap.lost_windows, ap.lost_samples) == ([SMALL], 3, 1, SMALL)
    reference = make_task(Limited(), data[1:], functools.partial(SGD, lr=0.1))
    cpu(callbacks=[scripted()]).fit(reference)
    assert_same_state(state_of(task), state_of(reference))


# ---- manual optimization ----


class Two(LightningModule):
    """Two nets with an optimizer each, stepped one after the other; ``how`` names how the second one steps."""

    def __init__(self, data: Sequence[Tensor], how: str = "plain", where: str = "forward", fails: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.data, self.how = list(data), how
        limits = [Limited(where) if index == fails else Limited(limit=99) for index in range(2)]
        self.nets = nn.ModuleList(map(net, limits))

    def loss(self, index: int, batch: Tensor) -> Tensor:
        return squares(self.nets[index], batch, 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for index, optimizer in enumerate(optimizers):
            if self.how == "toggled":
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            if self.how == "closure":
                optimizer.step(closure=functools.partial(self._closure, index, batch))
            else:
                self.manual_backward(self.loss(index, batch))
                optimizer.step()
            if self.how == "toggled":
                self.untoggle_optimizer(optimizer)

    def _closure(self, index: int, batch: Tensor) -> Tensor:
        loss = self.loss(index, batch)
        self.manual_backward(loss)
        return loss

    def configure_optimizers(self) -> Any:
        return [SGD(self.nets[0].parameters(), lr=0.1), Adam(self.nets[1].parameters(), lr=0.01)]

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["plain", "closure", "toggled"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("fails", [0, 1])
def test_b07_manual_optimization_loses_or_cuts_the_window(how: str, where: str, fails: int) -> None:
    data, ap = batches([SMALL, BIG, SMALL, SMALL]), scripted({0: all_in("bf16")})
    lowers, task = Lowers(ap), Two(data, how, where, fails)
    trainer = cpu(callbacks=[ap, lowers], profiler="simple")
    trainer.fit(task)
    # what the first optimizer did before the second one's pass failed remains, and the window counts as applied
    assert (ap.applied_steps, ap.lost_windows, ap.lost_samples) == (6 + fails, 1 - fails, BIG)
    assert ap.steering is not None
    assert (lowers.asked, ap.steering.window) == ([BIG], 4)
    assert all(p.requires_grad for p in task.parameters())

    reference = [Two(data, how, "nowhere"), Two(data[:1] + data[2:], how)]
    for each in reference:
        cpu(callbacks=[scripted({0: all_in("bf16")})]).fit(each)
    for index in range(2):
        whole = reference[0] if index < fails else reference[1]
        assert_same_state(state_of(task.nets[index]), state_of(whole.nets[index]))


def test_b07_an_accumulation_by_the_user_starts_anew() -> None:
    class Accumulates(Two):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()[0]  # type: ignore[index]
            self.manual_backward(self.loss(0, batch))
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

    ap, looks = scripted(), Looks()
    task = Accumulates(batches([SMALL, BIG, SMALL, SMALL]), fails=0)
    cpu(callbacks=[ap, Lowers(ap), looks]).fit(task)
    assert looks.left[1] == 0
    assert (ap.applied_steps, ap.lost_windows, ap.lost_samples) == (1, 1, SMALL + BIG)


def test_b07_an_update_under_manual_optimization_that_broke_off_ends_the_run() -> None:
    class Breaks(Two):
        def configure_optimizers(self) -> Any:
            second = BreaksOff(self.nets[1].parameters(), at=2)
            return [SGD(self.nets[0].parameters(), lr=0.1), second]

    ap = scripted()
    lowers = Lowers(ap)
    with pytest.raises(torch.OutOfMemoryError):
        cpu(callbacks=[ap, lowers]).fit(Breaks(batches([SMALL] * 4)))
    assert lowers.asked == []


# ---- reports and state ----


def test_b07_is_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    report = reported(caplog, monkeypatch)
    ap = scripted()
    task = make_task(Limited(), batches([SMALL, BIG, SMALL, BIG, 10, SMALL]), plain_sgd)
    trainer = cpu(callbacks=[ap, Lowers(ap)], log_every_n_steps=1)
    with pytest.warns(UserWarning, match="did not fit into memory") as caught:
        trainer.fit(task)
    texts = [str(each.message) for each in caught if "did not fit" in str(each.message)]
    assert [text.split(" samples")[0] for text in texts] == ["autoprec: a batch of 12", "autoprec: a batch of 10"]
    assert f"{BIG} samples of this window are lost" in texts[0]
    assert f"goes on with batches of {SMALL}" in texts[0]
    assert "The error was: CUDA out of memory" in texts[0]
    assert "memory     3 windows lost to out-of-memory errors; 34 samples did not train" in report()
    assert float(trainer.callback_metrics["autoprec/lost_windows"]) == 3.0


def test_b07_a_run_that_lost_nothing_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = reported(caplog, monkeypatch)
    ap = scripted()
    trainer = cpu(callbacks=[ap, Lowers(ap)], log_every_n_steps=1)
    trainer.fit(make_task(Limited(), batches([SMALL] * 2), plain_sgd))
    assert "memory" not in report()
    assert "autoprec/lost_windows" not in trainer.callback_metrics


def test_b07_counts_are_in_the_state() -> None:
    ap = scripted()
    cpu(callbacks=[ap, Lowers(ap)]).fit(make_task(Limited(), batches([SMALL, BIG, SMALL]), plain_sgd))
    state = ap.plugin.state_dict()
    assert (state["lost_windows"], state["lost_samples"]) == (1, BIG)

    other = scripted()
    assert (other.lost_windows, other.lost_samples) == (0, 0)
    cpu(callbacks=[other]).fit(make_task(Limited(), batches([SMALL]), plain_sgd))
    other.plugin.load_state_dict(state)
    assert (other.lost_windows, other.lost_samples) == (1, BIG)
    del state["lost_windows"], state["lost_samples"]  # a checkpoint of the version before
    other.plugin.load_state_dict(state)
    assert (other.lost_windows, other.lost_samples) == (0, 0)


def test_b07_the_plugin_alone_recovers_as_well() -> None:
    plugin = AutoPrecision({"*": "bf16"})
    task = make_task(Limited(), batches([SMALL, BIG, SMALL]), plain_sgd)
    cpu(callbacks=[Lowers(plugin)], plugins=plugin).fit(task)
    assert plugin.steering is not None
    assert (plugin.steering.applied_steps, plugin.steering.lost_windows) == (2, 1)


@pytest.mark.filterwarnings("ignore:You are using the .dataloader_iter. step flavor")
@pytest.mark.filterwarnings("ignore:Found .dataloader_iter. argument")
def test_b07_batches_drawn_in_the_step_count_without_rows() -> None:
    class Draws(Task):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return squares(self.net, batch, 0)

    ap = scripted()
    task = Draws(net(Limited()), batches([SMALL, BIG, SMALL]), None)  # type: ignore[arg-type]
    cpu(callbacks=[ap, Lowers(ap)]).fit(task)
    assert (ap.applied_steps, ap.lost_windows, ap.lost_samples) == (2, 1, 0)


# ---- whole stories ----


class Resizes(Lowers):
    """Raises the loader's batch size at the batches named, and goes back to the last one that a step survived."""

    def __init__(self, ap: Any, raises: dict[int, int]) -> None:
        super().__init__(ap)
        self.raises = raises
        self.proven = 0
        self.sizes: list[int] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.sampler: Any = trainer.train_dataloader.batch_sampler  # type: ignore[union-attr]
        self.applied = 0

    def lower(self, count: int) -> bool:
        self.asked.append(count)
        if self.sampler.batch_size <= self.proven:
            return False
        self.sampler.batch_size = self.proven
        return True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.sizes.append(len(batch))
        if self.steering.applied_steps > self.applied:
            self.applied, self.proven = self.steering.applied_steps, max(self.proven, len(batch))
        number = trainer.current_epoch * trainer.num_training_batches + batch_idx
        self.sampler.batch_size = self.raises.get(int(number), self.sampler.batch_size)


class Story(Task):
    """Runs out of memory in its step above 16 rows, each time in other words, and at last at a size that had fit."""

    def __init__(self, breaks_at: int = -1) -> None:
        torch.manual_seed(0)
        data = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
        super().__init__(net(Limited(limit=999)), data, 16, optimizer=OPTIMIZERS["adam"])
        self.breaks_at = breaks_at
        self.failures: list[Any] = []
        self.ran: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.net[0](batch)  # type: ignore[index]
        if len(batch) > 16 or batch_idx == self.breaks_at:
            kind = len(self.failures)
            self.failures.append(weakref.ref(batch))
            self.failures.append(weakref.ref(hidden))
            (wording_of_torch if kind == 0 else wording_of_a_backend)()
        self.ran.append(batch.clone())
        return squares(self.net[1:], hidden, 0)  # type: ignore[index]


def test_b07_a_run_goes_back_to_the_old_size_twice() -> None:
    ap = scripted({0: all_in("bf16")})
    resizes, task = Resizes(ap, {1: 32, 8: 32}), Story()
    cpu(callbacks=[ap, resizes], accumulate_grad_batches=2, limit_train_batches=20).fit(task)
    # 32 in the first micro-batch of a window, then in the second: the window goes, its other half with it
    assert resizes.sizes == [16, 16, 32, 16, 16, 16, 16, 16, 16, 32] + [16] * 10
    assert resizes.asked == [32, 32]
    assert (ap.lost_windows, ap.lost_samples, ap.skipped_steps) == (2, 48 + 48, 0)
    assert len(task.failures) == 4
    assert all(each() is None for each in task.failures)
    assert resizes.sampler.batch_size == 16

    trained = [batch for batch in task.ran if len(batch) == 16]
    del trained[6]  # the first half of the second window that was lost
    torch.manual_seed(0)
    reference = Task(net(Limited(limit=999)), trained, None, optimizer=OPTIMIZERS["adam"])  # type: ignore[arg-type]
    cpu(callbacks=[scripted({0: all_in("bf16")})], accumulate_grad_batches=2).fit(reference)
    assert_same_state(state_of(task), state_of(reference))


def test_b07_at_the_old_size_the_run_ends() -> None:
    ap = scripted()
    resizes, task = Resizes(ap, {1: 32}), Story(breaks_at=9)
    with pytest.raises(RuntimeError, match="MPS backend out of memory"):
        cpu(callbacks=[ap, resizes], accumulate_grad_batches=2).fit(task)
    assert resizes.asked == [32, 16]
    assert (ap.lost_windows, ap.lost_samples, ap.applied_steps) == (1, 48, 3)


def test_b06_a_search_ends_at_a_size_that_was_tried() -> None:
    class Searches(Resizes):
        """Doubles after each size that a step survived, until one did not."""

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            if not self.asked and self.proven == self.sampler.batch_size:
                self.sampler.batch_size *= 2

    ap = scripted()
    searches = Searches(ap, {})
    torch.manual_seed(0)
    task = Task(net(Limited(limit=24)), torch.randn(400, 4), 8)
    cpu(callbacks=[ap, searches], max_epochs=2).fit(task)
    assert searches.asked == [32]
    assert searches.sampler.batch_size == 16
    assert searches.sizes[:4] == [8, 16, 32, 16]
    assert (ap.lost_windows, ap.lost_samples) == (1, 32)
    assert ap.applied_steps == len(searches.sizes) - 1
    assert rows(ap.history, "batch_size") == []
