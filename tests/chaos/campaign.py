"""A campaign: many schedules of one seed, in a file that grows by one line for each, so that a stop loses nothing."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoprec.machine import version
from benchmarks.store import digest_of, source_files
from tests.chaos.apart import run_apart
from tests.chaos.invariants import Violation
from tests.chaos.runs import Report
from tests.chaos.schedules import Schedule, draw
from tests.chaos.shrink import shrink

ROOT = Path(__file__).resolve().parents[2]
Runner = Callable[[Schedule], Report]


@dataclass
class Result:
    """One schedule of a campaign.

    Args:
        index: Its number.
        schedule: What was run.
        struck: Faults that struck.
        violations: What did not hold.
        seconds: How long it took.
        shrunk: A smaller schedule that fails in the same way, where one was looked for.
    """

    index: int
    schedule: Schedule
    struck: int
    violations: list[Violation]
    seconds: float
    shrunk: Schedule | None = None


@dataclass
class Results:
    """The file of a campaign.

    Args:
        path: JSON Lines, one for each schedule that has ended and one for each that was shrunk.
    """

    path: Path
    known: dict[int, Result] = field(default_factory=dict)

    def load(self) -> None:
        """Reads what is there; a line that was cut off by a stop is left out."""
        lines = self.path.read_text("utf-8").split("\n") if self.path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            schedule = Schedule.from_json(row["schedule"])
            if "shrunk" in row:
                self.known[row["index"]].shrunk = schedule
            else:
                found = [Violation(*each) for each in row["violations"]]
                self.known[row["index"]] = Result(row["index"], schedule, row["struck"], found, row["seconds"])

    def add(self, result: Result) -> None:
        """Adds a line for a schedule that has ended."""
        self.known[result.index] = result
        found = [(each.name, each.detail) for each in result.violations]
        self._write(result, {"struck": result.struck, "seconds": result.seconds, "violations": found}, result.schedule)

    def add_shrunk(self, result: Result, shrunk: Schedule) -> None:
        """Adds a line for a failing schedule that was made smaller."""
        result.shrunk = shrunk
        self._write(result, {"shrunk": True}, shrunk)

    def _write(self, result: Result, row: dict[str, Any], schedule: Schedule) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"index": result.index, **row, "schedule": schedule.to_json()})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")  # a line that was cut off ends here
            file.flush()
            os.fsync(file.fileno())


def results_of(seed: int, folder: Path) -> Results:
    """Returns the results so far of a seed with the sources as they are."""
    files = [*source_files(ROOT / "autoprec"), *source_files(ROOT / "tests" / "chaos")]
    files += [ROOT / "tests" / name for name in ("resumed.py", "small_fits.py", "test_no_trace.py")]
    versions = "-".join(version(name) for name in ("torch", "lightning"))
    results = Results(folder / f"seed-{seed}-{digest_of(files, ROOT)}-{versions}.jsonl")
    results.load()
    return results


def run_missing(
    seed: int, indices: Sequence[int], results: Results, jobs: int, runner: Runner = run_apart
) -> Iterator[Result]:
    """Runs the schedules that are not in the results yet, and yields each as it ends."""

    def one(index: int) -> Result:
        schedule, start = draw(seed, index), time.perf_counter()
        report = runner(schedule)
        return Result(index, schedule, report.struck, report.violations, round(time.perf_counter() - start, 2))

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(one, each) for each in indices if each not in results.known]):
                results.add(future.result())
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def make_smaller(result: Result, results: Results, runner: Runner = run_apart) -> Schedule:
    """Shrinks a failing schedule, unless that was done before."""
    if result.shrunk is None:
        names = {each.name for each in result.violations}

        def still_fails(schedule: Schedule) -> bool:
            return bool(names & {each.name for each in runner(schedule).violations})

        results.add_shrunk(result, shrink(result.schedule, still_fails))
    assert result.shrunk is not None
    return result.shrunk


def command(schedule: Schedule) -> str:
    """What runs just this schedule."""
    return f"python scripts/chaos.py --run {shlex.quote(schedule.to_json())}"


def last_line(results: Sequence[Result]) -> str:
    """The summary of a campaign."""
    found = sum(len(each.violations) for each in results)
    return f"chaos: schedules={len(results)} faults={sum(each.struck for each in results)} violations={found}"
