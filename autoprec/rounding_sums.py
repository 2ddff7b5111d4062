"""Sums over samples of tensors: squares of values, gradients and rounding errors, kept on the device until read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autoprec.what_if import Sample


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
    """

    g2x2: float = 0.0
    g2: float = 0.0
    x2: float = 0.0
    spread: float = 0.0
    step2: float = 0.0


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
        self._parts.append(torch.stack(rows) * x.ratio)
        self.eps = max(self.eps, x.eps)

    def read(self) -> None:
        """Reads everything from the device; after it the sums are there."""
        if self._parts:
            *rows, whole = torch.stack(self._parts).sum(dim=0).tolist()
            self._formats, self._whole = [FormatSums(*row) for row in rows], WholeSums(*whole)

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
