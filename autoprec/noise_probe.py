"""Takes the pairs of gradients from which the noise scale is estimated, in windows that are measured for a decision.

With accumulation a window has the pair itself: its first micro-batch and the mean of the others, at the same weights.
Without it the window that is measured makes a pair with the next one that is applied. Their weights differ by one step,
which depends on the first of them: the larger the steps, the more is the noise scale overestimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from autoprec.noise_scale import NoiseScale, gradient_sample


class _Mean(NamedTuple):
    """Entries of a mean gradient, and over how many samples it was taken."""

    sample: Tensor
    rows: float


class NoiseProbe:
    """Looks at gradients of one fit.

    Attributes:
        scale: The estimate.
        effective_batch: Samples behind the latest optimizer step that was looked at, NaN if they are not known.
        is_open: Whether the gradients of the current window are wanted.
    """

    def __init__(self) -> None:
        self.scale = NoiseScale()
        self.effective_batch = math.nan
        self._waiting: _Mean | None = None
        self.close()

    def close(self) -> None:
        """Called when a window has ended."""
        self.is_open = self._is_sampling = False
        self._rows: list[int] = []
        self._samples = 0
        self._early: Tensor | None = None
        self._means: tuple[_Mean, ...] = ()

    def begin_window(self, is_sampling: bool) -> None:
        """Called when a window opens.

        Args:
            is_sampling: Whether it is measured for a decision.
        """
        self.close()
        self._is_sampling = is_sampling
        self.is_open = is_sampling or self._waiting is not None

    def note_micro_batch(self, rows: int, parameters: Sequence[nn.Parameter], factor: float, is_last: bool) -> None:
        """Called after each backward of a window that is open.

        Args:
            rows: Samples in the micro-batch, 0 if not known.
            parameters: Whose gradients to look at.
            factor: What takes loss scale and division by the number of micro-batches off them.
            is_last: Whether the step follows.
        """
        self._rows.append(rows)
        if self._is_sampling and len(self._rows) == 1 and not is_last:
            sample = gradient_sample(parameters, {id(p): p.grad for p in parameters if p.grad is not None})
            self._early = None if sample is None else sample.mul_(factor)

    def note_step(self, parameters: Sequence[nn.Parameter], grads: Mapping[int, Tensor], factor: float) -> None:
        """Called before the step of a window that is open, and before hooks and clipping.

        Args:
            parameters: All parameters of the optimizer.
            grads: Gradients by ``id`` of their parameter.
            factor: What takes the loss scale and the division by the number of micro-batches off them.
        """
        rows, sample = self._rows, gradient_sample(parameters, grads)
        if sample is None or not rows or not all(rows):
            self._means = ()
            return
        sample.mul_(factor)
        self._samples = sum(rows)
        if self._early is not None and len(self._early) == len(sample) and len(rows) > 1:
            rest = (sample - self._early).div_(len(rows) - 1)
            self._means = _Mean(self._early, rows[0]), _Mean(rest, _rows_behind(rows[1:]))
        else:
            self._means = (_Mean(sample.div_(len(rows)), _rows_behind(rows)),)

    def note_applied(self) -> None:
        """Called when the step was applied."""
        if not self.is_open:
            return
        means = self._means
        waiting, self._waiting = self._waiting, None  # weights have moved on
        self.effective_batch = float(self._samples) if means else math.nan
        if len(means) == 1 and waiting is not None and len(waiting.sample) == len(means[0].sample):
            means = waiting, means[0]
        elif len(means) == 1 and self._is_sampling:
            self._waiting = means[0]
        if len(means) == 2:
            x, y = means
            self.scale.add(x.sample, y.sample, x.rows, y.rows)

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives, and a tensor while the first half of a pair waits for the second."""
        waiting = None if self._waiting is None else self._waiting._asdict()
        return {**self.scale.state_dict(), "effective_batch": self.effective_batch, "waiting": waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned."""
        self.scale.load_state_dict(state)
        self.effective_batch = float(state["effective_batch"])
        waiting = state["waiting"]
        self._waiting = None if waiting is None else _Mean(**waiting)
        self.close()


def _rows_behind(rows: Sequence[int]) -> float:
    """Samples whose mean is as noisy as the mean of the means of parts with ``rows`` samples each."""
    return len(rows) ** 2 / sum(1.0 / each for each in rows)
