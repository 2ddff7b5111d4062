"""With every knob masked, training is bit-identical to training without the callback.

Weights, optimizer states, schedules, losses and the random states of torch, numpy and Python are compared after 50
optimizer steps with dropout, shuffling and validation.

Time budget: 60 s.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch import Tensor, nn

from autoprec import Action, AutoPrecisionCallback, ScriptedController
from tests.small_fits import (
    Full,
    Outcome,
    Plain,
    assert_identical,
    differences,
    fp16_plugin,
    loader,
    outcome,
    quiet,
    seed,
)

STEPS = 50


class SignSGD(torch.optim.Optimizer):
    """An optimizer that nobody has seen before; calls its closure first and keeps a state of its own."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["mean"] = 0.9 * state.get("mean", 0.0) + parameter.grad
                state["noise"] = torch.randn(())
                parameter -= group["lr"] * torch.sign(state["mean"] + 1e-6 * state["noise"])
        return loss


class TwiceSGD(SignSGD):
    """Evaluates its closure twice and updates in between, as sharpness-aware optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "own": SignSGD,
    "fused_adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}
MORE_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "foreach_adam": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
    "fused_sgd": lambda p: torch.optim.SGD(p, lr=1e-2, fused=True),
    "twice": TwiceSGD,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=4),
}


class Noisy(Full):
    """Dropout, running statistics, and draws from all three generators in every training step."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(make_optimizer)
        self.net = nn.Sequential(
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(16, 16),
            nn.GELU(),
            nn.Linear(16, 2),
        )
        self.scale = 1.0
        self.has_schedule = True

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        sign = 1.0 if random.random() < 0.5 else -1.0
        noise = torch.from_numpy(np.random.standard_normal(tuple(batch[0].shape)).astype("float32"))
        out = self.net(sign * batch[0] + 0.01 * noise.to(batch[0]))
        return self.scale * nn.functional.mse_loss(out.float(), batch[1].float())

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(list(self.parameters()))
        if not self.has_schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Noisy):
    """The same under manual optimization, with its own accumulation."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer], accumulate: int = 1) -> None:
        super().__init__(make_optimizer)
        self.automatic_optimization = False
        self.accumulate = accumulate

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch) / self.accumulate
        self.losses.append(loss.item())
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulate:
            return
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
        schedule.step()  # type: ignore[union-attr]


def run(make: Callable[[], Plain], is_watched: bool, callbacks: Sequence[Any] = (), **options: Any) -> Outcome:
    """Trains from one seed, with the callback and everything masked, or without it."""
    seed(3)
    module = make()
    watcher = [AutoPrecisionCallback(knobs=(), interval=4, verbose=False)] if is_watched else []
    plugin = options.pop("plugin", None)
    if plugin is not None:
        options["plugins"] = [plugin()]
    options = {"check_val_every_n_epoch": 4, **options}
    trainer = quiet(max_steps=STEPS, max_epochs=-1, callbacks=[*watcher, *callbacks], **options)
    trainer.fit(module, loader(shuffle=True), loader(16))
    if watcher:
        assert trainer.global_step == STEPS
        assert 0 < watcher[0].applied_steps + watcher[0].skipped_steps <= STEPS
    return outcome(trainer, module)


def assert_same(make: Callable[[], Plain], **options: Any) -> Outcome:
    plain = run(make, is_watched=False, **options)
    watched = run(make, is_watched=True, **options)
    assert_identical(plain, watched)
    return watched


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_automatic(name: str, accumulate: int) -> None:
    assert_same(lambda: Noisy(OPTIMIZERS[name]), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_manual(name: str, accumulate: int) -> None:
    assert_same(lambda: Manual(OPTIMIZERS[name], accumulate))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_clipping_by_the_trainer(name: str, accumulate: int, algorithm: str) -> None:
    threshold = 0.3 if algorithm == "norm" else 0.02
    options = {"gradient_clip_val": threshold, "gradient_clip_algorithm": algorithm}
    clipped = assert_same(lambda: Noisy(OPTIMIZERS[name]), accumulate_grad_batches=accumulate, **options)
    free = run(lambda: Noisy(OPTIMIZERS[name]), is_watched=False, accumulate_grad_batches=accumulate)
    assert differences(clipped.weights, free.weights), "the threshold never acted: this test could not fail"


class ClippedByHand(Manual):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")  # type: ignore[arg-type]
        optimizer.step()  # type: ignore[union-attr]


class ClippedInHook(Noisy):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="value")


@pytest.mark.parametrize("make", [ClippedByHand, ClippedInHook])
def test_clipping_by_the_module(make: Callable[[Any], Plain]) -> None:
    assert_same(lambda: make(OPTIMIZERS["adam"]))


# with a GradScaler: quiet, growing often, and so high that steps are skipped at first
SCALERS: dict[str, dict[str, Any]] = {
    "quiet": {"init_scale": 1024.0},
    "growing": {"init_scale": 512.0, "growth_interval": 5},
    "overflowing": {"init_scale": 2.0**24, "growth_interval": 7},
    "odd_factors": {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3},
    "above_our_cap": {"init_scale": 2.0**30, "growth_interval": 4, "backoff_factor": 0.25},
    "small": {"init_scale": 4.0, "growth_interval": 4},
}


def scaler_run(name: str, make: Callable[[], Plain], is_watched: bool, **options: Any) -> tuple[Outcome, Any]:
    plugin = fp16_plugin(**SCALERS[name])
    result = run(make, is_watched, plugin=lambda: plugin, **options)
    assert plugin.scaler is not None
    return result, plugin.scaler.state_dict()


class Skippable(Noisy):
    """Without schedule and running statistics, which a skipped step holds on purpose."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(make_optimizer)
        self.has_schedule = False
        self.net[1] = nn.LayerNorm(16)


def skippable(optimizer: str, factor: float = 1.0) -> Callable[[], Plain]:
    def make() -> Plain:
        module = Skippable(OPTIMIZERS[optimizer])
        module.scale = factor
        return module

    return make


def assert_same_with_scaler(name: str, make: Callable[[], Plain], **options: Any) -> dict[str, Any]:
    plain, plain_scaler = scaler_run(name, make, is_watched=False, **options)
    watched, watched_scaler = scaler_run(name, make, is_watched=True, **options)
    assert_identical(plain, watched)
    assert watched_scaler == plain_scaler
    return watched_scaler  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SCALERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_scaler(optimizer: str, name: str) -> None:
    assert_same_with_scaler(name, skippable(optimizer))


def test_scaler_below_our_floor() -> None:
    scaler = assert_same_with_scaler("small", skippable("adamw", factor=1e6))
    assert scaler["scale"] < 1.0, "the scale never went below the floor"


@pytest.mark.parametrize("name", ["growing", "overflowing"])
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.3},
        {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ],
    ids=["accumulate", "norm", "value"],
)
def test_scaler_and(options: dict[str, Any], name: str) -> None:
    assert_same_with_scaler(name, skippable("adam"), **options)


@pytest.mark.parametrize("name", ["quiet", "overflowing"])
def test_scaler_and_an_optimizer_that_unscales_by_itself(name: str) -> None:
    assert_same_with_scaler(name, skippable("fused_adamw"))


class ManualSkippable(Skippable, Manual):
    """Manual optimization without schedule and running statistics."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss(batch))
        optimizer.step()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["growing", "overflowing"])
def test_scaler_under_manual_optimization(name: str) -> None:
    def make() -> Plain:
        module = ManualSkippable(OPTIMIZERS["adamw"])
        module.automatic_optimization = False
        return module

    assert_same_with_scaler(name, make)


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("bf16-mixed", "sgd"),
        ("bf16-mixed", "adamw"),
        ("bf16-mixed", "fused_adamw"),
        ("bf16-true", "sgd"),
        ("16-true", "sgd"),
        ("64-true", "adamw"),
    ],
)
def test_precision_of_the_trainer(precision: str, name: str) -> None:
    assert_same(lambda: Noisy(OPTIMIZERS[name]), precision=precision)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_under_precision_of_the_trainer(algorithm: str, precision: str) -> None:
    options = {"gradient_clip_val": 0.3 if algorithm == "norm" else 0.02, "gradient_clip_algorithm": algorithm}
    assert_same(lambda: Noisy(OPTIMIZERS["sgd"]), precision=precision, **options)


@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
def test_more_optimizers(name: str) -> None:
    assert_same(lambda: Noisy(MORE_OPTIMIZERS[name]))


class TwoOptimizers(Noisy):
    """Two networks against each other, as a GAN has them."""

    def __init__(self) -> None:
        super().__init__(OPTIMIZERS["adam"])
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            out = self.judge(self.net(batch[0])).float().mean()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch) + out if index == 0 else -out)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = self.net, self.judge
        return [self.make_optimizer(list(part.parameters())) for part in parts], []


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_optimizers(precision: str) -> None:
    assert_same(TwoOptimizers, precision=precision)


class TwoSkippable(TwoOptimizers):
    """Without the running statistics, which a skipped step holds on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.LayerNorm(16)


@pytest.mark.parametrize("name", ["quiet", "growing", "overflowing"])
def test_two_optimizers_with_a_scaler(name: str) -> None:
    """Lightning moves the scale after each optimizer's step."""
    assert_same_with_scaler(name, TwoSkippable)


class Skipping(Noisy):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class ReadsGradients(Noisy):
    """Reads and writes gradients in the hooks around the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 + 0.01 * float(parameter.grad.abs().max()))

    def on_after_backward(self) -> None:
        self.net[0].weight.grad.add_(torch.randn(()) * 1e-3)  # type: ignore[union-attr, operator]


class OwnBackward(Noisy):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class OwnStep(Noisy):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()  # the closure must run, the step need not
            optimizer.step()


class OwnZero(Noisy):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Embeds(Noisy):
    """A layer with sparse gradients, and a parameter that never gets one."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(make_optimizer)
        self.table = nn.Embedding(8, 8, sparse=True)
        self.unused = nn.Parameter(torch.zeros(3))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        index = (batch[0][:, 0].abs() * 3).long().clamp(max=7)
        return super().loss([batch[0] + self.table(index), batch[1]])


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize("make", [Skipping, ReadsGradients, OwnBackward, OwnStep, OwnZero])
def test_hooks_of_the_module(make: Callable[[Any], Plain]) -> None:
    assert_same(lambda: make(OPTIMIZERS["adam"]))


def test_sparse_and_unused_parameters() -> None:
    assert_same(lambda: Embeds(OPTIMIZERS["sgd"]))


def test_accumulation_that_changes() -> None:
    assert_same(
        lambda: Noisy(OPTIMIZERS["adamw"]), callbacks=[GradientAccumulationScheduler(scheduling={0: 1, 1: 4, 3: 2})]
    )


def test_other_callbacks_draw_random_numbers() -> None:
    def draw(*args: Any) -> None:
        torch.rand(1), np.random.rand(), random.random()

    names = ("on_train_batch_start", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")
    assert_same(lambda: Noisy(OPTIMIZERS["adamw"]), callbacks=[LambdaCallback(**dict.fromkeys(names, draw))])


class Gambler(ScriptedController):
    """Asks for everything and draws from every generator."""

    name = "gambler"

    def _draw(self) -> None:
        torch.rand(3), np.random.rand(3), random.random()

    def step_action(self, window: int) -> Action | None:
        self._draw()
        return Action(precision={"*": "fp16"}, loss_scale=256.0, clip=1e-3, batch_size=2, accumulate=2)

    def decide(self, observation: Any) -> Any:
        self._draw()
        return np.full(len(observation), -1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_masked_policy_moves_nothing(precision: str) -> None:
    plain = run(lambda: Noisy(OPTIMIZERS["adam"]), is_watched=False, precision=precision)
    watcher = AutoPrecisionCallback(Gambler(), knobs=(), interval=3, eval_precision="current", verbose=False)
    watched = run(lambda: Noisy(OPTIMIZERS["adam"]), is_watched=False, callbacks=[watcher], precision=precision)
    assert_identical(plain, watched)
    assert watcher.history
    assert {decision.outcome for decision in watcher.history} == {"refused"}


def test_no_random_number_is_drawn_while_steering() -> None:
    """Steered values differ, the random streams do not."""
    plain = run(lambda: Noisy(OPTIMIZERS["adam"]), is_watched=False)
    steered = run(
        lambda: Noisy(OPTIMIZERS["adam"]),
        is_watched=False,
        callbacks=[AutoPrecisionCallback("fixed:int8", interval=5, verbose=False)],
    )
    assert not differences(plain.random_states, steered.random_states)
    assert differences(plain.weights, steered.weights)
