"""Times whole training steps: autoprec against the static precisions of torch and Lightning, in turns.

    python -m benchmarks.train                          everything; goes on where it was interrupted
    python -m benchmarks.train --quick                  all rows, fewer rounds, one thread
    python -m benchmarks.train --rows mlp-128-64 --quick --fresh

docs/benchmarks.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from benchmarks.arms import ARMS
from benchmarks.figures import RowTimes
from benchmarks.report import step_table
from benchmarks.store import RESULTS, ROOT, Job, read_json
from benchmarks.workloads import WORKLOADS

ROUNDS, QUICK_ROUNDS = 21, 9


def plan(rows: list[str], threads: list[int], rounds: int, arms: list[str]) -> list[Job]:
    """Returns the jobs of a run, in order."""
    jobs = []
    for count in threads:
        for row in rows:
            names = tuple(name for name in arms if ARMS[name].is_for(WORKLOADS[row]))
            jobs.append(Job("trainer", row, count, rounds, names))
    return jobs


def environment(threads: int) -> dict[str, str]:
    """Returns the environment of a job's process, the same for every arm in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOPREC_AUTO", "OMP_", "MKL_"))}
    return kept | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # waiting threads of one run must not take the processor from the run whose turn it is
        "OMP_WAIT_POLICY": "PASSIVE",
        # runs are threads; with one arena they allocate as the main thread of a user's process does
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": str(ROOT),
    }


def run(job: Job, is_fresh: bool) -> dict[str, Any]:
    """Returns the result of a job, measured now unless there is one."""
    path = job.path()
    found = None if is_fresh else read_json(path)
    if found is not None:
        print("done before", flush=True)
        return dict(found)
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.job", json.dumps(asdict(job)), str(path)]
    subprocess.run(command, env=environment(job.threads), cwd=ROOT, check=True)
    print(f" {time.monotonic() - started:.0f} s", flush=True)
    return dict(read_json(path) or {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, one thread, Trainer only")
    parser.add_argument("--rows", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="all by default")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="all by default")
    parser.add_argument("--threads", nargs="+", type=int, help="threads for one operation; 1 and 2 by default")
    parser.add_argument("--rounds", type=int, help=f"rounds that count; {ROUNDS} by default")
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    options = parser.parse_args()
    threads = options.threads or ([1] if options.quick else [1, 2])
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    jobs = plan(options.rows, threads, rounds, options.arms)
    results = []
    for index, job in enumerate(jobs):
        print(f"[{index + 1}/{len(jobs)}] {job.title}: ", end="", flush=True)
        results.append(run(job, options.fresh))
    print(f"\nresults are in {RESULTS}\n")
    print(step_table([RowTimes(result) for result in results]))


if __name__ == "__main__":
    main()
