"""Numerics: the specification in eager PyTorch and the kernels that are measured against it."""

from __future__ import annotations

from autoprec.ops.copies import new_copy
from autoprec.ops.int8 import int8_linear, int8_matmul
from autoprec.ops.interface import cast, fake_cast, grad_stats, restore
from autoprec.ops.optimizers import fused_adam_, fused_sgd_, prepare_adam, prepare_sgd, refresh_copies_
from autoprec.ops.prepared import AdamStep, PreparedStep, SgdStep
from autoprec.ops.reference import (
    dequantize_rows,
    embedding,
    fake_quantize,
    linear,
    quantize_rows,
    quantize_tensor,
)
from autoprec.ops.reference_casts import Cast
from autoprec.ops.reference_steps import WeightCopy
from autoprec.ops.registry import Implementation, describe, has_kernel, implementations
from autoprec.ops.statistics import GradStats, global_norm, grad_norms, scale_

__all__ = [
    "AdamStep",
    "Cast",
    "GradStats",
    "Implementation",
    "PreparedStep",
    "SgdStep",
    "WeightCopy",
    "cast",
    "dequantize_rows",
    "describe",
    "embedding",
    "fake_cast",
    "fake_quantize",
    "fused_adam_",
    "fused_sgd_",
    "global_norm",
    "grad_norms",
    "grad_stats",
    "has_kernel",
    "implementations",
    "int8_linear",
    "int8_matmul",
    "linear",
    "new_copy",
    "prepare_adam",
    "prepare_sgd",
    "quantize_rows",
    "quantize_tensor",
    "refresh_copies_",
    "restore",
    "scale_",
]
