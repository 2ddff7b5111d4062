"""The loss scale: GradScaler's rule inside floor and cap.

Time budget: 10 s.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoprec.config import LossScaleConfig
from autoprec.loss_scale import LossScale

configs = st.builds(
    LossScaleConfig,
    init_scale=st.floats(1.0, 2.0**24, width=32),
    growth_factor=st.floats(1.0, 8.0, exclude_min=True),
    backoff_factor=st.floats(0.01, 1.0, exclude_max=True),
    growth_interval=st.integers(1, 5),
)
steps = st.lists(st.booleans(), max_size=60)


class Reference:
    """A real GradScaler, driven through its public interface."""

    def __init__(self, config: LossScaleConfig) -> None:
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=config.init_scale,
            growth_factor=config.growth_factor,
            backoff_factor=config.backoff_factor,
            growth_interval=config.growth_interval,
        )
        self.parameter = torch.zeros(1, requires_grad=True)
        # all that GradScaler wants of an optimizer
        stub = SimpleNamespace(param_groups=[{"params": [self.parameter]}], step=lambda: None)
        self.optimizer = cast("torch.optim.Optimizer", stub)
        self.scaler.scale(self.parameter)

    def update(self, found_inf: bool) -> float:
        self.parameter.grad = torch.tensor([math.inf if found_inf else 0.0])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(self.scaler.get_scale())


@given(config=configs, found=steps)
def test_equals_grad_scaler_between_floor_and_cap(config: LossScaleConfig, found: list[bool]) -> None:
    ours, reference = LossScale(config), Reference(config)
    for found_inf in found:
        ours.update(found_inf)
        expected = reference.update(found_inf)
        if not config.floor <= expected <= config.cap:
            break
        assert ours.scale == expected
        assert ours.growth_tracker == reference.scaler.state_dict()["_growth_tracker"]


@given(config=configs, found=steps, request=st.none() | st.floats())
def test_never_leaves_floor_and_cap(config: LossScaleConfig, found: list[bool], request: float | None) -> None:
    ours = LossScale(config)
    if request is not None:
        ours.request(request)
    for found_inf in found:
        ours.update(found_inf)
        assert config.floor <= ours.scale <= config.cap
        assert ours.scale * ours.inv_scale == pytest.approx(1.0)


def test_a03_scale_never_collapses() -> None:
    ours = LossScale()
    for _ in range(300):
        ours.update(found_inf=True)
    assert ours.scale == 1.0


def test_a04_scale_never_grows_without_limit() -> None:
    ours = LossScale(LossScaleConfig(growth_interval=1))
    for _ in range(300):
        ours.update(found_inf=False)
    assert ours.scale == 2.0**24
    assert ours.request(2.0**40)[:2] == (2.0**24, "limited")


@pytest.mark.parametrize(
    ("value", "applied", "outcome", "word"),
    [
        (2048.0, 2048.0, "applied", "requested"),
        (1000, 1000.0, "applied", "requested"),
        (0.25, 1.0, "limited", "floor"),
        (2.0**30, 2.0**24, "limited", "cap"),
        (0.0, 65536.0, "refused", "finite and > 0, not 0.0"),
        (-1.0, 65536.0, "refused", "finite and > 0, not -1.0"),
        (math.inf, 65536.0, "refused", "finite and > 0, not inf"),
        (math.nan, 65536.0, "refused", "finite and > 0, not nan"),
    ],
)
def test_request(value: float, applied: float, outcome: str, word: str) -> None:
    ours = LossScale()
    ours.update(found_inf=False)
    result = ours.request(value)
    assert result[:2] == (applied, outcome)
    assert word in result[2]
    assert ours.scale == applied
    assert ours.growth_tracker == (1 if outcome == "refused" else 0)


def test_disabled() -> None:
    ours = LossScale(enabled=False)
    for _ in range(5):
        ours.update(found_inf=True)
    assert (ours.scale, ours.inv_scale, ours.growth_tracker) == (1.0, 1.0, 0)
    ours.enabled = True
    assert ours.scale == 65536.0


def test_refused_request_leaves_it_disabled_and_a_legal_one_takes_it_into_use() -> None:
    ours = LossScale(enabled=False)
    assert ours.request(math.nan)[:2] == (1.0, "refused")
    assert not ours.enabled
    assert ours.request(512.0)[:2] == (512.0, "applied")
    assert (ours.enabled, ours.scale) == (True, 512.0)


@given(config=configs, found=steps, enabled=st.booleans(), after=steps)
def test_state_round_trip(config: LossScaleConfig, found: list[bool], enabled: bool, after: list[bool]) -> None:
    ours, resumed = LossScale(config, enabled=enabled), LossScale()
    for found_inf in found:
        ours.update(found_inf)
    resumed.load_state_dict(ours.state_dict())
    for found_inf in after:
        ours.update(found_inf)
        resumed.update(found_inf)
    assert resumed.state_dict() == ours.state_dict()


def test_state_travels_to_and_from_grad_scaler() -> None:
    config = LossScaleConfig(init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    reference, ours = Reference(config), LossScale()
    reference.update(found_inf=False)
    ours.load_state_dict(reference.scaler.state_dict())
    assert (ours.scale, ours.growth_tracker) == (1024.0, 1)
    assert ours.config == replace(config, init_scale=LossScaleConfig().init_scale)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(ours.state_dict())
    assert other.state_dict() == reference.scaler.state_dict()


@pytest.mark.parametrize(("saved", "loaded"), [(2.0**30, 2.0**24), (2.0**-4, 1.0)])
def test_saved_scale_outside_floor_and_cap_is_limited(saved: float, loaded: float) -> None:
    ours = LossScale()
    ours.load_state_dict({**ours.state_dict(), "scale": saved})
    assert ours.scale == loaded


def test_bad_state() -> None:
    ours = LossScale()
    with pytest.raises(ValueError, match=re.escape("without the keys ['_growth_tracker', 'backoff_factor'")):
        ours.load_state_dict({})
    with pytest.raises(ValueError, match=re.escape("with scale nan. It must be finite and > 0.")):
        ours.load_state_dict({**ours.state_dict(), "scale": math.nan})
