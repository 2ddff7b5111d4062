"""Copies of a run in host memory, as many as memory allows, each with a checksum.

What lives here: where copies are, what they take, and whether one is still what was written. What does not: what a run
consists of (``live_state``), compression (``packing``), and when a copy is taken or used (``rollback``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoprec.live_state import Held, Nest, Place, fits_block, frozen
from autoprec.machine_load import free_bytes
from autoprec.packing import Packed, Packer

_ALIGNMENT = 64


class Snapshot:
    """One copy.

    Attributes:
        note: What the caller keeps with it.
        window: Index of the window before which it was taken, for messages.
        state: The nest, with a ``Place`` or ``Held`` for each tensor.
    """

    def __init__(self, note: Nest, window: int, state: Nest, block: Tensor) -> None:
        self.note = note
        self.window = window
        self.state = state
        self.block: Tensor | None = block
        self.packed: Packed | None = None
        self._checksum = checksum(block)

    @property
    def nbytes(self) -> int:
        """What it takes beside its block."""
        return 0 if self.packed is None else self.packed.nbytes

    def reader(self) -> Callable[[Any], Tensor] | None:
        """Returns what makes tensors of ``Place`` and ``Held``; ``None`` if the copy is not what was written."""
        block = self.block
        if block is None:
            block = self.packed.unpack() if self.packed is not None else None
        if block is None or checksum(block) != self._checksum:
            return None
        found = block

        def read(saved: Any) -> Tensor:
            if isinstance(saved, Held):
                return saved.tensor.clone()
            view = saved.view(found)
            return torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype, device=saved.device).copy_(view)

        return read


class SnapshotRing:
    """The newest copies of a run.

    Args:
        keep: Most copies, the oldest goes first.
        max_bytes: Most memory for all of them, ``None`` for a quarter of what is free now.
        packer: Compresses copies in a thread of its own, ``None`` to leave them as they are.

    Attributes:
        max_bytes: Most memory.
        reason: Why there are no copies, or fewer than asked for; ``None`` if nothing is in the way.
        is_off: Whether not even one copy fits.
    """

    def __init__(self, keep: int, max_bytes: int | None = None, packer: Packer | None = None) -> None:
        self.max_bytes = free_bytes() // 4 if max_bytes is None else max_bytes
        self.reason: str | None = None
        self.is_off = False
        self._keep = keep
        self._packer = packer
        self._copies: list[Snapshot] = []
        self._staging: Tensor | None = None

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def nbytes(self) -> int:
        """Memory that the copies take."""
        blocks = {id(block): block.nbytes for each in self._copies if (block := each.block) is not None}
        if self._staging is not None:
            blocks[id(self._staging)] = self._staging.nbytes
        return sum(blocks.values()) + sum(each.nbytes for each in self._copies)

    @property
    def newest(self) -> Snapshot | None:
        """The newest copy."""
        return self._copies[-1] if self._copies else None

    def take(self, state: Nest, note: Nest, window: int = 0) -> bool:
        """Copies a nest. What an exception interrupts, Ctrl-C included, does not count as a copy.

        Args:
            state: Containers of tensors and anything else.
            note: Kept with it as it is.
            window: Index of the window before which it is taken.

        Returns:
            Whether there is a new copy.
        """
        if self.is_off or self._is_occupied():
            return False
        layout = _Layout()
        skeleton = frozen(state, layout.put)
        block = self._room(layout.nbytes)
        if block is None:
            return False
        layout.copy_into(block)
        copy = Snapshot(note, window, skeleton, block)
        self._copies.append(copy)
        del self._copies[: -self._places(layout.nbytes)]
        if self._packer is not None:
            self._staging = block
            self._packer.pack(copy, block, layout.places)
        return True

    def aside(self, state: Nest, note: Nest, window: int = 0) -> Snapshot | None:
        """Copies a nest for a while, beside the copies that are kept; the arguments are those of :meth:`take`.

        Returns:
            The copy, ``None`` where the memory for copies is not enough.
        """
        layout = _Layout()
        skeleton = frozen(state, layout.put)
        if self.nbytes + layout.nbytes > self.max_bytes:
            return None
        block = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.copy_into(block)
        return Snapshot(note, window, skeleton, block)

    def drop_newest(self) -> None:
        """Forgets the newest copy."""
        self._copies.pop()

    def clear(self) -> None:
        """Forgets all copies."""
        if self._packer is not None:
            self._packer.wait()
        self._copies.clear()
        self._staging = None

    def close(self) -> None:
        """Forgets all copies and ends the thread that compresses."""
        if self._packer is not None:
            self._packer.close()
        self.clear()

    def _is_occupied(self) -> bool:
        if self._packer is None:
            return False
        if torch.are_deterministic_algorithms_enabled():
            self._packer.wait()  # else a clock would choose which step is copied
        if self._packer.is_busy:
            return True
        for each in self._copies:
            if each.packed is not None:
                each.block = None
        return False

    def _places(self, nbytes: int) -> int:
        """How many copies there may be."""
        return self._keep if self._packer is not None else min(self._keep, self.max_bytes // nbytes)

    def _room(self, nbytes: int) -> Tensor | None:
        """Memory for a copy: that of the oldest where there are enough, else new, ``None`` if there is none."""
        if nbytes > self.max_bytes or not self._places(nbytes):
            self.clear()
            self.is_off = True
            self.reason = (
                f"a copy takes {nbytes / 1e6:.3g} MB, more than the {self.max_bytes / 1e6:.3g} MB that it may take"
            )
            return None
        if self._places(nbytes) < self._keep:
            self.reason = f"{self.max_bytes / 1e6:.3g} MB are not enough for {self._keep}"
        block = self._reusable(nbytes)
        if block is not None:
            return block
        while self._copies and self.nbytes + nbytes > self.max_bytes:
            self._copies.pop(0)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def _reusable(self, nbytes: int) -> Tensor | None:
        if self._packer is not None:
            block, self._staging = self._staging, None
            if any(each.block is block for each in self._copies):  # it could not be compressed
                self._copies = [each for each in self._copies if each.block is not block]
            while self._copies and self.nbytes + nbytes > self.max_bytes:
                self._copies.pop(0)
            return block if block is not None and block.nbytes == nbytes else None
        if len(self._copies) < self._places(nbytes):
            return None
        block = self._copies[0].block
        if block is None or block.nbytes != nbytes:
            return None
        self._copies.pop(0)  # from here on it is no copy any more
        return block


class _Layout:
    """Where the tensors of a nest go in a block; the same tensor has one place."""

    def __init__(self) -> None:
        self.nbytes = _ALIGNMENT
        self.places: list[Place] = []
        self._tensors: list[Tensor] = []
        self._known: dict[int, Place | Held] = {}

    def put(self, tensor: Tensor) -> Place | Held:
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = self._placed(tensor) if fits_block(tensor) else Held(tensor)
        return known

    def _placed(self, tensor: Tensor) -> Place:
        place = Place(tensor, self.nbytes)
        self.nbytes += -(-tensor.numel() * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.places.append(place)
        self._tensors.append(tensor.detach())
        return place

    def copy_into(self, block: Tensor) -> None:
        for place, tensor in zip(self.places, self._tensors, strict=True):
            place.view(block).copy_(tensor)


def checksum(block: Tensor) -> int:
    """The sum of a block's 64-bit words; differs after any single change. Reads memory once."""
    return int(block.view(torch.int64).sum())
