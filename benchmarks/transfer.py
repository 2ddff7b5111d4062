"""What is a policy worth on real Lightning runs? Policies against static settings within the same budget of time.

    python -m benchmarks.transfer                    everything; started again, it goes on where it was interrupted
    python -m benchmarks.transfer --quick            two tasks, two seeds: to see that it works
    python -m benchmarks.transfer --tasks byte-lstm --seeds 3
    python -m benchmarks.transfer --policies build/policies/seed-1 --subject seed-1
    python -m benchmarks.transfer --write-docs       everything, into docs/results/transfer.json and docs/transfer.md

A run is one training of one task in one arm with one seed, in a process of its own with one thread, and leaves one file
in benchmarks/results. The file's name changes with the settings, the versions, the machine and the source of autoprec.
Tasks stand in ``transfer_tasks.py``, arms in ``transfer_arms.py``, how time is charged in ``transfer_charge.py``, what
a score is in ``transfer_scores.py``.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from autoprec.json_files import read_json, write_json
from autoprec.machine import circumstances
from benchmarks.convergence import progress
from benchmarks.docs import put_between
from benchmarks.report import as_text
from benchmarks.store import RESULTS, ROOT, digest_of, numerics_digest, source_files
from benchmarks.transfer_arms import ARMS, STARTING, SUBJECTS, TWIN, Arm, available, folder_arm
from benchmarks.transfer_charge import CHARGES, MEASURED, SIMULATED, profile_of
from benchmarks.transfer_picture import draw
from benchmarks.transfer_report import last_line, page_block, tables
from benchmarks.transfer_runs import LIMIT_S, measure_prices, run
from benchmarks.transfer_scores import summarise
from benchmarks.transfer_tasks import TASKS, Task

SUMMARY = ROOT / "docs" / "results" / "transfer.json"
PAGE = ROOT / "docs" / "transfer.md"
BEGIN, END = "<!-- transfer: begin -->", "<!-- transfer: end -->"
FIRST_SEED = 10
"""Tasks were made with seeds 0 and 1, which are not in the study."""
SEEDS = 5
QUICK_SEEDS, QUICK_TASKS = 2, ("digits-cnn", "mnist1d-mlp")
_OWN = [f"transfer_{part}.py" for part in ("arms", "charge", "runs", "tasks")]


@dataclass(frozen=True)
class Job:
    """What one process does.

    Args:
        task: What is trained.
        arm: How; ``None`` to time the layers of the task in their formats.
        charge: The charge that a policy decides for; ``None`` for a static arm, which is the same for all of them.
        seed: Seed of the run.
    """

    task: Task
    arm: Arm | None = None
    charge: str | None = None
    seed: int = 0

    @property
    def title(self) -> str:
        """Short text for progress and names of files."""
        parts = [self.arm.name if self.arm else "prices", self.charge, str(self.seed) if self.arm else None]
        return "-".join([self.task.name, *(part for part in parts if part)])

    def path(self, folder: Path) -> Path:
        """The file of its result, whose name tells everything that its numbers depend on.

        Args:
            folder: Where results are.
        """
        task, arm = self.task, self.arm
        settings = [task.name, task.steps, task.batch_size, task.epoch_batches, self.charge, self.seed]
        text = json.dumps([_fixed(), settings, arm.identity() if arm else "prices"], sort_keys=True)
        return folder / f"transfer-{self.title}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


@functools.cache
def source_digest() -> str:
    """Returns a digest of the files that may change what a run computes or is charged."""
    linked = [file for name in ("envs", "policies") for file in source_files(ROOT / name)]
    return numerics_digest(_OWN) + digest_of(linked, ROOT)


@functools.cache
def _fixed() -> list[Any]:
    about = circumstances(1)
    profiles = [profile_of(name).model_dump() for name in SIMULATED]
    return [about["versions"], about["machine"], source_digest(), os.environ.get("AUTOPREC_ISA"), profiles]


def stages(tasks: Sequence[Task], arms: Sequence[Arm], seeds: Sequence[int]) -> list[list[Job]]:
    """Returns all jobs: twins, whose time is the budget, then prices, then everything else seed by seed.

    Args:
        tasks: What is trained.
        arms: How.
        seeds: Seeds of the runs.
    """
    rest = [
        Job(task, arm, charge, seed)
        for seed in seeds
        for task in tasks
        for arm in arms
        if arm.name != TWIN
        for charge in ([None] if arm.is_static else CHARGES)
    ]
    prices = [Job(task) for task in tasks] if any(not arm.is_static for arm in arms) else []
    return [[twin_of(task, seed) for seed in seeds for task in tasks], prices, rest]


def twin_of(task: Task, seed: int) -> Job:
    """Returns the run that is the unit of measure."""
    return Job(task, ARMS[0], None, seed)


def budgets(job: Job, folder: Path) -> dict[str, float]:
    """Returns what a run may spend: the twin's measured time, or as many steps in fp32 as the twin makes.

    Args:
        job: The run.
        folder: Where results are.
    """
    simulated = {name: float(job.task.steps) for name in SIMULATED}
    if job.arm is None or job.arm.name == TWIN:
        return simulated
    twin = read_json(twin_of(job.task, job.seed).path(folder))
    measured = twin["points"][-1][3 + twin["charges"].index(MEASURED)]
    found = {MEASURED: measured, **simulated}
    return found if job.charge is None else {job.charge: found[job.charge]}


@dataclass(frozen=True)
class Order:
    """A job with all that depends on files, which may change while it waits.

    Args:
        job: The job.
        path: File for its result.
        budgets: What it may spend by charge.
    """

    job: Job
    path: Path
    budgets: dict[str, float]


def order(job: Job, folder: Path) -> Order:
    """Returns the order for a job whose twin is there.

    Args:
        job: The job.
        folder: Where results are.
    """
    return Order(job, job.path(folder), budgets(job, folder))


def perform(order: Order) -> None:
    """Does a job and keeps what it found.

    Args:
        order: The job.
    """
    task, arm, charge, seed = order.job.task, order.job.arm, order.job.charge, order.job.seed
    found = measure_prices(task) if arm is None else run(task, arm, charge, seed, order.budgets)
    write_json(order.path, found)


def perform_alone(order: Order) -> None:
    """The main function of a job's process.

    Args:
        order: The job.
    """
    torch.set_num_threads(1)
    os.environ.pop("AUTOPREC_AUTO", None)  # would add the callback to the static arms too
    os.environ["AUTOPREC_CACHE_DIR"] = str(order.path.parent / "prices")
    perform(order)


def in_own_process(order: Order) -> None:
    """Does a job in a process that ends with it.

    Args:
        order: The job.

    Raises:
        RuntimeError: If the process failed or did not end.
    """
    is_forked = sys.platform == "linux"
    context = get_context("forkserver") if is_forked else get_context("spawn")
    if is_forked:  # from one that has imported everything
        context.set_forkserver_preload(["benchmarks.transfer_runs"])
    process = context.Process(target=perform_alone, args=(order,), daemon=True)
    process.start()
    process.join(4 * LIMIT_S)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(
            f"The run {order.job.title} failed: its process ended with {process.exitcode} (None: not within"
            f" {4 * LIMIT_S:.0f} s). The same command tries it again."
        )


def train(todo: Sequence[Sequence[Job]], folder: Path, jobs: int, perform: Callable[[Order], None]) -> None:
    """Does what is missing, stage by stage, a few jobs at a time; each is kept as soon as it is there.

    Args:
        todo: Jobs by stage.
        folder: Where results are.
        jobs: Jobs at a time.
        perform: Does one of them.
    """
    with progress(sum(map(len, todo))) as (bar, line):
        for stage in todo:
            with ThreadPoolExecutor(jobs) as pool:
                futures = {pool.submit(perform, order(job, folder)): job for job in stage}
                try:
                    for future in as_completed(futures):
                        future.result()
                        bar.update(line, advance=1, description=futures[future].title)
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=[*TASKS], help="all of them, if not given")
    add("--seeds", type=int, help=f"runs of each arm, at least 2, {SEEDS} if not given")
    add("--quick", action="store_true", help=f"{', '.join(QUICK_TASKS)} with {QUICK_SEEDS} seeds")
    add("--policies", nargs="+", default=[], metavar="FOLDER", help="folders of further policies")
    add("--subject", help=f"arm that is compared with all others (default: the first there is of {SUBJECTS})")
    add("--jobs", type=int, default=2, help="runs at a time, a core for each (default 2)")
    add("--folder", type=Path, default=RESULTS, help="where runs are kept")
    add("--write-docs", action="store_true", help="writes docs/results/transfer.json and .png, and docs/transfer.md")
    options = parser.parse_args(arguments)
    if options.quick and (options.seeds or options.tasks):
        parser.error("--quick has its own tasks and seeds; leave out --tasks and --seeds")
    if options.write_docs and (options.tasks or (options.seeds or SEEDS) < SEEDS):
        parser.error(f"--write-docs is for whole studies, every task with at least {SEEDS} seeds, or for --quick")
    options.tasks = options.tasks or (list(QUICK_TASKS) if options.quick else [*TASKS])
    options.seeds = options.seeds or (QUICK_SEEDS if options.quick else SEEDS)
    if options.seeds < 2 or options.jobs < 1:
        parser.error(f"--seeds {options.seeds} --jobs {options.jobs}: an interval needs 2 seeds, a study 1 job")
    options.folder = options.folder.resolve()
    return options


def main(arguments: Sequence[str] | None = None, perform: Callable[[Order], None] = in_own_process) -> None:
    """Makes what is missing, and shows what each arm made of its budgets.

    Args:
        arguments: Instead of those of the process.
        perform: Does one job.
    """
    options = parse(arguments)
    arms, missing = available([*ARMS, *map(folder_arm, options.policies)])
    for line in missing:
        print(line)
    subject = _subject(options.subject, [arm.name for arm in arms if not arm.is_static])
    tasks, seeds = [TASKS[name] for name in options.tasks], range(FIRST_SEED, FIRST_SEED + options.seeds)
    todo = [
        [job for job in stage if read_json(job.path(options.folder)) is None] for stage in stages(tasks, arms, seeds)
    ]
    if any(todo):
        train(todo, options.folder, options.jobs, perform)
    study = _study(tasks, arms, seeds, subject, missing, options.folder)
    study["command"] = shlex.join(
        ["python", "-m", "benchmarks.transfer", *(sys.argv[1:] if arguments is None else arguments)]
    )
    write_json(options.folder / "transfer.json", study)
    draw(study, options.folder / "transfer.png")
    if options.write_docs:
        write_json(SUMMARY, study)
        draw(study, SUMMARY.with_suffix(".png"))
        put_between(PAGE, BEGIN, END, page_block(study))
    for table in tables(study):
        print(f"\n{as_text(table)}")
    print(f"\n{last_line(study)}")


def _subject(asked: str | None, policies: Sequence[str]) -> str:
    found: str | None = asked or next((name for name in SUBJECTS if name in policies), None)
    if found not in policies:
        raise SystemExit(f"--subject {found}: must be one of the policies of this study, {', '.join(policies)}")
    return str(found)


def _study(
    tasks: Sequence[Task], arms: Sequence[Arm], seeds: Sequence[int], subject: str, missing: Sequence[str], folder: Path
) -> dict[str, Any]:
    return circumstances(1) | {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "source": source_digest(),
        "seeds": list(seeds),
        "subject": subject,
        "starting": STARTING,
        "missing": list(missing),
        "charges": {name: profile_of(name).model_dump() if name in SIMULATED else MEASURED for name in CHARGES},
        "tasks": {task.name: _of_task(task, arms, seeds, folder) for task in tasks},
    }


def _of_task(task: Task, arms: Sequence[Arm], seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    twins = [read_json(twin_of(task, seed).path(folder)) for seed in seeds]
    found: dict[str, Any] = {}
    for arm in arms:
        by_charge = {}
        for charge in CHARGES:
            jobs = [Job(task, arm, None if arm.is_static else charge, seed) for seed in seeds]
            by_charge[charge] = summarise([read_json(job.path(folder)) for job in jobs], twins, charge)
        found[arm.name] = by_charge
    prices = read_json(Job(task).path(folder))
    return {"steps": task.steps, "batch_size": task.batch_size, "prices_ms": prices and prices["ms"], "arms": found}


if __name__ == "__main__":
    main()
