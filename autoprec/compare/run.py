"""A comparison from its settings to its records: which runs are missing, in which order they are made."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from autoprec.compare.arms import AUTOPREC, FP32, Arm
from autoprec.compare.checks import consistency_row, notes_of, with_fidelity
from autoprec.compare.gate import TRAIN_LOSS
from autoprec.compare.groups import NOT_RUNNABLE, extra_of, run_group
from autoprec.compare.progress import show_progress
from autoprec.compare.records import Comparison, Run
from autoprec.compare.settings import CompareSettings, mode_of
from autoprec.compare.store import Store, StoreError
from autoprec.compare.turns import Plan

CONSISTENCY_SUFFIX = "@avx2"
QUICK_NOTE = "quick: runs are far too short to say anything about speed or loss"
_WARMUP_STEPS = 10


@dataclass(frozen=True)
class Result:
    """What a comparison gave.

    Args:
        comparison: The runs of arms that could run, with their settings.
        metric: What is compared at the end.
        mode: Whether lower or higher is better.
        refused: Why an arm could not run, by its name.
        notes: What a reader of the results should know.
        consistency: The same seed under two instruction sets, ``None`` where that was not asked for.
    """

    comparison: Comparison
    metric: str
    mode: str
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    consistency: dict[str, Any] | None = None


class NothingRanError(RuntimeError):
    """No arm could run; the message has the reason of each."""


def compare(settings: CompareSettings, console: Console, fresh: bool = False) -> Result:
    """Makes the runs that are missing and returns all.

    Args:
        settings: What is compared.
        console: Where progress is shown.
        fresh: Forget stored runs.

    Raises:
        StoreError: If the folder holds another comparison.
        TargetError: If the target cannot be trained at all.
        NothingRanError: If no arm could run.
        KeyboardInterrupt: If the user stops it; finished runs are stored.
    """
    store = Store(settings.out, settings.identity(), fresh)
    try:
        return _compare(settings, store, console)
    except BaseException:
        store.release()
        raise


def _compare(settings: CompareSettings, store: Store, console: Console) -> Result:
    store.check_sources()
    for path in store.damaged:
        console.print(f"`{path}` is damaged; the run is made again.", markup=False)
    groups = list(_missing(settings, store))
    planned = store.plan.get("steps", settings.steps)
    if store.runs and groups:
        console.print(
            f"{len(store.runs)} runs are stored in `{settings.out}`; only what is missing is run.", markup=False
        )
    runs = sum(len(arms) for _, arms, _ in groups)
    ends = time.monotonic() + 60.0 * settings.minutes
    with show_progress(console, runs, planned) as screen:
        for index, (seed, arms, suffix) in enumerate(groups):
            arms = tuple(arm for arm in arms if not _was_refused(store, arm))
            if not arms:
                continue
            plan = _plan(settings, store, ends, len(groups) - index)
            steps, turn = run_group(settings, store, arms, seed, plan, screen, suffix)
            if steps and not store.plan:
                store.plan = {"steps": steps, "turn": turn}
    return collect(settings, store)


def _missing(settings: CompareSettings, store: Store) -> Iterator[tuple[int, tuple[Arm, ...], str]]:
    for seed in range(settings.seeds):
        arms = [arm for arm in settings.arms if (arm.name, seed) not in store.runs]
        size = settings.together or len(arms) or 1
        for start in range(0, len(arms), size):
            yield seed, tuple(arms[start : start + size]), ""
    repeated = consistency_arm(settings)
    if repeated is not None and (repeated.name + CONSISTENCY_SUFFIX, 0) not in store.runs:
        yield 0, (repeated,), CONSISTENCY_SUFFIX


def consistency_arm(settings: CompareSettings) -> Arm | None:
    """Returns the arm that runs once more with other instructions: the first of autoprec's, else the first of all."""
    if not settings.consistency:
        return None
    return next((arm for arm in settings.arms if arm.is_steered), settings.arms[0])


def _was_refused(store: Store, arm: Arm) -> bool:
    return any(_is_refused(stored.run) for (name, _), stored in store.runs.items() if name == arm.name)


def _plan(settings: CompareSettings, store: Store, ends: float, left: int) -> Plan:
    plan = store.plan
    if plan:  # all seeds take as many steps as the first one
        return Plan(plan["steps"], plan["turn"], math.inf)
    now = time.monotonic()
    return Plan(settings.steps, None, now + max(0.0, ends - now) / left)


def finished(settings: CompareSettings) -> Result | None:
    """Returns what the folder of an interrupted comparison holds, ``None`` where no run has ended.

    Args:
        settings: What was compared.
    """
    try:
        store = Store(settings.out, settings.identity())
    except StoreError:
        return None
    try:
        return collect(settings, store)
    except (NothingRanError, MetricError):
        store.release()
        return None


def collect(settings: CompareSettings, store: Store) -> Result:
    """Returns what is stored, ready to be judged.

    Args:
        settings: What is compared.
        store: Where the runs are.

    Raises:
        NothingRanError: If no arm could run.
    """
    names = [arm.name for arm in settings.arms]
    asked = [(name, seed) for seed in range(settings.seeds) for name in names]
    repeated = consistency_arm(settings)
    asked += [] if repeated is None else [(repeated.name + CONSISTENCY_SUFFIX, 0)]
    found = [store.runs[key].run for key in asked if key in store.runs]
    refused = {run.arm: str(run.error).removeprefix(NOT_RUNNABLE) for run in found if _is_refused(run)}
    kept = [run for run in found if run.arm not in refused]
    if not kept:
        reasons = "".join(f"\n  {arm}: {why}" for arm, why in refused.items())
        raise NothingRanError(
            f"No arm of `{settings.target.text}` ran.{reasons}\nWhat runs printed is in `{store.folder / 'logs'}`."
        )
    metric = settings.metric or default_metric(kept)
    _check_metric(metric, kept)
    kept = [with_fidelity(store, replace(run, final_metric=_final(run, metric)), FP32) for run in kept]
    mode = settings.mode or mode_of(metric)
    row = None if repeated is None else consistency_row(store, repeated.name, 0, CONSISTENCY_SUFFIX)
    return Result(
        Comparison(task=settings.target.name, runs=tuple(kept), settings=_words(settings, store, kept, metric)),
        metric,
        mode,
        refused,
        notes_of(store, kept) + [QUICK_NOTE] * settings.is_quick,
        row,
    )


def _is_refused(run: Run) -> bool:
    return run.error is not None and run.error.startswith(NOT_RUNNABLE)


def default_metric(runs: Sequence[Run]) -> str:
    """Returns ``val_loss``, else the first metric of a validation with a loss in its name, else the training loss.

    Args:
        runs: The runs.
    """
    names = dict.fromkeys(name for run in runs for found in run.evaluations[-1:] for name in found.metrics)
    validated = [name for name in names if name != TRAIN_LOSS and ("val" in name.lower() or "eval" in name.lower())]
    if "val_loss" in validated:
        return "val_loss"
    return next((name for name in validated if "loss" in name.lower()), TRAIN_LOSS)


class MetricError(ValueError):
    """The metric that was asked for was not logged."""


def _check_metric(metric: str, runs: Sequence[Run]) -> None:
    names = sorted({name for run in runs for found in run.evaluations for name in found.metrics})
    if names and metric not in names:
        raise MetricError(
            f"Passed `--metric {metric}`. The runs logged {', '.join(names)}. Log it in `validation_step`, or choose"
            " one of these; stored runs are kept."
        )


def _final(run: Run, metric: str) -> float | None:
    return run.evaluations[-1].metrics.get(metric) if run.evaluations else None


def _words(settings: CompareSettings, store: Store, runs: Sequence[Run], metric: str) -> dict[str, Any]:
    shortest = min((len(run.steps) for run in runs if run.steps), default=0)
    changes = [extra_of(store, run.arm, run.seed).get("first_change") for run in runs if run.arm.startswith(AUTOPREC)]
    # before its first decision autoprec trains as fp32 does, which is no step time of what it decides
    warmup = max([_WARMUP_STEPS, *(change + 1 for change in changes if change is not None)])
    words = {
        **settings.identity(),
        "what": settings.target.text,
        "arms": [arm.name for arm in settings.arms],
        "seeds": settings.seeds,
        "steps_taken": store.plan.get("steps"),
        "turn_steps": store.plan.get("turn", 1),
        "warmup_steps": warmup if warmup <= shortest // 2 else min(_WARMUP_STEPS, shortest // 4),
        "metric": metric,
        "minutes": settings.minutes,
    }
    flops = (extra_of(store, run.arm, run.seed).get("flops_per_step") for run in runs)
    words["flops_per_step"] = next((count for count in flops if count), None)
    # what the judge calls target is a value, not what is trained
    words.pop("target")
    return words | ({} if settings.target_loss is None else {"target": settings.target_loss})
