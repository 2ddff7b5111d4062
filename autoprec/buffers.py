"""Puts buffers back when a step is skipped: running statistics that the forwards of its window have written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

# torch's batch_norm writes these without counting up the tensor's version
_STATISTICS = ("running_mean", "running_var")
# what was never written is kept in case it will be, up to this size
_KEPT_BYTES = 16 * 2**20


@dataclass
class _Entry:
    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None
    has_hidden_writes: bool

    @property
    def is_unwritten(self) -> bool:
        current = self.module._buffers.get(self.name)
        return current is self.buffer and self.buffer._version == self.version and not self.has_hidden_writes


class BufferShadow:
    """Keeps the values that a model's buffers had at the start of the current window.

    All buffers are copied at the first window that sees them and again whenever they were written. Large or boolean
    ones (attention masks) that this window did not write lose their copy, so the cost per step is one copy of the
    running statistics, and the memory at most twice the buffers.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._fresh: list[_Entry] = []  # seen first at the start of this window: nothing is known about their writes
        self._layout: _Layout | None = None

    def refresh(self) -> None:
        """Notes the start of a window; copies what was written since the last call."""
        self._learn()
        if self._layout is None or self._layout.has_changed:
            self._fresh = self._discover()
        for key, entry in list(self._entries.items()):
            buffer = entry.module._buffers.get(entry.name)
            if buffer is None:
                del self._entries[key]  # removed in a step that counted
            elif not buffer.is_inference() and not entry.is_unwritten:
                _copy(entry, buffer)

    def restore(self) -> list[str]:
        """Gives the buffers the values of the last ``refresh``.

        Returns:
            Names of buffers that were written for the first time in this window and could not be put back.
        """
        lost: list[str] = []
        fresh = set(map(id, self._fresh))
        if self._layout is not None and self._layout.has_changed:
            lost.extend(entry.name for entry in self._discover())
        for entry in self._entries.values():
            if entry.is_unwritten and id(entry) not in fresh:
                if entry.copy is not None and _differs(entry.buffer, entry.copy):
                    lost.append(entry.name)
                    entry.has_hidden_writes = True
                continue
            if entry.copy is None:
                lost.append(entry.name)
                continue
            entry.module._buffers[entry.name] = entry.buffer
            with torch.no_grad():
                entry.buffer.copy_(entry.copy)
            entry.version = entry.buffer._version
        return lost

    def _discover(self) -> list[_Entry]:
        """Copies the buffers that are not known yet, those of layers included that were added in mid-run."""
        self._layout = _Layout(self._root)
        found: list[_Entry] = []
        for module in self._layout.modules:
            for name, buffer in module._buffers.items():
                key = (id(module), name)
                if buffer is None or buffer.is_inference() or key in self._entries:
                    continue
                hidden = isinstance(module, _NormBase) or name in _STATISTICS
                entry = _Entry(module, name, buffer, buffer._version, buffer.detach().clone(), hidden)
                self._entries[key] = entry
                found.append(entry)
        return found

    def _learn(self) -> None:
        """After a buffer's first window: whether it changes behind its version, and whether it needs a copy."""
        for entry in self._fresh:
            if not entry.is_unwritten or entry.copy is None:
                continue
            if _differs(entry.buffer, entry.copy):
                entry.has_hidden_writes = True
            elif entry.buffer.dtype is torch.bool or entry.buffer.nbytes > _KEPT_BYTES:
                entry.copy = None
        self._fresh = []


class _Layout:
    """Which modules and buffers a model has, in a form that is cheap to compare at every step."""

    def __init__(self, root: nn.Module) -> None:
        self.modules = list(root.modules())  # held, so that no later module gets the address of one that is gone
        self._tables = [table for module in self.modules for table in (module._modules, module._buffers)]
        self._parents = [module._modules for module in self.modules if module._modules]
        self._empty = [(m._buffers, name) for m in self.modules for name, b in m._buffers.items() if b is None]
        self._size, self._children = self._count()

    def _count(self) -> tuple[int, list[int]]:
        return sum(map(len, self._tables)), [id(child) for table in self._parents for child in table.values()]

    @property
    def has_changed(self) -> bool:
        """Whether a module or buffer was added, replaced or removed."""
        return self._count() != (self._size, self._children) or any(
            table.get(name) is not None for table, name in self._empty
        )


def _copy(entry: _Entry, buffer: Tensor) -> None:
    if entry.copy is None or entry.copy.shape != buffer.shape or entry.copy.dtype != buffer.dtype:
        entry.copy = buffer.detach().clone()
    else:
        entry.copy.copy_(buffer.detach())
    entry.buffer, entry.version = buffer, buffer._version


def _differs(buffer: Tensor, copy: Tensor) -> bool:
    return not torch.equal(buffer, copy) and not bool(torch.isnan(copy).any())
