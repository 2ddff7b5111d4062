"""Kernels of optimizer steps: one pass over weight, gradient and moments of every tensor of a list, in one launch.

A program works on one chunk of one tensor. Where ``found_inf`` is set it writes nothing, so that the host never has to
ask. Dtypes of gradients and formats of copies may differ from tensor to tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autoprec.ops.triton_rounding import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    bfloat16_bits,
    float16_bits,
    load_float,
    pointer,
    random_run,
)

# columns of a table's row: size, then addresses of weight, gradient, moments, copy and step counter, then the rest
ADAM_WIDTH = tl.constexpr(10)
SGD_WIDTH = tl.constexpr(7)
# steps are counted in float32, which is exact up to 2**24
_STEP_BITS = tl.constexpr(25)


@triton.jit
def _one_minus_power(base, step):
    """1 - base ** step in float64 by repeated squaring; a float32 power would lose what the difference needs."""
    power = tl.full((), 1.0, tl.float64)
    square = base
    rest = step
    for _ in range(_STEP_BITS):
        power = tl.where((rest & 1) == 1, power * square, power)
        square = square * square
        rest = rest >> 1
    return 1.0 - power


@triton.jit
def _store_copy(address, offsets, mask, values, code, ALIGNED: tl.constexpr):
    if code == BFLOAT16:
        tl.store(pointer(address, tl.uint16, ALIGNED) + offsets, bfloat16_bits(values, 0, False, False), mask=mask)
    elif code == FLOAT16:
        tl.store(pointer(address, tl.uint16, ALIGNED) + offsets, float16_bits(values, 0, False, False), mask=mask)


@triton.jit
def _grad(row, offsets, mask, factor, sign, ALIGNED: tl.constexpr, CODE_COLUMN: tl.constexpr):
    grad = load_float(tl.load(row + 2), offsets, mask, tl.load(row + CODE_COLUMN), ALIGNED)
    return grad * factor * sign


@triton.jit
def _float64(bits):
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["lr_bits", "beta1_bits", "beta2_bits", "seed", "offset"])
def adam_kernel(
    table, chunk_tensors, chunk_starts, found_inf, grad_factor, lr_bits: tl.int64, beta1_bits: tl.int64,
    beta2_bits: tl.int64, step_size, bias_correction2_sqrt, keep, weight_decay, one_minus_beta1, beta2, one_minus_beta2,
    eps, sign, seed: tl.int64, offset: tl.int64, MOMENT: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr, HAS_FACTOR_TENSOR: tl.constexpr, HAS_STEP_TENSOR: tl.constexpr,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Adam or AdamW on one chunk, with the operations of the C kernel and so its bits.

    ``keep`` is 1 - lr x weight_decay for the decoupled form, else 1; ``weight_decay`` is 0 for the decoupled form.
    Where the step counters are on the device, ``step_size`` and ``bias_correction2_sqrt`` are computed here from the
    float64 numbers whose bits are passed, since scalars that are passed as floats arrive in float32. ``MOMENT`` is the
    dtype of the second moment; a 16-bit one is rounded stochastically and never to infinity.
    """
    if HAS_FOUND_INF:
        if tl.load(found_inf) != 0.0:
            return
    chunk = tl.program_id(0)
    row = table + tl.load(chunk_tensors + chunk) * ADAM_WIDTH
    start = tl.load(chunk_starts + chunk)
    size = tl.load(row)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        start = tl.multiple_of(start, SIZE)
    offsets = start + tl.arange(0, SIZE)
    mask = offsets < size
    if HAS_FACTOR_TENSOR:
        grad_factor = tl.load(grad_factor)
    if HAS_STEP_TENSOR:
        step = tl.load(tl.load(row + 6).to(tl.pointer_type(tl.float32))).to(tl.int32)
        step_size = (_float64(lr_bits) / _one_minus_power(_float64(beta1_bits), step)).to(tl.float32)
        bias_correction2_sqrt = tl.sqrt(_one_minus_power(_float64(beta2_bits), step)).to(tl.float32)
    exp_avg_pointers = pointer(tl.load(row + 3), tl.float32, ALIGNED) + offsets
    param_pointers = pointer(tl.load(row + 1), tl.float32, ALIGNED) + offsets
    grad = _grad(row, offsets, mask, grad_factor, sign, ALIGNED, 7)
    param = tl.load(param_pointers, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avg_pointers, mask=mask, other=0.0)
    exp_avg_sq = load_float(tl.load(row + 4), offsets, mask, MOMENT, ALIGNED)
    zero = tl.zeros((SIZE,), tl.float32)
    grad = tl.where(weight_decay != 0.0, tl.fma(param, zero + weight_decay, grad), grad)
    param = param * keep
    exp_avg = tl.fma(grad - exp_avg, zero + one_minus_beta1, exp_avg)
    exp_avg_sq = tl.fma(grad * one_minus_beta2, grad, exp_avg_sq * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), zero + bias_correction2_sqrt) + eps
    param = param + tl.div_rn(exp_avg * -step_size, denominator)
    tl.store(param_pointers, param, mask=mask)
    tl.store(exp_avg_pointers, exp_avg, mask=mask)
    moments = tl.load(row + 4)
    if MOMENT == FLOAT32:
        tl.store(pointer(moments, tl.float32, ALIGNED) + offsets, exp_avg_sq, mask=mask)
    else:
        random = random_run(seed, offset, tl.load(row + 9) + start, SIZE)
        if MOMENT == BFLOAT16:
            bits = bfloat16_bits(exp_avg_sq, random, True, True)
        else:
            bits = float16_bits(exp_avg_sq, random, True, True)
        tl.store(pointer(moments, tl.uint16, ALIGNED) + offsets, bits, mask=mask)
    _store_copy(tl.load(row + 5), offsets, mask, param, tl.load(row + 8), ALIGNED)


@triton.jit
def sgd_kernel(
    table, chunk_tensors, chunk_starts, found_inf, grad_factor, lr, momentum, one_minus_dampening, weight_decay, sign,
    HAS_MOMENTUM: tl.constexpr, IS_NESTEROV: tl.constexpr, IS_FIRST: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
    HAS_FACTOR_TENSOR: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """SGD on one chunk, with the operations of the C kernel and so its bits."""
    if HAS_FOUND_INF:
        if tl.load(found_inf) != 0.0:
            return
    chunk = tl.program_id(0)
    row = table + tl.load(chunk_tensors + chunk) * SGD_WIDTH
    start = tl.load(chunk_starts + chunk)
    size = tl.load(row)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
        start = tl.multiple_of(start, SIZE)
    offsets = start + tl.arange(0, SIZE)
    mask = offsets < size
    if HAS_FACTOR_TENSOR:
        grad_factor = tl.load(grad_factor)
    zero = tl.zeros((SIZE,), tl.float32)
    param_pointers = pointer(tl.load(row + 1), tl.float32, ALIGNED) + offsets
    grad = _grad(row, offsets, mask, grad_factor, sign, ALIGNED, 5)
    param = tl.load(param_pointers, mask=mask, other=0.0)
    grad = tl.where(weight_decay != 0.0, tl.fma(param, zero + weight_decay, grad), grad)
    if HAS_MOMENTUM:
        buffer_pointers = pointer(tl.load(row + 3), tl.float32, ALIGNED) + offsets
        buffer = grad
        if not IS_FIRST:
            stored = tl.load(buffer_pointers, mask=mask, other=0.0)
            buffer = tl.fma(grad, zero + one_minus_dampening, stored * momentum)
        tl.store(buffer_pointers, buffer, mask=mask)
        grad = tl.fma(buffer, zero + momentum, grad) if IS_NESTEROV else buffer
    param = tl.fma(grad, zero - lr, param)
    tl.store(param_pointers, param, mask=mask)
    _store_copy(tl.load(row + 4), offsets, mask, param, tl.load(row + 6), ALIGNED)
