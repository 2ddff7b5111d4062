"""Delayed scaling of 8-bit tensors: scales that follow from the amaxes of earlier steps.

A scale that is known before the cast saves a pass over the tensor. State and updates stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class DelayedScaling:
    """Scales for a number of tensors, each from the largest amax of its last steps.

    What a step records, however often (recomputation, accumulation), is one entry of the history; a skipped step leaves
    none.

    Args:
        limits: Largest value of each tensor's format.
        history_length: Steps that the history covers.
        margin: Powers of two left between the largest amax and the limit.
        device: Where the tensors are.
    """

    def __init__(
        self,
        limits: Sequence[float],
        *,
        history_length: int = 16,
        margin: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if history_length < 1:
            raise ValueError(
                f"Passed `DelayedScaling(history_length={history_length!r})`. `history_length` must be an int >= 1."
            )
        count = len(limits)
        self._targets = torch.tensor(limits, dtype=torch.float64, device=device) * 2.0**-margin
        self._history = torch.zeros(history_length, count, dtype=torch.float32, device=device)
        self._place = 0
        self._current = torch.zeros(count, dtype=torch.float32, device=device)
        self.scale = torch.ones(count, dtype=torch.float32, device=device)
        """``[n]``, float32: what to multiply each tensor by in this step. 1 until something was recorded."""

    def record(self, index: int, amax: Tensor) -> None:
        """Notes an amax of one tensor in the running step.

        Args:
            index: Which tensor.
            amax: ``[]``, float32, before scaling. What is not finite is not noted.
        """
        entry = self._current[index]
        torch.maximum(entry, torch.where(amax.isfinite(), amax, entry), out=entry)

    def advance(self, found_inf: Tensor | None = None) -> None:
        """Ends a step: what was recorded enters the history, the scales follow.

        Args:
            found_inf: ``[]``, float32. The step was skipped where it is not zero: scales and history stay. Read on the
                device only.
        """
        row = self._history[self._place]
        if found_inf is None:
            row.copy_(self._current)
            self._place = (self._place + 1) % len(self._history)
        else:
            self._advance_where(found_inf == 0)
        amax = self._history.amax(dim=0)
        scale = (self._targets / amax.double()).float()
        torch.where((amax > 0) & scale.isfinite(), scale, self.scale, out=self.scale)
        self._current.zero_()

    def _advance_where(self, was_applied: Tensor) -> None:
        # the newest entry is always the last row, so that no place depends on what only the device knows
        shifted = torch.cat([self._ordered()[1:], self._current[None]])
        self._history.copy_(torch.where(was_applied, shifted, self._ordered()))
        self._place = 0

    def _ordered(self) -> Tensor:
        """The history from the oldest entry on."""
        return torch.roll(self._history, -self._place, dims=0)

    def state_dict(self) -> dict[str, Tensor]:
        """Returns history, oldest entry first, and scales. The step in progress is not part of it."""
        return {"history": self._ordered(), "scale": self.scale.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what :meth:`state_dict` returned.

        Raises:
            ValueError: If it comes from another number of tensors or another history length.
        """
        if state["history"].shape != self._history.shape:
            raise ValueError(
                f"Passed a state with history {list(state['history'].shape)}. This object keeps"
                f" {list(self._history.shape)}: steps, tensors."
            )
        self._history.copy_(state["history"])
        self.scale.copy_(state["scale"])
        self._current.zero_()
        self._place = 0
