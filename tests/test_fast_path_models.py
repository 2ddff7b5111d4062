"""Private steps give the same bits whatever the model is, and however often, and where, a step calls its layers.

Time budget: 20 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from autoprec import ScriptedController
from tests.private_runs import Net, assert_private_is_the_same, convolutions, every_format, loss_of, run
from tests.wrapped_tensors import Wrapped

# ---- calls ----


class Siamese(Net):
    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return loss_of(self.net(batch[0]) - self.net(batch[0].flip(0)), batch[1])


def test_layers_that_are_called_twice_run_as_always() -> None:
    assert_private_is_the_same(Siamese, runs_on_copies=False)


class CalledAgain(Net):
    """Layers run once in the first steps and several times in later ones."""

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        loss = super().loss(batch)
        for factor in (2, 3, 4)[: self.steps % 4 if self.steps > 6 else 0]:
            loss = loss + 0.3 * super().loss([batch[0] * factor, batch[1]])
        return loss


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"policy": "fixed:int8"},
        {"policy": ScriptedController, "precision": "bf16-mixed"},
    ],
)
def test_layers_that_are_called_more_often_later(options: dict[str, Any]) -> None:
    assert_private_is_the_same(CalledAgain, max_epochs=3, **options)


class Conditional(Net):
    """A layer that runs, and gets its gradients, in some steps only."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 2)
        self.first = first

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        output = self.net(batch[0])
        if self.steps % 3 == 0 and self.steps >= self.first:
            output = output + self.extra(batch[0])
        return loss_of(output, batch[1])


@pytest.mark.parametrize("first", [0, 6])
def test_layers_that_run_in_some_steps_only(first: int) -> None:
    private, _ = assert_private_is_the_same(lambda: Conditional(first))
    assert private.counts["private in low precision"] >= 8, "the fast path ended"


class Checkpointed(Net):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)]))
        self.use_reentrant = use_reentrant

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x = self.net[0](batch[0]).relu()
        x = checkpoint(lambda y: self.net[1](y).relu(), x, use_reentrant=self.use_reentrant)
        return loss_of(self.net[2](x), batch[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("precision", "policy"),
    [("32-true", "fixed:bf16"), ("32-true", "fixed:int8"), ("bf16-mixed", ScriptedController)],
    ids=["bf16", "int8", "bf16-mixed"],
)
def test_checkpointed_blocks(use_reentrant: bool, precision: str, policy: Any) -> None:
    private, _ = assert_private_is_the_same(
        lambda: Checkpointed(use_reentrant), policy=policy, precision=precision, gradient_clip_val=0.3
    )
    assert private.counts["on copies"] >= 3 * 12


class CheckpointedAgain(Net):
    """A whole network in a checkpoint, which does without its copies when it is recomputed."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.does = change

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        loss = loss_of(checkpoint(self.net, batch[0], use_reentrant=False), batch[1])
        if self.steps > 6 and self.does == "calls":
            return loss + 0.3 * loss_of(checkpoint(self.net, 2 * batch[0], use_reentrant=False), batch[1])
        if self.steps > 6:
            with torch.no_grad():
                self.net[0].weight.mul_(0.99)
        return loss


@every_format
@pytest.mark.parametrize("change", ["calls", "writes"])
def test_recomputations_that_run_otherwise(change: str, policy: str) -> None:
    assert_private_is_the_same(lambda: CheckpointedAgain(change), policy=policy)


class WithTarget(Net):
    """A pass without gradients before the one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            target = self.net(batch[0].flip(1)).float()
        return loss_of(self.head(self.net(batch[0])), batch[1] + 0.1 * target)


def test_a_pass_without_gradients() -> None:
    private, _ = assert_private_is_the_same(WithTarget)
    assert private.counts["on copies"] == private.counts["private in low precision"], "the head"


class Penalised(Net):
    """A gradient penalty, and gradients of weights inside the step."""

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        loss = super().loss(batch)
        grads = torch.autograd.grad(loss, [self.net[0].weight, self.net[2].bias], create_graph=True)
        return loss + 0.01 * sum(grad.float().pow(2).sum() for grad in grads)


def test_a_gradient_penalty_is_seen_as_a_look_at_gradients() -> None:
    found = run(Penalised())
    assert found.counts["private"] == 0


class Regularised(Net):
    """Losses that use weights directly: ``uses`` more of them."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        weight: Tensor = self.net[0].weight
        terms = [weight.pow(2).sum(), weight.exp().mean(), nn.functional.linear(batch[0], weight).float().std()]
        early, late = sum(terms[1 : self.uses]), terms[0]
        return 0.02 * early + super().loss(batch) + 0.01 * late


@every_format
@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("batches", [1, 3])
def test_weights_that_the_loss_uses_too(uses: int, batches: int, policy: str) -> None:
    assert_private_is_the_same(lambda: Regularised(uses), accumulate_grad_batches=batches, max_epochs=4, policy=policy)


class Protected(Net):
    """One layer runs in a region without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        output = self.net(batch[0])
        with torch.autocast("cpu", enabled=False):
            return loss_of(self.head(output.float()), batch[1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_regions_without_autocast(precision: str) -> None:
    policy: Any = ScriptedController if precision == "bf16-mixed" else "fixed:bf16"
    assert_private_is_the_same(Protected, policy=policy, precision=precision)


class Kept(Net):
    """The loss of a step comes from outputs of the step before."""

    previous: Any = None

    def loss(self, batch: Sequence[Tensor]) -> Any:
        previous, self.previous = self.previous, (self.net(batch[0]), batch[1])
        return loss_of(*(previous or self.previous))


@pytest.mark.filterwarnings("ignore:.*training_step.* returned `None`")
@every_format
def test_a_graph_that_is_kept_over_the_step(policy: str) -> None:
    def make() -> LightningModule:
        module = Kept()
        module.previous = (torch.zeros(8, 2, requires_grad=True), torch.zeros(8, 2))
        return module

    private, _ = assert_private_is_the_same(make, policy=policy)
    assert private.counts["private in low precision"] > 8


class TakesWrapped(Net):
    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return super().loss([Wrapped(batch[0].bfloat16()), batch[1]])


def test_kernels_leave_tensors_of_other_libraries_alone() -> None:
    private, _ = assert_private_is_the_same(TakesWrapped, policy="fixed:int8")
    assert private.counts["on copies"] == 14, "the layer behind"


# ---- models ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.second(self.first(x).relu()))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.norm(self.table((x.abs() * 2).long().clamp(max=4)).mean(1) + x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.block(x.unsqueeze(1).expand(-1, 3, -1)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x.view(-1, 4, 2))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "channels last": lambda: convolutions().to(memory_format=torch.channels_last),
    "tied": Tied,
    "embedding": Embedded,
    "attention": Attention,
    "lstm": Recurrent,
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 4)), nn.Linear(4, 2)),
    "odd sizes": lambda: nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1), nn.Linear(1, 2)),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
def test_models(model: Callable[[], nn.Module]) -> None:
    assert_private_is_the_same(lambda: Net(model()))


@pytest.mark.parametrize("model", [convolutions, MODELS["channels last"], Attention])
def test_models_under_bf16_mixed(model: Callable[[], nn.Module]) -> None:
    assert_private_is_the_same(
        lambda: Net(model()), policy=ScriptedController, precision="bf16-mixed", gradient_clip_val=0.1
    )
