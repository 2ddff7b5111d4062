"""Settings: what is refused, with which words, and what jsonargparse makes of them.

Time budget: 5 s.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jsonargparse
import pytest

from autoprec.config import (
    RECIPES,
    AutoPrecisionConfig,
    BatchConfig,
    ClipConfig,
    GuardConfig,
    LossScaleConfig,
    RollbackConfig,
    RuleConfig,
    recipe,
)
from autoprec.table import TableConfig, TableSettings


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (LossScaleConfig, "floor", 0.0),
        (LossScaleConfig, "cap", 0.5),
        (LossScaleConfig, "cap", math.inf),
        (LossScaleConfig, "init_scale", 0.5),
        (LossScaleConfig, "init_scale", 2.0**25),
        (LossScaleConfig, "init_scale", math.nan),
        (LossScaleConfig, "growth_factor", 1.0),
        (LossScaleConfig, "growth_factor", math.inf),
        (LossScaleConfig, "backoff_factor", 1.0),
        (LossScaleConfig, "backoff_factor", 0.0),
        (LossScaleConfig, "growth_interval", 0),
        (ClipConfig, "multiplier", 0.0),
        (ClipConfig, "multiplier", math.nan),
        (ClipConfig, "floor", -1.0),
        (ClipConfig, "window", 0),
        (ClipConfig, "min_norms", 0),
        (BatchConfig, "min_size", 0),
        (BatchConfig, "max_size", 0),
        (BatchConfig, "max_accumulate", 0),
        (BatchConfig, "learning_rate", "cubic"),
        (RollbackConfig, "keep", -1),
        (RollbackConfig, "every", 0),
        (RollbackConfig, "max_bytes", -1),
        (RollbackConfig, "max_rollbacks", 0),
        (RollbackConfig, "quarantine", -1),
        (RollbackConfig, "learning_rate_factor", 1.5),
        (RollbackConfig, "loss_spreads", 0.0),
        (RollbackConfig, "patience", 0),
        (AutoPrecisionConfig, "decision_timeout_s", 0.0),
        (RuleConfig, "warmup_steps", -1),
        (RuleConfig, "settled_cv", math.nan),
        (RuleConfig, "stages", 0),
        (RuleConfig, "accuracy_weight_start", 0.0),
        (RuleConfig, "accuracy_weight_end", math.inf),
        (GuardConfig, "max_consecutive_skips", 0),
        (GuardConfig, "hold", -1),
        (GuardConfig, "underflow_fraction", 0.0),
        (GuardConfig, "underflow_fraction", 1.5),
        (AutoPrecisionConfig, "granularity", "layers"),
        (AutoPrecisionConfig, "clamp_output", 0.0),
        (RuleConfig, "stable_cv", -0.1),
        (RuleConfig, "headroom_bits", math.nan),
        (AutoPrecisionConfig, "second_moment", "int8"),
        (AutoPrecisionConfig, "second_moment", None),
        (AutoPrecisionConfig, "second_moment_after", -1),
        (TableSettings, "threshold", 0.0),
        (TableSettings, "threshold", math.nan),
        (TableSettings, "headroom_bits", -1.0),
        (TableSettings, "clip", 2.0),
        (TableSettings, "clip", None),
        (TableSettings, "schedule", (0.5, 1.5)),
        (TableSettings, "schedule", ("half",)),
        (TableSettings, "probe_every", 0),
        (TableSettings, "optimism", math.inf),
        (TableConfig, "threshold", -0.1),
        (AutoPrecisionConfig, "formats", ()),
        (AutoPrecisionConfig, "formats", ("bf16", "bf16")),
    ],
)
def test_out_of_range(kind: type[Any], field: str, value: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"Passed `{kind.__name__}({field}={value!r})`. `{field}` must")):
        kind(**{field: value})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (LossScaleConfig, "growth_interval", 2000.0),
        (LossScaleConfig, "growth_interval", True),
        (LossScaleConfig, "init_scale", "65536"),
        (ClipConfig, "window", None),
        (GuardConfig, "hold", 1.5),
        (AutoPrecisionConfig, "formats", "bf16"),
        (AutoPrecisionConfig, "formats", ["bf16"]),
        (AutoPrecisionConfig, "hold_schedules", 1),
        (AutoPrecisionConfig, "second_moment_after", 1.5),
        (AutoPrecisionConfig, "loss_scale", 65536.0),
        (AutoPrecisionConfig, "clip", 1.0),
        (AutoPrecisionConfig, "guard", None),
        (AutoPrecisionConfig, "rule", None),
        (AutoPrecisionConfig, "batch", 8),
        (AutoPrecisionConfig, "rollback", True),
        (AutoPrecisionConfig, "table", None),
        (RuleConfig, "probe_plateaus", 1),
        (TableSettings, "batch", 0.5),
        (TableSettings, "schedule", 0.5),
        (TableSettings, "probe_every", True),
        (TableSettings, "threshold", "0.1"),
        (RollbackConfig, "compress", 1),
    ],
)
def test_wrong_type(kind: type[Any], field: str, value: object) -> None:
    passed = f"Passed `{kind.__name__}({field}={value!r})` with type `{type(value).__qualname__}`."
    with pytest.raises(TypeError, match=re.escape(passed)):
        kind(**{field: value})


def test_two_settings_that_exclude_each_other_are_both_named() -> None:
    passed = "Passed `ClipConfig(min_norms=17, window=16)`. `min_norms` must be <= `window`."
    with pytest.raises(ValueError, match=re.escape(passed)):
        ClipConfig(min_norms=17, window=16)


@pytest.mark.parametrize("name", ["bf61", "float16"])
def test_unknown_format_suggests_the_nearest(name: str) -> None:
    with pytest.raises(ValueError, match="Known formats: .* Did you mean '[bf]+p?16'?"):
        AutoPrecisionConfig(formats=("fp32", name))


def test_granularity_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=re.escape("Did you mean 'layer'?")):
        AutoPrecisionConfig(granularity="layers")  # type: ignore[arg-type]


def test_second_moment_suggests_the_nearest() -> None:
    expected = "`second_moment` must be 'bf16', 'fp16' or 'fp32'. Did you mean 'bf16'?"
    with pytest.raises(ValueError, match=re.escape(expected)):
        AutoPrecisionConfig(second_moment="BF16")  # type: ignore[arg-type]


def test_tiers_are_checked_and_copied() -> None:
    tiers = {"linear": "bf16", "head.*": "fp32"}
    config = AutoPrecisionConfig(tiers=tiers)
    tiers["linear"] = "int8"
    assert config.tiers == {"linear": "bf16", "head.*": "fp32"}
    with pytest.raises(ValueError, match="Known formats"):
        AutoPrecisionConfig(tiers={"linear": "bf61"})
    with pytest.raises(TypeError, match="must be a mapping from kinds of layer"):
        AutoPrecisionConfig(tiers=[("linear", "bf16")])  # type: ignore[arg-type]


def test_extremes_that_are_legal() -> None:
    ClipConfig(multiplier=math.inf)
    LossScaleConfig(init_scale=1, floor=2.0**-10)
    LossScaleConfig(init_scale=8.0, floor=8.0, cap=8.0)
    GuardConfig(hold=0, underflow_fraction=1.0)
    AutoPrecisionConfig(table=TableSettings(schedule=[0.0, 1], clip=math.inf, optimism=0))  # type: ignore[arg-type]
    AutoPrecisionConfig(rule=RuleConfig(stable_cv=math.inf, headroom_bits=0.0), clamp_output=65504)


def test_defaults_are_the_documented_ones() -> None:
    assert RECIPES["default"] == AutoPrecisionConfig()
    config = LossScaleConfig()
    assert (config.init_scale, config.floor, config.cap, config.growth_interval) == (2.0**16, 1.0, 2.0**24, 2000)
    assert (ClipConfig().multiplier, GuardConfig().hold) == (1.5, 200)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_recipe(name: str) -> None:
    assert recipe(name) is RECIPES[name]
    assert hash(recipe(name)) == hash(dataclasses.replace(recipe(name)))


def test_unknown_recipe_suggests_the_nearest() -> None:
    passed = f"Passed `recipe('cautios')`. Known recipes: {sorted(RECIPES)}. Did you mean 'cautious'?"
    with pytest.raises(ValueError, match=re.escape(passed)):
        recipe("cautios")


def test_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GuardConfig().hold = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        GuardConfig(20)  # type: ignore[call-arg]


def test_jsonargparse_builds_it() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", type=AutoPrecisionConfig, default=AutoPrecisionConfig())
    arguments = ["--config.formats=[fp32,bf16]", "--config.clip.multiplier=.inf", "--config.guard.hold=5"]
    arguments.append("--config.table.threshold=0.05")
    config = parser.instantiate(parser.parse_args(arguments)).config
    expected = AutoPrecisionConfig(
        formats=("fp32", "bf16"),
        clip=ClipConfig(multiplier=math.inf),
        guard=GuardConfig(hold=5),
        table=TableConfig(threshold=0.05),
    )
    assert config == expected, "the batch size stays the user's"


def test_jsonargparse_reports_what_is_refused() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", type=AutoPrecisionConfig, default=AutoPrecisionConfig())
    arguments = parser.parse_args(["--config.formats=[fp32,bf61]"])
    with pytest.raises(ValueError, match=re.escape("Did you mean 'bf16'?")):
        parser.instantiate(arguments)
