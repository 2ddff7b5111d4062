"""Cases A-10 and A-16: optimizers of every kind.

Time budget: 15 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from autoprec import Action, AutoPrecision, AutoPrecisionCallback, AutoPrecisionConfig
from tests.support import (
    Lin,
    Manual,
    Task,
    Watch,
    all_in,
    assert_finite,
    assert_same_state,
    cpu,
    fp16cpu,
    rows,
    scripted,
    sgd,
    squares,
    state_of,
    watch_dtypes,
    weights_of,
)

# ---- live parameters ----


class Foreign(Optimizer):
    """An optimizer the project has never seen; it insists on what optimizers may rely on."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._update(parameter, group["lr"])
        return loss

    def _update(self, parameter: nn.Parameter, lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        assert parameter.dtype is gradient.dtype is torch.float32
        assert parameter.data_ptr() == self.state[parameter].setdefault("address", parameter.data_ptr())
        moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
        assert moment.dtype is parameter.dtype
        moment.lerp_(gradient, 0.1)
        parameter.sub_(lr * torch.sign(moment) * moment.abs().sqrt())


class Sharp(Foreign):
    """Sharpness-aware: it moves the weights before its closure is evaluated a second time."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        steps = [0.05 * p.grad.sign() for p in parameters]
        with torch.no_grad():
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.add_(step)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.sub_(step)
                self._update(parameter, 0.01)
        return loss


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": sgd,
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "foreign": Foreign,
    "sharpness_aware": Sharp,
}


class Dtypes(Callback):
    """Collects the dtypes that a user can see, and the identities of parameters."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.identities: set[tuple[int, ...]] = set()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.dtypes |= {p.grad.dtype for p in pl_module.parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.dtypes |= {p.dtype for p in pl_module.parameters()}
        self.identities.add(tuple(map(id, pl_module.parameters())))
        for state in trainer.optimizers[0].state.values():
            self.dtypes |= {v.dtype for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("lower", ["bf16", "int8"])
def test_a10_parameters_gradients_and_moments_stay_fp32(name: str, lower: str) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    task = Task(net, torch.rand(72, 16), optimizer=OPTIMIZERS[name])
    script = {3: Action(precision={"net.0": lower}), 6: Action(precision={"net.0": "fp32"})}
    ap, look = scripted(script), Dtypes()
    seen, identity = watch_dtypes(task), tuple(map(id, task.parameters()))
    watch = Watch(ap)
    cpu(callbacks=[ap, look, watch]).fit(task)
    assert look.dtypes == {torch.float32}
    assert look.identities == {identity}
    assert torch.bfloat16 in seen["net.0"]
    assert [m["net.0"] for m in watch.maps] == ["fp32"] * 3 + [lower] * 3 + ["fp32"] * 3
    assert (ap.applied_steps, ap.skipped_steps) == (9, 0)
    assert watch.losses[-1] < watch.losses[0]


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a10_precision_changes_the_compute_only(name: str) -> None:
    """A map of fp32 for every layer trains bit for bit as the plain Trainer does, where no kernel takes the steps."""
    results, config = [], AutoPrecisionConfig(fused_step=False)
    for callbacks in ([], [scripted({0: all_in("fp32"), 3: all_in("fp32")}, knobs=("precision",), config=config)]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        task = Task(net, torch.rand(48, 4), optimizer=OPTIMIZERS[name])
        cpu(callbacks=callbacks).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("bad_call", [2, 3])
def test_a10_no_optimizer_takes_a_non_finite_gradient(name: str, bad_call: int) -> None:
    """``bad_call`` counts evaluations of the loss: a sharpness-aware optimizer has two in each step."""
    calls: list[int] = []

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        calls.append(1)
        return squares(net, batch, index) * (math.nan if len(calls) - 1 == bad_call else 1.0)

    task = Task(nn.Linear(4, 1), torch.rand(40, 4), loss=loss, optimizer=OPTIMIZERS[name])
    ap = scripted()
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(task)
    assert (ap.skipped_steps, ap.applied_steps) == (1, 4)
    skipped = bad_call // 2 if name == "sharpness_aware" else bad_call
    assert all(map(torch.equal, watch.weights[skipped], watch.weights[skipped - 1]))
    assert_finite(task)


def test_a10_parameter_group_added_in_mid_run() -> None:
    class Unfreeze(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                trainer.optimizers[0].add_param_group({"params": list(pl_module.net[0].parameters()), "lr": 0.01})

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    task = Task(net, torch.rand(48, 4), optimizer=lambda p: torch.optim.AdamW(list(p)[2:], lr=0.01))
    before = weights_of(task)
    ap, look = scripted({1: all_in("bf16")}), Dtypes()
    cpu(callbacks=[ap, Unfreeze(), look]).fit(task)
    assert look.dtypes == {torch.float32}
    assert not any(map(torch.equal, weights_of(task), before))
    assert ap.applied_steps == 6


# ---- LBFGS and other closures ----


def lbfgs(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return LBFGS(parameters, lr=0.1, max_iter=4)


def test_a16_lbfgs_refuses_fp16_and_the_scale_at_the_start() -> None:
    script = {0: Action(precision={"*": "fp16"}, loss_scale=128.0), 2: Action(precision={"*": "fp16"})}
    ap, task = scripted(script), Lin(32, 8, optimizer=lbfgs)
    cpu(callbacks=[ap]).fit(task)
    assert [(d.step, d.outcome) for d in rows(ap.history, "precision")] == [(0, "refused"), (2, "refused")]
    (scale,) = rows(ap.history, "loss_scale")
    assert scale.outcome == "refused"
    assert "LBFGS" in scale.reason
    assert all("LBFGS" in d.reason for d in rows(ap.history, "precision"))
    assert ap.precision_map() == {"net": "fp32"}
    assert ap.loss_scale == 1.0


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_a16_lbfgs_trains_in_other_formats(name: str) -> None:
    ap, task = scripted({1: Action(precision={"*": name})}), Lin(64, 8, optimizer=lbfgs)
    watch, seen = Watch(ap), watch_dtypes(task)
    cpu(callbacks=[ap, watch]).fit(task)
    assert ap.precision_map() == {"net": name}
    assert ap.applied_steps == 8  # one a step, not one a closure
    assert len(seen["net"]) > 16
    assert watch.losses[-1] < watch.losses[0]


def test_a16_script_counts_steps_not_closures() -> None:
    ap, task = scripted({2: all_in("bf16")}), Lin(32, 8, optimizer=lbfgs)
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(task)
    assert [m["net"] for m in watch.maps] == ["fp32", "fp32", "bf16", "bf16"]


def test_a16_lbfgs_under_fp16_from_the_trainer_is_an_error_that_says_why() -> None:
    with pytest.raises(MisconfigurationException, match="LBFGS") as caught:
        cpu(plugins=fp16cpu(), callbacks=[scripted()]).fit(Lin(16, 8, optimizer=lbfgs))
    assert "bf16" in str(caught.value)


def test_a16_policy_that_starts_in_fp16_is_refused_too() -> None:
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        cpu(plugins=[AutoPrecision({"*": "fp16"})]).fit(Lin(16, 8, optimizer=lbfgs))
    ap = AutoPrecisionCallback(policy="fixed:fp16")
    cpu(callbacks=[ap]).fit(Lin(16, 8, optimizer=lbfgs))
    assert ap.precision_map() == {"net": "fp32"}


def test_a16_lbfgs_equals_the_plain_run() -> None:
    results = []
    for callbacks in ([], [scripted({0: Action(precision={"*": "fp32"})}, knobs=("precision",))]):
        torch.manual_seed(0)
        task = Lin(64, 8, optimizer=lbfgs)
        cpu(callbacks=callbacks).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)


@pytest.mark.parametrize("bad_call", [0, 1, 2, 5, 6])
def test_a16_lbfgs_is_put_back_when_a_closure_is_not_finite(bad_call: int) -> None:
    """Whichever evaluation of the line search it is: weights and curvature are those before the step."""
    calls: list[int] = []

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        calls.append(index)
        return squares(net, batch, index) * (math.nan if len(calls) - 1 == bad_call else 1.0)

    ap, task = scripted(), Lin(64, 8, optimizer=lbfgs, loss=loss)
    initial = weights_of(task)
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(task)
    bad = calls[bad_call]
    assert (ap.skipped_steps, ap.applied_steps) == (1, 7)
    before = watch.weights[bad - 1] if bad else initial
    assert all(map(torch.equal, watch.weights[bad], before))
    assert_finite(task)


def test_a16_lbfgs_under_manual_optimization() -> None:
    class ManualLbfgs(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self._loss(self.net, batch, batch_idx)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

    results = []
    for action in (Action(precision={"*": "fp32"}), all_in("bf16")):
        torch.manual_seed(0)
        task = ManualLbfgs(nn.Linear(4, 1), torch.ones(32, 4), optimizer=lbfgs)
        ap = scripted({0: action})
        cpu(callbacks=[ap]).fit(task)
        assert (ap.applied_steps, ap.skipped_steps) == (4, 0)
        results.append(weights_of(task)[0])
    torch.testing.assert_close(results[1], results[0], rtol=0.05, atol=0.02)
