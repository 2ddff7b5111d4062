"""Figures and tables of the divergence study, from its runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.divergence_recipes import RECIPES, Recipe
from benchmarks.report import Table, as_markdown
from benchmarks.survival import Run, deeds, failure, symptoms

Summary = Mapping[str, Any]


def summarise(recipe: Recipe, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Returns what became of a recipe in each arm.

    Args:
        recipe: What was trained.
        runs: The runs of each of its arms, in the same order of seeds.
    """
    losses = [run["final_loss"] for run in runs["reference"]]
    return {
        "steps": recipe.steps,
        "factor": recipe.factor,
        "static": recipe.static,
        "arms": {
            name: {"way": str(arm), **_of_arm(runs[name], losses, recipe.factor)} for name, arm in recipe.arms().items()
        },
        "symptoms": symptoms(runs["static"][0], runs["reference"][0]),
        "deeds": deeds(runs["autoprec"][0]),
        "cpu_seconds": round(sum(run["cpu_seconds"] for arm in runs.values() for run in arm), 1),
    }


def _of_arm(runs: Sequence[Run], references: Sequence[float | None], factor: float) -> dict[str, Any]:
    failures = [failure(run, loss, factor) for run, loss in zip(runs, references, strict=True)]
    return {
        "survived": failures.count(None),
        "seeds": len(runs),
        "failures": failures,
        "final_losses": [run["final_loss"] for run in runs],
        "val_losses": [run["val_loss"] for run in runs],
        "steps_lost": [run["steps_lost"] for run in runs],
        "loss_scales": [run["loss_scale"] for run in runs],
    }


def last_line(summaries: Mapping[str, Summary]) -> str:
    """Returns the line that ends the study; a recipe counts as survived if it was with every seed."""
    counts = {
        name: sum(one["arms"][name]["survived"] == one["arms"][name]["seeds"] for one in summaries.values())
        for name in ("static", "autoprec")
    }
    return (
        f"divergence: recipes={len(summaries)} static_survived={counts['static']}"
        f" autoprec_survived={counts['autoprec']}"
    )


def figures(summaries: Mapping[str, Summary]) -> Table:
    """The table of survivors, losses and steps.

    Args:
        summaries: What :func:`summarise` returned, by recipe.
    """
    arms = ("static", "autoprec")
    head = ["recipe", "static", "factor", "reference", *(f"{arm}: {what}" for arm in arms for what in _COLUMNS), "also"]
    lines = []
    for name, one in summaries.items():
        found = one["arms"]
        cells = [cell for arm in arms for cell in _cells(found[arm], one["steps"])]
        also = [f"{arm} {_survived(found[arm])}" for arm in found if arm not in ("reference", *arms)]
        reference = _median(found["reference"]["final_losses"])
        lines.append([name, one["static"], f"{one['factor']:g}", reference, *cells, ", ".join(also)])
    return Table("Survival over seeds, medians of final losses, steps lost", head, lines)


_COLUMNS = ("survived", "loss", "steps lost")


def _cells(arm: Mapping[str, Any], steps: int) -> list[str]:
    lost = statistics.median(arm["steps_lost"])
    return [_survived(arm), _median(arm["final_losses"]), f"{lost:g} of {steps}"]


def _survived(arm: Mapping[str, Any]) -> str:
    return f"{arm['survived']}/{arm['seeds']}"


def _median(losses: Sequence[float | None]) -> str:
    known = sorted(loss for loss in losses if loss is not None)
    if 2 * len(known) <= len(losses):
        return "not finite"
    # what is not finite counts as larger than all others
    return f"{statistics.median([*known, *[float('inf')] * (len(losses) - len(known))]):.3g}"


def mechanisms(summaries: Mapping[str, Summary], seed: int) -> Table:
    """The table of what went wrong, and what was done about it.

    Args:
        summaries: What :func:`summarise` returned, by recipe.
        seed: The first seed, of which single runs are told.
    """
    head = ["recipe", "why static fails", f"static, seed {seed}", f"what the callback did, seed {seed}"]
    lines = [[name, RECIPES[name].fails, one["symptoms"], one["deeds"]] for name, one in summaries.items()]
    return Table("What went wrong", head, lines)


def page_block(study: Mapping[str, Any]) -> str:
    """Returns what stands in docs/divergence.md.

    Args:
        study: What docs/divergence.json holds.
    """
    summaries, about = study["recipes"], study["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in study["versions"].items())
    minutes = sum(one["cpu_seconds"] for one in summaries.values()) / 60
    head = (
        f"{study['date'][:10]}, `{study['command']}`, seeds {study['seeds'][0]} to {study['seeds'][-1]},"
        f" {about['processor']}, {about['cores']} cores, {versions}; {minutes:.0f} minutes of processor time."
    )
    tables = figures(summaries), mechanisms(summaries, study["seeds"][0])
    return "\n\n".join([head, *map(as_markdown, tables), f"    {last_line(summaries)}"])
