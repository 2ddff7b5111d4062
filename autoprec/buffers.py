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

    All buffers are copied at the first window and again whenever they were written. Large or boolean ones (attention
    masks) that the first window did not write lose their copy, so the cost per step is one copy of the running
    statistics, and the memory at most twice the buffers.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._windows = 0

    def refresh(self) -> None:
        """Notes the start of a window; copies what was written since the last call."""
        if self._windows == 0:
            self._discover()
        elif self._windows == 1:
            self._learn()
        self._windows += 1
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
        for entry in self._entries.values():
            if entry.is_unwritten and self._windows > 1:  # in the first window nothing is known about hidden writes
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

    def _discover(self) -> None:
        for module in self._root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    hidden = isinstance(module, _NormBase) or name in _STATISTICS
                    copy = buffer.detach().clone()
                    self._entries[id(module), name] = _Entry(module, name, buffer, buffer._version, copy, hidden)

    def _learn(self) -> None:
        """After the first window: which buffers change behind their version, and which need no copy."""
        for entry in self._entries.values():
            if not entry.is_unwritten or entry.copy is None:
                continue
            if _differs(entry.buffer, entry.copy):
                entry.has_hidden_writes = True
            elif entry.buffer.dtype is torch.bool or entry.buffer.nbytes > _KEPT_BYTES:
                entry.copy = None


def _copy(entry: _Entry, buffer: Tensor) -> None:
    if entry.copy is None or entry.copy.shape != buffer.shape or entry.copy.dtype != buffer.dtype:
        entry.copy = buffer.detach().clone()
    else:
        entry.copy.copy_(buffer.detach())
    entry.buffer, entry.version = buffer, buffer._version


def _differs(buffer: Tensor, copy: Tensor) -> bool:
    return not torch.equal(buffer, copy) and not bool(torch.isnan(copy).any())
