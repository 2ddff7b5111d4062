"""The trial of fp32 on a loss that stands still: when it begins, what it concludes, and case G-07 as a whole run.

Time budget: 25 s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, RuleConfig
from autoprec.encoding import GlobalReading, UnitReading, encode
from autoprec.rule import RuleController
from tests.small_fits import Plain, quiet, seed
from tests.test_rule import STABLE

NAMES = ("net.0", "net.2", "net.4")
STILL = (1.0, 1.02, 0.98, 1.0) * 16
FALLING = tuple(2.0 - index / 64 for index in range(64))
LOUD = (0.1, 3.0) * 32


class Run:
    """A model of three layers under the rule, seen only through readings."""

    def __init__(self, legal: tuple[str, ...] = ("fp32", "bf16"), **settings: Any) -> None:
        self.controller = RuleController(AutoPrecisionConfig(rule=RuleConfig(**settings)))
        self.controller.start(NAMES, [legal] * len(NAMES))
        self.legal = legal
        self.formats = [legal[-1]] * len(NAMES)

    def decide(self, losses: tuple[float, ...] = STILL, change: float = float("nan")) -> list[str]:
        """One decision; its moves are carried out."""
        units = [self.unit(index) for index in range(len(NAMES))]
        run = GlobalReading(losses=losses, norms=(1.0,) * 20, clip_threshold=1.5, loss_change_bits=change)
        for index, move in enumerate(self.controller.decide(encode(units, run))[: len(NAMES)]):
            unit = units[index]
            self.formats[index] = {-1: unit.lower, 0: unit.format, 1: unit.higher}[int(move)] or unit.format
        return list(self.formats)

    def unit(self, index: int) -> UnitReading:
        return replace(STABLE, name=NAMES[index], depth=index / 2, format=self.formats[index], legal=self.legal)

    def until_tried(self, limit: int = 100) -> int:
        for count in range(1, limit):
            if self.decide() == ALL:
                return count
        raise AssertionError("nothing was tried")


ALL, LAST, NONE = ["fp32"] * 3, ["bf16", "bf16", "fp32"], ["bf16"] * 3


def test_all_units_go_to_fp32_once_the_loss_has_stood_still_for_four_decisions() -> None:
    run = Run()
    assert [run.decide() for _ in range(4)] == [NONE, NONE, NONE, ALL]
    assert all("stands still" in reason for reason in run.controller.reasons().values())


@pytest.mark.parametrize("losses", [FALLING, LOUD, (), (0.0,) * 64])
def test_nothing_is_tried_where_the_loss_falls_or_nothing_could_be_seen(losses: tuple[float, ...]) -> None:
    run = Run()
    assert all(run.decide(losses) == NONE for _ in range(20))


def test_nothing_is_tried_where_it_is_switched_off() -> None:
    run = Run(probe_plateaus=False)
    assert all(run.decide() == NONE for _ in range(20))


@pytest.mark.parametrize("change", [0.0, -0.1, 0.5, float("nan")])
def test_all_go_back_where_the_loss_is_not_lower_and_the_next_trial_waits_longer(change: float) -> None:
    run = Run()
    run.until_tried()
    assert run.decide(change=change) == NONE
    assert run.until_tried() == 16
    assert run.decide(change=change) == NONE
    assert run.until_tried() == 64


def test_the_last_unit_stays_where_it_is_enough() -> None:
    run = Run()
    run.until_tried()
    assert run.decide(change=-1.0) == LAST
    assert run.decide(change=0.0) == LAST
    assert run.until_tried() == 16  # perhaps more of them need it


def test_all_units_stay_where_the_loss_rises_when_the_others_go_back() -> None:
    run = Run()
    run.until_tried()
    assert run.decide(change=-1.0) == LAST
    assert run.decide(change=1.0) == ALL
    assert all(run.decide() == ALL for _ in range(50))


def test_all_units_stay_where_a_second_trial_gains_again() -> None:
    run = Run()
    run.until_tried()
    run.decide(change=-1.0)
    run.decide(change=0.0)
    run.until_tried(limit=20)
    while run.decide() != ALL:
        pass
    assert all(run.decide(change=-1.0) == ALL for _ in range(50))


def test_gains_on_the_way_from_a_narrow_format_count_together() -> None:
    run = Run(legal=("fp32", "bf16", "int8"))
    steps = [run.decide() for _ in range(4)]
    assert steps[-1] == NONE
    assert run.decide(change=-1.0) == ALL
    assert run.decide(change=0.0) == LAST


def test_a_trial_survives_a_checkpoint() -> None:
    run = Run()
    run.until_tried()
    other = Run()
    other.formats = list(run.formats)
    other.controller.load_state_dict(run.controller.state_dict())
    assert other.decide(change=-1.0) == run.decide(change=-1.0) == LAST


class Regression(Plain):
    """Its outputs are near 10, where bf16 has steps of a sixteenth."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 1))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1600)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def final_loss(precision: Any, callback: AutoPrecisionCallback | None = None) -> float:
    seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(512, 4, generator=generator) * 2 - 1
    y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]]) + 10 + 1e-2 * torch.randn(512, 1, generator=generator)
    data = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True, generator=generator)
    module = Regression()
    callbacks = [] if callback is None else [callback]
    quiet(max_steps=1600, max_epochs=-1, precision=precision, callbacks=callbacks).fit(module, data)
    return sum(module.losses[-50:]) / 50


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_g07_a_loss_that_bf16_holds_up_ends_where_fp32_ends(precision: Any) -> None:
    in_fp32, in_bf16 = final_loss("32-true"), final_loss("bf16-mixed")
    assert in_bf16 > 3 * in_fp32
    callback = AutoPrecisionCallback(verbose=False)
    assert final_loss(precision, callback) < 2 * in_fp32
    reasons = [d.reason for d in callback.history if d.knob == "precision" and d.applied == "fp32"]
    assert any("the loss stands still" in reason for reason in reasons)
