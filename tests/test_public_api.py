"""The names that users may rely on, no more and no fewer.

Time budget: 5 s.
"""

from __future__ import annotations

import types

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import autoprec

PUBLIC = [
    "FORMATS",
    "RECIPES",
    "Action",
    "AppliedMap",
    "AutoPrecision",
    "AutoPrecisionCallback",
    "AutoPrecisionConfig",
    "AutoPrecisionStrategy",
    "BatchConfig",
    "CalibrationConfig",
    "ClipConfig",
    "Controller",
    "Decision",
    "DivergedTrainingError",
    "FixedController",
    "GuardConfig",
    "History",
    "LossScaleConfig",
    "MapController",
    "MonitorConfig",
    "NonFiniteTrainingError",
    "NumberFormat",
    "PlanConfig",
    "RollbackConfig",
    "RuleConfig",
    "RuleController",
    "ScriptedController",
    "TableConfig",
    "TableSettings",
    "__version__",
    "apply_map",
    "get_format",
    "load_map",
    "recipe",
]


def test_all_is_exact() -> None:
    assert list(autoprec.__all__) == PUBLIC


def test_nothing_else_is_public() -> None:
    names = {
        name
        for name, value in vars(autoprec).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert names == set(PUBLIC) - {"__version__"}


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ("FORMATS", "RECIPES", "__version__")])
def test_public_name_is_documented_and_ours(name: str) -> None:
    value = getattr(autoprec, name)
    assert value.__doc__
    assert value.__module__.split(".")[0] == "autoprec"


def test_strategy_is_registered() -> None:
    assert StrategyRegistry.get("autoprec") is not None
