"""Formats by scenario: native ones only, with a reason, and with what was passed over.

Time budget: 5 s.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec import AutoPrecisionConfig
from autoprec.hardware import database, describe, recommend, recommendation, scenarios
from autoprec.hardware.detection import match
from autoprec.hardware.probing import Facts
from tests.hardware_rows import folder

__all__ = ["folder"]

ZEN: dict[str, Any] = {"device_type": "cpu", "name": "EPYC", "capability": "x86_64"}
FLAGS = frozenset({"avx2", "fma3", "avx512_f", "avx512_vnni", "avx512_bf16"})


def card(name: str, capability: str, kind: str = "cuda", **facts: Any) -> Any:
    return match(Facts(device_type=kind, name=name, capability=capability, **facts), database.load(), "cuda:0")


@pytest.mark.parametrize(
    ("name", "capability", "scenario", "bound", "linear"),
    [
        ("NVIDIA H200", "9.0", "training-large", None, "fp8"),
        ("NVIDIA H200", "9.0", "training-large", "memory", "bf16"),
        ("NVIDIA H200", "9.0", "training-small", None, "tf32"),
        ("NVIDIA H200", "9.0", "fine-tuning", None, "bf16"),
        ("NVIDIA H200", "9.0", "inference", "compute", "fp8"),
        ("NVIDIA H200", "9.0", "inference", None, "int8"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "training-large", None, "bf16"),
        ("Tesla T4", "7.5", "training-large", None, "fp16"),
        ("Tesla V100-SXM2-16GB", "7.0", "fine-tuning", None, "fp16"),
        ("GeForce GTX 1080", "6.1", "training-large", None, "fp32"),
        ("Card of tomorrow", "13.0", "training-large", None, "fp8"),
    ],
)
def test_cards(folder: Path, name: str, capability: str, scenario: str, bound: str | None, linear: str) -> None:
    found = recommend(card(name, capability), scenario, bound=bound)
    assert found.by_kind["linear"] == linear
    assert found.by_kind["norm"] == "fp32"
    assert found.needs_loss_scale is ("fp16" in found.by_kind.values())
    assert found.reason
    assert found.source.url


def test_cpus(folder: Path) -> None:
    zen = match(Facts(**ZEN, flags=FLAGS), database.load(), "cpu")
    old = match(Facts(**ZEN, flags=frozenset({"avx2", "fma3"})), database.load(), "cpu")
    assert recommend(zen, "training-large").by_kind["linear"] == "bf16"
    assert recommend(zen, "inference").by_kind["linear"] == "int8"
    for scenario in scenarios():
        assert set(recommend(old, scenario).by_kind.values()) == {"fp32"}


def test_a_format_that_is_no_faster_is_passed_over(folder: Path) -> None:
    """On an MI210 int8 has the rate of bf16; made native here, it would not pay where arithmetic limits."""
    facts = Facts(device_type="rocm", name="AMD Instinct MI210", capability="gfx90a", multiprocessors=104)
    mi210 = match(facts, database.load(), "cuda:0")
    assert mi210.ratio("int8", "bf16") == 1.0
    assert recommend(mi210, "inference", bound="compute").passed_over["linear"]["int8"] == "emulated on this device"
    native = replace(mi210, formats={**mi210.formats, "int8": replace(mi210.formats["int8"], is_native=True)})
    found = recommend(native, "inference", bound="compute")
    assert found.by_kind["linear"] == "bf16"
    assert found.passed_over["linear"]["int8"] == "no faster than bf16 by the stated rates"
    assert recommend(native, "inference", bound="memory").by_kind["linear"] == "int8"


def test_it_fits_the_settings_of_a_run(folder: Path) -> None:
    for scenario in scenarios():
        found = recommend(torch.device("cpu"), scenario)
        tiers = {kind: name for kind, name in found.by_kind.items() if kind != "norm"}
        config = AutoPrecisionConfig(formats=found.formats, tiers=tiers)
        assert config.formats == found.formats
        assert set(found.formats) <= set(describe(torch.device("cpu")).native)
        assert json.loads(json.dumps(found.to_dict()))["scenario"] == scenario


def test_the_table_is_whole(folder: Path) -> None:
    table = recommendation._table()
    families = set(database.load().families)
    kinds = {"linear", "conv", "embedding", "rnn", "attention", "norm", "other"}
    for row in table.rows:
        assert row.scenario in table.scenarios
        assert row.source in table.sources
        assert set(row.families or families) <= families
        assert set(row.formats) == kinds
    for scenario in table.scenarios:
        for bound in recommendation.BOUNDS:
            assert recommendation._row(table.rows, scenario, bound, "unknown").reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inferense",), "Passed `recommend(scenario='inferense')`. Known scenarios: ['fine-tuning', 'inference',"),
        (("inference", "speed"), "Passed `recommend(bound='speed')`. `bound` must be 'compute', 'memory' or None."),
    ],
)
def test_what_is_not_known_is_refused(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    scenario, bound = (*arguments, None)[:2]
    with pytest.raises(ValueError, match=re.escape(message)):
        recommend(torch.device("cpu"), str(scenario), bound=bound)
