"""What a fit counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SAVED_FROM_THE_START = ("window", "applied_steps", "skipped_steps", "user_skipped_steps", "samples")
_SAVED_LATER = ("policy_failures", "lost_windows", "lost_samples", "undone_windows", "rollbacks")


@dataclass(eq=False)
class Counters:
    """Counts of one fit.

    Attributes:
        window: Index of the current window, skipped ones included.
        applied_steps: Optimizer steps taken.
        skipped_steps: Optimizer steps not taken because a gradient was not finite.
        user_skipped_steps: Windows in which ``training_step`` returned no loss.
        policy_failures: Questions to the policy that got no legal answer.
        lost_windows: Windows in which memory ran out, so that no step was attempted.
        lost_samples: Samples of the batches in them, the rest of an accumulation included, of batches under manual
            optimization that were left after a step, and of epochs that ended without them after a batch size was
            lowered.
        undone_windows: Applied steps that a return to a copy of the run has undone; ``applied_steps`` counts them no
            more.
        rollbacks: How often the run went back.
        samples: Windows measured in detail so far.
        kernel_steps: Optimizer steps of this process that kernels took.
        narrow_steps: Those among them that worked on second moments in 16 bits.
        copied_layers: Layers that ran on kept copies of their weights in the latest step.
    """

    window: int = 0
    applied_steps: int = 0
    skipped_steps: int = 0
    user_skipped_steps: int = 0
    policy_failures: int = 0
    lost_windows: int = 0
    lost_samples: int = 0
    undone_windows: int = 0
    rollbacks: int = 0
    samples: int = 0
    kernel_steps: int = 0
    narrow_steps: int = 0
    copied_layers: int = 0

    def counts(self) -> dict[str, int]:
        """Returns what a resumed run counts on from."""
        return {name: getattr(self, name) for name in (*_SAVED_FROM_THE_START, *_SAVED_LATER)}

    def load_counts(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``counts`` returned, from among other things; 0 for what an earlier version did not count."""
        for name in _SAVED_FROM_THE_START:
            setattr(self, name, int(state[name]))
        for name in _SAVED_LATER:
            setattr(self, name, int(state.get(name, 0)))
