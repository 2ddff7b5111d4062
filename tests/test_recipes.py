"""Staged recipes: warm-up in fp32, stages from the ends inwards, tiers by kind, and the weight of accuracy.

Time budget: 10 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec import (
    RECIPES,
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    BatchConfig,
    RuleConfig,
    ScriptedController,
    recipe,
)
from autoprec.encoding import GlobalReading, UnitReading, encode
from autoprec.rule import RuleController
from tests.small_fits import Plain, differences, loader, quiet, seed
from tests.test_rule import STABLE

STILL = GlobalReading(losses=(1.0,) * 8, norms=(1.0, 1.001) * 10, clip_threshold=1.5)
RESTLESS = replace(STILL, norms=(1.0, 9.0) * 10)
WIDE = replace(STABLE, format="fp32", legal=("fp32", "bf16"))


def rule(**settings: Any) -> RuleController:
    return RuleController(AutoPrecisionConfig(rule=RuleConfig(**settings)))


def moves(controller: RuleController, units: list[UnitReading], run: GlobalReading = STILL) -> list[int]:
    found: list[int] = controller.decide(encode(units, run))[: len(units)].tolist()
    return found


def test_warm_up_begins_in_fp32_and_ends_after_its_steps() -> None:
    controller = rule(warmup_steps=300)
    assert controller.initial_map() == {"*": "fp32"}
    assert moves(controller, [replace(WIDE, steps_since_change=299)], RESTLESS) == [0]
    assert moves(controller, [replace(WIDE, steps_since_change=300)], RESTLESS) == [-1]
    # what comes after it does not wait again
    assert moves(controller, [replace(STABLE, steps_since_change=10)], RESTLESS) == [-1]


def test_without_warm_up_the_run_begins_as_the_trainer_would() -> None:
    assert rule().initial_map() is None


def test_warm_up_ends_early_once_the_gradient_norm_has_settled() -> None:
    controller = rule(warmup_steps=300, settled_cv=0.1)
    young = replace(WIDE, steps_since_change=50)
    assert moves(controller, [young], RESTLESS) == [0]
    assert moves(controller, [young], STILL) == [-1]


def test_two_norms_that_are_alike_do_not_end_the_warm_up() -> None:
    controller = rule(warmup_steps=300, settled_cv=0.1)
    early = replace(WIDE, steps_since_change=2, grad_norm_history=(1.0, 1.0))
    assert moves(controller, [early], replace(STILL, norms=(1.0, 1.001))) == [0]
    assert moves(controller, [replace(WIDE, steps_since_change=50)], RESTLESS) == [0]


@pytest.mark.parametrize(("max_size", "largest"), [(None, 64), (1024, 1024)])
def test_free_memory_does_not_grow_a_batch_without_bound(max_size: int | None, largest: int) -> None:
    config = AutoPrecisionConfig(rule=RuleConfig(batch="memory"), batch=BatchConfig(max_size=max_size))
    controller, size = RuleController(config), 4
    for _ in range(30):
        run = replace(STILL, batch_size=size, memory_share=0.1, movable=frozenset({"batch_size"}))
        if controller.decide(encode([STABLE], run))[-2] == 1:
            size = min(size * 2, max_size or size * 2)
        state, controller = controller.state_dict(), RuleController(config)
        controller.load_state_dict(state)
    assert size == largest


def test_warm_up_survives_a_checkpoint() -> None:
    first = rule(warmup_steps=300)
    assert moves(first, [replace(WIDE, steps_since_change=300)]) == [-1]
    second = rule(warmup_steps=300)
    second.start(["net.0"], [("fp32", "bf16")])
    second.load_state_dict(first.state_dict())
    assert moves(second, [replace(STABLE, steps_since_change=10)]) == [-1]


def test_stages_go_from_both_ends_inwards() -> None:
    units = [replace(WIDE, name=f"net.{index}", depth=index / 5) for index in range(6)]
    controller = rule(stages=3)
    assert moves(controller, units) == [-1, 0, 0, 0, 0, -1]
    assert moves(controller, units) == [-1, -1, 0, 0, -1, -1]
    assert moves(controller, units) == [-1] * 6
    assert moves(controller, units) == [-1] * 6


def test_a_weight_of_accuracy_that_grows_tightens_the_limits_towards_the_end() -> None:
    controller = rule(accuracy_weight_start=0.5, accuracy_weight_end=4.0)
    unsteady = replace(WIDE, grad_norm_history=(1.0, 2.0) * 8)  # spreads a third around its mean
    assert moves(controller, [unsteady], replace(STILL, progress=0.0)) == [-1]
    assert moves(controller, [unsteady], replace(STILL, progress=1.0)) == [0]
    vanishing = replace(STABLE, underflow_fraction=0.2)
    assert moves(controller, [vanishing], replace(STILL, progress=0.0)) != [1]
    assert moves(controller, [vanishing], replace(STILL, progress=1.0)) == [1]
    assert moves(controller, [vanishing]) != [1]  # where the end of the run is not known, the first weight counts


class Tokens(nn.Module):
    """An embedding, an attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> Any:
        tokens = self.table(x.abs().mul(4).long().clamp(max=7))
        return self.ffn(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(dim=1))


class Mixed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = Tokens()


def fit(policy: Any = "rule", precision: Any = "bf16-mixed", **settings: Any) -> AutoPrecisionCallback:
    seed(0)
    callback = AutoPrecisionCallback(policy, interval=10, config=AutoPrecisionConfig(**settings), verbose=False)
    quiet(max_steps=60, max_epochs=-1, callbacks=[callback], precision=precision).fit(Mixed(), loader(64))
    return callback


def test_tiers_bind_a_policy_from_the_first_window_on() -> None:
    tiers = {"attention": "fp32", "linear": "bf16", "net.ffn.2": "fp32"}
    callback = fit(tiers=tiers, rule=RuleConfig(stable_cv=100.0))
    names = ("net.table", "net.attention", "net.ffn.0", "net.ffn.2")
    assert callback.precision_map() == dict(zip(names, ("bf16", "fp32", "bf16", "fp32"), strict=True))
    raised = [(d.unit, d.applied, d.reason) for d in callback.history if d.knob == "precision" and d.step == 0]
    reason = "no layer begins below its tier"
    assert raised == [("net.attention", "fp32", reason), ("net.ffn.2", "fp32", reason)]


def test_tiers_do_not_bind_scripts() -> None:
    callback = fit(ScriptedController(), tiers={"*": "fp32"})
    assert set(callback.precision_map().values()) == {"bf16"}
    assert not [d for d in callback.history if d.knob == "precision"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_staged_run_begins_in_fp32_and_lowers_later(precision: Any) -> None:
    callback = fit(precision=precision, rule=RuleConfig(warmup_steps=30, stages=2, stable_cv=100.0))
    lowered = [d.step for d in callback.history if d.knob == "precision" and d.applied == "bf16"]
    assert lowered
    assert min(lowered) >= 30
    assert len(set(lowered)) > 1


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_trains(name: str) -> None:
    config = recipe(name)
    seed(0)
    callback = AutoPrecisionCallback(interval=10, config=config, verbose=False)
    quiet(max_steps=30, max_epochs=-1, callbacks=[callback]).fit(Mixed(), loader(64))
    assert callback.applied_steps == 30


class Offloaded(Mixed):
    """What the backward needs is packed in the forward, as ``torch.autograd.graph.save_on_cpu`` does it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        with hooks, torch.autograd.graph.save_on_cpu():
            return super().training_step(batch, batch_idx)


class Recomputed(Mixed):
    """The feed-forward part is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net.forward = self._recomputed

    def _recomputed(self, x: torch.Tensor) -> Any:
        tokens = self.net.table(x.abs().mul(4).long().clamp(max=7))
        mixed = self.net.attention(tokens, tokens, tokens, need_weights=False)[0]
        return checkpoint(self.net.ffn, mixed.mean(dim=1), use_reentrant=False)


@pytest.mark.parametrize("kind", [Offloaded, Recomputed])
def test_offloaded_and_recomputed_activations_train_alike_while_formats_change(kind: type[Mixed]) -> None:
    script = {0: "bf16", 5: "fp16", 10: "int8", 15: "fp32", 20: "bf16"}
    weights: list[Any] = []
    for make in (Mixed, kind):
        seed(0)
        policy = ScriptedController({step: Action(precision={"*": name}) for step, name in script.items()})
        callback = AutoPrecisionCallback(policy, verbose=False)
        module = make()
        quiet(max_steps=25, max_epochs=-1, callbacks=[callback]).fit(module, loader(64))
        assert len([d for d in callback.history if d.outcome == "applied" and d.knob == "precision"]) > len(script)
        weights.append(module.state_dict())
    assert not differences(weights[0], weights[1])
