"""What the runs of a comparison show about pairs of arms; which arms may be chosen, and which is the best without it.

An arm is *steered* if its name begins with ``autoprec``, else *static*. An arm named ``<arm>@<instruction set>`` is the
same training under other kernels; it is held against ``<arm>`` and never chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from functools import cached_property

from autoprec.compare.records import Comparison, Run
from autoprec.compare.statistics import (
    Estimate,
    Rounds,
    final_value,
    is_diverged,
    pairs_of,
    relation,
    seconds_to_target,
    step_ratio,
    whole_ratio,
)

FULL_PRECISION = "32-true"
_STEERED = "autoprec"
_DIVERGED = "diverged"
"""What the error of a run begins with whose losses ended in numbers that are not finite."""


class Evidence:
    """Everything that follows from the runs before anything is decided.

    Args:
        comparison: The runs.
        metric: What is compared at the end of the runs.
        mode: ``min`` where lower is better, ``max`` where higher is.
        margin: Largest difference of the metric that counts as none.
        baseline: The arm that the metric is held against; by default ``32-true``, without it the best static arm.
        confidence: Level of the intervals.

    Attributes:
        problems: Why an arm cannot be chosen: some of its runs failed or diverged.
    """

    def __init__(
        self, comparison: Comparison, metric: str, mode: str, margin: float, baseline: str | None, confidence: float
    ) -> None:
        self.runs = comparison.runs
        self.settings = comparison.settings
        self.metric, self.mode, self.margin, self.confidence = metric, mode, margin, confidence
        self.arms = tuple(dict.fromkeys(run.arm for run in self.runs))
        if baseline is not None and baseline not in self.arms:
            raise ValueError(
                f"Passed `baseline={baseline!r}`. It must be one of the arms that ran: {', '.join(sorted(self.arms))}."
            )
        self._baseline = baseline or FULL_PRECISION
        self._rounds = Rounds.of(self.settings, self.runs)
        found = {arm: self._problem(arm) for arm in self.arms}
        self.problems = {arm: problem for arm, problem in found.items() if problem is not None}

    # ---- arms ----

    def of(self, arm: str) -> list[Run]:
        """Returns the runs of an arm.

        Args:
            arm: Its name.
        """
        return [run for run in self.runs if run.arm == arm]

    @cached_property
    def static(self) -> tuple[str, ...]:
        """Static arms that may be chosen as far as their runs go."""
        return tuple(arm for arm in self.arms if self._is_whole(arm) and not is_steered(arm))

    @cached_property
    def steered(self) -> tuple[str, ...]:
        """Steered arms that may be chosen as far as their runs go."""
        return tuple(arm for arm in self.arms if self._is_whole(arm) and is_steered(arm))

    def is_within_margin(self, arm: str) -> bool:
        """Whether the mean of an arm's metric is not worse than the reference's by more than the margin.

        An arm whose metric is not known passes: nothing speaks against it, and the verdict says that it is not known.

        Args:
            arm: Its name.
        """
        return self.reference is None or not self.worse_by(arm, self.reference) > self.margin

    @cached_property
    def reference(self) -> str | None:
        """The arm that the margin is counted from."""
        if self._baseline in self.static:
            return self._baseline
        means = {arm: self._signed_mean(arm) for arm in self.static}
        return min(means, key=lambda arm: (math.isnan(means[arm]), means[arm]), default=None)

    @cached_property
    def best_static(self) -> str | None:
        """The fastest static arm that is within the margin; ``None`` where no static arm is usable."""
        return self._fastest(filter(self.is_within_margin, self.static), self.reference)

    @cached_property
    def candidate(self) -> str | None:
        """The fastest steered arm, those within the margin first; ``None`` where no steered arm is usable."""
        inside = [arm for arm in self.steered if self.is_within_margin(arm)]
        return self._fastest(inside or self.steered, self.best_static)

    # ---- pairs of arms ----

    @cached_property
    def is_whole_run(self) -> bool:
        """Whether whole runs are compared, because runs of a seed have different numbers of steps."""
        usable = [run for run in self.runs if self._is_whole(run.arm)]
        return any(len(run.steps) != len(other.steps) for run in usable for other in usable if run.seed == other.seed)

    def time_ratio(self, arm: str, other: str, confidence: float | None = None) -> Estimate:
        """Returns the time of an arm over that of another: of a step, or of whole runs.

        Args:
            arm: The arm above the line.
            other: The arm below it.
            confidence: Level of the interval, by default that of all intervals.
        """
        level = confidence or self.confidence
        if self.is_whole_run:
            return whole_ratio(self.runs, arm, other, level)
        return step_ratio(self.runs, arm, other, self._rounds, level)

    def difference(self, arm: str, other: str, confidence: float | None = None) -> Estimate:
        """Returns the metric of an arm less that of another at the end, over the seeds that both have.

        Seeds with the same losses throughout count as one: the training sets its own seed, and to repeat it says
        nothing about chance.

        Args:
            arm: The first arm.
            other: The second.
            confidence: Level of the interval, by default that of all intervals.
        """
        pairs = pairs_of(self.runs, arm, other)
        distinct = {(_losses(run), _losses(partner)): (run, partner) for run, partner in pairs}
        values = ((self.final(run), self.final(partner)) for run, partner in distinct.values())
        differences = [first - second for first, second in values if first is not None and second is not None]
        return Estimate.of_mean(differences, confidence or self.confidence)

    def worse_by(self, arm: str, other: str) -> float:
        """Returns by how much the mean of an arm's metric is worse than another's; NaN where it is not known.

        Args:
            arm: The first arm.
            other: The second.
        """
        return self._sign * self.difference(arm, other).value

    def relation(self, difference: Estimate) -> str:
        """Says what a difference of the metric shows.

        Args:
            difference: As :meth:`difference` returns it.
        """
        return relation(difference, self.margin, self.mode)

    def final(self, run: Run) -> float | None:
        """Returns the metric at the end of a run.

        Args:
            run: One of the runs.
        """
        return final_value(run, self.metric, self.settings.get("metric"))

    # ---- time to a target ----

    @cached_property
    def targets(self) -> dict[int, float]:
        """For each seed the metric to reach: of the settings (``target``), else the reference's at its end.

        Seeds end where they do, so a target for all of them would be out of reach of some; the margin is given in.
        """
        asked = self.settings.get("target")
        if asked is not None:
            return {run.seed: float(asked) for run in self.runs}
        ends = {run.seed: self.final(run) for run in self.of(self.reference or "")}
        return {seed: end + self._sign * self.margin for seed, end in ends.items() if end is not None}

    @property
    def target_text(self) -> str:
        """The target in words."""
        asked = self.settings.get("target")
        return f"{self.reference}'s at its end, less the margin" if asked is None else f"{float(asked):g}"

    def seconds_to_target(self, arm: str) -> dict[int, float | None]:
        """Returns for each seed when an arm reached the target, ``None`` where it did not.

        Args:
            arm: Its name.

        Returns:
            Nothing where there is no target, or where the metric was not recorded along the runs.
        """
        evaluated = [run for run in self.of(arm) if any(self.metric in found.metrics for found in run.evaluations)]
        return {
            run.seed: seconds_to_target(run, self.metric, self.mode, self.targets[run.seed])
            for run in evaluated
            if run.seed in self.targets
        }

    def target_ratio(self, arm: str, other: str, confidence: float | None = None) -> Estimate:
        """Returns the ratio of the times to the target; NaN where a run of either did not reach it.

        Args:
            arm: The arm above the line.
            other: The arm below it.
            confidence: Level of the interval, by default that of all intervals.
        """
        above, below = self.seconds_to_target(arm), self.seconds_to_target(other)
        times = [(above[seed], below[seed]) for seed in above if seed in below]
        ratios = [first / second for first, second in times if first and second]
        whole = ratios if len(ratios) == len(times) else []
        return Estimate.of_ratio(whole, confidence or self.confidence)

    # ---- private ----

    @property
    def _sign(self) -> float:
        return 1.0 if self.mode == "min" else -1.0

    def _is_whole(self, arm: str) -> bool:
        return arm not in self.problems and "@" not in arm

    def _problem(self, arm: str) -> str | None:
        runs = self.of(arm)
        failed = [run for run in runs if run.error is not None and not run.error.startswith(_DIVERGED)]
        if failed:
            first = str(failed[0].error).strip().splitlines()
            return f"failed with {_share(failed, runs)} ({first[-1] if first else 'no message'})"
        diverged = [run for run in runs if run.error is not None or is_diverged(run, self.final(run))]
        return f"{_DIVERGED} with {_share(diverged, runs)}" if diverged else None

    def _signed_mean(self, arm: str) -> float:
        values = [value for value in map(self.final, self.of(arm)) if value is not None]
        return self._sign * statistics.fmean(values) if values else math.nan

    def _fastest(self, arms: Iterable[str], base: str | None) -> str | None:
        if base is None:
            return next(iter(arms), None)
        ratios = {arm: 1.0 if arm == base else self.time_ratio(arm, base).value for arm in arms}
        return min(ratios, key=lambda arm: (math.isnan(ratios[arm]), ratios[arm]), default=None)


def is_steered(arm: str) -> bool:
    """Whether an arm trains with autoprec.

    Args:
        arm: Its name.
    """
    return arm.startswith(_STEERED)


def _losses(run: Run) -> object:
    """What tells a run from another of the same arm; its seed where it recorded no losses."""
    losses = tuple(step.loss for step in run.steps if step.loss is not None)
    return losses or run.seed


def _share(some: list[Run], runs: list[Run]) -> str:
    return f"{len(some)} of {len(runs)} seeds"
