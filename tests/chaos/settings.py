"""What one run of the fault campaign trains, as data."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_SKIPS = 4  # of the guard in these short runs, in place of 20
SNAPSHOT_EVERY = 5  # applied steps, in place of 200
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "16-bit moments": {"second_moment": "bf16", "second_moment_after": 3},
    "torch's steps": {"fused_step": False},
    "blocks": {"granularity": "block"},
    "clamped": {"clamp_output": 1000.0, "hold_schedules": False},
}


@dataclass(frozen=True)
class Setting:
    """A run without its faults.

    Args:
        model: Name in ``models.MODELS``.
        policy: ``"rule"``, ``"fixed:<format>"``, ``"map"`` (a saved map) or ``"mixed"`` (a script through all formats).
        optimizer: Name in ``models.OPTIMIZERS``.
        accumulate: Micro-batches per optimizer step.
        knobs: What may be steered.
        precision: The Trainer's own; ``"16-mixed"`` with a scaler, which is emulated on a CPU.
        clip: The Trainer's threshold on the norm.
        steps: Windows.
        seed: Of weights and order.
        is_resumable: Whether the loader can go on in the middle of an epoch.
        has_schedule: Whether a learning-rate schedule moves with each step.
        saves_every: Steps between checkpoints, 0 for none.
        eval_precision: The callback's argument.
        variant: Name in ``VARIANTS``: further settings of autoprec.
    """

    model: str = "mlp"
    policy: str = "rule"
    optimizer: str = "sgd"
    accumulate: int = 1
    knobs: tuple[str, ...] = ("precision", "loss_scale", "batch_size", "clip")
    precision: str = "32-true"
    clip: float | None = None
    steps: int = 24
    seed: int = 0
    is_resumable: bool = True
    has_schedule: bool = False
    saves_every: int = 0
    eval_precision: Literal["base", "current"] = "base"
    variant: str = "default"

    @property
    def attempts(self) -> int:
        """Steps of all optimizers."""
        return self.steps * (2 if self.model == "gan" else 1)

    @property
    def batches(self) -> int:
        """Training batches, while nobody changes their size."""
        return self.steps * self.accumulate

    def draw_batch(self, chance: random.Random) -> int:
        """A batch that is neither among the first nor among the last."""
        return chance.randint(2, self.batches - 4 * self.accumulate)
