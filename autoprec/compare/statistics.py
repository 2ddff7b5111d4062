"""From recorded runs to numbers: paired ratios of times, differences of metrics, time to a target.

Pure. Runs are paired by seed, because another seed changes a loss by more than another format does; step times are
paired within rounds as well, because the machine's speed changes while runs take turns. Intervals are over seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoprec.compare.records import Run
from autoprec.paired import Interval, Spread, bootstrap_mean, verdict

MIN_SEEDS = 3
"""Of fewer seeds than this no interval is made."""

ENOUGH_ROUNDS = 5
"""Of fewer rounds than this a pair of runs gives no ratio of step times."""

_WARMUP_STEPS = 10
_TURN_STEPS = 5


@dataclass(frozen=True)
class Estimate:
    """A number with its interval over seeds.

    Args:
        value: The estimate; NaN where there is nothing to estimate it from.
        low: Lower end of the interval, ``None`` with fewer than ``MIN_SEEDS`` seeds.
        high: Upper end.
        seeds: Seeds that it rests on.
    """

    value: float
    low: float | None
    high: float | None
    seeds: int

    @property
    def is_sure(self) -> bool:
        """Whether there is an interval."""
        return self.low is not None and self.high is not None

    def holds(self, value: float) -> bool:
        """Whether the interval holds a value; without an interval it may be anything."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    @classmethod
    def of_mean(cls, values: Sequence[float], confidence: float) -> Estimate:
        """Returns the mean with its bootstrap interval.

        Args:
            values: One value for each seed. One that is not finite makes the mean so and leaves no interval.
            confidence: Level of the interval.
        """
        if not values:
            return cls(math.nan, None, None, 0)
        if len(values) < MIN_SEEDS or not all(map(math.isfinite, values)):
            return cls(statistics.fmean(values), None, None, len(values))
        mean, low, high = bootstrap_mean(values, confidence)
        return cls(mean, low, high, len(values))

    @classmethod
    def of_ratio(cls, ratios: Sequence[float], confidence: float) -> Estimate:
        """Returns the geometric mean with its bootstrap interval.

        Args:
            ratios: One positive ratio for each seed.
            confidence: Level of the interval.
        """
        found = cls.of_mean([math.log(ratio) for ratio in ratios], confidence)
        low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
        return cls(math.exp(found.value), low, high, found.seeds)


@dataclass(frozen=True)
class Rounds:
    """How runs took turns.

    Args:
        warmup_steps: First steps of a run that do not count in ratios of step times.
        turn_steps: Steps of one run before it was another's turn.
    """

    warmup_steps: int = _WARMUP_STEPS
    turn_steps: int = _TURN_STEPS

    @classmethod
    def of(cls, settings: Mapping[str, object], runs: Sequence[Run]) -> Rounds:
        """Returns what the settings of a comparison say, and what fits the shortest run where they say nothing.

        Args:
            settings: ``warmup_steps`` and ``turn_steps`` are read.
            runs: All runs.
        """
        shortest = min((len(run.steps) for run in runs if run.steps), default=0)
        warmup = settings.get("warmup_steps")
        turn = settings.get("turn_steps")
        return cls(
            warmup if isinstance(warmup, int) else min(_WARMUP_STEPS, shortest // 4),
            max(1, turn) if isinstance(turn, int) else _TURN_STEPS,
        )


def pairs_of(runs: Sequence[Run], arm: str, other: str) -> Iterator[tuple[Run, Run]]:
    """Yields each run of an arm with the other arm's run of the same seed, where there is one.

    Args:
        runs: All runs.
        arm: Name of the first arm.
        other: Name of the second.
    """
    others = {run.seed: run for run in runs if run.arm == other}
    yield from ((run, others[run.seed]) for run in runs if run.arm == arm and run.seed in others)


def round_ratios(run: Run, other: Run, rounds: Rounds) -> list[float]:
    """Returns the ratio of the median step times of two runs in each round after the warm-up.

    A turn of many steps is cut into parts, so that a run of few turns still has ``ENOUGH_ROUNDS``; the steps that the
    other run does not have are left out.

    Args:
        run: The run above the line.
        other: The run below it, of the same seed.
        rounds: How they took turns.
    """
    below = {step.index: step.step_ms for step in other.steps}
    common = [step for step in run.steps if step.index in below and step.index >= rounds.warmup_steps]
    length = max(1, min(rounds.turn_steps, len(common) // ENOUGH_ROUNDS))
    parts: dict[int, list[tuple[float, float]]] = {}
    for step in common:
        parts.setdefault((step.index - rounds.warmup_steps) // length, []).append((step.step_ms, below[step.index]))
    medians = [[statistics.median(side) for side in zip(*part, strict=True)] for part in parts.values()]
    return [above / under for above, under in medians if above > 0 and under > 0]


def step_ratio(runs: Sequence[Run], arm: str, other: str, rounds: Rounds, confidence: float) -> Estimate:
    """Compares the step times of two arms.

    Args:
        runs: All runs.
        arm: The arm above the line.
        other: The arm below it.
        rounds: How runs took turns.
        confidence: Level of the interval.

    Returns:
        For each seed the median of the ratios of its rounds; their geometric mean, above 1 where ``arm`` is slower.
    """
    by_seed = (round_ratios(run, partner, rounds) for run, partner in pairs_of(runs, arm, other))
    return Estimate.of_ratio([Spread.of(found).median for found in by_seed if len(found) >= ENOUGH_ROUNDS], confidence)


def whole_ratio(runs: Sequence[Run], arm: str, other: str, confidence: float) -> Estimate:
    """Compares the time of all steps of two arms, the first ones included.

    Args:
        runs: All runs.
        arm: The arm above the line.
        other: The arm below it.
        confidence: Level of the interval.
    """
    seconds = ((train_seconds(run), train_seconds(partner)) for run, partner in pairs_of(runs, arm, other))
    return Estimate.of_ratio([above / below for above, below in seconds if above > 0 and below > 0], confidence)


def train_seconds(run: Run) -> float:
    """Returns the seconds that a run spent in its steps."""
    return math.fsum(step.step_ms for step in run.steps) / 1e3


def final_value(run: Run, metric: str, main_metric: str | None = None) -> float | None:
    """Returns a metric at the end of a run, ``None`` where it was not recorded.

    Args:
        run: The run.
        metric: Name of the metric.
        main_metric: The metric that ``run.final_metric`` is; ``None`` if it is whatever is asked for.
    """
    if run.final_metric is not None and main_metric in (None, metric):
        return run.final_metric
    last = max(run.evaluations, key=lambda evaluation: evaluation.step, default=None)
    return None if last is None else last.metrics.get(metric)


def is_diverged(run: Run, final: float | None) -> bool:
    """Whether a run ended in numbers that are not finite.

    A loss that was not finite on the way counts only where no metric was computed at the end: a loss scaler skips such
    steps, and the weights stay what they were.

    Args:
        run: The run.
        final: Its metric at the end.
    """
    if final is not None:
        return not math.isfinite(final)
    losses = [step.loss for step in run.steps if step.loss is not None]
    return bool(losses) and not math.isfinite(losses[-1])


def interquartile_mean(values: Sequence[float]) -> float:
    """Returns the mean of the middle half, which one odd seed does not move; of fewer than 4 values their mean.

    Args:
        values: One for each seed; NaN without any.
    """
    ordered = sorted(values)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return statistics.fmean(middle) if middle else math.nan


def relation(difference: Estimate, margin: float, mode: str) -> str:
    """Says what a difference of a metric shows.

    Args:
        difference: First arm less second.
        margin: Largest difference that counts as none.
        mode: ``min`` where lower is better, ``max`` where higher is.

    Returns:
        ``equivalent`` where the whole interval is inside the margin (two one-sided tests), ``worse`` or ``better``
        where it leaves out zero, else ``unknown``.
    """
    if difference.low is None or difference.high is None:
        return "unknown"
    low, high = (difference.low, difference.high) if mode == "min" else (-difference.high, -difference.low)
    found = verdict(Interval(difference.value, low, high), margin)
    return "unknown" if found == "undecided" else found


def seconds_to_target(run: Run, metric: str, mode: str, target: float) -> float | None:
    """Returns the seconds in steps until an evaluation reached the target; ``None`` where none did.

    Args:
        run: The run.
        metric: Name of the metric.
        mode: ``min`` where lower is better, ``max`` where higher is.
        target: Value to reach.
    """
    sign = 1.0 if mode == "min" else -1.0
    reached = (
        evaluation.elapsed_s
        for evaluation in run.evaluations
        if metric in evaluation.metrics and sign * evaluation.metrics[metric] <= sign * target
    )
    return min(reached, default=None)


def censored_median(values: Sequence[float | None]) -> float | None:
    """Returns the median where ``None`` is later than everything; ``None`` where the median is among these.

    Args:
        values: Seconds, ``None`` where the target was not reached.
    """
    median = statistics.median([math.inf if value is None else value for value in values]) if values else math.inf
    return median if math.isfinite(median) else None
