"""What a format is worth on a device, as far as it is known without measuring there.

What lives here: from which size on 8-bit matrix products were seen to save time elsewhere, and the names under which
other modules find the table of what was measured here (``cost_table``). What does not: whether a unit can run in a
format at all (``units``, ``guard``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autoprec.cost_table import CostTable, StepModel, UnitCost
from autoprec.formats import get_format

__all__ = ["CostTable", "Product", "StepModel", "UnitCost", "why_unprofitable"]


class Product(NamedTuple):
    """The matrix product of one call of a linear layer.

    Attributes:
        rows: Rows of the input, batch and sequence together.
        in_features: Columns of the input.
        out_features: Columns of the output.
    """

    rows: float
    in_features: int
    out_features: int

    @property
    def multiplications(self) -> float:
        """How many numbers are multiplied."""
        return self.rows * self.in_features * self.out_features

    def __str__(self) -> str:
        """Rows, columns of the input and of the output."""
        return f"{self.rows:g} x {self.in_features} x {self.out_features}"


class _Gain(NamedTuple):
    rows: int
    width: int
    multiplications: int
    text: str


# int8 on a Zen 5 core: 1.3 to 1.7 times bf16 from here on, 0.9 times at 64 x 128 x 128. fp8 on an H100, as published
# for torchao: 1.4 times at this size, 0.8 times at 1024 x 2048 x 1024
_SMALLEST = {
    ("cpu", "int8"): _Gain(64, 256, 64 * 512 * 512, "64 x 512 x 512 or 256 x 256 x 256"),
    ("cuda", "fp8"): _Gain(4096, 4096, 4096 * 8192 * 16384, "4096 x 8192 x 16384"),
}
# whole steps of four layers on a Zen 5 core, against fp32: 0.7 times as fast with 64 x 128 x 128, 0.8 with
# 64 x 256 x 256, 1.1 with 64 x 384 x 384 and 512 x 128 x 128, 1.3 with 256 x 256 x 256
_SMALLEST_16_BIT = {("cpu", "bf16"): _Gain(1, 1, 64 * 320 * 320, "64 x 320 x 320")}


def why_unprofitable(format_name: str, device_type: str, is_emulated: bool, products: Sequence[Product]) -> str | None:
    """Says why a format cannot save time, ``None`` where it may.

    Args:
        format_name: One of ``autoprec.formats.FORMATS``.
        device_type: Type of the device.
        is_emulated: Whether the device only emulates the format for this kind of layer.
        products: What the layers multiply in a call; a dimension that is not known is NaN.
    """
    if get_format(format_name).bits > 8:
        gain = _SMALLEST_16_BIT.get((device_type, format_name))
        return None if gain is None or is_emulated else _why_too_small(format_name, gain, products)
    if is_emulated:
        return f"{format_name} is emulated here, which costs time"
    gain = _SMALLEST.get((device_type, format_name))
    if gain is None:
        return f"no gain of {format_name} is known on {device_type}"
    for product in products:
        # a comparison with NaN is false: what is not known is too small
        is_wide = min(product.in_features, product.out_features) >= gain.width
        if not (is_wide and product.rows >= gain.rows and product.multiplications >= gain.multiplications):
            return f"{format_name} cannot pay below {gain.text}, and a call multiplies {product}"
    return None


def _why_too_small(format_name: str, gain: _Gain, products: Sequence[Product]) -> str | None:
    """Goes by the mean, since small layers of a block lose little beside large ones that gain."""
    total = sum(product.multiplications for product in products)
    if not products or math.isnan(total) or total >= gain.multiplications * len(products):
        return None
    return f"{format_name} cannot pay below {gain.text}, and a call multiplies {', '.join(map(str, products))}"
