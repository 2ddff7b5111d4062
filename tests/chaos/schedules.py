"""Schedules of the fault campaign: what is trained and which faults strike when, drawn from a seed, as data."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.chaos.faults import FAULTS
from tests.chaos.models import MODELS, OPTIMIZERS
from tests.chaos.settings import VARIANTS, Setting

POLICIES = ("rule", "fixed:bf16", "fixed:fp16", "fixed:int8", "map", "mixed")
KNOBS = (
    ("precision", "loss_scale", "batch_size", "clip"),
    ("precision", "loss_scale", "batch_size"),
    ("precision", "loss_scale"),
    (),
)
PRECISIONS = ("32-true", "32-true", "32-true", "bf16-mixed", "16-mixed")
KILL_EVERY = 13  # of 500 schedules 38 are killed
SHARE_ENDED = 0.35  # of the others have a fault that ends the fit
SHARE_TOGETHER = 0.35  # strike together


@dataclass(frozen=True)
class Injection:
    """One fault: its name in ``faults.FAULTS``, the batch it strikes at, and what else it needs."""

    fault: str
    batch: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Schedule(Setting):
    """A setting and the faults that strike in it.

    Args:
        faults: In the order of their batches.
    """

    faults: tuple[Injection, ...] = ()

    def to_json(self) -> str:
        """One line from which ``from_json`` makes the same schedule."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Reads what ``to_json`` wrote."""
        fields = json.loads(text)
        faults = tuple(Injection(**fault) for fault in fields.pop("faults"))
        for fault in faults:
            if fault.fault not in FAULTS:
                raise ValueError(f"Passed a schedule with the fault {fault.fault!r}. Known faults: {sorted(FAULTS)}.")
        return cls(**{**fields, "knobs": tuple(fields["knobs"])}, faults=faults)

    @property
    def is_killed(self) -> bool:
        """Whether the process is killed and the run resumed."""
        return any(injection.fault == "kill" for injection in self.faults)

    def without(self, left_out: Sequence[Injection]) -> Schedule:
        """The same with fewer faults."""
        return replace(self, faults=tuple(each for each in self.faults if each not in left_out))


def draw(seed: int, index: int) -> Schedule:
    """Returns the schedule of this number in the campaign of this seed; always the same one.

    Args:
        seed: Of the campaign.
        index: From 0.
    """
    chance = random.Random(f"{seed}/{index}")
    is_killed = index % KILL_EVERY == KILL_EVERY // 2
    model = chance.choice(list(MODELS))
    optimizer = chance.choice([each for each in OPTIMIZERS if model != "gan" or each != "two closures"])
    # without autoprec, Lightning's scaler takes no second closure, and many CPUs evaluate no LSTM in fp16
    has_scaler = model != "lstm" and optimizer != "two closures"
    precisions = [each for each in PRECISIONS if has_scaler or each != "16-mixed"]
    schedule = Schedule(
        model=model,
        policy=chance.choice(POLICIES),
        optimizer=optimizer,
        # a second closure would add to the gradients of the window's other micro-batches
        accumulate=1 if model == "gan" or optimizer == "two closures" else chance.choice((1, 1, 2, 3)),
        knobs=chance.choice(KNOBS),
        precision=chance.choice(precisions),
        clip=None if model == "gan" else chance.choice((None, None, 1.0)),
        steps=chance.randint(20, 40),
        seed=chance.randrange(1000),
        is_resumable=is_killed or chance.random() < 0.5,
        has_schedule=chance.random() < 0.5,
        saves_every=chance.randint(4, 12) if is_killed or chance.random() < 0.6 else 0,
        eval_precision=chance.choice(("base", "base", "current")),
        variant=chance.choice(("default", *VARIANTS)),
    )
    return replace(schedule, faults=_faults(chance, schedule, is_killed))


def _faults(chance: random.Random, schedule: Schedule, is_killed: bool) -> tuple[Injection, ...]:
    names = [name for name, cls in FAULTS.items() if cls.is_enabled() and cls.suits(schedule) and name != "kill"]
    if is_killed:
        names = [name for name in names if FAULTS[name].survives_restart]
        wanted = [*chance.sample(names, chance.choice((0, 1, 2))), "kill"]
    else:
        ends = [name for name in names if FAULTS[name].ends_fit]
        goes_on = [name for name in names if name not in ends]
        last = [chance.choice(ends)] if chance.random() < SHARE_ENDED else []
        wanted = [*chance.sample(goes_on, chance.choice((1, 1, 2, 2, 3, 4)) - len(last)), *last]
    drawn = [Injection(name, schedule.draw_batch(chance), FAULTS[name].draw(chance, schedule)) for name in wanted]
    if chance.random() < SHARE_TOGETHER:  # in one window or in neighbouring ones
        first = drawn[0].batch
        drawn = [replace(each, batch=first + chance.randint(0, schedule.accumulate)) for each in drawn]
    return tuple(sorted(drawn, key=lambda injection: injection.batch))
