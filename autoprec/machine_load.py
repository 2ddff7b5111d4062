"""How full memory is and how busy the processor: what the rule's choice of a batch size may rest on."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


class MachineLoad:
    """Readings of the device that a model runs on.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = self._clocks()

    def memory_share(self) -> float:
        """Share of the memory that is taken: of the device, or of the host for a CPU; NaN if it is not known."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            # what torch keeps for itself is free for the next batch
            cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return 1.0 - (free + cached) / total
        host = total_bytes()
        return 1.0 - free_bytes() / host if host else math.nan

    def utilization(self) -> float:
        """Share of the time since the last call that the device was busy; NaN if it is not known.

        For a CPU that is the processor time of this process in units of the threads that torch may use.
        """
        if self._device.type == "cuda":
            try:
                return float(torch.cuda.utilization(self._device)) / 100.0
            except (ModuleNotFoundError, RuntimeError):  # without nvidia-ml-py, or where the driver does not tell
                return math.nan
        before, self._begun = self._begun, self._clocks()
        wall_s = self._begun[0] - before[0]
        # threads of a logger or a monitor are not among torch's, so that the quotient may be above 1
        busy_s = self._begun[1] - before[1]
        return min(1.0, busy_s / (wall_s * torch.get_num_threads())) if wall_s > 0 else math.nan

    @staticmethod
    def _clocks() -> tuple[float, float]:
        return time.monotonic(), time.process_time()


def free_bytes() -> int:
    """Host memory that is free now, as far as the system tells."""
    found = [_available(), _left_in_cgroup()]
    return min([each for each in found if each is not None], default=2**62)


def _available() -> int | None:
    found = _meminfo("MemAvailable:")
    if found is not None:
        return found
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        try:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            continue
    return None


def _left_in_cgroup() -> int | None:
    try:
        limit, used = ((_CGROUP / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def total_bytes() -> int | None:
    """Host memory in all, less where a limit is set; ``None`` if it is not known."""
    found = [_meminfo("MemTotal:"), _cgroup_limit()]
    return min([each for each in found if each is not None], default=None)


def _cgroup_limit() -> int | None:
    try:
        return int((_CGROUP / "memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _meminfo(field: str) -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        return None
