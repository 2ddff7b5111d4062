"""What a device tells about itself. The one place that asks torch and the system; tests put other answers here."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from autoprec.hardware.isa import WIDE, cpu_flags, limit
from autoprec.machine_load import total_bytes

_CPUINFO = Path("/proc/cpuinfo")
_MAX_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Answers of one device.

    Attributes:
        device_type: ``"cpu"``, ``"cuda"``, ``"rocm"``, ``"xpu"``, ``"mps"``, or torch's name of another backend.
        name: What it calls itself.
        capability: Compute capability (``"8.9"``), gfx name, or machine name of a CPU; ``None`` if there is none.
        memory_bytes: All of its memory.
        multiprocessors: How many it has.
        flags: Instruction sets that matrix products can use.
        cores: Physical cores of a CPU.
        ghz: Highest clock of a CPU.
        notes: Limits that are set from outside.
    """

    device_type: str
    name: str
    capability: str | None = None
    memory_bytes: int | None = None
    multiprocessors: int | None = None
    flags: frozenset[str] = frozenset()
    cores: int | None = None
    ghz: float | None = None
    notes: tuple[str, ...] = ()


def probe(device: torch.device) -> Facts:
    """Asks a device about itself.

    Args:
        device: Any torch device. One that is not there answers with its type alone.
    """
    ask = {"cpu": _cpu, "cuda": _cuda, "xpu": _xpu, "mps": _mps}.get(device.type)
    if ask is None:
        return Facts(device_type=device.type, name=device.type)
    try:
        return ask(device)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:  # torch's ways to say that it is absent
        message = str(error).partition("\n")[0]
        return Facts(device_type=device.type, name=device.type, notes=(f"The device does not answer: {message}",))


def devices() -> list[torch.device]:
    """Returns the devices of this machine that torch can use, the CPU first."""
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    found += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    return [*found, torch.device("mps")] if torch.backends.mps.is_available() else found


def _cpu(device: torch.device) -> Facts:
    flags, notes = limit(cpu_flags(), os.environ)
    if not torch.backends.mkldnn.is_available():
        flags &= WIDE
        notes.append("This torch was built without oneDNN, so that only fp32 is computed by the CPU itself.")
    return Facts(
        device_type="cpu",
        name=processor_name(),
        capability=_machine(),
        memory_bytes=_host_memory(),
        flags=flags,
        cores=_physical_cores(),
        ghz=_clock(),
        notes=tuple(notes),
    )


def _cuda(device: torch.device) -> Facts:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        kind, capability = "rocm", str(properties.gcnArchName).split(":", 1)[0]
    else:
        kind, capability = "cuda", f"{properties.major}.{properties.minor}"
    return Facts(
        device_type=kind,
        name=properties.name,
        capability=capability,
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
    )


def _xpu(device: torch.device) -> Facts:
    properties = torch.xpu.get_device_properties(device)
    has_xmx = getattr(properties, "has_subgroup_matrix_multiply_accumulate", False)
    return Facts(
        device_type="xpu",
        name=properties.name,
        memory_bytes=properties.total_memory,
        multiprocessors=properties.max_compute_units,
        flags=frozenset({"xmx"} if has_xmx else ()),
    )


def _mps(device: torch.device) -> Facts:
    ask = getattr(torch.backends.mps, "get_name", None)  # younger than the oldest torch in the range
    return Facts(
        device_type="mps",
        name=ask() if ask is not None else processor_name(),
        memory_bytes=torch.mps.recommended_max_memory(),
    )


def _machine() -> str:
    machine = platform.machine().lower()
    return "x86_64" if machine in ("amd64", "x86-64") else machine


def processor_name() -> str:
    """Returns the processor's name as the system tells it."""
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or platform.machine()
    names = re.findall(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    try:
        return _CPUINFO.read_text()
    except OSError:  # not Linux
        return ""


def _physical_cores() -> int | None:
    """Cores that this process may use; two threads of one core count once."""
    ids = re.findall(r"^physical id\s*:\s*(\d+)$.*?^core id\s*:\s*(\d+)$", _cpuinfo(), re.MULTILINE | re.DOTALL)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not ids or usable is None:
        return usable
    return min(len(set(ids)), usable)


def _clock() -> float | None:
    try:
        return int(_MAX_CLOCK.read_text()) / 1e6
    except (OSError, ValueError):  # virtual machines seldom say
        return None


def _host_memory() -> int | None:
    found = total_bytes()
    if found is not None:
        return found
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # Windows
        return None
