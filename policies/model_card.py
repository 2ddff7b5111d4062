"""The model card of a policy, filled from the results of its trainings and of an evaluation.

What lives here: a template and the words that follow from numbers. What does not: the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import Template
from typing import Any

from autoprec.policies.evaluation_tables import difference_table, group_table, ladder_table, raise_table, score_table

Document = Mapping[str, Any]

_TEMPLATE = Template("""\
---
license: apache-2.0
library_name: autoprec
tags:
- reinforcement-learning
- mixed-precision
---

# $name

A small network that steers number formats, loss scale, batch size and gradient clip of a training run. It moves what a
table of measured costs and errors proposes by one, or leaves it; `AutoPrecisionCallback(policy="pretrained")` uses it.

| | |
|---|---|
| kind | $kind |
| version of observations | $encoding_version |
| weights, SHA-256 | $weights |
| trained with | autoprec $autoprec, $versions |
| evaluated | $date, `$evaluate_command` |
| licence | Apache-2.0 |

## Training

Data: proxy trainings of `autoprec.envs` (small MLPs, CNNs, transformer blocks and recurrent cells on random teachers).
Numerics are real, time and hardware are simulated. No data of anybody is in it.

$training

## What it is worth

The score is the fall of the held-out log loss within a fixed budget of time, in units of what fp32 without clipping
makes of the same. Intervals are 95% bootstraps over tasks and training seeds. Tasks were not trained or selected on.

$banks

## Where it loses

$losses

## Limits

- Costs and hardware of the tasks above are simulated. What it is worth in your training is what `autoprec compare`
  measures there.
- Models of the tasks have 3 to 10 layers with weights. Where an observation is unlike all of training, the policy
  leaves the table's proposal as it is.
- The guard, not the policy, raises a layer that overflows, and nothing here says how the policy does without it but the
  row "policy alone".
- Most of the gain over static settings belongs to the clip and the table: see "What each step adds".
""")


def model_card(
    evaluation: Document, trainings: Sequence[Document] = (), *, command: str = "autoprec train-policy"
) -> str:
    """Returns the text of a model card.

    Args:
        evaluation: What ``evaluation.json`` holds.
        trainings: What ``training.json`` of each seed holds.
        command: The command that trained them.

    Raises:
        ValueError: If the evaluation is not one of a policy.
    """
    policies = evaluation["policies"]
    if not policies:
        raise ValueError("Passed `model_card` an evaluation without a policy. Run `autoprec evaluate-policy` with one.")
    first, versions = policies[0], dict(evaluation["versions"])
    return _TEMPLATE.substitute(
        name=first["name"],
        kind=_kind(first),
        encoding_version=evaluation["encoding_version"],
        weights=first.get("weights_sha256") or "n/a",
        autoprec=versions.pop("autoprec"),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        date=evaluation["date"][:10],
        evaluate_command=evaluation["command"],
        training=_training(trainings, command),
        banks="\n\n".join(_bank(name, results) for name, results in evaluation["banks"].items()),
        losses=_losses(evaluation["banks"]),
    )


def _kind(policy: Document) -> str:
    mode = policy.get("mode")
    moves = {"offset": "moves relative to the table's proposal", "ladder": "moves relative to where a knob is"}
    return moves.get(str(mode), "the table itself")


def _training(trainings: Sequence[Document], command: str) -> str:
    if not trainings:
        return f"Command: `{command}`. Results of the trainings were not at hand when this card was written."
    lines = [
        f"Command: `{command}`. The state with the best score in validation was kept.",
        "",
        "| seed | decisions | minutes | validation score | gain over the table |",
        "|---|---|---|---|---|",
    ]
    for one in trainings:
        gain = one.get("gain", {}).get("over_decision_0")
        gained = "n/a" if gain is None else f"{gain:+.3f}"
        minutes, score = one["seconds"] / 60.0, one["best"]["score"]
        lines.append(f"| {one['seed']} | {one['decisions']} | {minutes:.1f} | {score:.3f} | {gained} |")
    return "\n".join(lines)


def _bank(name: str, results: Document) -> str:
    tables = {
        "": score_table(results),
        "Policy less rival": difference_table(results),
        "By group of tasks": group_table(results),
        "What each step adds": ladder_table(results),
        "Raised within two decisions of its own overflow": raise_table(results),
    }
    head = f"### {name}: {results['tasks']} tasks, {results['seeds']} training seeds"
    parts = [f"{title}:\n\n{text}" if title else text for title, text in tables.items() if text]
    return "\n\n".join((head, *parts))


def _losses(banks: Document) -> str:
    """Every comparison whose interval lies below 0, and every tie, in words."""
    lost, tied = list(_comparisons(banks, is_lost=True)), list(_comparisons(banks, is_lost=False))
    lines = [f"- Worse: {text}" for text in lost] or ["- No comparison has its whole interval below 0."]
    return "\n".join([*lines, *(f"- Tied: {text}" for text in tied)])


def _comparisons(banks: Document, *, is_lost: bool) -> Iterator[str]:
    for bank, results in banks.items():
        for name, found in results["differences"].items():
            rival = results["ways"][name]["description"]
            if _shows(found["all"]["difference"], is_lost):
                yield f"{bank}, all tasks, against {rival}: {_numbers(found['all']['difference'])}"
            for kind, names in found["by"].items():
                for group, cell in names.items():
                    if is_lost and _shows(cell["difference"], True):
                        yield f"{bank}, {kind} {group}, against {rival}: {_numbers(cell['difference'])}"


def _shows(difference: Sequence[float | None], is_lost: bool) -> bool:
    _, low, high = difference
    if low is None or high is None:
        return False
    return high < 0 if is_lost else low <= 0 <= high


def _numbers(difference: Sequence[float | None]) -> str:
    mean, low, high = difference
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
