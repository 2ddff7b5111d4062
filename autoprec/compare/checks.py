"""What must hold for runs to be comparable, checked on what they gave: notes for the reader where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.compare.arms import AUTOPREC
from autoprec.compare.records import Run
from autoprec.compare.store import Store, Stored
from autoprec.fidelity import compare_outputs

SUFFIX = ".safetensors"
"""Of files with outputs."""


def notes_of(store: Store, runs: Sequence[Run]) -> list[str]:
    """Returns what a reader of the results should know, each thing once.

    Args:
        store: Where the runs are.
        runs: The runs that are compared.
    """
    stored = [store.runs[run.arm, run.seed] for run in runs]
    notes = [*_other_data(stored), *_equal_seeds(runs), *_lengths(runs), *_late_decisions(stored), *_own(stored)]
    return list(dict.fromkeys(notes))


def _own(stored: Iterable[Stored]) -> Iterator[str]:
    for each in stored:
        yield from each.extra.get("notes", [])


def _other_data(stored: Sequence[Stored]) -> Iterator[str]:
    by_seed: dict[int, list[Stored]] = {}
    for each in stored:
        if each.extra.get("batches"):
            by_seed.setdefault(each.run.seed, []).append(each)
    for seed, group in by_seed.items():
        first, *others = group
        for other in others:
            step = _first_difference(first.extra["batches"], other.extra["batches"])
            if step is not None:
                yield (
                    f"seed {seed}: {other.run.arm} and {first.run.arm} read different batches from batch {step} on, so"
                    " their losses differ by data too. Is the order of the loader drawn from something that no seed"
                    " reaches (time, process id, an unordered set)?"
                )
                break


def _first_difference(left: Sequence[str], right: Sequence[str]) -> int | None:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (one, other) in pairs if one != other), None)


def _equal_seeds(runs: Sequence[Run]) -> Iterator[str]:
    by_arm: dict[str, list[Run]] = {}
    for run in runs:
        if run.error is None and run.steps and not run.arm.startswith(AUTOPREC):
            by_arm.setdefault(run.arm, []).append(run)
    for arm, group in by_arm.items():
        losses = {tuple(step.loss for step in run.steps) for run in group}
        if len(group) > 1 and len(losses) == 1 and group[0].steps[0].loss is not None:
            seeds = ", ".join(str(run.seed) for run in group)
            yield (
                f"seeds {seeds} gave the same losses ({arm}): the target sets its own seed, so the seeds count as one"
                " and say nothing about chance. Take it from `seed_everything`, or from the function's argument `seed`."
            )
            return


def _late_decisions(stored: Sequence[Stored]) -> Iterator[str]:
    for each in stored:
        arm, steps, first = each.run.arm, len(each.run.steps), each.extra.get("first_change")
        if not arm.startswith(AUTOPREC) or each.run.error is not None:
            continue
        if first is None and set(each.run.formats.values()) <= {"fp32"}:
            yield f"{arm} left every layer in fp32 for all {steps} steps{_why(each.extra.get('unoffered'))}"
        elif first is not None and first >= steps // 2:
            yield (
                f"{arm} lowered its first layer after {first} of {steps} steps, so its times are mostly those of"
                " fp32; more steps, or a smaller `--interval`, show what it decides"
            )


def _why(unoffered: dict[str, str] | None) -> str:
    if not unoffered:
        return "; a smaller `--interval` decides earlier"
    unit, reason = next(iter(unoffered.items()))
    return f". Of its layers {len(unoffered)} have formats that are {reason.replace(': ', f' ({unit}: ', 1)})"


def _lengths(runs: Sequence[Run]) -> Iterator[str]:
    lengths = {len(run.steps) for run in runs if run.error is None}
    if len(lengths) > 1:
        yield f"runs took between {min(lengths)} and {max(lengths)} steps: some ended by themselves"


def consistency_row(store: Store, arm: str, seed: int, suffix: str) -> dict[str, Any] | None:
    """Returns how far a run is from the same run with other instructions, ``None`` where one of them is missing.

    Args:
        store: Where the runs are.
        arm: The arm.
        seed: The seed.
        suffix: What the arm of the other run has after its name.
    """
    one, other = store.runs.get((arm, seed)), store.runs.get((arm + suffix, seed))
    if one is None or other is None or one.run.error or other.run.error:
        return None
    pairs = zip(one.run.steps, other.run.steps, strict=False)
    gaps = [abs(left.loss - right.loss) for left, right in pairs if left.loss is not None and right.loss is not None]
    return {
        "arm": arm,
        "seed": seed,
        "instructions": [found.run.environment.get("instructions") for found in (one, other)],
        "largest_loss_difference": max(gaps, default=None),
        "last_loss_difference": gaps[-1] if gaps else None,
        "output_sqnr_db": _sqnr(store, arm, seed, suffix),
    }


def _sqnr(store: Store, arm: str, seed: int, suffix: str) -> float | None:
    found = fidelity(store.path("outputs", arm + suffix, seed, SUFFIX), store.path("outputs", arm, seed, SUFFIX))
    return None if found is None else found.get("logit_sqnr_db", found.get("sqnr_db"))


def fidelity(outputs: Path, reference: Path) -> dict[str, float] | None:
    """Returns how far outputs are from those of another run, ``None`` where there are none that can be compared.

    Args:
        outputs: File of the run.
        reference: File of the run that it is held against.
    """
    if not (outputs.is_file() and reference.is_file()):
        return None
    try:
        return compare_outputs(outputs, reference)
    except ValueError:  # arms that ended after different numbers of samples, say
        return None


def with_fidelity(store: Store, run: Run, reference: str) -> Run:
    """Returns a run with the fidelity of its outputs.

    Args:
        store: Where the outputs are.
        run: The run.
        reference: Name of the arm that it is held against, with the same seed.
    """
    if run.arm == reference:
        return run
    files = [store.path("outputs", arm, run.seed, SUFFIX) for arm in (run.arm, reference)]
    return replace(run, fidelity=fidelity(*files))
