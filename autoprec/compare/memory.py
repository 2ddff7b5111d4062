"""The most memory that a run holds: on its GPU, or of its process over what stood before the run."""

from __future__ import annotations

from types import TracebackType

import torch

from autoprec.resident_memory import (
    high_water_bytes,
    peak_resident_bytes,
    release_free_memory,
    reset_high_water,
    resident_bytes,
)


class PeakMemory:
    """Measures the peak of what runs inside of it.

    On a CUDA device that is what torch's allocator handed out at most, what stood there before included. Anywhere else
    it is the resident memory of this process over what was resident on entry; where the system does not let the peak be
    set back, a peak from before entry hides what stays below it, and ``is_lower_bound`` says so. Pages that nobody used
    for long and that the system takes back meanwhile lower the figure by as much.

    Args:
        device: Where the model trains.

    Attributes:
        peak_bytes: The peak in bytes, once left; ``None`` where the system does not tell.
        is_lower_bound: Whether the true peak may be higher.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self.peak_bytes: int | None = None
        self.is_lower_bound = False

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return self
        release_free_memory()
        self._is_reset = reset_high_water()
        self._before = resident_bytes() if self._is_reset else peak_resident_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            return
        peak = high_water_bytes() if self._is_reset else peak_resident_bytes()
        if peak is None or self._before is None:
            return
        self.peak_bytes = max(0, peak - self._before)
        self.is_lower_bound = not self._is_reset
