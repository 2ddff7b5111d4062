"""Spread and drift of short series of measurements: losses, gradient norms, largest magnitudes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.floating[Any]]


def finite(values: Iterable[float]) -> Series:
    """Returns the finite values, in order."""
    array = np.asarray(tuple(values), dtype=np.float64)
    return array[np.isfinite(array)]


def log2_or_zero(value: float) -> float:
    """Returns log2 where it exists and 0 where it does not."""
    return math.log2(value) if 0 < value < math.inf else 0.0


def spread(values: Series) -> float:
    """Returns standard deviation / mean of the absolute values, computed so that no square overflows."""
    largest = float(np.abs(values).max(initial=0.0))
    if values.size < 2 or largest == 0.0:
        return 0.0
    scaled = values / largest
    return float(scaled.std() / np.abs(scaled).mean())


def spread_around_drift(values: Series) -> float:
    """Returns the relative spread that is left when a steady rise or fall (in log2) is taken out."""
    if values.size < 4 or not (values > 0).all():
        return spread(values)
    logs = np.log2(values)
    steps = np.arange(values.size) - (values.size - 1) / 2
    residual = logs - logs.mean() - _slope(steps, logs) * steps
    return spread(np.exp2(np.clip(residual, -64, 64)))


def drift_bits(history: Sequence[float]) -> float:
    """Returns the change of log2 over the window by least squares. Positions without a positive value do not count."""
    values = np.asarray(history, dtype=np.float64)
    (at,) = np.nonzero(np.isfinite(values) & (values > 0))
    if at.size < 3:
        return 0.0
    return _slope(at - at.mean(), np.log2(values[at])) * (len(values) - 1)


def relative_change(values: Series, width: int) -> float:
    """Returns the mean of the last ``width`` values minus that of the ``width`` before, in units of the mean size."""
    largest = float(np.abs(values).max(initial=0.0))
    if values.size < 2 * width or largest == 0.0:
        return 0.0
    scaled = values / largest
    change = scaled[-width:].mean() - scaled[-2 * width : -width].mean()
    return float(change / np.abs(scaled).mean())


def _slope(centred: Series, values: Series) -> float:
    return float(centred @ values / (centred @ centred))


class Rows:
    """Short series of many runs or units side by side; what a function above says of each, up to rounding.

    Args:
        values: ``[rows, window]``, newest last. What is not finite does not count.
    """

    def __init__(self, values: Series) -> None:
        self.width = values.shape[1]
        self.raw = np.asarray(values, dtype=np.float64)
        self.is_finite = np.isfinite(self.raw)
        self.count = self.is_finite.sum(axis=1)
        self._safe = np.where(self.is_finite, self.raw, 0.0)

    def spread(self) -> Series:
        """Returns :func:`spread` of the finite values of each row."""
        return self._spread(self._safe)

    def spread_around_drift(self) -> Series:
        """Returns :func:`spread_around_drift` of the finite values of each row."""
        logs, steps = self._logs(self.is_finite), np.cumsum(self.is_finite, axis=1) - 1.0
        centred, residual = self._without_mean(steps, self.is_finite), self._without_mean(logs, self.is_finite)
        residual -= _slopes(centred, residual)[:, None] * centred
        flat = self._spread(np.where(self.is_finite, np.exp2(np.clip(residual, -64, 64)), 0.0))
        is_positive = ((self.raw > 0) | ~self.is_finite).all(axis=1)
        return np.where(is_positive & (self.count >= 4), flat, self.spread())

    def drift_bits(self) -> Series:
        """Returns :func:`drift_bits` of each row. Its first finite value begins the window."""
        counts = self.is_finite & (self.raw > 0)
        places = np.broadcast_to(np.arange(self.width, dtype=np.float64), self.raw.shape)
        slopes = _slopes(self._without_mean(places, counts), self._without_mean(self._logs(counts), counts))
        length = self.width - 1 - np.where(self.is_finite.any(axis=1), self.is_finite.argmax(axis=1), 0)
        return np.where(counts.sum(axis=1) >= 3, slopes * length, 0.0)

    def relative_change(self, part: int) -> Series:
        """Returns :func:`relative_change` over the ``part``-th part of the finite values of each row."""
        width = np.maximum(self.count // part, 1)
        newest = np.cumsum(self.is_finite[:, ::-1], axis=1)[:, ::-1]  # 1 for the newest finite value
        last = self.is_finite & (newest <= width[:, None])
        before = self.is_finite & ~last & (newest <= 2 * width[:, None])
        size = np.abs(self._safe).sum(axis=1) / np.maximum(self.count, 1)
        change = (np.where(last, self._safe, 0).sum(axis=1) - np.where(before, self._safe, 0).sum(axis=1)) / width
        is_known = (self.count >= 2 * width) & (size > 0)
        return np.where(is_known, change / np.where(size > 0, size, 1.0), 0.0)

    def median(self) -> Series:
        """Returns the median of the finite values of each row, NaN if there is none."""
        ordered, last = np.sort(np.where(self.is_finite, self.raw, np.inf), axis=1), np.maximum(self.count - 1, 0)
        rows = np.arange(len(ordered))
        return np.where(self.count > 0, (ordered[rows, last // 2] + ordered[rows, (last + 1) // 2]) / 2, np.nan)

    def _logs(self, counts: NDArray[np.bool_]) -> Series:
        return np.log2(np.where(counts & (self.raw > 0), self.raw, 1.0))

    def _without_mean(self, values: Series, counts: NDArray[np.bool_]) -> Series:
        kept = np.where(counts, values, 0.0)
        mean = kept.sum(axis=1) / np.maximum(counts.sum(axis=1), 1)
        return np.where(counts, kept - mean[:, None], 0.0)

    def _spread(self, values: Series) -> Series:
        largest = np.abs(values).max(axis=1, initial=0.0)
        scaled = values / np.where(largest > 0, largest, 1.0)[:, None]
        deviation = np.sqrt((self._without_mean(scaled, self.is_finite) ** 2).sum(axis=1))
        size = np.abs(scaled).sum(axis=1)
        relative = deviation * np.sqrt(np.maximum(self.count, 1)) / np.where(size > 0, size, 1.0)
        return np.where((self.count >= 2) & (largest > 0), relative, 0.0)


def _slopes(centred: Series, values: Series) -> Series:
    square = (centred**2).sum(axis=1)
    slopes: Series = (centred * values).sum(axis=1) / np.where(square > 0, square, 1.0)
    return slopes
