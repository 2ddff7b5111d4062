"""Training with private steps and kept copies is, bit for bit, training in which somebody looks at every gradient.

Time budget: 40 s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from autoprec import Action, AutoPrecisionConfig, LossScaleConfig, ScriptedController
from autoprec.layers import ModuleState
from tests.private_runs import Changing, Make, assert_private_is_the_same, assert_same_runs, gradients_of, run
from tests.small_fits import Plain, StatefulLoader, differences, fp16_plugin, quiet, seed

MakeOptimizer = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(SGD, lr=0.05),
    "momentum": partial(SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.01, weight_decay=0.01),
    "adamw": partial(AdamW, lr=0.01),
    "adamw with tensors": partial(
        AdamW, lr=torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False
    ),
    "adamw uphill": partial(AdamW, lr=0.001, maximize=True),
    "adamw foreach": partial(AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(AdamW, lr=0.01, fused=True),
}
adamw = OPTIMIZERS["adamw"]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


class Net(Changing):
    """``net`` on batches."""

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: MakeOptimizer = adamw,
        change: Callable[[Any, int], None] | None = None,
    ) -> None:
        super().__init__(optimizer, change)
        if net is not None:
            self.net: Any = net


class At(Callback):
    """Does something to the module at the beginning of one batch."""

    def __init__(self, batch: int, do: Callable[[Any], object]) -> None:
        self.batch, self.do, self.batches = batch, do, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.batches == self.batch:
            self.do(pl_module)
        self.batches += 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_takes_the_same_steps(optimizer: MakeOptimizer) -> None:
    private, seen = assert_private_is_the_same(lambda: Plain(optimizer))
    assert private.counts["private in low precision"] >= 12
    assert seen.counts["groups by kernel"] == private.counts["groups by kernel"] >= 15


@pytest.mark.parametrize("policy", [ScriptedController, "rule"], ids=["default", "rule"])
def test_bf16_mixed(policy: Any) -> None:
    private, _ = assert_private_is_the_same(
        lambda: Plain(adamw), policy=policy, precision="bf16-mixed", ap={"interval": 8}, max_epochs=4
    )
    assert private.counts["private in low precision"] >= 12


def test_map_changes_in_mid_run() -> None:
    formats = {3: "fp32", 6: "bf16", 9: "int8", 12: "bf16"}
    actions = {step: Action(precision={"net.0": name}) for step, name in formats.items()}
    policy = partial(ScriptedController, steps={0: Action(precision={"net.2": "bf16"}), **actions})
    private, _ = assert_private_is_the_same(lambda: Plain(adamw), policy=policy, max_epochs=3)
    assert private.callback.precision_map()["net.0"] == "bf16"


def test_emulated_fp16_beside_bf16() -> None:
    policy = partial(ScriptedController, epochs={0: Action(precision={"net.0": "fp16", "net.2": "bf16"})})
    private, _ = assert_private_is_the_same(lambda: Plain(adamw), policy=policy)
    assert private.counts["on copies"] == private.counts["private in low precision"], "one of two layers"


def test_fp16_mixed_with_its_scaler() -> None:
    assert_private_is_the_same(
        lambda: Plain(adamw), policy=ScriptedController, plugins=[fp16_plugin()], runs_on_copies=False
    )


def test_a_loss_scale_that_is_no_power_of_two_is_taken_out_of_the_gradients_first() -> None:
    config = AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=1000.0))
    found = run(Plain(adamw), policy="fixed:fp16", config=config)
    assert found.counts["private"] == 0
    assert found.counts["groups by kernel"] > 0


@pytest.mark.parametrize("batches", [3, 5])
def test_accumulation(batches: int) -> None:
    private, _ = assert_private_is_the_same(lambda: Plain(adamw), accumulate_grad_batches=batches, max_epochs=4)
    assert private.counts["private"] >= 4


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.5, "ap": {"knobs": ("precision", "clip")}},
        {"ap": {"knobs": ("precision", "loss_scale", "clip")}, "max_epochs": 4},
        {"gradient_clip_val": 0.1, "policy": "fixed:fp16", "runs_on_copies": False},
    ],
    ids=["trainer", "hard", "accumulated", "not masked", "median", "fp16"],
)
def test_clipping_by_norm(options: dict[str, Any]) -> None:
    private, _ = assert_private_is_the_same(lambda: Plain(adamw), **options)
    assert any(private.telemetry["clipped"])


def test_clipping_by_value_needs_the_gradients() -> None:
    found = run(Plain(adamw), gradient_clip_val=0.1, gradient_clip_algorithm="value")
    assert found.counts["private"] == 0
    assert found.counts["groups by kernel"] > 0


# ---- steps that are not like the others ----


class Spoilt(Net):
    """Some losses are NaN, some missing."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.steps in (5, 6, 11):
            return loss * torch.nan
        return None if self.steps in (8, 13) else loss


@pytest.mark.filterwarnings("ignore:.*training_step.* returned `None`")
def test_skipped_steps_and_steps_without_a_loss() -> None:
    private, _ = assert_private_is_the_same(Spoilt)
    assert private.callback.skipped_steps == 3


class FirstWithout(Net):
    """No loss in the window in which calls are counted."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.steps == 3 else loss


@pytest.mark.filterwarnings("ignore:.*training_step.* returned `None`")
def test_a_step_without_a_loss_says_nothing_about_layers() -> None:
    private, _ = assert_private_is_the_same(FirstWithout)
    assert private.counts["on copies"] > 10


def test_an_epoch_of_another_length() -> None:
    assert_private_is_the_same(lambda: Plain(adamw), data=lambda: StatefulLoader(count=40), max_epochs=4)


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


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_layers_that_are_called_more_often_later(options: dict[str, Any]) -> None:
    policy: Any = ScriptedController if options.get("precision") else "fixed:bf16"
    assert_private_is_the_same(CalledAgain, policy=policy, max_epochs=3, **options)


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
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_checkpointed_blocks(use_reentrant: bool, precision: str) -> None:
    policy: Any = ScriptedController if precision == "bf16-mixed" else "fixed:bf16"
    private, _ = assert_private_is_the_same(
        lambda: Checkpointed(use_reentrant), policy=policy, precision=precision, gradient_clip_val=0.3
    )
    assert private.counts["on copies"] >= 3 * 12


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


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("batches", [1, 3])
def test_weights_that_the_loss_uses_too(uses: int, batches: int) -> None:
    assert_private_is_the_same(lambda: Regularised(uses), accumulate_grad_batches=batches, max_epochs=4)


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
def test_a_graph_that_is_kept_over_the_step() -> None:
    def make() -> LightningModule:
        module = Kept()
        module.previous = (torch.zeros(8, 2, requires_grad=True), torch.zeros(8, 2))
        return module

    private, _ = assert_private_is_the_same(make)
    assert private.counts["private in low precision"] > 8


# ---- models ----


def convolutions() -> Any:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 6, 2, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


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


class InGroups(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [
            {"params": self.net[0].parameters(), "lr": 0.02, "weight_decay": 0.1},
            {"params": self.spare.parameters()},
            {"params": self.net[2].parameters(), "betas": (0.5, 0.9)},
        ]
        optimizer = AdamW(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.01, 0.01], total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_parameter_groups_and_a_schedule() -> None:
    private, _ = assert_private_is_the_same(InGroups, max_epochs=3)
    assert private.counts["groups by kernel"] >= 2 * 20


# ---- changes in mid-run ----


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
    "amsgrad from here on": (
        Net,
        lambda: [At(6, lambda m: m.trainer.optimizers[0].param_groups[0].update(capturable=False, maximize=True))],
    ),
}


@pytest.mark.parametrize(("make", "callbacks"), CHANGES.values(), ids=CHANGES)
def test_changes_in_mid_run(make: Make, callbacks: Callable[[], list[Callback]]) -> None:
    assert_private_is_the_same(make, callbacks=callbacks)


def hook_after_hand_out(module: Any, step: int) -> None:
    if step == 6:
        module.net[0].weight.register_hook(lambda grad: grad * 0.5)


def rewrite_weight(module: Any, step: int) -> None:
    with torch.no_grad():
        module.net[0].weight.mul_(0.99)


def replace_weight(module: Any, step: int) -> None:
    if step == 6:
        module.net[2].weight = nn.Parameter(module.net[2].weight.detach() * 0.5)


@pytest.mark.parametrize("change", [hook_after_hand_out, rewrite_weight, replace_weight])
def test_changes_inside_the_step(change: Callable[[Any, int], None]) -> None:
    assert_private_is_the_same(lambda: Net(change=change))


# ---- the life of a fit ----


def test_a_resumed_run_goes_on_as_if_nothing_had_happened() -> None:
    seed()
    whole = run(Plain(adamw), data=StatefulLoader(), max_steps=20, max_epochs=-1)
    seed()
    first = run(Plain(adamw), data=StatefulLoader(), max_steps=9, max_epochs=-1)
    first.trainer.save_checkpoint("half.ckpt")
    seed(7)
    second = run(
        Plain(adamw),
        data=StatefulLoader(),
        max_steps=20,
        max_epochs=-1,
        fit={"ckpt_path": "half.ckpt", "weights_only": False},
    )
    assert second.counts["on copies"] > 10
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, second.module.state_dict()[name]), name
    moments = [each.trainer.optimizers[0].state_dict()["state"] for each in (whole, second)]
    for key, state in moments[0].items():
        assert all(torch.equal(tensor, moments[1][key][name]) for name, tensor in state.items())


def test_a_second_fit_starts_anew() -> None:
    runs = []
    for looks_on in (False, True):
        seed()
        module = Plain(adamw)
        run(module, looks_on=looks_on, max_epochs=1)
        runs.append(run(module, looks_on=looks_on, max_epochs=1))
    assert runs[0].counts["on copies"] > 0
    assert_same_runs(*runs)


def test_a_checkpoint_of_every_step_is_the_same() -> None:
    folders = ["private", "seen"]

    def checkpoints() -> list[Callback]:
        return [ModelCheckpoint(folders[0] if not Path(folders[0]).exists() else folders[1], every_n_train_steps=3)]

    assert_private_is_the_same(lambda: Plain(adamw), callbacks=checkpoints, enable_checkpointing=True)
    states = []
    for folder in folders:
        (path,) = Path(folder).iterdir()
        states.append(torch.load(path, weights_only=False))
    for key in ("state_dict", "optimizer_states", "AutoPrecision"):
        assert not differences(states[0][key], states[1][key]), key


class Copied(Callback):
    """Copies the module where no hook sees gradients, and trains on with the original."""

    copies: list[LightningModule]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.copies = [copy.deepcopy(pl_module)]


def test_a_copy_of_the_module_is_plain_and_equal() -> None:
    callback = Copied()
    private, _ = assert_private_is_the_same(lambda: Plain(adamw), callbacks=lambda: [callback])
    (copied,) = callback.copies
    assert [type(module) for module in copied.modules()] == [type(module) for module in private.module.modules()]
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), private.module.parameters(), strict=True))


class Raises(Net):
    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.steps == 8:
            raise KeyError("out of data")
        return loss


def test_an_exception_leaves_plain_layers_and_float32_gradients() -> None:
    module = Raises()
    with pytest.raises(KeyError):
        run(module)
    assert {type(each) for each in module.net} == {nn.Linear, nn.ReLU}
    assert not any("_autoprec" in vars(each) for each in module.modules())
    gradients = gradients_of(module)
    assert all(grad is not None and grad.dtype is torch.float32 for grad in gradients.values())


class RaisesInTheMiddle(Net):
    """Attempts that fail half-way are repeated by the plugin."""

    failures = 0

    def __init__(self, fails_at: int, most: int) -> None:
        super().__init__()
        self.fails_at, self.most = fails_at, most

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        if self.steps >= self.fails_at and self.failures < self.most:
            self.failures += 1
            self.net[0](batch[0])
            raise RuntimeError("expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16")
        return super().loss(batch)


@pytest.mark.parametrize("fails_at", [3, 4, 7])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_repeated_attempts_run_in_the_formats_that_they_were_given(fails_at: int, most: int) -> None:
    assert_private_is_the_same(lambda: RaisesInTheMiddle(fails_at, most), runs_on_copies=None)


def test_steps_go_to_torch_where_they_are_switched_off() -> None:
    found = run(Plain(adamw), config=AutoPrecisionConfig(fused_step=False))
    assert not found.counts


@pytest.mark.parametrize("options", [{"precision": "bf16-true"}, {"ap": {"knobs": ("loss_scale",)}}])
def test_a_masked_precision_knob_leaves_steps_alone(options: dict[str, Any]) -> None:
    found = run(Plain(adamw), policy=ScriptedController(), **options)
    assert not found.counts


def test_nothing_of_the_fast_path_stays_on_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[ModuleState] = []
    original = ModuleState.__init__

    def noting(self: ModuleState, *args: Any) -> None:
        original(self, *args)
        states.append(self)

    monkeypatch.setattr(ModuleState, "__init__", noting)
    found = run(Plain(adamw))
    assert found.counts["on copies"] > 0
    assert states
    assert all(state.override is None for state in states)


def test_manual_optimization_is_never_private() -> None:
    class Manual(Plain):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__(adamw)
            self.automatic_optimization = False

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    found = run(Manual())
    assert found.counts["private"] == found.counts["on copies"] == 0
    assert found.counts["groups by kernel"] > 10


def test_a_trainer_without_the_callback_is_not_touched() -> None:
    trainer = quiet(max_epochs=1)
    module = Plain(adamw)
    trainer.fit(module, StatefulLoader())
    assert "_init_group" not in vars(trainer.optimizers[0])


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
        super().__init__(OPTIMIZERS["sgd"])
        self.spare = nn.Parameter(torch.zeros(3))


def test_a_gradient_that_a_hook_gives_is_used() -> None:
    found = run(WithSpare(), callbacks=[GivesGradient()], max_epochs=1)
    assert found.counts["groups by kernel"] == 8
    module: Any = found.module
    assert torch.allclose(module.spare.detach(), torch.full((3,), -8 * 0.05))
