"""Jobs of the whole-step benchmark and the files that keep their results, so that an interrupted run goes on.

A job's file name holds a digest of everything that its figures depend on: what was asked for, the versions, the
processor, and the source of autoprec and of the benchmark. A change of any of them makes the job due again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoprec.hardware.probing import processor_name
from autoprec.machine import version

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_NOT_NUMERICS = ("cli.py", "summary.py", "__main__.py", "_factory.py")


@dataclass(frozen=True)
class Job:
    """What one child process measures.

    Args:
        kind: ``machine``, ``trainer``, ``bare``, ``grad_stats``, ``step`` or ``memory``.
        row: Name of a workload, or of a row of ``benchmarks.ops``.
        threads: Threads for one operation.
        rounds: Rounds that count.
        arms: Arms that take turns.
        steps: Steps of one turn, 0 for those of the row.
        repeat: Tells equal jobs apart.
        malloc: ``fixed`` thresholds, or the ``default`` of the C library.
    """

    kind: str
    row: str
    threads: int = 1
    rounds: int = 1
    arms: tuple[str, ...] = ()
    steps: int = 0
    repeat: int = 0
    malloc: str = "fixed"

    @property
    def title(self) -> str:
        """Short text for progress."""
        arm = f" {self.arms[0]} #{self.repeat + 1}" if self.kind == "memory" else ""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        malloc = "" if self.malloc == "fixed" or arm else ", default malloc"
        return f"{self.kind} {self.row}{arm}, {threads}{malloc}"

    def path(self, folder: Path) -> Path:
        """The file of its result.

        Args:
            folder: Where results are.
        """
        text = json.dumps([asdict(self), circumstances()], sort_keys=True)
        parts = [self.kind, self.row, *(self.arms if self.kind == "memory" else ()), f"{self.threads}t"]
        return folder / f"{'-'.join(parts)}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


@functools.cache
def circumstances() -> dict[str, Any]:
    """Returns what every figure depends on besides its job."""
    return {
        "versions": {name: version(name) for name in ("torch", "lightning", "numpy")},
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "source": source_digest(ROOT),
        "isa": os.environ.get("AUTOPREC_ISA", ""),
    }


def source_digest(root: Path) -> str:
    """Returns a digest of the source files of autoprec and of the benchmark.

    Args:
        root: A checkout.
    """
    return digest_of([*source_files(root / "autoprec"), *source_files(root / "benchmarks")], root)


def numerics_digest(benchmark: Iterable[str]) -> str:
    """Returns a digest of the files of autoprec that may change what a training computes, and of a benchmark's own.

    Args:
        benchmark: Names of files in benchmarks.
    """
    kept = [
        path
        for path in source_files(ROOT / "autoprec")
        if path.name not in _NOT_NUMERICS and path.parent.name != "demo"
    ]
    kept += [ROOT / "autoprec/demo" / name for name in ("data.py", "models.py")]
    return digest_of([*kept, *(ROOT / "benchmarks" / name for name in benchmark)], ROOT)


def source_files(folder: Path) -> list[Path]:
    """Returns the source files in a folder and below, in no order.

    Args:
        folder: Where to look.
    """
    return [file for file in folder.rglob("*") if file.suffix in (".py", ".c", ".h")]


def digest_of(files: Iterable[Path], root: Path) -> str:
    """Returns a digest of the names and contents of files.

    Args:
        files: In any order.
        root: What their names are relative to.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
