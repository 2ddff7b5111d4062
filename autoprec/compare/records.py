"""What a comparison gave, as plain data: runs with their steps and evaluations, to and from JSON.

Everything that judges or shows a comparison reads these classes; nothing here trains or measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoprec.json_files import encoded

VERSION = 1
"""Version of the JSON document."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step as the loop made it.

    Args:
        index: Count of steps before it.
        step_ms: Milliseconds from one batch to the next, data loading and callbacks included.
        loss: Training loss; ``None`` where the module returns none (manual optimization).
    """

    index: int
    step_ms: float
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics at one point of a run.

    Args:
        step: Steps trained before it.
        elapsed_s: Seconds spent in these steps; waiting and evaluating do not count.
        metrics: Value by name.
    """

    step: int
    elapsed_s: float
    metrics: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training with one arm (way of training) and one seed.

    Args:
        arm: Name of the arm.
        seed: Seed of weights, order of samples and random layers.
        steps: Every step.
        evaluations: Metrics along the run, the last at its end.
        peak_bytes: Most memory that the run held, ``None`` where the system does not tell.
        energy_j: Joules spent in the steps, ``None`` where nothing counts them.
        energy_source: What counted or estimated them.
        skipped_steps: Optimizer steps not taken because a gradient was not finite.
        formats: Format of each unit at the end; empty for a static run.
        fidelity: How far the outputs on held-out data are from those of fp32 with the same seed.
        final_metric: The metric of the comparison at the end.
        error: Why the run ended early, ``None`` where it did not.
        environment: What the run depended on besides its settings.
    """

    arm: str
    seed: int
    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    peak_bytes: int | None = None
    energy_j: float | None = None
    energy_source: str | None = None
    skipped_steps: int = 0
    formats: dict[str, str] = field(default_factory=dict)
    fidelity: dict[str, float] | None = None
    final_metric: float | None = None
    error: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold; numbers that are not finite become strings that ``float`` reads."""
        document: dict[str, Any] = encoded(asdict(self))
        return document

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Run:
        """Returns the run that ``to_dict`` wrote.

        Args:
            document: The decoded JSON.

        Raises:
            ValueError: If a field is missing, unknown or of another kind.
        """
        try:
            return cls(
                **{
                    **document,
                    "steps": tuple(_step(entry) for entry in document["steps"]),
                    "evaluations": tuple(_evaluation(entry) for entry in document["evaluations"]),
                    "energy_j": _number(document["energy_j"]),
                    "fidelity": None if document["fidelity"] is None else _numbers(document["fidelity"]),
                    "final_metric": _number(document["final_metric"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is not a run that a comparison wrote: {error!r}.") from error


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All runs of one task.

    Args:
        task: Name of the task.
        runs: The runs, in any order.
        settings: What was asked for, as JSON can hold it.
    """

    task: str
    runs: tuple[Run, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON can hold, with the version of the layout."""
        runs = [run.to_dict() for run in self.runs]
        return {"version": VERSION, "task": self.task, "settings": encoded(self.settings), "runs": runs}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Comparison:
        """Returns the comparison that ``to_dict`` wrote.

        Args:
            document: The decoded JSON.

        Raises:
            ValueError: If it is something else, or of another version.
        """
        if not isinstance(document, Mapping) or document.get("version") != VERSION:
            found = document.get("version") if isinstance(document, Mapping) else type(document).__qualname__
            raise ValueError(
                f"This is not a comparison of version {VERSION}: found {found!r}. Run `autoprec compare` again."
            )
        missing = {"task", "runs", "settings"} - set(document)
        if missing:
            raise ValueError(f"This is not a comparison: {sorted(missing)} are missing.")
        runs = tuple(Run.from_dict(run) for run in document["runs"])
        return cls(task=document["task"], runs=runs, settings=dict(document["settings"]))


def _step(entry: Mapping[str, Any]) -> Step:
    return Step(index=int(entry["index"]), step_ms=float(entry["step_ms"]), loss=_number(entry["loss"]))


def _evaluation(entry: Mapping[str, Any]) -> Evaluation:
    return Evaluation(step=int(entry["step"]), elapsed_s=float(entry["elapsed_s"]), metrics=_numbers(entry["metrics"]))


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
