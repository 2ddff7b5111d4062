"""A precision autotuner for PyTorch Lightning.

Public names live here; everything else may change. Start at ``AutoPrecisionCallback``.
"""

import importlib as _importlib
from types import ModuleType as _ModuleType

from autoprec.action import Action
from autoprec.applied import AppliedMap
from autoprec.callback import AutoPrecisionCallback
from autoprec.config import (
    RECIPES,
    AutoPrecisionConfig,
    BatchConfig,
    CalibrationConfig,
    ClipConfig,
    GuardConfig,
    LossScaleConfig,
    RollbackConfig,
    RuleConfig,
    recipe,
)
from autoprec.controller import Controller, FixedController, MapController, ScriptedController
from autoprec.formats import FORMATS, NumberFormat, get_format
from autoprec.guard import DivergedTrainingError, NonFiniteTrainingError
from autoprec.history import Decision, History
from autoprec.inference import apply_map
from autoprec.map_file import load_map
from autoprec.monitoring.config import MonitorConfig
from autoprec.plan_config import PlanConfig
from autoprec.precision import AutoPrecision
from autoprec.rule import RuleController
from autoprec.strategy import AutoPrecisionStrategy
from autoprec.table import TableConfig, TableSettings
from autoprec.version import __version__

_ROOMS = ("sweep",)  # need extras, so they are imported when they are asked for


def __getattr__(name: str) -> _ModuleType:
    if name in _ROOMS:
        return _importlib.import_module(f"autoprec.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
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
