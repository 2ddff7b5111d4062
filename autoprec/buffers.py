"""Puts buffers back when a step is skipped: running statistics that the forwards of its window have written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

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
        self._drop_removed()
        self._fresh = self._discover()
        for entry in self._entries.values():
            buffer = entry.module._buffers[entry.name]
            if buffer is not None and not buffer.is_inference() and not entry.is_unwritten:
                _copy(entry, buffer)

    def restore(self) -> list[str]:
        """Gives the buffers the values of the last ``refresh``.

        Returns:
            Names of buffers that were written for the first time in this window and could not be put back.
        """
        if self._layout is not None:
            self._layout.empty()
        known = list(self._entries)
        lost = [entry.name for entry in self._discover()]
        fresh = set(map(id, self._fresh))
        for entry in [self._entries[key] for key in known if key in self._entries]:
            if entry.is_unwritten and id(entry) not in fresh:
                if entry.copy is not None and _differs(entry.buffer, entry.copy):
                    lost.append(entry.name)
                    entry.has_hidden_writes = True
            elif entry.copy is None:
                lost.append(entry.name)
            else:
                _put_back(entry, entry.copy)
        return lost

    def put_back_nonfinite(self) -> None:
        """Gives buffers that are not finite the values of the last ``refresh``; called where a window is broken off."""
        for entry in self._entries.values():
            if entry.copy is not None and not _is_finite(entry.buffer) and _is_finite(entry.copy):
                _put_back(entry, entry.copy)

    def _drop_removed(self) -> None:
        """Forgets buffers that a step that counted has removed."""
        removed = [key for key, entry in self._entries.items() if entry.module._buffers.get(entry.name) is None]
        for key in removed:
            del self._entries[key]
        if removed:
            self._layout = None

    def _discover(self) -> list[_Entry]:
        """Copies the buffers that are not known yet, those of layers included that were added in mid-run."""
        if self._layout is not None and not self._layout.has_changed:
            return []
        self._layout = _Layout(self._root)
        present = set(map(id, self._layout.modules))
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] in present}
        found: list[_Entry] = []
        for module in self._layout.modules:
            for name, buffer in module._buffers.items():
                key = (id(module), name)
                if key in self._entries or buffer is None or is_lazy(buffer) or buffer.is_inference():
                    continue
                hidden = isinstance(module, _NormBase) or name in _STATISTICS
                self._entries[key] = _Entry(module, name, buffer, buffer._version, buffer.detach().clone(), hidden)
                found.append(self._entries[key])
        return found

    def _learn(self) -> None:
        """After a buffer's first window: whether it changes behind its version, and whether it needs a copy."""
        for entry in self._fresh:
            if not entry.is_unwritten or entry.copy is None:
                continue
            if _differs(entry.buffer, entry.copy):
                entry.has_hidden_writes = True
            elif entry.buffer.dtype is torch.bool or (_is_plain(entry.buffer) and entry.buffer.nbytes > _KEPT_BYTES):
                entry.copy = None
        self._fresh = []


class _Layout:
    """Which modules and buffers a model has, in a form that is cheap to compare at every step."""

    def __init__(self, root: nn.Module) -> None:
        self.modules = list(root.modules())  # held, so that no later module gets the address of one that is gone
        self._tables = [table for module in self.modules for table in (module._modules, module._buffers)]
        self._parents = [module._modules for module in self.modules if module._modules]
        self._owners = [module._buffers for module in self.modules if module._buffers]
        # without a value yet: None, or lazy, which torch fills in place
        self._vacant = [(t, name, b) for t in self._owners for name, b in t.items() if b is None or is_lazy(b)]
        self._shape = self._read()

    def _read(self) -> tuple[int, list[int], list[str]]:
        children = [id(child) for table in self._parents for child in table.values()]
        return sum(map(len, self._tables)), children, [name for table in self._owners for name in table]

    @property
    def has_changed(self) -> bool:
        """Whether a module or buffer was added, replaced, renamed, removed or filled."""
        return any(self._is_filled(table.get(name)) for table, name, _ in self._vacant) or self._read() != self._shape

    def empty(self) -> None:
        """Takes values away that were filled in since; a lazy buffer keeps its own."""
        for table, name, found in self._vacant:
            if found is None and table.get(name) is not None:
                table[name] = None

    @staticmethod
    def _is_filled(buffer: Tensor | None) -> bool:
        return buffer is not None and not is_lazy(buffer)


def _is_plain(buffer: Tensor) -> bool:
    """Whether values can be compared; sparse and nested tensors and subclasses go by their version alone."""
    return type(buffer) is Tensor and buffer.layout is torch.strided and buffer.device.type != "meta"


def _copy(entry: _Entry, buffer: Tensor) -> None:
    if entry.copy is not None and _is_alike(buffer, entry.copy):
        entry.copy.copy_(buffer.detach())
    else:
        entry.copy = buffer.detach().clone()
    entry.buffer, entry.version = buffer, buffer._version


def _put_back(entry: _Entry, copy: Tensor) -> None:
    if not _is_plain(copy):  # torch writes some sparse layouts in place only where the pattern is the same
        entry.buffer = copy.clone()
    entry.module._buffers[entry.name] = entry.buffer
    with torch.no_grad():
        if _is_alike(entry.buffer, copy):
            entry.buffer.copy_(copy)
        elif _is_plain(copy):
            entry.buffer.data = copy.clone()
    entry.version = entry.buffer._version


def _is_alike(buffer: Tensor, copy: Tensor) -> bool:
    return _is_plain(buffer) and buffer.shape == copy.shape and buffer.dtype == copy.dtype


def _differs(buffer: Tensor, copy: Tensor) -> bool:
    return _is_plain(buffer) and not torch.equal(buffer, copy) and not bool(torch.isnan(copy).any())


def _is_finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())
