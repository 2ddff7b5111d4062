"""Device functions: floats to and from narrow formats in integer arithmetic, random bits, exact scales.

Rounding works on bit patterns, so that it gives the same bits under Triton's interpreter, whose own casts round
wrongly, and has a place where random bits can join. What lives here is called by kernels only.
"""

from __future__ import annotations

import triton
import triton.language as tl

# dtypes and formats as the kernels know them; 0 stands for none
FLOAT32 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT16 = tl.constexpr(3)
E4M3 = tl.constexpr(4)
E5M2 = tl.constexpr(5)
INT8 = tl.constexpr(6)
TF32 = tl.constexpr(7)

INF = tl.constexpr(0x7F800000)
AMAX_FLOOR = tl.constexpr(1e-12)
# adding and subtracting it leaves the nearest integer of a number below 2**22, ties to even
_MAGIC = tl.constexpr(12582912.0)


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Turns an address from a table into a pointer; only a hint on the pointer itself makes wide loads."""
    result = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        result = tl.multiple_of(result, 16)
    return result


@triton.jit
def load_float(address, offsets, mask, code, ALIGNED: tl.constexpr):
    """Loads float32, bfloat16 or float16 values as float32; ``code`` may differ from program to program."""
    if code == FLOAT32:
        values = tl.load(pointer(address, tl.float32, ALIGNED) + offsets, mask=mask, other=0.0)
    elif code == BFLOAT16:
        bits = tl.load(pointer(address, tl.uint16, ALIGNED) + offsets, mask=mask, other=0)
        values = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(pointer(address, tl.float16, ALIGNED) + offsets, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def magnitude_bits(x):
    """The pattern of ``abs(x)`` as int32: ordered as the magnitudes are, NaN above inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _codes(
    x, random, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr, HAS_INF: tl.constexpr, SATURATE: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Rounds float32 to the pattern of a narrow format without its sign, int32.

    With ``IS_STOCHASTIC`` a value is rounded up where the random uint32 word is below the dropped part, read as 32 bits
    after the point; else ties go to even. Too large becomes infinity, or the largest number if the format has no
    infinity or ``SATURATE`` is set.
    """
    min_exponent: tl.constexpr = 129 - (1 << (EXPONENT - 1))
    top: tl.constexpr = ((1 << EXPONENT) - 1) << MANTISSA
    nan: tl.constexpr = (top | (1 << (MANTISSA - 1))) if HAS_INF else (top | ((1 << MANTISSA) - 1))
    largest: tl.constexpr = (top if HAS_INF else nan) - 1
    past: tl.constexpr = top if HAS_INF and not SATURATE else largest
    magnitude = magnitude_bits(x)
    exponent = magnitude >> 23
    significand = tl.where(exponent > 0, (magnitude & 0x7FFFFF) | 0x800000, magnitude)
    exponent = tl.maximum(exponent, 1)
    dropped = 23 - MANTISSA + tl.maximum(min_exponent - exponent, 0)
    if IS_STOCHASTIC:
        bits = significand.to(tl.uint32)
        left = tl.maximum(32 - dropped, 0).to(tl.uint32)
        right = tl.minimum(tl.maximum(dropped - 32, 0), 31).to(tl.uint32)
        fraction = tl.where(dropped <= 32, bits << left, bits >> right)
        kept = (significand >> tl.minimum(dropped, 31)) + tl.where(random < fraction, 1, 0)
    else:
        # from 25 dropped bits on, every 24-bit significand rounds to zero
        dropped = tl.minimum(dropped, 25)
        half_below = (1 << (dropped - 1)) - 1
        kept = (significand + half_below + ((significand >> dropped) & 1)) >> dropped
    # the significand's leading bit adds the one that the exponent field lacks
    code = ((tl.maximum(exponent, min_exponent) - min_exponent) << MANTISSA) + kept
    code = tl.where(code > largest, past, code)
    return tl.where(magnitude > INF, nan, code)


@triton.jit
def _sign(x, WIDTH: tl.constexpr):
    return (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32) << (WIDTH - 1)


@triton.jit
def bfloat16_bits(x, random, SATURATE: tl.constexpr, IS_STOCHASTIC: tl.constexpr):
    """Rounds float32 to bfloat16; returns the uint16 pattern."""
    if SATURATE or IS_STOCHASTIC:
        code = _codes(x, random, 7, 8, True, SATURATE, IS_STOCHASTIC)
    else:
        magnitude = magnitude_bits(x)
        code = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        code = tl.where(magnitude > INF, 0x7FC0, code)
    return (code | _sign(x, 16)).to(tl.uint16)


@triton.jit
def float16_bits(x, random, SATURATE: tl.constexpr, IS_STOCHASTIC: tl.constexpr):
    """Rounds float32 to float16; returns the uint16 pattern."""
    return (_codes(x, random, 10, 5, True, SATURATE, IS_STOCHASTIC) | _sign(x, 16)).to(tl.uint16)


@triton.jit
def e4m3_bits(x, random, IS_STOCHASTIC: tl.constexpr):
    """Rounds float32 to float8_e4m3fn; returns the uint8 pattern. Too large is 448, as the format has no infinity."""
    return (_codes(x, random, 3, 4, False, True, IS_STOCHASTIC) | _sign(x, 8)).to(tl.uint8)


@triton.jit
def e5m2_bits(x, random, SATURATE: tl.constexpr, IS_STOCHASTIC: tl.constexpr):
    """Rounds float32 to float8_e5m2; returns the uint8 pattern."""
    return (_codes(x, random, 2, 5, True, SATURATE, IS_STOCHASTIC) | _sign(x, 8)).to(tl.uint8)


@triton.jit
def tf32_values(x, random, SATURATE: tl.constexpr, IS_STOCHASTIC: tl.constexpr):
    """Rounds float32 to tf32, kept in float32."""
    code = _codes(x, random, 10, 8, True, SATURATE, IS_STOCHASTIC) << 13
    return (code.to(tl.uint32) | (x.to(tl.uint32, bitcast=True) & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def int8_values(x, random, IS_STOCHASTIC: tl.constexpr):
    """Rounds float32 to integers in [-127, 127], int8; NaN becomes 0."""
    clamped = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -127.0), 127.0)
    whole = (clamped + _MAGIC) - _MAGIC
    if IS_STOCHASTIC:
        below = tl.where(whole > clamped, whole - 1.0, whole)
        uniform = (random >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
        whole = tl.where(uniform < clamped - below, below + 1.0, below)
    return whole.to(tl.int8)


@triton.jit
def encode(
    x, random, FORMAT: tl.constexpr, SATURATE: tl.constexpr, IS_STOCHASTIC: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Rounds float32 to a format; returns what is stored: a pattern, int8, or float32 for tf32.

    ``NATIVE`` lets the device's own conversion round to 8-bit floats where it does the same: to nearest and saturating.
    """
    if NATIVE and FORMAT == E4M3 and not IS_STOCHASTIC:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif NATIVE and FORMAT == E5M2 and SATURATE and not IS_STOCHASTIC:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    elif FORMAT == E4M3:
        return e4m3_bits(x, random, IS_STOCHASTIC)
    elif FORMAT == E5M2:
        return e5m2_bits(x, random, SATURATE, IS_STOCHASTIC)
    elif FORMAT == INT8:
        return int8_values(x, random, IS_STOCHASTIC)
    elif FORMAT == TF32:
        return tf32_values(x, random, SATURATE, IS_STOCHASTIC)
    elif FORMAT == BFLOAT16:
        return bfloat16_bits(x, random, SATURATE, IS_STOCHASTIC)
    else:
        return float16_bits(x, random, SATURATE, IS_STOCHASTIC)


@triton.jit
def int8_scale(amax):
    """127 / amax; NaN where an entry is not finite, as no integer can say so."""
    scale = tl.div_rn(tl.zeros_like(amax) + 127.0, tl.maximum(amax, AMAX_FLOOR))
    return tl.where(magnitude_bits(amax) < INF, scale, float("nan"))


@triton.jit
def float_scale(amax, LIMIT: tl.constexpr):
    """``LIMIT`` / amax, divided in float64 and rounded once; 0 for an infinite amax, NaN for NaN."""
    wide = amax.to(tl.float64)
    return (LIMIT / tl.where(wide < AMAX_FLOOR, AMAX_FLOOR, wide)).to(tl.float32)


@triton.jit
def scale_of(amax, FORMAT: tl.constexpr):
    """Factor that brings ``amax`` to the largest value of a format."""
    if FORMAT == INT8:
        return int8_scale(amax)
    elif FORMAT == E4M3:
        return float_scale(amax, 448.0)
    else:
        return float_scale(amax, 57344.0)


@triton.jit
def e4m3_to_float16(bits):
    """Widens float8_e4m3fn patterns, uint8, to float16 exactly; for units that do not read e4m3fn."""
    wide = bits.to(tl.uint16)
    magnitude = wide & 0x7F
    # the same exponent field under float16's bias is 2**-8 of the value; subnormals scale alike
    scaled = (magnitude << 7).to(tl.float16, bitcast=True) * 256.0
    pattern = tl.where(magnitude == 0x7F, 0x7E00, scaled.to(tl.uint16, bitcast=True)).to(tl.uint16)
    return (pattern | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)


@triton.jit
def e5m2_to_float16(bits):
    """Widens float8_e5m2 patterns, uint8, to float16 exactly: the upper half of its bits."""
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def _philox(seed, offset, counters):
    zero = counters * 0
    offsets = zero + offset
    return tl.philox(
        seed,
        (counters & 0xFFFFFFFF).to(tl.uint32),
        ((counters >> 32) & 0xFFFFFFFF).to(tl.uint32),
        (offsets & 0xFFFFFFFF).to(tl.uint32),
        ((offsets >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )


@triton.jit
def random_run(seed, offset, start, SIZE: tl.constexpr):
    """Random words ``[SIZE]`` of the elements from ``start``, a multiple of 64, on.

    A group of 64 elements takes 16 counters; the four words of a counter go to elements 16 apart.
    """
    groups = start // 64 + tl.arange(0, SIZE // 64)
    counters = groups[:, None] * 16 + tl.arange(0, 16)[None, :]
    words = _philox(seed, offset, counters)
    by_counter = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    return tl.reshape(tl.permute(tl.reshape(by_counter, (SIZE // 64, 16, 4)), (0, 2, 1)), (SIZE,))


@triton.jit
def random_at(seed, offset, index):
    """Random words of the elements ``index``, int64, in any order; draws four to use one."""
    words = _philox(seed, offset, (index >> 6) * 16 + (index & 15))
    word = (index >> 4) & 3
    lower = tl.where(word == 0, words[0], words[1])
    return tl.where(word < 2, lower, tl.where(word == 2, words[2], words[3]))
