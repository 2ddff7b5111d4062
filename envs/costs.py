"""Simulated time of proxies, learning-rate schedules, and what moves of knobs would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.proxies import BASE_BATCH, BATCH_SIZES, Task

Array = NDArray[Any]


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

    def moved(self, formats: Array, batch_index: Array, others: Array) -> Array:
        """Returns the relative change of the step time if one unit took another format.

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

        casts_saved = self.cast_cost[:, None] * (casts(others) - casts(formats))
        change = self._units(others) - self._units(formats) + casts_saved
        factor = self._batch_factor(batch_index) / (1.0 + self.overhead)
        relative: Array = change * (factor / self.step_time(formats, batch_index))[:, None]
        return relative

    def elasticity(self, formats: Array, batch_index: Array, other_index: Array) -> Array:
        """Returns the relative change of the time per sample at another batch size, NaN beyond the range.

        Args:
            formats: ``[runs, units]``.
            batch_index: ``[runs]``.
            other_index: ``[runs]``; may lie one outside ``BATCH_SIZES``.
        """
        sizes, inside = np.array(BATCH_SIZES), np.clip(other_index, 0, len(BATCH_SIZES) - 1)
        now = self.step_time(formats, batch_index) / sizes[batch_index]
        other = self.step_time(formats, inside) / sizes[inside]
        return np.where(inside == other_index, other / now - 1.0, np.nan)

    def _units(self, formats: Array) -> Array:
        return np.take_along_axis(self.cost, formats[:, :, None], axis=2)[:, :, 0]

    def _changes(self, formats: Array) -> Array:
        changes: Array = (formats[:, 1:] != formats[:, :-1]) & self.is_unit[:, 1:]
        return changes

    def _batch_factor(self, batch_index: Array) -> Array:
        ratio = np.array(BATCH_SIZES)[batch_index] / BATCH_SIZES[BASE_BATCH]
        return ratio**self.batch_exponent


def measured(step_time: Array, noise: Array, seed: Array, step: Array) -> Array:
    """Returns what a clock says of step times: about them, always the same at one step of a task.

    Args:
        step_time: ``[runs]``: the true one.
        noise: ``[runs]``: relative standard deviation.
        seed: ``[runs]``: seeds of the tasks.
        step: ``[runs]``: steps that each training has taken.
    """
    word = seed.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + step.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finaliser of splitmix64
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    word ^= word >> np.uint64(31)
    total = sum((word >> np.uint64(shift)) & np.uint64(0xFFFF) for shift in (0, 16, 32, 48))
    normal = (np.asarray(total, dtype=np.float64) - 2.0 * 65535.0) / (65536.0 / np.sqrt(3.0))  # four uniform numbers
    time: Array = step_time * np.maximum(1.0 + noise * normal, 0.1)
    return time


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
