"""One run in its own process: a real ``Trainer.fit`` that steps only while it is its turn.

Between turns the process blocks on a pipe and uses no processor time.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from autoprec.demo.messages import Command, Done, Evaluate, Evaluated, Failed, Finish, Go, Ready, Reply, Turn
from autoprec.demo.tasks import CLIP_NORM, Arm, Material, Task
from autoprec.resident_memory import peak_resident_bytes
from autoprec.units import find_units


class Gate(pl.Callback):
    """Lets the fit loop pass for as many steps as it was told, times them, and evaluates when asked.

    Stands first among the callbacks: a step is the time from one passage to the next arrival, so that data loading and
    the hooks of every other callback count.

    Args:
        connection: Where commands come from and replies go.
        module: The module under training, before ``fit``.
        material: What the run reads.
    """

    def __init__(self, connection: Connection, module: pl.LightningModule, material: Material) -> None:
        self._connection = connection
        # evaluation loads the weights into this plain copy, so that no arm's compute format reaches it
        self._plain = copy.deepcopy(module).eval()
        self._material = material
        self._open_steps = 0
        self._is_last = False
        self._started: float | None = None
        self._loss: Tensor | None = None
        self._turn = Turn()
        self._step = 0
        self._map: dict[str, str] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reports that the run stands before its first step."""
        self._send(Ready(sum(parameter.numel() for parameter in pl_module.parameters())))
        self._note_formats(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Ends the step before, waits for a turn where none is left, and starts the next step."""
        self._end_step(trainer)
        if self._open_steps == 0:
            self._serve(trainer, pl_module)
        self._open_steps -= 1
        if self._is_last and self._open_steps == 0:
            trainer.should_stop = True
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss of the step; it is read after the clock has stopped."""
        self._loss = outputs["loss"] if outputs else None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends the last step and stays for evaluations until told to finish."""
        self._end_step(trainer)
        self._serve(trainer, pl_module)

    def _end_step(self, trainer: pl.Trainer) -> None:
        if self._started is None:
            return
        self._turn.step_s.append(time.perf_counter() - self._started)
        self._started = None
        self._step += 1
        self._turn.losses.append(float("nan") if self._loss is None else float(self._loss))
        self._note_formats(trainer)

    def _note_formats(self, trainer: pl.Trainer) -> None:
        steered = steered_callback(trainer)
        if steered is None:
            return
        current = dict(steered.precision_map())
        if current != self._map:
            self._map = current
            self._turn.formats.append((self._step, current))

    def _serve(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self._turn.step_s:
            self._send(self._turn)
            self._turn = Turn()
        while True:
            command: Command = self._connection.recv()
            if isinstance(command, Evaluate):
                self._send(Evaluated(self._evaluate(module)))
            elif isinstance(command, Go):
                self._open_steps, self._is_last = command.steps, command.last
                return
            else:
                assert isinstance(command, Finish), f"unknown command {command!r}"
                return

    def _evaluate(self, module: pl.LightningModule) -> float:
        self._plain.load_state_dict(module.state_dict())
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            losses = [float(self._plain.loss(batch)) for batch in self._material.held_out]  # type: ignore[operator]
        return sum(losses) / len(losses)

    def _send(self, reply: Reply) -> None:
        self._connection.send(reply)


def steered_callback(trainer: pl.Trainer) -> Any | None:
    """Returns the callback that steers formats, None in a static run."""
    return next((callback for callback in trainer.callbacks if hasattr(callback, "precision_map")), None)  # type: ignore[attr-defined]


def serve(task: Task, arm: Arm, seed: int, threads: int, connection: Connection, log: Path) -> None:
    """Trains one run to its end under the commands that come in; the main function of a run's process.

    An exception is sent back as ``Failed`` with its traceback, and ends the process with exit code 1. When the other
    end of the pipe is gone, so is this process.

    Args:
        task: What is trained.
        arm: How it is trained.
        seed: Seed of the initial weights and of the order of the samples.
        threads: Threads for one operation.
        connection: Where commands come from and replies go.
        log: File that receives what the run prints.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its runs
    _redirect_output(log)
    try:
        connection.send(_fit(task, arm, seed, threads, connection))
    except (EOFError, BrokenPipeError):
        sys.exit(1)
    except BaseException:
        connection.send(Failed(traceback.format_exc()))
        sys.exit(1)


def _fit(task: Task, arm: Arm, seed: int, threads: int, connection: Connection) -> Done:
    os.environ.pop("AUTOPREC_AUTO", None)  # would add the callback to the static arms too
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    material = task.material(task.split, task.steps * task.batch_size, seed)
    torch.manual_seed(seed)
    module = task.model()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        precision=arm.precision,
        max_epochs=1,
        gradient_clip_val=CLIP_NORM,
        callbacks=[Gate(connection, module, material), *arm.callbacks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(material.train, batch_size=task.batch_size))
    return _final_state(trainer, module)


def _final_state(trainer: pl.Trainer, module: pl.LightningModule) -> Done:
    steered = steered_callback(trainer)
    if steered is None:
        return Done(peak_resident_bytes(), applied_steps=trainer.global_step, clip_threshold=CLIP_NORM)
    return Done(
        peak_resident_bytes(),
        applied_steps=int(steered.applied_steps),
        skipped_steps=int(steered.skipped_steps),
        unit_parameters={unit.name: unit.parameter_count for unit in find_units(module)},
        outcomes=dict(Counter(str(decision.outcome) for decision in steered.history)),
        loss_scale=steered.loss_scale,
        clip_threshold=steered.clip_threshold,
    )


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
