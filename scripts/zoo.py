"""Trains every model of the zoo under every format map and says what did not hold.

The models are in ``tests/zoo_models.py``, what must hold in ``tests/zoo_check.py``. Models are spread over processes
with one thread each. Results go to a JSON file; ``--resume`` keeps the runs in it that passed with the same sources.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RUN_LIMIT_S = 180
Record = dict[str, Any]


def parse(argv: Sequence[str] | None, models: Sequence[str], maps: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=models, default=list(models), metavar="MODEL")
    parser.add_argument("--maps", nargs="+", choices=[*maps, "fp8", "tf32", "fp32"], default=list(maps), metavar="MAP")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "zoo.json", help="JSON file of the results")
    parser.add_argument("--resume", action="store_true", help="keep passed runs of the results file")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"Passed `--jobs {options.jobs}`. `--jobs` must be at least 1.")
    return options


def fingerprint() -> str:
    """Changes with every source file that a result depends on, and with the versions of torch and lightning."""
    import lightning
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {lightning.__version__}".encode())
    files = [p for p in (ROOT / "autoprec").rglob("*") if p.suffix in (".py", ".c", ".h", ".cpp", ".so")]
    for path in sorted([*files, *(ROOT / "tests").glob("zoo_*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def start_worker() -> None:
    """One thread, and nothing printed between the lines of the progress bar but warnings and errors."""
    import torch

    torch.set_num_threads(1)
    # torchao, which transformers imports, complains about its missing CUDA libraries
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_model(model: str, maps: Sequence[str]) -> list[Record]:
    """Runs in a worker: one model under some maps."""
    from tests.zoo_check import Result, check, quiet

    records = []
    with tempfile.TemporaryDirectory() as folder, quiet():
        for map_name in maps:
            start = time.perf_counter()
            faulthandler.dump_traceback_later(RUN_LIMIT_S, exit=True)
            try:
                result = check(model, map_name, Path(folder))
            # one model's error is a line of the table, not the end of the zoo
            except Exception as error:
                result = Result(model, map_name, [summary(error)])
            faulthandler.cancel_dump_traceback_later()
            result.seconds = round(time.perf_counter() - start, 2)
            records.append(asdict(result))
    return records


def summary(error: Exception) -> str:
    """The error and the last three places it came through, shortest form."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    return f"{type(error).__name__}: {error} [{places}]"


class Lanes:
    """Threads with one worker process each, which is replaced when it dies."""

    def __init__(self, jobs: int) -> None:
        self.threads = ThreadPoolExecutor(jobs)
        self.local = threading.local()
        self.pools: list[ProcessPoolExecutor] = []
        self.is_closed = False

    def run(self, todo: dict[str, list[str]]) -> Iterator[list[Record]]:
        """Yields the records of one model after the other, in the order in which they end."""
        futures = [self.threads.submit(self._run, model, maps) for model, maps in todo.items()]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            self.is_closed = True
            self.threads.shutdown(cancel_futures=True)
            for pool in self.pools:
                pool.shutdown()

    def _run(self, model: str, maps: list[str]) -> list[Record]:
        if not hasattr(self.local, "pool"):
            self.local.pool = self._new_pool()
        try:
            records: list[Record] = self.local.pool.submit(run_model, model, maps).result()
            return records
        except BrokenProcessPool:
            if self.is_closed:
                return []
            self.local.pool = self._new_pool()
        if len(maps) == 1:
            return [died(model, maps[0])]
        # one map took the others' results along: each gets another try
        return [record for map_name in maps for record in self._run(model, [map_name])]

    def _new_pool(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker)
        self.pools.append(pool)
        return pool


def died(model: str, map_name: str) -> Record:
    from tests.zoo_check import Result

    return asdict(Result(model, map_name, [f"the process died: it crashed, or took more than {RUN_LIMIT_S} s"]))


class Results:
    """The JSON file: written after each model, so that a stopped zoo can go on."""

    def __init__(self, path: Path, keep: bool) -> None:
        self.path = path
        self.fingerprint = fingerprint()
        self.records: dict[str, Record] = {}
        if keep and path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            if old["fingerprint"] == self.fingerprint:
                self.records = {key: record for key, record in old["runs"].items() if not record["failures"]}

    def add(self, records: Iterable[Record]) -> None:
        """Puts records in and writes the file."""
        self.records.update({f"{record['model']}/{record['map']}": record for record in records})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps({"fingerprint": self.fingerprint, "runs": self.records}, indent=1), "utf-8")
        scratch.replace(self.path)


def failure_table(records: Iterable[Record]) -> Table:
    table = Table("model", "map", "what did not hold", title="failures", title_justify="left", show_lines=True)
    for record in records:
        shown = [text if len(text) <= 400 else f"{text[:400]} ..." for text in record["failures"][:6]]
        more = len(record["failures"]) - len(shown)
        table.add_row(
            record["model"], record["map"], escape("\n".join([*shown, *([f"and {more} more"] if more > 0 else [])]))
        )
    return table


def raise_table(records: Iterable[Record]) -> Table:
    """What the guard raised, by reason: no failure, but a map of which little is left shows little."""
    reasons: dict[str, list[str]] = {}
    for record in records:
        for unit, reason in record["raised"].items():
            reasons.setdefault(reason, []).append(f"{record['model']}/{record['map']} {unit}")
    table = Table("units", "reason", "first", title="raised by the guard", title_justify="left")
    for reason, units in sorted(reasons.items(), key=lambda item: -len(item[1])):
        table.add_row(str(len(units)), escape(reason), escape(units[0]))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the zoo and returns the exit code."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(ROOT))
    from tests.zoo_check import MAPS
    from tests.zoo_models import ZOO, missing_module

    options = parse(argv, list(ZOO), MAPS)
    console = Console()
    skipped = {name: reason for name in options.models if (reason := missing_module(ZOO[name]))}
    models = [name for name in options.models if name not in skipped]
    results = Results(options.results, options.resume)
    todo = {m: [p for p in options.maps if f"{m}/{p}" not in results.records] for m in models}
    todo = {model: maps for model, maps in todo.items() if maps}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("zoo", total=len(models) * len(options.maps))
        progress.advance(task, len(models) * len(options.maps) - sum(map(len, todo.values())))
        for records in Lanes(options.jobs).run(todo):
            results.add(records)
            progress.update(task, advance=len(records), description=records[0]["model"])
    runs = [results.records[f"{model}/{map_name}"] for model in models for map_name in options.maps]
    failed = [record for record in runs if record["failures"]]
    if any(record["raised"] for record in runs):
        console.print(raise_table(runs))
    if failed:
        console.print(failure_table(failed))
    for name, reason in skipped.items():
        print(f"skipped {name}: {reason}")
    print(f"zoo: models={len(models)} runs={len(runs)} failed={len(failed)}")
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
