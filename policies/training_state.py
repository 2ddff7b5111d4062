"""What a training has come to at the end of a segment: enough to go on from, in one file of primitives and tensors."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoprec.encoding import FEATURES, LIMIT
from autoprec.json_files import read_json, write_json, write_whole
from autoprec.policies.policy_file import CARD_FILE, WEIGHTS_FILE
from autoprec.policies.train_settings import SettingsError, TrainSettings

CHECKPOINT_FILE = "checkpoint.pt"
SETTINGS_FILE = "settings.json"
RESULT_FILE = "training.json"
TWIN_FILE = "twin.json"
VERSION = 1
_FILES = (CHECKPOINT_FILE, SETTINGS_FILE, RESULT_FILE, TWIN_FILE, CARD_FILE, WEIGHTS_FILE)


@dataclass(kw_only=True)
class TrainingState:
    """Where a training stands. Random generators are not in it: each segment begins with seeds of its own.

    Attributes:
        rollouts: Rollouts that were learnt from.
        decisions: Decisions of runs in them.
        policy: State of the policy of stable-baselines3.
        optimizer: State of its optimizer.
        low: Least value of each feature so far.
        high: Largest value.
        best: State of the network with the best validation, with the training range that it had then.
        best_at: Place of that validation in ``validations``.
        validations: One for each time the policy was validated: ``decisions``, ``score``, ``scores`` and so on.
        metrics: What stable-baselines3 logged, for each rollout.
        seconds: Time that was spent, over all sittings.
        sittings: How often the training was started.
    """

    rollouts: int = 0
    decisions: int = 0
    policy: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    low: Tensor = field(default_factory=lambda: torch.full((len(FEATURES),), LIMIT))
    high: Tensor = field(default_factory=lambda: torch.full((len(FEATURES),), -LIMIT))
    best: dict[str, Tensor] = field(default_factory=dict)
    best_at: int = 0
    validations: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    sittings: int = 0

    @property
    def best_score(self) -> float:
        """Mean score of the best validation, minus infinity before the first."""
        return float(self.validations[self.best_at]["score"]) if self.validations else -float("inf")

    def check(self) -> None:
        """Checks what was read from a file.

        Raises:
            ValueError: If it is not what a training has written.
        """
        for one in fields(self):
            default, value = getattr(TrainingState(), one.name), getattr(self, one.name)
            if not isinstance(value, type(default)):
                raise ValueError(f"`{one.name}` is a `{type(value).__name__}`, not a `{type(default).__name__}`")
        if self.low.shape != (len(FEATURES),) or self.high.shape != (len(FEATURES),):
            raise ValueError("it was made for other features")
        if not self.validations or not 0 <= self.best_at < len(self.validations) or not self.policy or not self.best:
            raise ValueError("it was made before the first validation, or is incomplete")
        if self.rollouts < 0 or not all({"score", "scores"} <= one.keys() for one in self.validations):
            raise ValueError("its numbers are not those of a training")

    def widen(self, rows: Tensor) -> None:
        """Widens the training range by some rows.

        Args:
            rows: ``[N, features]``.
        """
        self.low, self.high = torch.minimum(self.low, rows.amin(dim=0)), torch.maximum(self.high, rows.amax(dim=0))

    def save(self, folder: Path) -> None:
        """Writes it whole or not at all.

        Args:
            folder: Of the training.
        """
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        content = io.BytesIO()  # torch says of a disk that is full no more than that something failed
        torch.save({"version": VERSION, **values}, content)
        write_whole(folder / CHECKPOINT_FILE, content.getvalue())


def load_state(folder: Path) -> TrainingState | None:
    """Returns where a training stands, ``None`` before its first checkpoint.

    Args:
        folder: Of the training.

    Raises:
        SettingsError: If there is a checkpoint that cannot be read.
    """
    path = folder / CHECKPOINT_FILE
    if not path.exists():
        return None
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        version = values.pop("version")
        if version != VERSION:
            raise ValueError(f"it has version {version}, this autoprec reads {VERSION}")
        state = TrainingState(**values)
        state.check()
        return state
    except Exception as error:  # torch.load raises about anything
        raise SettingsError(
            f"Cannot go on from `{path}`: {str(error)[:300]}. Choose another folder, or `--fresh` to begin anew."
        ) from error


def claim_folder(folder: Path, settings: TrainSettings, seed: int) -> None:
    """Makes a folder that of a training, or sees that it is.

    Args:
        folder: Made if it does not exist.
        settings: Of the training.
        seed: The same.

    Raises:
        SettingsError: If it holds a training with other settings or another seed, or files of something else.
    """
    found = read_json(folder / SETTINGS_FILE)
    held = [name for name in _FILES if os.path.lexists(folder / name)]
    if found is None and held:  # of whatever settings, or somebody else's
        raise SettingsError(
            f"Cannot go on from `{folder}`: it holds {', '.join(held)}, and no `{SETTINGS_FILE}` that can be read says"
            " what of. Choose another folder, or `--fresh` to remove these files."
        )
    if found is None:
        write_json(folder / SETTINGS_FILE, {"seed": seed, "settings": settings.model_dump(mode="json")})
        return
    advice = "Choose another folder, the same settings, or `--fresh` to forget it."
    try:
        earlier, earlier_seed = TrainSettings.model_validate(found["settings"]), found["seed"]
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"`{folder / SETTINGS_FILE}` is of another version of autoprec. {advice}") from error
    different = earlier.differences(settings) + ([f"seed: {earlier_seed} -> {seed}"] if earlier_seed != seed else [])
    if different:
        raise SettingsError(f"`{folder}` holds a training with other settings ({'; '.join(different)}). {advice}")


def forget(folder: Path) -> None:
    """Removes the files of a training, and nothing else in the folder.

    Args:
        folder: Of the training.
    """
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
        for part in folder.glob(f"{Path(name).stem}*.part"):  # of a process that was killed
            part.unlink(missing_ok=True)


def is_result(found: Any) -> bool:
    """Says whether what a file holds is the result of a training that has ended.

    Args:
        found: From ``training.json``.
    """
    if not isinstance(found, dict) or not isinstance(found.get("best"), dict):
        return False
    return isinstance(found["best"].get("score"), float) and isinstance(found.get("gain"), dict)
