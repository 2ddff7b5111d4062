"""Every difference between Lightning's table of peak rates and ours has a reason.

Time budget: 5 s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import throughput
from lightning.pytorch.plugins.precision import MixedPrecision

from autoprec.hardware import database
from tests.hardware_rows import folder

__all__ = ["folder"]

FORMATS: dict[Any, str] = {
    torch.float32: "fp32",
    "tfloat32": "tf32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
}
ROWS = {
    "h200 sxm1": "H200 SXM",
    "h200 nvl1": "H200 NVL",
    "h100 nvl": "H100 NVL",
    "h100 sxm": "H100 SXM",
    "h100 pcie": "H100 PCIe",
    "rtx 4090": "GeForce RTX 4090",
    "rtx 4080": "GeForce RTX 4080",
    "rtx 4080 super": "GeForce RTX 4080 SUPER",
    "l4": "L4",
    "l40": "L40",
    "a100": "A100 SXM4 80GB",
    "a6000": "RTX A6000",
    "a40": "A40",
    "a10g": "A10G",
    "rtx 3090 ti": "GeForce RTX 3090 Ti",
    "rtx 3090": "GeForce RTX 3090",
    "rtx 3080 ti": "GeForce RTX 3080 Ti",
    "rtx 3080": "GeForce RTX 3080",
    "rtx 3070": "GeForce RTX 3070",
    "t4": "T4",
    "quadro rtx 5000": "Quadro RTX 5000",
    "rtx 2080 super": "GeForce RTX 2080 SUPER",
    "rtx 2080 ti": "GeForce RTX 2080 Ti",
    "rtx 2080": "GeForce RTX 2080",
    "rtx 2070 super": "GeForce RTX 2070 SUPER",
    "titan rtx": "TITAN RTX",
    "v100 sxm": "V100 SXM2 16GB",
    "v100 pcie": "V100 PCIe",
    "v100s pcie": "V100S PCIe",
}

SPARSE = "Lightning has the document's figures, which are for sparse matrices; dense ones are half of them"
PAIR = "Lightning has the figures of a pair of cards; torch sees one"
NO_TENSOR_CORES = "Lightning has the rate without tensor cores; matrix products use them"
NO_DOCUMENT = "no document of the vendor's with the dense rate of this card was found"
ANOTHER_CARD = "Lightning has the A10's figures; the A10G is another card"
REASONS = {
    **dict.fromkeys(
        [(chip, name) for chip in ("h200 sxm1", "h200 nvl1") for name in ("tf32", "bf16", "fp16", "int8")], SPARSE
    ),
    **dict.fromkeys([("h100 nvl", name) for name in ("fp32", "tf32", "bf16", "fp16", "int8")], PAIR),
    **dict.fromkeys(
        [
            (chip, name)
            for chip in ("rtx 4090", "rtx 4080", "a6000", "a40", "rtx 3090 ti", "rtx 3090", "rtx 3080", "rtx 3070")
            for name in ("bf16", "fp16")
        ],
        NO_TENSOR_CORES,
    ),
    **dict.fromkeys(
        [(chip, "fp16") for chip in ("rtx 2080 super", "rtx 2080 ti", "rtx 2080", "rtx 2070 super", "titan rtx")],
        NO_TENSOR_CORES,
    ),
    **dict.fromkeys(
        [(chip, name) for chip in ("rtx 4080 super", "rtx 3080 ti") for name in ("tf32", "bf16", "fp16", "int8")],
        NO_DOCUMENT,
    ),
    **dict.fromkeys([("a10g", name) for name in ("fp32", "tf32", "bf16", "fp16", "int8")], ANOTHER_CARD),
}


def differences() -> dict[tuple[str, str], str]:
    """Chips and formats whose rates differ by more than rounding, with both rates."""
    known = database.load()
    rows = {entry.row.name: entry.row for entries in known.entries.values() for entry in entries}
    found = {}
    for chip, rates in throughput._CUDA_FLOPS.items():
        row = rows.get(ROWS.get(chip, ""))
        for key, theirs in rates.items():
            name = FORMATS.get(key)
            if name is None:  # float64 and int4 are no formats of ours
                continue
            rate = row.formats.get(name) if row else None
            ours = rate.tflops if rate else None
            if ours is None or abs(theirs / 1e12 / ours - 1.0) > 0.01:
                found[chip, name] = f"Lightning {theirs / 1e12:g}, autoprec {ours}"
    return found


def test_every_difference_has_a_reason(folder: Path) -> None:
    unexplained = {key: rates for key, rates in differences().items() if key not in REASONS}
    assert not unexplained


def test_reasons_are_about_differences_that_exist(folder: Path) -> None:
    assert set(REASONS) <= set(differences())


@pytest.mark.parametrize(("chip", "factor"), [("h100 sxm", 2.0), ("no such chip", 1.0)])
def test_a_new_difference_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch, chip: str, factor: float) -> None:
    monkeypatch.setitem(throughput._CUDA_FLOPS, chip, {torch.bfloat16: 989.4e12 * factor})
    assert (chip, "bf16") in differences()
    assert (chip, "bf16") not in REASONS


def test_sparse_figures_are_twice_ours(folder: Path) -> None:
    rates = {entry.row.name: entry.row.formats["bf16"].tflops or 0.0 for entry in database.load().entries["hopper"]}
    theirs = throughput._CUDA_FLOPS["h200 sxm1"][torch.bfloat16] / 1e12
    assert theirs / rates["H200 SXM"] == pytest.approx(2.0, rel=0.02)
    assert rates["H200 SXM"] == pytest.approx(rates["H100 SXM"], rel=0.001)


def test_lightning_has_no_fp8_and_takes_mixed_precision_for_fp32(folder: Path) -> None:
    """Why its utilisation is no yardstick here; ours is by format."""
    assert not any("float8" in str(key) for rates in throughput._CUDA_FLOPS.values() for key in rates)
    assert throughput._plugin_to_compute_dtype(MixedPrecision("bf16-mixed", "cpu")) is torch.float32
    rows = {entry.row.name: entry.row for entry in database.load().entries["hopper"]}
    assert rows["H100 SXM"].formats["fp8"].tflops == 1978.9
