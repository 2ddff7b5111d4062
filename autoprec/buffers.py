"""Puts buffers back when a step is skipped: running statistics that the forwards of its window have written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass
class _Entry:
    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None
    is_always_copied: bool


class BufferShadow:
    """Keeps the values that a model's buffers had at the start of the current window.

    All buffers are copied at the first window. Those that its forwards did not write (masks, position tables) lose
    their copy after it, so the cost per step is one copy of the running statistics.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._entries: dict[tuple[int, str], _Entry] = {}
        self._has_begun = False

    def begin(self) -> None:
        """Notes the start of a window; copies what was written since the last call."""
        for module in self._root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_inference():
                    self._note(module, name, buffer)
        self._has_begun = True

    def refresh(self) -> None:
        """The same for the buffers known so far; cheap enough for every step."""
        if not self._has_begun:
            self.begin()
            return
        for entry in self._entries.values():
            buffer = entry.module._buffers.get(entry.name)
            if buffer is not None and not buffer.is_inference():
                self._note(entry.module, entry.name, buffer)

    def restore(self) -> list[str]:
        """Gives the buffers the values of the last ``begin`` or ``refresh``.

        Returns:
            Names of buffers that were written for the first time in this window and could not be put back.
        """
        lost: list[str] = []
        for entry in self._entries.values():
            current = entry.module._buffers.get(entry.name)
            if current is entry.buffer and entry.buffer._version == entry.version:
                continue
            if entry.copy is None:
                lost.append(entry.name)
                continue
            entry.module._buffers[entry.name] = entry.buffer
            with torch.no_grad():
                entry.buffer.copy_(entry.copy)
            entry.version = entry.buffer._version
        return lost

    def _note(self, module: nn.Module, name: str, buffer: Tensor) -> None:
        entry = self._entries.get((id(module), name))
        if entry is None:
            always = isinstance(module, _NormBase)
            copy = buffer.detach().clone()
            self._entries[id(module), name] = _Entry(module, name, buffer, buffer._version, copy, always)
            return
        is_unwritten = buffer is entry.buffer and buffer._version == entry.version
        if is_unwritten:
            if not entry.is_always_copied:
                entry.copy = None
            return
        entry.is_always_copied = True
        if entry.copy is None or entry.copy.shape != buffer.shape or entry.copy.dtype != buffer.dtype:
            entry.copy = buffer.detach().clone()
        else:
            entry.copy.copy_(buffer.detach())
        entry.buffer, entry.version = buffer, buffer._version
