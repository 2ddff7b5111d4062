"""The record of a run on disk: what it says, and how it is read.

A folder holds ``run.json`` (what was known at the start, costs, and how the run ended), ``history.jsonl`` (every
decision) and ``steps.jsonl`` (one line for each decision point). All are readable while the run is under way and after
it was killed: a last line that is cut off is left out. What lives here: data and reading. What does not: writing
(``record_writer``) and reports (``report``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from autoprec.history import Decision
from autoprec.progress_reading import RunInfo, RunTotals, StepNumbers

VERSION: Final = 1
RUN, HISTORY, STEPS = "run.json", "history.jsonl", "steps.jsonl"
UNOFFERED = "not offered to policies"
"""How the reason of a format begins that policies may not choose."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecordedCost(_Model):
    """What a unit costs in a format.

    Args:
        ms: Forward, backward and casts of all its calls in a step.
        activation_bytes: What its calls keep for the backward.
        copy_bytes: Low-precision copies of its weights.
        implementation: The fastest one whose error is small enough.
        error: Relative error against float64.
    """

    ms: float
    activation_bytes: int = 0
    copy_bytes: int = 0
    implementation: str = "default"
    error: float = 0.0


@pydantic_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RecordedStep(StepNumbers):
    """The run at one decision point.

    ``elapsed_s`` counts on over resumed runs.

    Args:
        formats: Format of the units whose format changed since the last line.
        overflows: Outputs outside their format's range since the last line, by unit, where there were any.
    """

    global_step: int = 0
    epoch: int = 0
    elapsed_s: float = 0.0
    formats: dict[str, str] = field(default_factory=dict)
    overflows: dict[str, int] = field(default_factory=dict)


_STEP = TypeAdapter(RecordedStep)


class RunFile(_Model):
    """``run.json``.

    Args:
        version: Of the layout.
        status: ``"running"`` until the run has ended; a run that was killed stays so.
        info: What was known when training began, in a resumed run the first time.
        resumed_at: Windows at which the run was resumed.
        costs: What formats cost, by unit and format, where that was measured.
        totals: How the run ended, ``None`` before that.
    """

    version: Literal[1] = VERSION
    status: Literal["running", "finished", "interrupted", "failed"]
    info: RunInfo
    resumed_at: tuple[int, ...] = ()
    costs: dict[str, dict[str, RecordedCost]] = Field(default_factory=dict)
    totals: RunTotals | None = None


class RunRecord(BaseModel):
    """A run as its folder tells it.

    Args:
        folder: The folder.
        run: ``run.json``.
        decisions: Every decision, oldest first.
        steps: One entry for each decision point, oldest first; what a resumed run has done again is there once.
        damaged_lines: Lines that could not be read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    folder: Path
    run: RunFile
    decisions: tuple[Decision, ...] = ()
    steps: tuple[RecordedStep, ...] = ()
    damaged_lines: int = 0

    @property
    def info(self) -> RunInfo:
        """What was known when training began."""
        return self.run.info

    @property
    def totals(self) -> RunTotals | None:
        """How the run ended, ``None`` if it was killed or is under way."""
        return self.run.totals

    @cached_property
    def formats(self) -> dict[str, str]:
        """Format of every unit at the end, or at the last decision point that was written."""
        if self.totals is not None:
            return dict(self.totals.formats)
        formats = dict(self.info.formats)
        for step in self.steps:
            formats |= step.formats
        return formats

    @cached_property
    def refused(self) -> tuple[Decision, ...]:
        """What was asked for and not done."""
        return tuple(decision for decision in self.decisions if decision.outcome == "refused")

    @property
    def applied(self) -> int:
        """Optimizer steps taken, as far as is known."""
        return self.totals.applied if self.totals is not None else self.steps[-1].applied if self.steps else 0

    @property
    def skipped(self) -> int:
        """Optimizer steps not taken because a gradient was not finite, as far as is known."""
        return self.totals.skipped if self.totals is not None else self.steps[-1].skipped if self.steps else 0

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, as far as is known."""
        return self.totals.wall_s if self.totals is not None else self.steps[-1].elapsed_s if self.steps else 0.0

    @property
    def how_it_ended(self) -> str:
        """How the run ended, in words."""
        totals = self.totals
        if totals is None:
            return "did not say that it ended: it is under way, or it was killed"
        why = f" ({totals.error})" if totals.error else ""
        return {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}[totals.ended] + why


class RecordError(ValueError):
    """A folder holds no record that can be read; the message says why."""


def is_record(folder: Path) -> bool:
    """Whether a folder holds a record of a run.

    Args:
        folder: The folder.
    """
    return (folder / RUN).is_file()


def read_record(folder: str | Path) -> RunRecord:
    """Reads the record of a run, whether it has ended or not.

    Args:
        folder: The folder.

    Raises:
        RecordError: If there is none, or it is damaged or of another version.
    """
    folder = Path(folder)
    if not is_record(folder):
        raise RecordError(
            f"Passed `read_record({str(folder)!r})`. There is no `{RUN}` in it. A record is written by"
            " `AutoPrecisionCallback(record=True)`."
        )
    run = _read_run(folder / RUN)
    decisions, damaged_decisions = _lines(folder / HISTORY, _decision)
    steps, damaged_steps = _lines(folder / STEPS, _STEP.validate_python)
    if run.totals is not None:  # a resumed run may end before the place that it had come to before
        steps = [step for step in steps if step.window <= run.totals.window]
    return RunRecord(
        folder=folder,
        run=run,
        decisions=tuple(decisions),
        steps=tuple(without_repeats(steps)),
        damaged_lines=damaged_decisions + damaged_steps,
    )


def without_repeats(steps: list[RecordedStep]) -> list[RecordedStep]:
    """Returns the entries without those that a resumed run has made again.

    Args:
        steps: Entries in the order in which they were written.
    """
    kept: list[RecordedStep] = []
    for step in steps:
        while kept and kept[-1].window >= step.window:
            kept.pop()
        kept.append(step)
    return kept


def _read_run(path: Path) -> RunFile:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"`{path}` cannot be read: {error}.") from error
    version = document.get("version") if isinstance(document, Mapping) else None
    if version != VERSION:
        raise RecordError(
            f"`{path}` has version {version!r}; this autoprec reads version {VERSION}. Read it with the autoprec that"
            " wrote it."
        )
    try:
        return RunFile.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise RecordError(f"`{path}` is no record of a run: {where}: {first['msg']}.") from error


def _decision(data: Any) -> Decision:
    decision = Decision.from_dict(data)
    values = (decision.before, decision.requested, decision.applied)
    is_whole = (
        isinstance(decision.step, int)
        and isinstance(decision.reason, str)
        and isinstance(decision.unit, (str, type(None)))
        and all(isinstance(value, (str, int, float, type(None))) for value in values)
    )
    if not is_whole:
        raise TypeError("a field of another type")
    return decision


def _lines(path: Path, parse: Any) -> tuple[list[Any], int]:
    found, damaged = [], 0
    for line in _raw_lines(path):
        try:
            found.append(parse(json.loads(line)))
        except (ValueError, TypeError, RecursionError):  # of a process that was killed, or a disk that was full
            damaged += 1
    return found, damaged


def _raw_lines(path: Path) -> Iterator[str]:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"`{path}` cannot be read: {error.strerror}.") from error
    yield from (line for line in text.split("\n") if line.strip())
