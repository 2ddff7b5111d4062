"""What a comparison is asked for, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autoprec import __version__
from autoprec.compare.arms import DEFAULT, Arm, parse_arms
from autoprec.compare.gate import Clock
from autoprec.compare.targets import Target
from autoprec.machine import version

SEEDS = 3
QUICK_STEPS, QUICK_SEEDS, QUICK_INTERVAL = 12, 2, 4
OUT, QUICK_OUT = Path("autoprec-compare"), Path("autoprec-compare-quick")
_HIGHER_IS_BETTER = ("acc", "auc", "f1", "precision", "recall", "iou", "dice", "bleu", "rouge", "psnr", "ssim", "r2")


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """What is compared, for how long, and by what it is judged.

    Args:
        target: The user's training.
        arms: Ways of training.
        seeds: Seeds, from 0 on.
        steps: Optimizer steps of every run; ``None`` for the target's whole training.
        minutes: No new round of turns starts after them; all runs then have equally many steps.
        threads: Threads for one operation.
        clock: What measures steps on a CPU; ``None`` for the processor time at one thread and the wall otherwise.
        metric: What is compared at the end; ``None`` for ``val_loss`` or what is nearest to it.
        mode: Whether lower or higher is better; ``None`` to tell by the name.
        margin: Difference of the metric that counts as none; ``None`` for one percent of the best static arm's.
        target_loss: Value of the metric that times are counted to.
        interval: Steps between decisions of a callback that is added.
        evaluate_every: Steps between validations, ``None`` for the target's own.
        together: Runs that take turns at a time; ``None`` for all arms of a seed.
        consistency: Run an arm once more with other instructions.
        is_quick: Whether runs are only made to see that they run.
        out: Folder for results.
    """

    target: Target
    arms: tuple[Arm, ...] = ()
    seeds: int = SEEDS
    steps: int | None = None
    minutes: float = 30.0
    threads: int = 1
    clock: Clock | None = None
    metric: str | None = None
    mode: Literal["min", "max"] | None = None
    margin: float | None = None
    target_loss: float | None = None
    interval: int | None = None
    evaluate_every: int | None = None
    together: int | None = None
    consistency: bool = False
    is_quick: bool = False
    out: Path = OUT

    def __post_init__(self) -> None:
        """Validates the fields."""
        for name in ("seeds", "threads", "steps", "interval", "evaluate_every", "together"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Passed `--{name.replace('_', '-')} {value}`. It must be an int >= 1.")
        if not self.minutes > 0:
            raise ValueError(f"Passed `--minutes {self.minutes:g}`. It must be a number above 0.")
        if self.margin is not None and not (math.isfinite(self.margin) and self.margin > 0):
            raise ValueError(f"Passed `--margin {self.margin:g}`. It must be a finite number above 0.")
        for name, allowed in (("clock", ("wall", "cpu")), ("mode", ("min", "max"))):
            value = getattr(self, name)
            if value not in (None, *allowed):
                raise ValueError(f"Passed `--{name} {value}`. It must be one of {', '.join(allowed)}.")
        if not self.arms:
            object.__setattr__(self, "arms", parse_arms(DEFAULT))

    @property
    def used_clock(self) -> Clock:
        """The clock of a run on a CPU."""
        return self.clock or ("cpu" if self.threads == 1 else "wall")

    def identity(self) -> dict[str, Any]:
        """Returns everything that the figures of one run depend on, as JSON can hold it.

        Arms, seeds and what only the verdict depends on are left out: they may change while stored runs stay.
        """
        return {
            "target": self.target.text,
            "file": self.target.file,
            "arguments": list(self.target.arguments),
            "steps": self.steps,
            "threads": self.threads,
            "clock": self.used_clock,
            "interval": self.interval,
            "evaluate_every": self.evaluate_every,
            "autoprec": __version__,
            **{name: version(name) for name in ("torch", "lightning")},
        }


def with_defaults(chosen: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Returns the user's settings with what they leave open.

    Args:
        chosen: Settings by their names, ``None`` for what the user did not set.
        quick: Whether the comparison only shows that everything runs. What the user set holds all the same.
    """
    defaults: dict[str, Any] = {"seeds": SEEDS, "out": OUT}
    if quick:
        defaults = {"steps": QUICK_STEPS, "seeds": QUICK_SEEDS, "interval": QUICK_INTERVAL, "out": QUICK_OUT}
    missing = {name: value for name, value in defaults.items() if chosen.get(name) is None}
    return {**chosen, **missing, "is_quick": quick}


def mode_of(metric: str) -> Literal["min", "max"]:
    """Returns whether lower or higher is better, by the name of a metric.

    Args:
        metric: The name.
    """
    words = metric.lower()
    return "max" if "loss" not in words and any(word in words for word in _HIGHER_IS_BETTER) else "min"
