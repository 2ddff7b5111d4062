"""What copies of the run cost a healthy one: ``python -m benchmarks.snapshots [--every N] [--steps N] [row ...]``.

A row is trained with the callback in a real Trainer. Its steps are timed without copies; a copy, which is a look at
every value, one pass of copying and a checksum, is timed by itself at the end of the run, and so is what a boundary
costs where no copy is due. The share of a step is what one copy in so many steps comes to.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, RollbackConfig
from benchmarks.fits import ONE_EPOCH, WARM_STEPS, Batches
from benchmarks.workloads import WORKLOADS, Workload

ROWS = ("mlp-128-64", "mlp-512-64", "mlp-2048-128", "gpt-2-128", "gpt-4-256", "cnn-32")
_REPEATS = 7


class Cost(NamedTuple):
    """Figures of a row.

    Attributes:
        step: Seconds of a step.
        copy: Seconds of a copy.
        boundary: Seconds of a boundary without one, losses read in every sixteenth included.
        nbytes: What a copy takes.
        weights: Number of weights.
    """

    step: float
    copy: float
    boundary: float
    nbytes: int
    weights: int

    def share(self, every: int) -> float:
        """Share of the time of a step, with a copy after so many steps."""
        return (self.copy / every + self.boundary) / self.step


class _Times(pl.Callback):
    """Times steps, and copies when training ends."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.cost: Cost | None = None
        self._started = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        now = time.thread_time()
        self.steps.append(now - self._started)
        self._started = now

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plugin: Any = trainer.precision_plugin
        rollback, steering = plugin._rollback, plugin.steering
        step = statistics.median(self.steps[WARM_STEPS:])
        trainer.training = True  # as between two batches
        copy = _seconds(lambda: _copy(rollback))
        rollback._due = 2**62
        boundary = _seconds(lambda: _boundaries(rollback, steering.telemetry), calls=10) / 16
        weights = sum(parameter.numel() for parameter in pl_module.parameters())
        self.cost = Cost(step, copy, boundary, rollback.nbytes, weights)


def _copy(rollback: Any) -> None:
    rollback._due = 0
    rollback.at_boundary()


def _boundaries(rollback: Any, telemetry: Any) -> None:
    for _ in range(16):
        telemetry.note_loss(torch.zeros(()))
        rollback.at_boundary()


def _seconds(call: Callable[[], None], calls: int = 1) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        start = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - start) / calls)
    return statistics.median(times[1:])


def measure_cost(workload: Workload, steps: int) -> Cost:
    """Trains a row and returns what copies cost there.

    Args:
        workload: The row.
        steps: Steps that it is trained for.
    """
    times = _Times()
    config = AutoPrecisionConfig(rollback=RollbackConfig(every=2**31))
    trainer = pl.Trainer(
        **ONE_EPOCH,
        callbacks=[times, AutoPrecisionCallback("fixed:bf16", knobs=("precision",), config=config, verbose=False)],
    )
    module = workload.make_module(lambda parameters: torch.optim.AdamW(parameters, lr=1e-4))
    trainer.fit(module, DataLoader(Batches(workload.make_batches(), steps, lambda: None), batch_size=None))
    assert times.cost is not None
    return times.cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", default=ROWS, metavar="row", help=f"out of {', '.join(WORKLOADS)}")
    parser.add_argument("--every", type=int, default=RollbackConfig().every, help="applied steps between copies")
    parser.add_argument("--steps", type=int, default=40, help="steps that are timed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'row':<14}{'step ms':>9}{'copy ms':>9}{'share of a step':>17}{'MB':>8}{'bytes a weight':>16}")
    for name in options.rows:
        cost = measure_cost(WORKLOADS[name], options.steps)
        share, bytes_a_weight = cost.share(options.every), cost.nbytes / cost.weights
        print(
            f"{name:<14}{1e3 * cost.step:>9.2f}{1e3 * cost.copy:>9.2f}{share:>17.3%}{cost.nbytes / 1e6:>8.1f}"
            f"{bytes_a_weight:>16.1f}"
        )


if __name__ == "__main__":
    main()
