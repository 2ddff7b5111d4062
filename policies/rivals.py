"""Everything that a policy is compared with. All have the same knobs: formats, loss scale, batch size and clip.

What lives here: what each rival is and how it is played. What does not: how good they are (``evaluate``).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from autoprec.envs.baselines import Choose, Constant, RandomMoves, Scores, play
from autoprec.envs.proxies import Task
from autoprec.envs.twins import Twin
from autoprec.json_files import read_json
from autoprec.policies.play import Recording, play_policy
from autoprec.policies.rule_rival import RuleKnobs, RulePolicy
from autoprec.table import TableSettings

Tasks = Sequence[tuple[Task, Twin]]

CLIP = 1.0
"""The clip of all that do not choose one, in units of the median norm: the table's."""
TUNED = Path(__file__).resolve().parents[1] / "docs" / "results" / "tuned_table.json"
"""Settings of the table that a black-box search has found; a checkout has them, an installed package does not."""
POLICY_FILES = ("policy.json", "policy.safetensors")

PLAIN = TableSettings(schedule=(), optimism=None)
WITH_SCHEDULE = TableSettings(optimism=None)
LEARNT_COSTS = TableSettings()


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A way to set the knobs.

    Args:
        name: Short name, for files and results.
        description: What it is, for tables.
        plays: A function that writes the knobs of a simulation before each window; settings of the table, whose
            proposals are accepted; thresholds of the rule; or the folder of a policy.
        guard: Whether the guard raises the unit that overflowed first. Functions have none.
        identity: What its results depend on, besides code. By default what ``plays`` prints, or its files.
    """

    name: str
    description: str
    plays: Choose | TableSettings | RuleKnobs | Path
    guard: bool = True
    identity: str = ""

    def digest(self) -> str:
        """Returns a short name of everything that its results depend on, besides code and tasks."""
        said = self.identity or repr(self.plays)
        if isinstance(self.plays, Path):
            said = "".join(hashlib.sha256((self.plays / name).read_bytes()).hexdigest() for name in POLICY_FILES)
        return hashlib.sha256(f"{said} guard={self.guard}".encode()).hexdigest()[:16]

    def play(self, tasks: Tasks) -> tuple[Scores, Recording | None]:
        """Plays each task once.

        Args:
            tasks: Tasks with their twins.

        Returns:
            Scores in the order of the tasks, and what a policy did.
        """
        if isinstance(self.plays, Path):
            return _play_folder(self.plays, tasks, self.guard)
        if isinstance(self.plays, TableSettings):
            return play_policy(tasks, None, self.plays, guard=self.guard), None
        if isinstance(self.plays, RuleKnobs):
            return play_policy(tasks, RulePolicy(self.plays), mode="ladder", guard=self.guard), None
        # a copy, because some remember where they are
        return play(tasks, copy.deepcopy(self.plays)), None


def rivals(tuned: Path = TUNED) -> list[Rival]:
    """Returns all rivals.

    Args:
        tuned: File with settings that were found by black-box search; those that it does not have are left out.
    """
    return [*static_rivals(), Rival(name="rule", description="rule", plays=RuleKnobs()), *_tables(tuned)]


def static_rivals() -> list[Rival]:
    """Returns the rivals that look at nothing."""

    def constant(name: str, description: str, format_name: str, clip: float = CLIP) -> Rival:
        return Rival(name=name, description=description, plays=Constant(format=format_name, clip=clip))

    return [
        constant("fp32", "fp32, no clip", "fp32", np.inf),
        constant("fp32_clip", "fp32 + clip", "fp32"),
        constant("bf16_clip", "bf16 + clip", "bf16"),
        constant("gradscaler_clip", "fp16 + GradScaler + clip", "fp16"),
        # the narrowest format of each ladder goes by the name of the narrowest of all
        constant("lowest_clip", "lowest + GradScaler + clip", "int4"),
        Rival(name="random", description="random moves", plays=RandomMoves(0), identity="RandomMoves(0)"),
    ]


def policy_rival(folder: Path, *, guard: bool = True) -> Rival:
    """Returns a policy as something that can be played.

    Args:
        folder: Its folder.
        guard: Whether the guard stands behind it.

    Raises:
        FileNotFoundError: If the folder has no policy.
    """
    missing = [name for name in POLICY_FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"Passed the policy folder '{folder}', which has no {' and no '.join(missing)}. `autoprec train-policy`"
            " makes such folders."
        )
    return Rival(name="policy", description="policy", plays=folder, guard=guard)


def table_settings(document: Mapping[str, Any]) -> TableSettings:
    """Returns settings of the table from JSON, which has no tuples and no infinity.

    Args:
        document: Fields of ``TableSettings``; those that are missing have their defaults.

    Raises:
        ValueError: If a field is not known.
    """
    known = [field.name for field in fields(TableSettings)]
    unknown = sorted(set(document) - set(known))
    if unknown:
        raise ValueError(f"Passed table settings with {unknown}. Settings are {known}.")
    changes = dict(document)
    if "schedule" in changes:
        changes["schedule"] = tuple(changes["schedule"] or ())
    if "clip" in changes:
        changes["clip"] = float(changes["clip"])
    return TableSettings(**changes)


def _tables(tuned: Path) -> list[Rival]:
    tables = [
        Rival(name="table", description="table", plays=PLAIN),
        Rival(name="table_schedule", description="table + schedule", plays=WITH_SCHEDULE),
        Rival(name="table_learnt", description="table + schedule + learnt costs", plays=LEARNT_COSTS),
    ]
    found = read_json(tuned) or {}
    names = {"plain": ("table_tuned", "table, tuned"), "schedule": ("table_schedule_tuned", "table + schedule, tuned")}
    for key, (name, description) in names.items():
        if key in found:
            plays = table_settings(found[key]["settings"])
            tables.append(Rival(name=name, description=description, plays=plays))
    return tables


def _play_folder(folder: Path, tasks: Tasks, guard: bool) -> tuple[Scores, Recording]:
    from autoprec.policies.policy_file import load_policy

    network, card = load_policy(folder)
    settings = table_settings(card.table)
    return play_policy(tasks, network, settings, mode=card.mode, guard=guard, record=True)
