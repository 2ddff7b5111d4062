"""One row in real Lightning Trainers: a fit for every arm, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autoprec.ops import grad_stats
from benchmarks.arms import Arm
from benchmarks.turns import Lap, Run, time_calls
from benchmarks.workloads import Trained, Workload

ONE_EPOCH: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Options of a Trainer that goes through its batches once and does nothing else."""

WARM_STEPS = 3
"""At least so many steps do not count: optimizers make their state in the first, autoprec tries a new map."""


class Batches(Dataset[tuple[Tensor, ...]]):
    """Batches made beforehand; asking for one is where a run hands over its turn.

    Args:
        batches: What the run goes round.
        steps: Steps of the run.
        arrive: Called before each step.
    """

    def __init__(self, batches: Sequence[tuple[Tensor, ...]], steps: int, arrive: Callable[[], None]) -> None:
        self.batches, self.steps, self.arrive = batches, steps, arrive

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.arrive()
        return self.batches[index % len(self.batches)]


def train(
    module: Trained,
    workload: Workload,
    arm: Arm,
    batches: Sequence[tuple[Tensor, ...]],
    steps: int,
    arrive: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """Trains a module in a Trainer without logger, checkpoints and progress bar.

    Args:
        module: What is trained.
        workload: Its row.
        arm: How it is trained.
        batches: What the run goes round.
        steps: Steps until it ends.
        arrive: Called before each step.

    Returns:
        Format of each unit at the end, nothing in a static run.
    """
    trainer = pl.Trainer(
        **ONE_EPOCH,
        **arm.trainer_options(workload),
    )
    trainer.fit(module, DataLoader(Batches(batches, steps, arrive), batch_size=None))
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((dict(callback.precision_map()) for callback in callbacks if hasattr(callback, "precision_map")), {})


class Fit:
    """A ``Trainer.fit`` of one arm in a thread of its own.

    Args:
        workload: The row.
        arm: How it trains.
        batches: Its data.
        steps: Steps until it ends.
    """

    def __init__(self, workload: Workload, arm: Arm, batches: Sequence[tuple[Tensor, ...]], steps: int) -> None:
        self.workload, self.arm, self.batches, self.steps = workload, arm, batches, steps
        self.module = workload.make_module(arm.make_optimizer)
        self.run = Run(arm.name, self._fit)
        self.formats: dict[str, str] = {}

    def _fit(self, run: Run) -> None:
        torch.set_float32_matmul_precision(self.arm.matmul)
        self.formats = train(self.module, self.workload, self.arm, self.batches, self.steps, run.arrive)

    def final_loss(self) -> float:
        """Loss of the first batch in float32 with the weights that training left."""
        with torch.no_grad():
            return float(self.module.float().training_step(self.batches[0], 0))


def measure_fits(
    workload: Workload,
    arms: Sequence[Arm],
    rounds: int,
    steps: int,
    on_round: Callable[[int], None] = lambda index: None,
) -> dict[str, Any]:
    """Times the arms of a row in real Trainers, and ``ops.grad_stats`` on its gradients beside them.

    Args:
        workload: The row.
        arms: What takes turns.
        rounds: Rounds that count, after one that does not.
        steps: Steps of one turn.
        on_round: Called after each round with its index, 0 for the one that does not count.

    Returns:
        ``laps``: for each arm a :class:`Lap` for every round, ``grad_stats``: the same for one call of it by the
        gradients' dtype, ``final_loss`` and ``formats`` of each arm after its own steps.
    """
    batches = workload.make_batches()
    warm = {arm.name: max(steps, WARM_STEPS, arm.warm_steps(workload)) for arm in arms}
    fits = [Fit(workload, arm, batches, warm[arm.name] + steps * rounds + 1) for arm in arms]
    probes = _grad_stats_calls(fits[0].module)
    laps: dict[str, list[Lap]] = {arm.name: [] for arm in arms}
    stats: dict[str, list[Lap]] = {name: [] for name in probes}
    started: list[Fit] = []
    try:
        for fit in fits:
            started.append(fit)
            fit.run.start()
        for index in range(rounds + 1):
            found = {
                fit.arm.name: fit.run.take(steps if index else warm[fit.arm.name])
                for fit in (fits if index % 2 else reversed(fits))
            }
            calls = {name: time_calls(probe, max(2, steps)) for name, probe in probes.items()}
            if index:
                append(laps, found)
                append(stats, calls)
            on_round(index)
        for fit in fits:
            fit.run.finish()
    except BaseException:
        for fit in started:
            fit.run.abandon()
        raise
    return {
        "laps": laps,
        "grad_stats": stats,
        "final_loss": {fit.arm.name: fit.final_loss() for fit in fits},
        "formats": {fit.arm.name: fit.formats for fit in fits if fit.formats},
    }


def append(laps: Mapping[str, list[Lap]], found: Mapping[str, Lap]) -> None:
    """Adds the laps of one round.

    Args:
        laps: Those of the rounds before, by name.
        found: Those of this round.
    """
    for name, lap in found.items():
        laps[name].append(lap)


def _grad_stats_calls(module: nn.Module) -> dict[str, Callable[[], object]]:
    wide = [torch.randn_like(param) * 1e-4 for param in module.parameters()]
    half = [grad.bfloat16() for grad in wide]
    return {"fp32": lambda: float(grad_stats(wide).total_norm), "bf16": lambda: float(grad_stats(half).total_norm)}
