"""Random bits and stochastic rounding as pure functions of a seed, an offset and an element's index.

Every implementation draws the same bits, whatever the order in which it visits the elements. torch's generators are
neither read nor advanced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoprec.formats import NumberFormat

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_N_ROUNDS = 10
_IMPLICIT_BIT = 1 << 23
_FP32_INF = 0x7F800000
# more dropped bits than this are taken off before the random bits are added, so that the sum fits 31 bits
_MAX_RANDOM_BITS = 30


def random_words(seed: int, offset: int, index: Tensor) -> Tensor:
    """Random 32-bit words, Philox 4x32-10 (Salmon et al., SC 2011).

    Element ``i`` gets word ``i % 4`` of the counter ``(i // 4, offset)``, low halves first, under the key ``seed``.

    Args:
        seed: 64 bits.
        offset: 64 bits, another one for every use of a seed.
        index: Element indices, int64, any shape.

    Returns:
        int64 in [0, 2**32), the shape of ``index``.
    """
    quad = index >> 2
    zero = torch.zeros_like(quad)
    c0, c1 = quad & _MASK, (quad >> 32) & _MASK
    c2, c3 = zero + (offset & _MASK), zero + ((offset >> 32) & _MASK)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_N_ROUNDS):
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1 = ((product_b >> 32) & _MASK) ^ c1 ^ k0, product_b & _MASK
        c2, c3 = ((product_a >> 32) & _MASK) ^ c3 ^ k1, product_a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    lane = index & 3
    return torch.where(lane < 2, torch.where(lane == 0, c0, c1), torch.where(lane == 2, c2, c3))


def round_stochastic(x: Tensor, number_format: NumberFormat, words: Tensor, *, saturate: bool = False) -> Tensor:
    """Rounds up or down at random, so that the expectation is the value itself.

    Args:
        x: float32, any shape.
        number_format: A floating-point format narrower than fp32.
        words: What :func:`random_words` returned, the shape of ``x``. With ``d`` bits to drop, the upper ``d`` bits of
            a word are added before the cut; of values far below the smallest subnormal, what exceeds 30 bits is cut
            first.
        saturate: As in :meth:`NumberFormat.round`.

    Returns:
        float32 values of the format, inf and NaN kept.
    """
    mantissa_bits, min_exponent = number_format.mantissa_bits, 128 - number_format.bias
    pattern = x.detach().contiguous().view(torch.int32).long()
    magnitude = pattern & 0x7FFFFFFF
    exponent = magnitude >> 23
    significand = torch.where(exponent > 0, (magnitude & (_IMPLICIT_BIT - 1)) | _IMPLICIT_BIT, magnitude)
    exponent = exponent.clamp(min=1)
    dropped = 23 - mantissa_bits + (min_exponent - exponent).clamp(min=0)
    significand = significand >> (dropped - _MAX_RANDOM_BITS).clamp(0, 31)
    dropped = dropped.clamp(max=_MAX_RANDOM_BITS)
    kept = (significand + (words >> (32 - dropped))) >> dropped
    rounded = ((exponent - 1) << 23) + (kept << dropped)
    # one step above zero is the smallest subnormal, however far below it the value was
    smallest = torch.tensor(number_format.smallest_subnormal, dtype=torch.float32).view(torch.int32).long()
    rounded = torch.where(dropped > 24, kept * smallest.to(x.device), torch.where(kept > 0, rounded, 0))
    rounded = torch.where(magnitude < _FP32_INF, rounded, magnitude)
    result = (rounded | (pattern & 0x80000000)).to(torch.int32).view(torch.float32).reshape(x.shape)
    if saturate or not number_format.has_inf:
        return result.clamp(-number_format.max, number_format.max)
    return torch.where(result.abs() > number_format.max, torch.copysign(result.new_tensor(torch.inf), result), result)
