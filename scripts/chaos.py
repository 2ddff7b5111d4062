"""The fault campaign: injects faults into small training runs and checks that every promise holds.

A schedule is a small run (model, formats, optimizer, accumulation, knobs) and one to four faults that strike at given
batches: inf and NaN in inputs, layers, gradients and losses, outliers, errors out of memory, failing controllers,
optimizers and hooks, requests at any time, Ctrl-C, a full disk, kill -9. After each run these must hold: nothing is
non-finite, windows add up, the record is complete, the user gets the very error that was raised, recoverable faults
cost less than another seed, module and Trainer are clean, checkpoints load, a resumed run is the same bit for bit.

Results go to build/chaos, one line for each schedule, in a file named after the seed and the sources. Started again,
the campaign runs what is missing. A schedule that fails is made as small as it gets and printed as a command.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = """\
examples:
  make chaos SCHEDULES=500 SEED=7            a long campaign; 5 to 7 minutes on 2 cores
  python scripts/chaos.py --schedules 50     the first 50 schedules of seed 0
  python scripts/chaos.py --only 17          schedule 17 of seed 0, whatever the file of results holds
  python scripts/chaos.py --run '{...}'      one schedule, as a failing campaign prints it
  python scripts/chaos.py --list             the faults, and whether this version answers them

The last line is `chaos: schedules=<n> faults=<n> violations=<n>`. The exit code is 1 where there are violations.
"""
if TYPE_CHECKING:
    from tests.chaos.campaign import Result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=100, help="how many schedules (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="which schedules: the same seed draws the same (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="schedules at a time, a core for each (default 2)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "chaos", help="folder of the results")
    parser.add_argument("--no-shrink", action="store_true", help="print failing schedules as they were drawn")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--only", type=int, metavar="INDEX", help="run one schedule of the seed, and nothing else")
    one.add_argument("--run", metavar="JSON", help="run this schedule, and nothing else")
    one.add_argument("--list", action="store_true", help="list the faults, and run nothing")
    options = parser.parse_args(argv)
    for name in ("schedules", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"Passed `--{name} {getattr(options, name)}`. `--{name}` must be at least 1.")
    return options


@contextmanager
def progress(total: int, done: int) -> Iterator[Callable[[Result], None]]:
    """Shows how far the campaign is: a bar where rich is installed, else a line for every ten schedules."""
    found = 0
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:

        def tell(result: Result) -> None:
            nonlocal done, found
            done, found = done + 1, found + len(result.violations)
            if done % 10 == 0 or done == total:
                print(f"{done} of {total} schedules, {found} violations", flush=True)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("schedules", total=total, completed=done)

        def advance(result: Result) -> None:
            nonlocal found
            found += len(result.violations)
            bar.update(task, advance=1, description=f"schedules, {found} violations" if found else "schedules")

        yield advance


def campaign(options: argparse.Namespace) -> list[Result]:
    """Runs what is missing and returns everything."""
    from tests.chaos.campaign import command, make_smaller, results_of, run_missing

    results = results_of(options.seed, options.results)
    indices = range(options.schedules)
    known = sum(index in results.known for index in indices)
    if known:
        print(f"{known} of {options.schedules} schedules are in {results.path}")
    with progress(options.schedules, known) as advance:
        for result in run_missing(options.seed, indices, results, options.jobs):
            advance(result)
    for index in indices:
        result = results.known[index]
        if result.violations:
            show(index, result)
            smaller = result.schedule if options.no_shrink else make_smaller(result, results)
            print(f"  again: {command(smaller)}", flush=True)
    return [results.known[index] for index in indices]


def show(index: int | None, result: Result) -> None:
    """Prints what did not hold."""
    print(
        "schedule" if index is None else f"schedule {index}:", ", ".join(each.fault for each in result.schedule.faults)
    )
    for violation in result.violations:
        print(f"  {violation.name}: {violation.detail}")


def single(options: argparse.Namespace) -> list[Result]:
    """Runs one schedule."""
    from tests.chaos.apart import run_apart
    from tests.chaos.campaign import Result
    from tests.chaos.schedules import Schedule, draw

    schedule = draw(options.seed, options.only) if options.run is None else Schedule.from_json(options.run)
    report = run_apart(schedule)
    result = Result(0, schedule, report.struck, report.violations, 0.0)
    print(schedule.to_json())
    show(options.only, result)
    return [result]


def list_faults() -> None:
    """Prints the table of faults."""
    from tests.chaos.faults import FAULTS

    for name, cls in FAULTS.items():
        summary = (cls.__doc__ or "").strip().splitlines()[0]
        print(f"{name:20} {summary}{'' if cls.is_enabled() else ' (not in this version)'}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the campaign and returns the exit code."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    options = parse(argv)
    if options.list:
        list_faults()
        return 0
    is_single = options.run is not None or options.only is not None
    results = single(options) if is_single else campaign(options)
    from tests.chaos.campaign import last_line

    print(last_line(results))
    return 1 if any(result.violations for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
