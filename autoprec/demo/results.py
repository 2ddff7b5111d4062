"""What the runs gave, and what follows from it: ratios with quartiles, differences with their spread, verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from autoprec.compare.messages import Done, Turn
from autoprec.paired import Spread

SAME_TIME = 0.05
"""Step-time ratios nearer to 1 than this count as no difference."""

ENOUGH_ROUNDS = 5
"""Of fewer rounds than this no ratio is made."""


@dataclass
class RunResult:
    """Everything one run gave.

    Args:
        task: Name of the task.
        arm: Name of the arm.
        seed: The run's seed.
        formats: What its compute formats are called, for a static run.
    """

    task: str
    arm: str
    seed: int
    formats: str
    parameters: int = 0
    rounds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    points: list[tuple[int, float, float]] = field(default_factory=list)
    format_changes: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    done: Done = field(default_factory=lambda: Done(None))

    def add_turn(self, turn: Turn) -> None:
        """Adds the steps of one turn."""
        self.rounds.append(turn.step_s)
        self.losses += [math.nan if loss is None else loss for loss in turn.losses]
        self.format_changes += turn.formats

    def add_point(self, loss: float) -> None:
        """Adds a point of the held-out curve: steps and seconds trained so far, and the loss."""
        self.points.append((self.steps, self.seconds, loss))

    @property
    def steps(self) -> int:
        """Optimizer steps attempted."""
        return len(self.losses)

    @property
    def final_loss(self) -> float:
        """The held-out loss at the end, which is the last point of the curve."""
        return self.points[-1][2] if self.points else math.nan

    @property
    def seconds(self) -> float:
        """Seconds spent in steps; waiting and evaluating do not count."""
        return sum(map(sum, self.rounds))

    def step_seconds(self, warmup: int) -> list[float]:
        """Returns the seconds of each step after the first ``warmup``."""
        return [second for turn in self.rounds for second in turn][warmup:]

    def round_medians(self, warmup: int) -> list[float | None]:
        """Returns the median step time of each round, None for a round that begins in the warm-up."""
        medians: list[float | None] = []
        steps = 0
        for turn in self.rounds:
            medians.append(statistics.median(turn) if steps >= warmup else None)
            steps += len(turn)
        return medians

    def counted_rounds(self, warmup: int) -> int:
        """Returns the number of rounds after the first ``warmup`` steps."""
        return sum(median is not None for median in self.round_medians(warmup))

    def format_shares(self) -> dict[str, float]:
        """Returns the share of parameters in each format at the end, largest first; empty for a static run."""
        if not self.format_changes:
            return {}
        sizes = self.done.unit_parameters
        shares: dict[str, float] = {}
        for unit, name in self.format_changes[-1][1].items():
            shares[name] = shares.get(name, 0.0) + sizes.get(unit, 0) / max(1, sum(sizes.values()))
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def step_ratio(runs: Sequence[RunResult], arm: str, baseline: str, warmup: int) -> Spread:
    """Compares the step times of two arms, round by round and seed by seed.

    Args:
        runs: Results of one task.
        arm: The arm above the line of the ratio.
        baseline: The arm below it.
        warmup: First steps that do not count.

    Returns:
        Median and quartiles of the ratios of both arms' median step times in a round; above 1 means slower. NaN where
        fewer than ``ENOUGH_ROUNDS`` rounds count.
    """
    ratios = (_round_ratios(run, other, warmup) for run, other in pairs_of(runs, arm, baseline))
    return Spread.of([ratio for of_pair in ratios for ratio in of_pair])


def pairs_of(runs: Sequence[RunResult], arm: str, baseline: str) -> list[tuple[RunResult, RunResult]]:
    """Returns each run of the arm with the baseline's run of the same seed, where there is one."""
    others = {run.seed: run for run in runs if run.arm == baseline}
    return [(run, others[run.seed]) for run in runs if run.arm == arm and run.seed in others]


def whole_ratio(pairs: Sequence[tuple[RunResult, RunResult]], warmup: int) -> float:
    """Compares the time of all steps, from the first to the last.

    Args:
        pairs: Runs with the runs that they are compared with.
        warmup: First steps that do not count for the other ratio; they do for this one, and only say whether there are
            enough rounds.

    Returns:
        Seconds in steps of the first runs by those of the second, above 1 means slower. NaN where fewer than
        ``ENOUGH_ROUNDS`` rounds lie after the warm-up.
    """
    if not pairs or min(run.counted_rounds(warmup) for pair in pairs for run in pair) < ENOUGH_ROUNDS:
        return math.nan
    return sum(run.seconds for run, _ in pairs) / sum(other.seconds for _, other in pairs)


def run_ratio(run: RunResult, other: RunResult, warmup: int) -> Spread:
    """Compares the step times of two runs round by round; above 1 means that ``run`` is slower than ``other``."""
    return Spread.of(_round_ratios(run, other, warmup))


def _round_ratios(run: RunResult, other: RunResult, warmup: int) -> list[float]:
    if run.counted_rounds(warmup) < ENOUGH_ROUNDS:
        return []
    pairs = zip(run.round_medians(warmup), other.round_medians(warmup), strict=True)
    return [above / below for above, below in pairs if above is not None and below is not None]


def final_losses(runs: Sequence[RunResult], arm: str) -> dict[int, float]:
    """Returns the held-out loss at the end by seed."""
    return {run.seed: run.final_loss for run in runs if run.arm == arm}


@dataclass(frozen=True)
class LossDifference:
    """How far the steered runs end from the best static arm.

    Args:
        best_static: The static arm with the lowest mean loss over the seeds that the steered arm has too.
        steered: Mean loss of the steered arm.
        static: Mean loss of the best static arm.
        spread: What another seed changes in a static arm: its largest loss less its smallest.
    """

    best_static: str
    steered: float
    static: float
    spread: float

    @property
    def value(self) -> float:
        """Steered less best static; negative is better."""
        return self.steered - self.static


def loss_difference(runs: Sequence[RunResult], steered: str, baseline: str) -> LossDifference:
    """Compares held-out losses at the end, seed by seed.

    Args:
        runs: Results of one task.
        steered: Name of the arm under test.
        baseline: The static arm whose seeds give the spread.
    """
    ours = final_losses(runs, steered)
    means: dict[str, float] = {}
    for arm in dict.fromkeys(run.arm for run in runs if run.arm != steered):
        losses = final_losses(runs, arm)
        means[arm] = statistics.fmean(losses[seed] for seed in ours)
    best = min(means, key=lambda arm: (math.isnan(means[arm]), means[arm]))
    seeds = final_losses(runs, baseline).values()
    return LossDifference(best, statistics.fmean(ours.values()), means[best], max(seeds) - min(seeds))


def time_verdict(ratio: Spread, repeat: Spread) -> str:
    """Returns ``faster``, ``slower``, ``no difference`` or ``too few rounds``.

    Args:
        ratio: Step time of the arm under test against the baseline.
        repeat: The same of two runs of the baseline. A ratio counts only if it is further from 1 than this one and
            than 5 %, and if its quartiles do not hold 1.
    """
    if min(ratio.count, repeat.count) < ENOUGH_ROUNDS:
        return "too few rounds"
    noise = max(abs(math.log(repeat.median)), math.log1p(SAME_TIME))
    if ratio.low <= 1 <= ratio.high or abs(math.log(ratio.median)) <= noise:
        return "no difference"
    return "faster" if ratio.median < 1 else "slower"


def loss_verdict(difference: LossDifference) -> str:
    """Returns ``better``, ``worse`` or ``no difference``: the last where another seed changes as much."""
    if not math.isfinite(difference.value):
        return "not finite"
    if abs(difference.value) <= difference.spread:
        return "no difference"
    return "better" if difference.value < 0 else "worse"
