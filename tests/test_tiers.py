"""Tiers that fit no layer are told of at the start of a fit.

Time budget: 5 s.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import AutoPrecisionConfig, recipe
from autoprec.config import RECIPES
from tests.support import Task, cpu, scripted


def told(tiers: Mapping[str, str] | None, config: AutoPrecisionConfig | None = None, **kwargs: Any) -> list[str]:
    """Warnings of a fit about tiers."""
    module = Task(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)), torch.rand(16, 4))
    ap = scripted(config=config or AutoPrecisionConfig(tiers=tiers), verbose=False, **kwargs)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cpu(callbacks=[ap]).fit(module)
    return [str(each.message) for each in found if "`tiers`" in str(each.message)]


@pytest.mark.parametrize(
    ("tiers", "names"),
    [
        ({"linaer": "bf16"}, ["'linaer' (closest: 'linear')"]),
        ({"net.00": "bf16"}, ["'net.00' (closest: 'net.0'"]),
        ({"*attn*": "fp32", "net.2": "bf16"}, ["'*attn*';", "'*attn*'."]),
        ({"conv": "bf16", "net.*": "bf16"}, ["'conv'"]),
        ({"head*": "fp32", "body*": "bf16"}, ["'head*'", "'body*'"]),
    ],
)
def test_a_key_that_fits_no_layer_is_told_once_with_what_is_closest(tiers: Mapping[str, str], names: list[str]) -> None:
    (text,) = told(tiers)
    assert any(name in text for name in names)
    assert "the kinds here are linear, norm" in text
    assert "net.2'" not in text.split("A key is")[0] or "closest" in text


@pytest.mark.parametrize("tiers", [None, {"linear": "bf16"}, {"net.*": "bf16"}, {"*": "fp32", "norm": "fp32"}])
def test_keys_that_fit_are_not_told_of(tiers: Mapping[str, str] | None) -> None:
    assert told(tiers) == []


def test_the_recipe_is_for_any_model() -> None:
    assert RECIPES["tiers"].tiers is not None
    assert told(None, recipe("tiers")) == []


def test_nothing_is_told_where_precision_is_not_steered() -> None:
    assert told({"linaer": "bf16"}, knobs=("clip",)) == []
