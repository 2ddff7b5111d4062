"""From runs of the transfer study to scores, and from scores to differences with intervals over tasks and seeds.

A score is what the proxies' is: the fall of the held-out log loss within the budget, in units of the fp32 twin's with
the same data and seed. What was reached when the budget was spent lies between two points of a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.reward import LEAST_PROGRESS, SCORE_RANGE, score
from autoprec.formats import FORMATS
from autoprec.paired import Interval, stretch
from benchmarks.transfer_arms import ARMS

Run = Mapping[str, Any]
Scores = NDArray[np.floating[Any]]
RESAMPLES = 10_000
NEARLY = 0.99
"""Share of a budget from which it counts as spent."""
_LOSS, _ACCURACY, _SPENT = 1, 2, 3


class Reached(NamedTuple):
    """What a run made of a budget.

    Attributes:
        score: 1 is the fp32 twin; a run that diverged has -2.
        loss: Held-out loss when the budget was spent, ``None`` where it was not finite.
        accuracy: Held-out accuracy at the last evaluation before.
        is_short: Whether the run ended before the budget was spent, so that the score is less than it would be.
    """

    score: float
    loss: float | None
    accuracy: float
    is_short: bool


def reached(run: Run, twin: Run, charge: str) -> Reached:
    """Returns what a run made of its twin's budget.

    Args:
        run: What ``transfer_runs.run`` returned.
        twin: The same of the twin.
        charge: What its time is charged by.

    Raises:
        ValueError: If the twin learnt too little to be a unit of measure.
    """
    first, last = twin["points"][0][_LOSS], twin["points"][-1][_LOSS]
    progress = math.log(first / last)
    if not progress >= LEAST_PROGRESS:
        raise ValueError(
            f"The fp32 twin went from a loss of {first:.3g} to {last:.3g}. Its log loss must fall by {LEAST_PROGRESS}"
            " at least to be a unit of measure. Give the task more steps."
        )
    budget = _spent(twin, charge)[-1]
    spent, points = _spent(run, charge), run["points"]
    within = [point for point, time in zip(points, spent, strict=True) if time <= budget]
    loss = _loss_at(points, spent, budget)
    is_lost = run["diverged"] or loss is None
    made = SCORE_RANGE[0] if is_lost else float(score(np.float64(first), np.float64(loss), np.float64(progress)))
    return Reached(made, loss, within[-1][_ACCURACY], spent[-1] < NEARLY * budget and not run["diverged"])


def _spent(run: Run, charge: str) -> list[float]:
    column = _SPENT + run["charges"].index(charge)
    return [point[column] for point in run["points"]]


def _loss_at(points: Sequence[Sequence[Any]], spent: Sequence[float], budget: float) -> float | None:
    """Interpolates the log loss in the time that was charged; a run that ended before keeps its last loss."""
    after = next((index for index, time in enumerate(spent) if time >= budget), len(spent) - 1)
    ends = [points[index][_LOSS] for index in (max(after - 1, 0), after)]
    if None in ends:
        return None
    logs = np.log(ends)
    share = np.interp(budget, [spent[max(after - 1, 0)], spent[after]], [0.0, 1.0])
    return float(np.exp(logs[0] + share * (logs[1] - logs[0])))


def summarise(runs: Sequence[Run], twins: Sequence[Run], charge: str) -> dict[str, Any]:
    """Returns what is kept of an arm on a task under a charge, for JSON.

    Args:
        runs: One for each seed.
        twins: The twins of the same seeds.
        charge: What time is charged by.
    """
    found = [reached(run, twin, charge) for run, twin in zip(runs, twins, strict=True)]
    batches = sum(run["batches"] for run in runs)
    return {
        "scores": [round(one.score, 5) for one in found],
        "losses": [None if one.loss is None else round(one.loss, 5) for one in found],
        "accuracies": [one.accuracy for one in found],
        "short": sum(one.is_short for one in found),
        "diverged": sum(bool(run["diverged"]) for run in runs),
        "failed": next((run["error"] for run in runs if run["error"] is not None and not run["diverged"]), None),
        "skipped": sum(run["skipped"] for run in runs),
        "rollbacks": sum(run["rollbacks"] for run in runs),
        "batches": batches,
        "steps": statistics.median(_steps_within(run, twin, charge) for run, twin in zip(runs, twins, strict=True)),
        "last_batch_size": [run["batch_sizes"][-1][1] if run["batch_sizes"] else None for run in runs],
        "mean_bits": round(statistics.fmean(run["mean_bits"] for run in runs), 2),
        "formats": _at_the_end(runs),
        "emulated": sorted({name for run in runs for name in run["emulated"]}),
    }


def _steps_within(run: Run, twin: Run, charge: str) -> int:
    budget = _spent(twin, charge)[-1]
    return max(int(point[0]) for point, time in zip(run["points"], _spent(run, charge), strict=True) if time <= budget)


def _at_the_end(runs: Sequence[Run]) -> dict[str, float]:
    """Share of the multiplications in each format at the end, over all runs."""
    totals = dict.fromkeys(FORMATS, 0.0)
    for run in runs:
        last: dict[str, str] = {}
        for _, changed in run["maps"]:
            last.update(changed)
        for unit, share in run["shares"].items():
            if unit in last:
                totals[last[unit]] += share / len(runs)
    return {name: round(total, 3) for name, total in totals.items() if total}


# ---- comparisons ----


def difference(values: Scores) -> Interval:
    """Returns the mean of paired differences with its 95% interval over tasks and seeds.

    Tasks are drawn with replacement, and within each of them seeds. The percentiles are stretched for few tasks (seeds,
    where there is one task) as those of :func:`autoprec.paired.bootstrap_mean` are.

    Args:
        values: ``[tasks, seeds]``.
    """
    tasks, seeds = values.shape
    count = tasks if tasks > 1 else seeds
    mean = float(values.mean())
    if count < 2:
        return Interval(mean, mean, mean)
    generator = np.random.default_rng(0)
    drawn = generator.integers(tasks, size=(RESAMPLES, tasks, 1))
    within = generator.integers(seeds, size=(RESAMPLES, tasks, seeds))
    low, high = np.percentile(values[drawn, within].mean(axis=(1, 2)), [2.5, 97.5])
    factor = stretch(count, 0.95)
    return Interval(mean, mean - factor * (mean - float(low)), mean + factor * (float(high) - mean))


def verdict(found: Interval) -> str:
    """Returns ``better``, ``worse``, or ``tie`` where the interval holds zero."""
    if found.low > 0.0:
        return "better"
    return "worse" if found.high < 0.0 else "tie"


Rival = Callable[[Mapping[str, Any], str], str | None]
"""Names the arm to compare with on a task, from its arms and the charge; ``None`` where there is none."""


def named(arm: str) -> Rival:
    """Returns the rival that is one arm, wherever it did not fail.

    Args:
        arm: Its name.
    """

    def choose(arms: Mapping[str, Any], charge: str) -> str | None:
        found = arms.get(arm, {}).get(charge)
        return None if found is None or found["failed"] is not None else arm

    return choose


def best_static(arms: Mapping[str, Any], charge: str) -> str | None:
    """Names the static arm with the best mean score on a task, which nobody knows beforehand.

    Args:
        arms: What was found for each arm, by charge.
        charge: The charge.
    """
    static = [arm.name for arm in ARMS if arm.is_static and named(arm.name)(arms, charge) is not None]
    return max(static, key=lambda name: statistics.fmean(arms[name][charge]["scores"]), default=None)


def differences(tasks: Mapping[str, Any], subject: str, rival: Rival, charges: Sequence[str]) -> dict[str, list[float]]:
    """Returns the differences of scores by task, one for each seed, averaged over charges.

    Args:
        tasks: Tasks with their arms.
        subject: Name of the arm that the study is about.
        rival: Names the other one.
        charges: Charges to average over. Tasks where the rival fails under one of them are left out.
    """
    found = {}
    for name, task in tasks.items():
        others = [rival(task["arms"], charge) for charge in charges]
        if None in others or subject in others:
            continue
        pairs = [
            np.subtract(task["arms"][subject][charge]["scores"], task["arms"][str(other)][charge]["scores"])
            for charge, other in zip(charges, others, strict=True)
        ]
        found[name] = np.mean(pairs, axis=0).tolist()
    return found


def total(found: Mapping[str, Sequence[float]]) -> Interval | None:
    """Returns the mean difference over tasks with its interval, ``None`` without any task.

    Args:
        found: What :func:`differences` returned.
    """
    return difference(np.array(list(found.values()))) if found else None
