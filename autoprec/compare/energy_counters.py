"""Counters of energy: NVIDIA's, that of Intel's and AMD's processors (RAPL), and an estimate where there is neither."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

_JOULES_PER_KWH = 3.6e6
_FAILURES = (AttributeError, OSError, RuntimeError, ValueError)  # a tracker that found nothing lacks attributes


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _gpu_uuid(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@dataclass(frozen=True)
class Probes:
    """Everything outside this process that counters ask; tests pass their own.

    Args:
        powercap: Where Linux shows the counters of processors.
        load: Returns a module, ``None`` where it is not installed.
        gpu_uuid: Returns the name under which NVIDIA's library knows a device.
    """

    powercap: Path = Path("/sys/class/powercap")
    load: Callable[[str], ModuleType | None] = _import
    gpu_uuid: Callable[[torch.device], str] = _gpu_uuid


class NoCounterError(Exception):
    """A counter cannot be read; the message says why and what to do."""


class Counter(Protocol):
    """What counts joules.

    Attributes:
        source: What is counted, and that it is not this process alone.
        wraps: Whether the counter starts again from 0 now and then, so that it has to be read more often than that.
    """

    source: str
    wraps: bool

    def start(self) -> None:
        """Begins to count."""

    def read(self) -> float:
        """Returns the joules since the last ``start``.

        Raises:
            NoCounterError: If the counter can no longer be read.
        """


class NvmlCounter:
    """The GPU's own counter, since the driver was loaded, in millijoules.

    Args:
        device: A CUDA device.
        probes: What is asked.

    Raises:
        NoCounterError: If there is none.
    """

    source = "NVML, the whole GPU"
    wraps = False

    def __init__(self, device: torch.device, probes: Probes) -> None:
        self._nvml: Any = probes.load("pynvml")
        if self._nvml is None:
            raise NoCounterError("nvidia-ml-py is not installed: `pip install nvidia-ml-py`")
        try:
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(probes.gpu_uuid(device))
        except self._nvml.NVMLError as error:
            raise NoCounterError(f"NVIDIA's library says: {error}") from error
        self.start()

    def start(self) -> None:
        """Begins to count."""
        self._before = self._millijoules()

    def read(self) -> float:
        """Returns the joules since the last ``start``."""
        return (self._millijoules() - self._before) / 1e3

    def _millijoules(self) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError as error:
            raise NoCounterError(f"this GPU has no counter of energy (NVIDIA's library says: {error})") from error


@dataclass
class _Zone:
    """One RAPL zone: a counter of microjoules that starts again from 0 after ``range_uj``."""

    file: Path
    range_uj: int
    last_uj: int = 0

    def microjoules(self) -> int:
        """Returns what was counted since the last call."""
        now = _number(self.file)
        before, self.last_uj = self.last_uj, now
        return now - before if now >= before else now - before + self.range_uj + 1


class RaplCounter:
    """The counters of all processor packages and of the memory that is counted apart from them.

    Args:
        probes: What is asked.

    Raises:
        NoCounterError: If there is none, or none that this user may read.
    """

    source = "RAPL, the whole machine's processors"
    wraps = True

    def __init__(self, probes: Probes) -> None:
        self._zones = [
            _Zone(folder / "energy_uj", _number(folder / "max_energy_range_uj")) for folder in _folders(probes.powercap)
        ]
        if not self._zones:
            raise NoCounterError(f"{probes.powercap} has no counter of a processor package; virtual machines have none")
        self.start()

    def start(self) -> None:
        """Begins to count."""
        self._counted_uj = 0
        for zone in self._zones:
            zone.microjoules()

    def read(self) -> float:
        """Returns the joules since the last ``start``; a zone may have started again once since the last call."""
        self._counted_uj += sum(zone.microjoules() for zone in self._zones)
        return self._counted_uj / 1e6


def _folders(powercap: Path) -> list[Path]:
    """Packages, and DRAM zones within them; cores are part of their package, and psys is all of these again."""
    found = []
    for folder in sorted(powercap.glob("intel-rapl:*")):  # AMD's are called so too
        name = (folder / "name").read_text().strip() if (folder / "name").is_file() else ""
        is_package = re.fullmatch(r"intel-rapl:\d+", folder.name) is not None and name.startswith("package")
        if is_package or name == "dram":
            found.append(folder)
    return found


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except PermissionError as error:
        raise NoCounterError(
            f"{file} may only be read by root; `sudo chmod a+r {file.parent.parent}/*/energy_uj` lets others until the"
            " next start"
        ) from error
    except (OSError, ValueError) as error:
        raise NoCounterError(f"{file} cannot be read: {error}") from error


class CodecarbonEstimate:
    """codecarbon's estimate: mostly typical power by processor model times time, so it shows little beyond the time.

    Args:
        probes: What is asked.

    Raises:
        NoCounterError: If codecarbon is not installed or does not work here.
    """

    source = "codecarbon (estimated)"
    wraps = False

    def __init__(self, probes: Probes) -> None:
        module: Any = probes.load("codecarbon")
        if module is None:
            raise NoCounterError("no estimate either: codecarbon is not installed (`pip install codecarbon`)")
        # the country is for grams of CO2, which are not asked for
        self._tracker = module.OfflineEmissionsTracker(
            country_iso_code="USA", output_methods=[], log_level="critical", allow_multiple_runs=True
        )
        # looks for the hardware, which takes seconds, before anything is counted
        self.start()
        self.read()

    def start(self) -> None:
        """Begins to count."""
        try:
            self._tracker.start_task()
        except _FAILURES as error:
            raise NoCounterError(f"codecarbon does not work here: {error!r}") from error

    def read(self) -> float:
        """Returns the joules since ``start``, which must be called again before the next ``read``."""
        try:
            return float(self._tracker.stop_task().energy_consumed) * _JOULES_PER_KWH
        except _FAILURES as error:
            raise NoCounterError(f"codecarbon does not work here: {error!r}") from error


def find_counter(device: torch.device, probes: Probes) -> tuple[Counter | None, str]:
    """Returns the best counter for a device, and why there is no better one.

    Args:
        device: Where a model trains.
        probes: What is asked.
    """
    makers: list[Callable[[], Counter]] = []
    if device.type == "cuda" and torch.version.hip is None:
        makers.append(lambda: NvmlCounter(device, probes))
    elif device.type == "cpu":
        makers.append(lambda: RaplCounter(probes))
    makers.append(lambda: CodecarbonEstimate(probes))
    kind = "AMD's" if device.type == "cuda" else device.type
    reasons = [] if len(makers) > 1 else [f"autoprec knows no counter for {kind} devices"]
    for make in makers:
        try:
            return make(), "; ".join(reasons)
        except NoCounterError as error:
            reasons.append(str(error))
    return None, "; ".join(reasons)
