"""Energy, operations and memory of a run, against counters that are made up here.

Time budget: 15 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import resident_memory
from autoprec.compare import energy, memory
from autoprec.compare.energy import EnergyMeter
from autoprec.compare.energy_counters import Probes
from autoprec.compare.flops import count_flops, tops_per_watt
from autoprec.compare.memory import PeakMemory

RANGE_UJ = 1_000_000


class Powercap:
    """A tree as Linux shows it: two packages, cores and DRAM of one, psys over all, and a copy under another name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder, name in {
            "intel-rapl:0": "package-0",
            "intel-rapl:0:0": "core",
            "intel-rapl:0:1": "dram",
            "intel-rapl:1": "package-1",
            "intel-rapl:2": "psys",
            "intel-rapl-mmio:0": "package-0",
        }.items():
            (root / folder).mkdir(parents=True)
            (root / folder / "name").write_text(f"{name}\n")
            (root / folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
            self.set(folder, 0)
        (root / "intel-rapl").mkdir()

    def set(self, folder: str, microjoules: int) -> None:
        new = self.root / folder / "new"
        new.write_text(f"{microjoules}\n")
        new.replace(self.root / folder / "energy_uj")  # at once, for whoever reads meanwhile


@pytest.fixture
def powercap(tmp_path: Path) -> Powercap:
    return Powercap(tmp_path / "powercap")


def probes(root: Path | None = None, **modules: Any) -> Probes:
    found: Callable[[str], ModuleType | None] = modules.get
    return Probes(powercap=root or Path("/nowhere"), load=found, gpu_uuid=lambda device: f"GPU-{device.index}")


# ---- processors ----


def test_packages_and_their_memory_are_added_up_over_turns(powercap: Powercap) -> None:
    meter = EnergyMeter("cpu", probes(powercap.root))
    assert meter.joules == 0.0
    for _ in range(2):
        for folder, start in {"intel-rapl:0": 100, "intel-rapl:0:1": 7, "intel-rapl:1": 0}.items():
            powercap.set(folder, start)
        with meter:
            powercap.set("intel-rapl:0", 100 + 400_000)
            powercap.set("intel-rapl:0:1", 7 + 50_000)
            powercap.set("intel-rapl:1", 30_000)
            for unused in ("intel-rapl:0:0", "intel-rapl:2", "intel-rapl-mmio:0"):
                powercap.set(unused, 999_999)
    assert meter.joules == pytest.approx(2 * 0.48)
    assert meter.source == "RAPL, the whole machine's processors"
    assert meter.reason == ""


def test_a_counter_that_starts_again_goes_on(powercap: Powercap) -> None:
    powercap.set("intel-rapl:0", RANGE_UJ - 10)
    meter = EnergyMeter("cpu", probes(powercap.root))
    with meter:
        powercap.set("intel-rapl:0", 20)
    assert meter.joules == pytest.approx(31e-6)


def test_a_counter_that_starts_again_often_is_read_in_between(
    powercap: Powercap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "_READ_EVERY_S", 0.001)
    meter = EnergyMeter("cpu", probes(powercap.root))
    counter: Any = meter._counter
    (zone,) = [zone for zone in counter._zones if zone.file.parent.name == "intel-rapl:1"]
    deadline = time.monotonic() + 20
    with meter:
        for value in (900_000, 800_000, 700_000):
            powercap.set("intel-rapl:1", value)
            while zone.last_uj != value:
                assert time.monotonic() < deadline, "nobody reads"
                time.sleep(0.001)
    assert meter.joules == pytest.approx(2.7, abs=1e-5)
    assert not [thread for thread in threading.enumerate() if thread.name == "autoprec-energy"]


def test_a_file_for_root_alone_says_how_to_open_it(powercap: Powercap, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.read_text

    def refuse(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
    meter = EnergyMeter("cpu", probes(powercap.root))
    with meter:
        pass
    assert (meter.joules, meter.source) == (None, None)
    assert "energy_uj may only be read by root; `sudo chmod a+r" in meter.reason
    assert "no estimate either" in meter.reason


def test_a_counter_that_goes_away_leaves_no_part_of_a_sum(powercap: Powercap) -> None:
    meter = EnergyMeter("cpu", probes(powercap.root))
    with meter:
        powercap.set("intel-rapl:0", 5)
        (powercap.root / "intel-rapl:1" / "energy_uj").write_text("no number")
    assert (meter.joules, meter.source) == (None, None)
    assert "cannot be read" in meter.reason
    with meter:
        pass
    assert meter.joules is None


def test_an_error_inside_of_a_meter_is_let_through(powercap: Powercap) -> None:
    meter = EnergyMeter("cpu", probes(powercap.root))

    def fail() -> None:
        with meter:
            powercap.set("intel-rapl:0", 1000)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert meter.joules == pytest.approx(1e-3)


def test_no_counter_says_why() -> None:
    assert "virtual machines have none" in EnergyMeter("cpu", probes()).reason
    assert EnergyMeter("meta", probes()).reason.startswith("autoprec knows no counter for meta devices")


# ---- GPUs ----


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.millijoules = 5_000
        self.asked: list[str] = []
        self.fails = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.fails:
            raise self.NVMLError("Not Supported")
        return self.millijoules


def test_the_counter_of_the_gpu_in_use_is_read() -> None:
    nvml = FakeNvml()
    meter = EnergyMeter(torch.device("cuda", 3), probes(pynvml=nvml))
    with meter:
        nvml.millijoules += 2_500
    nvml.millijoules += 99_999  # another's turn
    with meter:
        nvml.millijoules += 500
    assert meter.joules == pytest.approx(3.0)
    assert (meter.source, nvml.asked) == ("NVML, the whole GPU", ["GPU-3"])


def test_a_gpu_without_a_counter_says_so() -> None:
    nvml = FakeNvml()
    nvml.fails = True
    meter = EnergyMeter("cuda:0", probes(pynvml=nvml))
    assert meter.joules is None
    assert "this GPU has no counter of energy (NVIDIA's library says: Not Supported)" in meter.reason
    assert "nvidia-ml-py is not installed" in EnergyMeter("cuda:0", probes()).reason


# ---- estimates ----


class FakeTracker:
    def __init__(self, is_broken: bool = False, **options: Any) -> None:
        assert options["output_methods"] == []
        self.is_broken, self.tasks = is_broken, 0

    def start_task(self) -> None:
        self.tasks += 1

    def stop_task(self) -> Any:
        return None if self.is_broken else SimpleNamespace(energy_consumed=2e-6)


def test_an_estimate_is_called_one_and_says_why_there_is_no_counter() -> None:
    meter = EnergyMeter("cpu", probes(codecarbon=SimpleNamespace(OfflineEmissionsTracker=FakeTracker)))
    with meter:
        pass
    assert meter.joules == pytest.approx(7.2)
    assert meter.source == "codecarbon (estimated)"
    assert "virtual machines have none" in meter.reason


def test_an_estimate_that_does_not_work_is_none() -> None:
    broken = SimpleNamespace(OfflineEmissionsTracker=lambda **options: FakeTracker(is_broken=True, **options))
    meter = EnergyMeter("cpu", probes(codecarbon=broken))
    assert meter.joules is None
    assert "codecarbon does not work here" in meter.reason


# ---- operations ----


def test_operations_of_a_step_are_those_of_its_products() -> None:
    module, inputs = nn.Linear(8, 4, bias=False), torch.randn(16, 8)
    forward = 2 * 16 * 8 * 4
    assert count_flops(lambda: module(inputs).sum().backward()) == 2 * forward  # no gradient of the inputs
    assert count_flops(lambda: None) == 0


def test_operations_per_joule() -> None:
    assert tops_per_watt(1e12, 10, 5.0) == pytest.approx(2.0)


# ---- memory ----


PEAKS_OF_A_FRESH_PROCESS = """
import json, torch
from autoprec.compare.memory import PeakMemory

with PeakMemory("cpu") as large:
    torch.ones(64 * 2**20)
with PeakMemory("cpu") as small:
    torch.ones(16 * 2**20)
pieces = [torch.ones(2**13) for _ in range(2049)]  # small, and the last one stays: the C library keeps the others
del pieces[:2048]
with PeakMemory("cpu") as again:
    pieces += [torch.ones(2**13) for _ in range(2048)]
print(json.dumps([None if peak.is_lower_bound else peak.peak_bytes for peak in (large, small, again)]))
"""


@pytest.fixture(scope="module")
def fresh_peaks_mib() -> list[float]:
    """Peaks of 256, 64 and 64 MiB, where no cold pages of other tests are there for the system to take back."""
    command = [sys.executable, "-c", PEAKS_OF_A_FRESH_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    peaks = json.loads(done.stdout)
    if None in peaks:
        pytest.skip("this system does not let a process set its peak back")
    return [peak / 2**20 for peak in peaks]


def test_the_peak_is_that_of_what_ran_inside(fresh_peaks_mib: list[float]) -> None:
    large, small, _ = fresh_peaks_mib
    assert large == pytest.approx(256, abs=32)
    assert small == pytest.approx(64, abs=32)


def test_memory_that_was_freed_before_hides_no_peak(fresh_peaks_mib: list[float]) -> None:
    assert fresh_peaks_mib[2] == pytest.approx(64, abs=32)


def test_a_peak_that_cannot_be_set_back_is_a_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([100, 130, 130, 130])
    monkeypatch.setattr(memory, "reset_high_water", lambda: False)
    monkeypatch.setattr(memory, "peak_resident_bytes", lambda: next(peaks))
    for expected in (30, 0):
        with PeakMemory("cpu") as peak:
            pass
        assert (peak.peak_bytes, peak.is_lower_bound) == (expected, True)


def test_a_system_that_tells_nothing_gives_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resident_memory, "_PROC", tmp_path / "missing")
    assert resident_memory.resident_bytes() is None
    assert resident_memory.high_water_bytes() is None
    assert resident_memory.reset_high_water() is False
    monkeypatch.setattr(memory, "peak_resident_bytes", lambda: None)
    with PeakMemory("cpu") as peak:
        pass
    assert peak.peak_bytes is None


def test_the_peak_on_a_gpu_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123 if calls == ["reset"] else 0)
    with PeakMemory("cuda:0") as peak:
        pass
    assert peak.peak_bytes == 123
