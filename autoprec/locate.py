"""Finds the first layer that goes non-finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from autoprec.layers import Record
from autoprec.runners import is_functorch_active

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Offender(NamedTuple):
    """The unit to raise, why, and whether it is the operations after it that overflowed."""

    name: str
    reason: str
    is_between: bool


def first_overflow(records: Sequence[Record]) -> Offender | None:
    """Finds the unit to raise after an overflow in the forward.

    Args:
        records: Ranges of outputs (and inputs, if recorded) and the losses of one window, in order of execution.

    Returns:
        ``None`` if all that was recorded was finite. If a unit's input or a loss was not finite already, the operations
        before it overflowed; they run in the precision of the unit before them.
    """
    previous: str | None = None
    for record, is_finite in zip(records, _are_finite(records), strict=True):
        if not is_finite:
            if record.is_input and previous is not None and previous != record.name:
                reason = f"the operations between {previous} and {record.name} left the range of the format"
                return Offender(previous, reason, True)
            if not record.is_input:
                return Offender(record.name, "its output left the range of the format", False)
            return None
        if not record.is_input:
            previous = record.name
    return None


def _are_finite(records: Sequence[Record]) -> list[bool]:
    if not records:
        return []
    device = records[0].bounds.device  # a loss may lie elsewhere
    bounds = torch.stack([record.bounds.float().to(device) for record in records])
    finite: list[bool] = torch.isfinite(bounds).all(dim=1).tolist()
    return finite


class Locator:
    """Watches every layer's output, while steps keep being skipped.

    One hook on all modules does so: one on a module would be in copies and pickles of it that user code makes.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._handle: RemovableHandle | None = None
        self._forward: str | None = None

    def start(self) -> None:
        """Adds the hook."""
        leaves = ((name, each) for name, each in self._root.named_modules() if not any(True for _ in each.children()))
        names = {id(module): name for name, module in leaves if name}

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in names:
                self._look(names[id(module)], args, output)

        self._handle = register_module_forward_hook(hook)

    def stop(self) -> None:
        """Removes the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def report(self) -> str | None:
        """Where the newest forward went non-finite first, ``None`` if every layer's output was finite."""
        return self._forward

    def _look(self, name: str, args: Any, output: Any) -> None:
        if self._forward is None and not is_functorch_active() and not is_finite(output):  # vmap hides values
            place = "its output" if is_finite(args) else "its input, from the operations before it"
            self._forward = f"{name} ({place})"


def is_finite(value: Any) -> bool:
    """Whether no float tensor in a nesting of containers holds inf or NaN; one without readable values holds none."""
    return all(map(bool, finite_flags(value)))


def finite_flags(value: Any) -> Iterator[Tensor]:
    """The same for each of the tensors, left on its device."""
    tensors = (_entries(t) for t in tree_leaves(value) if isinstance(t, Tensor) and t.is_floating_point())
    return (torch.isfinite(tensor).all() for tensor in tensors if tensor is not None)


def _entries(tensor: Tensor) -> Tensor | None:
    """A dense tensor of what is stored, in a dtype that can be tested."""
    if tensor.is_meta or (tensor.is_nested and tensor.layout is torch.strided):
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor
