"""Settings: frozen, keyword-only, validated when they are made.

What lives here: every number a user can set, its default and its legal range, and named recipes. What does not: the
values that a run changes while it trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autoprec.config_checks import check_int, check_name, check_range, check_real, check_type
from autoprec.formats import get_format, nearest
from autoprec.plan_config import PlanConfig
from autoprec.table import TableConfig, TableSettings


def _check_formats(formats: tuple[str, ...] | None) -> None:
    if formats is None:
        return
    if not isinstance(formats, tuple):
        raise TypeError(
            f"Passed `AutoPrecisionConfig(formats={formats!r})` with type `{type(formats).__qualname__}`."
            " `formats` must be a tuple of format names or None."
        )
    for name in formats:
        get_format(name)
    if not formats or len(set(formats)) != len(formats):
        raise ValueError(
            f"Passed `AutoPrecisionConfig(formats={formats!r})`."
            " `formats` must hold at least one name and none twice. Use None for what the device runs natively."
        )


def _check_tiers(tiers: Mapping[str, str] | None) -> None:
    if tiers is None:
        return
    if not isinstance(tiers, Mapping) or not all(isinstance(key, str) for key in tiers):
        raise TypeError(
            f"Passed `AutoPrecisionConfig(tiers={tiers!r})`. `tiers` must be a mapping from kinds of layer or patterns"
            " of unit names to format names, or None."
        )
    for name in tiers.values():
        get_format(name)


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """How the loss scale moves, in GradScaler's words, between a floor and a cap.

    Args:
        init_scale: First loss scale.
        growth_factor: Factor after ``growth_interval`` clean steps.
        backoff_factor: Factor after a skipped step.
        growth_interval: Clean steps in a row before the scale grows.
        floor: Smallest scale. Below 1 the loss would be scaled down, which cures no overflow that matters.
        cap: Largest scale, for growth and for requests alike.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 1.0
    cap: float = 2.0**24

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_real(self, "floor", lambda v: 0.0 < v < math.inf, "a finite float > 0")
        check_real(self, "cap", lambda v: self.floor <= v <= 2.0**126, f"a float >= `floor` ({self.floor}), <= 2**126")
        check_real(self, "init_scale", lambda v: self.floor <= v <= self.cap, f"a float in [{self.floor}, {self.cap}]")
        check_real(self, "growth_factor", lambda v: 1.0 < v < math.inf, "a finite float > 1")
        check_real(self, "backoff_factor", lambda v: 0.0 < v < 1.0, "a float in (0, 1)")
        check_int(self, "growth_interval", minimum=1)


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """How the gradient-clip threshold follows the running median of finite global norms.

    Args:
        multiplier: Threshold in units of the median. ``inf`` turns clipping off.
        window: Norms in the running median.
        min_norms: Finite norms seen before the median clips anything.
        floor: Smallest threshold in units of the median. A request below it is limited to it, so that no request can
            freeze training.
    """

    multiplier: float = 1.5
    window: int = 64
    min_norms: int = 16
    floor: float = 0.01

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_real(self, "floor", lambda v: 0.0 < v < math.inf, "a finite float > 0")
        check_real(self, "multiplier", lambda v: v >= self.floor, f"a float >= `floor` ({self.floor}), inf for off")
        check_int(self, "window", minimum=1)
        check_int(self, "min_norms", minimum=1)
        if self.min_norms > self.window:
            raise ValueError(
                f"Passed `ClipConfig(min_norms={self.min_norms!r}, window={self.window!r})`."
                " `min_norms` must be <= `window`. Lower `min_norms` or raise `window`."
            )


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """When the guard steps in.

    Args:
        max_consecutive_skips: Skipped steps in a row before low precision is given up, and again before training
            stops.
        hold: Applied steps that a raised unit stays where it was put.
        underflow_fraction: Share of a unit's gradient that may underflow before the unit is raised.
    """

    max_consecutive_skips: int = 20
    hold: int = 200
    underflow_fraction: float = 0.25

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_int(self, "max_consecutive_skips", minimum=1)
        check_int(self, "hold", minimum=0)
        check_real(self, "underflow_fraction", lambda v: 0.0 < v <= 1.0, "a float in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class RuleConfig:
    """When the rule moves what.

    Args:
        stable_cv: Relative spread of a unit's gradient norm around its drift, below which its gradients count as
            stable.
        headroom_bits: Bits between a unit's amax and the largest value of a format before it is lowered to there.
        warmup_steps: Applied steps before anything is lowered. With more than 0 the run begins in fp32, whatever the
            Trainer's precision.
        settled_cv: Warm-up ends earlier, once the global gradient norm spreads less than this around its mean. 0 for
            never.
        stages: Decisions over which lowering spreads from both ends of the model inwards. 1 for all layers at once.
        probe_plateaus: Whether all layers go to fp32 for a decision interval when the loss stands still, to see whether
            precision is what holds it up. It is tried after 4 such decisions, then after 16, 64 and so on.
        batch: What the rule does with the batch size. ``"leave"`` leaves it. ``"memory"`` halves it where over 85 %
            of the memory is taken and doubles it below 60 %. ``"utilization"`` halves it where the processor is busy
            for more than 90 % of the time and doubles it below 60 %. Once halved it is not doubled any more, and
            without ``BatchConfig.max_size`` not more than four times: memory that is free says nothing of how large a
            batch still trains well. Under ``Trainer(deterministic=True)`` it is left alone.
        accuracy_weight_start: Weight of accuracy against speed when the run begins: ``headroom_bits`` is multiplied by
            it, ``stable_cv`` and the bounds on underflow are divided by it.
        accuracy_weight_end: The same when the run ends; in between it moves with the share of the run that is over.
    """

    stable_cv: float = 1.0
    headroom_bits: float = 2.0
    warmup_steps: int = 0
    settled_cv: float = 0.0
    stages: int = 1
    probe_plateaus: bool = True
    batch: Literal["leave", "memory", "utilization"] = "leave"
    accuracy_weight_start: float = 1.0
    accuracy_weight_end: float = 1.0

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_real(self, "stable_cv", lambda v: v >= 0.0, "a float >= 0")
        check_real(self, "headroom_bits", lambda v: 0.0 <= v < math.inf, "a finite float >= 0")
        check_int(self, "warmup_steps", minimum=0)
        check_real(self, "settled_cv", lambda v: v >= 0.0, "a float >= 0")
        check_int(self, "stages", minimum=1)
        check_type(self, "probe_plateaus", bool)
        check_name(self, "batch", ("leave", "memory", "utilization"))
        check_real(self, "accuracy_weight_start", lambda v: 0.0 < v < math.inf, "a finite float > 0")
        check_real(self, "accuracy_weight_end", lambda v: 0.0 < v < math.inf, "a finite float > 0")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Bounds of the batch size and of accumulation, and what the learning rate does when the effective batch changes.

    The effective batch is the loader's batch size times the micro-batches of a step. *k* is the effective batch in
    units of the one that the run began with.

    Args:
        min_size: Smallest batch size per rank.
        max_size: Largest batch size per rank. ``None`` for the size of the data set.
        max_accumulate: Most micro-batches per optimizer step. ``None`` for those of an epoch.
        learning_rate: ``"none"`` leaves it to the user. ``"sqrt"`` multiplies it by the root of k, ``"linear"`` by k
            (Goyal et al. 2017), ``"adascale"`` by the gain that the measured gradient-noise scale allows, between 1 and
            k (Johnson et al. 2020), ``"sde"`` by the root of k together with Adam's betas and epsilon (Malladi et al.
            2022). The factor acts inside the optimizer's step only: schedules and checkpoints keep the user's value.
    """

    min_size: int = 1
    max_size: int | None = None
    max_accumulate: int | None = None
    learning_rate: Literal["none", "sqrt", "linear", "adascale", "sde"] = "none"

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_int(self, "min_size", minimum=1)
        if self.max_size is not None:
            check_int(self, "max_size", minimum=self.min_size)
        if self.max_accumulate is not None:
            check_int(self, "max_accumulate", minimum=1)
        check_name(self, "learning_rate", ("adascale", "linear", "none", "sde", "sqrt"))


@dataclass(frozen=True, kw_only=True)
class RollbackConfig:
    """The last level of the guard: going back to a copy of the run in host memory.

    Args:
        keep: Copies that are kept, the oldest goes first. 0 turns rollback off.
        every: Applied steps between copies.
        max_bytes: Most memory for all copies together. ``None`` for a quarter of what is free when training begins.
        compress: Whether copies are compressed with zstandard, in a thread of their own.
        max_rollbacks: Rollbacks before training stops.
        quarantine: Applied steps after a rollback in which everything stays in fp32.
        learning_rate_factor: Factor on the learning rate from a rollback on, once for each.
        loss_spreads: A loss counts as too high when it is so many robust spreads above the running median. ``inf``
            leaves high losses alone.
        patience: Windows in a row with too high a loss before the run goes back.
    """

    keep: int = 1
    every: int = 200
    max_bytes: int | None = None
    compress: bool = False
    max_rollbacks: int = 3
    quarantine: int = 200
    learning_rate_factor: float = 1.0
    loss_spreads: float = 20.0
    patience: int = 50

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_int(self, "keep", minimum=0)
        check_int(self, "every", minimum=1)
        if self.max_bytes is not None:
            check_int(self, "max_bytes", minimum=0)
        check_type(self, "compress", bool)
        check_int(self, "max_rollbacks", minimum=1)
        check_int(self, "quarantine", minimum=0)
        check_real(self, "learning_rate_factor", lambda v: 0.0 < v <= 1.0, "a float in (0, 1]")
        check_real(self, "loss_spreads", lambda v: v > 0.0, "a float > 0, inf to leave high losses alone")
        check_int(self, "patience", minimum=1)


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """What may be measured on the device, and what the predictions must keep to.

    Args:
        enabled: ``"auto"`` times layers where a policy that looks at measurements steers their formats and the run is
            long enough. ``True`` does so in every run, short ones and those of ``fixed:`` policies included. ``False``
            leaves it to the rules of thumb. Under ``Trainer(deterministic=True)`` no clock is read, whatever this says.
        budget_s: Most seconds that a run may spend on it.
        budget_share: Most of the expected training time that a run may spend on it. Not with ``enabled=True``.
        cache: Whether results are kept on disk for later runs and taken from there.
        memory_budget_bytes: Most memory that saved activations and copies of weights may take, as predicted. Formats
            that would take more are not offered to policies. ``None`` for no limit.
    """

    enabled: bool | Literal["auto"] = "auto"
    budget_s: float = 20.0
    budget_share: float = 0.02
    cache: bool = True
    memory_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_range(self, "enabled", lambda v: isinstance(v, bool) or v == "auto", "True, False or 'auto'")
        check_real(self, "budget_s", lambda v: 0.0 <= v < math.inf, "a finite float >= 0")
        check_real(self, "budget_share", lambda v: 0.0 <= v <= 1.0, "a float in [0, 1]")
        check_type(self, "cache", bool)
        if self.memory_budget_bytes is not None:
            check_int(self, "memory_budget_bytes", minimum=0)


@dataclass(frozen=True, kw_only=True)
class AutoPrecisionConfig:
    """All settings of a run.

    Args:
        formats: Formats that policies may choose, by name. ``None`` takes those of fp32, bf16 and fp16 that the device
            runs natively. fp32 is always legal, named or not: it is where the guard falls back to. What was timed on
            the device decides whether a format is offered for a layer, else its size: bf16 on a CPU from
            64 x 320 x 320 on (rows, inputs, outputs), int8 on a CPU from 64 x 512 x 512 or 256 x 256 x 256 on with both
            widths at least 256, fp8 on CUDA from 4096 x 8192 x 16384 on; the last two only where they are native.
            Requests, scripts, maps and ``fixed:`` policies may name any format at any size.
        tiers: Narrowest format that policies may choose, by kind of layer (``"linear"``, ``"conv"``, ``"embedding"``,
            ``"rnn"``, ``"attention"``, ``"other"``) or fnmatch pattern of unit names. The first pattern that fits goes
            before the kind. A run begins with no layer below its tier. Requests, scripts, maps and ``fixed:`` policies
            are not bound.
        granularity: ``"layer"`` decides for each layer, ``"block"`` for each repeated block.
        clamp_output: Largest absolute value that a unit may put out in fp16, fp8 or int8. ``None`` does not clamp.
        hold_schedules: Whether a skipped step leaves the learning-rate schedules of kind "step" where they are.
            ``False`` follows Lightning, which moves them on.
        low_precision_lr_factor: What the learning rate is multiplied by while any layer runs in less than tf32. It acts
            inside the optimizer's step only.
        fused_step: Whether kernels take the steps of torch's SGD, Adam and AdamW while precision is steered, and keep
            low-precision copies of weights. ``False`` leaves every step to the optimizer's own code, and every gradient
            in ``.grad``.
        second_moment: Format in memory of the second moment of torch's Adam and AdamW where kernels take their steps:
            ``"fp32"``, or ``"bf16"`` or ``"fp16"`` with stochastic rounding, which saves 2 bytes for each weight.
            ``state_dict()`` hands out float32 all the same. Prefer bf16: it has the range of float32, where fp16 ends
            at 6e-8, the square of a gradient of 2.4e-4, and what is below becomes that or 0 at random.
        second_moment_after: Applied steps that a weight has behind it when its second moment is narrowed. 0 for as soon
            as there is one, which is the second step.
        loss_scale: How the loss scale moves.
        clip: How the clip threshold moves.
        guard: When the guard steps in.
        rule: When the rule moves what.
        plan: Budgets of policies that plan a whole map.
        table: Parameters of the policy ``"table"``. As :class:`~autoprec.table.TableConfig` it leaves the batch size
            alone unless its ``schedule`` or ``batch`` says otherwise.
        batch: Bounds of the batch size, and what the learning rate does when it changes.
        rollback: Copies of the run in host memory, and when it goes back to one.
        calibration: What may be measured on the device before formats are chosen.
        decision_timeout_s: Seconds that a controller of the user's may take for an answer. A slower one is abandoned
            and the run goes on without it.
    """

    formats: tuple[str, ...] | None = None
    tiers: Mapping[str, str] | None = field(default=None, hash=False)
    granularity: Literal["layer", "block"] = "layer"
    clamp_output: float | None = None
    hold_schedules: bool = True
    low_precision_lr_factor: float = 1.0
    fused_step: bool = True
    second_moment: Literal["fp32", "bf16", "fp16"] = "fp32"
    second_moment_after: int = 0
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    rule: RuleConfig = field(default_factory=RuleConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    table: TableSettings = field(default_factory=TableConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    rollback: RollbackConfig = field(default_factory=RollbackConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    decision_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Validates the fields."""
        _check_formats(self.formats)
        _check_tiers(self.tiers)
        if self.tiers is not None:
            object.__setattr__(self, "tiers", dict(self.tiers))  # a later change of the caller's must not act
        check_name(self, "granularity", ("block", "layer"))
        if self.clamp_output is not None:
            check_real(self, "clamp_output", lambda v: 0.0 < v < math.inf, "None or a finite float > 0")
        check_type(self, "hold_schedules", bool)
        check_real(self, "low_precision_lr_factor", lambda v: 0.0 < v <= 1.0, "a float in (0, 1]")
        check_type(self, "fused_step", bool)
        check_name(self, "second_moment", ("bf16", "fp16", "fp32"))
        check_int(self, "second_moment_after", minimum=0)
        check_type(self, "loss_scale", LossScaleConfig)
        check_type(self, "clip", ClipConfig)
        check_type(self, "guard", GuardConfig)
        check_type(self, "rule", RuleConfig)
        check_type(self, "plan", PlanConfig)
        check_type(self, "table", TableSettings)
        check_type(self, "batch", BatchConfig)
        check_type(self, "rollback", RollbackConfig)
        check_type(self, "calibration", CalibrationConfig)
        check_real(self, "decision_timeout_s", lambda v: v > 0.0, "a float > 0, inf for no limit")


RECIPES: dict[str, AutoPrecisionConfig] = {
    "default": AutoPrecisionConfig(),
    "cautious": AutoPrecisionConfig(rule=RuleConfig(stable_cv=0.5, headroom_bits=4.0), guard=GuardConfig(hold=1000)),
    "eager": AutoPrecisionConfig(rule=RuleConfig(stable_cv=2.0, headroom_bits=1.0), guard=GuardConfig(hold=100)),
    # fp32 until the gradients have settled, then from the ends of the model inwards, at a lower learning rate
    "staged": AutoPrecisionConfig(
        low_precision_lr_factor=0.8, rule=RuleConfig(warmup_steps=500, settled_cv=0.25, stages=3)
    ),
    # scores of attention overflow first; tables are read, not multiplied
    "tiers": AutoPrecisionConfig(
        formats=("fp32", "bf16", "int8"),
        tiers={"*attn*": "fp32", "attention": "fp32", "linear": "bf16", "conv": "bf16", "embedding": "int8"},
    ),
    # wide formats towards the end, when small errors decide
    "annealed": AutoPrecisionConfig(rule=RuleConfig(accuracy_weight_start=0.5, accuracy_weight_end=2.0)),
    # batches as large as memory allows
    "memory": AutoPrecisionConfig(rule=RuleConfig(batch="memory"), batch=BatchConfig(learning_rate="sqrt")),
    # no fp16 means no loss scale and no range to watch
    "bf16": AutoPrecisionConfig(formats=("fp32", "bf16")),
    # GradScaler's interval of 2000 never comes round in a run of a few thousand steps
    "short": AutoPrecisionConfig(loss_scale=LossScaleConfig(growth_interval=100), guard=GuardConfig(hold=50)),
}
"""Named settings: the defaults, two degrees of daring, three ways to go down in stages, batches by memory, a choice
without fp16, and one for runs of a few epochs."""


def recipe(name: str) -> AutoPrecisionConfig:
    """Returns the settings called ``name``.

    Args:
        name: One of ``RECIPES``.

    Raises:
        ValueError: If there is no such recipe. The message lists the names and the nearest one.
    """
    if name not in RECIPES:
        raise ValueError(f"Passed `recipe({name!r})`. Known recipes: {sorted(RECIPES)}.{nearest(name, RECIPES)}")
    return RECIPES[name]
