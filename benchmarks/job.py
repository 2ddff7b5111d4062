"""One job in its own process: ``python -m benchmarks.job <job as JSON> <file for the result>``.

``benchmarks.train`` starts it with the number of threads and the settings of malloc and OpenMP in the environment.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autoprec.json_files import write_json
from benchmarks.arms import ARMS, Arm
from benchmarks.bare import measure_bare
from benchmarks.fits import measure_fits
from benchmarks.machine import measure_machine, work_of
from benchmarks.memory import measure_memory
from benchmarks.ops import MODEL_SHAPES, ROW_TABLES
from benchmarks.setups import in_setups
from benchmarks.store import Job
from benchmarks.workloads import WORKLOADS


def _quieten_lightning() -> None:
    """Leaves out what it would say once for every arm: advice, and that a fit has stopped."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for text in (
        ".*does not have many workers.*",
        ".*isinstance.treespec, LeafSpec.*",
        ".*smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", text)


def _trainer(job: Job) -> dict[str, Any]:
    return _steps(job, measure_fits)


def _bare(job: Job) -> dict[str, Any]:
    return _steps(job, measure_bare)


def _steps(job: Job, measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    workload = WORKLOADS[job.row]
    steps = job.steps or workload.steps
    found = in_setups(lambda arms, rounds: measure(workload, arms, rounds, steps, _dot), _arms(job), job.rounds)
    return {**found, "work": work_of(workload)}


def _memory(job: Job) -> dict[str, Any]:
    (arm,) = _arms(job)
    return measure_memory(WORKLOADS[job.row], arm)


def _kernels(job: Job) -> dict[str, Any]:
    found = []
    for name in MODEL_SHAPES if job.row == "models" else [job.row]:
        found.append(ROW_TABLES[job.kind](name, job.rounds))
        _dot(1)
    return {"rows": found}


def _arms(job: Job) -> list[Arm]:
    return [ARMS[name] for name in job.arms]


def _dot(index: int) -> None:
    print("." if index else "|", end="", flush=True)  # the bar is a new set-up


KINDS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "machine": lambda job: measure_machine(job.threads, job.rounds),
    "trainer": _trainer,
    "bare": _bare,
    "grad_stats": _kernels,
    "step": _kernels,
    "memory": _memory,
}


def main() -> None:
    fields = json.loads(sys.argv[1])
    job = Job(**fields | {"arms": tuple(fields["arms"])})
    _quieten_lightning()
    torch.set_num_threads(job.threads)
    with tempfile.TemporaryDirectory() as cache:
        # what layers cost is measured here, once for all set-ups, and not taken from another day
        os.environ["AUTOPREC_CACHE_DIR"] = cache
        result = KINDS[job.kind](job)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    write_json(Path(sys.argv[2]), {"job": fields, "load": load, **result})


if __name__ == "__main__":
    main()
