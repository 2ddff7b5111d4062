"""What a training of a policy depends on: PPO's hyper-parameters, the tasks and the environment. Read from YAML.

Files have the layout of RL Baselines3 Zoo: a name, then arguments of ``stable_baselines3.PPO`` under their own names,
with ``policy_kwargs`` and ``env_kwargs`` for those of the network and of the environment. ``ppo.yaml`` is the shipped
one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from autoprec.encoding import FEATURES
from autoprec.envs.proxies import BANKS, REGIMES, TABLES, Bank, Distribution
from autoprec.envs.reward import RewardWeights
from autoprec.feature_rows import RUN_KNOBS
from autoprec.policies.network import MOVES
from autoprec.policies.policy_file import MAX_WEIGHTS_BYTES
from autoprec.table import TableSettings

SECTION = "default"
MAX_LAYERS = 8
MAX_ROWS = 20_000_000
"""Rows of a rollout, or of the statistics: 7 GB."""
MAX_SCHEDULE = 1e38
"""About what float32 can hold."""
_FLATTENED = ("policy_kwargs", "env_kwargs")


class SettingsError(ValueError):
    """Settings that no training can have; the message says which, what is allowed and what to do."""


class BankSettings(BaseModel):
    """Which tasks.

    Args:
        name: One of ``BANKS``.
        size: How many are drawn; those whose fp32 twin learns too little are left out.
        distribution: Instead of the bank's own: other architectures, weights of regimes and cost tables, and so on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = "train"
    size: int = Field(default=2048, ge=1, le=1_000_000)
    distribution: Distribution | None = None

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in BANKS:
            raise ValueError(f"Passed bank {name!r}. Banks are {sorted(BANKS)}.")
        return name

    def bank(self) -> Bank:
        """Returns the bank."""
        return Bank(self.name, self.size, self.distribution)


class Stage(BaseModel):
    """A part of the training that plays some of the tasks only.

    Args:
        until: Share of all decisions at which it ends.
        regimes: Regimes of its tasks.
        tables: What their tables of costs say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    until: float = Field(gt=0.0, le=1.0)
    regimes: tuple[str, ...] = REGIMES
    tables: tuple[str, ...] = TABLES

    @model_validator(mode="after")
    def _are_known(self) -> Stage:
        for name, allowed in (("regimes", REGIMES), ("tables", TABLES)):
            chosen = getattr(self, name)
            if not chosen or not set(chosen) <= set(allowed):
                raise ValueError(f"Passed a stage with `{name}={chosen}`. Choose at least one of {allowed}.")
        return self


class ModuleSettings(BaseModel):
    """The user's own training, in place of proxy runs.

    Args:
        target: ``package.module:function`` or ``path/to/file.py:function``; the function returns (LightningModule,
            data, Trainer arguments), with a parameter ``seed`` if it likes.
        interval: Applied optimizer steps between decisions.
        budget: Optimizer steps of the fp32 twin. A training lasts as long as the twin's time for them, whatever the
            Trainer's arguments say. None: as long as these say.
        metric: Name of the held-out loss. None for ``val_loss``, else the first with a loss in its name.
        formats: What may be chosen. None for what the device runs natively.
        trainings: Trainings side by side; each holds a module of its own in memory.
        validation: Trainings that a validation plays, one after the other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    target: str = Field(min_length=1)
    interval: int = Field(default=50, ge=1)
    budget: int | None = Field(default=None, ge=1)
    metric: str | None = None
    formats: tuple[str, ...] | None = None
    trainings: int = Field(default=1, ge=1, le=64)
    validation: int = Field(default=2, ge=1, le=1000)


class TrainSettings(BaseModel):
    """Everything that decides what is learnt, besides the seed.

    Numbers of PPO have the names that stable-baselines3 gives them. Learning rate and clip range may be ``lin_`` and a
    number, which falls to 0 over all decisions.

    Args:
        decisions: Decisions of runs to learn from; each has a row for every knob of the run.
        n_envs: Runs side by side.
        module: The user's own training to learn from and to validate on, instead of proxy runs.
        train: Tasks to learn from.
        validation: Tasks that pick the best state of the policy, each played once.
        curriculum: Stages in their order; none plays all tasks from the beginning.
        segment: Rollouts from one validation and checkpoint to the next. All episodes begin anew there.
        statistics_steps: Decisions of each run that features are normalised by, half of them the table's own.
        mode: ``offset``: actions are relative to what the table proposes; ``ladder``: to where a knob is.
        guard: Whether the unit that overflowed first is raised and held.
        table: Parameters of the table.
        reward: What rewards weigh.
        net_arch: Widths of hidden layers, of the policy and of the critic.
        start: Folder of a policy to begin with, in place of one that keeps everything.
        keep_bias: First logit of "keep"; the others have 0.
        learning_rate: See above.
        clip_range: See above.
        n_steps: Decisions of each run in a rollout.
        batch_size: Rows of a mini-batch, about: a rollout is cut into equal parts.
        n_epochs: Passes over a rollout.
        gamma: Discount of a decision.
        gae_lambda: Trace of the advantage.
        ent_coef: Weight of the entropy.
        vf_coef: Weight of the critic's loss.
        max_grad_norm: Clip of the gradient.
        target_kl: Ends the passes over a rollout early.

    Raises:
        ValueError: If a number is out of range, or several do not go together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    decisions: int = Field(default=800_000, ge=1)
    n_envs: int = Field(default=96, ge=1, le=4096)
    module: ModuleSettings | None = None
    train: BankSettings = BankSettings()
    validation: BankSettings = BankSettings(name="val", size=192)
    curriculum: tuple[Stage, ...] = ()
    segment: int = Field(default=20, ge=1)
    statistics_steps: int = Field(default=64, ge=2)
    mode: Literal["offset", "ladder"] = "offset"
    guard: bool = True
    table: TableSettings = TableSettings()
    reward: RewardWeights = RewardWeights()
    net_arch: tuple[int, ...] = (64, 64)
    start: str | None = None
    keep_bias: float = Field(default=0.5, ge=-10.0, le=10.0)
    learning_rate: float | str = "lin_1.5e-3"
    clip_range: float | str = 0.2
    n_steps: int = Field(default=32, ge=1)
    batch_size: int = Field(default=2048, ge=2)
    n_epochs: int = Field(default=6, ge=1)
    gamma: float = Field(default=0.98, gt=0.0, le=1.0)
    gae_lambda: float = Field(default=0.97, ge=0.0, le=1.0)
    ent_coef: float = Field(default=0.002, ge=0.0, allow_inf_nan=False)
    vf_coef: float = Field(default=0.5, ge=0.0, allow_inf_nan=False)
    max_grad_norm: float = Field(default=0.5, gt=0.0, allow_inf_nan=False)
    target_kl: float | None = Field(default=None, gt=0.0)

    @field_validator("learning_rate", "clip_range")
    @classmethod
    def _is_schedule(cls, value: float | str) -> float | str:
        schedule(value)
        return value

    @field_validator("net_arch")
    @classmethod
    def _has_widths(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if not 1 <= len(widths) <= MAX_LAYERS or min(widths) < 1 or max(widths) > 1024:
            raise ValueError(
                f"Passed `net_arch={widths}`. It has one width at least and {MAX_LAYERS} at most, each from 1 to 1024."
            )
        sizes = (len(FEATURES), *widths, len(MOVES))
        weights = sum(inner * outer + outer for inner, outer in pairwise(sizes))
        if 4 * weights > 0.9 * MAX_WEIGHTS_BYTES:  # the rest is for statistics and names
            raise ValueError(
                f"Passed `net_arch={widths}`. A policy may take {MAX_WEIGHTS_BYTES} bytes, this one would take about"
                f" {4 * weights}. Choose fewer or narrower layers."
            )
        return widths

    @model_validator(mode="after")
    def _fit_together(self) -> TrainSettings:
        ends = [stage.until for stage in self.curriculum]
        if ends and (ends != sorted(set(ends)) or ends[-1] != 1.0):
            raise ValueError(f"Passed a curriculum that ends at {ends}. Each stage ends later, the last one at 1.0.")
        if self.module is not None:
            return self._fit_a_module()
        units = (self.train.bank().distribution).units
        rows = self.n_envs * (max(units) + RUN_KNOBS)
        self.check_rollout(self.n_steps * rows)
        for name in ("n_steps", "statistics_steps"):
            if getattr(self, name) * rows > MAX_ROWS:
                raise SettingsError(
                    f"Passed `{name}={getattr(self, name)}` and `n_envs={self.n_envs}`. Together they may have"
                    f" {MAX_ROWS} rows in memory, these have {getattr(self, name) * rows}. Lower one of them."
                )
        return self

    def _fit_a_module(self) -> TrainSettings:
        if self.curriculum or not self.guard:
            raise ValueError(
                "Passed `module` together with `curriculum` or `guard: false`. Stages are those of proxy runs, and the"
                " guard of a real training is always on. Leave them out."
            )
        return self

    @property
    def runs(self) -> int:
        """Runs side by side."""
        return self.n_envs if self.module is None else self.module.trainings

    def check_rollout(self, rows: int) -> None:
        """Checks that a rollout fills a mini-batch.

        Args:
            rows: Rows of a rollout, or the most that it can have.

        Raises:
            SettingsError: If it does not.
        """
        if rows < self.batch_size:
            raise SettingsError(
                f"Passed `n_steps={self.n_steps}`, `n_envs={self.n_envs}` and `batch_size={self.batch_size}`. A rollout"
                f" has {rows} rows at most, which is less than a mini-batch: lower `batch_size` or raise the others."
            )

    def minibatch(self, rows: int) -> int:
        """Returns the rows of a mini-batch that cut a rollout into about equal parts, none of them a single row.

        Args:
            rows: Rows of a rollout.
        """
        size = math.ceil(rows / max(1, round(rows / self.batch_size)))
        while rows > 1 and rows % size == 1:  # a single row has no spread to be normalised by
            size += 1
        return max(size, 2)

    def rollouts(self, runs: int) -> int:
        """Returns how many rollouts a training has.

        Args:
            runs: Runs side by side.
        """
        return max(1, round(self.decisions / (self.n_steps * runs)))

    def stage(self, share: float) -> Stage | None:
        """Returns the stage at a share of all decisions, ``None`` without a curriculum.

        Args:
            share: The share, below 1.
        """
        return next((stage for stage in self.curriculum if share < stage.until), None)

    def differences(self, other: TrainSettings) -> list[str]:
        """Returns what differs, as ``name: this one's -> the other's``."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in type(self).model_fields]
        return [f"{name}: {mine!r} -> {theirs!r}" for name, mine, theirs in pairs if mine != theirs]


def schedule(value: float | str) -> Callable[[float], float]:
    """Returns a function from the share of all decisions that is over to a value.

    Args:
        value: A number, or ``lin_`` and a number, which falls to 0.

    Raises:
        ValueError: If it is neither, or not above 0.
    """
    text = str(value)
    try:
        start = float(text.removeprefix("lin_"))
    except ValueError:
        start = math.nan
    if not 0.0 < start < MAX_SCHEDULE:
        raise ValueError(
            f"Passed schedule {value!r}. Pass a number above 0 and below {MAX_SCHEDULE:g}, or `lin_` and a number, as"
            " `lin_1.5e-3`."
        )
    if text.startswith("lin_"):
        return lambda share: start * (1.0 - share)
    return lambda share: start


def load_settings(path: Path | None = None, section: str | None = None, **changes: Any) -> TrainSettings:
    """Reads settings. What a file does not name is as in :class:`TrainSettings`.

    Args:
        path: A YAML file; the shipped one by default.
        section: Name in the file. By default ``default``, or the only one there is.
        changes: Fields that are to be otherwise.

    Raises:
        SettingsError: If there is no such file or section, or its values are wrong.
    """
    name = "the shipped ppo.yaml" if path is None else f"`{path}`"
    sections = _sections(path, name)
    chosen = section or (SECTION if SECTION in sections or len(sections) != 1 else next(iter(sections)))
    if chosen not in sections:
        raise SettingsError(f"There is no section {chosen!r} in {name}. It has {sorted(sections)}.")
    try:
        return TrainSettings.model_validate({**_flat(sections[chosen], name), **changes})
    except ValidationError as error:
        raise SettingsError(f"{name}, section {chosen!r}: {_said(error)}") from error


def _sections(path: Path | None, name: str) -> dict[str, Any]:
    try:
        source = resources.files("autoprec.policies") / "ppo.yaml" if path is None else path
        sections = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"Cannot read {name}: {error}") from error
    if (
        not isinstance(sections, dict)
        or not all(isinstance(values, dict) for values in sections.values())
        or not sections
    ):
        raise SettingsError(f"{name} has no settings. Write a name, as `{SECTION}:`, and settings indented below it.")
    return sections


def _flat(section: Mapping[str, Any], name: str) -> dict[str, Any]:
    values = {key: value for key, value in section.items() if key not in _FLATTENED}
    for group in _FLATTENED:
        inner = section.get(group) or {}
        if not isinstance(inner, dict):
            raise SettingsError(f"{name}: `{group}` must be a mapping, as `{{keep_bias: 0.5}}`.")
        values |= inner
    return values


def _said(error: ValidationError) -> str:
    lines = []
    for one in error.errors():
        place = ".".join(map(str, one["loc"]))
        text = str(one["msg"]).removeprefix("Value error, ")
        if one["type"] == "extra_forbidden":
            near = difflib.get_close_matches(place, TrainSettings.model_fields, n=1)
            text = f"there is no such setting.{f' Did you mean `{near[0]}`?' if near else ''}"
        elif one["type"] not in ("value_error",):
            text = f"passed {one['input']!r}. {text}."
        lines.append(f"`{place}`: {text}" if place else text)
    return " ".join(lines)
