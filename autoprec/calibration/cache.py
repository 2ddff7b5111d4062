"""Results on disk, for later runs on the same device with the same software.

One JSON file for each combination of what results depend on. A file that cannot be read or does not fit is left out of
account, with a note; a folder that cannot be written costs nothing but the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoprec.calibration.layer_runs import Measured
from autoprec.ops.native import ABI_VERSION

MOST_BYTES = 4 << 20
MOST_ENTRIES = 4096
_TRIES = 250
_PAUSE_S = 0.02
_LIMITS = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    *("AUTOPREC_ISA", "AUTOPREC_OPS", "ONEDNN_DEFAULT_FPMATH_MODE"),
)


_Bytes = Annotated[int, Field(ge=0, le=1 << 50)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    ms: Annotated[float, Field(gt=0.0, lt=1e9, allow_inf_nan=False)]
    error: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    activation_bytes: _Bytes
    copy_bytes: _Bytes


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1]
    key: dict[str, str]
    entries: Annotated[dict[str, _Entry], Field(max_length=MOST_ENTRIES)]


def key_of(device: torch.device) -> dict[str, str]:
    """Returns what results on a device depend on.

    Args:
        device: The device.
    """
    key = {
        "device": _device_name(device),
        "driver": _driver(device),
        "torch": torch.__version__,
        "kernels": str(ABI_VERSION),
        "threads": str(torch.get_num_threads()),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": f"{torch.backends.cudnn.enabled} {torch.backends.cudnn.benchmark} {torch.backends.cudnn.allow_tf32}",
        "mkldnn": str(torch.backends.mkldnn.enabled),
    }
    return key | {name: os.environ[name] for name in _LIMITS if os.environ.get(name)}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def _driver(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{torch.backends.cpu.get_cpu_capability()} {platform.machine()}"
    driver = getattr(torch._C, "_cuda_getDriverVersion", None)
    return f"{torch.version.cuda or torch.version.hip} {driver() if driver is not None else 'unknown'}"


def cache_folder() -> Path:
    """Returns where results are kept: ``AUTOPREC_CACHE_DIR``, else the user's folder for caches."""
    chosen = os.environ.get("AUTOPREC_CACHE_DIR")
    if chosen:
        return Path(chosen)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("autoprec"))


class Cache:
    """Results for one device, read when it is made.

    Args:
        key: What results depend on.
        folder: Where files are.

    Attributes:
        path: The file.
        entries: Results by workload and choice.
        note: What is wrong with the file or the folder, ``None`` if nothing is.
    """

    def __init__(self, key: Mapping[str, str], folder: Path) -> None:
        self._key = dict(key)
        digest = hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / f"calibration-{digest}.json"
        self.note: str | None = None
        self.entries = self._read()

    def add(self, entries: Mapping[str, Measured]) -> None:
        """Adds results to the file, beside what other runs have added meanwhile.

        Args:
            entries: New results.
        """
        self.entries.update(entries)
        if not entries:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                merged = {**self._read(), **entries}
                self._write(dict(list(merged.items())[-MOST_ENTRIES:]))
        except OSError as error:
            self.note = f"results could not be kept in {str(self.path)!r}: {error.strerror or error}"

    def _read(self) -> dict[str, Measured]:
        try:
            with self.path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES} bytes")
            found = _File.model_validate_json(content)
            if found.key != self._key:
                raise ValueError("it is of another device")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:  # a ValidationError is a ValueError
            self.note = f"{str(self.path)!r} is left out of account: {_short(error)}"
            return {}
        return {name: Measured(**entry.model_dump()) for name, entry in found.entries.items()}

    def _write(self, entries: Mapping[str, Measured]) -> None:
        content = {"version": 1, "key": self._key, "entries": {name: e._asdict() for name, e in entries.items()}}
        text = json.dumps(content, allow_nan=False)
        while len(text) > MOST_BYTES:
            kept = list(content["entries"].items())  # type: ignore[attr-defined]
            content["entries"] = dict(kept[len(kept) // 2 :])
            text = json.dumps(content, allow_nan=False)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part)[:40] for part in first["loc"]) or "the file"
        return f"{where}: {first['msg']}"[:200]
    return str(error)[:200]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits a while for other processes that write the file; without a lock (Windows) the last one wins.

    A process that was stopped while it wrote must not stop this one's training.

    Raises:
        TimeoutError: If another process holds the lock for too long.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    with path.open("a") as file:
        for _ in range(_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_PAUSE_S)
        else:
            raise TimeoutError(f"another process has been writing for {_TRIES * _PAUSE_S:g} s")
        yield
