"""The shape rule: torchao's filter for fp8, and limits of the same kind for the other formats.

Time budget: 10 s.
"""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchao.float8 import _auto_filter_for_recipe

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig
from autoprec.planning import ModelFacts, UnitFacts
from autoprec.policies.analytic_shape import LIMITS, ShapePlanner
from tests.small_fits import Plain, loader, quiet

ALL = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
sizes = st.sampled_from([8, 16, 24, 1000, 1008, 1024, 1040, 4096, 4100, 4112, 8192])


def chosen(*shapes: tuple[int, int], legal: tuple[str, ...] = ALL, kind: str = "linear", now: str = "fp32") -> str:
    unit = UnitFacts(name="net.0", kind=kind, format=now, legal=legal, native=legal, shapes=shapes)
    return ShapePlanner().plan(ModelFacts(units=(unit,))).formats["net.0"]


@given(sizes, sizes)
def test_fp8_is_for_what_torchao_converts(outputs: int, inputs: int) -> None:
    is_converted = _auto_filter_for_recipe("tensorwise", filter_fqns=[])
    layer = nn.Linear(inputs, outputs, device="meta")
    unit = UnitFacts(name="net.0", shapes=((outputs, inputs),))
    assert LIMITS["fp8"].is_met(unit) == is_converted(layer, "net.0")


@pytest.mark.parametrize(
    ("shape", "legal", "expected"),
    [
        ((8192, 8192), ALL, "fp8"),
        ((1024, 1024), ALL, "int8"),
        ((1024, 1024), ("fp32", "bf16", "fp8"), "bf16"),
        ((240, 1024), ("fp32", "bf16", "int8"), "bf16"),
        ((12, 1024), ("fp32", "tf32", "bf16"), "tf32"),
        ((10, 1024), ALL, "fp32"),
        ((64, 64), ("fp32", "fp16"), "fp16"),
        ((64, 64), ("fp32", "bf16", "fp16"), "bf16"),
        ((64, 64), ("fp32",), "fp32"),
    ],
)
def test_narrowest_format_whose_limits_are_met(shape: tuple[int, int], legal: tuple[str, ...], expected: str) -> None:
    assert chosen(shape, legal=legal) == expected


def test_eight_bits_are_for_linear_layers() -> None:
    assert chosen((8192, 8192), kind="conv") == "bf16"


def test_all_matrices_of_a_unit_must_fit() -> None:
    assert chosen((64, 64), (64, 60), legal=("fp32", "bf16")) == "fp32"
    assert chosen((64, 64), (64, 72), legal=("fp32", "bf16")) == "bf16"
    assert chosen(legal=("fp32", "bf16")) == "fp32"


def test_a_layer_that_does_not_fit_keeps_what_it_has() -> None:
    assert chosen((10, 10), legal=("fp32", "bf16"), now="bf16") == "bf16"


def test_an_emulated_format_is_not_chosen() -> None:
    unit = UnitFacts(name="net.0", legal=("fp32", "bf16", "fp16"), native=("fp32", "bf16"), shapes=((64, 64),))
    emulated = UnitFacts(name="net.1", legal=("fp32", "fp16"), native=("fp32",), shapes=((64, 64),))
    formats = ShapePlanner().plan(ModelFacts(units=(unit, emulated))).formats
    assert formats == {"net.0": "bf16", "net.1": "fp32"}


class Sized(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="the rule takes native formats only")
def test_in_a_fit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is measured and no solver needed; the map is there from the first window on."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    callback = AutoPrecisionCallback("shape", interval=2, config=AutoPrecisionConfig(formats=("fp32", "bf16")))
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        quiet(max_epochs=1, callbacks=[callback]).fit(Sized(), loader())
    assert callback.precision_map() == {"net.0": "bf16", "net.2": "bf16", "net.4": "fp32"}
    moves = [d for d in callback.history if d.knob == "precision"]
    assert [(d.step, d.unit) for d in moves] == [(0, "net.0"), (0, "net.2")]
    assert moves[0].reason == "first map of policy 'shape': 16 x 8 is large and even enough for bf16"
    assert callback.steering is not None
    assert not callback.steering.rounding.errors
    assert "plan       by shape, 2 of 3 layers narrowed" in caplog.text
