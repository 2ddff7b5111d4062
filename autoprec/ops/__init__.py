"""Numerics: the specification in eager PyTorch and the kernels that are measured against it."""

from __future__ import annotations

from autoprec.ops.interface import grad_stats
from autoprec.ops.reference import (
    dequantize_rows,
    embedding,
    fake_quantize,
    linear,
    quantize_rows,
    quantize_tensor,
)
from autoprec.ops.registry import Implementation, implementations
from autoprec.ops.statistics import GradStats, global_norm, grad_norms, scale_

__all__ = [
    "GradStats",
    "Implementation",
    "dequantize_rows",
    "embedding",
    "fake_quantize",
    "global_norm",
    "grad_norms",
    "grad_stats",
    "implementations",
    "linear",
    "quantize_rows",
    "quantize_tensor",
    "scale_",
]
