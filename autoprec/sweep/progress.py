"""Progress of a sweep on the screen: trials, best value, and the time left."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from autoprec.sweep.config import SweepConfig
from autoprec.sweep.results import SweepResult, TrialRecord

_REFRESH_S = 5.0


class SweepScreen:
    """Shows a bar for the sweep and one for each trial under way in a terminal; elsewhere a line for each trial.

    Args:
        console: Where to print.
        progress: The bars.
        config: The sweep.
        deadline: Value of ``time.time()`` after which no trial begins.
    """

    def __init__(self, console: Console, progress: Progress, config: SweepConfig, deadline: float) -> None:
        self._console, self._progress, self._config, self._deadline = console, progress, config, deadline
        self._bar = progress.add_task(f"sweep {config.study_name}", total=config.trials, note="starting")
        self._trials: dict[int, TaskID] = {}
        self._printed: set[int] = set()
        self._looked = 0.0

    def wants_result(self, event: Mapping[str, Any]) -> bool:
        """Returns whether the study should be looked at.

        Args:
            event: What a worker has said.
        """
        return event.get("kind") == "end" or time.monotonic() - self._looked > _REFRESH_S

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Moves the bar of a trial.

        Args:
            event: What a worker has said.
        """
        kind, number = event.get("kind"), event.get("trial")
        if number is None:
            return
        if kind == "begin":
            self._trials[number] = self._progress.add_task(f"  trial {number}: {event['arm']}", total=None, note="")
        elif kind == "step" and number in self._trials:
            loss = event["loss"]
            note = "" if loss is None else f"loss {loss:.4g}"
            self._progress.update(self._trials[number], total=event["steps"], completed=event["step"], note=note)
        elif kind == "end" and number in self._trials:
            self._progress.remove_task(self._trials.pop(number))

    def on_result(self, result: SweepResult) -> None:
        """Shows what the study holds by now.

        Args:
            result: What it holds.
        """
        self._looked = time.monotonic()
        for trial in result.trials:
            if trial.number not in self._printed:
                self._printed.add(trial.number)
                self._console.print(line_of(trial, result), markup=False, highlight=False, soft_wrap=True)
        self._progress.update(self._bar, completed=len(result.trials), note=self._note(result))

    def _note(self, result: SweepResult) -> str:
        parts = []
        if result.best is not None:
            parts.append(f"best {result.objectives[0].name} {result.best.values[0]:.4g} (trial {result.best.number})")
        parts += [f"{result.counts[state]} {state}" for state in ("pruned", "failed") if result.counts.get(state)]
        left = self.left_s(result)
        if left is not None:
            parts.append(f"{_duration(left)} left")
        return ", ".join(parts) or "starting"

    def left_s(self, result: SweepResult) -> float | None:
        """Returns the seconds that are left, ``None`` where nothing says so yet.

        Args:
            result: What the study holds.
        """
        known = [trial.seconds for trial in result.trials if trial.seconds is not None]
        if not known:
            return None
        left = max(0, self._config.trials - len(result.trials))
        expected = math.ceil(left / self._config.workers) * statistics.median(known)
        return min(expected, max(0.0, self._deadline - time.time()) + statistics.median(known))


def line_of(trial: TrialRecord, result: SweepResult) -> str:
    """Returns how a trial ended, in a line.

    Args:
        trial: The trial.
        result: What the sweep gave.
    """
    if trial.state != "complete":
        return f"trial {trial.number}: {trial.arm}  {trial.state}: {trial.reason}"
    pairs = zip(result.objectives, trial.values, strict=True)
    values = "  ".join(f"{one.name} {value:.5g}" for one, value in pairs)
    return f"trial {trial.number}: {trial.arm}  {values}{'' if trial.is_usable else '  (breaks a constraint)'}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def show_sweep(console: Console, config: SweepConfig, deadline: float) -> Iterator[SweepScreen]:
    """Shows progress until the end of the block.

    Args:
        console: Where to print.
        config: The sweep.
        deadline: Value of ``time.time()`` after which no trial begins.

    Yields:
        What is told how far it is.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield SweepScreen(console, progress, config, deadline)
