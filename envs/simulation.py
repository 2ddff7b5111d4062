"""Many proxy runs side by side: their knobs, their time, and what is known about them.

What lives here: one window after another of every run, charged with simulated time, and what is known afterwards. What
does not: what to do next (``proxy_env``, controllers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.cost_estimate import CostEstimate
from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.costs import Charges, begin_estimate, learning_rate, measured
from autoprec.envs.engine import FORMATS, MAX_STEPS, Engine
from autoprec.envs.profiles import NOMINAL
from autoprec.envs.proxies import BASE_BATCH, BATCH_SIZES, MAX_LEVELS, Task, nominal_costs

Array = NDArray[Any]

HISTORY = 32
"""Steps that histories look back."""
_LAST_CLIP = len(CLIP_MULTIPLIERS) - 1


class Simulation:
    """Runs tasks window by window.

    Attributes are arrays over runs, or ``[runs, units]`` padded to the largest number of units. Knobs may be written
    between windows: ``level`` (place in the task's ladder, 0 is fp32), ``batch_index``, ``clip_index``, ``loss_scale``,
    ``probes``.

    Args:
        tasks: One task for each run. ``restart`` may put another one there with as many units.
        threads: Threads to share runs out to.
    """

    def __init__(self, tasks: Sequence[Task], *, threads: int = 1) -> None:
        runs, units = len(tasks), max(task.units for task in tasks)
        self.tasks = list(tasks)
        self.engine = Engine(runs, threads=threads)
        self.is_unit = np.arange(units) < np.array([task.units for task in tasks])[:, None]
        shape = (runs, units)
        self.charges = Charges(np.zeros((*shape, len(FORMATS))), self.is_unit, *np.ones((3, runs)))
        self.table = Charges(np.zeros((*shape, len(FORMATS))), self.is_unit, *np.ones((3, runs)))
        self.estimate = CostEstimate(runs, units, MAX_LEVELS, len(BATCH_SIZES))
        self.ladder = np.full((runs, MAX_LEVELS), -1)
        self.budget, self.steps, self.time, self.last_time = np.ones((4, runs))
        self.measured_time, self.time_noise = np.ones((2, runs))
        """Step time of the last window as a clock shows it, and the relative deviation of clocks."""
        self.seeds = np.zeros(runs, dtype=np.uint64)
        self.level, self.last_formats = np.zeros((2, *shape), dtype=np.int64)
        self.batch_index, self.clip_index = np.zeros((2, runs), dtype=np.int64)
        self.loss_scale, self.loss, self.first_loss, self.first_step_time = np.ones((4, runs))
        self.learning_rate, self.largest_learning_rate = np.zeros((2, runs))
        self.growth_interval = np.zeros(runs, dtype=np.int64)
        self.probes, self.needs_probe = np.ones((2, runs), dtype=bool)
        self.since_probe, self.since_change = np.zeros(runs, np.int64), np.zeros(shape, np.int64)
        self.errors = np.full((*shape, 3, len(FORMATS)), np.nan)
        self.underflow = np.full_like(self.errors, np.nan)
        self.subnormal = np.full((*shape, len(FORMATS)), np.nan)
        self.losses, self.norms, self.scales = np.full((3, runs, HISTORY), np.nan)
        self.activation_amax, self.gradient_norm = np.full((2, *shape, HISTORY), np.nan)
        self.windows = self.engine.windows

    def __len__(self) -> int:
        return len(self.tasks)

    def close(self) -> None:
        """Frees the trainings."""
        self.engine.close()

    @property
    def formats(self) -> Array:
        """``[runs, units]``: the engine's format of each unit."""
        return np.take_along_axis(self.ladder, self.level, axis=1)

    @property
    def levels(self) -> Array:
        """How many formats each run may use."""
        return np.asarray((self.ladder >= 0).sum(axis=1))

    @property
    def share(self) -> Array:
        """Share of its budget that each run has used."""
        return self.time / self.budget

    def restart(self, chosen: dict[int, Task]) -> None:
        """Begins runs anew, each with one measured step in fp32 that is charged.

        Args:
            chosen: A task for each run to restart, with as many units as it had.
        """
        for index, task in chosen.items():
            self._place(index, task)
        begin_estimate(self.estimate, self.table, self.ladder, chosen)
        rest = np.ones(len(self), dtype=bool)
        rest[list(chosen)] = False
        knobs = self.engine.knobs
        knobs["is_evaluated"], knobs["probed_formats"], knobs["steps"] = ~rest, 0, 0
        knobs["batch"] = BATCH_SIZES[BASE_BATCH]
        kept = self.windows[rest].copy()
        first = self.engine.run()["evaluation_loss"].astype(float)
        self.loss[~rest] = self.first_loss[~rest] = first[~rest]
        self._run(np.where(rest, 0, 1), is_probing=~rest)
        self.first_step_time[~rest] = self.measured_time[~rest]
        self.windows[rest] = kept

    def advance(self, active: Array | None = None) -> None:
        """Runs one window of every run, as long as its budget allows.

        Args:
            active: ``[runs]``: which runs move; all by default.
        """
        step_time = self.charges.step_time(self.formats, self.batch_index)
        switching = self._switch_time()
        probing = self.probes.copy()
        probe_time = np.array([task.probe_cost for task in self.tasks]) * probing
        left = self.budget - self.time - switching - probe_time
        steps = np.clip(np.floor(left / step_time + 1e-9), 0, self.steps).astype(np.int64)
        if active is not None:
            steps, probing = np.where(active, steps, 0), probing & active
        self._run(steps, is_probing=probing & (steps > 0))
        is_over = steps < self.steps
        self.time = np.where(is_over if active is None else is_over & active, self.budget, self.time)

    def due_probes(self, every: int) -> Array:
        """Returns for which runs it is time to look at errors: always, unless that costs time.

        Args:
            every: Windows from one look that costs time to the next.
        """
        is_free = np.array([task.probe_cost == 0.0 for task in self.tasks])
        return is_free | (self.since_probe + 1 >= every)

    def assumed_costs(self, optimism: float | None) -> tuple[Array, Array]:
        """Returns what each format of the ladders costs, and casts between units, in any unit of a run's own.

        Args:
            optimism: Standard deviations that little-known costs are taken below what step times let expect; ``None``
                takes the table as it is.

        Returns:
            ``[runs, units, formats]`` and ``[runs, units - 1]``.
        """
        casts = self.table.cast_cost[:, None] * self.is_unit[:, 1:]
        if optimism is None:
            return self.table.cost, casts
        costs = np.full(self.table.cost.shape, np.inf)
        estimated = self.estimate.optimistic(optimism)
        for level in range(self.ladder.shape[1] - 1, -1, -1):  # backwards: format 0 stands behind the end of a ladder
            at = np.maximum(self.ladder[:, level], 0)
            costs[np.arange(len(self)), :, at] = estimated[:, :, level]
        return costs, casts / (1.0 + self.table.overhead)[:, None]

    def worst_errors(self) -> Array:
        """Returns ``[runs, units, formats]``: the largest error of activations, weights and gradients."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.errors.max(axis=2))

    def _place(self, index: int, task: Task) -> None:
        units = task.units
        if units != self.is_unit[index].sum():
            raise ValueError(f"Passed a task with {units} units to a run that has {self.is_unit[index].sum()}.")
        self.engine.start(index, task.spec)
        self.tasks[index] = task
        known = not np.isnan(task.table).any()
        table = task.table if known else nominal_costs(task.compute_share)
        guessed = (NOMINAL.overhead.middle, NOMINAL.batch_exponent.middle)
        true = (task.overhead, task.batch_exponent)
        for charges, cost, rest in ((self.charges, task.cost, true), (self.table, table, true if known else guessed)):
            charges.cost[index, :units] = cost
            charges.overhead[index], charges.batch_exponent[index] = rest
            charges.cast_cost[index] = task.cast_cost
        self.ladder[index] = -1
        self.ladder[index, : len(task.ladder)] = task.ladder
        self.budget[index], self.steps[index] = task.budget, task.steps
        self.time_noise[index], self.seeds[index] = task.time_noise, task.seed
        for name in ("time", "level", "since_probe", "since_change", "last_formats", "growth_interval"):
            getattr(self, name)[index] = 0
        self.largest_learning_rate[index] = 0.0
        self.batch_index[index], self.clip_index[index], self.loss_scale[index] = BASE_BATCH, _LAST_CLIP, 1.0
        for name in ("errors", "underflow", "subnormal", "losses", "norms", "scales"):
            getattr(self, name)[index] = np.nan
        self.activation_amax[index] = self.gradient_norm[index] = np.nan

    def _switch_time(self) -> Array:
        cost = np.array([task.switch_cost for task in self.tasks])
        return np.asarray(cost * ((self.formats != self.last_formats) & self.is_unit).sum(axis=1))

    def _run(self, steps: Array, is_probing: Array) -> None:
        runs, formats = steps > 0, self.formats
        step_time = self.charges.step_time(formats, self.batch_index)
        spent = step_time * steps + np.where(runs, self._switch_time(), 0.0)
        spent += np.array([task.probe_cost for task in self.tasks]) * is_probing
        self._set_knobs(steps, spent, is_probing)
        self.engine.run()
        self.time = self.time + spent
        self.last_time = np.where(runs, step_time, self.last_time)
        clock = measured(step_time, self.time_noise, self.seeds, self.windows["total_steps"])
        self.measured_time = np.where(runs, clock, self.measured_time)
        self._learn_costs(runs)
        self.loss_scale = np.where(runs, self.windows["loss_scale"], self.loss_scale)
        self.loss = np.where(runs, self.windows["evaluation_loss"], self.loss)
        self._remember(steps, is_probing)
        changed = (formats != self.last_formats) & runs[:, None]
        applied = (steps - self.windows["skipped"])[:, None]
        self.since_change = np.where(changed, 0, self.since_change) + applied * self.is_unit
        self.last_formats = np.where(runs[:, None], formats, self.last_formats)

    def _learn_costs(self, runs: Array) -> None:
        relative = self.measured_time / self.first_step_time
        self.estimate.observe(self.level, self.batch_index, relative, self.cast_time(), runs)

    def cast_time(self) -> Array:
        """``[runs]``: what casts between units of different formats take of a step, relative to the first step."""
        return self.table.cast_time(self.formats, self.batch_index)

    def _set_knobs(self, steps: Array, spent: Array, is_probing: Array) -> None:
        knobs, units = self.engine.knobs, self.is_unit.shape[1]
        knobs["steps"], knobs["is_evaluated"] = steps, steps > 0
        knobs["batch"] = np.array(BATCH_SIZES)[self.batch_index]
        knobs["clip_multiplier"] = np.array(CLIP_MULTIPLIERS)[self.clip_index]
        knobs["loss_scale"] = self.loss_scale
        knobs["growth_interval"] = self.growth_interval
        knobs["formats"][:, :units] = np.where(self.is_unit, self.formats, 0)
        bits = np.where(self.ladder >= 0, 1 << np.maximum(self.ladder, 0), 0).sum(axis=1)
        knobs["probed_formats"] = np.where(is_probing, bits, 0)
        knobs["lr_begin"] = learning_rate(self.tasks, self.share)
        self.learning_rate = learning_rate(self.tasks, (self.time + spent) / self.budget)
        self.largest_learning_rate = np.maximum(self.largest_learning_rate, self.learning_rate)
        knobs["lr_end"] = self.learning_rate

    def _remember(self, steps: Array, is_probing: Array) -> None:
        units, windows = self.is_unit.shape[1], self.windows
        for name, new in (("losses", "losses"), ("norms", "norms"), ("scales", "loss_scales")):
            setattr(self, name, _appended(getattr(self, name), windows[new], steps))
        for name in ("activation_amax", "gradient_norm"):
            setattr(self, name, _appended(getattr(self, name), windows[name][:, :units], steps[:, None]))
        for name in ("errors", "underflow", "subnormal"):
            getattr(self, name)[is_probing] = windows[name][is_probing, :units]
        self.since_probe = np.where(is_probing, 0, self.since_probe + (steps > 0))


def _appended(history: Array, new: Array, counts: Array) -> Array:
    """``history [..., HISTORY]`` with the first ``counts`` values of ``new`` behind it, the oldest dropped."""
    counts = np.broadcast_to(counts, history.shape[:-1])
    if (counts == counts.flat[0]).all():
        count = int(counts.flat[0])
        return np.concatenate([history[..., count:], new[..., :count]], axis=-1)
    both = np.concatenate([history, new[..., :MAX_STEPS]], axis=-1)
    return np.take_along_axis(both, counts[..., None] + np.arange(HISTORY), axis=-1)
