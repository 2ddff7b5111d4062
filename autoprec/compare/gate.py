"""A callback that lets a fit step only while it is its turn, and measures what it does.

Between turns the process blocks on a pipe and uses no processor time. What lives here: turns, step times, losses,
validations and formats of one fit. What does not: how the fit came about (``child``) and who gives turns (``turns``).
"""

from __future__ import annotations

import functools
import math
import os
import random
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autoprec.batches import rows_of
from autoprec.compare.batches import digest_of_batch
from autoprec.compare.energy import EnergyMeter
from autoprec.compare.messages import Command, Evaluate, Evaluated, Finish, Go, Ready, Reply, Turn
from autoprec.compare.recorder import OutputRecorder
from autoprec.compare.records import Evaluation

Clock = Literal["wall", "cpu"]

TRAIN_LOSS = "train_loss"
"""Name of the mean training loss since the evaluation before."""

CHECKED_BATCHES = 16
"""First batches of a run that are compared with those of other runs."""


class GateHooks:
    """The hooks of the callback; :func:`make_gate` joins them to the callback class of a Trainer's package.

    Stands first among the callbacks: a step is the time from one passage to the next arrival, so that data loading and
    the hooks of every other callback count. Validation does not.

    Args:
        connection: Where commands come from and replies go; ``None`` lets the fit pass freely and only measures.
        clock: ``"wall"``, or ``"cpu"`` for the processor time of this thread, which other load on the machine leaves
            alone.
        evaluate: Returns the held-out loss of a module when it is asked for.

    Attributes:
        connection: As above; may be set until the fit starts.
        on_setup: Called with the Trainer before any other callback is set up.
        on_start: Called with Trainer and module before the first step; returns the changes to report.
        free_steps: Steps after which a fit without a connection ends, ``None`` for as many as the Trainer takes.
        recorder: Is told of the end of each batch of a validation.
        has_started: Whether a fit has come to its first step.
        step: Steps taken.
        elapsed_s: Seconds in them.
        device: Where the module is.
        evaluations: Metrics of all validations.
        batches: Digests of the first batches.
        meter: Counts the energy of the turns; may be set until the first one.
        counts_flops: Whether to count the operations of the second step, which takes longer then.
        flops: Floating-point operations of a step, ``None`` where they were not counted.
    """

    def __init__(
        self,
        connection: Connection | None,
        clock: Clock = "wall",
        evaluate: Callable[[Any], float] | None = None,
    ) -> None:
        self.connection = connection
        self.on_setup: Callable[[Any], object] = lambda trainer: None
        self.on_start: Callable[[Any, Any], tuple[str, ...]] = lambda trainer, module: ()
        self.free_steps: int | None = None
        self.recorder: OutputRecorder | None = None
        self.has_started = False
        self.device = torch.device("cpu")
        self.formats: dict[str, str] = {}
        self.step = 0
        self.elapsed_s = 0.0
        self.evaluations: list[Evaluation] = []
        self.batches: list[str] = []
        self.samples = 0
        self.meter: EnergyMeter | None = None
        self._is_metering = False
        self.counts_flops = False
        self.flops: int | None = None
        self._counter: FlopCounterMode | None = None
        self._now = time.thread_time if clock == "cpu" else time.perf_counter
        self._evaluate = evaluate
        self._open_steps = 0
        self._is_last = False
        self._started: float | None = None
        self._spent_s = 0.0
        self._batches_of_step = 0
        self._global_step = 0
        self._loss: Tensor | None = None
        self._step_losses: list[Tensor] = []
        self._recent: list[float] = []
        self._turn = Turn()
        self._losses: list[list[Tensor]] = []

    # ---- hooks ----

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stands before the setup of all other callbacks."""
        if stage == "fit":
            self.on_setup(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Reports that the run stands before its first step."""
        self.device = pl_module.device
        self.has_started = True
        self._open_steps, self._is_last = 0, False
        changes = self.on_start(trainer, pl_module)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        self._send(Ready(parameters, tuple(changes), str(self.device), planned_steps(trainer)))
        self._note_formats(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Ends the step before if it is complete, waits for a turn where none is left, and starts the clock."""
        self._stop_clock()
        if self._is_complete(trainer):
            self._end_step(trainer)
        if self._batches_of_step == 0:
            if self._open_steps == 0:
                self._serve(trainer, pl_module)
            self._open_steps -= 1
            if self._is_last and self._open_steps == 0:
                trainer.should_stop = True
            self._global_step = trainer.global_step
        if len(self.batches) < CHECKED_BATCHES:
            self.batches.append(digest_of_batch(batch))
        self.samples += rows_of(batch)
        self._batches_of_step += 1
        if self.counts_flops and self.step == 1 and self.flops is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
        self._started = self._now()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keeps the loss of the batch; it is read after the clock has stopped."""
        if self._counter is not None:
            counter, self._counter = self._counter, None
            counter.__exit__(None, None, None)
            self.flops = int(counter.get_total_flops()) * trainer.accumulate_grad_batches
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Lightning has divided it for accumulation
            self._step_losses.append(loss.detach() * trainer.accumulate_grad_batches)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Ends the step that validation follows: validating is no part of it."""
        self._stop_clock()
        if self._is_complete(trainer):
            self._end_step(trainer)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Tells the recorder of outputs that a batch has ended."""
        if self.recorder is not None:
            self.recorder.end_batch(batch)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Keeps the metrics of the module's own validation."""
        if not trainer.sanity_checking:
            self._add_evaluation(scalars(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Seeds all generators anew: formats draw differently, and the order of samples must not depend on them."""
        self._stop_clock()
        if self._is_complete(trainer):
            self._end_step(trainer)
        reseed(trainer.current_epoch + 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ends the last step and stays for evaluations until told to finish."""
        self._stop_clock()
        if self._batches_of_step:
            self._end_step(trainer)
        self._turn.is_over = True
        self._serve(trainer, pl_module)

    # ---- steps ----

    def _stop_clock(self) -> None:
        if self._started is not None:
            self._spent_s += self._now() - self._started
            self._started = None

    def _is_complete(self, trainer: Any) -> bool:
        if not self._batches_of_step:
            return False
        has_stepped = bool(trainer.global_step != self._global_step)
        return has_stepped or self._batches_of_step >= trainer.accumulate_grad_batches

    def _end_step(self, trainer: Any) -> None:
        self._turn.step_s.append(self._spent_s)
        self._losses.append(self._step_losses)
        self._step_losses, self._spent_s, self._batches_of_step = [], 0.0, 0
        self.step += 1
        self.elapsed_s += self._turn.step_s[-1]
        self._note_formats(trainer)

    def _note_formats(self, trainer: Any) -> None:
        steered = steered_callback(trainer)
        if steered is None:
            return
        current = dict(steered.precision_map())
        if current != self.formats:
            self.formats = current
            self._turn.formats.append((self.step, current))

    def _add_evaluation(self, metrics: dict[str, float]) -> None:
        self._read_losses()
        if self._recent:
            metrics.setdefault(TRAIN_LOSS, math.fsum(self._recent) / len(self._recent))
        evaluation = Evaluation(step=self.step, elapsed_s=self.elapsed_s, metrics=metrics)
        if self.evaluations and self.evaluations[-1].step == self.step:
            evaluation.metrics.update({**self.evaluations[-1].metrics, **metrics})
            self.evaluations[-1] = evaluation
        else:
            self._recent = []
            self.evaluations.append(evaluation)

    def add_final_evaluation(self, metrics: dict[str, float]) -> None:
        """Adds the metrics of the trained model, or joins them to those of a validation after the last step."""
        self._add_evaluation(metrics)

    def send_rest(self) -> None:
        """Sends the steps of a turn that an exception has ended."""
        self._end_turn()

    def _read_losses(self) -> None:
        for losses in self._losses[len(self._turn.losses) :]:
            value = math.fsum(map(float, losses)) / len(losses) if losses else None
            self._turn.losses.append(value)
            if value is not None:
                self._recent.append(value)

    # ---- turns ----

    def _serve(self, trainer: Any, module: Any) -> None:
        self._end_turn()
        if self.connection is None:
            self._open_steps = 1 << 60 if self.free_steps is None else self.free_steps
            self._is_last = self.free_steps is not None
            return
        while True:
            command: Command = self.connection.recv()
            if isinstance(command, Evaluate):
                assert self._evaluate is not None, "this run evaluates by its own validation only"
                self._send(Evaluated(self._evaluate(module)))
            elif isinstance(command, Go):
                self._open_steps, self._is_last = command.steps, command.last
                break
            else:
                assert isinstance(command, Finish), f"unknown command {command!r}"
                return
        if self.meter is not None:
            self.meter.__enter__()
            self._is_metering = True

    def _end_turn(self) -> None:
        self._stop_meter()
        turn = self._turn
        if not turn.step_s and not turn.is_over:
            return
        if self.device.type == "cuda" and turn.step_s:
            turn.step_s = self._spread_over(turn.step_s)
        self._read_losses()
        turn.evaluations = self.evaluations[:]
        self._send(turn)
        self._turn, self._losses = Turn(), []

    def _spread_over(self, step_s: list[float]) -> list[float]:
        # a GPU runs behind: only the time of the whole turn is that of its steps
        begun = time.perf_counter()
        torch.cuda.synchronize(self.device)
        rest = time.perf_counter() - begun
        self.elapsed_s += rest
        return [(math.fsum(step_s) + rest) / len(step_s)] * len(step_s)

    def _stop_meter(self) -> None:
        if self.meter is not None and self._is_metering:
            self.meter.__exit__(None, None, None)
            self._is_metering = False

    def _send(self, reply: Reply) -> None:
        if self.connection is not None:
            self.connection.send(reply)


@functools.cache
def _gate_class(base: type) -> type:
    return type("Gate", (GateHooks, base), {"__doc__": GateHooks.__doc__})


def make_gate(base: type, *arguments: Any, **options: Any) -> GateHooks:
    """Returns a gate that is a callback of a certain package.

    Args:
        base: ``lightning.pytorch.Callback``, or that of ``pytorch_lightning``.
        arguments: Those of :class:`GateHooks`.
        options: The same.
    """
    gate: GateHooks = _gate_class(base)(*arguments, **options)
    return gate


def planned_steps(trainer: Any) -> int | None:
    """Returns the steps of the whole training, ``None`` where nothing but time or a callback ends it."""
    ends = [float(trainer.max_steps)] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        batches = trainer.num_training_batches
        per_epoch = batches if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)
        ends.append(per_epoch * trainer.max_epochs)
    end = min(ends, default=math.inf)
    return None if math.isinf(end) else int(end)


def steered_callback(trainer: Any) -> Any | None:
    """Returns the callback that steers formats, None in a static run."""
    return next((callback for callback in trainer.callbacks if hasattr(callback, "precision_map")), None)


def reseed(epoch: int) -> None:
    """Seeds Python's, numpy's and torch's generators from the seed of the run and the epoch."""
    seed = (int(os.environ.get("PL_GLOBAL_SEED", "0")) + 1_000_003 * epoch) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics that are single numbers, without autoprec's own."""
    kept = {name: value for name, value in metrics.items() if not name.startswith("autoprec/")}
    return {
        name: float(value)
        for name, value in kept.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    }
