"""One run of a comparison in its process: the target's first fit behind a gate, later ones on record.

What lives here: what one run trains and what it reports at its end. What does not: how arguments of Trainers are
changed (``edits``), and turns (``turns``).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from autoprec import __version__
from autoprec.compare.arms import Arm, check_runnable
from autoprec.compare.child import final_state, peak_bytes
from autoprec.compare.edits import edit_arguments
from autoprec.compare.energy import EnergyMeter
from autoprec.compare.gate import Clock, GateHooks, make_gate, reseed, steered_callback
from autoprec.compare.memory import PeakMemory
from autoprec.compare.messages import Done
from autoprec.compare.recorder import OutputRecorder
from autoprec.compare.targets import Target
from autoprec.hardware.probing import processor_name
from autoprec.machine import version
from autoprec.run_record import UNOFFERED
from autoprec.target_functions import TargetError

_FINAL_EPOCH = 1 << 20  # the seed of the last validation, of no epoch of any run


@dataclass(frozen=True)
class RunSpec:
    """What one process trains.

    Args:
        target: The user's training.
        arm: How it trains.
        seed: The run's seed.
        folder: Where its checkpoints and logs go.
        outputs: File for the outputs of the trained model.
        threads: Threads for one operation.
        clock: What measures steps.
        interval: Steps between decisions of a callback that is added.
        every: Steps between validations, ``None`` for the target's own.
        steps: Most steps of a fit that is not compared.
        record: Where a run with autoprec keeps its record; ``None`` leaves that to its callback.
    """

    target: Target
    arm: Arm
    seed: int
    folder: Path
    outputs: Path
    threads: int
    clock: Clock
    interval: int | None = None
    every: int | None = None
    steps: int | None = None
    record: Path | None = None


def train(spec: RunSpec, connection: Connection) -> Done:
    """Trains one run to its end under the commands that come in.

    Args:
        spec: What to train.
        connection: Where commands come from and replies go.

    Raises:
        TargetError: If the target does not train.
    """
    return train_session(Session(spec, connection))


def train_session(session: Session) -> Done:
    """Trains the run of a session to its end; see :func:`train`.

    Args:
        session: What decides on the Trainers of the target.
    """
    spec = session.spec
    # what a target starts by itself stays on this machine
    os.environ.setdefault("WANDB_MODE", "disabled")
    spec.folder.mkdir(parents=True, exist_ok=True)
    try:
        spec.target.train(session, spec.seed)
    except Exception as error:
        if session.done is None:
            session.send_rest()
            raise
        session.notes.append(f"after its first fit the target failed with {type(error).__name__}: {error}")
    return session.report()


class Session:
    """Decides on the Trainers of a target and keeps what their fits gave.

    Args:
        spec: What is trained.
        connection: The end of the pipe for the gate of the first fit.
    """

    def __init__(self, spec: RunSpec, connection: Connection) -> None:
        self.notes: list[str] = []
        self.done: Done | None = None
        self.spec = spec
        self._connection = connection
        self._changes: list[str] = []
        self._trainers = 0
        self._memory = PeakMemory("cpu")
        self._compared: GateHooks | None = None
        self._fits: list[dict[str, Any]] = []
        self._unoffered: dict[str, str] = {}
        self._seen: dict[int, tuple[int, float]] = {}

    # ---- what targets.Target.train calls ----

    def on_trainer(self, package: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments with which a Trainer of the target trains as the arm does."""
        spec = self.spec
        if not self._trainers:
            self._memory.__enter__()
        base = importlib.import_module(package).Callback
        gate: Any = make_gate(base, None, spec.clock)
        gate.on_start = partial(self._on_start, gate)
        gate.on_setup = self._on_setup
        edit = edit_arguments(
            arguments, spec.arm, gate, spec.folder, package=package, interval=spec.interval, every=spec.every
        )
        self._trainers += 1
        self._changes += [f"Trainer {self._trainers}: {change}" for change in edit.changes]
        return edit.arguments

    def on_seed(self, seed: Any) -> None:
        """Notes that the target's own seed has no effect."""
        change = f"seed_everything({seed}) gives the seed of the run"
        if seed is not None and change not in self._changes:
            self._changes.append(change)

    def after_fit(self, trainer: Any, arguments: dict[str, Any]) -> None:
        """Keeps what a fit gave; validates and keeps outputs after the one that is compared."""
        gate = next((callback for callback in trainer.callbacks if isinstance(callback, GateHooks)), None)
        if gate is None or not gate.has_started:
            return
        steps, seconds = self._seen.get(id(gate), (0, 0.0))
        self._seen[id(gate)] = (gate.step, gate.elapsed_s)
        is_compared = gate is self._compared and self.done is None
        if is_compared:
            self._finish(gate, trainer, arguments)
        metrics = gate.evaluations[-1].metrics if gate.evaluations else {}
        self._fits.append({"steps": gate.step - steps, "seconds": gate.elapsed_s - seconds, "metrics": metrics})
        gate.connection = None

    # ---- hooks of the gate ----

    def _on_setup(self, trainer: Any) -> None:
        if self.spec.arm.is_steered:
            return
        for callback in [callback for callback in trainer.callbacks if hasattr(callback, "precision_map")]:
            trainer.callbacks.remove(callback)  # given by `configure_callbacks` of the module
            self._changes.append("taken out: the AutoPrecisionCallback of the module")

    def _on_start(self, gate: GateHooks, trainer: Any, module: Any) -> tuple[str, ...]:
        steered = steered_callback(trainer)
        if steered is not None and self.spec.record is not None:
            steered.record = self.spec.record if self._compared is None else False
        if self._compared is None:
            self._compared, gate.connection = gate, self._connection
            gate.meter = EnergyMeter(module.device)
            gate.counts_flops = gate.meter.source is not None and not self.spec.arm.is_steered
        elif gate.connection is None:
            gate.free_steps = self.spec.steps
        check_runnable(self.spec.arm, module.device)
        self._fix_matmul()
        torch.set_num_threads(self.spec.threads)
        return tuple(self._changes)

    def _fix_matmul(self) -> None:
        wanted, found = self.spec.arm.matmul, torch.get_float32_matmul_precision()
        if wanted is not None and wanted != found:
            torch.set_float32_matmul_precision(wanted)
            self._changes.append(f"float32 matmul precision {found!r} -> {wanted!r}")

    # ---- the end ----

    def send_rest(self) -> None:
        """Sends the steps before an exception."""
        if self._compared is not None:
            self._compared.send_rest()

    def _finish(self, gate: GateHooks, trainer: Any, arguments: dict[str, Any]) -> None:
        module = arguments.get("model")
        device = gate.device
        done = final_state(trainer, module, self._peak_bytes(device))
        self._unoffered = _unoffered(trainer)
        gate.add_final_evaluation({})
        if trainer.enable_validation:
            recorder = gate.recorder = OutputRecorder()
            reseed(_FINAL_EPOCH)
            with recorder.listening(trainer.lightning_module):
                trainer.validate(module, **validation_data(arguments), verbose=False)
            recorder.save(self.spec.outputs)
        else:
            self.notes.append("no validation: the metric is the training loss, and outputs are not compared")
        self.done = done

    def _peak_bytes(self, device: torch.device) -> int | None:
        if device.type == "cuda":  # the gate has set it back before the first step
            return peak_bytes(device)
        self._memory.__exit__(None, None, None)
        return self._memory.peak_bytes

    def report(self) -> Done:
        """Returns what the run ends with.

        Raises:
            TargetError: If the target trained nothing.
        """
        gate, spec = self._compared, self.spec
        if self.done is None or gate is None:
            what = "makes no Trainer" if not self._trainers else "has no `Trainer.fit` that takes a step"
            raise TargetError(
                f"The target `{spec.target.text}` ended and {what} of `lightning.pytorch` or `pytorch_lightning`. A"
                " script must call `Trainer.fit` when it is run; give arguments that it needs after `--`."
            )
        if len(self._fits) > 1:
            self.notes.append(f"the target fits {len(self._fits)} times; the first fit is compared")
        extra = {
            "evaluations": [asdict(evaluation) for evaluation in gate.evaluations],
            "formats": gate.formats,
            "batches": gate.batches,
            "samples_per_step": gate.samples / gate.step if gate.step and gate.samples else None,
            "energy_j": None if gate.meter is None else gate.meter.joules,
            "energy_source": None if gate.meter is None else gate.meter.source,
            "flops_per_step": gate.flops,
            "fits": self._fits,
            "unoffered": self._unoffered,
            "notes": self.notes,
            "changes": self._changes,
            "sources": digests(spec.target.sources()),
            "environment": _environment(spec, gate.device),
        }
        return replace(self.done, extra=extra)


def _unoffered(trainer: Any) -> dict[str, str]:
    """Layers that have a format which their policy may not choose, with the reason."""
    steered = steered_callback(trainer)
    refused = () if steered is None else steered.history
    return {str(each.unit): each.reason for each in refused if each.reason.startswith(UNOFFERED)}


def validation_data(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the data that ``Trainer.validate`` takes, from the arguments of ``Trainer.fit``.

    Args:
        arguments: What ``fit`` was called with, by name.
    """
    train = arguments.get("train_dataloaders")
    datamodule = arguments.get("datamodule") or (train if hasattr(train, "prepare_data") else None)
    if datamodule is not None:
        return {"datamodule": datamodule}
    return {"dataloaders": arguments.get("val_dataloaders")}


def digests(files: list[Path]) -> dict[str, str]:
    """Returns a digest of the contents of each file, ``""`` for one that is gone.

    Args:
        files: Files to read.
    """
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "" for file in files}


def _environment(spec: RunSpec, device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {
        "device": f"{device.type}: {name}",
        "torch": torch.__version__,
        "lightning": version("lightning"),
        "autoprec": __version__,
        "python": platform.python_version(),
        "threads": str(spec.threads),
        "clock": spec.clock if device.type == "cpu" else "wall, by turns",
        "instructions": str(torch.backends.cpu.get_cpu_capability()),
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
