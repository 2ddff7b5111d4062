"""Does training with int8 layers end where training in bf16 ends? Pairs of runs by seed, over a full budget.

    python -m benchmarks.convergence                 everything; started again, it goes on where it was interrupted
    python -m benchmarks.convergence --tasks digits-cnn --seeds 10
    python -m benchmarks.convergence --write-docs    everything, and the summary into docs/convergence.json

A run is one training of one task in one arm with one seed, and leaves one file in benchmarks/results. The file's name
changes with the settings, the versions, the machine and the source of autoprec. What a run is stands in
``convergence_runs.py``, with the margins that were fixed beforehand.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoprec.json_files import read_json, write_json
from autoprec.machine import circumstances
from autoprec.paired import paired_difference, verdict
from benchmarks.convergence_runs import ARMS, CLIP_NORM, POINTS, TASKS, Task, run
from benchmarks.store import RESULTS, ROOT, numerics_digest

SUMMARY = ROOT / "docs" / "convergence.json"
SEEDS = 6
PAIRS = {
    "int8_minus_bf16": ("ours_int8", "ours_bf16"),
    "int8_minus_static": ("ours_int8", "bf16_mixed"),
    "bf16_minus_static": ("ours_bf16", "bf16_mixed"),
}


@functools.cache
def source_digest() -> str:
    """Returns a digest of the files that may change what a run computes."""
    return numerics_digest(["convergence_runs.py"])


def run_path(folder: Path, task: Task, arm: str, seed: int) -> Path:
    """Returns the file of a run; its name tells everything that its numbers depend on.

    Args:
        folder: Where results are.
        task: What is trained.
        arm: How.
        seed: The pair.
    """
    about = circumstances(torch.get_num_threads())
    fixed = [about["versions"], about["machine"], about["threads"], source_digest(), os.environ.get("AUTOPREC_ISA")]
    settings = [task.name, task.steps, task.batch_size, dict(task.int8), CLIP_NORM, POINTS, arm, seed]
    digest = hashlib.sha256(json.dumps([fixed, settings], sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"convergence-{task.name}-{arm}-{seed}-{digest}.json"


def missing(tasks: Sequence[Task], seeds: int, folder: Path) -> list[tuple[Task, str, int]]:
    """Returns the runs that are still to be made, seed by seed, so that an interrupted study has whole pairs."""
    runs = [(task, arm, seed) for task in tasks for seed in range(seeds) for arm in ARMS]
    return [each for each in runs if read_json(run_path(folder, *each)) is None]


def train(runs: Sequence[tuple[Task, str, int]], folder: Path) -> None:
    """Makes runs one after the other and keeps each as soon as it is there."""
    with progress(sum(task.steps for task, _, _ in runs)) as (bar, line):
        for number, (task, arm, seed) in enumerate(runs):
            bar.update(line, description=f"{number + 1}/{len(runs)} {task.name} {arm} seed {seed}")
            found = run(task, arm, seed, functools.partial(bar.advance, line))
            write_json(run_path(folder, task, arm, seed), {"task": task.name, "arm": arm, "seed": seed, **found})
            loss, seconds = found["final_loss"], found["cpu_seconds"]
            bar.console.print(
                f"{task.name:12s}{arm:12s}seed {seed}  held-out loss {loss:.4f}  {seconds:.0f} s of CPU time"
            )


@contextmanager
def progress(steps: int) -> Iterator[tuple[Any, Any]]:
    """A bar over the optimizer steps of all runs, and its only line."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        yield bar, bar.add_task("", total=steps)


def summarise(task: Task, seeds: int, folder: Path) -> dict[str, Any]:
    """Returns losses, paired differences and the verdict of a task whose runs are all there.

    Args:
        task: What was trained.
        seeds: Number of pairs.
        folder: Where results are.
    """
    found = {arm: [read_json(run_path(folder, task, arm, seed)) for seed in range(seeds)] for arm in ARMS}
    losses = {arm: [one["final_loss"] for one in runs] for arm, runs in found.items()}
    pairs = {name: paired_difference(losses[left], losses[right]) for name, (left, right) in PAIRS.items()}
    return {
        "steps": task.steps,
        "seeds": seeds,
        "margin": task.margin,
        "final_losses": losses,
        "last_points": {arm: [one["curve"][-2:] for one in runs] for arm, runs in found.items()},
        "differences": {name: dict(difference._asdict()) for name, difference in pairs.items()},
        "int8_units": [unit for unit, name in found["ours_int8"][0]["map"].items() if name == "int8"],
        "verdict": verdict(pairs["int8_minus_bf16"], task.margin),
        "cpu_minutes": round(sum(one["cpu_seconds"] for runs in found.values() for one in runs) / 60, 1),
    }


def verdict_line(name: str, summary: dict[str, Any]) -> str:
    """Returns the line that stands next to any claim about int8."""
    found = summary["differences"]["int8_minus_bf16"]
    return (
        f"convergence: task={name} int8_minus_bf16={found['mean']:+.4f} ci=[{found['low']:+.4f},{found['high']:+.4f}]"
        f" margin={summary['margin']:g} verdict={summary['verdict']}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="pairs of a task, at least 2")
    parser.add_argument("--steps", type=int, help="another length of the runs: to see that it works, says nothing")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where runs are kept")
    parser.add_argument("--write-docs", action="store_true", help=f"writes {SUMMARY.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: an interval needs at least 2 pairs")
    if options.write_docs and (options.steps or options.tasks != [*TASKS] or options.seeds < SEEDS):
        parser.error(f"--write-docs is for whole studies: every task, its own steps, at least {SEEDS} seeds")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes what is missing and prints one verdict for each task."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    tasks = [replace(TASKS[name], steps=options.steps or TASKS[name].steps) for name in options.tasks]
    if todo := missing(tasks, options.seeds, options.folder):
        train(todo, options.folder)
    summaries = {task.name: summarise(task, options.seeds, options.folder) for task in tasks}
    about = circumstances(options.threads) | {
        "command": shlex.join(
            ["python", "-m", "benchmarks.convergence", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source": source_digest(),
    }
    write_json(options.folder / "convergence.json", {**about, "tasks": summaries})
    if options.write_docs:
        write_json(SUMMARY, {**about, "tasks": summaries})
    if options.steps:
        print("another length of the runs than the study's: this says nothing about int8")
    for name, summary in summaries.items():
        print(verdict_line(name, summary))


if __name__ == "__main__":
    main()
