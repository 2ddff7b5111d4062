"""What a sweep gave: its trials, the Pareto front, the winner, and the files that hold them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optuna import Study
from optuna.trial import FrozenTrial, TrialState

from autoprec.json_files import encoded, write_json
from autoprec.sweep.config import Objective, SweepConfig
from autoprec.sweep.outcome import FIGURES, REASON
from autoprec.sweep.plan import BASELINE
from autoprec.sweep.studies import is_lost

VERSION = 1
"""Version of the layout of ``pareto.json``."""
_STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


@dataclass(frozen=True)
class TrialRecord:
    """A trial that has ended.

    Args:
        number: Its number.
        arm: ``autoprec`` or a static precision.
        state: ``complete``, ``pruned`` or ``failed``.
        params: What it tried.
        values: Objectives, of a complete trial.
        figures: All figures, of a complete trial.
        constraints: How far it is beyond each constraint.
        reason: Why it is not complete.
        baseline: Which of the trials that come first it is, if any.
        formats: Format of each unit at the end.
        seconds: From its beginning to its end.
    """

    number: int
    arm: str
    state: str
    params: dict[str, Any]
    values: tuple[float, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    constraints: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    baseline: str | None = None
    formats: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it is complete and keeps to the constraints."""
        return self.state == "complete" and all(excess <= 0 for excess in self.constraints.values())


@dataclass(frozen=True)
class SweepResult:
    """What a sweep gave.

    Args:
        study: Name of the study.
        objectives: What is best.
        trials: All trials that have ended, lost ones left out.
        front: Numbers of the usable trials that no other one beats in every objective.
        best: The winner; ``None`` where no trial is usable.
        picked_by: How the winner was chosen.
        lost: Trials that were lost with their workers and queued again.
        out: Folder of the sweep.
    """

    study: str
    objectives: tuple[Objective, ...]
    trials: tuple[TrialRecord, ...]
    front: tuple[int, ...]
    best: TrialRecord | None
    picked_by: str
    lost: int
    out: Path

    @property
    def counts(self) -> dict[str, int]:
        """How many trials ended in each state."""
        return dict(Counter(trial.state for trial in self.trials))

    @property
    def message(self) -> str:
        """The result in a line."""
        if self.best is not None:
            said = ", ".join(
                f"{one.name} {value:.6g}" for one, value in zip(self.objectives, self.best.values, strict=True)
            )
            return f"best: trial {self.best.number} ({self.best.arm}), {said}; {self.picked_by}"
        why = Counter(trial.reason or "it breaks a constraint" for trial in self.trials).most_common(3)
        reasons = "".join(f"\n  {count} x {reason}" for reason, count in why)
        return f"no usable trial among {len(self.trials)}{':' if reasons else ''}{reasons}"

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold."""
        document: dict[str, Any] = encoded(
            {
                "version": VERSION,
                "study": self.study,
                "objectives": [{"name": one.name, "direction": one.aim} for one in self.objectives],
                "counts": self.counts,
                "lost": self.lost,
                "front": list(self.front),
                "best": None if self.best is None else self.best.number,
                "picked_by": self.picked_by,
                "message": self.message,
                "trials": [asdict(trial) for trial in self.trials],
            }
        )
        return document


def collect(config: SweepConfig, study: Study) -> SweepResult:
    """Returns what a study holds.

    Args:
        config: The sweep.
        study: The study.
    """
    found = study.get_trials(deepcopy=False)
    trials = tuple(_record(trial) for trial in found if trial.state in _STATES and not is_lost(trial))
    front = pareto_front(config.objectives, trials)
    best, picked_by = _winner(config, front)
    return SweepResult(
        study=study.study_name,
        objectives=config.objectives,
        trials=trials,
        front=tuple(trial.number for trial in front),
        best=best,
        picked_by=picked_by,
        lost=sum(map(is_lost, found)),
        out=config.out,
    )


def _record(trial: FrozenTrial) -> TrialRecord:
    attributes = trial.user_attrs
    is_complete = trial.state == TrialState.COMPLETE
    return TrialRecord(
        number=trial.number,
        arm=attributes.get("arm", "autoprec"),
        state=_STATES[trial.state],
        params=trial.params,
        values=tuple(trial.values) if is_complete else (),
        figures={name: float(value) for name, value in attributes.get(FIGURES, {}).items()},
        constraints=dict(trial.constraints),
        reason=attributes.get(REASON),
        baseline=attributes.get(BASELINE),
        formats=attributes.get("formats", {}),
        seconds=None if trial.duration is None else trial.duration.total_seconds(),
    )


def pareto_front(objectives: Sequence[Objective], trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the usable trials that no other one beats, sorted by the first objective. With one objective: the best.

    Args:
        objectives: What is best.
        trials: The trials.
    """
    usable = [trial for trial in trials if trial.is_usable]
    signed = {trial.number: _signed(objectives, trial) for trial in usable}

    def is_beaten(trial: TrialRecord) -> bool:
        mine = signed[trial.number]
        return any(
            other != mine and all(theirs <= own for theirs, own in zip(other, mine, strict=True))
            for other in signed.values()
        )

    front = [trial for trial in usable if not is_beaten(trial)]
    return sorted(front, key=lambda trial: (signed[trial.number], trial.number))


def _signed(objectives: Sequence[Objective], trial: TrialRecord) -> tuple[float, ...]:
    """The objectives of a trial, less being better."""
    signs = (1.0 if one.aim == "minimize" else -1.0 for one in objectives)
    return tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))


def _winner(config: SweepConfig, front: Sequence[TrialRecord]) -> tuple[TrialRecord | None, str]:
    names = [one.name for one in config.objectives]
    if not front:
        return None, ""
    if len(names) == 1:
        return front[0], f"best {names[0]}"
    points = {trial.number: _signed(config.objectives, trial) for trial in front}
    if config.pick is not None:
        index = names.index(config.pick)
        best = min(front, key=lambda trial: (points[trial.number][index], points[trial.number]))
        return best, f"best {config.pick} of the Pareto front"
    lows = [min(values) for values in zip(*points.values(), strict=True)]
    spans = [max(values) - min(values) or 1.0 for values in zip(*points.values(), strict=True)]

    def distance(trial: TrialRecord) -> float:
        parts = zip(points[trial.number], lows, spans, strict=True)
        return math.hypot(*((value - low) / span for value, low, span in parts))

    return min(front, key=distance), "nearest to the best of all objectives on the Pareto front"


def write_results(config: SweepConfig, study: Study, result: SweepResult) -> None:
    """Writes ``pareto.json``, ``pareto.html`` and, where there is a winner, ``best.yaml``.

    Args:
        config: The sweep.
        study: The study.
        result: What it gave.
    """
    from autoprec.sweep.best_config import write_best
    from autoprec.sweep.pareto_page import write_page

    write_json(config.out / "pareto.json", result.to_dict(), allow_nan=False)
    write_best(config, result)
    write_page(study, result, config.out / "pareto.html")
