"""What a sweep is asked for: read from YAML and checked as a whole before anything trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from autoprec.compare.arms import FP32, STATIC
from autoprec.compare.settings import mode_of
from autoprec.compare.targets import Target, load_target
from autoprec.formats import FORMATS, nearest
from autoprec.sweep.space import Dimension, Values, dimensions

STEP_TIME_RATIO, SECONDS, STEP_MS, PEAK = "step_time_ratio", "training_seconds", "step_ms", "peak_bytes"
MEASURES = (STEP_TIME_RATIO, SECONDS, STEP_MS, PEAK)
"""What is measured besides the metrics that the module logs."""
MAP_PREFIX = "map:"
"""Before the name of a map of ``maps`` in a choice of policies."""
REWARD_WEIGHTS = ("accuracy", "time", "memory", "divergence")
_SHORT = {"objectives": "name", "sampler": "name", "pruner": "name"}


class SweepError(ValueError):
    """A sweep that cannot be made; the message says where, what is allowed and what to do."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Objective(_Model):
    """What is best.

    Args:
        name: A metric that the module logs in validation, ``train_loss``, or one of ``step_time_ratio`` (to the
            reference, measured in turn), ``training_seconds``, ``step_ms`` and ``peak_bytes``.
        direction: By default the larger is better for accuracies and the like, the smaller for all else.
    """

    name: str = Field(min_length=1)
    direction: Literal["minimize", "maximize"] | None = None

    @property
    def is_metric(self) -> bool:
        """Whether the module logs it."""
        return self.name not in MEASURES

    @property
    def aim(self) -> Literal["minimize", "maximize"]:
        """Which values are better."""
        if self.direction is not None:
            return self.direction
        return "maximize" if self.is_metric and mode_of(self.name) == "max" else "minimize"


class Constraint(_Model):
    """What a usable trial keeps to.

    Args:
        name: As of objectives, ``skipped_steps`` besides.
        min: Least value.
        max: Largest value.
    """

    name: str = Field(min_length=1)
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _has_a_bound(self) -> Constraint:
        if self.min is None and self.max is None:
            raise ValueError("a constraint needs `min` or `max`, as `{name: peak_bytes, max: 2e9}`.")
        low, high = -math.inf if self.min is None else self.min, math.inf if self.max is None else self.max
        if not low <= high:
            raise ValueError(f"passed min {self.min} and max {self.max}, which no figure keeps to. Write min <= max.")
        return self

    def excess(self, value: float) -> float:
        """Returns how far a value is beyond the bounds; 0 or less where it keeps to them.

        Args:
            value: The value.
        """
        over = [] if self.max is None else [value - self.max]
        return max([*over, *([] if self.min is None else [self.min - value])])


class Sampler(_Model):
    """Who proposes trials.

    Args:
        name: ``tpe``, ``random``, or ``grid`` for every combination of choices and steps.
        options: Arguments of Optuna's class.
    """

    name: Literal["tpe", "random", "grid"] = "tpe"
    options: dict[str, Any] = Field(default_factory=dict)


class Pruner(_Model):
    """Who ends trials early; only with a single objective, which is a metric.

    Args:
        name: Optuna's pruner.
        options: Arguments of its class.
    """

    name: Literal["none", "median", "percentile", "halving", "hyperband", "threshold", "wilcoxon"] = "none"
    options: dict[str, Any] = Field(default_factory=dict)


class PolicyTraining(_Model):
    """How a policy is trained for the reward weights of a trial.

    Args:
        decisions: Decisions of simulated runs to learn from.
        tasks: Simulated tasks to learn from.
        validation: Simulated tasks that choose the best state.
    """

    decisions: int = Field(default=100_000, ge=1)
    tasks: int = Field(default=256, ge=1)
    validation: int = Field(default=48, ge=1)


class SweepConfig(_Model):
    """A sweep.

    In ``arguments``, ``callback``, ``map`` and ``reward`` a value is fixed, and a mapping with ``choices``, or with
    ``low`` and ``high``, is searched (:class:`~autoprec.sweep.space.Dimension`).

    Args:
        target: What is trained: ``module:function``, ``file.py:function``, the YAML of a LightningCLI, or a script.
        name: Name of the study. By default that of the target.
        arguments: Those of a function, dotted keys of a LightningCLI config, or options of a script.
        arm: Choices of ``autoprec`` and static precisions, where those are searched too.
        callback: Arguments of ``AutoPrecisionCallback`` by dotted names, ``recipe`` besides.
        map: Format by unit name or pattern; the callback then trains with this map.
        maps: Maps by name; a choice of ``callback.policy`` is ``map:<name>`` then.
        reward: Reward weights of a policy that is trained for the trial.
        policy_training: How that is trained.
        precision: The Trainer's ``precision`` below the callback.
        baselines: Static precisions that are always tried first; those that cannot run here are left out.
        objectives: One, or several for a Pareto front.
        constraints: What usable trials keep to.
        reference: Static precision that ``step_time_ratio`` is a ratio to.
        pick: Objective that chooses the winner from a Pareto front; the point nearest to the best of all by default.
        sampler: Who proposes trials.
        pruner: Who ends them early.
        trials: Trials of the study, baselines included.
        seeds: Seeds of each trial; figures are means over them.
        seed: Seed of the sampler.
        steps: Most optimizer steps of a trial; the target's whole training by default.
        evaluate_every: Steps between validations; as the target has it by default.
        minutes: No trial starts after them; ``None`` for no limit.
        trial_minutes: A trial that takes longer is given up.
        threads: Threads for one operation.
        clock: What measures steps on a CPU; the processor time for one thread, the wall otherwise.
        workers: Trials at a time on this machine.
        max_retry: Times that a trial is tried again whose worker died.
        storage: Where the study is: an SQLAlchemy URL, ``journal:<file>`` or ``grpc://host:port``. By default SQLite in
            the folder.
        out: Folder for everything else.
    """

    target: str
    name: str | None = None
    arguments: Values = Field(default_factory=dict)
    arm: Dimension | None = None
    callback: Values = Field(default_factory=dict)
    map: Values = Field(default_factory=dict)
    maps: dict[str, dict[str, str]] = Field(default_factory=dict)
    reward: Values = Field(default_factory=dict)
    policy_training: PolicyTraining = PolicyTraining()
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    baselines: tuple[str, ...] = (FP32, "bf16-mixed", "bf16-true", "16-mixed")
    objectives: tuple[Objective, ...] = (Objective(name="val_loss"),)
    constraints: tuple[Constraint, ...] = ()
    reference: str = "bf16-mixed"
    pick: str | None = None
    sampler: Sampler = Sampler()
    pruner: Pruner = Pruner()
    trials: int = Field(default=20, ge=1)
    seeds: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)
    steps: int | None = Field(default=None, ge=1)
    evaluate_every: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=60.0, gt=0)
    trial_minutes: float | None = Field(default=None, gt=0)
    threads: int = Field(default=1, ge=1)
    clock: Literal["wall", "cpu"] | None = None
    workers: int = Field(default=1, ge=1)
    max_retry: int = Field(default=3, ge=0)
    storage: str | None = None
    out: Path = Path("autoprec-sweep")

    @model_validator(mode="before")
    @classmethod
    def _read_short_forms(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        found = dict(values)
        for name, inner in _SHORT.items():
            if isinstance(found.get(name), str):
                found[name] = [found[name]] if name == "objectives" else {inner: found[name]}
        if isinstance(found.get("objectives"), (list, tuple)):
            found["objectives"] = [{"name": one} if isinstance(one, str) else one for one in found["objectives"]]
        return found

    @field_validator("baselines")
    @classmethod
    def _are_static(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            _check_static(name)
        if len(set(names)) != len(names):
            raise ValueError(f"passed {list(names)}. None may come twice.")
        return names

    @field_validator("reference")
    @classmethod
    def _is_static(cls, name: str) -> str:
        _check_static(name)
        return name

    @field_validator("maps")
    @classmethod
    def _have_formats(cls, maps: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        for name, formats in maps.items():
            for pattern, chosen in formats.items():
                if chosen not in FORMATS:
                    raise ValueError(f"map {name!r} gives {pattern!r} the format {chosen!r}. Formats: {list(FORMATS)}.")
        return maps

    @model_validator(mode="after")
    def _fits_together(self) -> SweepConfig:
        names = [objective.name for objective in self.objectives]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"passed objectives {names}. There must be one at least, and none twice.")
        if self.pick is not None and self.pick not in names:
            raise ValueError(f"passed pick {self.pick!r}. It must be one of the objectives {names}.")
        if self.pruner.name != "none" and (len(names) > 1 or not self.objectives[0].is_metric):
            raise ValueError(
                f"passed pruner {self.pruner.name!r} with the objectives {names}. Trials are ended early by one"
                " objective that is a metric. Leave the pruner out, or keep one metric."
            )
        if (self.map or self.reward) and "policy" in self.callback or (self.map and self.reward):
            raise ValueError("`map`, `reward` and `callback.policy` each say who decides. Keep one of them.")
        unknown = sorted(set(self.reward) - set(REWARD_WEIGHTS))
        if unknown:
            raise ValueError(f"passed reward {unknown}. Weights are {list(REWARD_WEIGHTS)}.")
        return self

    @property
    def study_name(self) -> str:
        """Name of the study."""
        return self.name or self.load_target().name

    @property
    def used_clock(self) -> Literal["wall", "cpu"]:
        """The clock of a run on a CPU."""
        return self.clock or ("cpu" if self.threads == 1 else "wall")

    @property
    def needs_reference(self) -> bool:
        """Whether the reference has to train beside each trial."""
        names = [*(one.name for one in self.objectives), *(one.name for one in self.constraints)]
        return STEP_TIME_RATIO in names

    def space(self) -> dict[str, Dimension]:
        """Returns what is searched, by the name of the parameter."""
        sections = {name: getattr(self, name) for name in ("arguments", "callback", "map", "reward")}
        found = {} if self.arm is None else {"arm": self.arm}
        return found | {
            f"{section}.{name}": dimension
            for section, values in sections.items()
            for name, dimension in dimensions(values).items()
        }

    def load_target(self) -> Target:
        """Returns the target, without its arguments.

        Raises:
            TargetError: If there is no such thing.
        """
        return load_target(self.target)

    def identity(self) -> dict[str, Any]:
        """Returns what the trials of one study have in common, as JSON can hold it; the rest may change."""
        kept = (
            "arguments arm callback map maps reward policy_training precision objectives constraints reference seeds"
            " steps evaluate_every threads"
        )
        document = self.model_dump(mode="json", include=set(kept.split()))
        return {"target": Path(self.target).name, **document}


def _check_static(name: str) -> None:
    if name not in STATIC:
        raise ValueError(f"passed {name!r}. Static precisions are {', '.join(STATIC)}.{nearest(name, STATIC)}")
