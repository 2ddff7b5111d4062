"""From scores to what a policy is worth: a document that JSON can hold, from which tables, picture and card are made.

Intervals are ``[mean, low, high]``; ``None`` stands for a number that there is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.encoding import VERSION
from autoprec.envs.proxies import Task
from autoprec.paired import Interval
from autoprec.policies.evaluate import Played
from autoprec.policies.raising import Raises
from autoprec.policies.statistics import compare, interquartile_mean, mean
from autoprec.policies.task_groups import LEARNED, groups

Array = NDArray[Any]
Document = dict[str, Any]

POLICY = "policy"
LADDER = ("fp32", "fp32_clip", "table", "table_schedule", "table_learnt", POLICY)
"""From the unit of measure to the policy; each adds one thing to the one before."""
WITH_SCHEDULE = ("table_schedule", "table_learnt", "table_schedule_tuned")
"""Tables with a schedule. A policy is measured against the strongest of them."""
SUMMARY = (
    ("fp32_clip", "fp32_clip"),
    ("bf16_clip", "bf16_clip"),
    ("gradscaler_clip", "gradscaler_clip"),
    ("rule", "rule"),
)
"""Names in the last line, and the rivals that they stand for."""


def bank_results(tasks: Sequence[Task], played: Sequence[Played]) -> Document:
    """Returns what the results on one bank show.

    Args:
        tasks: The tasks, in the order of the scores.
        played: All results on them.
    """
    by_name: dict[str, list[Played]] = {}
    for result in played:
        if result.rival.guard:
            by_name.setdefault(result.rival.name, []).append(result)
    scores = {name: np.stack([one.scores.score for one in found]) for name, found in by_name.items()}
    grouped = groups(tasks)
    own = scores.get(POLICY)
    rivals = {name: found for name, found in scores.items() if name != POLICY}
    differences = {} if own is None else {name: _against(own, found[0], grouped) for name, found in rivals.items()}
    return {
        "tasks": len(tasks),
        "seeds": 0 if own is None else len(own),
        "groups": {kind: {name: int(mask.sum()) for name, mask in found.items()} for kind, found in grouped.items()},
        "ways": {name: _way(found, scores[name], grouped) for name, found in by_name.items()},
        "differences": differences,
        "ladder": _ladder(scores),
        "raises": _raises(played),
    }


def summary_line(results: Mapping[str, Any]) -> str:
    """Returns the last line of an evaluation.

    Args:
        results: Of :func:`bank_results`.
    """
    differences = results["differences"]

    def difference(name: str) -> str:
        found = differences.get(name)
        return _text(None if found is None else found["all"]["difference"][0])

    strongest, learned = strongest_table(results), strongest_table(results, LEARNED)
    against = differences.get(strongest, {}).get("all", {}).get("difference", [None] * 3)
    where = differences.get(learned, {}).get("by", {}).get("learned regimes", {}).get(LEARNED, {})
    rate = (results["raises"].get("guard") or {}).get("rate")
    parts = [
        f"policy: tasks={results['tasks']} seeds={results['seeds']}",
        *(f"vs_{name}={difference(rival)}" for name, rival in SUMMARY),
        f"vs_table_schedule={_text(against[0])} vs_table_schedule_low={_text(against[1])}",
        f"learned_regimes_low={_text(where.get('difference', [None] * 3)[1])}",
        f"raise_2={'nan' if rate is None else f'{rate:.2f}'}",
    ]
    return " ".join(parts)


def strongest_table(results: Mapping[str, Any], group: str | None = None) -> str:
    """Returns the name of the table with a schedule that a policy gains least on; empty without one.

    Args:
        results: Of :func:`bank_results`.
        group: A group of learned regimes; all tasks by default.
    """
    gains = {}
    for name in WITH_SCHEDULE:
        found = results["differences"].get(name)
        cell = found and (found["all"] if group is None else found["by"]["learned regimes"].get(group))
        if cell:
            gains[name] = cell["difference"][0]
    return min(gains, key=lambda name: gains[name]) if gains else ""


def encoding_version() -> int:
    """Returns the version of observations that results belong to."""
    return VERSION


def _way(found: Sequence[Played], scores: Array, grouped: Mapping[str, Mapping[str, Array]]) -> Document:
    columns = {name: np.stack([getattr(one.scores, name) for one in found]) for name in found[0].scores._fields}
    return {
        "description": found[0].rival.description,
        "seeds": len(found),
        "score": _interval(mean(scores)),
        "by_seed": [float(value) for value in scores.mean(axis=1)],
        "iqm": _interval(interquartile_mean(scores)),
        "diverged": float(columns["diverged"].mean()),
        "skipped": float(columns["skipped"].sum() / max(columns["steps"].sum(), 1.0)),
        "steps": float(columns["steps"].mean()),
        "level": float(columns["level"].mean()),
        "by": {
            kind: {name: float(scores[:, mask].mean()) for name, mask in masks.items()}
            for kind, masks in grouped.items()
        },
    }


def _against(own: Array, rival: Array, grouped: Mapping[str, Mapping[str, Array]]) -> Document:
    whole = compare(own, rival)
    return {
        "all": {**_difference(own, rival), "improvement": _interval(whole.improvement)},
        "by": {
            kind: {name: _difference(own[:, mask], rival[mask]) for name, mask in masks.items()}
            for kind, masks in grouped.items()
        },
    }


def _difference(own: Array, rival: Array) -> Document:
    return {
        "difference": _interval(mean(own - rival)),
        "win_rate": float((own > rival).mean()),
        "tasks": len(rival),
    }


def _ladder(scores: Mapping[str, Array]) -> list[Document]:
    """How much each step from fp32 to the policy adds, on the same tasks."""
    steps, before = list[Document](), None
    for name in LADDER:
        if name not in scores:
            continue
        now = scores[name]
        gain = None if before is None else _interval(mean(now - before))
        steps.append({"name": name, "score": float(now.mean()), "gain": gain})
        before = now.mean(axis=0)
    return steps


def _raises(played: Sequence[Played]) -> Document:
    found: Document = {}
    for key, guard in (("guard", True), ("alone", False)):
        counts = [one.raises for one in played if one.raises is not None and one.rival.guard == guard]
        if counts:
            total = Raises.total(counts)
            lift = total.rate / total.base if total.base else math.nan
            offenders = sum(total.offenders)
            rates = {"rate": total.rate, "base": total.base, "lift": lift}
            found[key] = {"offenders": offenders, **{name: _number(value) for name, value in rates.items()}}
    return found


def _interval(found: Interval) -> list[float | None]:
    return [_number(value) for value in found]


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


def _text(value: float | None) -> str:
    return "nan" if value is None else f"{value:+.3f}"
