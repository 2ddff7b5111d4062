"""What units cost in each format, estimated from the times of whole steps, for any number of runs at once.

A step's time is a sum over units, so a step time tells something about every unit whose format has changed. What lives
here: the prior that a table or a guess makes, and a Kalman filter over the sums. What does not: where times come from.

The state of a run is, for each unit and each level of its ladder but the first, how much the step time changes if the
unit leaves the first level for that one; and, for each batch size, the step time with all units on the first level.
Everything is relative to the step time that the run began with. The filter is exact for such a linear model with
Gaussian noise (Kalman, 1960; a recursive least squares with a prior).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

COMMON_SD = 0.35
"""How far the cost of a format may be from what is assumed about it, the same for all units; relative to fp32."""
UNIT_SD = 0.12
"""How far single units are from that."""
TABLE_SD = 0.03
"""Least error of an entry of a table."""
TIME_SD = 0.02
"""Error of a measured step time."""
TIME_RANGE = (0.01, 1e6)
"""Times that steps may have, relative to the first one. What a clock shows of shorter ones is as wrong as of these, so
that no measurement is taken for exact; longer ones, and those that are no times, tell nothing."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What is known about the time of a step in which every unit is on the first level.

    Args:
        times: ``[runs, batch sizes]``: relative to that at the base batch size.
        covariance: ``[runs, batch sizes, batch sizes]`` of these times.
        growth: ``[runs, batch sizes]``: by which factor what units cost grows, 1 at the base batch size.
    """

    times: Array
    covariance: Array
    growth: Array


class CostEstimate:
    """Estimates of many runs, padded to as many units and levels.

    Args:
        runs: How many.
        units: Most units that a run has.
        levels: Most levels that a run has.
        batches: Batch sizes.

    Attributes:
        saving: ``[runs, units, levels]``: expected change of the step time at the base batch size if a unit leaves the
            first level; negative where that saves time.
    """

    def __init__(self, runs: int, units: int, levels: int, batches: int) -> None:
        self._shape = (runs, units, levels)
        self._free = units * (levels - 1)
        size = self._free + batches
        self._mean = np.zeros((runs, size))
        self._covariance = np.zeros((runs, size, size))
        self._growth = np.ones((runs, batches))

    def begin(
        self, chosen: Array, share: Array, guess: Array, table: Array, compute_share: Array, times: StepTimes
    ) -> None:
        """Forgets what is known about some runs and starts from a prior.

        Args:
            chosen: ``[n]``: indices of the runs.
            share: ``[n, units]``: share of each unit in the compute, 0 where there is no unit.
            guess: ``[n, levels]``: cost of a level relative to the first, as one would guess.
            table: ``[n, units, levels]``: the same as a table has it; what is no time above 0, as NaN, is left out.
            compute_share: ``[n]``: share of the units' compute in the first step time.
            times: Of steps on the first level, for these runs.
        """
        ratio, covariance = _costs_after_table(guess, table, share > 0)
        scale = share * compute_share[:, None]
        levels = self._shape[2]
        mean = scale[:, :, None] * (ratio[:, :, 1:] - 1.0)
        # costs of different levels are independent, those of one level are correlated over units
        full = np.einsum("nu,nv,nluv,lm->nulvm", scale, scale, covariance, np.eye(levels - 1))
        free = self._free
        self._mean[chosen, :free] = mean.reshape(len(chosen), free)
        self._mean[chosen, free:] = times.times
        self._covariance[chosen] = 0.0
        rows = np.asarray(chosen)[:, None, None]
        inside, behind = np.arange(free), np.arange(free, self._mean.shape[1])
        self._covariance[rows, inside[:, None], inside] = full.reshape(len(chosen), free, free)
        self._covariance[rows, behind[:, None], behind] = times.covariance
        self._growth[chosen] = times.growth

    def observe(self, level: Array, batch: Array, step_time: Array, other: Array, is_new: Array) -> None:
        """Learns from the time of a step.

        Args:
            level: ``[runs, units]``: the level of each unit.
            batch: ``[runs]``: index of the batch size.
            step_time: ``[runs]``: relative to the first step.
            other: ``[runs]``: what of it is known to be due to something else, casts between units for example.
            is_new: ``[runs]``: whether there is anything to learn; nothing is learnt from what is no time.
        """
        least, most = TIME_RANGE
        is_new = is_new & (step_time > 0) & (step_time <= most) & np.isfinite(other)
        design = self._design(level, batch)
        spread = np.einsum("nij,nj->ni", self._covariance, design)
        time = np.where(is_new, np.maximum(step_time, least), 1.0)
        variance = (design * spread).sum(axis=1) + (TIME_SD * time) ** 2
        gain = np.where(is_new[:, None], spread / variance[:, None], 0.0)
        error = np.where(is_new, step_time - other, 0.0) - (design * self._mean).sum(axis=1)
        self._mean += gain * np.where(is_new, error, 0.0)[:, None]
        self._covariance -= gain[:, :, None] * spread[:, None, :]

    def step_time(self, level: Array, batch: Array, other: Array) -> Array:
        """Returns the expected step time.

        Args:
            level: As in :meth:`observe`, and so are the others.
            batch: See there.
            other: See there.
        """
        return np.asarray((self._design(level, batch) * self._mean).sum(axis=1) + other)

    @property
    def saving(self) -> Array:
        """``[runs, units, levels]``: see the class."""
        runs, units, levels = self._shape
        known = self._mean[:, : self._free].reshape(runs, units, levels - 1)
        return np.concatenate([np.zeros((runs, units, 1)), known], axis=2)

    def optimistic(self, deviations: float) -> Array:
        """Returns ``saving`` less some standard deviations of it: what little-known levels might cost.

        Args:
            deviations: How many.
        """
        runs, units, levels = self._shape
        variance = np.diagonal(self._covariance, axis1=1, axis2=2)[:, : self._free]
        sd = np.sqrt(np.maximum(variance, 0.0)).reshape(runs, units, levels - 1)
        return self.saving - deviations * np.concatenate([np.zeros((runs, units, 1)), sd], axis=2)

    def move(self, level: Array, other: Array, batch: Array) -> tuple[Array, Array]:
        """Returns what moving single units would change of the step time, and the standard deviation of that.

        Args:
            level: ``[runs, units]``: where units are.
            other: ``[runs, units]``: where each would go.
            batch: ``[runs]``.

        Returns:
            Two arrays ``[runs, units]``, in units of the first step time, casts left out.
        """
        runs, units, levels = self._shape
        grown = np.take_along_axis(self._growth, batch[:, None], axis=1)
        saving = self.saving
        change = np.take_along_axis(saving, other[:, :, None], 2) - np.take_along_axis(saving, level[:, :, None], 2)
        at = np.arange(units) * (levels - 1)
        variance = np.zeros((runs, units))
        rows = np.arange(runs)[:, None]
        for first, second, sign in ((level, level, 1.0), (other, other, 1.0), (level, other, -2.0)):
            i, j = at + first - 1, at + second - 1
            both = (first > 0) & (second > 0)
            found = self._covariance[rows, np.where(both, i, 0), np.where(both, j, 0)]
            variance += sign * np.where(both, found, 0.0)
        return grown * change[:, :, 0], grown * np.sqrt(np.maximum(variance, 0.0))

    def _design(self, level: Array, batch: Array) -> Array:
        runs, units, levels = self._shape
        grown = np.take_along_axis(self._growth, batch[:, None], axis=1)
        is_there = level[:, :, None] == np.arange(1, levels)
        design = np.zeros(self._mean.shape)
        design[:, : self._free] = (is_there * grown[:, :, None]).reshape(runs, self._free)
        design[np.arange(runs), self._free + batch] = 1.0
        return design


def _costs_after_table(guess: Array, table: Array, is_unit: Array) -> tuple[Array, Array]:
    """What a format costs relative to the first: the guess, corrected by as much of the table as can be believed.

    Errors of a table are independent of each other, while what a format costs is much the same for all units. So where
    entries differ from unit to unit by more than units do, the table has errors, and a mean tells more than an entry.

    Returns:
        Means ``[n, units, levels]`` and covariances ``[n, levels - 1, units, units]``.
    """
    n, units, levels = table.shape
    known = (table > 0) & np.isfinite(table) & is_unit[:, :, None]
    log = np.log(np.where(known, table, 1.0))[:, :, 1:]
    known = known[:, :, 1:]
    count = np.maximum(known.sum(axis=1, keepdims=True), 1)
    deviation = np.where(known, log - (log * known).sum(axis=1, keepdims=True) / count, 0.0)
    freedom = np.maximum((known.sum(axis=1) - 1).clip(0).sum(axis=1), 1)
    excess = np.sqrt(np.maximum((deviation**2).sum(axis=(1, 2)) / freedom - UNIT_SD**2, 0.0))
    table_sd = np.hypot(excess, TABLE_SD)
    prior = np.eye(units) * UNIT_SD**2 + COMMON_SD**2
    mean = np.repeat(guess[:, None, :], units, axis=1)
    covariance = np.repeat(np.repeat(prior[None, None], levels - 1, axis=1), n, axis=0)
    noise = np.where(known, (np.exp(log) * table_sd[:, None, None]) ** 2, np.inf).transpose(0, 2, 1)
    weight = np.where(np.isinf(noise), 0.0, 1.0 / noise)  # [n, levels - 1, units]
    # (P^-1 + W)^-1 = P - P W^1/2 (I + W^1/2 P W^1/2)^-1 W^1/2 P, which needs no inverse of P
    root = np.sqrt(weight)
    inner = np.eye(units) + root[..., :, None] * covariance * root[..., None, :]
    half = covariance * root[..., None, :]
    covariance = covariance - half @ np.linalg.solve(inner, half.swapaxes(-1, -2))
    error = np.where(known, np.exp(log) - mean[:, :, 1:], 0.0).transpose(0, 2, 1)
    mean[:, :, 1:] += (covariance @ (weight * error)[..., None])[..., 0].transpose(0, 2, 1)
    return mean, covariance
