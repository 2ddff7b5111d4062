"""The operations as callers see them: one signature each, whatever implementation runs.

Every function takes ``implementation``: ``"reference"``, ``"cpu"`` or ``"triton"``, ``None`` for the automatic choice.
A name that cannot run on the device raises ``RuntimeError`` with the names that can.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoprec.ops.registry import resolve
from autoprec.ops.statistics import GradStats


def _device_type(tensors: Sequence[Tensor]) -> str:
    return tensors[0].device.type if tensors else "cpu"


def grad_stats(
    grads: Sequence[Tensor],
    tiny: Sequence[float] = (),
    tiny_lower: Sequence[float] = (),
    *,
    implementation: str | None = None,
) -> GradStats:
    """Measures gradients in one pass over memory; nothing is changed.

    Norms and non-finite entries are always measured and cost one read of the gradients. Shares below a limit cost more
    instructions, so they are counted only if asked for.

    Args:
        grads: Gradients of any shape, all on one device. float32, bfloat16 and float16 are read as they are; sparse,
            complex, float64 and non-contiguous ones are copied first. Sparse ones count their merged values.
        tiny: For each gradient the magnitude below which a value underflows. Empty for no such count.
        tiny_lower: The same for a second count, of the next lower format.
        implementation: See the module.

    Example:
        >>> import torch
        >>> stats = grad_stats([torch.tensor([3.0, -4.0]), torch.tensor([float("inf"), 12.0])])
        >>> stats.norm.tolist(), stats.nonfinite_count.tolist(), float(stats.total_norm)
        ([5.0, 12.0], [0.0, 1.0], inf)
    """
    run = resolve("grad_stats", _device_type(grads), implementation)
    stats: GradStats = run(grads, tiny, tiny_lower)
    return stats
