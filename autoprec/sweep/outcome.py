"""How a trial ended, as a file and in the study. The file comes first, so that no death of a process loses a trial."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from optuna import Study, Trial
from optuna.artifacts import FileSystemArtifactStore, get_all_artifact_meta, upload_artifact
from optuna.trial import TrialState

from autoprec.json_files import encoded, read_json, write_json
from autoprec.sweep.config import SweepConfig
from autoprec.sweep.measure import LOG_FILE, MAP_FILE, Measured, UnusableError

RESULT_FILE = "result.json"
REASON = "reason"
"""User attribute of trials without figures; a trial that failed without one was lost with its worker."""
FIGURES = "figures"
"""User attribute with all figures of a trial."""
_STATES = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Args:
        state: ``complete``; ``pruned`` if it was ended early or its values are of no use; ``failed`` if it broke down.
        values: Objectives of a complete trial, in their order.
        constraints: How far it is beyond each constraint, by name.
        reason: Why it is not complete.
        figures: All figures, by name.
        attributes: What else is known: figures of each seed, formats, device and versions.
    """

    state: Literal["complete", "pruned", "failed"]
    values: tuple[float, ...] = ()
    constraints: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)


def complete(config: SweepConfig, measured: Measured) -> Outcome:
    """Returns the outcome of a trial that was trained to its end.

    Args:
        config: The sweep.
        measured: What it gave.

    Raises:
        UnusableError: If an objective or a constraint has no finite value.
    """
    wanted = [*(objective.name for objective in config.objectives), *(each.name for each in config.constraints)]
    for name in wanted:
        if name not in measured.figures:
            known = ", ".join(sorted(measured.figures))
            raise UnusableError(f"there is no figure `{name}`; the runs gave {known}")
        if not math.isfinite(measured.figures[name]):
            raise UnusableError(f"diverged: {name} is {measured.figures[name]}")
    constraints: dict[str, float] = {}
    for each in config.constraints:
        constraints[each.name] = max(each.excess(measured.figures[each.name]), constraints.get(each.name, -math.inf))
    attributes = {"by_seed": measured.by_seed, "formats": measured.formats, "environment": measured.environment}
    values = tuple(measured.figures[objective.name] for objective in config.objectives)
    return Outcome("complete", values, constraints, None, measured.figures, attributes)


def write_outcome(outcome: Outcome, folder: Path, mark: str) -> None:
    """Writes an outcome into the folder of its trial.

    Args:
        outcome: The outcome.
        folder: The folder.
        mark: What tells the trial from one of another study with the same number.
    """
    write_json(folder / RESULT_FILE, {"mark": mark, **encoded(asdict(outcome))}, allow_nan=False)


def read_outcome(folder: Path, mark: str) -> Outcome | None:
    """Returns the outcome that the folder of a trial holds, ``None`` where it holds none of this trial.

    Args:
        folder: The folder.
        mark: As it was written with.
    """
    document = read_json(folder / RESULT_FILE)
    if not isinstance(document, dict) or document.pop("mark", None) != mark:
        return None
    try:
        document["figures"] = {name: float(value) for name, value in document["figures"].items()}
        return Outcome(**{**document, "values": tuple(document["values"])})
    except (TypeError, KeyError, AttributeError, ValueError):
        return None


def tell(study: Study, trial: Trial, outcome: Outcome, folder: Path, artifacts: Path) -> None:
    """Ends a trial in the study as its outcome says, and attaches its files.

    Args:
        study: The study.
        trial: The trial, which runs.
        outcome: How it ended.
        folder: Folder of the trial.
        artifacts: Folder of the artifacts.
    """
    # `failed` needs its reason before all else: without one the trial would count as lost
    if outcome.reason is not None:
        trial.set_user_attr(REASON, outcome.reason)
    for name, value in {FIGURES: outcome.figures, **outcome.attributes}.items():
        trial.set_user_attr(name, encoded(value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a trial that is told once more has its constraints
        for name, excess in outcome.constraints.items():
            trial.set_constraint(name, excess)
    _attach(trial, folder, artifacts, study)
    values = list(outcome.values) if outcome.state == "complete" else None
    study.tell(trial, values, state=_STATES[outcome.state])


def _attach(trial: Trial, folder: Path, artifacts: Path, study: Study) -> None:
    artifacts.mkdir(parents=True, exist_ok=True)
    store = FileSystemArtifactStore(artifacts)
    known = {one.filename for one in get_all_artifact_meta(trial, storage=study._storage)}  # of one that was cut short
    for name in (MAP_FILE, RESULT_FILE, LOG_FILE):
        if name not in known and (folder / name).is_file():
            upload_artifact(artifact_store=store, file_path=str(folder / name), study_or_trial=trial)
