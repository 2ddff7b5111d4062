"""Progress of the training of policies on the screen: a bar for each seed, with the time left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from autoprec.commands.time_left import TimeLeft
from autoprec.policies.training_watch import Progress as Now


class TrainingScreen:
    """Shows a bar for each seed in a terminal; elsewhere a line for each tenth of its twins and decisions.

    Args:
        console: Where to print.
        progress: The bars.
    """

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._bars: dict[tuple[int, str], TaskID] = {}
        self._tenths: dict[tuple[int, str], int] = {}
        self._left: dict[tuple[int, str], TimeLeft] = {}

    def on_progress(self, seed: int, now: Now) -> None:
        """Moves the bar of a seed.

        Args:
            seed: The seed.
            now: How far it is.
        """
        key, text = (seed, now.phase), _text(seed, now)
        if key not in self._bars:
            for bar in [self._bars[other] for other in self._bars if other[0] == seed]:
                self._progress.update(bar, visible=False)
            self._bars[key] = self._progress.add_task(text, total=now.total)
        self._progress.update(self._bars[key], completed=now.done, description=text)
        tenth = now.done * 10 // max(now.total, 1)
        left = self._left.setdefault(key, TimeLeft()).text(now.done, now.total)
        if not self._console.is_terminal and now.phase != "statistics" and tenth > self._tenths.get(key, -1):
            line = f"seed {seed}  {_COUNTED[now.phase]}{now.done} of {now.total}{left}{_scores(now)}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._tenths[key] = tenth


_COUNTED = {"twins": "twins ", "statistics": "statistics ", "learning": ""}


def _text(seed: int, now: Now) -> str:
    return f"seed {seed}{_scores(now)}" if now.phase == "learning" else f"seed {seed}  {now.phase}"


def _scores(now: Now) -> str:
    """What validation has shown; short, so that a terminal of 80 columns has room for it."""
    return "" if math.isnan(now.best) else f"  best {now.best:.3f}, last {now.last:.3f}, start {now.first:.3f}"


@contextmanager
def show_training(console: Console) -> Iterator[TrainingScreen]:
    """Shows progress until the end of the block.

    Args:
        console: Where to print.

    Yields:
        What is told how far seeds are.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield TrainingScreen(console, progress)
