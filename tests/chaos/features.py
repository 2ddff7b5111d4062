"""What this version of autoprec answers; a fault whose answer is not there yet is not drawn, or must end the run."""

from __future__ import annotations

import inspect

from autoprec import AutoPrecisionCallback, asking
from autoprec.steering import Steering

HAS_MEMORY_RECOVERY = hasattr(AutoPrecisionCallback, "lost_windows")
HAS_ROLLBACK = hasattr(AutoPrecisionCallback, "undone_windows")
HAS_TIME_LIMIT = "timeout" in inspect.getsource(asking)  # whether it reads `decision_timeout_s`


def lost_and_undone(steering: Steering) -> tuple[int, int]:
    """Windows lost to memory and undone by rollback."""
    return getattr(steering, "lost_windows", 0), getattr(steering, "undone_windows", 0)
