"""Peak memory of a fit, over what the process needs to stand before it. One arm to a process."""

from __future__ import annotations

from typing import Any

import torch

from autoprec.resident_memory import peak_resident_bytes
from benchmarks.arms import Arm
from benchmarks.fits import train
from benchmarks.workloads import Workload

STEPS = 8


def measure_memory(workload: Workload, arm: Arm, steps: int = STEPS) -> dict[str, Any]:
    """Trains some steps in the main thread and returns how far the peak of resident memory rose.

    Args:
        workload: The row.
        arm: How it trains.
        steps: Optimizer steps.

    Returns:
        ``before_bytes`` after the model, its data and a first product were made, ``over_bytes`` above it.
    """
    module = workload.make_module(arm.make_optimizer)
    batches = workload.make_batches()
    torch.ones(16, 16).bfloat16() @ torch.ones(16, 16).bfloat16()
    before = peak_resident_bytes()
    train(module, workload, arm, batches, steps)
    after = peak_resident_bytes()
    if before is None or after is None:
        raise RuntimeError("This system does not tell the peak of resident memory. Leave out `memory` in `--only`.")
    return {"before_bytes": before, "over_bytes": after - before}
