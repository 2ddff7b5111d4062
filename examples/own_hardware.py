"""Tells autoprec what your own machine is good at: a row in the hardware database, checked, read and used.

    pip install .                      # once, in the checkout
    python examples/own_hardware.py    # a few seconds

The row of this example says that bf16 is not worth using on this CPU. It is written into a temporary folder; for good
it belongs into one of those that `autoprec hardware --folders` prints. `docs/hardware.md` has all fields.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from autoprec import AutoPrecisionCallback
from autoprec.hardware import describe, recommend, reload

VARIABLE = "AUTOPREC_HARDWARE_DIR"
CPU = torch.device("cpu")


def row(family: str, flags: list[str]) -> str:
    """A file of the database: a source for its numbers, and one device, told by what its CPU can do."""
    return f"""schema = 1

[sources.measured]
title = "my own measurements with large products, 30 November 2026"

[[device]]
name = "my machine"
family = "{family}"
requires = {flags}
source = "measured"
formats.bf16 = {{ native = false, note = "measured slower than fp32 here" }}
"""


def show(title: str) -> None:
    device = describe(CPU)
    print(f"{title}: family {device.family}, native {', '.join(device.native)}")
    print("  for linear layers:", recommend(device, "training-large").by_kind["linear"])


def main() -> None:
    flags = sorted(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    show("as shipped")
    family = describe(CPU).family
    before = os.environ.get(VARIABLE)
    with TemporaryDirectory() as folder:
        (Path(folder) / "mine.toml").write_text(row(family, flags))
        os.environ[VARIABLE] = folder  # files are read once a process, `reload` reads them again
        try:
            reload()
            show("with a row of our own")
            auto = AutoPrecisionCallback(interval=10, verbose=False)
            trainer = pl.Trainer(max_epochs=1, callbacks=[auto], logger=False, enable_checkpointing=False)
            trainer.fit(BoringModel())
            print("formats of a run:", auto.precision_map())
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
            reload()


if __name__ == "__main__":
    main()
