"""How many floating-point operations a training step of a model takes, counted by torch.

Lightning's `ThroughputMonitor` is not used: it takes every mixed precision for float32. What is counted is the model's
definition, so the count of one arm holds for all of them. Count it under a static arm: kernels that are called past
torch's dispatcher, autoprec's among them, count nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.flop_counter import FlopCounterMode


def count_flops(step: Callable[[], object]) -> int:
    """Runs one training step and returns its floating-point operations, forward and backward.

    Args:
        step: Computes the loss and calls ``backward``. Products of matrices, convolutions and attention are counted;
            the rest of a step is small beside them.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def tops_per_watt(flops_per_step: float, steps: int, joules: float) -> float:
    """Returns tera-operations a second for each watt, which is tera-operations for each joule.

    Args:
        flops_per_step: Floating-point operations of a step.
        steps: Steps that were made.
        joules: What they took, above 0.
    """
    return flops_per_step * steps / joules / 1e12
