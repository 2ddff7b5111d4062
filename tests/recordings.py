"""Recordings made by hand: what a policy did, said in a few arrays, the rest filled in."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.proxies import Bank, Distribution, Task
from autoprec.policies.play import Recording

UNITS = 3


def some_tasks(count: int) -> list[Task]:
    """Tasks of three units."""
    return list(Bank("train", count, Distribution(units=(UNITS,), widths=(32,))))


def recording(tasks: list[Task], windows: int, **given: NDArray[Any]) -> Recording:
    """A recording in which every task has all windows and nothing happens, but for what is given."""
    shape = (windows, len(tasks))
    whole: dict[str, NDArray[Any]] = {name.name: np.zeros(shape) for name in fields(Recording) if name.name != "tasks"}
    of_units = ("level", "formats", "overflows", "gradient_norm", "gradient_amax", "activation_amax", "error")
    for name in (*of_units, "unit_moves"):
        whole[name] = np.zeros((*shape, UNITS))
    for name in ("level", "formats", "overflows", "unit_moves", "steps", "skipped", "batch", "clip", "offender"):
        whole[name] = whole[name].astype(np.int64)
    whole["knob_moves"] = np.zeros((*shape, 3), dtype=np.int64)
    whole["is_played"] = np.ones(shape, dtype=bool)
    whole["offender"] = np.full(shape, -1)
    whole["share"] = np.repeat(np.arange(windows)[:, None] / windows, len(tasks), axis=1)
    whole["steps"] = np.full(shape, 8)
    for name in ("step_time", "loss", "norm", "loss_scale"):
        whole[name] = np.ones(shape)
    for name in ("gradient_norm", "gradient_amax", "activation_amax"):
        whole[name] = np.ones((*shape, UNITS))
    return Recording(tasks=tuple(tasks), **{**whole, **given})
