"""Runs schedules in processes of their own, so that one that crashes or hangs is a violation like any other."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import traceback
import warnings
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path

from tests.chaos.invariants import Violation
from tests.chaos.runs import Report, run
from tests.chaos.schedules import Schedule

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120


def run_apart(schedule: Schedule, limit_s: float = LIMIT_S) -> Report:
    """Runs a schedule in a new process.

    Args:
        schedule: What to run.
        limit_s: Seconds after which the process is killed.
    """
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_and_tell, args=(schedule.to_json(), theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return _failed("the_process_ends", f"it did not end within {limit_s:g} s")
        struck, found = ours.recv()
        return Report(struck, [Violation(*each) for each in found])
    except EOFError:
        process.join()
        return _failed("the_process_ends", f"it died with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        ours.close()


@functools.cache
def _context() -> ForkServerContext:
    """A server that has imported everything once, so that its children start in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    before = os.getcwd()
    os.chdir(ROOT)  # where it looks for what it imports
    try:
        ensure_running()
    finally:
        os.chdir(before)
    return context


def _failed(name: str, detail: str) -> Report:
    return Report(0, [Violation(name, detail)])


def _run_and_tell(text: str, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            report = run(Schedule.from_json(text), Path(folder))
        except Exception:
            report = _failed("the_campaign_itself", traceback.format_exc(limit=-4))
        os.chdir("/")
    pipe.send((report.struck, [(each.name, each.detail) for each in report.violations]))
    pipe.close()
