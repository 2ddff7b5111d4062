"""Code that joins a fit after its steps were planned sees the gradients that it would see without autoprec.

Time budget: 15 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch.autograd.graph import get_gradient_edge
from torch.optim import AdamW

from autoprec.onlookers import Onlookers
from tests.kernels import needs_cpu_kernels
from tests.private_runs import Run, assert_private_is_the_same, run
from tests.small_fits import Plain, callback_of, clone, differences, loader, quiet

Act = Callable[[Trainer, Any], object]


class Module(Plain):
    """Two epochs of eight steps; ``seen`` has the gradients before each step and those of the step before."""

    def __init__(self) -> None:
        super().__init__(partial(AdamW, lr=0.01))
        self.seen: list[Any] = []
        self.hooks = [self.note]  # a list: reading code finds no call of it

    def note(self, *args: Any) -> None:
        self.seen.append(clone([parameter.grad for parameter in self.parameters()]))


class Looks(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        pl_module.note()

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        pl_module.note()


def add_callback(trainer: Any, root: Any) -> None:
    trainer.callbacks.append(Looks())


def replace_callbacks(trainer: Any, root: Any) -> None:
    trainer.callbacks = [*trainer.callbacks, Looks()]


def assign_hook(trainer: Any, root: Any) -> None:
    root.on_before_optimizer_step = root.hooks[0]


def assign_hook_of_callback(trainer: Any, root: Any) -> None:
    callback: Any = callback_of(trainer)
    callback.on_before_optimizer_step = root.hooks[0]


ACTS = [add_callback, replace_callbacks, assign_hook, assign_hook_of_callback]


class At(Callback):
    """Acts once, at a moment of an epoch."""

    def __init__(self, moment: str, act: Act, epoch: int = 0, batch: int = 0) -> None:
        def hook(trainer: Any, root: Any, *rest: Any, **options: Any) -> None:
            is_batch = trainer.fit_loop.epoch_loop.batch_idx == batch if "batch" in moment else True
            if trainer.current_epoch == epoch and is_batch:
                act(trainer, root)

        setattr(self, moment, hook)


@needs_cpu_kernels
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("moment", ["on_fit_start", "on_train_start", "on_train_epoch_start"])
def test_who_joins_before_the_first_step_sees_every_gradient(moment: str, act: Act) -> None:
    module = Module()
    joined = run(module, callbacks=[At(moment, act)])
    assert joined.counts["private"] == joined.counts["on copies"] == 0
    assert len(module.seen) >= 16
    assert not any(grad is None for grads in module.seen[1:] for grad in grads)


@needs_cpu_kernels
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_who_joins_in_a_later_epoch_sees_what_is_seen_without_kernels(act: Act, accumulate: int) -> None:
    modules: list[Module] = []

    def make() -> LightningModule:
        modules.append(Module())
        return modules[-1]

    callbacks = partial(make_at, "on_train_epoch_start", act, epoch=1)
    assert_private_is_the_same(make, callbacks=callbacks, accumulate_grad_batches=accumulate)
    private, seen = modules
    assert private.seen
    assert not differences(private.seen, seen.seen)


def make_at(*args: Any, **kwargs: Any) -> list[Callback]:
    return [At(*args, **kwargs)]


@needs_cpu_kernels
@pytest.mark.parametrize("act", [add_callback, replace_callbacks])
def test_a_callback_that_joins_in_mid_epoch_sees_the_next_step(act: Act) -> None:
    modules: list[Module] = []

    def make() -> LightningModule:
        modules.append(Module())
        return modules[-1]

    assert_private_is_the_same(make, callbacks=partial(make_at, "on_train_batch_start", act, batch=6))
    private, seen = modules
    assert len(private.seen) == 2 * 10
    assert not differences(private.seen, seen.seen)


@needs_cpu_kernels
def test_steps_are_private_again_when_the_last_one_has_left() -> None:
    looks = Looks()

    def leave(trainer: Any, root: Any) -> None:
        trainer.callbacks.remove(looks)

    def fit(*others: Callback) -> Run:
        return run(Module(), callbacks=[looks, *others])

    assert fit().counts["private"] == 0
    assert fit(At("on_train_epoch_start", leave, epoch=1)).counts["private"] > 0


@needs_cpu_kernels
def test_hooks_on_graph_nodes_that_are_kept_get_their_gradients() -> None:
    """Such a layer does not run on copies, others do."""
    seen: list[Any] = []
    nodes: list[Any] = []

    def hook(trainer: Any, root: Any) -> None:
        nodes.append(get_gradient_edge(root.net[0].weight).node)
        nodes[0].register_prehook(lambda grads: seen.append(grads[0]))

    done = run(Module(), callbacks=[At("on_fit_start", hook)])
    assert len(seen) == 16
    assert not any(grad is None for grad in seen)
    assert done.callback.steering is not None
    assert done.callback.steering.copied_layers == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["module", "callback", "lambda"])
def test_gradients_that_a_hook_spoils_without_a_trace_never_reach_a_weight(kind: str, late: bool) -> None:
    module: Any = Module()

    def spoil(*args: Any) -> None:
        if module.trainer.global_step == 3:
            module.net[0].weight.grad.data.fill_(math.inf)

    def hook(trainer: Any, root: Any) -> None:
        if kind == "module":
            module.on_before_optimizer_step = spoil
        elif kind == "callback":
            trainer.callbacks.append(Callback())
            trainer.callbacks[-1].on_before_optimizer_step = spoil
        else:
            trainer.callbacks.append(LambdaCallback(on_before_optimizer_step=spoil))

    done = run(module, callbacks=[At("on_train_start" if late else "setup", hook)])
    assert (done.callback.applied_steps, done.callback.skipped_steps) == (15, 1)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


def test_it_is_asked_once_as_long_as_nobody_comes() -> None:
    module, answers = Module(), []

    class Asks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            answers.append(others.have_changed())

    trainer: Any = quiet(callbacks=[Asks()], max_epochs=2)
    others = Onlookers(module, trainer, ())
    trainer.fit(module, loader())
    assert answers == [True] + [False] * 15
    assert others.name is not None
    assert "Asks.on_train_batch_end" in others.name
