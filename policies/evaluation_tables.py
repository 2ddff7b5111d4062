"""Tables of an evaluation in Markdown, for the terminal, for files and for a policy's card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoprec.policies.evaluation_results import POLICY, strongest_table

Results = Mapping[str, Any]

_GROUP_COLUMNS = ("fp32_clip", "bf16_clip", "rule", "table")
_STEPS = {
    "fp32": "fp32, no clip",
    "fp32_clip": "+ clip",
    "table": "+ formats and loss scale of the table",
    "table_schedule": "+ batch schedule",
    "table_learnt": "+ costs learnt from step times",
    POLICY: "+ policy",
}


def markdown(results: Results) -> str:
    """Returns all tables of a bank.

    Args:
        results: Of ``evaluation_results.bank_results``.
    """
    parts = [
        ("Scores", score_table(results)),
        ("Policy less rival, on the same tasks", difference_table(results)),
        ("Policy less rival, by group of tasks", group_table(results)),
        ("What each step adds", ladder_table(results)),
        ("Units raised within two decisions of their own overflow", raise_table(results)),
    ]
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts if text)


def short(results: Results) -> str:
    """Returns the most important columns, for a terminal of 80 columns.

    Args:
        results: Of ``evaluation_results.bank_results``.
    """
    rows = []
    for name, way in results["ways"].items():
        found = results["differences"].get(name)
        difference = None if found is None else found["all"]["difference"]
        rows.append(
            [
                way["description"],
                f"{way['score'][0]:.3f}",
                "" if difference is None else interval(difference),
                "" if difference is None else verdict(difference),
            ]
        )
    parts = [_plain_table(["way", "score", "policy less it, 95%", "policy is"], rows)]
    steps = [
        [_STEPS[step["name"]], f"{step['score']:.3f}", "" if step["gain"] is None else interval(step["gain"])]
        for step in results["ladder"]
    ]
    parts.append(_plain_table(["what each step adds", "score", "gain, 95%"], steps))
    return "\n\n".join(part for part in parts if part)


def score_table(results: Results) -> str:
    """Returns a row for each way to set the knobs.

    Args:
        results: Of ``evaluation_results.bank_results``.
    """
    rows = [
        [
            way["description"] + (f" ({way['seeds']} seeds)" if way["seeds"] > 1 else ""),
            interval(way["score"], sign=False),
            interval(way["iqm"], sign=False),
            f"{way['diverged']:.1%}",
            f"{way['skipped']:.1%}",
            f"{way['steps']:.0f}",
            f"{way['level']:.2f}",
        ]
        for way in results["ways"].values()
    ]
    return _table(["way", "mean score", "interquartile mean", "diverged", "skipped", "steps", "mean level"], rows)


def difference_table(results: Results) -> str:
    """Returns a row for each rival, empty without a policy.

    Args:
        results: Of ``evaluation_results.bank_results``.
    """
    rows = [
        [
            results["ways"][name]["description"],
            interval(found["all"]["difference"]),
            f"{found['all']['win_rate']:.0%}",
            interval(found["all"]["improvement"], digits=2, sign=False),
            verdict(found["all"]["difference"]),
        ]
        for name, found in results["differences"].items()
    ]
    return _table(["rival", "difference", "wins", "P(improvement)", "so the policy is"], rows)


def group_table(results: Results) -> str:
    """Returns a row for each group of tasks, empty without a policy.

    Args:
        results: Of ``evaluation_results.bank_results``.
    """
    differences = results["differences"]
    columns = [name for name in (*_GROUP_COLUMNS, strongest_table(results)) if name in differences]
    rows = [
        [kind, group, str(count), *(interval(differences[name]["by"][kind][group]["difference"]) for name in columns)]
        for kind, found in results["groups"].items()
        for group, count in found.items()
    ]
    names = [results["ways"][name]["description"] for name in columns]
    return _table(["kind", "group", "tasks", *names], rows) if columns else ""


def ladder_table(results: Results) -> str:
    """Returns a row for each step from fp32 to the policy.

    Args:
        results: Of ``evaluation_results.bank_results``.
    """
    rows = [
        [_STEPS[step["name"]], f"{step['score']:.3f}", "" if step["gain"] is None else interval(step["gain"])]
        for step in results["ladder"]
    ]
    return _table(["step", "mean score", "gain"], rows)


def raise_table(results: Results) -> str:
    """Returns rows with and without the guard, empty where nothing was recorded.

    Args:
        results: Of ``evaluation_results.bank_results``.
    """
    names = {"guard": "policy and guard", "alone": "policy alone"}
    rows = [
        [names[key], str(found["offenders"]), *(_plain(found[name]) for name in ("rate", "base", "lift"))]
        for key, found in results["raises"].items()
    ]
    return _table(["", "overflows", "raised", "raised without overflow, same formats", "ratio"], rows)


def interval(found: Sequence[float | None], *, digits: int = 3, sign: bool = True) -> str:
    """Returns ``mean [low, high]``.

    Args:
        found: Mean and ends; ``None`` for what there is not.
        digits: Behind the point.
        sign: Whether positive numbers have one.
    """
    mean, low, high = (None if value is None else f"{value:{'+' if sign else ''}.{digits}f}" for value in found)
    if mean is None:
        return "n/a"
    return mean if low is None else f"{mean} [{low}, {high}]"


def verdict(difference: Sequence[float | None]) -> str:
    """Says what a difference shows: ``better``, ``worse``, or ``tied`` where the interval holds 0.

    Args:
        difference: Mean and ends.
    """
    _, low, high = difference
    if low is None or high is None:
        return "n/a"
    return "better" if low > 0 else "worse" if high < 0 else "tied"


def _plain(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = [list(row) for row in rows]
    if not body:
        return ""
    widths = [max(len(row[column]) for row in [list(head), *body]) for column in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [list(head), *body]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
