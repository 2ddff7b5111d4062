"""Planned maps in real fits: what is planned and when, what the guard holds, and that measuring changes nothing.

Time budget: 60 s.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from autoprec import (
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    GuardConfig,
    LossScaleConfig,
    PlanConfig,
    ScriptedController,
)
from autoprec.config import ClipConfig
from autoprec.controller import resolve_policy
from autoprec.planning import FormatErrors, ModelFacts, Plan, UnitErrors, UnitFacts
from autoprec.policies import analytic_costs
from autoprec.policies.analytic import PlanningController
from autoprec.policies.analytic_planners import FisherPlanner
from tests.resumed import STOP, Setup, assert_resumes
from tests.small_fits import StatefulLoader, assert_identical, outcome, quiet, seed
from tests.support import Manual, Task, loader, rows
from tests.zoo_models import GAN

pytestmark = [
    # a resumed run has no ModelCheckpoint
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]
POLICIES = ("fisher", "snip")


@pytest.fixture(autouse=True)
def _every_format_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine computes itself must not decide what is planned."""
    monkeypatch.setattr(analytic_costs, "_EMULATED", 0.4)


def planned(policy: str = "fisher", formats: Sequence[str] = ("fp32", "bf16"), **options: Any) -> AutoPrecisionCallback:
    config = {"loss_scale": LossScaleConfig(init_scale=128.0), **options.pop("config", {})}
    config["plan"] = PlanConfig(**{"replan": 0, **options.pop("plan", {})})
    settings = AutoPrecisionConfig(formats=tuple(formats), **config)
    return AutoPrecisionCallback(policy, **{"interval": 3, "verbose": False, "config": settings, **options})


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Flatten()),
        nn.Linear(64, 4),
    )


class GPT(nn.Module):
    """One block, with the table of the embedding as the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        h = self.norm(x)
        mask = torch.triu(torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        out: Tensor = self.head(x + self.down(nn.functional.gelu(self.up(x))))
        return out


def next_token(net: nn.Module, ids: Tensor, index: int) -> Tensor:
    return nn.functional.cross_entropy(net(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


MODELS: dict[str, Any] = {
    "mlp": lambda: Task(mlp(), torch.randn(96, 8)),
    "cnn": lambda: Task(cnn(), torch.randn(96, 1, 8, 8)),
    "gpt": lambda: Task(GPT(), torch.randint(32, (96, 9)), loss=next_token, optimizer=adamw),
    "manual": lambda: Manual(mlp(), torch.randn(96, 8)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", list(MODELS))
def test_every_layer_that_gains_is_lowered(model: str, policy: str) -> None:
    seed()
    module, callback = MODELS[model](), planned(policy, plan={"saving": 1.0})
    quiet(max_epochs=1, callbacks=[callback]).fit(module)
    moves = rows(callback.history, "precision")
    names = {
        "mlp": ["net.0", "net.2", "net.4"],
        "cnn": ["net.0", "net.3", "net.5"],
        "manual": ["net.0", "net.2", "net.4"],
    }
    matrices = names.get(model, ["net.table", "net.attention", "net.up", "net.down"])
    assert {name for name, each in callback.precision_map().items() if each == "bf16"} == set(matrices)
    assert [(d.unit, d.outcome, d.step) for d in moves] == [(name, "applied", 4) for name in matrices]
    measure = "expected relative loss increase" if policy == "fisher" else "divergence"
    assert all(d.reason.startswith(f"policy {policy!r}: {measure} ") for d in moves)
    # the table is only looked up, and multiplies where it is the head's weight
    assert all(d.reason.endswith("of its time in fp32") for d in moves)
    assert callback.steering is not None
    assert 0 < callback.steering.rounding.errors[matrices[-1]].formats["bf16"].fisher < 0.01


def test_accumulation_and_the_trainers_own_precision() -> None:
    seed()
    callback = planned(plan={"loss_budget": 0.0})
    quiet(max_epochs=2, callbacks=[callback], accumulate_grad_batches=4, precision="bf16-mixed").fit(MODELS["mlp"]())
    assert callback.steering is not None
    errors = callback.steering.rounding.errors["net.0"]
    assert errors.elements == 4 * 8 * 16, "all micro-batches of a window count"
    assert set(callback.precision_map().values()) == {"fp32"}, "what the Trainer runs in is not free of errors"


def test_several_optimizers_under_manual_optimization() -> None:
    seed()
    callback = planned()
    batches = [{"pixel_values": torch.randn(2, 3, 32, 32)} for _ in range(8)]
    quiet(max_epochs=1, callbacks=[callback]).fit(GAN(), loader(batches, None))
    lowered = {d.unit for d in rows(callback.history, "precision", "applied")}
    assert {"generator.0", "discriminator.0", "discriminator.3"} <= lowered


# fragile layers


def test_exactly_the_layer_that_overflows_stays_wide() -> None:
    """Its outputs leave the range of fp16 and come back through tanh, so that fp16 anywhere else is harmless."""
    seed()
    net = mlp()
    with torch.no_grad():
        net[2].weight.mul_(1e7)  # type: ignore[operator]
    callback = planned(formats=("fp32", "fp16"))
    quiet(max_epochs=1, callbacks=[callback]).fit(Task(net, torch.randn(96, 8)))
    assert callback.precision_map() == {"net.0": "fp16", "net.2": "fp32", "net.4": "fp16"}
    assert callback.skipped_steps == 0


def test_exactly_the_layers_with_tiny_gradients_stay_wide() -> None:
    """A saturated tanh lets hardly any gradient through to what is before it, and the loss scale may not help."""
    seed()
    net = mlp()
    with torch.no_grad():
        net[2].bias.fill_(8.0)  # type: ignore[operator]
    scale = LossScaleConfig(init_scale=1.0, cap=1.0)
    callback = planned(formats=("fp32", "fp16"), config={"loss_scale": scale})
    quiet(max_epochs=1, callbacks=[callback]).fit(Task(net, torch.randn(96, 8) * 1e-1))
    assert callback.precision_map() == {"net.0": "fp32", "net.2": "fp32", "net.4": "fp16"}
    assert callback.steering is not None
    assert "of a gradient would be lost in fp16" in callback.steering.rounding.errors["net.2"].reasons["fp16"]


def test_a_held_layer_is_left_to_the_guard() -> None:
    """One batch overflows in fp16; what the guard has raised is not asked for again while it is held."""
    seed()
    data = torch.randn(200, 8)
    data[100] = 1e5
    callback = planned(formats=("fp32", "fp16"), plan={"replan": 1}, config={"guard": GuardConfig(hold=8)})
    quiet(max_epochs=1, callbacks=[callback]).fit(Task(mlp(), data))
    history = rows(callback.history, "precision")
    raised = [d for d in history if d.reason.startswith("guard")]
    assert raised
    again = [d for d in history if d.unit == raised[0].unit and d.step > raised[0].step]
    assert [d.applied for d in again] == ["fp16"], "planned again after its hold"
    assert again[0].step >= raised[0].step + 8
    assert not [d for d in history if d.outcome == "refused"]


# budgets


def test_memory_budget() -> None:
    seed()
    callback = planned(plan={"memory_bytes": 0})
    quiet(max_epochs=1, callbacks=[callback]).fit(MODELS["mlp"]())
    assert not rows(callback.history, "precision"), "no map fits, and fp32 harms least"
    (note,) = callback.controller.notes()
    assert "no map meets this (budget 0.001 within 0 bytes); the one that harms least is taken" in note


def test_table_says_what_was_planned(caplog: pytest.LogCaptureFixture) -> None:
    seed()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        quiet(max_epochs=1, callbacks=[planned(verbose=True)]).fit(MODELS["mlp"]())
    (line,) = [line for line in caplog.text.splitlines() if line.startswith("  plan ")]
    assert "3 of 3 layers planned, expected relative loss increase" in line
    assert "by multiplications by relative rates (fp32 1," in line


# measuring


class Looks(Callback):
    """Counts the hooks that it finds on modules after a training step."""

    def __init__(self) -> None:
        self.hooks = 0

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.hooks += sum(len(each._forward_hooks) for each in module.modules())


@pytest.mark.parametrize("model", ["cnn", "gpt", "manual"])
def test_measuring_changes_nothing(model: str) -> None:
    results = []
    for policy in (ScriptedController(), PlanningController(FisherPlanner(PlanConfig(loss_budget=0.0)))):
        seed()
        module, looks = MODELS[model](), Looks()
        config = AutoPrecisionConfig(formats=("fp32", "bf16"), clip=ClipConfig(min_norms=4))
        callback = AutoPrecisionCallback(policy, interval=2, config=config, verbose=False)
        trainer = quiet(max_epochs=1, callbacks=[callback, looks])
        trainer.fit(module)
        results.append(outcome(trainer, module))
        assert not rows(callback.history, "precision", "applied")
        assert looks.hooks == 0
    assert callback.steering is not None
    assert callback.steering.rounding.errors
    assert_identical(*results)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stop", [6, 12, STOP])
def test_resumes(policy: str, stop: int, tmp_path: Path) -> None:
    """From between the measured window and its plan, and from between plans."""

    def callback() -> AutoPrecisionCallback:
        # a budget that is tight enough for plans to differ
        budgets = {"loss_budget": 3e-6, "saving": 0.5, "replan": 2, "warmup": 1}
        return planned(policy, ("fp32", "bf16", "fp16"), interval=5, plan=budgets)

    through = assert_resumes(Setup(callback, data=StatefulLoader), tmp_path, stop)
    assert through.callback is not None
    steps = {d.step for d in rows(through.callback.history, "precision", "applied")}
    assert steps, "nothing was planned"


def test_without_gradients_nothing_is_planned_until_there_are() -> None:
    class Late(Task):
        def __init__(self) -> None:
            super().__init__(mlp().requires_grad_(False), torch.randn(64, 8))
            self.gain = nn.Parameter(torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                self.net[4].requires_grad_(True)  # type: ignore[index]
            return (self.gain * self.net(batch)).square().mean()

    seed()
    callback = planned(interval=2)
    quiet(max_epochs=1, callbacks=[callback]).fit(Late())
    (move,) = rows(callback.history, "precision")
    assert (move.unit, move.applied) == ("net.4", "bf16")
    assert move.step > 5
    seed()
    callback = planned(interval=2)
    quiet(max_steps=4, callbacks=[callback]).fit(Late())
    assert callback.controller.notes() == ("no layer has had a gradient yet, nothing is planned",)


@pytest.mark.parametrize("options", [{"knobs": ("loss_scale",)}, {"formats": ("fp32",)}])
def test_nothing_is_measured_where_there_is_no_choice(options: dict[str, Any]) -> None:
    callback = planned(**options)
    quiet(max_epochs=1, callbacks=[callback]).fit(MODELS["mlp"]())
    assert not rows(callback.history, "precision")
    assert callback.steering is not None
    assert not callback.steering.rounding.errors
    assert callback.controller.notes() == ("no layer has a choice of formats, nothing is planned",)


# the controller


class Counting:
    """Plans by turns two maps and counts."""

    name = "counting"
    needs_errors = True

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, facts: ModelFacts) -> Plan:
        self.plans += 1
        return Plan(
            formats={"a": "bf16" if self.plans % 2 else "fp32"}, reasons={"a": "why"}, note=f"plan {self.plans}"
        )


def facts(is_measured: bool) -> ModelFacts:
    zero = FormatErrors(fisher=0.0, taylor=0.0, loss_divergence=0.0, own_gradient=0.0, passed_gradient=0.0)
    measured = UnitErrors(formats={"fp32": zero, "bf16": zero} if is_measured else {})
    return ModelFacts(units=(UnitFacts(name="a", legal=("fp32", "bf16"), errors=measured),))


@pytest.mark.parametrize(
    ("warmup", "replan", "expected"),
    [(0, 1, "ppppp"), (0, 2, "p.p.p"), (2, 2, "..p.p"), (1, 0, ".p..."), (0, 4, "p...p")],
)
def test_when_it_plans(warmup: int, replan: int, expected: str) -> None:
    planner = Counting()
    controller = PlanningController(planner, PlanConfig(warmup=warmup, replan=replan))
    for is_resumed in (False, True):
        controller.start(["a"], [("fp32", "bf16")])
        seen, done = "", planner.plans
        for _ in expected:
            if is_resumed:
                state, controller = controller.state_dict(), PlanningController(planner, controller.config)
                controller.load_state_dict(state)
            wanted = controller.wants_errors()
            controller.note_facts(facts(is_measured=True))
            controller.decide(np.zeros((0, 0), dtype=np.float32))
            seen += "p" if planner.plans > done else "."
            assert wanted == (planner.plans > done)
            done = planner.plans
        assert seen == expected


def test_what_a_plan_leaves_as_it_is_is_not_asked_for() -> None:
    planner = Counting()
    controller = PlanningController(planner, PlanConfig(replan=1))
    nothing = np.zeros((0, 0), dtype=np.float32)
    controller.note_facts(facts(is_measured=False))
    assert controller.decide(nothing) is None
    assert controller.wants_errors()
    controller.note_facts(facts(is_measured=True))
    assert controller.decide(nothing) == Action(precision={"a": "bf16"})
    assert controller.reasons() == {"a": "why"}
    assert controller.notes() == ("plan 1",)
    controller.note_facts(facts(is_measured=True))
    assert controller.decide(nothing) == Action(precision={}), "it is in fp32 already"


@pytest.mark.parametrize("policy", POLICIES)
def test_without_scipy(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ModuleNotFoundError, match=f"Passed `policy='{policy}'`. It needs SciPy"):
        AutoPrecisionCallback(policy)
    assert resolve_policy("shape").name == "shape"
