"""Sums over samples of tensors: squares of values, gradients and rounding errors, kept on the device until read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autoprec.what_if import Sample

_NO_SIGNAL = 1e-12  # what is left of equal values is rounding in float32


class FormatSums(NamedTuple):
    """What rounding to one format does, with values *x*, their gradients *g* and rounding errors *e*.

    Attributes:
        g2e2: Sum of squared gradients times squared errors.
        ge: Sum of gradients times errors.
        e2: Sum of squared errors.
        lost: Sum of the squared errors of the gradients.
        spread: Sum of squared gradients times the mean squared error.
    """

    g2e2: float = 0.0
    ge: float = 0.0
    e2: float = 0.0
    lost: float = 0.0
    spread: float = 0.0


class WholeSums(NamedTuple):
    """What does not depend on the format.

    Attributes:
        g2x2: Sum of squared gradients times squared values.
        g2: Sum of squared gradients.
        x2: Sum of squared values.
        spread: Sum of squared gradients times the mean squared value.
        step2: Sum of squares of what the gradients contribute to an optimizer step.
        centred2: Sum of squared values after the mean of each tensor was taken off.
        centred_g2: The same of the gradients.
    """

    g2x2: float = 0.0
    g2: float = 0.0
    x2: float = 0.0
    spread: float = 0.0
    step2: float = 0.0
    centred2: float = 0.0
    centred_g2: float = 0.0


class RoundingSums:
    """Sums over tensors with one role (inputs, outputs, weights ...) in one unit.

    Attributes:
        eps: Of the narrowest dtype that was seen, 0 before the first.
    """

    def __init__(self) -> None:
        self.eps = 0.0
        self._parts: list[Tensor] = []
        self._formats: list[FormatSums] = []
        self._whole = WholeSums()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(
        self,
        x: Sample,
        errors: Sequence[Tensor],
        g: Tensor | None = None,
        lost: Sequence[Tensor] | None = None,
        step: Tensor | None = None,
    ) -> None:
        """Adds a sample.

        Args:
            x: The sample.
            errors: For each format what rounding changes.
            g: Gradient of the same elements, ``None`` if there is none.
            lost: For each format the squared error of the gradient.
            step: What the gradient contributes to an optimizer step, the same elements.
        """
        zero = torch.zeros_like(x.amax)
        g = torch.zeros_like(x.values) if g is None else g
        g2, x2 = g.square().sum(), x.values.square()
        rows = [
            torch.stack([product.square().sum(), product.sum(), e.square().sum(), gone, g2 * e.square().mean()])
            for e, gone, product in zip(errors, lost or [zero] * len(errors), (g * e for e in errors), strict=True)
        ]
        step2 = zero if step is None else step.square().sum()
        rows.append(torch.stack([(g.square() * x2).sum(), g2, x2.sum(), g2 * x2.mean(), step2]))
        centred = ((values - values.mean()).square().sum() for values in (x.values, g))
        rows.append(torch.stack([*centred, zero, zero, zero]))
        self._parts.append(torch.stack(rows) * x.ratio)
        self.eps = max(self.eps, x.eps)

    def read(self) -> None:
        """Reads everything from the device; after it the sums are there."""
        if self._parts:
            *rows, whole, centred = torch.stack(self._parts).sum(dim=0).tolist()
            self._formats, self._whole = [FormatSums(*row) for row in rows], WholeSums(*whole, *centred[:2])

    def of(self, index: int) -> FormatSums:
        """Sums for a format; zeros if nothing was added."""
        return self._formats[index] if self._formats else FormatSums()

    @property
    def whole(self) -> WholeSums:
        """Sums that do not depend on the format; zeros if nothing was added."""
        return self._whole

    def relative_error(self, index: int) -> float:
        """Relative error of the values in a format (root mean square), 0 where there are none."""
        return math.sqrt(self.of(index).e2 / self._whole.x2) if self._whole.x2 else 0.0

    def gradient_error(self, index: int) -> float:
        """The same of the gradients."""
        return math.sqrt(self.of(index).lost / self._whole.g2) if self._whole.g2 else 0.0

    @property
    def mean_factor(self) -> float:
        """By what errors relative to the values grow if they are taken relative to the centred values.

        A large mean hides what a short mantissa does to the signal. 0 where all values are alike: there is none.
        """
        return _mean_factor(self._whole.x2, self._whole.centred2)

    @property
    def gradient_mean_factor(self) -> float:
        """The same of the gradients."""
        return _mean_factor(self._whole.g2, self._whole.centred_g2)


def _mean_factor(square: float, centred: float) -> float:
    return math.sqrt(square / centred) if centred > _NO_SIGNAL * square else 0.0
