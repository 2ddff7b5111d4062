"""Hand-made ways to set the knobs of proxy runs, and what they score. Everything learnt is compared with these.

All of them have the same knobs, the clip included: without it a comparison would credit precision with what clipping
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.engine import FORMATS
from autoprec.envs.observing import NEEDS_SCALE
from autoprec.envs.proxies import BATCH_SIZES, Task
from autoprec.envs.reward import is_diverged, score
from autoprec.envs.simulation import Simulation
from autoprec.envs.table_choice import proposed_knobs, proposed_levels
from autoprec.envs.twins import Twin
from autoprec.table import TableSettings

Array = NDArray[Any]
Choose = Callable[[Simulation], None]

GROWTH_INTERVAL = 32
"""Clean steps until a GradScaler baseline doubles its loss scale; 2000 would never come in runs this short."""


class Scores(NamedTuple):
    """What a way to set the knobs made of tasks.

    Attributes:
        score: 1.0 is the fp32 twin; a diverged run has -2.
        diverged: Whether the run diverged.
        steps: Optimizer steps attempted.
        skipped: Those that were skipped.
        level: Mean level over the run, 0 for fp32.
    """

    score: Array
    diverged: Array
    steps: Array
    skipped: Array
    level: Array


def play(tasks: Sequence[tuple[Task, Twin]], choose: Choose, *, threads: int = 1) -> Scores:
    """Plays tasks to the end of their budgets.

    Args:
        tasks: Tasks with their twins.
        choose: Called before each window of steps; writes the knobs of the simulation.
        threads: Threads to share runs out to.
    """
    simulation = Simulation([task for task, _ in tasks], threads=threads)
    try:
        simulation.restart({index: task for index, (task, _) in enumerate(tasks)})
        diverged = np.zeros(len(tasks), dtype=bool)
        steps, skipped, level, windows = np.zeros((4, len(tasks)))
        while (active := (simulation.time < simulation.budget - 1e-9) & ~diverged).any():
            choose(simulation)
            simulation.advance(active)
            diverged |= is_diverged(simulation.loss, simulation.first_loss)
            steps += simulation.windows["steps"]
            skipped += simulation.windows["skipped"]
            level += active * simulation.level.sum(axis=1) / simulation.is_unit.sum(axis=1)
            windows += active
        made = np.array([twin.progress for _, twin in tasks])
        scores = np.where(diverged, -2.0, score(simulation.first_loss, simulation.loss, made))
        return Scores(scores, diverged, steps, skipped, level / np.maximum(windows, 1))
    finally:
        simulation.close()


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One format, batch size and clip for the whole run; with fp16 or below a GradScaler.

    Args:
        format: One of the engine's formats. A run without it takes the next wider one that it has.
        batch: Batch size.
        clip: In units of the median norm.
    """

    format: str
    batch: int = 32
    clip: float = 1.5

    def __call__(self, simulation: Simulation) -> None:
        """Sets the knobs."""
        wanted = FORMATS.index(self.format)
        level = ((simulation.ladder >= 0) & (simulation.ladder <= wanted)).sum(axis=1) - 1
        simulation.level = np.where(simulation.is_unit, level[:, None], 0)
        simulation.batch_index = np.full(len(simulation), BATCH_SIZES.index(self.batch))
        simulation.clip_index = np.full(len(simulation), CLIP_MULTIPLIERS.index(self.clip))
        simulation.growth_interval = np.full(len(simulation), GROWTH_INTERVAL * (wanted >= FORMATS.index("fp16")))
        is_first = simulation.time <= simulation.last_time * 1.5
        needs_scale = NEEDS_SCALE[np.maximum(simulation.formats[:, 0], 0)]
        simulation.loss_scale = np.where(is_first & needs_scale, 2.0**16, simulation.loss_scale)
        simulation.probes = np.zeros(len(simulation), dtype=bool)


@dataclass(frozen=True, kw_only=True)
class Switched:
    """One constant in the first half of the budget and another one in the second.

    Args:
        first: The former.
        then: The latter.
    """

    first: Constant
    then: Constant

    def __call__(self, simulation: Simulation) -> None:
        """Sets the knobs."""
        self.first(simulation)
        is_second = simulation.share >= 0.5
        level, growth, scale = simulation.level, simulation.growth_interval, simulation.loss_scale
        self.then(simulation)
        simulation.level = np.where(is_second[:, None], simulation.level, level)
        simulation.growth_interval = np.where(is_second, simulation.growth_interval, growth)
        simulation.loss_scale = np.where(is_second, simulation.loss_scale, scale)


class RandomMoves:
    """Moves every knob at random by one, or not.

    Args:
        seed: Of the private generator.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.Generator(np.random.PCG64(seed))

    def __call__(self, simulation: Simulation) -> None:
        """Sets the knobs."""
        s, draw = simulation, self._rng.integers
        moved = s.level + draw(-1, 2, s.level.shape)
        s.level = np.where(s.is_unit, np.clip(moved, 0, (s.levels - 1)[:, None]), 0)
        s.batch_index = np.clip(s.batch_index + draw(-1, 2, len(s)), 0, len(BATCH_SIZES) - 1)
        s.clip_index = np.clip(s.clip_index + draw(-1, 2, len(s)), 0, len(CLIP_MULTIPLIERS) - 1)
        s.loss_scale = np.clip(s.loss_scale * 4.0 ** draw(-1, 2, len(s)), 1.0, 2.0**24)
        s.probes = np.zeros(len(s), dtype=bool)


@dataclass(frozen=True, kw_only=True)
class Table:
    """What the table of costs and errors proposes, always accepted.

    Args:
        settings: Its parameters.
    """

    settings: TableSettings = TableSettings()

    def __call__(self, simulation: Simulation) -> None:
        """Sets the knobs."""
        s, settings = simulation, self.settings
        s.level = proposed_levels(s, settings)
        s.loss_scale, s.batch_index, s.clip_index = proposed_knobs(s, settings, s.level)
        s.probes = s.due_probes(settings.probe_every)
