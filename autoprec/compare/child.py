"""The process of one run: its output goes into a file, its threads are fixed, what it raises is sent back."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autoprec.compare.gate import steered_callback
from autoprec.compare.messages import Done, Failed
from autoprec.own_process import end_with_parent, redirect_output
from autoprec.resident_memory import peak_resident_bytes
from autoprec.target_functions import PlainError, TargetError
from autoprec.units import find_units

Body = Callable[[Connection], Done]


def serve(body: Body, threads: int, connection: Connection, log: Path) -> None:
    """Trains one run to its end under the commands that come in; the main function of a run's process.

    An exception is sent back as ``Failed`` with its traceback, and ends the process with exit code 1. When the other
    end of the pipe is gone, so is this process.

    Args:
        body: Trains, with a gate at the given end of the pipe.
        threads: Threads for one operation.
        connection: Where commands come from and replies go.
        log: File that receives what the run prints.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its runs
    end_with_parent()
    redirect_output(log)
    os.environ.pop("AUTOPREC_AUTO", None)  # would add the callback to the static arms too
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    try:
        connection.send(body(connection))
    except BaseException as error:
        words = str(error).strip() or "without a message"
        message = words if isinstance(error, PlainError) else f"{type(error).__name__}: {words}"
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # the other end is gone, which may be why
            connection.send(Failed(text, message, isinstance(error, TargetError)))
        sys.exit(1)


def final_state(trainer: Any, module: Any, peak_bytes: int | None, clip_threshold: float | None = None) -> Done:
    """Returns what a run ends with.

    Args:
        trainer: Its Trainer.
        module: Its module.
        peak_bytes: Most memory that it held.
        clip_threshold: The Trainer's own, for a static run.
    """
    steered = steered_callback(trainer)
    if steered is None:
        return Done(peak_bytes, applied_steps=trainer.global_step, clip_threshold=clip_threshold)
    return Done(
        peak_bytes,
        applied_steps=int(steered.applied_steps),
        skipped_steps=int(steered.skipped_steps),
        unit_parameters={unit.name: unit.parameter_count for unit in find_units(module)},
        outcomes=dict(Counter(str(decision.outcome) for decision in steered.history)),
        loss_scale=steered.loss_scale,
        clip_threshold=steered.clip_threshold,
    )


def peak_bytes(device: torch.device) -> int | None:
    """Returns the most memory that this process held on a device so far, None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return peak_resident_bytes()
