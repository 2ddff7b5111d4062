"""Simulated time of proxies, learning-rate schedules, and what moves of knobs would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.cost_estimate import CostEstimate, StepTimes
from autoprec.envs.profiles import NOMINAL
from autoprec.envs.proxies import BASE_BATCH, BATCH_SIZES, Task

Array = NDArray[Any]

_EXACT_SD = 1e-3


@dataclass
class Charges:
    """How the steps of many runs are charged, in fp32 steps at the base batch size.

    Args:
        cost: ``[runs, units, formats]``: compute of units; 0 where a run has no such unit.
        is_unit: ``[runs, units]``.
        overhead: ``[runs]``, as the next two.
        batch_exponent: See ``Task``.
        cast_cost: See ``Task``.
    """

    cost: Array
    is_unit: Array
    overhead: Array
    batch_exponent: Array
    cast_cost: Array

    def step_time(self, formats: Array, batch_index: Array) -> Array:
        """Returns the time of a step.

        Args:
            formats: ``[runs, units]``.
            batch_index: ``[runs]``, in ``BATCH_SIZES``.
        """
        compute = self._units(formats).sum(axis=1) + self.cast_cost * self._changes(formats).sum(axis=1)
        time: Array = (self.overhead + compute * self._batch_factor(batch_index)) / (1.0 + self.overhead)
        return time

    def casts_moved(self, formats: Array, batch_index: Array, others: Array) -> Array:
        """Returns by how much casts would change the step time if one unit took another format.

        Args:
            formats: ``[runs, units]``.
            batch_index: ``[runs]``.
            others: ``[runs, units]``: what each unit would take.

        Returns:
            ``[runs, units]``.
        """
        edge = np.full((len(formats), 1), -1)
        before, after = np.hstack([edge, formats[:, :-1]]), np.hstack([formats[:, 1:], edge])
        has_before = self.is_unit & np.hstack([edge < -1, self.is_unit[:, :-1]])
        has_after = self.is_unit & np.hstack([self.is_unit[:, 1:], edge < -1])

        def casts(own: Array) -> Array:
            count: Array = (has_before & (own != before)).astype(int) + (has_after & (own != after))
            return count

        factor = self.cast_cost * self._batch_factor(batch_index) / (1.0 + self.overhead)
        return np.asarray(factor[:, None] * (casts(others) - casts(formats)))

    def cast_time(self, formats: Array, batch_index: Array) -> Array:
        """Returns what casts between neighbours in different formats take of a step.

        Args:
            formats: ``[runs, units]``.
            batch_index: ``[runs]``.
        """
        casts = self.cast_cost * self._changes(formats).sum(axis=1)
        return np.asarray(casts * self._batch_factor(batch_index) / (1.0 + self.overhead))

    def _units(self, formats: Array) -> Array:
        return np.take_along_axis(self.cost, formats[:, :, None], axis=2)[:, :, 0]

    def _changes(self, formats: Array) -> Array:
        changes: Array = (formats[:, 1:] != formats[:, :-1]) & self.is_unit[:, 1:]
        return changes

    def _batch_factor(self, batch_index: Array) -> Array:
        ratio = np.array(BATCH_SIZES)[batch_index] / BATCH_SIZES[BASE_BATCH]
        return ratio**self.batch_exponent


def begin_estimate(estimate: CostEstimate, table: Charges, ladder: Array, chosen: Mapping[int, Task]) -> None:
    """Starts the estimates of runs from what their tasks tell: the table, or a guess where it is hidden.

    Args:
        estimate: Estimates of all runs.
        table: What the table tells of all runs, filled for the chosen ones.
        ladder: ``[runs, levels]``.
        chosen: The task of each run that begins.
    """
    runs = np.array(list(chosen), dtype=np.intp)
    formats = np.maximum(ladder[runs], 0)
    share = np.where(table.is_unit[runs], table.cost[runs, :, 0], 0.0)
    ratio = table.cost[runs] / np.where(share > 0, share, 1.0)[:, :, None]
    known = np.array([not np.isnan(task.table).any() for task in chosen.values()])
    told = np.take_along_axis(ratio, np.broadcast_to(formats[:, None, :], (*share.shape, formats.shape[1])), axis=2)
    told = np.where(known[:, None, None] & (ladder[runs] >= 0)[:, None, :], told, np.nan)
    exact, guessed = _step_times(table.overhead[runs], table.batch_exponent[runs]), _guessed_step_times()
    times = StepTimes(
        times=np.where(known[:, None], exact.times, guessed.times),
        covariance=np.where(known[:, None, None], exact.covariance, guessed.covariance),
        growth=exact.growth,
    )
    guess = np.array(NOMINAL.costs())[formats]
    estimate.begin(runs, share, guess, told, 1.0 / (1.0 + table.overhead[runs]), times)


def _step_times(overhead: Array, exponent: Array) -> StepTimes:
    growth = (np.array(BATCH_SIZES) / BATCH_SIZES[BASE_BATCH]) ** exponent[:, None]
    times = (overhead[:, None] + growth) / (1.0 + overhead[:, None])
    return StepTimes(times=times, covariance=np.eye(len(BATCH_SIZES)) * _EXACT_SD**2, growth=growth)


@cache
def _guessed_step_times() -> StepTimes:
    """Over all overheads and exponents that hardware might have."""
    overhead, exponent = np.meshgrid(
        *(np.linspace(r.low, r.high, 9) for r in (NOMINAL.overhead, NOMINAL.batch_exponent))
    )
    each = _step_times(overhead.ravel(), exponent.ravel())
    covariance = np.cov(each.times.T) + np.eye(len(BATCH_SIZES)) * _EXACT_SD**2
    return StepTimes(times=each.times.mean(axis=0), covariance=covariance, growth=each.growth.mean(axis=0))


def learning_rate(tasks: Sequence[Task], share: Array) -> Array:
    """Returns the learning rate of each task where a share of its budget is over.

    Args:
        tasks: Tasks.
        share: ``[tasks]``, 0 to 1.
    """
    lr = np.array([task.lr for task in tasks])
    warmup = np.array([task.warmup for task in tasks])
    decays = np.array([task.decays for task in tasks])
    share = np.clip(share, 0.0, 1.0)
    rise = np.minimum((share + 1e-2) / np.maximum(warmup, 1e-2), 1.0)
    fall = np.where(decays, 0.01 + 0.99 * 0.5 * (1.0 + np.cos(np.pi * share)), 1.0)
    rate: Array = lr * rise * fall
    return rate
