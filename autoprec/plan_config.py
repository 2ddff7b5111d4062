"""Settings of the policies that plan a whole map of formats from measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from autoprec.config_checks import check_int, check_name, check_real


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Budgets of ``policy="fisher"`` and ``policy="snip"``, and when they plan.

    Args:
        loss_budget: Most that all roundings together may raise the loss, as expected from the measured errors, relative
            to the loss. ``"fisher"`` looks for the fastest map within it.
        score: How ``"fisher"`` expects a rounding to change the loss: ``"fisher"`` by squared gradients times squared
            errors, ``"taylor"`` by the magnitude of the sum of gradients times errors.
        time_share: Turns ``"fisher"`` round: the map that changes the loss least among those whose layers take no more
            than this share of the time that they take in their widest formats. ``None`` looks for the fastest map.
        saving: What ``"snip"`` must save, as a share of the most that any map saves.
        memory_bytes: Most memory for copies of weights and kept activations. ``None`` for no limit.
        headroom_bits: Bits between a tensor's amax and the largest value of a format, below which the format counts as
            overflowing.
        warmup: Decisions before the first plan.
        replan: Decisions between plans. 0 plans once.
    """

    loss_budget: float = 0.001
    score: Literal["fisher", "taylor"] = "fisher"
    time_share: float | None = None
    saving: float = 0.9
    memory_bytes: int | None = None
    headroom_bits: float = 1.0
    warmup: int = 0
    replan: int = 4

    def __post_init__(self) -> None:
        """Validates the fields."""
        check_real(self, "loss_budget", lambda v: 0.0 <= v < math.inf, "a finite float >= 0")
        check_name(self, "score", ("fisher", "taylor"))
        if self.time_share is not None:
            check_real(self, "time_share", lambda v: 0.0 < v <= 1.0, "None or a float in (0, 1]")
        check_real(self, "saving", lambda v: 0.0 <= v <= 1.0, "a float in [0, 1]")
        if self.memory_bytes is not None:
            check_int(self, "memory_bytes", minimum=0)
        check_real(self, "headroom_bits", lambda v: 0.0 <= v < math.inf, "a finite float >= 0")
        check_int(self, "warmup", minimum=0)
        check_int(self, "replan", minimum=0)
