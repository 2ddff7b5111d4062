"""The demo itself: both tasks, progress on the way, and at the end a table, plain words, a JSON file and a picture."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autoprec.compare.turns import MIN_ROUNDS
from autoprec.demo.picture import draw
from autoprec.demo.record import write_json
from autoprec.demo.results import RunResult
from autoprec.demo.summary import TaskSummary, last_line, plain_words, summarise
from autoprec.demo.table import build_table
from autoprec.demo.tasks import ARMS, AUTOPREC, BASELINE, CLIP_NORM, INTERVAL, Arm, Task, cnn_task, gpt_task
from autoprec.demo.turns import run_in_turns
from autoprec.machine import circumstances

_GPT_SHARE = 0.78
_RESERVE_S = 10.0
LEAST_S = (80, 150)
"""What the rounds that are always made took on 2 cores, little and much used otherwise, in seconds."""


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the demo.

    Args:
        out: Folder for results, created if missing.
        minutes: Time after which no further round starts; reached on slow machines only. ``MIN_ROUNDS`` rounds are
            made in any case.
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
    about = circumstances(settings.threads) | {"arms": {arm.name: _words(arm) for arm in arms}}
    logs = settings.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    ends = started + 60 * settings.minutes - _RESERVE_S
    tasks = (gpt_task(arms, settings.quick), cnn_task(arms, settings.quick))
    console.print(beginning(tasks, settings.minutes, settings.quick), highlight=False)
    summaries: list[TaskSummary] = []
    runs: list[RunResult] = []
    for task, deadline in zip(tasks, (started + (ends - started) * _GPT_SHARE, ends), strict=True):
        with show_progress(console, task) as on_turn:
            results = run_in_turns(task, settings.threads, logs, deadline, on_turn)
        runs += results
        summaries.append(summarise(task, results))
    seconds = time.monotonic() - started
    title = f"autoprec demo, threads: {settings.threads}, {about['machine']['processor']}"
    draw(runs, settings.out / "demo.png", title, tasks[0].warmup)
    settings_used = {**asdict(settings), "out": str(settings.out), "clip": CLIP_NORM, "interval": INTERVAL}
    write_json(settings.out / "demo.json", {**about, "settings": settings_used}, summaries, runs, seconds)
    _print_results(console, summaries, settings, tasks[0].warmup)
    if seconds > 60 * settings.minutes:
        console.print(
            f"Took {seconds:.0f} s, more than --minutes {settings.minutes:g}: a round that has begun is finished, and"
            f" {MIN_ROUNDS} are always made."
        )
    console.print(last_line(summaries, time.monotonic() - started), soft_wrap=True, highlight=False)
    return summaries


def _print_results(console: Console, summaries: Sequence[TaskSummary], settings: DemoSettings, warmup: int) -> None:
    console.print(build_table(summaries))
    for summary in summaries:
        for line in plain_words(summary):
            console.print(line, highlight=False)
    console.print("What was compared", highlight=False)
    for line in conditions(settings, warmup):
        console.print(f"  {line}", highlight=False)
    if settings.quick:
        console.print("quick: models and runs are far too small to say anything about speed or loss.")
    written = f"Written: {settings.out / 'demo.json'}, {settings.out / 'demo.png'}, {settings.out / 'logs'}/"
    console.print(written, markup=False)


def _words(arm: Arm) -> str:
    steered = f", callbacks=[AutoPrecisionCallback(interval={INTERVAL})]" if arm.name == AUTOPREC else ""
    return f'Trainer(precision="{arm.precision}"{steered})'


def beginning(tasks: Sequence[Task], minutes: float, quick: bool) -> str:
    """Returns how long the demo takes, and the steps that it takes whatever the time."""
    least = " and ".join(f"{min(MIN_ROUNDS * task.turn, task.steps)} steps of each {task.name} run" for task in tasks)
    took = "" if quick else f"; on 2 cores that took {LEAST_S[0]} to {LEAST_S[1]} s"  # with models of full size
    return (
        f"autoprec demo: no new round after {minutes:g} minutes. At least {MIN_ROUNDS} rounds are made, whatever the"
        f" time: {least}{took}."
    )


def conditions(settings: DemoSettings, warmup: int) -> list[str]:
    """Returns under which conditions the runs were compared and what the columns hold, a line for each point.

    Args:
        settings: Settings of the demo.
        warmup: First steps that are left out of the paired step time.
    """
    return [
        f'{AUTOPREC}: precision="32-true" and AutoPrecisionCallback(interval={INTERVAL}): runs are short. The default'
        " interval is 50.",
        f"step time: median, over rounds, of the ratio to {BASELINE} in the same round, with quartiles. The first"
        f" {warmup} steps are left out: in them {AUTOPREC} still computes in fp32, because its first decision comes"
        f" after {INTERVAL} steps.",
        f"whole run: the sum of all steps by that of {BASELINE}, those {warmup} and autoprec's trial of new formats"
        " included. A step is the whole time from one batch to the next, with data loading and callbacks. Starting a"
        " run and computing held-out losses are in neither number. Only ratios are compared, because a shared machine"
        " changes its speed in mid-run; milliseconds are in demo.json.",
        f"In every run: CPU, threads: {settings.threads}, waiting passively; a process of its own, a few steps in turn,"
        f" order reversed every round; gradient_clip_val={CLIP_NORM:g}, which the callback leaves alone; AdamW in its"
        " default form, because Lightning refuses fused AdamW with clipping under bf16-mixed. Equal seeds mean equal"
        " initial weights and order of samples. Held-out loss is computed in fp32. Peak memory is the largest resident"
        " set of the process, Python, libraries and data included.",
    ]


@contextmanager
def show_progress(console: Console, task: Task) -> Iterator[Callable[[RunResult], None]]:
    """Shows a bar in a terminal; elsewhere a line for the first turn and for each tenth of the steps.

    Args:
        console: Where to print.
        task: What is about to be trained.

    Yields:
        What is to be called after each turn with the run's result so far.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = task.steps * len(task.runs)
    console.print(f"{task.name}: {len(task.runs)} runs of {task.steps} steps on {task.split.description}")
    console.print(f"{task.name}: starting a process for each run and computing held-out losses before the first step")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(f"{task.name}: starting", total=total)

        def on_turn(run: RunResult) -> None:
            before = int(progress.tasks[0].completed)
            progress.advance(bar, len(run.rounds[-1]))
            now = int(progress.tasks[0].completed)
            latest = f"{task.name}: {run.arm:<10} seed {run.seed}  loss {run.losses[-1]:.3f}"
            progress.update(bar, description=latest)
            if not console.is_terminal and (before == 0 or now * 10 // total > before * 10 // total):
                console.print(f"{latest}  {now / total:.0%} of all steps", highlight=False)

        yield on_turn
