"""The figures of one arm: a row of the table, a document of the JSON."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.compare.evidence import Evidence, is_steered
from autoprec.compare.flops import tops_per_watt
from autoprec.compare.records import Run
from autoprec.compare.statistics import Estimate, censored_median, interquartile_mean, train_seconds

EQUIVALENT, UNKNOWN = "equivalent", "unknown"


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """What came out of one arm over its seeds.

    Args:
        arm: Its name.
        is_steered: Whether it trained with autoprec.
        seeds: Its seeds.
        problem: Why it cannot be chosen, ``None`` where it can.
        time_ratio: Step time over that of the best static arm; time of whole runs where these differ in steps.
        step_ms: Median of all steps. Not paired: to compare arms, take ``time_ratio``.
        seconds: Median over seeds of the time in steps.
        target_seconds: Median over seeds of the time to the target, ``None`` where half of them did not reach it.
        target_reached: Seeds that reached it.
        target_seeds: Seeds whose metric was recorded along the run; 0 means that nothing is known.
        metric: Mean of the metric at the end.
        metric_iqm: Mean of the middle half of its values.
        against: The arm that ``difference`` is from: the reference, or the same arm under other kernels.
        difference: Metric of the arm less that of ``against``.
        relation: What the difference shows: ``equivalent``, ``worse``, ``better`` or ``unknown``.
        peak_bytes: Most memory of a run.
        energy_j: Median over seeds of the joules of a run.
        energy_source: What counted or estimated them.
        tops_per_watt: Operations (10**12, of the model's definition) for each joule, where they were counted.
        fidelity: Means over seeds of what outputs differ in from those of the fp32 run of the seed.
        skipped_steps: Of all seeds together.
        formats: Units by format at the end.
        errors: Message of each failed run, by seed.
    """

    arm: str
    is_steered: bool
    seeds: tuple[int, ...]
    problem: str | None
    time_ratio: Estimate
    step_ms: float
    seconds: float
    target_seconds: float | None
    target_reached: int
    target_seeds: int
    metric: Estimate
    metric_iqm: float
    against: str | None
    difference: Estimate
    relation: str
    peak_bytes: int | None
    energy_j: float | None
    energy_source: str | None
    tops_per_watt: float | None
    fidelity: dict[str, float]
    skipped_steps: int
    formats: dict[str, int]
    errors: dict[int, str]


def figures_of(evidence: Evidence, arm: str) -> ArmFigures:
    """Returns the figures of an arm.

    Args:
        evidence: What the runs show.
        arm: Its name.
    """
    runs = evidence.of(arm)
    values = [value for value in map(evidence.final, runs) if value is not None]
    against = arm.partition("@")[0] if "@" in arm else evidence.reference
    nothing = Estimate(math.nan, None, None, 0)
    difference = nothing if against is None else evidence.difference(arm, against)
    to_target = evidence.seconds_to_target(arm)
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    step_ms = [step.step_ms for run in runs for step in run.steps]
    energy = [run.energy_j for run in runs if run.energy_j is not None]
    return ArmFigures(
        arm=arm,
        is_steered=is_steered(arm),
        seeds=tuple(run.seed for run in runs),
        problem=evidence.problems.get(arm),
        time_ratio=nothing if evidence.best_static is None else evidence.time_ratio(arm, evidence.best_static),
        step_ms=statistics.median(step_ms) if step_ms else math.nan,
        seconds=statistics.median(map(train_seconds, runs)),
        target_seconds=censored_median(list(to_target.values())),
        target_reached=sum(seconds is not None for seconds in to_target.values()),
        target_seeds=len(to_target),
        metric=Estimate.of_mean(values, evidence.confidence),
        metric_iqm=interquartile_mean(values),
        against=against,
        difference=difference,
        relation=_relation(evidence, arm, against, difference),
        peak_bytes=max(peaks, default=None),
        energy_j=statistics.median(energy) if energy else None,
        energy_source=next((run.energy_source for run in runs if run.energy_source), None),
        tops_per_watt=_tops_per_watt(runs, evidence.settings.get("flops_per_step")),
        fidelity=_means([run.fidelity for run in runs if run.fidelity]),
        skipped_steps=sum(run.skipped_steps for run in runs),
        formats=dict(Counter(name for run in runs[-1:] for name in run.formats.values()).most_common()),
        errors={run.seed: run.error for run in runs if run.error is not None},
    )


def _relation(evidence: Evidence, arm: str, against: str | None, difference: Estimate) -> str:
    if arm == against:
        return EQUIVALENT
    return UNKNOWN if arm in evidence.problems else evidence.relation(difference)


def _tops_per_watt(runs: Sequence[Run], flops_per_step: float | None) -> float | None:
    counted = [run for run in runs if run.energy_j]
    if not counted or not flops_per_step:
        return None
    return statistics.median(tops_per_watt(flops_per_step, len(run.steps), run.energy_j or math.nan) for run in counted)


def _means(measures: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for found in measures for name in found)
    return {name: statistics.fmean(found[name] for found in measures if name in found) for name in names}
