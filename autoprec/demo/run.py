"""The demo itself: both tasks, progress on the way, and at the end a table, plain words, a JSON file and a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autoprec.demo.machine import circumstances
from autoprec.demo.picture import draw
from autoprec.demo.record import write_json
from autoprec.demo.results import RunResult
from autoprec.demo.summary import TaskSummary, last_line, plain_words, summarise
from autoprec.demo.table import build_table
from autoprec.demo.tasks import ARMS, CLIP_NORM, INTERVAL, Arm, Task, cnn_task, gpt_task
from autoprec.demo.turns import run_in_turns

_GPT_SHARE = 0.78
_RESERVE_S = 10.0


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the demo.

    Args:
        out: Folder for results, created if missing.
        minutes: Time after which no further round starts; reached on slow machines only.
        threads: Threads for one operation.
        quick: Tiny models and few steps, to see that it works.
    """

    out: Path = Path("autoprec-demo")
    minutes: float = 6.0
    threads: int = 2
    quick: bool = False

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise ValueError(f"Passed `minutes={self.minutes!r}`. `minutes` must be a number above 0.")
        if self.threads < 1:
            raise ValueError(f"Passed `threads={self.threads!r}`. `threads` must be an int >= 1.")


def run_demo(settings: DemoSettings, console: Console | None = None, arms: Sequence[Arm] = ARMS) -> list[TaskSummary]:
    """Trains everything, prints what came out and writes it into the output folder.

    Args:
        settings: Sizes and places.
        console: Where to print. ``None``: standard output.
        arms: The arms to compare; among them the baseline and the steered arm.

    Returns:
        What came out of each task.

    Raises:
        RunError: If a run failed.
    """
    started = time.monotonic()
    console = Console() if console is None else console
    about = circumstances(settings.threads)
    logs = settings.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ends = started + 60 * settings.minutes - _RESERVE_S
    tasks = (gpt_task(arms, settings.quick), cnn_task(arms, settings.quick))
    summaries: list[TaskSummary] = []
    runs: list[RunResult] = []
    for task, deadline in zip(tasks, (started + (ends - started) * _GPT_SHARE, ends), strict=True):
        with _progress(console, task) as on_turn:
            results = run_in_turns(task, settings.threads, logs, deadline, on_turn)
        runs += results
        summaries.append(summarise(task, results))
    seconds = time.monotonic() - started
    draw(
        runs, settings.out / "demo.png", f"autoprec demo, threads: {settings.threads}, {about['machine']['processor']}"
    )
    settings_used = {**asdict(settings), "out": str(settings.out), "clip": CLIP_NORM, "interval": INTERVAL}
    write_json(settings.out / "demo.json", {**about, "settings": settings_used}, summaries, runs, seconds)
    _print_results(console, summaries, settings, tasks[0].warmup)
    console.print(last_line(summaries, time.monotonic() - started), soft_wrap=True, highlight=False)
    return summaries


def _print_results(console: Console, summaries: Sequence[TaskSummary], settings: DemoSettings, warmup: int) -> None:
    console.print(build_table(summaries))
    for summary in summaries:
        for line in plain_words(summary):
            console.print(line, highlight=False)
    console.print(conditions(settings, warmup), highlight=False)
    if settings.quick:
        console.print("quick: models and runs are far too small to say anything about speed or loss.")
    console.print(f"Written: {settings.out / 'demo.json'}, {settings.out / 'demo.png'}, {settings.out / 'logs'}/")


def conditions(settings: DemoSettings, warmup: int) -> str:
    """Returns under which conditions the arms were compared, ``warmup`` steps not counting."""
    return (
        f"Conditions: CPU, threads: {settings.threads}, waiting passively; each run in its own process, a few steps in"
        " turn, order reversed every round; same seeds, initial weights and order of samples in every arm. A step is"
        f" the whole time from one batch to the next, the first {warmup} left out. All arms clip the gradient norm,"
        f" starting at {CLIP_NORM:g}; AdamW is the default, not the fused one, because Lightning refuses fused AdamW"
        f" with clipping under bf16-mixed. {ARMS[-1].name} decides every {INTERVAL} steps instead of every 50, because"
        " the runs are short. Held-out loss is computed in fp32 in every arm. Peak memory is the largest resident set"
        " of the run's process, Python, libraries and data included. fp16 is emulated on a CPU."
    )


@contextmanager
def _progress(console: Console, task: Task) -> Iterator[Callable[[RunResult], None]]:
    """A bar in a terminal, a line for each tenth elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = task.steps * len(task.runs)
    console.print(f"{task.name}: {len(task.runs)} runs of {task.steps} steps on {task.split.description}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{task.name}: starting", total=total)

        def on_turn(run: RunResult) -> None:
            before = int(progress.tasks[0].completed)
            progress.advance(bar, len(run.rounds[-1]))
            now = int(progress.tasks[0].completed)
            latest = f"{task.name}: {run.arm:<10} seed {run.seed}  loss {run.losses[-1]:.3f}"
            progress.update(bar, description=latest)
            if not console.is_terminal and now * 10 // total > before * 10 // total:
                console.print(f"{latest}  {now / total:.0%} of all steps", highlight=False)

        yield on_turn
