"""One run of the demo in its own process: a real ``Trainer.fit`` behind a gate that opens only while it is its turn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from autoprec.compare.child import final_state, peak_bytes
from autoprec.compare.gate import make_gate
from autoprec.compare.messages import Done
from autoprec.demo.tasks import CLIP_NORM, Arm, Material, Task


def train(task: Task, arm: Arm, seed: int, connection: Connection) -> Done:
    """Trains one run to its end under the commands that come in.

    Args:
        task: What is trained.
        arm: How it is trained.
        seed: Seed of the initial weights and of the order of the samples.
        connection: Where commands come from and replies go.
    """
    material = task.material(task.split, task.steps * task.batch_size, seed)
    torch.manual_seed(seed)
    module = task.model()
    gate: Any = make_gate(pl.Callback, connection, evaluate=_evaluation(module, material))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision=arm.precision,
        max_epochs=1,
        gradient_clip_val=CLIP_NORM,
        callbacks=[gate, *arm.callbacks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(material.train, batch_size=task.batch_size))
    return final_state(trainer, module, peak_bytes(module.device), CLIP_NORM)


def _evaluation(module: pl.LightningModule, material: Material) -> Callable[[pl.LightningModule], float]:
    # weights are loaded into this plain copy, so that no arm's compute format reaches it
    plain = copy.deepcopy(module).eval()

    def evaluate(trained: pl.LightningModule) -> float:
        plain.load_state_dict(trained.state_dict())
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            losses = [float(plain.loss(batch)) for batch in material.held_out]  # type: ignore[operator]
        return sum(losses) / len(losses)

    return evaluate
