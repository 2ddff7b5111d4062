"""The fused step against torch's AdamW over a long run, with optimizer states that change hands on the way.

Time budget: 5 minutes, all of it marked ``slow``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from autoprec import ops
from tests.kernels import needs_cpu_kernels

STEPS = 20_000


class Trained:
    """A small classifier under AdamW; the step is torch's or ours, the state is always the optimizer's own."""

    def __init__(self, model: nn.Module, is_ours: bool) -> None:
        self.model, self.is_ours = model, is_ours
        self.optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        self.losses: list[float] = []

    def step(self, x: Tensor, target: Tensor, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), target)
        loss.backward()
        self.losses.append(float(loss.detach()))
        params = list(self.model.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        if not self.is_ours:
            nn.utils.clip_grad_norm_(params, 1.0)
            self.optimizer.step()
            return
        factor = min(1.0, 1.0 / (float(ops.grad_stats(grads).total_norm) + 1e-6))
        fused_step(self.optimizer, params, grads, factor)


def fused_step(optimizer: AdamW, params: list[nn.Parameter], grads: list[Tensor], factor: float) -> None:
    group = optimizer.param_groups[0]
    states = [optimizer.state[param] for param in params]
    for param, state in zip(params, states, strict=True):
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    columns = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
    beta1, beta2 = group["betas"]
    options: dict[str, Any] = {name: group[name] for name in ("lr", "eps", "weight_decay")}
    ops.fused_adam_(params, grads, *columns, beta1=beta1, beta2=beta2, decoupled=True, grad_factor=factor, **options)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 5))


@needs_cpu_kernels
@pytest.mark.slow
def test_20000_steps_agree_with_torch_and_the_states_are_interchangeable() -> None:
    model = make_model()
    torchs, ours = Trained(model, False), Trained(copy.deepcopy(model), True)
    teacher = make_model()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        x = torch.randn(32, 17, generator=generator)
        target = teacher(x * 1.3).argmax(1)
        lr = 1e-3 * (1 - step / STEPS)
        for trained in (torchs, ours):
            trained.step(x, target, lr)
        if step % 5000 == 2500:  # whoever stepped so far, the other one goes on
            torchs.is_ours, ours.is_ours = ours.is_ours, torchs.is_ours
            for trained in (torchs, ours):
                state = copy.deepcopy(trained.optimizer.state_dict())
                trained.optimizer = AdamW(trained.model.parameters(), fused=True)
                trained.optimizer.load_state_dict(state)
    found, expected = torch.tensor(ours.losses).double(), torch.tensor(torchs.losses).double()
    assert float(((found - expected).abs() / expected.clamp(min=1e-3)).max()) < 1e-5
    assert expected[-500:].mean() < expected[:500].mean()
