"""How much memory this process holds: now, and at its peak, which Linux lets a process set back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_PROC = Path("/proc/self")
_SET_PEAK_BACK = "5"  # proc(5), clear_refs


def peak_resident_bytes() -> int | None:
    """Returns the largest resident memory of this process so far, None where the system does not tell."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Returns the resident memory of this process, None where the system does not tell."""
    return _status_bytes("VmRSS")


def high_water_bytes() -> int | None:
    """Returns the largest resident memory since :func:`reset_high_water`, None where the system does not tell."""
    return _status_bytes("VmHWM")


def reset_high_water() -> bool:
    """Sets the peak of :func:`high_water_bytes` back to what is resident now.

    Returns:
        Whether the system let it.
    """
    try:
        (_PROC / "clear_refs").write_text(_SET_PEAK_BACK)
    except OSError:
        return False
    return True


def release_free_memory() -> None:
    """Gives memory that the C library holds but nobody uses back to the system, where glibc is the C library.

    What is allocated next then counts as growth, instead of hiding in what an earlier use left behind.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be opened
        return
    trim(0)


def _status_bytes(name: str) -> int | None:
    try:
        lines = (_PROC / "status").read_text().splitlines()
    except OSError:  # not Linux
        return None
    fields = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(fields[0][1]) * 1024 if fields and len(fields[0]) > 1 else None
