"""A whole evaluation: plays, works out what follows, and writes JSON, tables and pictures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.json_files import read_json, write_json
from autoprec.machine import circumstances, version
from autoprec.policies.evaluate import EvaluationSettings, Progress, evaluate
from autoprec.policies.evaluation_picture import draw
from autoprec.policies.evaluation_results import bank_results, encoding_version, summary_line
from autoprec.policies.evaluation_tables import markdown, short
from autoprec.policies.rivals import TUNED, Rival, policy_rival, rivals
from autoprec.policies.strong_rivals import strong_rivals
from autoprec.policies.task_groups import evaluation_tasks

Document = dict[str, Any]

RESULT, TABLES = "evaluation.json", "evaluation.md"
SHIPPED = Path(__file__).resolve().parent / "pretrained"
"""The policy that the package ships."""
TABLE_WORD = "table"


def chosen_rivals(policies: Sequence[str | Path]) -> tuple[Rival, ...]:
    """Returns all rivals and the policies, each once more without the guard.

    Args:
        policies: Folders, or the word ``table`` for a policy that accepts whatever the table proposes.

    Raises:
        FileNotFoundError: If a folder has no policy.
    """
    found = [*rivals(), *strong_rivals(TUNED.parent)]
    for policy in policies:
        if str(policy) == TABLE_WORD:
            default = next(rival for rival in found if rival.name == "table_learnt")
            found.append(replace(default, name="policy", description="policy (accepts the table)"))
            continue
        found += [policy_rival(Path(policy), guard=guard) for guard in (True, False)]
    return tuple(found)


def run_evaluation(
    settings: EvaluationSettings,
    *,
    progress: Callable[[Progress], None] | None = None,
    twins: Callable[[int, int], None] | None = None,
) -> Document:
    """Evaluates and writes ``evaluation.json``, ``evaluation.md`` and a picture for each bank.

    Args:
        settings: What to play on what.
        progress: See ``evaluate``.
        twins: See ``evaluate``.

    Returns:
        What ``evaluation.json`` holds.
    """
    started = time.monotonic()
    played = evaluate(settings, progress=progress, twins=twins)
    banks = {}
    for bank in settings.banks:
        tasks = evaluation_tasks(bank, settings.count(bank), distribution=settings.distribution)
        banks[bank] = bank_results([task for task, _ in tasks], [one for one in played if one.bank == bank])
    document = {
        **_circumstances(),
        "seconds": round(time.monotonic() - started, 1),
        "encoding_version": encoding_version(),
        "policies": [_said(rival) for rival in settings.rivals if rival.name == "policy" and rival.guard],
        "banks": banks,
        "summary": summary_line(banks[settings.banks[0]]),
    }
    write_json(settings.out / RESULT, document, allow_nan=False)
    (settings.out / TABLES).write_text(tables(document), encoding="utf-8")
    for bank, results in banks.items():
        draw(results, _heading(bank, results, document), settings.out / f"{bank}.png")
    return document


def tables(document: Document) -> str:
    """Returns the tables of all banks.

    Args:
        document: What :func:`run_evaluation` returned.
    """
    parts = [f"## {_heading(bank, results, document)}\n\n{markdown(results)}" for bank, results in _banks(document)]
    return "\n\n".join(parts) + "\n"


def short_tables(document: Document) -> str:
    """Returns what fits into a terminal of 80 columns.

    Args:
        document: What :func:`run_evaluation` returned.
    """
    parts = [f"{_heading(bank, results, document)}\n\n{short(results)}" for bank, results in _banks(document)]
    return "\n\n".join(parts) + "\n"


def _banks(document: Document) -> Iterable[tuple[str, Document]]:
    found: dict[str, Document] = document["banks"]
    return found.items()


def _heading(bank: str, results: Document, document: Document) -> str:
    seeds = f"{results['seeds']} training seed{'' if results['seeds'] == 1 else 's'}"
    is_trained = any(policy["folder"] is not None for policy in document["policies"])
    return f"{bank}: {results['tasks']} tasks, {seeds if is_trained else 'the table in the place of a policy'}"


def _circumstances() -> Document:
    found = circumstances(1)
    found["versions"]["stable-baselines3"] = version("stable-baselines3")
    return found


def _said(rival: Rival) -> Document:
    if not isinstance(rival.plays, Path):
        return {"folder": None, "name": rival.description}
    card = read_json(rival.plays / "policy.json") or {}
    wanted = ("name", "mode", "table", "training", "weights_sha256", "encoding_version")
    return {"folder": rival.plays.name, **{name: card.get(name) for name in wanted}}
