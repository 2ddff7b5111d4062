"""Case E-01 with a policy that is a network: NaN and inf in a run reach neither its weights nor the user's fit.

Time budget: 10 s.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoprec import AutoPrecisionCallback, Controller
from autoprec.encoding import FEATURES, LIMIT, feature
from tests.support import Manual, Task, assert_finite, cpu, fp16cpu, squares

BAD = {5: math.nan, 9: math.inf}


class Untrained(Controller):
    """A network that draws its moves as a policy in training does, which is where NaN raises."""

    name = "untrained"

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.net = nn.Sequential(nn.Linear(len(FEATURES), 16), nn.Tanh(), nn.Linear(16, 3))
        self.observations: list[Any] = []

    def decide(self, observation: Any) -> Any:
        self.observations.append(observation.copy())
        probabilities = self.net(torch.from_numpy(observation)).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1).numpy() - 1


def bad_squares(net: nn.Module, batch: Any, index: int) -> Tensor:
    """NaN in batch 5 and inf in batch 9."""
    return squares(net, batch, index) * BAD.get(index, 1.0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("kind", [Task, Manual])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"plugins": "fp16"}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_e01_nan_and_inf_reach_an_untrained_policy(kind: type[Task], options: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    policy = Untrained()
    callback = AutoPrecisionCallback(policy, interval=1, verbose=False)
    options = {"plugins": fp16cpu(128.0)} if "plugins" in options else options
    task = kind(net(), torch.randn(16 * 8, 4), loss=bad_squares)
    cpu(callbacks=[callback], **options).fit(task)
    assert callback.applied_steps + callback.skipped_steps == 16
    assert callback.skipped_steps >= 2
    assert len(policy.observations) > 5
    for observation in policy.observations:
        assert np.isfinite(observation).all()
        assert np.abs(observation).max() <= LIMIT
    flags = [bool(feature(observation, "loss_nonfinite").all()) for observation in policy.observations]
    assert flags == sorted(flags)
    assert flags[-1]
    assert not flags[0]
    assert_finite(task)
    assert all(bool(torch.isfinite(p).all()) for p in policy.net.parameters())
    assert not [d for d in callback.history if d.knob == "policy"]


@pytest.mark.parametrize("kind", [Task, Manual])
def test_e01_a_policy_that_fails_on_every_observation(kind: type[Task]) -> None:
    policy = Untrained()
    with torch.no_grad():
        for parameter in policy.net.parameters():
            parameter.fill_(math.nan)
    callback = AutoPrecisionCallback(policy, interval=1, verbose=False)
    task = kind(net(), torch.randn(16 * 8, 4), loss=bad_squares)
    with pytest.warns(UserWarning, match="policy 'untrained' failed"):
        cpu(callbacks=[callback]).fit(task)
    assert callback.applied_steps == 14
    assert [d.outcome for d in callback.history if d.knob == "policy"] == ["refused"]
    assert set(callback.precision_map().values()) == {"fp32"}
    assert_finite(task)
