"""Runs a module's units in given formats without a Trainer, as a training step would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from autoprec.autocast import ambient, float32_recomputation
from autoprec.layers import Runtime, attach, detach, set_format
from autoprec.units import Unit, find_units


def attached(
    root: nn.Module, formats: str | Mapping[str, str], *, granularity: str = "layer", clamp: float | None = None
) -> tuple[list[Unit], Runtime]:
    """Attaches all units. A name in ``formats`` is for all that can run in it, a mapping for the units it names."""
    units, runtime = find_units(root, granularity=granularity), Runtime("cpu", clamp)
    assert not attach(units, runtime)
    for unit in units:
        name = formats if isinstance(formats, str) else formats.get(unit.name)
        if name is not None and unit.reason is None and (name in unit.legal or not isinstance(formats, str)):
            assert name in unit.legal, f"{unit.name} cannot run in {name}"
            set_format(unit, name)
    return units, runtime


@contextmanager
def steered(
    root: nn.Module,
    formats: str | Mapping[str, str],
    *,
    dtype: torch.dtype = torch.float32,
    granularity: str = "layer",
    clamp: float | None = None,
) -> Iterator[Runtime]:
    """A training step: units in their formats, operations before the first unit in ``dtype``."""
    units, runtime = attached(root, formats, granularity=granularity, clamp=clamp)
    runtime.is_active = runtime.is_recording = True
    try:
        with ambient("cpu", dtype), float32_recomputation("cpu"):
            yield runtime
    finally:
        runtime.is_active = runtime.is_recording = False
        detach(units)
