"""Number formats as value objects.

What lives here: the formats a unit can run in, everything that follows from their exponent and mantissa bits, and the
reference rounding of a float32 tensor to each of them. What does not: kernels, scaling to a format's range, and the
question which format a device supports.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_FP32_MANTISSA_BITS = 23
_FP32_BIAS = 127
_FP32_INF = 0x7F800000
_IMPLICIT_BIT = 1 << _FP32_MANTISSA_BITS


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """A binary number format: one sign bit, ``exponent_bits`` and ``mantissa_bits``.

    A format without exponent bits holds the integers of a symmetric two's complement range.

    Args:
        name: Short lower-case name.
        exponent_bits: Width of the exponent field. 0 makes an integer format.
        mantissa_bits: Width of the mantissa field without the implicit bit.
        has_inf: Whether the top exponent is reserved for inf and NaN, as in IEEE 754. Without it only the all-ones
            pattern is NaN, the rest of the top exponent holds numbers, and casts saturate, as in e4m3fn.
        dtype: Storage dtype of the copy that the compute reads.
        compute_dtype: Dtype of a unit's output when it runs in this format.
        gradient: Format of the incoming gradients, if it is another one.
        is_scaled: Whether tensors are scaled into the range by their own amax before they are cast. The range then
            limits nothing. What limits a scaled format is the dtype its scaled tensors come from and go to.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_inf: bool = True
    dtype: torch.dtype
    compute_dtype: torch.dtype
    gradient: NumberFormat | None = None
    is_scaled: bool = False

    @property
    def is_integer(self) -> bool:
        """Whether the format holds integers."""
        return self.exponent_bits == 0

    @property
    def bits(self) -> int:
        """Bits that carry information. 19 for tf32, although it is stored in 32."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return 0 if self.is_integer else 2 ** (self.exponent_bits - 1) - 1

    @functools.cached_property
    def max(self) -> float:
        """Largest finite value."""
        if self.is_integer:
            return float(2**self.mantissa_bits - 1)
        top_exponent = 2**self.exponent_bits - (2 if self.has_inf else 1) - self.bias
        top_mantissa = 2.0 - self.eps * (1 if self.has_inf else 2)
        return float(top_mantissa * 2.0**top_exponent)

    @property
    def tiny(self) -> float:
        """Smallest positive normal value."""
        return 1.0 if self.is_integer else float(2.0 ** (1 - self.bias))

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return 1.0 if self.is_integer else self.tiny * self.eps

    @property
    def eps(self) -> float:
        """Distance from 1.0 to the next larger value."""
        return 1.0 if self.is_integer else float(2.0**-self.mantissa_bits)

    @property
    def gradient_format(self) -> NumberFormat:
        """Format of the incoming gradients: e5m2 for fp8, bf16 for int8, else the format itself."""
        return self.gradient or self

    @functools.cached_property
    def amax_limit(self) -> float:
        """Largest amax a tensor may have: ``max``, or for a scaled format the largest value of ``compute_dtype``."""
        return float(torch.finfo(self.compute_dtype).max) if self.is_scaled else self.max

    @property
    def needs_loss_scale(self) -> bool:
        """Whether ordinary gradients underflow without a loss scale.

        True for a format with a short exponent whose tensors are not scaled one by one: fp16.
        """
        return not (self.is_integer or self.is_scaled) and self.exponent_bits < 8

    def round(self, x: Tensor, *, saturate: bool = False) -> Tensor:
        """Rounds a float32 tensor to the nearest values of this format, ties to even.

        Equals ``x.to(dtype).float()`` bit for bit where torch has the dtype (NaN payloads excepted, and older torch
        casts overflow to NaN in e4m3fn), computed in integer arithmetic on the float32 pattern. Subnormals of the
        format are kept, NaN stays NaN. A value that rounds beyond ``max`` becomes inf. Carries no gradient.

        Args:
            x: Values, any shape, float32. Not changed.
            saturate: Clamps to ``max`` instead, inf included. A format without inf always does.

        Returns:
            Same shape, float32. For fp32 this is ``x`` itself.

        Raises:
            TypeError: If ``x`` is not float32.

        Example:
            >>> FP16.round(torch.tensor([1.0004, 70000.0]))
            tensor([1., inf])
        """
        if x.dtype != torch.float32:
            raise TypeError(f"Passed `{self.name}.round(x)` with {x.dtype}. `x` must be torch.float32.")
        if self.is_integer:
            # adding zero turns -0.0 into 0.0, the only zero an integer has
            return x.detach().round().clamp(-self.max, self.max) + 0.0
        if self.mantissa_bits == _FP32_MANTISSA_BITS:
            return x.clamp(-self.max, self.max) if saturate else x
        rounded = _round_pattern(x.detach(), self.mantissa_bits, _FP32_BIAS + 1 - self.bias)
        if saturate or not self.has_inf:
            return rounded.clamp(-self.max, self.max)
        return torch.where(rounded.abs() > self.max, torch.copysign(rounded.new_tensor(torch.inf), rounded), rounded)


def _round_pattern(x: Tensor, mantissa_bits: int, min_exponent: int) -> Tensor:
    """Rounds to ``mantissa_bits`` above the biased fp32 exponent ``min_exponent`` and to its fixed quantum below."""
    pattern = x.view(torch.int32)
    magnitude = pattern & 0x7FFFFFFF
    exponent = magnitude >> _FP32_MANTISSA_BITS
    significand = torch.where(exponent > 0, (magnitude & (_IMPLICIT_BIT - 1)) | _IMPLICIT_BIT, magnitude)
    exponent = exponent.clamp(min=1)
    # from 25 dropped bits on, every 24-bit significand rounds to zero
    dropped = (_FP32_MANTISSA_BITS - mantissa_bits + (min_exponent - exponent).clamp(min=0)).clamp(max=25)
    odd = (significand >> dropped) & 1
    half_below = (torch.ones_like(dropped) << (dropped - 1)) - 1
    significand = (significand + half_below + odd) >> dropped << dropped
    rounded = torch.where(significand > 0, ((exponent - 1) << _FP32_MANTISSA_BITS) + significand, 0)
    rounded = torch.where(magnitude < _FP32_INF, rounded, magnitude)
    return (rounded | (pattern & -0x80000000)).view(torch.float32)


FP32 = NumberFormat(name="fp32", exponent_bits=8, mantissa_bits=23, dtype=torch.float32, compute_dtype=torch.float32)
TF32 = NumberFormat(name="tf32", exponent_bits=8, mantissa_bits=10, dtype=torch.float32, compute_dtype=torch.float32)
BF16 = NumberFormat(name="bf16", exponent_bits=8, mantissa_bits=7, dtype=torch.bfloat16, compute_dtype=torch.bfloat16)
FP16 = NumberFormat(name="fp16", exponent_bits=5, mantissa_bits=10, dtype=torch.float16, compute_dtype=torch.float16)
E5M2 = NumberFormat(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    dtype=torch.float8_e5m2,
    compute_dtype=torch.bfloat16,
    is_scaled=True,
)
E4M3 = NumberFormat(
    name="e4m3",
    exponent_bits=4,
    mantissa_bits=3,
    has_inf=False,
    dtype=torch.float8_e4m3fn,
    compute_dtype=torch.bfloat16,
    is_scaled=True,
)
FP8 = replace(E4M3, name="fp8", gradient=E5M2)
INT8 = NumberFormat(
    name="int8",
    exponent_bits=0,
    mantissa_bits=7,
    has_inf=False,
    dtype=torch.int8,
    compute_dtype=torch.bfloat16,
    gradient=BF16,
    is_scaled=True,
)

FORMATS: dict[str, NumberFormat] = {f.name: f for f in (FP32, TF32, BF16, FP16, FP8, INT8)}
"""The formats a unit can be given, from wide to narrow."""

_RANKS = {name: position for position, name in enumerate(FORMATS)}


def get_format(name: str) -> NumberFormat:
    """Returns the format called ``name``.

    Args:
        name: One of ``FORMATS``.

    Raises:
        ValueError: If there is no such format. The message lists the names and the nearest one.
    """
    if name not in FORMATS:
        raise ValueError(
            f"Passed `{name!r}` as a number format. Known formats: {sorted(FORMATS)}.{nearest(name, FORMATS)}"
        )
    return FORMATS[name]


def rank(name: str) -> int:
    """Returns the position of a format from wide to narrow. 0 is fp32.

    Args:
        name: One of ``FORMATS``.
    """
    return _RANKS[get_format(name).name]


def widest(names: Iterable[str]) -> str:
    """Returns the widest of some formats.

    Args:
        names: At least one name out of ``FORMATS``.
    """
    return min(names, key=rank)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a sentence that names the known name nearest to ``name``, or nothing if none is near.

    Args:
        name: What was passed.
        known: What exists.

    Returns:
        `` Did you mean 'bf16'?`` with its leading space, or an empty string.
    """
    folded = {other.casefold(): other for other in sorted(known)}
    match = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.5)
    return f" Did you mean {folded[match[0]]!r}?" if match else ""
