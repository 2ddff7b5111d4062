"""What the convergence study trains, in which ways, and one run of it.

Every run is a real ``Trainer.fit`` with the learning rate warmed up and decayed to zero. The held-out loss is that of
the weights in float32 outside the Trainer, so that no way of training is judged in its own format.
"""

from __future__ import annotations

import copy
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from autoprec import AutoPrecisionCallback, NonFiniteTrainingError
from autoprec.controller import MapController
from autoprec.demo import data
from autoprec.demo.models import ByteGPT, DigitsCNN

CLIP_NORM = 1.0
POINTS = 10
"""Points of a held-out curve, evenly spread; the last one is the end."""


@dataclass(frozen=True)
class Task:
    """One model with its data and the length of its runs.

    Args:
        name: Name in the output.
        model: Makes the module for a number of steps.
        material: Makes the training samples, in order, and the held-out batches, from their number and a seed.
        batch_size: Samples in a step.
        steps: Optimizer steps of a run.
        margin: Largest difference of held-out losses, in nats, that counts as none.
        int8: Formats by unit of the arm in int8.
    """

    name: str
    model: Callable[[int], pl.LightningModule]
    material: Callable[[int, int], tuple[Dataset[Any], list[tuple[Tensor, ...]]]]
    batch_size: int
    steps: int
    margin: float
    int8: Mapping[str, str]


class StudyGPT(ByteGPT):
    """The demo's model over bytes with a learning rate that ends at zero."""

    def __init__(self, steps: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.steps = steps

    def configure_optimizers(self) -> Any:
        """AdamW as in the demo."""
        return decayed(AdamW(self.parameters(), self.learning_rate, (0.9, 0.95), weight_decay=0.1), self.steps)


class StudyCNN(DigitsCNN):
    """The demo's classifier with a learning rate that ends at zero."""

    def __init__(self, steps: int, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.steps = steps

    def configure_optimizers(self) -> Any:
        """AdamW as in the demo."""
        return decayed(AdamW(self.parameters(), self.learning_rate, weight_decay=0.01), self.steps)


def decayed(optimizer: AdamW, steps: int) -> dict[str, Any]:
    """A linear warm-up over a twentieth of the steps, then half a cosine down to zero."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))

    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}


def _gpt_material(
    samples: int, seed: int, *, context: int, batch_size: int, batches: int
) -> tuple[Dataset[Any], list[tuple[Tensor, ...]]]:
    split, length = data.load_source(), context + 1
    text = split.train[0]
    train = data.Windows(text, data.random_offsets(len(text), length, samples, seed), length)
    text = split.held_out[0]
    windows = data.Windows(text, data.spread_offsets(len(text), length, batches * batch_size), length)
    stacked = torch.stack([windows[index][0] for index in range(len(windows))])
    return train, [(batch,) for batch in stacked.split(batch_size)]


def _cnn_material(samples: int, seed: int) -> tuple[Dataset[Any], list[tuple[Tensor, ...]]]:
    split = data.load_digits()
    train = data.Picks(split.train, data.shuffled_passes(len(split.train[0]), samples, seed))
    return train, [split.held_out]


TASKS = {
    task.name: task
    for task in (
        Task(
            "gpt-2-128",
            model=partial(StudyGPT, width=128, layers=2, heads=2, context=128),
            material=partial(_gpt_material, context=128, batch_size=16, batches=32),
            batch_size=16,
            steps=4000,
            margin=0.02,
            int8={"*": "bf16", "blocks.*": "int8"},
        ),
        # its convolutions stay in bf16: int8 is for linear layers, and emulated in every other kind
        Task(
            "digits-cnn",
            model=StudyCNN,
            material=_cnn_material,
            batch_size=128,
            steps=800,
            margin=0.01,
            int8={"*": "bf16", "head": "int8"},
        ),
    )
}
"""The two tasks by name.

Length and margin were fixed beforehand. In bf16-mixed with seed 100, which is not in the study, the last tenth of 4000
steps moved the loss of the GPT from 1.330 to 1.325, and the last two fifths of 800 steps that of the CNN from 0.0244 to
0.0242. The margins are 1.5% of the former loss and, for the latter, what 400 steps more or less make.
"""


ARMS: dict[str, Callable[[Task], list[pl.Callback]]] = {
    "bf16_mixed": lambda task: [],
    "ours_bf16": lambda task: [AutoPrecisionCallback("fixed:bf16", verbose=False)],
    "ours_int8": lambda task: [AutoPrecisionCallback(MapController(task.int8), verbose=False)],
}
"""Ways of training by name: static bf16-mixed, and the same Trainer with the callback and a fixed map."""


class Curve(pl.Callback):
    """Evaluates the weights at evenly spread steps and counts the time outside of that.

    Args:
        module: The module before training; its copy is what is evaluated.
        held_out: Batches of every evaluation.
        steps: Steps of the run.
        on_step: Called after every step.
    """

    def __init__(
        self, module: pl.LightningModule, held_out: list[tuple[Tensor, ...]], steps: int, on_step: Callable[[], None]
    ) -> None:
        self._plain: Any = copy.deepcopy(module).eval()
        self._held_out, self._on_step = held_out, on_step
        self._due = {round(steps * (point + 1) / POINTS) for point in range(POINTS)}
        self.points: list[tuple[int, float]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluates where it is due."""
        if trainer.global_step in self._due:
            self.points.append((trainer.global_step, self._evaluate(pl_module)))
        self._on_step()

    def _evaluate(self, module: pl.LightningModule) -> float:
        self._plain.load_state_dict(module.state_dict())
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            losses = [float(self._plain.loss(batch)) for batch in self._held_out]
        return sum(losses) / len(losses)


def run(task: Task, arm: str, seed: int, on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Trains once and returns what JSON can hold.

    Args:
        task: What is trained.
        arm: One of ``ARMS``.
        seed: Seed of the first weights and of the order of the samples; runs that share it form a pair.
        on_step: Called after every step.
    """
    train, held_out = task.material(task.steps * task.batch_size, seed)
    torch.manual_seed(seed)
    module = task.model(task.steps)
    curve, callbacks = Curve(module, held_out, task.steps, on_step), ARMS[arm](task)
    started, error = time.process_time(), None
    with quiet():
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed",
            max_epochs=1,
            gradient_clip_val=CLIP_NORM,
            callbacks=[curve, *callbacks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        try:
            trainer.fit(module, DataLoader(train, batch_size=task.batch_size))
        except NonFiniteTrainingError as stopped:
            error = str(stopped)
    steered: Any = callbacks[0] if callbacks else None
    final = curve.points[-1][1] if curve.points and error is None else math.inf
    return {
        "final_loss": final if math.isfinite(final) else math.inf,
        "error": error,
        "curve": curve.points,
        "applied_steps": trainer.global_step if steered is None else steered.applied_steps,
        "map": None if steered is None else steered.precision_map(),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what the Trainer says about every short run."""
    loggers = [logging.getLogger(f"lightning.pytorch{part}") for part in ("", ".utilities.rank_zero")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
