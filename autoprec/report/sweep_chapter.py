"""The chapter on a sweep: its winner, the front of trials that nothing beats, every trial."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from autoprec.report.charts import scatter
from autoprec.report.page_data import Blocks, Cell, Chapter, Chart, Code, Table
from autoprec.report.wording import NOTHING, count, number, seconds_text

_MOST_TRIALS = 500


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a sweep may say more than a report shows


class Objective(_Model):
    """What a sweep looks for.

    Args:
        name: A figure of trials.
        direction: ``minimize`` or ``maximize``.
    """

    name: str
    direction: str = "minimize"


class Trial(_Model):
    """One trial.

    Args:
        number: Its number.
        arm: How it trained.
        state: ``complete``, ``pruned`` or ``failed``.
        params: What it tried.
        values: Objectives, of a complete trial.
        constraints: How far it is beyond each constraint.
        reason: Why it is not complete.
        baseline: Which of the static ones it is.
        seconds: How long it took.
    """

    number: int
    arm: str = "autoprec"
    state: str = "complete"
    params: dict[str, Any] = Field(default_factory=dict)
    values: tuple[float, ...] = ()
    constraints: dict[str, float] = Field(default_factory=dict)
    reason: str | None = None
    baseline: str | None = None
    seconds: float | None = None

    @property
    def is_usable(self) -> bool:
        """Whether it is complete and keeps to the constraints."""
        return self.state == "complete" and all(excess <= 0 for excess in self.constraints.values())


class Sweep(_Model):
    """``pareto.json`` of a sweep.

    Args:
        study: Name of the study.
        objectives: What it looks for.
        trials: Its trials.
        front: Numbers of those that nothing beats.
        best: Number of the winner.
        message: The result in a line.
    """

    study: str = "sweep"
    objectives: tuple[Objective, ...] = Field(min_length=1)
    trials: tuple[Trial, ...] = ()
    front: tuple[int, ...] = ()
    best: int | None = None
    message: str = ""


def sweep_chapter(sweep: Sweep, folder: Path, best_yaml: str | None, sweep_yaml: str | None) -> Chapter:
    """Returns the chapter on a sweep.

    Args:
        sweep: What it gave.
        folder: Its folder.
        best_yaml: The winner for LightningCLI, ``None`` where there is none.
        sweep_yaml: What was asked for.
    """
    usable = [trial for trial in sweep.trials if trial.is_usable]
    blocks = Blocks()
    blocks.add("front", "Trials", *_charts(sweep), _trials_table(sweep))
    if best_yaml is not None:
        blocks.add("best", "The winner, for LightningCLI", Code(text=best_yaml, title="best.yaml"))
    refused = _unusable_table(sweep.trials)
    blocks.add("refused", "Trials without a result, and why", refused)
    asked = None if sweep_yaml is None else Code(text=sweep_yaml, title="sweep.yaml")
    command = Code(text=f"autoprec sweep {shlex.quote(str(folder / 'sweep.yaml'))}", title="Command")
    blocks.add("again", "To run it again", command, asked)
    states = [trial.state for trial in sweep.trials]
    return Chapter(
        title=f"Sweep: {sweep.study}",
        kind="sweep",
        folder=str(folder),
        headline=_headline(sweep),
        tone="good" if sweep.best is not None else "bad",
        facts=(
            ("trials", f"{len(sweep.trials):,}"),
            ("usable", f"{len(usable):,}"),
            ("pruned", f"{states.count('pruned'):,}"),
            ("failed", f"{states.count('failed'):,}"),
            ("objectives", ", ".join(f"{each.direction} {each.name}" for each in sweep.objectives)),
        ),
        sections=tuple(blocks.sections),
    )


def _headline(sweep: Sweep) -> str:
    if sweep.message:
        return sweep.message[:1].upper() + sweep.message[1:].rstrip(".") + "."
    if sweep.best is None:
        return f"No usable trial among {len(sweep.trials)}."
    return f"Best: trial {sweep.best} of {count(len(sweep.trials), 'trial')}."


def _charts(sweep: Sweep) -> tuple[Chart, ...]:
    usable = [trial for trial in sweep.trials if trial.is_usable and all(map(math.isfinite, trial.values))]
    if not usable:
        return ()
    names = [objective.name for objective in sweep.objectives]
    if len(names) == 1:
        return (_chart(sweep, usable, None, 0),)
    return tuple(_chart(sweep, usable, 0, other) for other in range(1, len(names)))


def _chart(sweep: Sweep, trials: Sequence[Trial], across: int | None, up: int) -> Chart:
    names = [objective.name for objective in sweep.objectives]
    groups: dict[str, list[tuple[float, float, str]]] = {"trial": [], "on the front": [], "static": [], "winner": []}
    for trial in trials:
        if len(trial.values) <= up:
            continue
        x = float(trial.number) if across is None else trial.values[across]
        group = (
            "winner"
            if trial.number == sweep.best
            else "static"
            if not trial.arm.startswith("autoprec")
            else "on the front"
            if trial.number in sweep.front
            else "trial"
        )
        groups[group].append((x, trial.values[up], f"trial {trial.number}, {trial.arm}: {_params(trial.params)}"))
    x_title = "trial" if across is None else names[across]
    title = f"{names[up]} of all trials" if across is None else f"{names[up]} against {names[across]}"
    return Chart(title=title, figure=scatter(groups, x_title, names[up]), height=380, is_wide=True)


def _params(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {_value(value)}" for name, value in params.items()) or "no parameters"


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _trials_table(sweep: Sweep) -> Table:
    names = [objective.name for objective in sweep.objectives]
    best = {
        index: (min if objective.direction == "minimize" else max)(
            (trial.values[index] for trial in sweep.trials if trial.is_usable and len(trial.values) > index),
            default=math.nan,
        )
        for index, objective in enumerate(sweep.objectives)
    }
    rows = []
    for trial in [each for each in sweep.trials if each.values][:_MOST_TRIALS]:
        mark = "winner" if trial.number == sweep.best else "on the front" if trial.number in sweep.front else ""
        values = [
            Cell(text=number(value), is_best=trial.is_usable and value == best.get(index))
            for index, value in enumerate(trial.values[: len(names)])
        ]
        values += [Cell(text=NOTHING)] * (len(names) - len(values))
        broken = "" if trial.is_usable else "breaks a constraint"
        rows.append(
            (
                Cell(text=f"{trial.number}", detail=mark or broken),
                Cell(text=trial.baseline or trial.arm),
                *values,
                Cell(text=seconds_text(trial.seconds)),
                Cell(text=_params(trial.params)),
            )
        )
    return Table(
        columns=("trial", "trained with", *names, "took", "parameters"), rows=tuple(rows), left=(1, len(names) + 3)
    )


def _unusable_table(trials: Sequence[Trial]) -> Table | None:
    rows = tuple(
        (Cell(text=f"{trial.number}"), Cell(text=trial.arm), Cell(text=trial.state), Cell(text=trial.reason or NOTHING))
        for trial in trials
        if trial.state != "complete"
    )
    return Table(columns=("trial", "trained with", "state", "why"), rows=rows, left=(1, 2, 3)) if rows else None
