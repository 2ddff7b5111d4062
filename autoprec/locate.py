"""Finds the first layer that goes non-finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autoprec.layers import Record


def first_overflow(records: Sequence[Record]) -> tuple[str, str] | None:
    """Names the unit to raise after an overflow in the forward.

    Args:
        records: Ranges of outputs (and inputs, if recorded) of one window, in order of execution.

    Returns:
        Unit name and reason, or ``None`` if every recorded output was finite. If a unit's input was not finite already,
        the operations before it overflowed, and they run in the precision of the unit before them.
    """
    if not records:
        return None
    finite = torch.isfinite(torch.stack([record.bounds.float() for record in records])).all(dim=1).tolist()
    previous: str | None = None
    for record, is_finite in zip(records, finite, strict=True):
        if not is_finite:
            if record.is_input and previous is not None and previous != record.name:
                return previous, f"the operations between {previous} and {record.name} left the range of the format"
            if not record.is_input:
                return record.name, "its output left the range of the format"
            return None
        if not record.is_input:
            previous = record.name
    return None


class Locator:
    """Watches every layer's output and gradient through hooks, while steps keep being skipped.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._handles: list[Any] = []
        self._forward: str | None = None

    def start(self) -> None:
        """Adds the hooks."""
        for name, module in self._root.named_modules():
            if name and not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(self._hook(name)))

    def stop(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def report(self) -> str | None:
        """Where the newest forward went non-finite first, ``None`` if every layer's output was finite."""
        return self._forward

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._forward is None and not _is_finite(output):
                place = "its output" if _is_finite(args) else "its input, from the operations before it"
                self._forward = f"{name} ({place})"

        return hook


def _is_finite(value: Any) -> bool:
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point()]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
