"""The operations as callers see them: one signature each, whatever implementation runs.

Every function takes ``implementation``: ``"reference"``, ``"cpu"`` or ``"triton"``, ``None`` for the automatic choice.
A name that cannot run on the device raises ``RuntimeError`` with the names that can.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autoprec.ops.reference_casts import Cast
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


def cast(
    x: Tensor,
    format_name: str,
    *,
    granularity: str | None = None,
    scale: Tensor | None = None,
    saturate: bool = True,
    seed: int | None = None,
    offset: int = 0,
    with_amax: bool = False,
    implementation: str | None = None,
) -> Cast:
    """Rounds a tensor to a narrow format, scaled into its range if asked for.

    Args:
        x: Any shape, float32, bfloat16 or float16. Not changed.
        format_name: ``bf16``, ``fp16``, ``tf32``, ``e4m3``, ``e5m2`` or ``int8``.
        granularity: What shares a scale: ``tensor``, ``row``, ``1x128`` or ``128x128``. ``None`` for no scale, or for
            the one that is passed.
        scale: ``[]``, float32: a scale known beforehand, as in delayed scaling.
        saturate: Too large becomes the largest value, not infinity. e4m3, int8 and everything that is scaled by its
            own amax saturate always.
        seed: Rounds stochastically with the random words of this seed; ``None`` rounds to nearest, ties to even.
        offset: Place in the stream of random words.
        with_amax: Returns the amax even without a granularity.
        implementation: See the module.

    Returns:
        Values in the format's dtype, scale (``[]`` or ``[blocks down, blocks across]``) and amax.

    Raises:
        ValueError: If there is no such granularity.

    Example:
        >>> import torch
        >>> values, scale, amax = cast(torch.tensor([[1.0, -2.0], [4.0, 0.0]]), "int8", granularity="row")
        >>> values.tolist(), scale.tolist(), amax.tolist()
        ([[64, -127], [127, 0]], [[63.5], [31.75]], [[2.0], [4.0]])
    """
    run = resolve("cast", x.device.type, implementation)
    rounded: Cast = run(
        x,
        format_name,
        granularity=granularity,
        scale=scale,
        saturate=saturate,
        seed=seed,
        offset=offset,
        with_amax=with_amax,
    )
    return rounded


def restore(
    values: Tensor,
    scale: Tensor | None = None,
    *,
    granularity: str | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Returns ``values / scale`` in float32, the inverse of :func:`cast` up to rounding.

    Args:
        values: What :func:`cast` returned.
        scale: What it returned or was given.
        granularity: What it was given.
        implementation: See the module.
    """
    run = resolve("restore", values.device.type, implementation)
    restored: Tensor = run(values, scale, granularity=granularity)
    return restored


def fake_cast(
    x: Tensor,
    exponent_bits: Tensor,
    mantissa_bits: Tensor,
    is_finite_only: Tensor,
    *,
    implementation: str | None = None,
) -> Tensor:
    """Rounds each row of a stacked tensor to its own format; values stay in float32.

    Args:
        x: ``[n, ...]``, float32. Not changed.
        exponent_bits: ``[n]``, int64, from 2 to 8.
        mantissa_bits: ``[n]``, int64, from 1 to 23; 23 leaves the row as it is.
        is_finite_only: ``[n]``, bool: no infinity, one NaN, saturating, as e4m3fn. Not with 8 exponent bits.
        implementation: See the module.
    """
    run = resolve("fake_cast", x.device.type, implementation)
    rounded: Tensor = run(x, exponent_bits, mantissa_bits, is_finite_only)
    return rounded
