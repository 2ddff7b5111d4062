"""The table of faults, by the names that schedules use."""

from __future__ import annotations

from tests.chaos import control_faults as control
from tests.chaos import data_faults as data
from tests.chaos import process_faults as process
from tests.chaos import raising_faults as raising
from tests.chaos.fault import Fault

FAULTS: dict[str, type[Fault]] = {
    "input": data.BadInput,
    "activation": data.BadActivation,
    "gradient": data.BadGradient,
    "huge gradient": data.HugeGradient,
    "loss": data.BadLoss,
    "outliers": data.Outliers,
    "no loss": data.NoLoss,
    "out of memory": raising.OutOfMemory,
    "interrupt": raising.Interrupt,
    "step": raising.StepRaises,
    "optimizer": raising.OptimizerRaises,
    "hook": raising.HookRaises,
    "controller": control.BadController,
    "hanging controller": control.HangingController,
    "request": control.Request,
    "size request": control.SizeRequest,
    "disk full": process.DiskFull,
    "snapshot": process.CorruptSnapshot,
    "kill": process.Kill,
}
