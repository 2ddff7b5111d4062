"""What a tensor would lose in a format: samples of tensors and their rounding, as a layer in that format would do it.

What lives here: arithmetic on samples. What does not: taking them while a model trains (``rounding_probe``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autoprec.formats import BF16, FP16, FP32, NumberFormat
from autoprec.ops.reference import dequantize_rows, quantize_rows

SAMPLE = 16384
"""Elements of a tensor that are looked at."""

_FEWEST_ROWS = 4
_AMAX_FLOOR = 1e-12
_WIDE = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
# mean squared rounding error over mean square, in units of eps ** 2, for magnitudes spread evenly over powers of two
_FLOAT_ERROR = 0.0385
_ROW_AMAX = 3.0  # in standard deviations, for integers


class Sample(NamedTuple):
    """Some rows of a tensor.

    Attributes:
        values: ``[rows, cols]``, float32.
        ratio: Elements of the tensor for each of the sample.
        amax: Of the whole tensor, ``[]``, float32.
        eps: Of the tensor's dtype.
    """

    values: Tensor
    ratio: float
    amax: Tensor
    eps: float

    def is_wider_than(self, number_format: NumberFormat) -> bool:
        """Whether the tensor has bits that the format would lose."""
        return self.eps < number_format.eps


def take_rows(x: Tensor) -> Tensor:
    """Returns evenly spaced rows of a tensor, ``[rows, cols]``, about ``SAMPLE`` elements, float32, a copy.

    Tensors of one shape give the same rows.

    Args:
        x: Any shape, at least one element.
    """
    rows = x.detach().reshape(-1, x.shape[-1] if x.ndim else 1)
    wanted = max(_FEWEST_ROWS, SAMPLE // rows.shape[1])
    return rows[:: max(1, rows.shape[0] // wanted)].to(torch.float32, copy=True)


def take_sample(x: Tensor) -> Sample:
    """Returns a sample of a tensor.

    Args:
        x: Any shape, at least one element, floating point.
    """
    values = take_rows(x)
    low, high = torch.aminmax(x.detach())
    amax = torch.maximum(-low, high).float()  # autocast to bf16 refuses `stack` for what an fp16 unit puts out
    return Sample(values, x.numel() / values.numel(), amax, torch.finfo(x.dtype).eps)


def output_format(number_format: NumberFormat) -> NumberFormat:
    """Returns the format of what a layer that runs in ``number_format`` puts out."""
    return _WIDE[number_format.compute_dtype]


def rounded(values: Tensor, amax: Tensor, number_format: NumberFormat) -> Tensor:
    """Rounds a sample as a layer would round the whole tensor.

    Args:
        values: ``[rows, cols]``, float32.
        amax: Of the whole tensor.
        number_format: Where to.

    Returns:
        ``[rows, cols]``, float32; ``values`` itself for fp32.
    """
    if number_format.is_integer:
        return dequantize_rows(*quantize_rows(values))
    if number_format.is_scaled:
        limit = number_format.max
        scale = limit / amax.clamp(min=_AMAX_FLOOR)
        return (values * scale).clamp(-limit, limit).to(number_format.dtype).float() / scale
    if number_format.dtype is torch.float32:
        return number_format.round(values)
    return values.to(number_format.dtype).float()


def expected_error(number_format: NumberFormat) -> float:
    """Returns the relative error (root mean square) of ordinary values in a format, 0 for fp32."""
    if number_format is FP32:
        return 0.0
    if number_format.is_integer:
        return float(_ROW_AMAX / number_format.max / 12.0**0.5)
    return float(_FLOAT_ERROR**0.5 * number_format.eps)
