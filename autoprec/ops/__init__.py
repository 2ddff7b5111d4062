"""Numerics. ``reference`` is the specification in eager PyTorch; faster implementations are measured against it."""

from __future__ import annotations

from autoprec.ops.reference import (
    GradStats,
    dequantize_rows,
    embedding,
    fake_quantize,
    global_norm,
    grad_norms,
    grad_stats,
    linear,
    quantize_rows,
    quantize_tensor,
    scale_,
)

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
