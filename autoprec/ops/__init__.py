"""Numerics in eager PyTorch: the specification against which every faster implementation is measured."""

from __future__ import annotations

from autoprec.ops.reference import (
    dequantize_rows,
    embedding,
    fake_quantize,
    linear,
    quantize_rows,
    quantize_tensor,
)
from autoprec.ops.statistics import GradStats, global_norm, grad_norms, grad_stats, scale_

__all__ = [
    "GradStats",
    "dequantize_rows",
    "embedding",
    "fake_quantize",
    "global_norm",
    "grad_norms",
    "grad_stats",
    "linear",
    "quantize_rows",
    "quantize_tensor",
    "scale_",
]
