"""What the demo trains and how: the arms (ways of training) that are compared, the two tasks, and their sizes.

The sizes are fixed numbers, measured on two cores, so that a run can be repeated; ``quick`` sizes only exercise the
machinery and say nothing about speed or accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset

from autoprec.demo import data
from autoprec.demo.models import ByteGPT, DigitsCNN

AUTOPREC = "autoprec"
BASELINE = "bf16-mixed"
INTERVAL = 10
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Args:
        name: Name in the output.
        precision: The Trainer's ``precision``.
        formats: What its compute formats are called in the output; of no use where ``callbacks`` report a map.
        callbacks: Builds the Trainer's callbacks; importable, because it runs in another process.
    """

    name: str
    precision: Any
    formats: str
    callbacks: Callable[[], Sequence[pl.Callback]] = tuple


@dataclass(frozen=True)
class Material:
    """What one run reads.

    Args:
        train: Samples in the order in which they are trained on.
        held_out: Held-out batches, the same for every point of the curve and for the loss at the end.
    """

    train: Dataset[Any]
    held_out: list[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Task:
    """One model with its data and the length of its runs.

    Args:
        name: Name in the output.
        model: Builds the module; importable.
        split: The data.
        material: Builds what a run reads from the split, the number of samples and the seed; importable.
        runs: ``(arm, seed)`` of every run.
        steps: Optimizer steps of every run.
        batch_size: Samples in a step.
        turn: Steps that a run takes before the next run has its turn.
        warmup: First steps that are left out of the paired step time; those of the whole run hold them.
        points: Points of the held-out curve after its start; the last one is the loss at the end.
    """

    name: str
    model: Callable[[], pl.LightningModule]
    split: data.Split
    material: Callable[[data.Split, int, int], Material]
    runs: tuple[tuple[Arm, int], ...]
    steps: int
    batch_size: int
    turn: int
    warmup: int = 10
    points: int = 5


def steered_callbacks() -> list[pl.Callback]:
    """Returns the callback under test. Runs are short, so it decides every ``INTERVAL`` steps, not every 50."""
    from autoprec import AutoPrecisionCallback

    return [AutoPrecisionCallback(interval=INTERVAL)]


ARMS = (
    Arm("32-true", "32-true", "fp32 100%"),
    Arm(BASELINE, BASELINE, "bf16 autocast"),
    Arm(AUTOPREC, "32-true", "", steered_callbacks),
)


def gpt_task(arms: Sequence[Arm] = ARMS, quick: bool = False) -> Task:
    """Returns the byte-level GPT: every arm with seed 0, and the static baseline once more with seed 1.

    Args:
        arms: The arms to compare.
        quick: A tiny model and few steps.
    """
    again = tuple((arm, 1) for arm in arms if arm.name == BASELINE)
    runs = tuple((arm, 0) for arm in arms) + again
    context = 32 if quick else 128
    task = Task(
        name="gpt",
        model=partial(ByteGPT, context=context),
        split=data.load_source(),
        material=partial(_gpt_material, context=context, batch_size=4, batches=2 if quick else 10),
        runs=runs,
        steps=220,
        batch_size=4,
        turn=5,
        points=4,
    )
    if not quick:
        return task
    tiny = partial(ByteGPT, width=32, layers=2, heads=2, context=context)
    return replace(task, model=tiny, steps=12, turn=3, warmup=3, points=2)


def cnn_task(arms: Sequence[Arm] = ARMS, quick: bool = False) -> Task:
    """Returns the convolutional classifier: every arm with three seeds.

    Args:
        arms: The arms to compare.
        quick: A tiny model, few steps and two seeds.
    """
    seeds = range(2) if quick else range(3)
    task = Task(
        name="cnn",
        model=DigitsCNN,
        split=data.load_digits(),
        material=_cnn_material,
        runs=tuple((arm, seed) for seed in seeds for arm in arms),
        steps=200,
        batch_size=128,
        turn=10,
        points=6,
    )
    return replace(task, model=partial(DigitsCNN, width=4), steps=12, turn=3, warmup=3, points=2) if quick else task


def _gpt_material(
    split: data.Split, samples: int, seed: int, *, context: int, batch_size: int, batches: int
) -> Material:
    length = context + 1
    train = data.Windows(split.train[0], data.random_offsets(len(split.train[0]), length, samples, seed), length)
    text = split.held_out[0]
    windows = data.Windows(text, data.spread_offsets(len(text), length, batches * batch_size), length)
    return Material(train, _batches(windows, batch_size))


def _cnn_material(split: data.Split, samples: int, seed: int) -> Material:
    train = data.Picks(split.train, data.shuffled_passes(len(split.train[0]), samples, seed))
    return Material(train, [split.held_out])


def _batches(windows: data.Windows, batch_size: int) -> list[tuple[Tensor, ...]]:
    stacked = torch.stack([windows[index][0] for index in range(len(windows))])
    return [(batch,) for batch in torch.split(stacked, batch_size)]
