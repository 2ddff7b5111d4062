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


def random_words(seed: int, offset: int, index: Tensor) -> Tensor:
    """Random 32-bit words, Philox 4x32-10 (Salmon et al., SC 2011).

    Of each group of 64 elements, element ``i`` gets word ``i % 64 // 16`` of the counter ``(i // 64 * 16 + i % 16,
    offset)``, low halves first, under the key ``seed``: 16 lanes fill a vector register with consecutive elements.

    Args:
        seed: 64 bits.
        offset: 64 bits, another one for every use of a seed.
        index: Element indices, int64, any shape.

    Returns:
        int64 in [0, 2**32), the shape of ``index``.
    """
    counter = (index >> 6) * 16 + (index & 15)
    zero = torch.zeros_like(counter)
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = zero + (offset & _MASK), zero + ((offset >> 32) & _MASK)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_N_ROUNDS):
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        c0, c1 = ((product_b >> 32) & _MASK) ^ c1 ^ k0, product_b & _MASK
        c2, c3 = ((product_a >> 32) & _MASK) ^ c3 ^ k1, product_a & _MASK
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    word = (index >> 4) & 3
    return torch.where(word < 2, torch.where(word == 0, c0, c1), torch.where(word == 2, c2, c3))


def round_stochastic(x: Tensor, number_format: NumberFormat, words: Tensor, *, saturate: bool = False) -> Tensor:
    """Rounds up or down at random, so that the expectation is the value itself.

    Args:
        x: float32, any shape.
        number_format: A floating-point format narrower than fp32.
        words: What :func:`random_words` returned, the shape of ``x``. A value is rounded up in magnitude where the word
            is below the dropped part of the significand, read as 32 bits after the point.
        saturate: As in :meth:`NumberFormat.round`.

    Returns:
        float32 values of the format, inf and NaN kept.
    """
    x = x.detach()
    wide = x.double()
    power = torch.ldexp(torch.ones_like(wide), torch.frexp(wide).exponent - 1)
    quantum = power.clamp(min=number_format.tiny) * number_format.eps
    # every operation is exact in float64: the quantum is a power of two
    steps = wide.abs() / quantum
    is_up = words.double() < ((steps - steps.floor()) * 2.0**32).floor()
    rounded = torch.copysign((steps.floor() + is_up) * quantum, wide).float()
    rounded = torch.where(x.isfinite(), rounded, x)
    if saturate or not number_format.has_inf:
        return rounded.clamp(-number_format.max, number_format.max)
    return torch.where(
        rounded.abs() > number_format.max, torch.copysign(rounded.new_tensor(torch.inf), rounded), rounded
    )
