"""Readings of a layer and a run for which the table has something to propose."""

from __future__ import annotations

from autoprec.readings import GlobalReading, UnitReading

LADDER = ("fp32", "bf16", "fp16")
UNIT = UnitReading(
    name="a",
    kind="linear",
    format="fp32",
    legal=LADDER,
    grad_amax=1.0,
    errors={"fp32": 0.0, "bf16": 0.01, "fp16": 0.001},
    times={"fp32": 1.0, "bf16": 0.5, "fp16": 0.4},
    steps_since_change=50,
)
RUN = GlobalReading(
    losses=(1.0,) * 8,
    norms=(2.0,) * 20,
    clip_threshold=3.0,
    batch_size=32,
    progress=0.0,
    loss_scale_limits=(1.0, 2.0**24),
)
