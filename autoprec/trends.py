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
