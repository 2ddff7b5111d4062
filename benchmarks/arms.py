"""Ways of training that the whole-step benchmark compares, as a user would write them for a Lightning Trainer.

An *arm* is a set of Trainer arguments and an optimizer. Lightning refuses ``AdamW(fused=True)`` together with gradient
clipping under ``bf16-mixed``, so that mixed precision has two baselines: the default AdamW with clipping, and the fused
one without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import AdamW, Optimizer

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, CalibrationConfig, ops
from autoprec.controller import MapController
from benchmarks.workloads import MakeOptimizer, Workload

CLIP_NORM = 1.0


class KernelAdamW(Optimizer):
    """AdamW with clipping inside, on autoprec's kernels: under autocast it shows what the kernels do alone.

    Args:
        params: Parameters, float32.
        lr: Learning rate; everything else as in ``torch.optim.AdamW``.
        clip: Threshold on the global norm.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-3, clip: float = CLIP_NORM) -> None:
        super().__init__(list(params), {"lr": lr})
        self._clip = clip
        self._params = [p for group in self.param_groups for p in group["params"]]
        exp_avgs, exp_avg_sqs = ([torch.zeros_like(p) for p in self._params] for _ in range(2))
        self._run = ops.prepare_adam(self._params, exp_avgs, exp_avg_sqs, [torch.zeros(()) for _ in self._params])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step; does nothing where the norm is not finite.

        Args:
            closure: Runs forward and backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = [p.grad for p in self._params]
        factor = clip_factor(float(ops.grad_stats(grads).total_norm), self._clip)
        if factor is not None:
            self._run(grads, lr=self.param_groups[0]["lr"], grad_factor=factor, **ADAMW)
        return loss


ADAMW: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True}
"""AdamW's defaults as the kernels take them."""


def clip_factor(norm: float, threshold: float) -> float | None:
    """Torch's clip factor, ``None`` for a norm that is not finite."""
    return min(1.0, threshold / (norm + 1e-6)) if math.isfinite(norm) else None


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Args:
        name: Name in tables and results.
        description: What it is, for ``--help`` and the docs.
        precision: The Trainer's ``precision``.
        make_optimizer: Makes the optimizer.
        is_clipped: Whether the Trainer clips.
        matmul: ``torch.set_float32_matmul_precision`` while it has the turn.
        callback: Makes its callback from the row, ``None`` for a static arm.
        is_control: Not a setting that torch and Lightning offer; left out of the fastest static one.
        decides: Whether it has to decide or to measure something before its rounds count.
    """

    name: str
    description: str
    precision: str
    make_optimizer: MakeOptimizer = AdamW
    is_clipped: bool = True
    matmul: str = "highest"
    callback: Callable[[Workload], Callback] | None = None
    is_control: bool = False
    decides: bool = False

    @property
    def is_static(self) -> bool:
        """Whether anybody could choose it without autoprec."""
        return self.callback is None and not self.is_control

    def is_for(self, workload: Workload) -> bool:
        """Whether it has something to show on a row."""
        return self.name != "ours_int8" or bool(workload.int8)

    def warm_steps(self, workload: Workload) -> int:
        """How many steps must not count: up to the first decision, and a few in which it is carried out."""
        return interval_of(workload) + 5 if self.decides else 0

    def trainer_options(self, workload: Workload) -> dict[str, Any]:
        """What it passes to the Trainer."""
        return {
            "precision": self.precision,
            "gradient_clip_val": CLIP_NORM if self.is_clipped else None,
            "callbacks": [] if self.callback is None else [self.callback(workload)],
        }


def interval_of(workload: Workload) -> int:
    """Applied steps between decisions: the callback's 50, or fewer where that would be longer than a turn."""
    return max(5, min(50, workload.steps))


def _fixed(workload: Workload) -> Callback:
    return AutoPrecisionCallback("fixed:bf16", verbose=False)


def _default(workload: Workload) -> Callback:
    return AutoPrecisionCallback(interval=interval_of(workload), verbose=False)


def _measured(workload: Workload) -> Callback:
    return AutoPrecisionCallback(config=_CALIBRATED, interval=interval_of(workload), verbose=False)


def _fp32_measured(workload: Workload) -> Callback:
    return AutoPrecisionCallback("fixed:fp32", config=_CALIBRATED, interval=interval_of(workload), verbose=False)


def _int8(workload: Workload) -> Callback:
    return AutoPrecisionCallback(MapController(workload.int8), verbose=False)


_fused = partial(AdamW, fused=True)
_CALIBRATED = AutoPrecisionConfig(calibration=CalibrationConfig(enabled=True))

ARMS = {
    arm.name: arm
    for arm in (
        Arm("amp_clip", "bf16-mixed, clipping, default AdamW", "bf16-mixed"),
        Arm("amp_fused", "bf16-mixed, fused AdamW, no clipping", "bf16-mixed", _fused, is_clipped=False),
        Arm(
            "amp_kernel",
            "control: bf16-mixed with an optimizer that clips and steps on our kernels",
            "bf16-mixed",
            KernelAdamW,
            is_clipped=False,
            is_control=True,
        ),
        Arm("bf16_true", "bf16-true (no fp32 weights), clipping, fused AdamW", "bf16-true", _fused),
        Arm("fp32", "32-true, clipping, fused AdamW", "32-true", _fused),
        Arm("fp32_medium", "the same with float32 matmul precision 'medium'", "32-true", _fused, matmul="medium"),
        Arm("ours", "bf16-mixed, clipping, default AdamW, policy 'fixed:bf16'", "bf16-mixed", callback=_fixed),
        Arm(
            "ours_default",
            "the same with the default policy",
            "bf16-mixed",
            callback=_default,
            decides=True,
        ),
        Arm(
            "ours_measured",
            "the same, layers and attention timed first",
            "bf16-mixed",
            callback=_measured,
            decides=True,
        ),
        Arm(
            "fp32_measured",
            "arm fp32 with measured implementations",
            "32-true",
            _fused,
            callback=_fp32_measured,
            decides=True,
        ),
        Arm("ours_int8", "the same with large linear layers in int8", "bf16-mixed", callback=_int8),
    )
}
"""The arms by name, in the order of the tables."""
