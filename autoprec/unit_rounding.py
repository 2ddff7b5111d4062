"""What rounding would do to one unit: to its inputs, outputs, weights, and to the gradients of both.

With *g* the gradient of the mean loss, *e* the rounding error and *n* the samples in the mean, a tensor adds to the
expected loss ``n / 2 * sum(g**2 * e**2)`` (empirical Fisher information) or ``sum(g * e)`` (first order). Both are
measured on outputs and weights. Errors of inputs, and of weights that take no gradient, reach the output as noise of
the same relative size. What does not live here: how samples are taken (``rounding_probe``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from autoprec.formats import NumberFormat
from autoprec.planning import FormatErrors, UnitErrors
from autoprec.rounding_sums import RoundingSums
from autoprec.table import OVERFLOW_ERROR
from autoprec.what_if import Sample, expected_error, output_format, rounded

# a format that loses more of a gradient trains another model
_MOST_LOST = 0.25
_SMALLEST = 1e-30


class RelativeError(NamedTuple):
    """Relative errors (root mean square) in a format: of inputs, outputs, gradients of outputs, and weights."""

    input: float
    output: float
    gradient: float
    weight: float


class UnitRounding:
    """What one window tells about one unit.

    Args:
        formats: What to try.
        relative: Relative errors by format, as far as they are known from earlier windows; changed in place.
        headroom_bits: Bits below the largest value of a format from where on a tensor counts as overflowing.
        inv_scale: Takes the loss scale off a gradient of an output.
        scale: Loss scale that a format would have that needs one.
    """

    def __init__(
        self,
        formats: Sequence[NumberFormat],
        relative: dict[str, RelativeError],
        headroom_bits: float = 0.0,
        inv_scale: float = 1.0,
        scale: float = 1.0,
    ) -> None:
        self._formats = formats
        self._output_formats = [output_format(each) for each in formats]
        self._relative = relative
        self._margin = 2.0**headroom_bits
        self._inv_scale = inv_scale
        self._scale = scale
        self._multiplications = self._elements = 0.0
        self._amax: list[Tensor] = []
        self._gradient_amax: list[Tensor] = []
        self._inputs, self._outputs = RoundingSums(), RoundingSums()
        self._weights, self._frozen = RoundingSums(), RoundingSums()

    # ---- what is noted ----

    def note_call(self, multiplications: float, y: Sample) -> None:
        """Counts a call of a layer.

        Args:
            multiplications: In the call.
            y: Of its output.
        """
        self._multiplications += multiplications
        self._elements += y.ratio * y.values.numel()
        self._amax.append(y.amax)

    def note_input(self, x: Sample) -> None:
        """Rounds an input.

        Args:
            x: Of the input.
        """
        self._amax.append(x.amax)
        self._inputs.add(x, _errors(x, self._formats))

    def note_output(self, y: Sample, gradient: Sample) -> None:
        """Rounds an output and its gradient.

        Args:
            y: Of the output.
            gradient: Of its gradient, still multiplied by the loss scale; the same rows.
        """
        g, amax = gradient.values * self._inv_scale, gradient.amax * self._inv_scale
        self._gradient_amax.append(amax)
        lost = self._gradient_losses(g, amax)
        self._outputs.add(y, _errors(y, self._output_formats), g, lost)

    def note_weight(self, weight: Sample, gradient: Sample, step: Tensor, is_matrix: bool) -> None:
        """Rounds a weight and its gradient.

        Args:
            weight: Of the weight.
            gradient: Of its gradient, unscaled; the same rows.
            step: What the gradient contributes to an optimizer step; the same rows.
            is_matrix: Whether 8-bit formats round it to 8 bits; vectors they do not.
        """
        self._amax.append(weight.amax)
        self._gradient_amax.append(gradient.amax)
        errors = _errors(weight, self._formats if is_matrix else self._output_formats)
        lost = self._gradient_losses(gradient.values, gradient.amax)
        self._weights.add(weight, errors, gradient.values, lost, step)

    def note_frozen_weight(self, weight: Sample) -> None:
        """Rounds a matrix that takes no gradient.

        Args:
            weight: Of the matrix.
        """
        self._amax.append(weight.amax)
        self._frozen.add(weight, _errors(weight, self._formats))

    def _gradient_losses(self, g: Tensor, amax: Tensor) -> list[Tensor]:
        """Squared errors of an unscaled gradient, each under the loss scale that its format would have."""
        losses = []
        for each in self._formats:
            target, factor = each.gradient_format, torch.ones_like(amax)
            if each.needs_loss_scale:  # which backs off before gradients overflow
                factor = (target.max / 4.0 / amax.clamp(min=_SMALLEST)).clamp(max=self._scale)
            losses.append((rounded(g * factor, amax * factor, target) / factor - g).square().sum())
        return losses

    # ---- what follows ----

    def summary(self, samples: float) -> UnitErrors:
        """Returns what the window has told; without any gradient counts and relative errors.

        Args:
            samples: Whose mean the loss is.
        """
        for sums in (self._inputs, self._outputs, self._weights, self._frozen):
            sums.read()
        amax = _largest(self._amax)
        known = [self._relative_error(index) for index in range(len(self._formats))]
        counts = UnitErrors(
            multiplications=self._multiplications,
            elements=self._elements,
            relative={
                each.name: self._worst(index, relative, amax)
                for index, (each, relative) in enumerate(zip(self._formats, known, strict=True))
                if self._amax
            },
            gradient_amax=_largest(self._gradient_amax),
        )
        if not self._outputs and not self._weights:
            return counts
        formats: dict[str, FormatErrors] = {}
        reasons: dict[str, str] = {}
        for index, each in enumerate(self._formats):
            relative = self._relative[each.name] = known[index]
            reason = self._why_not(each, amax, max(relative.gradient, self._weights.gradient_error(index)))
            if reason is None:
                formats[each.name] = self._errors_of(index, relative, samples)
            else:
                reasons[each.name] = reason
        weights = self._weights.whole
        share = math.sqrt(weights.step2 / weights.x2) if weights.x2 else 0.0
        return replace(counts, formats=formats, reasons=reasons, update_share=share)

    def _relative_error(self, index: int) -> RelativeError:
        """What was measured where there were bits to lose, else what is known from earlier or from the format."""
        each, output = self._formats[index], self._output_formats[index]
        number, gradient = expected_error(each), expected_error(each.gradient_format)
        known = self._relative.get(each.name, RelativeError(number, expected_error(output), gradient, number))
        x, y = self._inputs.relative_error(index), self._outputs.relative_error(index)
        g = self._outputs.gradient_error(index)
        eps = self._outputs.eps if self._outputs else 1.0  # what was not seen is not known either
        weights = self._weights or self._frozen
        return RelativeError(
            input=x if self._inputs.eps < each.eps else max(x, known.input),
            output=y if eps < output.eps else max(y, known.output),
            gradient=g if eps < each.gradient_format.eps else max(g, known.gradient),
            weight=weights.relative_error(index),
        )

    def _worst(self, index: int, relative: RelativeError, amax: float) -> float:
        """The largest error of all tensors, each relative to itself without its mean."""
        if not amax <= self._formats[index].amax_limit:
            return OVERFLOW_ERROR
        weights = self._weights or self._frozen
        errors = (
            relative.input * self._inputs.mean_factor,
            relative.output * self._outputs.mean_factor,
            relative.weight * weights.mean_factor,
            relative.gradient * self._outputs.gradient_mean_factor,
            self._weights.gradient_error(index),
        )
        is_known = all(map(math.isfinite, errors))
        return min(max(errors), OVERFLOW_ERROR) if is_known else OVERFLOW_ERROR

    def _why_not(self, each: NumberFormat, amax: float, lost: float) -> str | None:
        if not amax * self._margin <= each.amax_limit:
            return f"magnitudes up to {amax:.3g} leave no headroom in {each.name}"
        if not lost <= _MOST_LOST:
            return f"{lost:.0%} of a gradient would be lost in {each.name}"
        return None

    def _errors_of(self, index: int, relative: RelativeError, samples: float) -> FormatErrors:
        output, whole = self._outputs.of(index), self._outputs.whole
        weight = self._weights.of(index)
        # noise in front of a layer comes out of it at the same relative size
        noise = relative.input**2 + (relative.weight**2 if self._frozen else 0.0)
        g2e2, first_order, spread = output.g2e2, abs(output.ge), output.spread
        if self._outputs.eps >= self._output_formats[index].eps:  # nothing was left to round
            g2e2, spread = relative.output**2 * whole.g2x2, relative.output**2 * whole.spread
            first_order = math.sqrt(g2e2)
        return FormatErrors(
            fisher=samples / 2.0 * (g2e2 + noise * whole.g2x2 + weight.g2e2),
            taylor=first_order + math.sqrt(noise * whole.g2x2) + abs(weight.ge),
            loss_divergence=math.sqrt(spread + noise * whole.spread + weight.spread),
            own_gradient=math.hypot(relative.gradient, relative.input),
            passed_gradient=math.hypot(relative.gradient, relative.weight),
        )


def _largest(amaxes: Sequence[Tensor]) -> float:
    return float(torch.stack([*amaxes]).amax()) if amaxes else math.nan


def _errors(x: Sample, formats: Sequence[NumberFormat]) -> list[Tensor]:
    return [rounded(x.values, x.amax, each) - x.values for each in formats]
