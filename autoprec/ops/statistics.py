"""Statistics of gradients in eager PyTorch, the specification of the one-pass kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradStats:
    """Statistics of a list of gradients, float32 on the gradients' device. Reading an attribute does not synchronise.

    Attributes:
        table: ``[5 * n + 1]``. What the other attributes are views of.
    """

    table: Tensor

    @property
    def amax(self) -> Tensor:
        """``[n]``. Largest magnitude among the finite entries of each gradient."""
        return self._column(0)

    @property
    def norm(self) -> Tensor:
        """``[n]``. L2 norm of the finite entries."""
        return self._column(1)

    @property
    def nonfinite_count(self) -> Tensor:
        """``[n]``. Entries that are inf or NaN."""
        return self._column(2)

    @property
    def underflow_fraction(self) -> Tensor:
        """``[n]``. Share of the non-zero finite entries below ``tiny``."""
        return self._column(3)

    @property
    def underflow_fraction_lower(self) -> Tensor:
        """``[n]``. The same below ``tiny_lower``."""
        return self._column(4)

    @property
    def total_norm(self) -> Tensor:
        """``[]``. L2 norm over all gradients; inf if an entry is not finite or the norm exceeds float32."""
        return self.table[-1]

    def _column(self, index: int) -> Tensor:
        count = self.table.numel() // 5
        return self.table[index * count : (index + 1) * count]


def values_of(grad: Tensor) -> Tensor:
    """Returns the numbers of a gradient as a dense tensor: merged values of a sparse one, pairs of a complex one."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values


def grad_stats(grads: Sequence[Tensor], tiny: Sequence[float] = (), tiny_lower: Sequence[float] = ()) -> GradStats:
    """Measures gradients one by one; nothing is changed.

    Args:
        grads: Dense or sparse gradients of any shape, all on one device. Sparse ones count their merged values.
        tiny: For each gradient the magnitude below which a value underflows. Empty for no such count.
        tiny_lower: The same for a second count.
    """
    rows = [
        _tensor_stats(values_of(grad).detach(), limits)
        for grad, *limits in zip(grads, _limits(tiny, grads), _limits(tiny_lower, grads), strict=True)
    ]
    columns = torch.stack(rows, dim=1) if rows else torch.zeros(5, 0, dtype=torch.float32, device="cpu")
    total = _norm(columns[1]) if rows else columns.new_zeros(())
    total = torch.where(columns[2].sum() > 0, torch.full_like(total, math.inf), total)
    return GradStats(torch.cat([columns.reshape(-1), total.reshape(1)]))


def _limits(tiny: Sequence[float], grads: Sequence[Tensor]) -> Sequence[float]:
    return tiny or [0.0] * len(grads)


def _tensor_stats(grad: Tensor, limits: Sequence[float]) -> Tensor:
    magnitude = grad.float().abs().reshape(-1)
    if magnitude.numel() == 0:
        return magnitude.new_zeros(3 + len(limits))
    finite = magnitude.isfinite()
    clean = torch.where(finite, magnitude, torch.zeros_like(magnitude))
    nonzero = (clean > 0).sum().clamp(min=1)
    small = [((clean > 0) & (clean < limit)).sum().float() / nonzero for limit in limits]
    return torch.stack([clean.amax(), _norm(clean), (~finite).sum().float(), *small])


def _norm(values: Tensor) -> Tensor:
    """The norm of finite float32 numbers, scaled so that no square overflows or vanishes."""
    unit = values.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    norm: Tensor = (values / unit).norm() * unit
    return norm


def grad_norms(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm of each gradient, accumulated in float32 or wider whatever their dtype.

    Args:
        grads: Dense or sparse gradients, any float dtypes, any devices.

    Returns:
        ``[n]``, float32, or float64 if a gradient is, on the first gradient's device. inf or NaN where an entry is inf
        or NaN, or where the sum of squares exceeds the dtype.
    """
    if not grads:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    device = grads[0].device
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, grad in enumerate(grads):
        values = values_of(grad).detach()
        groups.setdefault((values.device, values.dtype), []).append((index, values))
    result = torch.float64 if any(dtype is torch.float64 for _, dtype in groups) else torch.float32
    norms: list[Tensor] = [torch.zeros((), device=device)] * len(grads)
    for (_, dtype), members in groups.items():
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        for (index, _), norm in zip(members, torch._foreach_norm([v for _, v in members], 2, dtype=wide), strict=True):
            norms[index] = norm if norm.dtype is result and norm.device == device else norm.to(device, result)
    return torch.stack(norms)


def global_norm(grads: Sequence[Tensor], norms: Tensor | None = None) -> Tensor:
    """L2 norm over all gradients.

    Args:
        grads: As in :func:`grad_norms`.
        norms: What :func:`grad_norms` returned for them, if it is known already.

    Returns:
        ``[]``, dtype and device of the norms. inf or NaN exactly if an entry is inf or NaN, or if the norm
        itself exceeds float32.
    """
    norms = grad_norms(grads) if norms is None else norms
    total = torch.linalg.vector_norm(norms)
    return _scaled_norm(grads) if grads and math.isinf(float(total)) else total


def _scaled_norm(grads: Sequence[Tensor]) -> Tensor:
    """The norm without overflow in the squares; reached only when the plain sum overflowed or an entry is inf."""
    device = grads[0].device
    tensors = [_wide(values.detach()) for grad in grads if (values := values_of(grad)).numel()]
    amax = torch.stack([tensor.abs().amax().to(device) for tensor in tensors]).amax()
    if not torch.isfinite(amax):
        return amax
    parts = [(tensor / amax.to(tensor.device)).norm().to(device) for tensor in tensors]
    total: Tensor = torch.linalg.vector_norm(torch.stack(parts)) * amax
    return total


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype is torch.float64 else values.float()


def scale_(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies gradients by ``factor`` in place; used to unscale and to clip.

    Args:
        grads: Dense or sparse gradients. A sparse one is scaled through its stored values, merged or not.
        factor: A number or a tensor ``[]``.
    """
    dense = [grad for grad in grads if not grad.is_sparse]
    if dense:
        torch._foreach_mul_(dense, factor)
    for grad in grads:
        if grad.is_sparse:
            grad._values().mul_(factor)
