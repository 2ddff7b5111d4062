"""One row in real Lightning Trainers: a fit for every arm, in turns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.arms import Arm
from benchmarks.turns import Lap, Run
from benchmarks.workloads import Trained, Workload

_EXPECTED = (
    ".*does not have many workers.*",
    ".*isinstance.treespec, LeafSpec.*",
    "Precision .* is not supported by the model summary",
    ".*smaller than the logging interval.*",
)


class Batches(Dataset[tuple[Tensor, ...]]):
    """Batches made beforehand; asking for one is where a run hands over its turn.

    Args:
        batches: What the run goes round.
        length: Steps of the run.
        run: Told before each step.
    """

    def __init__(self, batches: Sequence[tuple[Tensor, ...]], length: int, run: Run) -> None:
        self.batches, self.length, self.run = batches, length, run

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.run.arrive()
        return self.batches[index % len(self.batches)]


class Fit:
    """A ``Trainer.fit`` of one arm.

    Args:
        workload: The row.
        arm: How it trains.
        batches: Its data.
        length: Steps until it ends.
    """

    def __init__(self, workload: Workload, arm: Arm, batches: Sequence[tuple[Tensor, ...]], length: int) -> None:
        self.workload, self.arm, self.length = workload, arm, length
        self.batches = batches
        self.module: Trained = workload.make_module(arm.make_optimizer)
        self.run = Run(arm.name, self._fit)
        self.formats: dict[str, str] = {}

    def _fit(self, run: Run) -> None:
        torch.set_float32_matmul_precision(self.arm.matmul)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **self.arm.trainer_options(self.workload),
        )
        trainer.fit(self.module, DataLoader(Batches(self.batches, self.length, run), batch_size=None))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "precision_map"):
                self.formats = callback.precision_map()

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
    """Times the arms of a row in real Trainers.

    Args:
        workload: The row.
        arms: What takes turns.
        rounds: Rounds that count, after one that does not.
        steps: Steps of one turn.
        on_round: Called after each round.

    Returns:
        ``laps``: for each arm a :class:`Lap` for every round, ``final_loss`` and ``formats`` of each arm.
    """
    for text in _EXPECTED:
        warnings.filterwarnings("ignore", text)
    batches = workload.make_batches()
    fits = [Fit(workload, arm, batches, steps * (rounds + 1) + 1) for arm in arms]
    started: list[Fit] = []
    laps: dict[str, list[Lap]] = {arm.name: [] for arm in arms}
    try:
        for fit in fits:
            started.append(fit)
            fit.run.start()
        for index in range(rounds + 1):
            for fit in fits if index % 2 else reversed(fits):
                lap = fit.run.take(steps)
                if index:
                    laps[fit.arm.name].append(lap)
            on_round(index)
        for fit in fits:
            fit.run.finish()
    except BaseException:
        for fit in started:
            fit.run.abandon()
        raise
    return {
        "laps": laps,
        "final_loss": {fit.arm.name: fit.final_loss() for fit in fits},
        "formats": {fit.arm.name: fit.formats for fit in fits if fit.formats},
    }
