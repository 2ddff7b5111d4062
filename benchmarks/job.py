"""One job in its own process: ``python -m benchmarks.job <job as JSON> <file for the result>``.

``benchmarks.train`` starts it with the number of threads and the settings of malloc and OpenMP in the environment.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import ARMS
from benchmarks.fits import measure_fits
from benchmarks.store import Job, write_json
from benchmarks.workloads import WORKLOADS


def run_trainer(job: Job) -> dict[str, Any]:
    workload = WORKLOADS[job.row]
    arms = [ARMS[name] for name in job.arms]
    return measure_fits(workload, arms, job.rounds, job.steps or workload.steps, _dot)


def _dot(index: int) -> None:
    print("." if index else "warm ", end="", flush=True)


KINDS: dict[str, Callable[[Job], dict[str, Any]]] = {"trainer": run_trainer}


def main() -> None:
    fields = json.loads(sys.argv[1])
    job = Job(**fields | {"arms": tuple(fields["arms"])})
    # its advice and its "stopped" line, once for every arm
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(job.threads)
    result = KINDS[job.kind](job)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    write_json(Path(sys.argv[2]), {"job": fields, "load": load, **result})


if __name__ == "__main__":
    main()
