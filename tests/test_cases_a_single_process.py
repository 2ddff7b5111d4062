"""Cases A-21 to A-23 as far as one process shows them: what several would need is left alone, or refused at the start.

Time budget: 5 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from autoprec import Action, AutoPrecision, AutoPrecisionCallback
from autoprec.trainer_facts import check_trainer
from tests.support import Task, cpu, scripted


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 2, "strategy": "ddp"}, {"num_nodes": 2}])
def test_a21_ranks_cannot_disagree_where_there_is_one(options: Any) -> None:
    with pytest.raises(MisconfigurationException, match="process|device"):
        check_trainer(cpu(callbacks=[scripted()], **options))


def test_a21_the_same_seed_gives_the_same_decisions() -> None:
    """What several ranks would have to agree on: nothing comes from a generator of the process."""
    records = []
    for seed in (0, 1):
        torch.manual_seed(0)
        ap = AutoPrecisionCallback("rule", interval=4, verbose=False)
        task = Task(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.rand(160, 4))
        state = torch.get_rng_state()
        torch.manual_seed(seed)  # shuffles nothing: the loader is in order, and the weights are there
        cpu(callbacks=[ap]).fit(task)
        torch.set_rng_state(state)
        records.append([(row.step, row.knob, row.unit, row.applied, row.outcome) for row in ap.history])
    assert records[0] == records[1]
    assert records[0]


class Half(nn.Module):
    """One layer frozen, and one parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4), nn.Linear(4, 1)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.trained(self.frozen(x))


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_a22_who_takes_part_in_a_step_stays_as_it_is(name: str) -> None:
    class Looks(Callback):
        def __init__(self) -> None:
            self.seen: set[tuple[Any, ...]] = set()

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.seen.add(tuple((n, p.requires_grad, p.grad is None) for n, p in pl_module.named_parameters()))

    found = []
    for steps in ({}, {1: Action(precision={"*": name}), 3: Action(precision={"*": "fp32"})}):
        looks, task = Looks(), Task(Half(), torch.rand(48, 4))
        parameters = list(map(id, task.parameters()))
        cpu(callbacks=[scripted(steps, verbose=False), looks]).fit(task)
        assert list(map(id, task.parameters())) == parameters
        found.append(looks.seen)
    assert found[0] == found[1]
    assert len(found[0]) == 1


def test_a22_a_frozen_layer_has_no_gradient_statistics_rather_than_zeros() -> None:
    ap = AutoPrecisionCallback("rule", interval=2, verbose=False)
    cpu(callbacks=[ap]).fit(Task(Half(), torch.rand(96, 4)))
    steering = ap.steering
    assert steering is not None
    assert not steering.telemetry.units["net.frozen"].norms
    assert len(steering.telemetry.units["net.trained"].norms) > 0


def test_a23_fsdp_is_refused_at_the_start_with_the_reason() -> None:
    with pytest.raises(MisconfigurationException, match="FSDP"):
        AutoPrecision(base=FSDPPrecision("bf16-mixed"))
