"""The rows of the demo's table, and what came out in plain words, both computed from the numbers alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.demo.results import (
    ENOUGH_ROUNDS,
    LossDifference,
    RunResult,
    loss_difference,
    loss_verdict,
    pairs_of,
    run_ratio,
    step_ratio,
    time_verdict,
    whole_ratio,
)
from autoprec.demo.tasks import AUTOPREC, BASELINE, Task
from autoprec.paired import Spread


@dataclass(frozen=True)
class Row:
    """One line of the table: an arm over its seeds.

    Args:
        label: Name of the arm.
        step_ms: Median step time after the warm-up. Not paired: to compare rows, take ``ratio``.
        ratio: Step time against the baseline, round by round, without the warm-up.
        whole_ratio: Time of all steps against the baseline.
        losses: Held-out loss at the end of each seed.
        skipped: Skipped steps, all seeds together.
        peak_bytes: Largest resident memory of a run, None if unknown.
        formats: Compute formats at the end.
    """

    label: str
    step_ms: float
    ratio: Spread
    whole_ratio: float
    losses: tuple[float, ...]
    skipped: int
    peak_bytes: int | None
    formats: str


@dataclass(frozen=True)
class TaskSummary:
    """What came out of one task.

    Args:
        name: Name of the task.
        parameters: Size of the model.
        steps: Steps that every run took.
        planned_steps: Steps that every run should have taken.
        warmup: First steps that are left out of ``Row.ratio`` and ``repeat``.
        counted_rounds: Rounds after them.
        seeds: Seeds of the steered arm.
        rows: Lines of the table.
        repeat: Step time of the baseline with another seed against itself: the noise of the clock.
        whole_repeat: The same for the time of all steps.
        difference: Loss of the steered arm against the best static arm.
    """

    name: str
    parameters: int
    steps: int
    planned_steps: int
    warmup: int
    counted_rounds: int
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    repeat: Spread
    whole_repeat: float
    difference: LossDifference

    @property
    def ratio(self) -> Spread:
        """Step time of the steered arm against the baseline, without the warm-up."""
        return next(row.ratio for row in self.rows if row.label == AUTOPREC)

    @property
    def whole_ratio(self) -> float:
        """Time of all steps of the steered arm against the baseline."""
        return next(row.whole_ratio for row in self.rows if row.label == AUTOPREC)

    @property
    def skipped(self) -> int:
        """Skipped steps of all runs."""
        return sum(row.skipped for row in self.rows)


def summarise(task: Task, runs: Sequence[RunResult]) -> TaskSummary:
    """Computes the table's lines and the differences of one task.

    Args:
        task: What was trained.
        runs: Its results.
    """
    warmup = task.warmup
    seeds = tuple(run.seed for run in runs if run.arm == AUTOPREC)
    with_seeds = [run for run in runs if run.seed in seeds]
    first, second = [run for run in runs if run.arm == BASELINE][:2]
    rows = [
        _row(
            arm,
            [run for run in with_seeds if run.arm == arm],
            step_ratio(with_seeds, arm, BASELINE, warmup),
            whole_ratio(pairs_of(with_seeds, arm, BASELINE), warmup),
            warmup,
        )
        for arm in dict.fromkeys(run.arm for run in runs)
    ]
    rows += [
        _row(
            f"{run.arm}, seed {run.seed}",
            [run],
            run_ratio(run, first, warmup),
            whole_ratio([(run, first)], warmup),
            warmup,
        )
        for run in runs
        if run.seed not in seeds
    ]
    return TaskSummary(
        name=task.name,
        parameters=runs[0].parameters,
        steps=runs[0].steps,
        planned_steps=task.steps,
        warmup=warmup,
        counted_rounds=runs[0].counted_rounds(warmup),
        seeds=seeds,
        rows=tuple(rows),
        repeat=run_ratio(second, first, warmup),
        whole_repeat=whole_ratio([(second, first)], warmup),
        difference=loss_difference(runs, AUTOPREC, BASELINE),
    )


def _row(label: str, runs: Sequence[RunResult], ratio: Spread, whole: float, warmup: int) -> Row:
    peaks = [run.done.peak_bytes for run in runs if run.done.peak_bytes is not None]
    return Row(
        label=label,
        step_ms=1e3 * statistics.median([second for run in runs for second in run.step_seconds(warmup)] or [math.nan]),
        ratio=ratio,
        whole_ratio=whole,
        losses=tuple(run.final_loss for run in runs),
        skipped=sum(run.done.skipped_steps for run in runs),
        peak_bytes=max(peaks, default=None),
        formats=_formats(runs),
    )


def _formats(runs: Sequence[RunResult]) -> str:
    shares = [run.format_shares() for run in runs]
    if not any(shares):
        return runs[0].formats
    names = dict.fromkeys(name for share in shares for name in share)
    means = {name: statistics.fmean(share.get(name, 0.0) for share in shares) for name in names}
    return ", ".join(f"{name} {_percent(mean)}" for name, mean in sorted(means.items(), key=lambda item: -item[1]))


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.9995 or share == 0 else f"{share:.1%}"


def plain_words(summary: TaskSummary) -> list[str]:
    """Says what came out of a task: what was trained, then a sentence each on time, loss and skipped steps."""
    seeds = "one seed" if len(summary.seeds) == 1 else f"{len(summary.seeds)} seeds"
    sentences = [
        f"{summary.name}: {summary.parameters / 1e6:.2g} M parameters, {summary.steps} steps, {seeds}.",
        f"  Time: {_time_words(summary)}",
        f"  Whole run: {_whole_words(summary)}",
        f"  Loss: {_loss_words(summary)}",
    ]
    if summary.skipped:
        sentences.append(f"  Skipped: {summary.skipped} optimizer steps, because a gradient was not finite.")
    if summary.steps < summary.planned_steps:
        sentences.append(f"  Time ran out after {summary.steps} of {summary.planned_steps} steps of every run.")
    return sentences


def _time_words(summary: TaskSummary) -> str:
    ratio, repeat = summary.ratio, summary.repeat
    if summary.counted_rounds < ENOUGH_ROUNDS:
        more = " More `--minutes` give more rounds." if summary.steps < summary.planned_steps else ""
        return (
            f"n/a. Rounds after the first {summary.warmup} steps: {summary.counted_rounds}; of fewer than"
            f" {ENOUGH_ROUNDS} no ratio is made.{more}"
        )
    verdict = {
        "faster": f"{AUTOPREC} is faster than {BASELINE}",
        "slower": f"{AUTOPREC} is slower than {BASELINE}",
        "no difference": f"no difference between {AUTOPREC} and {BASELINE} beyond the noise",
    }[time_verdict(ratio, repeat)]
    return (
        f"{verdict}. After the first {summary.warmup} steps a step takes {ratio.median:.2f} times as long (quartiles"
        f" {ratio.low:.2f} to {ratio.high:.2f}); {BASELINE} with another seed takes {repeat.median:.2f} times as long"
        f" as itself ({repeat.low:.2f} to {repeat.high:.2f})."
    )


def _whole_words(summary: TaskSummary) -> str:
    if math.isnan(summary.whole_ratio):
        return "n/a, for the same reason."
    return (
        f"all {summary.steps} steps together, the first {summary.warmup} included, take {summary.whole_ratio:.2f} times"
        f" as long as with {BASELINE}; {BASELINE} with another seed takes {summary.whole_repeat:.2f} times as long as"
        " itself."
    )


def _loss_words(summary: TaskSummary) -> str:
    difference = summary.difference
    verdict = {
        "better": f"{AUTOPREC} ends better than the best without it",
        "worse": f"{AUTOPREC} ends worse than the best without it",
        "no difference": "no difference beyond what another seed makes",
        "not finite": "nothing to compare, a loss is not finite",
    }[loss_verdict(difference)]
    return (
        f"{verdict}. {AUTOPREC} {difference.steered:.4f}, {difference.best_static} {difference.static:.4f}, difference"
        f" {difference.value:+.4f}; seeds of {BASELINE} differ by {difference.spread:.4f}."
    )


def last_line(summaries: Sequence[TaskSummary], seconds: float) -> str:
    """Returns the demo's last line, one ``name=value`` for each number, for scripts."""
    parts = [
        f"{summary.name}_step_ratio={summary.ratio.median:.3f} {summary.name}_loss_diff={summary.difference.value:.4f}"
        for summary in summaries
    ]
    skipped = sum(summary.skipped for summary in summaries)
    return f"demo: {' '.join(parts)} skipped={skipped} seconds={seconds:.0f}"
