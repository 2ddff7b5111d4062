"""The tables of the transfer study, its last line, and what stands in docs/transfer.md. Losses are shown like wins."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoprec.paired import Interval
from benchmarks.report import Table, as_markdown
from benchmarks.transfer_arms import ARMS, RULE, TABLE
from benchmarks.transfer_charge import CHARGES, MEASURED, OVERHEAD
from benchmarks.transfer_scores import Rival, best_static, differences, named, total, verdict

Study = Mapping[str, Any]
TITLES = {MEASURED: "processor time on this machine", "h100": "simulated H100", "a100": "simulated A100"}
"""What a charge is called in the output."""


def last_line(study: Study) -> str:
    """Returns the line that ends the study: differences averaged over tasks, seeds and charges.

    Args:
        study: What docs/results/transfer.json holds.
    """
    rivals = {"best_static": best_static, "rule": named(RULE), "table": named(TABLE)}
    found = {
        name: total(differences(study["tasks"], study["subject"], rival, CHARGES)) for name, rival in rivals.items()
    }
    shown = " ".join(f"vs_{name}={'n/a' if one is None else f'{one.mean:+.3f}'}" for name, one in found.items())
    cells = [task["arms"][study["subject"]][charge] for task in study["tasks"].values() for charge in CHARGES]
    skipped = sum(cell["skipped"] for cell in cells) / max(1, sum(cell["batches"] for cell in cells))
    ended = sum(cell["diverged"] + (cell["failed"] is not None) for cell in cells)
    counts = f"tasks={len(study['tasks'])} seeds={len(study['seeds'])}"
    return f"transfer: {counts} {shown} skipped={skipped:.4f} diverged={ended}"


def tables(study: Study) -> Iterator[Table]:
    """Yields all tables.

    Args:
        study: What docs/results/transfer.json holds.
    """
    for charge in CHARGES:
        yield scores(study, charge)
    yield comparisons(study)
    yield by_task(study)
    yield deeds(study)


def scores(study: Study, charge: str) -> Table:
    """The table of mean scores by arm and task.

    Args:
        study: What docs/results/transfer.json holds.
        charge: What time is charged by.
    """
    tasks = study["tasks"]
    names = list(next(iter(tasks.values()))["arms"])
    lines = [[name, *(_score(task["arms"][name][charge]) for task in tasks.values())] for name in names]
    note = "+: the run ended before its budget was spent, so its score is too low."
    is_short = any(task["arms"][name][charge]["short"] for task in tasks.values() for name in names)
    return Table(f"Scores, {TITLES[charge]}", ["arm", *tasks], lines, note if is_short else "")


def _score(cell: Mapping[str, Any]) -> str:
    if cell["failed"] is not None:
        return "fails"
    short = "+" if cell["short"] else ""
    lost = f", {cell['diverged']} diverged" if cell["diverged"] else ""
    return f"{statistics.fmean(cell['scores']):.3f}{short}{lost}"


def comparisons(study: Study) -> Table:
    """The table of differences between the subject and every other arm, over tasks and seeds.

    Args:
        study: What docs/results/transfer.json holds.
    """
    tasks, subject = study["tasks"], study["subject"]
    others = [name for name in next(iter(tasks.values()))["arms"] if name != subject]
    rivals: dict[str, Rival] = {"best static of each task": best_static, **{name: named(name) for name in others}}
    lines = []
    for name, rival in rivals.items():
        overall = total(differences(tasks, subject, rival, CHARGES))
        each = [total(differences(tasks, subject, rival, [charge])) for charge in CHARGES]
        lines.append([name, _shown(overall), *map(_shown, each), _counts(tasks, subject, rival)])
    head = [f"{subject} less", "all charges", *(TITLES[charge] for charge in CHARGES), "better / tie / worse"]
    note = (
        "Mean difference of scores with its 95% interval over tasks and seeds, tasks in which the other arm fails left"
        " out. Last column: tasks times charges, by the interval over seeds."
    )
    return Table("Differences of scores", head, lines, note)


def _shown(found: Interval | None) -> str:
    if found is None:
        return "n/a"
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}] {verdict(found)}"


def _counts(tasks: Mapping[str, Any], subject: str, rival: Rival) -> str:
    words = [
        verdict(found)
        for name, task in tasks.items()
        for charge in CHARGES
        if (found := total(differences({name: task}, subject, rival, [charge]))) is not None
    ]
    return " / ".join(str(words.count(word)) for word in ("better", "tie", "worse"))


def by_task(study: Study) -> Table:
    """The table of the subject against the best static arm, task by task.

    Args:
        study: What docs/results/transfer.json holds.
    """
    subject = study["subject"]
    lines = []
    for name, task in study["tasks"].items():
        for charge in CHARGES:
            best = best_static(task["arms"], charge)
            mine = task["arms"][subject][charge]
            found = total(differences({name: task}, subject, best_static, [charge]))
            theirs = None if best is None else task["arms"][best][charge]
            lines.append([name, charge, str(best), _shown(found), *_metrics(mine), *_metrics(theirs)])
    head = ["task", "charge", "best static", "difference"]
    head += [f"{who}: {what}" for who in (subject, "best static") for what in ("loss", "accuracy", "steps")]
    note = "The best static arm is known only afterwards. Means over seeds of what was reached within the budget."
    return Table(f"{subject} against the best static arm", head, lines, note)


def _metrics(cell: Mapping[str, Any] | None) -> list[str]:
    if cell is None:
        return ["n/a"] * 3
    losses = [loss for loss in cell["losses"] if loss is not None]
    loss = f"{statistics.fmean(losses):.3g}" if len(losses) == len(cell["losses"]) else "not finite"
    return [loss, f"{statistics.fmean(cell['accuracies']):.1%}", f"{cell['steps']:g}"]


def deeds(study: Study) -> Table:
    """The table of what each policy did.

    Args:
        study: What docs/results/transfer.json holds.
    """
    lines = []
    policies = _policies(study)
    for name in policies:
        for charge in CHARGES:
            cells = [task["arms"][name][charge] for task in study["tasks"].values()]
            skipped = sum(cell["skipped"] for cell in cells) / max(1, sum(cell["batches"] for cell in cells))
            counts = [str(sum(cell[key] for cell in cells)) for key in ("rollbacks", "diverged")]
            bits = statistics.fmean(cell["mean_bits"] for cell in cells)
            used = _formats(cells)
            emulated = sorted({each for cell in cells for each in cell["emulated"]})
            lines.append([name, charge, f"{skipped:.2%}", *counts, f"{bits:.1f}", used, ", ".join(emulated) or "none"])
    head = ["policy", "charge", "skipped", "rollbacks", "diverged", "mean bits", "formats at the end", "emulated here"]
    note = "Bits and formats are averaged over multiplications. What is emulated is rounded as the format rounds."
    return Table("What the policies did", head, lines, note)


def _policies(study: Study) -> list[str]:
    static = {arm.name for arm in ARMS if arm.is_static}
    return [name for name in next(iter(study["tasks"].values()))["arms"] if name not in static]


def _formats(cells: Sequence[Mapping[str, Any]]) -> str:
    totals: dict[str, float] = {}
    for cell in cells:
        for name, share in cell["formats"].items():
            totals[name] = totals.get(name, 0.0) + share / len(cells)
    return ", ".join(f"{name} {share:.0%}" for name, share in totals.items() if share >= 0.005)


def page_block(study: Study) -> str:
    """Returns what stands in docs/transfer.md.

    Args:
        study: What docs/results/transfer.json holds.
    """
    about = study["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in study["versions"].items())
    head = (
        f"{study['date'][:10]}, `{study['command']}`, seeds {study['seeds'][0]} to {study['seeds'][-1]},"
        f" {about['processor']}, {about['cores']} cores, one thread for each run, {versions}. A simulated step has"
        f" a fixed time of {OVERHEAD:g} of its products in fp32."
        f" Policies were added to Trainers in {study['starting']}."
    )
    missing = [f"- {line}" for line in study["missing"]]
    parts = [head, *(["\n".join(missing)] if missing else []), *map(as_markdown, tables(study))]
    return "\n\n".join([*parts, "![Differences by task](results/transfer.png)", f"    {last_line(study)}"])
