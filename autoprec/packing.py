"""Compresses copies of a run with zstandard, in one thread of its own.

Floats are sorted by byte before that: signs and exponents of neighbours are alike, where whole floats are not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from autoprec.live_state import Place

_CHUNK = 2**22
_LEVEL = 1


class Packable(Protocol):
    """What gets a compressed form."""

    packed: Packed | None


class Packed:
    """A block of memory in compressed form.

    Args:
        block: ``[n]``, uint8.
        runs: First byte and bytes of an item, for each stretch of items of one size.
        codec: Module ``zstandard``.
    """

    def __init__(self, block: Tensor, runs: Sequence[tuple[int, int]], codec: Any) -> None:
        self._size = block.numel()
        self._runs = list(runs)
        self._codec = codec
        compressor = codec.ZstdCompressor(level=_LEVEL)
        self._parts = [
            compressor.compress(_by_byte(block[start:end], width).numpy()) for start, end, width in self._ranges()
        ]
        self.nbytes = sum(map(len, self._parts))

    def unpack(self) -> Tensor | None:
        """Returns the block, ``None`` if the compressed form is damaged."""
        block = torch.zeros(self._size, dtype=torch.uint8)
        decompressor = self._codec.ZstdDecompressor()
        for part, (start, end, width) in zip(self._parts, self._ranges(), strict=True):
            try:
                found = bytearray(decompressor.decompress(part))
            except self._codec.ZstdError:
                return None
            if len(found) != end - start:
                return None
            planes = torch.frombuffer(found, dtype=torch.uint8)
            block[start:end] = planes.view(width, -1).t().reshape(-1)
        return block

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """Chunks, so that little memory is needed beside the block."""
        ends = [start for start, _ in self._runs[1:]] + [self._size]
        for (first, width), end in zip(self._runs, ends, strict=True):
            for start in range(first, end, _CHUNK):
                yield start, min(start + _CHUNK, end), width


class Packer:
    """Compresses one copy at a time while training goes on.

    Attributes:
        error: What went wrong in the thread, ``None`` so far. Copies stay as they are from then on.

    Raises:
        ModuleNotFoundError: If zstandard is not installed.
    """

    def __init__(self) -> None:
        self._codec = load_codec()
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Packable, Tensor, list[tuple[int, int]]] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a copy is being compressed."""
        return not self._idle.is_set()

    def pack(self, copy: Packable, block: Tensor, places: Sequence[Place]) -> None:
        """Starts to compress a block, which must not be written before that is done.

        Args:
            copy: Gets the compressed form.
            block: What to compress.
            places: The tensors in it, in their order.
        """
        if self.error is not None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="autoprec-compress", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._jobs.put((copy, block, _runs(places)))

    def wait(self) -> None:
        """Waits until nothing is being compressed."""
        self._idle.wait()

    def close(self) -> None:
        """Ends the thread, after what it is at."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            copy, block, runs = job
            try:
                copy.packed = Packed(block, runs, self._codec)
            except BaseException as error:  # a thread has nobody to raise to; the owner reports it
                self.error = error
            finally:
                del job, copy, block
                self._idle.set()


def load_codec() -> Any:
    """Returns the module that compresses.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Passed `RollbackConfig(compress=True)`. It needs zstandard."
            " Run `pip install '.[compress]'` in a checkout of autoprec."
        ) from error
    return zstandard


def _runs(places: Sequence[Place]) -> list[tuple[int, int]]:
    """First byte and item size of each stretch of one item size."""
    runs = [(0, places[0].dtype.itemsize if places else 1)]
    for place in places:
        if place.dtype.itemsize != runs[-1][1]:
            runs.append((place.offset, place.dtype.itemsize))
    return runs


def _by_byte(block: Tensor, width: int) -> Tensor:
    """First bytes of all items, then all second bytes, and so on."""
    return block.view(-1, width).t().contiguous()
