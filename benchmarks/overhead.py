"""What the callback costs a healthy run that gains nothing from it: ``python -m benchmarks.overhead [row ...]``.

Every row is trained in 32-true, and beside it with the callback, which leaves every layer in float32. What is timed are
whole stretches of steps, with the windows that are measured, the decisions and the copies of the run in them, in turns
and on one thread. ``guard`` masks every knob, so that the callback counts, checks and recovers; ``no copies`` steers
precision to float32 without keeping copies of the run; ``net`` is that with everything on, as it is by default.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import AdamW

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, RollbackConfig
from benchmarks.arms import Arm
from benchmarks.fits import measure_fits
from benchmarks.turns import Lap
from benchmarks.workloads import WORKLOADS, Workload

ROWS = ("mlp-128-64", "mlp-512-64", "mlp-2048-128", "gpt-2-128", "cnn-32")
_PLAIN = "plain"


def _callback(workload: Workload, **options: Any) -> Callback:
    return AutoPrecisionCallback(verbose=False, **options)


def _arm(name: str, callback: Callable[[Workload], Callback] | None = None) -> Arm:
    return Arm(name, "32-true, clipping, fused AdamW", "32-true", partial(AdamW, fused=True), callback=callback)


ARMS = (
    _arm(_PLAIN),
    _arm("guard", partial(_callback, policy="fixed:fp32", knobs=())),
    _arm(
        "no copies",
        partial(_callback, policy="fixed:fp32", config=AutoPrecisionConfig(rollback=RollbackConfig(keep=0))),
    ),
    _arm("net", partial(_callback, policy="fixed:fp32")),
)
"""The static run and what is compared with it."""


def overheads(laps: dict[str, list[Lap]]) -> dict[str, float]:
    """Extra processor time of each arm as a share of the plain run's, the median over the rounds.

    Args:
        laps: What ``measure_fits`` returned.
    """
    plain = [lap.thread_s for lap in laps[_PLAIN]]
    return {
        name: statistics.median(lap.thread_s / base for lap, base in zip(found, plain, strict=True)) - 1.0
        for name, found in laps.items()
        if name != _PLAIN
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="row", help=f"out of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=204, help="steps of a turn: four decisions and a copy (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [arm.name for arm in ARMS if arm.name != _PLAIN]
    print(f"{'row':<14}{'step ms':>9}" + "".join(f"{name:>12}" for name in names), flush=True)
    for row in options.rows:
        found = measure_fits(WORKLOADS[row], ARMS, options.rounds, options.steps)
        step_ms = 1e3 * statistics.median(lap.thread_s for lap in found["laps"][_PLAIN])
        shares = overheads(found["laps"])
        print(f"{row:<14}{step_ms:>9.2f}" + "".join(f"{shares[name]:>12.1%}" for name in names), flush=True)


if __name__ == "__main__":
    main()
