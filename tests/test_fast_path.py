"""Training with private steps and kept copies is, bit for bit, training in which somebody looks at every gradient.

What lives here: optimizers, formats, clipping, steps without a use, and the life of a fit. Models and ways to call them
are in ``test_fast_path_models``, changes in mid-run in ``test_fast_path_changes``.

Time budget: 20 s.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from autoprec import Action, AutoPrecisionConfig, LossScaleConfig, ScriptedController
from autoprec.layers import ModuleState
from tests.private_runs import (
    Net,
    adamw,
    assert_private_is_the_same,
    assert_same_runs,
    every_format,
    gradients_of,
    run,
)
from tests.small_fits import MakeOptimizer, Plain, StatefulLoader, differences, fp16_plugin, quiet, seed

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(SGD, lr=0.05),
    "momentum": partial(SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.01, weight_decay=0.01),
    "adamw": adamw,
    "adamw with tensors": partial(
        AdamW, lr=torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.9)), foreach=False
    ),
    "adamw uphill": partial(AdamW, lr=0.001, maximize=True),
    "adamw foreach": partial(AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_takes_the_same_steps(optimizer: MakeOptimizer) -> None:
    private, seen = assert_private_is_the_same(lambda: Plain(optimizer))
    assert private.counts["private in low precision"] >= 12
    assert seen.counts["groups by kernel"] == private.counts["groups by kernel"] >= 15


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


@pytest.mark.parametrize("policy", [ScriptedController, "rule"], ids=["default", "rule"])
def test_bf16_mixed(policy: Any) -> None:
    private, _ = assert_private_is_the_same(
        lambda: Plain(adamw), policy=policy, precision="bf16-mixed", ap={"interval": 8}, max_epochs=4
    )
    assert private.counts["private in low precision"] >= 12


def test_windows_that_are_measured_stay_private() -> None:
    def private_steps(interval: int) -> tuple[int, int]:
        found = run(Plain(adamw), policy="fixed:bf16", ap={"interval": interval}, max_epochs=3)
        assert found.callback.steering is not None
        return found.counts["private in low precision"], found.callback.steering.samples

    (unmeasured, none), (measured, samples) = private_steps(10**6), private_steps(3)
    assert none == 0
    assert samples >= 3
    assert measured == unmeasured > 0


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


@every_format
@pytest.mark.parametrize("batches", [3, 5])
def test_accumulation(batches: int, policy: str) -> None:
    private, _ = assert_private_is_the_same(
        lambda: Plain(adamw), accumulate_grad_batches=batches, max_epochs=4, policy=policy
    )
    assert private.counts["private"] >= 4


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.5},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.5, "ap": {"knobs": ("precision", "clip")}},
        {"gradient_clip_val": 0.5, "ap": {"knobs": ("precision", "loss_scale")}, "max_epochs": 4},
        {"ap": {"knobs": ("precision", "loss_scale", "clip")}, "max_epochs": 4},
        {"gradient_clip_val": 0.1, "policy": "fixed:fp16", "runs_on_copies": False},
        {"gradient_clip_val": 0.1, "policy": "fixed:int8"},
    ],
    ids=["trainer", "hard", "accumulated", "not masked", "masked", "median", "fp16", "int8"],
)
def test_clipping_by_norm(options: dict[str, Any]) -> None:
    private, _ = assert_private_is_the_same(lambda: Plain(adamw), **options)
    assert any(private.telemetry["clipped"])


@pytest.mark.parametrize("limit", [0.05, None])
def test_int8_layers_compute_with_their_copies_and_clamp_what_they_put_out(limit: float | None) -> None:
    config = AutoPrecisionConfig(clamp_output=limit)
    private, _ = assert_private_is_the_same(lambda: Plain(adamw), policy="fixed:int8", config=config)
    assert private.counts["on int8 copies"] == private.counts["on copies"] == 2 * 14
    steering = private.callback.steering
    assert steering is not None
    assert {unit.ran["int8", "int8"] for unit in steering.knobs.units.values()} == {16}
    seed()
    clamped = run(Plain(adamw), policy="fixed:int8", config=AutoPrecisionConfig(clamp_output=0.05))
    assert (clamped.left.losses == private.left.losses) == (limit is not None)


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


def test_an_exception_in_a_forward_leaves_plain_layers_and_no_gradients_of_the_step_before() -> None:
    module = Raises()
    with pytest.raises(KeyError):
        run(module)
    assert {type(each) for each in module.net} == {nn.Linear, nn.ReLU}
    assert not any("_autoprec" in vars(each) for each in module.modules())
    assert set(gradients_of(module).values()) == {None}


class RaisesBetween(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 7:
            raise KeyError("out of data")


def test_an_exception_between_steps_leaves_float32_gradients() -> None:
    module = Net()
    with pytest.raises(KeyError):
        run(module, callbacks=[RaisesBetween()])
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
