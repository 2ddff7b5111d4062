"""Times whole training steps: autoprec against the static precisions of torch and Lightning, in turns.

    python -m benchmarks.train                     everything; started again, it goes on where it was interrupted
    python -m benchmarks.train --quick             all rows, fewer rounds, one thread, Trainer only
    python -m benchmarks.train --rows mlp-128-64 --only trainer --fresh
    python -m benchmarks.train --write-docs        everything, and its tables into docs/benchmarks.md

Each job is a process of its own. Its result is a file in benchmarks/results, whose name changes with the source of
autoprec and of the benchmark, with the versions and with the machine. docs/benchmarks.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoprec.json_files import read_json, write_json
from benchmarks.arms import ARMS
from benchmarks.docs import write_docs
from benchmarks.figures import Findings, last_line
from benchmarks.report import as_text, machine_line, tables
from benchmarks.store import RESULTS, ROOT, Job, circumstances
from benchmarks.targets import judge
from benchmarks.workloads import MALLOC_ROWS, MEMORY_ROWS, WORKLOADS

ROUNDS, QUICK_ROUNDS = 21, 6
MEMORY_RUNS, QUICK_MEMORY_RUNS = 5, 1
MEMORY_ARMS = ("amp_clip", "ours")
KINDS = ("machine", "trainer", "bare", "grad_stats", "step", "memory")


def plan(options: argparse.Namespace) -> list[Job]:
    """Returns the jobs of a run, in order.

    Args:
        options: As :func:`parse` returns them.
    """
    jobs = []
    for threads in options.threads:
        jobs += [Job("machine", "peaks", threads, rounds=9), *_step_jobs(options, threads)]
    shapes = ["models"] if options.quick else ["models", "50M"]
    jobs += [Job(kind, row, 1, min(options.rounds, 11)) for kind in ("grad_stats", "step") for row in shapes]
    runs = QUICK_MEMORY_RUNS if options.quick else MEMORY_RUNS
    jobs += [
        Job("memory", row, arms=(arm,), repeat=repeat, malloc="default")
        for repeat in range(runs)
        for row in MEMORY_ROWS
        if row in options.rows
        for arm in MEMORY_ARMS
        if arm in options.arms
    ]
    return [job for job in jobs if job.kind in options.only]


def _step_jobs(options: argparse.Namespace, threads: int) -> list[Job]:
    jobs = []
    for kind in ("trainer",) if options.quick else ("trainer", "bare"):
        for row in options.rows:
            arms = tuple(name for name in options.arms if ARMS[name].is_for(WORKLOADS[row]))
            job = Job(kind, row, threads, options.rounds, arms, options.steps)
            jobs.append(job)
            if kind == "trainer" and row in MALLOC_ROWS and not options.quick:
                jobs.append(Job(**asdict(job) | {"malloc": "default"}))
    return jobs


def environment(job: Job) -> dict[str, str]:
    """Returns the environment of a job's process, the same for every arm in it.

    Args:
        job: The job.
    """
    kept = {name: v for name, v in os.environ.items() if not name.startswith(("AUTOPREC_", "OMP_", "MKL_", "MALLOC_"))}
    kept |= {
        "OMP_NUM_THREADS": str(job.threads),
        "MKL_NUM_THREADS": str(job.threads),
        # waiting threads of one arm must not take the processor from the arm whose turn it is
        "OMP_WAIT_POLICY": "PASSIVE",
        # arms are threads; with one arena they allocate as the main thread of a user's process does
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": str(ROOT),
    }
    if job.malloc == "fixed":
        # else it depends on the neighbours in memory whether an arm's freed blocks go back to the system
        kept |= {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
    return kept


def run(job: Job, folder: Path, is_fresh: bool) -> dict[str, Any]:
    """Returns the result of a job, measured now unless there is one.

    Args:
        job: The job.
        folder: Where results are.
        is_fresh: Measure it in any case.

    Raises:
        subprocess.CalledProcessError: If its process failed.
    """
    path = job.path(folder)
    found = None if is_fresh else read_json(path)
    if found is not None:
        print("done before", flush=True)
        return dict(found)
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.job", json.dumps(asdict(job)), str(path)]
    subprocess.run(command, env=environment(job), cwd=ROOT, check=True)
    print(f" {time.monotonic() - started:.0f} s", flush=True)
    return dict(read_json(path) or {})


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of the command line, with defaults that depend on ``--quick`` filled in.

    Args:
        arguments: Instead of those of the process.

    Returns:
        ``is_whole`` tells that nothing was left out or set apart from ``--quick``.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        description=__doc__,
        epilog="arms:\n" + "\n".join(f"  {arm.name:14s}{arm.description}" for arm in ARMS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, one thread, Trainer only, one run for memory")
    add("--rows", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="ROW", help=", ".join(WORKLOADS))
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help="ways of training, see below")
    add("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    add("--threads", nargs="+", type=_count, help="threads for one operation (default: 1 2; with --quick 1)")
    add("--rounds", type=_count, help=f"rounds that count (default: {ROUNDS}; with --quick {QUICK_ROUNDS})")
    add("--steps", type=_count, default=0, help="optimizer steps of one turn (default: some 50 to 300 ms of them)")
    add("--results", type=Path, default=RESULTS, help="folder for the results (default: benchmarks/results)")
    add("--fresh", action="store_true", help="measure again what was measured before")
    add("--write-docs", action="store_true", help="put the tables into docs/benchmarks.md")
    options = parser.parse_args(arguments)
    limits = ("rows", "arms", "only", "threads", "rounds", "steps")
    options.results = options.results.resolve()  # jobs run in the checkout
    options.is_whole = all(getattr(options, name) == parser.get_default(name) for name in limits)
    if options.write_docs and not options.is_whole:
        parser.error(f"--write-docs puts whole tables into the docs; leave out {', '.join(f'--{x}' for x in limits)}")
    options.threads = options.threads or ([1] if options.quick else [1, 2])
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"passed {text!r}, must be an int >= 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark.

    Args:
        arguments: Instead of those of the process.
    """
    options = parse(arguments)
    started = time.monotonic()
    results = _run_all(plan(options), options)
    findings = Findings(results)
    print(f"\n{machine_line(findings)}")
    for table in tables(findings):
        print(f"\n{as_text(table)}")
    path = options.results / (f"{'quick' if options.quick else 'bench'}.json" if options.is_whole else "part.json")
    command = _command(options, arguments)
    write_json(path, summary(findings, results, command))
    if options.write_docs:
        write_docs(findings, command)
    print(f"\n{time.monotonic() - started:.0f} s; everything is in {path}\n")
    print(last_line(findings.figures()))


def _run_all(jobs: Sequence[Job], options: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    try:
        for index, job in enumerate(jobs):
            print(f"[{index + 1}/{len(jobs)}] {job.title}: ", end="", flush=True)
            results.append(run(job, options.results, options.fresh))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command without --fresh goes on where it stopped")
    except subprocess.CalledProcessError as error:
        sys.exit(f"\nthe job failed with exit code {error.returncode}; the same command without --fresh tries it again")
    return results


def _command(options: argparse.Namespace, arguments: Sequence[str] | None) -> str:
    if options.is_whole:
        return "make bench-quick" if options.quick else "make bench"
    return f"python -m benchmarks.train {shlex.join(sys.argv[1:] if arguments is None else arguments)}"


def summary(findings: Findings, results: Sequence[dict[str, Any]], command: str) -> dict[str, Any]:
    """Returns what goes into the JSON file of a whole run.

    Args:
        findings: What was measured.
        results: What the jobs wrote.
        command: What was called.
    """
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "circumstances": circumstances(),
        "figures": [{"figure": name, "row": row, "value": v} for (name, row), v in findings.figures().items()],
        "targets": [
            {"figure": v.target.figure, "row": v.row, "value": v.value, "target": v.target.text, "met": v.is_met}
            for v in judge(findings)
        ],
        "last_line": last_line(findings.figures()),
        "results": results,
    }


if __name__ == "__main__":
    main()
