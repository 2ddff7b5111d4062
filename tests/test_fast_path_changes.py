"""Private steps give the same bits when layers, weights, optimizers or hooks change in the middle of a run.

Time budget: 15 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD, AdamW, Optimizer

from autoprec import AutoPrecisionConfig
from tests.private_runs import Make, Net, adamw, assert_private_is_the_same, convolutions, every_format, run
from tests.small_fits import Plain, seed


class At(Callback):
    """Does something to the module at the beginning of one batch."""

    def __init__(self, batch: int, do: Callable[[Any], object]) -> None:
        self.batch, self.do, self.batches = batch, do, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.batches == self.batch:
            self.do(pl_module)
        self.batches += 1


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class OnlyTrainable(Plain):
    def configure_optimizers(self) -> Any:
        return AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)


def test_unfreezing_adds_a_group_in_mid_run() -> None:
    private, _ = assert_private_is_the_same(OnlyTrainable, callbacks=lambda: [Unfreezing()], max_epochs=3)
    assert private.counts["private in low precision"] > 16


def freeze_in_turn(module: Any, step: int) -> None:
    module.net[0].requires_grad_(step % 4 != 0)


def freeze_around_the_forward(module: Any, step: int) -> None:
    module.net[0].requires_grad_(False)


class ThawsAfterForward(Net):
    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        loss = super().loss(batch)
        self.net[0].requires_grad_(True)
        return loss


def halve(parameter: Tensor) -> None:
    attrgetter("grad")(parameter).mul_(0.5)  # by a name that nobody finds


def replace_layer(module: Any) -> None:
    other = nn.Linear(16, 2)
    module.net[2] = other
    module.trainer.optimizers[0].add_param_group({"params": other.parameters()})


def normalise_weight(module: Any) -> None:
    parametrizations.orthogonal(module.net[0])
    module.trainer.optimizers[0].add_param_group({"params": [module.net[0].parametrizations.weight.original]})


CHANGES: dict[str, tuple[Make, Callable[[], list[Callback]]]] = {
    "frozen in turn": (lambda: Net(change=freeze_in_turn), list),
    "frozen during the forward": (lambda: ThawsAfterForward(change=freeze_around_the_forward), list),
    "layer replaced": (Net, lambda: [At(6, replace_layer)]),
    "weight replaced": (
        Net,
        lambda: [At(6, lambda m: setattr(m.net[0], "weight", nn.Parameter(m.net[0].weight.detach().clone())))],
    ),
    "pruned by hand": (Net, lambda: [At(6, lambda m: prune.l1_unstructured(m.net[0], "weight", 0.5))]),
    "parametrized": (
        Net,
        lambda: [At(6, lambda m: parametrize.register_parametrization(m.net[0], "weight", nn.Tanh()))],
    ),
    "hook on a weight": (Net, lambda: [At(6, lambda m: m.net[0].weight.register_hook(lambda grad: grad * 0.5))]),
    "hook after accumulation": (
        Net,
        lambda: [At(6, lambda m: m.net[0].weight.register_post_accumulate_grad_hook(halve))],
    ),
    "channels last": (
        lambda: Net(convolutions()),
        lambda: [At(6, lambda m: m.to(memory_format=torch.channels_last))],
    ),
    "moments replaced": (
        Net,
        lambda: [
            At(
                6,
                lambda m: [
                    state.update(exp_avg=torch.zeros_like(state["exp_avg"]))
                    for state in m.trainer.optimizers[0].state.values()
                ],
            )
        ],
    ),
    "optimizer loaded": (
        Net,
        lambda: [At(6, lambda m: m.trainer.optimizers[0].load_state_dict(m.trainer.optimizers[0].state_dict()))],
    ),
    "optimizer replaced": (
        Net,
        lambda: [At(6, lambda m: setattr(m.trainer, "optimizers", [SGD(m.parameters(), lr=0.01, momentum=0.9)]))],
    ),
    "amsgrad from here on": (
        Net,
        lambda: [At(6, lambda m: m.trainer.optimizers[0].param_groups[0].update(capturable=False, maximize=True))],
    ),
}


@every_format
@pytest.mark.parametrize(("make", "callbacks"), CHANGES.values(), ids=CHANGES)
def test_changes_in_mid_run(make: Make, callbacks: Callable[[], list[Callback]], policy: str) -> None:
    # int8 convolutions are emulated
    runs_on_copies = None if policy == "fixed:int8" else True
    assert_private_is_the_same(make, callbacks=callbacks, policy=policy, runs_on_copies=runs_on_copies)


def test_an_int8_weight_that_no_longer_lies_in_rows_runs_as_always() -> None:
    def turn(module: Any) -> None:
        weight = module.net[0].weight
        weight.data = weight.data.t().contiguous().t()

    private, _ = assert_private_is_the_same(Net, callbacks=lambda: [At(6, turn)], policy="fixed:int8")
    # two layers from the third step to the sixth, one after that
    assert private.counts["on int8 copies"] == 2 * 4 + 10


def square() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2))


def turn_in_place(module: Any) -> None:
    weight = module.net[1].weight
    weight.data = weight.data.t()


def cut_in_place(module: Any) -> None:
    for parameter in (module.net[1].weight, module.net[1].bias):
        parameter.data = parameter.data[:8]
    module.net[2].weight.data = module.net[2].weight.data[:, :8]


@pytest.mark.parametrize("policy", ["fixed:fp32", "fixed:bf16", "fixed:int8"])
@pytest.mark.parametrize(("change", "optimizer"), [(turn_in_place, adamw), (cut_in_place, partial(SGD, lr=0.05))])
def test_a_weight_that_lies_otherwise_at_the_same_address(change: Any, optimizer: Any, policy: str) -> None:
    runs = []
    for fused in (False, True):
        seed()
        config = AutoPrecisionConfig(fused_step=fused)
        runs.append(run(Net(square(), optimizer), policy=policy, callbacks=[At(6, change)], config=config))
    torchs, private = runs
    assert private.counts["private"] > 0
    for mine, theirs in zip(private.module.parameters(), torchs.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def hook_after_hand_out(module: Any, step: int) -> None:
    if step == 6:
        module.net[0].weight.register_hook(lambda grad: grad * 0.5)


def rewrite_weight(module: Any, step: int) -> None:
    with torch.no_grad():
        module.net[0].weight.mul_(0.99)


def replace_weight(module: Any, step: int) -> None:
    if step == 6:
        module.net[2].weight = nn.Parameter(module.net[2].weight.detach() * 0.5)


@every_format
@pytest.mark.parametrize("change", [hook_after_hand_out, rewrite_weight, replace_weight])
def test_changes_inside_the_step(change: Callable[[Any, int], None], policy: str) -> None:
    assert_private_is_the_same(lambda: Net(change=change), policy=policy)


def own_step(self: Optimizer, closure: Callable[[], Any]) -> Any:
    result = closure()
    for parameter in self.param_groups[0]["params"]:
        parameter.detach().add_(attrgetter("grad")(parameter), alpha=-0.01)  # by a name that nobody finds
    return result


def replace_step(module: Any) -> None:
    optimizer = module.trainer.optimizers[0]
    optimizer.step = MethodType(own_step, optimizer)


def test_a_step_that_is_replaced_in_mid_run_finds_its_gradients() -> None:
    assert_private_is_the_same(lambda: Plain(adamw), callbacks=lambda: [At(6, replace_step)])


class GivesGradient(Callback):
    """A hook gives a gradient to a parameter that got none from the backward."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Optimizer) -> None:
        pl_module.spare.grad = torch.ones(3)


class WithSpare(Plain):
    def __init__(self) -> None:
        super().__init__(partial(SGD, lr=0.05))
        self.spare = nn.Parameter(torch.zeros(3))


def test_a_gradient_that_a_hook_gives_is_used() -> None:
    found = run(WithSpare(), callbacks=[GivesGradient()], max_epochs=1)
    assert found.counts["groups by kernel"] == 8
    module: Any = found.module
    assert torch.allclose(module.spare.detach(), torch.full((3,), -8 * 0.05))
