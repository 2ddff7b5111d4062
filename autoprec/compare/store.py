"""The folder of a comparison: finished runs as files, so that an interrupted comparison goes on where it was.

``settings.json`` holds what the runs depend on, ``runs/`` one file for each finished run, ``outputs/`` the outputs of
the trained models, ``records/`` the record of each run with autoprec (``run_record``), ``logs/`` what runs printed,
``work/`` checkpoints and logs of runs that are under way.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoprec.compare.records import Run
from autoprec.compare.session import digests
from autoprec.json_files import read_json, write_json

_PARTS = (
    "settings.json",
    "plan.json",
    "comparison.json",
    "comparison.png",
    "runs",
    "outputs",
    "records",
    "logs",
    "work",
    "wandb",
    "wandb.json",
)


class StoreError(RuntimeError):
    """The folder of a comparison holds something else; the message says what to do."""


@dataclass(frozen=True)
class Stored:
    """A finished run.

    Args:
        run: The run.
        extra: What the run said besides: ``notes``, ``changes``, ``sources``, ``batches``, ``fits``, ``first_change``.
    """

    run: Run
    extra: dict[str, Any] = field(default_factory=dict)


class Store:
    """Finished runs in a folder.

    Args:
        folder: The folder, made if it does not exist.
        identity: What runs depend on, as JSON can hold it.
        fresh: Forget what is there.

    Raises:
        StoreError: If the folder holds runs of another target or other settings, or cannot be written.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], fresh: bool = False) -> None:
        self.folder = folder
        self.runs: dict[tuple[str, int], Stored] = {}
        self.damaged: list[Path] = []
        try:
            if fresh:
                self._forget()
            for part in ("runs", "outputs", "logs", "work"):
                (folder / part).mkdir(parents=True, exist_ok=True)
            self._check(identity)
        except OSError as error:
            raise StoreError(
                f"Cannot write into `{folder}`: {error.strerror}. Choose another folder by `--out`."
            ) from error
        self._read()

    def add(self, stored: Stored) -> None:
        """Writes a finished run, whole or not at all.

        Args:
            stored: The run.
        """
        self.runs[stored.run.arm, stored.run.seed] = stored
        path = self.folder / "runs" / f"{slug(stored.run.arm, stored.run.seed)}.json"
        write_json(path, {"run": stored.run.to_dict(), "extra": stored.extra}, allow_nan=False)

    def path(self, part: str, arm: str, seed: int, suffix: str = "") -> Path:
        """Returns the path of a file or folder of a run.

        Args:
            part: ``outputs``, ``records``, ``logs`` or ``work``.
            arm: Name of the arm.
            seed: The seed.
            suffix: End of the name.
        """
        return self.folder.resolve() / part / f"{slug(arm, seed)}{suffix}"

    def new_record(self, arm: str, seed: int) -> Path:
        """Returns the path of the record of a run that is to begin, without one that an interrupted run has left.

        Args:
            arm: Name of the arm.
            seed: The seed.
        """
        path = self.path("records", arm, seed)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def clear_work(self, arm: str, seed: int) -> None:
        """Removes checkpoints and logs of a run.

        Args:
            arm: Name of the arm.
            seed: The seed.
        """
        shutil.rmtree(self.path("work", arm, seed), ignore_errors=True)

    def release(self) -> None:
        """Lets the next comparison have the folder, whatever its settings, if nothing here is worth keeping.

        ``logs/`` stays: it says why there is nothing.
        """
        if any(stored.run.steps for stored in self.runs.values()):
            return
        for part in ("settings.json", "plan.json"):
            (self.folder / part).unlink(missing_ok=True)
        for part in ("runs", "outputs", "records", "work"):
            shutil.rmtree(self.folder / part, ignore_errors=True)

    @property
    def plan(self) -> dict[str, int]:
        """Steps of every run and of a turn, where an earlier part of the comparison has settled them."""
        found = read_json(self.folder / "plan.json")
        return found if isinstance(found, dict) else {}

    @plan.setter
    def plan(self, plan: dict[str, int]) -> None:
        write_json(self.folder / "plan.json", plan, allow_nan=False)

    def _forget(self) -> None:
        if not (self.folder / "settings.json").exists():
            return
        for part in _PARTS:
            path = self.folder / part
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _check(self, identity: dict[str, Any]) -> None:
        path = self.folder / "settings.json"
        found = read_json(path)
        if found is None:
            write_json(path, identity, allow_nan=False)
            return
        other = sorted(name for name in {*found, *identity} if found.get(name) != identity.get(name))
        if other:
            listed = "; ".join(
                f"{name} was {_said(found.get(name))} and is {_said(identity.get(name))}" for name in other
            )
            raise StoreError(
                f"`{self.folder}` holds a comparison with other settings: {listed}. Pass `--fresh` to forget it, or"
                " another folder by `--out`."
            )

    def _read(self) -> None:
        for path in sorted((self.folder / "runs").glob("*.json")):
            try:
                document = json.loads(path.read_text())
                stored = Stored(Run.from_dict(document["run"]), dict(document["extra"]))
            except (OSError, ValueError, KeyError, TypeError):
                self.damaged.append(path)
                continue
            self.runs[stored.run.arm, stored.run.seed] = stored

    def check_sources(self) -> None:
        """Refuses runs of files that have changed since.

        Raises:
            StoreError: If a file of the target, or a module of the user's that it loads, is another one now.
        """
        before: dict[str, str] = {}
        for stored in self.runs.values():
            before |= stored.extra.get("sources", {})
        now = digests([Path(file) for file in before])
        changed = sorted(file for file in before if before[file] != now[file])
        if changed:
            raise StoreError(
                f"{', '.join(f'`{file}`' for file in changed)} changed since the {len(self.runs)} stored runs in"
                f" `{self.folder}`, which would be compared with runs of the new code. Pass `--fresh` to forget them,"
                " or another folder by `--out`."
            )


def _said(value: Any) -> str:
    return "not set" if value is None else repr(value)


def slug(arm: str, seed: int) -> str:
    """Returns a file name for a run.

    Args:
        arm: Name of the arm.
        seed: The seed.
    """
    plain = re.sub(r"[^A-Za-z0-9.@_-]+", "-", arm)[-60:]
    mark = "" if plain == arm else "-" + hashlib.sha256(arm.encode()).hexdigest()[:6]
    return f"{plain}{mark}-seed{seed}"
