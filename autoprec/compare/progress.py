"""Progress of a comparison on the screen: arm x seed x step, with the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from autoprec.compare.messages import Ready
from autoprec.compare.records import Run


class Screen:
    """Shows a bar in a terminal; elsewhere a line for each run that begins and ends, and for each tenth of the steps.

    Args:
        console: Where to print.
        progress: The bar.
        runs: Runs that are to be made.
        steps: Steps of each, ``None`` where they are not known yet.
    """

    def __init__(self, console: Console, progress: Progress, runs: int, steps: int | None) -> None:
        self._console = console
        self._progress = progress
        self._runs = runs
        self._steps = steps
        self._taken = 0
        self._changes: set[str] = set()
        self._bar = progress.add_task("starting", total=None if steps is None else runs * steps)

    def on_start(self, arm: str, seed: int, ready: Ready) -> None:
        """Says what was changed in the Trainer, for the first run of an arm."""
        planned = [steps for steps in (self._steps, ready.steps) if steps is not None]
        if planned:
            self._steps = min(planned)
            self._progress.update(self._bar, total=self._runs * self._steps)
        if arm in self._changes:
            return
        self._changes.add(arm)
        for change in ready.changes:
            self._print(f"{arm}: {change}")

    def on_turn(self, arm: str, seed: int, steps: int, loss: float | None) -> None:
        """Moves the bar."""
        before, self._taken = self._taken, self._taken + steps
        words = "" if loss is None else f"  loss {loss:.4g}"
        text = f"{arm}  seed {seed}{words}"
        self._progress.update(self._bar, advance=steps, description=text)
        total = self._runs * self._steps if self._steps else None
        if not self._console.is_terminal and (
            before == 0 or (total and _tenth(self._taken, total) > _tenth(before, total))
        ):
            self._print(f"{text}  {'' if total is None else f'{self._taken / total:.0%} of all steps'}")

    def on_end(self, run: Run) -> None:
        """Says that a run has ended, and why if it failed."""
        if run.error is not None:
            self._print(f"{run.arm}, seed {run.seed}: {run.error}")
            missing = max(0, (self._steps or 0) - len(run.steps))
            self._progress.update(self._bar, advance=missing)
            self._taken += missing

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _tenth(steps: int, total: int) -> int:
    return steps * 10 // total


@contextmanager
def show_progress(console: Console, runs: int, steps: int | None) -> Iterator[Screen]:
    """Shows progress until the end of the block.

    Args:
        console: Where to print.
        runs: Runs that are to be made.
        steps: Steps of each, ``None`` where they are not known yet.

    Yields:
        What is told how far runs are.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Screen(console, progress, runs, steps)
