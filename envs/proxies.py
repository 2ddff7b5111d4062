"""What proxies train on: distributions of tasks, single tasks drawn from them by seed, and banks of tasks.

What lives here: everything random about a task. A seed and a distribution give one task, always the same. What does
not: running it (``engine``), paying for it (``costs``) and its fp32 twin (``twins``).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoprec.envs.architectures import ARCHITECTURES, INPUT_WIDTH, Graph, multiplications
from autoprec.envs.devices import DEVICES, LAYER_WIDTHS, profile_of
from autoprec.envs.engine import EVENTS, FORMATS, MAX_EVENTS, MAX_UNITS, OPTIMIZERS, SPEC
from autoprec.envs.profiles import NOMINAL, PROFILES, Profile, Range
from autoprec.readings import LAYER_KINDS

BATCH_SIZES = (8, 16, 32, 64, 128)
"""Batch sizes that a knob can take."""
BASE_BATCH = BATCH_SIZES.index(32)
"""Where it starts, and what times are relative to."""
LADDERS: tuple[tuple[str, ...], ...] = (
    ("fp32", "bf16", "fp16", "fp8-unscaled"),
    ("fp32", "bf16", "fp16", "fp8"),
    ("fp32", "bf16", "fp16", "fp8", "int8"),
    ("fp32", "bf16", "fp16", "fp8", "int8", "fp4"),
    ("fp32", "bf16", "fp16", "int8", "int4"),
)
"""Formats that a task may use, from wide to narrow."""
MAX_LEVELS = max(map(len, LADDERS))
_LIMITS = {
    "probe_cost": (0.0, 1e6),
    "lr_bits": (-64.0, 64.0),
    "label_noise": (0.0, 1.0),
    "loss_decades": (-30.0, 30.0),
    "activation_bits": (-100.0, 100.0),
    "gradient_bits": (-100.0, 100.0),
    "mean": (-1e6, 1e6),
}
"""Where ranges of a distribution lie, so that what is drawn from them is a number."""
REGIMES = ("standard", "drift", "late")
"""standard: ranges and events; drift: ranges that move at first and settle; late: long runs with a falling LR."""
TABLES = ("exact", "wrong", "hidden")
"""What the table of costs says. Measured step time is always true."""


class Distribution(BaseModel):
    """What tasks are drawn from.

    Args:
        architectures: Families of models, and how often each is drawn where several fit.
        units: Numbers of units.
        widths: Widths of layers.
        optimizers: Optimizers, equally likely.
        regimes: Weight of each of ``REGIMES``.
        tables: Weight of each of ``TABLES``.
        ladders: Weight of each of ``LADDERS``; late tasks take the last three only.
        profiles: Kinds of hardware, equally likely.
        devices: Real devices, equally likely.
        device_share: Share of the tasks that run on a real device.
        layer_widths: Widths of layers that a real device is profiled with, equally likely.
        table_error: Deviation of a wrong cost, log2.
        costly_probes: Share of the tasks in which looking at errors costs time.
        probe_cost: What a look then costs, in fp32 steps.
        time_noise: Relative standard deviation of a measured step time. Charged times are exact.
        lr_bits: Deviation of the learning rate, log2.
        label_noise: Share of wrong labels; late tasks have a tenth.
        loss_decades: Magnitude of the loss, log10.
        activation_bits: Range of activations, log2.
        gradient_bits: Range of gradients, log2.
        large_means: Share of the layers whose activations have a large mean.
        mean: That mean, in units of the layer's range.
        budget: fp32 steps at the base batch size that a run may take; ``late_budget`` for late tasks.
        late_budget: See ``budget``.
        steps: Steps between two decisions; ``late_steps`` in late tasks.
        late_steps: See ``steps``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    architectures: dict[str, float] = Field(
        default={"mlp": 0.7, "cnn": 0.1, "transformer": 0.1, "recurrent": 0.15}, validate_default=True
    )
    units: tuple[int, ...] = (3, 4, 5, 6)
    widths: tuple[int, ...] = (32, 48, 64)
    optimizers: tuple[str, ...] = OPTIMIZERS
    regimes: tuple[float, float, float] = (0.5, 0.25, 0.25)
    tables: tuple[float, float, float] = (0.5, 0.25, 0.25)
    ladders: tuple[float, ...] = (0.4, 0.2, 0.15, 0.15, 0.1)
    profiles: tuple[str, ...] = tuple(PROFILES)
    devices: tuple[str, ...] = tuple(DEVICES)
    device_share: float = Field(default=0.5, ge=0.0, le=1.0)
    layer_widths: tuple[int, ...] = LAYER_WIDTHS
    table_error: float = Field(default=0.7, ge=0.0, le=16.0)
    costly_probes: float = Field(default=0.3, ge=0.0, le=1.0)
    probe_cost: Range = Range(low=0.5, high=2.0)
    time_noise: float = Field(default=0.02, ge=0.0, le=0.5)
    lr_bits: Range = Range(low=-1.5, high=1.0)
    label_noise: Range = Range(low=0.0, high=0.3)
    loss_decades: Range = Range(low=-6.0, high=1.0)
    activation_bits: Range = Range(low=-2.0, high=5.0)
    gradient_bits: Range = Range(low=-4.0, high=4.0)
    large_means: float = Field(default=0.4, ge=0.0, le=1.0)
    mean: Range = Range(low=4.0, high=32.0)
    budget: int = Field(default=240, ge=16, le=10_000_000)
    late_budget: int = Field(default=720, ge=16, le=10_000_000)
    steps: int = Field(default=8, ge=1, le=16)
    late_steps: int = Field(default=16, ge=1, le=16)

    @model_validator(mode="after")
    def _check(self) -> Distribution:
        known = {"architectures": ARCHITECTURES, "optimizers": OPTIMIZERS, "profiles": PROFILES, "devices": DEVICES}
        for name, allowed in known.items():
            unknown = [value for value in getattr(self, name) if value not in allowed]
            if unknown or not getattr(self, name):
                raise ValueError(f"Passed `{name}={getattr(self, name)}`. Choose at least one of {sorted(allowed)}.")
        for name, values in (("widths", self.widths), ("units", self.units)):
            if not values:
                raise ValueError(f"Passed `{name}=()`. Give one at least.")
        self._check_weights()
        self._check_ranges()
        if any(width % 32 and width % 16 for width in self.widths) or min(self.widths) < 32:
            raise ValueError(f"Passed `widths={self.widths}`. Widths are multiples of 16 from 32 on.")
        if not self.layer_widths or min(self.layer_widths) < 1:
            raise ValueError(f"Passed `layer_widths={self.layer_widths}`. Give one width at least, each 1 or more.")
        if not all(self.families(units) for units in self.units) or max(self.units) > MAX_UNITS:
            raise ValueError(f"Passed `units={self.units}`. One of them fits none of {self.architectures}.")
        return self

    def _check_weights(self) -> None:
        groups = {name: getattr(self, name) for name in ("regimes", "tables", "ladders")}
        groups |= {"architectures": tuple(self.architectures.values())}
        lengths = {"ladders": len(LADDERS)}
        for name, weights in groups.items():
            is_number = all(0.0 <= weight < math.inf for weight in weights)
            if not (is_number and 0.0 < sum(weights) < math.inf) or len(weights) != lengths.get(name, len(weights)):
                raise ValueError(
                    f"Passed `{name}={getattr(self, name)}`. Weights are finite and not negative, their sum is above 0"
                    f"{f', and there are {lengths[name]}' if name in lengths else ''}."
                )
        for units in self.units:
            families = self.families(units)
            if families and not sum(self.architectures[name] for name in families) > 0.0:
                raise ValueError(
                    f"Passed `architectures={self.architectures}`. None that can have {units} units has a weight above"
                    " 0: raise one, or leave that number of units out."
                )

    def _check_ranges(self) -> None:
        for name, (least, most) in _LIMITS.items():
            given: Range = getattr(self, name)
            if not least <= given.low <= given.high <= most:
                raise ValueError(f"Passed `{name}` from {given.low} to {given.high}. It lies within {least} to {most}.")

    def families(self, units: int) -> list[str]:
        """Returns the architectures that can have a number of units."""
        return [name for name in self.architectures if units in ARCHITECTURES[name].units]

    def without(self, architecture: str) -> Distribution:
        """Returns the same distribution without one architecture, to be held out."""
        kept = {name: weight for name, weight in self.architectures.items() if name != architecture}
        return self.model_copy(update={"architectures": kept})

    def only(self, architecture: str) -> Distribution:
        """Returns the same distribution with one architecture alone."""
        units = tuple(count for count in self.units if count in ARCHITECTURES[architecture].units)
        return self.model_copy(update={"architectures": {architecture: 1.0}, "units": units})

    def on(self, hardware: str) -> Distribution:
        """Returns the same distribution on one kind of hardware or one real device alone."""
        if hardware in DEVICES:
            return self.model_copy(update={"devices": (hardware,), "device_share": 1.0})
        return self.model_copy(update={"profiles": (profile_of(hardware).name,), "device_share": 0.0})

    def digest(self) -> str:
        """Returns a short name of everything that tasks depend on, the numbers of the profiles included."""
        on_devices = (profile_of(name, width) for name in self.devices for width in self.layer_widths)
        profiles = (*map(profile_of, self.profiles), *on_devices)
        text = "".join((self.model_dump_json(), *(profile.model_dump_json() for profile in profiles)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


DEEP = Distribution(units=(8, 10), architectures={"mlp": 0.8, "transformer": 0.2})
WIDE = Distribution(widths=(96,))
_TRAIN = Distribution()
BANKS: dict[str, tuple[Distribution, int]] = {
    "train": (_TRAIN, 0),
    "val": (_TRAIN, 1_000_000),
    "test": (_TRAIN, 2_000_000),
    "deep": (DEEP, 3_000_000),
    "wide": (WIDE, 4_000_000),
}
"""Banks of tasks: a distribution and the first of its seeds. Seeds of banks never meet."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task: a training and the hardware that it runs on.

    Attributes:
        seed: Where it was drawn.
        architecture: Name of the family.
        regime: One of ``REGIMES``.
        table_kind: One of ``TABLES``.
        profile: Kind of hardware, or real device.
        spec: A record for the engine.
        kinds: Kind of each unit, an index in ``LAYER_KINDS``.
        depth: Place of each unit, 0 to 1.
        parameter_share: Share of each unit in the parameters.
        compute_share: The same of the compute.
        cost: ``[units, formats]``: compute of each unit in each format; all in fp32 sum to 1.
        table: The same as a table tells it; NaN where it is hidden.
        overhead: Fixed time of a step.
        batch_exponent: Compute grows with the batch size to this power.
        cast_cost: Compute of a change of format between neighbours.
        switch_cost: Time of giving a layer another format, in fp32 steps.
        probe_cost: Time of looking at errors, in fp32 steps.
        time_noise: Relative standard deviation of a measured step time.
        ladder: Formats that may be used, from wide to narrow, as indices in ``FORMATS``.
        lr: Learning rate.
        warmup: Share of the budget in which it rises.
        decays: Whether it falls to a hundredth by a cosine.
        budget: Time of a run, in fp32 steps at the base batch size.
        steps: Steps between two decisions.
    """

    seed: int
    architecture: str
    regime: str
    table_kind: str
    profile: str
    spec: NDArray[Any]
    kinds: NDArray[np.intp]
    depth: NDArray[np.float64]
    parameter_share: NDArray[np.float64]
    compute_share: NDArray[np.float64]
    cost: NDArray[np.float64]
    table: NDArray[np.float64]
    overhead: float
    batch_exponent: float
    cast_cost: float
    switch_cost: float
    probe_cost: float
    time_noise: float
    ladder: tuple[int, ...]
    lr: float
    warmup: float
    decays: bool
    budget: int
    steps: int

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.kinds)


def draw_task(seed: int, distribution: Distribution) -> Task:
    """Draws a task.

    Args:
        seed: Which one; the same seed gives the same task.
        distribution: What it is drawn from.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed, 0xA070]))
    units = int(rng.choice(distribution.units))
    families = distribution.families(units)
    weights = tuple(distribution.architectures[name] for name in families)
    architecture = str(rng.choice(families, p=_normalised(weights)))
    regime = str(rng.choice(REGIMES, p=_normalised(distribution.regimes)))
    optimizer = str(rng.choice(distribution.optimizers))
    graph = ARCHITECTURES[architecture].build(units, int(rng.choice(distribution.widths)))
    is_late = regime == "late"
    spec = _draw_spec(rng, distribution, graph, optimizer, regime, seed)
    lr = ARCHITECTURES[architecture].lr[optimizer] * 2.0 ** _uniform(rng, distribution.lr_bits)
    sizes = np.array([wide * out + out for _, wide, out in graph.shapes], dtype=np.float64)
    compute = multiplications(graph)
    return Task(
        seed=seed,
        architecture=architecture,
        regime=regime,
        spec=spec,
        kinds=np.array([LAYER_KINDS.index(kind) for kind in graph.kinds], dtype=np.intp),
        depth=np.linspace(0.0, 1.0, units),
        parameter_share=sizes / sizes.sum(),
        compute_share=compute / compute.sum(),
        ladder=_draw_ladder(rng, distribution, is_late),
        lr=lr,
        warmup=0.05 if rng.random() < 0.5 else 0.0,
        decays=is_late or rng.random() < 0.3,
        budget=distribution.late_budget if is_late else distribution.budget,
        steps=distribution.late_steps if is_late else distribution.steps,
        **_draw_hardware(rng, distribution, compute / compute.sum()),
    )


class Bank:
    """The tasks of one bank in the order of their seeds.

    Args:
        name: One of ``BANKS``.
        size: How many tasks.
        distribution: Instead of the bank's own, for a narrower question. Seeds stay the bank's.

    Raises:
        ValueError: If there is no such bank, or it has no room for so many.
    """

    def __init__(self, name: str, size: int, distribution: Distribution | None = None) -> None:
        if name not in BANKS:
            raise ValueError(f"Passed `Bank({name!r}, ...)`. Banks are {sorted(BANKS)}.")
        if not 1 <= size <= 1_000_000:
            raise ValueError(f"Passed `Bank({name!r}, {size})`. A bank has 1 to 1000000 tasks.")
        own, self.first_seed = BANKS[name]
        self.distribution = own if distribution is None else distribution
        self.name = name
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(self.size))

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self.size:
            raise IndexError(f"Passed index {index} to a bank of {self.size} tasks.")
        return draw_task(self.first_seed + index, self.distribution)


def _uniform(rng: np.random.Generator, limits: Range) -> float:
    return float(rng.uniform(limits.low, limits.high))


def _normalised(weights: tuple[float, ...]) -> NDArray[np.float64]:
    return np.array(weights) / sum(weights)


def _draw_ladder(rng: np.random.Generator, distribution: Distribution, is_late: bool) -> tuple[int, ...]:
    weights = np.array(distribution.ladders)
    if is_late and weights[2:].sum() > 0:
        weights[:2] = 0.0
    names = LADDERS[int(rng.choice(len(LADDERS), p=weights / weights.sum()))]
    return tuple(FORMATS.index(name) for name in names)


def _draw_hardware(rng: np.random.Generator, distribution: Distribution, share: NDArray[np.float64]) -> dict[str, Any]:
    profile = _draw_profile(rng, distribution)
    jitter = 1.0 + profile.jitter * rng.uniform(-1.0, 1.0, (len(share), len(FORMATS)))
    jitter[:, 0] = 1.0
    cost = share[:, None] * np.array(profile.costs()) * jitter
    kind = str(rng.choice(TABLES, p=_normalised(distribution.tables)))
    error = 2.0 ** rng.normal(0.0, distribution.table_error, cost.shape)
    error[:, 0] = 1.0
    tables = {"exact": cost, "wrong": cost * error, "hidden": np.full_like(cost, np.nan)}
    is_costly = rng.random() < distribution.costly_probes
    return {
        "profile": profile.name,
        "cost": cost,
        "table": tables[kind],
        "table_kind": kind,
        "overhead": _uniform(rng, profile.overhead),
        "batch_exponent": _uniform(rng, profile.batch_exponent),
        "cast_cost": profile.cast_cost,
        "switch_cost": profile.switch_cost,
        "probe_cost": _uniform(rng, distribution.probe_cost) if is_costly else 0.0,
        "time_noise": distribution.time_noise,
    }


def _draw_profile(rng: np.random.Generator, distribution: Distribution) -> Profile:
    if distribution.device_share > 0.0 and rng.random() < distribution.device_share:
        return profile_of(str(rng.choice(distribution.devices)), int(rng.choice(distribution.layer_widths)))
    return profile_of(str(rng.choice(distribution.profiles)))


def nominal_costs(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns what units would cost on hardware that nothing is known about.

    Args:
        share: Share of each unit in the compute, ``[...]``.

    Returns:
        ``[..., formats]``.
    """
    costs: NDArray[np.float64] = share[..., None] * np.array(NOMINAL.costs())
    return costs


def _draw_spec(
    rng: np.random.Generator, distribution: Distribution, graph: Graph, optimizer: str, regime: str, seed: int
) -> NDArray[Any]:
    spec: NDArray[Any] = np.zeros((), SPEC)
    units, is_late = len(graph.kinds), regime == "late"
    spec["seed"] = (seed, 0xA070)
    spec["nodes"][: len(graph.nodes)] = graph.nodes
    settings = {
        "node_count": len(graph.nodes),
        "unit_count": units,
        "classes": 8,
        "max_batch": max(BATCH_SIZES),
        "evaluation_samples": 128,
        "teacher_width": 2 * INPUT_WIDTH,
        "optimizer": OPTIMIZERS.index(optimizer),
        "label_noise": _uniform(rng, distribution.label_noise) * (0.1 if is_late else 1.0),
        "outlier_share": 0.01 if rng.random() < 0.3 else 0.0,
        "outlier_factor": 2.0 ** rng.uniform(2.0, 5.0),
        "feature_spread": 0.5,
        "loss_factor": 10.0 ** _uniform(rng, distribution.loss_decades),
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.01 if optimizer == "adamw" else 0.0,
    }
    for name, value in settings.items():
        spec[name] = value
    spec["activation_bits"][:units] = [_uniform(rng, distribution.activation_bits) for _ in range(units)]
    spec["gradient_bits"][:units] = [_uniform(rng, distribution.gradient_bits) for _ in range(units)]
    means = [_uniform(rng, distribution.mean) for _ in range(units)]
    spec["activation_mean"][:units] = np.where(rng.random(units) < distribution.large_means, means, 0.0)
    is_drifting = regime == "drift"
    spec["drift_bits"][:units] = rng.uniform(2.0, 10.0, units) * is_drifting
    spec["drift_noise"][:units] = rng.uniform(2.0, 6.0, units) * is_drifting
    spec["drift_steps"] = rng.uniform(30.0, 80.0) if is_drifting else 1.0
    events = _draw_events(rng, units, 1 if regime == "drift" else 3, distribution.late_budget if is_late else 400)
    spec["event_count"] = len(events)
    spec["events"][: len(events)] = events
    return spec


def _draw_events(
    rng: np.random.Generator, units: int, most: int, horizon: int
) -> list[tuple[int, int, int, int, float]]:
    events = []
    for _ in range(int(rng.integers(0, most + 1))):
        name = "activation" if rng.random() < 0.5 else "gradient"
        start, length = int(rng.integers(20, horizon)), int(rng.integers(16, 65))
        unit, bits = int(rng.integers(units)), float(rng.uniform(6.0, 14.0))
        events.append((EVENTS.index(name), unit, start, length, bits))
    for _ in range(int(rng.integers(0, 3))):
        start, length = int(rng.integers(20, horizon)), int(rng.integers(1, 5))
        events.append((EVENTS.index("spike"), 0, start, length, float(rng.uniform(3.0, 50.0))))
    return events[:MAX_EVENTS]
