"""The record of every decision.

What lives here: one decision as data, and the list of them with its two forms on disk, JSON Lines for people and
primitives for checkpoints. What does not: who decides, and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

Knob: TypeAlias = Literal[
    "precision", "loss_scale", "batch_size", "clip", "accumulate", "learning_rate", "policy", "rollback"
]
Outcome: TypeAlias = Literal["applied", "refused", "deferred", "limited"]
Value: TypeAlias = str | float | int | None

_NUMERIC_KNOBS = frozenset(get_args(Knob)) - {"precision", "policy"}
_VALUE_FIELDS = ("before", "requested", "applied")
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Decision:
    """What was asked of one knob at one boundary, and what became of it.

    Args:
        step: Optimizer window before which it was decided, from 0, skipped windows included.
        knob: Knob it concerns. ``"policy"`` records a fault of the policy itself, ``"rollback"`` the guard's return to
            a copy of the run, with applied steps as values.
        unit: Unit name for the precision knob, else ``None``.
        before: Value before.
        requested: Value asked for.
        applied: Value from here on. Equal to ``before`` unless ``outcome`` is ``"applied"`` or ``"limited"``.
        outcome: ``"applied"``, ``"limited"`` (to a legal value), ``"deferred"`` (to a later boundary) or ``"refused"``.
        reason: Why, for a reader.
        recovered_at: Window in which a step was applied again, where this was the last answer to skipped steps.

    Raises:
        ValueError: If ``knob`` or ``outcome`` is none of the above.
    """

    step: int
    knob: Knob
    unit: str | None
    before: Value
    requested: Value
    applied: Value
    outcome: Outcome
    reason: str = ""
    recovered_at: int | None = None

    def __post_init__(self) -> None:
        """Validates the two closed sets."""
        for name, allowed in (("knob", get_args(Knob)), ("outcome", get_args(Outcome))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Passed `Decision({name}={getattr(self, name)!r})`. `{name}` must be one of {sorted(allowed)}."
                )

    def to_dict(self) -> dict[str, Value]:
        """Returns the fields as a dict of primitives. Non-finite numbers stay floats."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decision:
        """Makes a decision from what ``to_dict`` returned, or from the same read back from JSON.

        Args:
            data: The fields by name. In a numeric knob ``"inf"``, ``"-inf"`` and ``"nan"`` are read as numbers.

        Raises:
            ValueError: If a field is missing or unknown.
        """
        names = {f.name for f in fields(cls)}
        if set(data) != names:
            raise ValueError(
                f"Passed `Decision.from_dict(...)` with the keys {sorted(map(str, data))}."
                f" The keys must be {sorted(names)}."
            )
        values = dict(data)
        if values["knob"] in _NUMERIC_KNOBS:
            values |= {name: _NON_FINITE.get(values[name], values[name]) for name in _VALUE_FIELDS}
        return cls(**values)


class History(list[Decision]):
    """Every decision of a run, oldest first.

    Attributes:
        restored: How many of them come from a checkpoint.
    """

    restored: int = 0

    def last(self, knob: Knob | None = None, unit: str | None = None) -> Decision | None:
        """Returns the newest decision, or ``None`` if there is none.

        Args:
            knob: Considers this knob only.
            unit: Considers this unit only.
        """
        matches = (d for d in reversed(self) if (knob is None or d.knob == knob) and (unit is None or d.unit == unit))
        return next(matches, None)

    def note_recovery(self, since: int, at: int) -> None:
        """Notes on the last answer to a run of skipped steps that it was followed by an applied one.

        Args:
            since: Window of the first skipped step.
            at: Window of the applied step.
        """
        answers = [
            index for index, d in enumerate(self) if since < d.step <= at and d.outcome in ("applied", "limited")
        ]
        newest = max((self[index].step for index in answers), default=None)
        for index in answers:
            if self[index].step == newest:
                self[index] = replace(self[index], recovered_at=at)

    def to_jsonl(self, path: str | Path) -> None:
        """Writes one JSON object a line. Non-finite numbers are written as strings, which keeps the JSON standard.

        Args:
            path: File to write. Replaced if it exists, its folder is made if it does not.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({k: _to_json(v) for k, v in d.to_dict().items()}, allow_nan=False) for d in self)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    @classmethod
    def from_jsonl(cls, path: str | Path) -> History:
        """Reads what ``to_jsonl`` wrote.

        Args:
            path: File to read.

        Raises:
            ValueError: If a line is not a decision. The message names the file and the line.
        """
        history = cls()
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
            try:
                history.append(Decision.from_dict(json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"Passed `History.from_jsonl({str(path)!r})`. Line {number} is not a decision: {error}"
                ) from error
        return history

    def state(self) -> list[dict[str, Value]]:
        """Returns primitives only, for a checkpoint that loads with ``weights_only=True``."""
        return [decision.to_dict() for decision in self]

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Replaces the content by what ``state`` returned.

        Args:
            state: Decisions as dicts.
        """
        self[:] = [Decision.from_dict(data) for data in state]
        self.restored = len(self)


def _to_json(value: Value) -> Value:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
