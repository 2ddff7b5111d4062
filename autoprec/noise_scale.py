"""The gradient-noise scale from pairs of independent gradients, with its error.

It is the trace of the covariance of one sample's gradient over the squared norm of the mean gradient, in samples: with
a batch of that size noise and signal are equally large (McCandlish et al. 2018, appendix A). What lives here: the
estimate, and which entries of gradients it rests on. What does not: when gradients are looked at (``noise_probe``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PAIRS = 32
"""Pairs that an estimate rests on, the newest ones."""

ENTRIES = 2**18
"""Most entries that are kept of a model's gradients."""

# entries that are widened at once: small enough for the C library to hand out the same memory again
_AT_ONCE = 2**14

# Student's t, one-sided 5 %, by degrees of freedom from 1 on; the last one stands for all that follow
_SIGNIFICANT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)
_UNKNOWN = (math.nan, math.nan)
# other libraries' tensors may have no memory of their own
_PLAIN = {Tensor, nn.Parameter}


class NoiseScale:
    """Estimates the noise scale from the newest pairs.

    Attributes:
        estimate: Value and standard error in samples. NaN until two pairs are known, and while the squared norm of the
            mean gradient does not stand out from zero.
    """

    def __init__(self) -> None:
        self.estimate = _UNKNOWN
        self._squares: deque[float] = deque(maxlen=PAIRS)
        self._traces: deque[float] = deque(maxlen=PAIRS)

    def add(self, x: Tensor, y: Tensor, x_rows: float, y_rows: float) -> None:
        """Takes two independent estimates of one gradient; a pair that is not finite is left out.

        Args:
            x: ``[n]``, mean over ``x_rows`` samples.
            y: ``[n]``, mean over ``y_rows`` other samples.
            x_rows: Samples behind ``x``.
            y_rows: Samples behind ``y``.
        """
        square, trace = 0.0, 0.0
        for part, other in zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True):
            wide, other_wide = part.double(), other.double()
            difference = wide - other_wide
            square += float(wide @ other_wide)  # the noises of x and y are independent, so they cancel
            # |x|^2 - <x, y>, without the rounding of two large numbers
            trace += 0.5 * (x_rows * float(wide @ difference) - y_rows * float(other_wide @ difference))
        if math.isfinite(square) and math.isfinite(trace):
            self._squares.append(square)
            self._traces.append(trace)
            self._update()

    def _update(self) -> None:
        squares, traces = np.array(self._squares), np.array(self._traces)
        self.estimate = _UNKNOWN
        count = squares.size
        if count < 2:
            return
        bound = _SIGNIFICANT[min(count - 2, len(_SIGNIFICANT) - 1)]
        others = squares.sum() - squares
        if squares.mean() <= bound * squares.std(ddof=1) / math.sqrt(count) or others.min() <= 0.0:
            return
        left_out = (traces.sum() - traces) / others
        error = math.sqrt((count - 1) * np.var(left_out))  # jackknife
        self.estimate = max(float(traces.sum() / squares.sum()), 0.0), error

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {"squares": list(self._squares), "traces": list(self._traces)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned."""
        self._squares = deque(state["squares"], maxlen=PAIRS)
        self._traces = deque(state["traces"], maxlen=PAIRS)
        self._update()


def gradient_sample(parameters: Sequence[nn.Parameter], grads: Mapping[int, Tensor]) -> Tensor | None:
    """Returns every n-th entry of the gradients, as if they lay end to end; a gradient that is missing counts as zero.

    Args:
        parameters: The parameters in their order.
        grads: Gradients by ``id`` of their parameter, dense or sparse, on any devices.

    Returns:
        ``[m]``, a copy in float32 on the CPU, ``m <= ENTRIES``; ``None`` if there is no gradient, or one of a kind that
        has no such entries (complex numbers, tensors of other libraries).
    """
    parameters = [parameter for parameter in parameters if not nn.parameter.is_lazy(parameter)]
    found = [grads[id(parameter)] for parameter in parameters if id(parameter) in grads]
    if not found or any(type(grad) not in _PLAIN or grad.is_complex() for grad in found):
        return None
    stride = _stride(sum(parameter.numel() for parameter in parameters))
    device, position = found[0].device, 0
    parts = []
    for parameter in parameters:
        start = -position % stride
        position += parameter.numel()
        grad = grads.get(id(parameter))
        if grad is None:
            part = torch.zeros(len(range(start, parameter.numel(), stride)))
        elif grad.is_sparse:
            part = _sparse_entries(grad, start, stride)
        else:
            part = grad.detach().reshape(-1)[start::stride]
        parts.append(part.to(device, torch.float32))
    return torch.cat(parts).cpu()


def _stride(total: int) -> int:
    stride = -(-total // ENTRIES)
    # else it would meet the same few columns in row after row of most matrices
    while stride > 1 and any(stride % prime == 0 for prime in (2, 3, 5, 7)):
        stride += 1
    return max(stride, 1)


def _sparse_entries(grad: Tensor, start: int, stride: int) -> Tensor:
    grad = grad.detach().coalesce()
    values = grad.values().reshape(grad.values().shape[0], -1)
    rows = torch.zeros(values.shape[0], dtype=torch.long, device=values.device)
    for size, index in zip(grad.shape, grad.indices(), strict=False):
        rows = rows * size + index
    flat = rows[:, None] * values.shape[1] + torch.arange(values.shape[1], device=values.device)
    is_met = (flat - start) % stride == 0
    entries = values.new_zeros(len(range(start, grad.numel(), stride)))
    entries[(flat[is_met] - start) // stride] = values[is_met]
    return entries
