"""The precision knob: the format of every unit, and what the layers are told of it.

What lives here: which format each unit has and since when, which maps a fit has been through, and handing formats to
the layers. What does not: whether a request is legal (``judgement``) and what is put on record (``knobs``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoprec.base import Base
from autoprec.formats import get_format, rank
from autoprec.implementations import DEFAULT, candidates, check
from autoprec.layers import set_format
from autoprec.tiers import tier_of
from autoprec.units import Unit


class UnitFormats:
    """State of the precision knob.

    Args:
        units: Decision units.
        base: What the Trainer had.
        choice: Formats that the user lets policies choose, ``None`` for what the device runs natively.
        is_masked: Whether the knob cannot be moved; the layers are left alone then.
        tiers: Narrowest format for policies by kind of layer or pattern of unit names.
        device_type: Where the model runs.

    Attributes:
        units: The units by name.
        current: Format by unit name, in the model's order.
        named: Units that a request or the guard has named.
        changed_at: Unit name to the applied steps at its last change.
        maps: The different maps so far.
        map_limit: How many there may be by request in a fit, ``None`` for any number. The compiler makes new code for
            each and gives up after some; the guard's own changes are always carried out.
        changes: How often formats were handed to the layers.
        is_steering: Whether any layer runs otherwise than under the Trainer's own precision.
        is_ambient_raised: Whether what runs between units was raised to fp32.
        failed_in_base: Units that the guard has raised because they could not run in the Trainer's own format.
        has_ambient_failed: Whether that goes for what runs before the first unit as well.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        base: Base,
        choice: Sequence[str] | None,
        is_masked: bool,
        tiers: Mapping[str, str] | None = None,
        device_type: str = "cpu",
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.is_masked = is_masked
        self.named: set[str] = set()
        self.map_limit: int | None = None
        self.changes = 0
        self.is_steering = False
        self.is_ambient_raised = False
        self.failed_in_base: set[str] = set()
        self.has_ambient_failed = False
        self._device_type = device_type
        self._implementations: dict[str, dict[str, str]] = {}
        self._base = base
        self._choice = choice
        self._tiers = {unit.name: tier_of(unit, tiers or {}) for unit in units}
        self.current = {unit.name: self._base_format(unit) for unit in units}
        self.changed_at = dict.fromkeys(self.units, 0)
        self.maps: set[tuple[str, ...]] = {self._map_key({})}

    # ---- what is ----

    def steerable(self, unit: Unit) -> tuple[str, ...]:
        """Formats that a policy may choose for a unit, widest first."""
        if unit.reason is not None or self.is_masked or not unit.has_matrix:
            return (self.current[unit.name],)  # vectors and normalisation stay as they are unless named
        if self._choice is not None:
            allowed = {*self._choice, "fp32"}
        else:
            # fp16 adds a loss scale and no speed where bf16 is native
            allowed = {"fp32", "bf16" if "bf16" in unit.native else "fp16"} & set(unit.native)
        tier = self._tiers[unit.name]
        if tier is not None:
            allowed = {name for name in allowed if rank(name) <= rank(tier)}
        else:
            allowed.add(self._base_format(unit))
        allowed.add(self.current[unit.name])
        return tuple(name for name in unit.legal if name in allowed)

    def below_their_tier(self) -> dict[str, str]:
        """Units that run in a narrower format than their tier, with the format of the tier."""
        return {
            name: tier
            for name, tier in self._tiers.items()
            if tier is not None and self.units[name].reason is None and rank(self.current[name]) > rank(tier)
        }

    def current_and_lower(self) -> dict[str, tuple[str, str | None]]:
        """Current format of every unit, and the next lower one that a policy may choose, by unit name."""
        formats: dict[str, tuple[str, str | None]] = {}
        for name, unit in self.units.items():
            current, legal = self.current[name], self.steerable(unit)
            index = legal.index(current)
            formats[name] = (current, legal[index + 1] if index + 1 < len(legal) else None)
        return formats

    @property
    def uses_fp16(self) -> bool:
        """Whether something runs in a format that needs a loss scale."""
        return self._base.format == "fp16" or any(get_format(name).needs_loss_scale for name in self.current.values())

    @property
    def is_all_wide(self) -> bool:
        """Whether everything runs in fp32 already, or cannot be moved."""
        if self.is_masked:
            return True
        units_wide = all(rank(self.current[u.name]) <= rank("tf32") for u in self.units.values() if u.reason is None)
        return units_wide and (self._base.format == "fp32" or self.is_ambient_raised)

    @property
    def ambient_dtype(self) -> torch.dtype:
        """Target of autocast at the start of a training step, before the first unit sets it."""
        return torch.float32 if self.is_ambient_raised else self.base_dtype

    @property
    def base_dtype(self) -> torch.dtype:
        """Target of autocast under the Trainer's own precision, float32 for none."""
        return get_format(self._base.format or "fp32").compute_dtype

    def too_wide_for_base(self) -> frozenset[str]:
        """Units that cannot be validated in the Trainer's own format: they have failed in it and are still raised."""
        return frozenset(
            name for name in self.failed_in_base if self.current[name] != self._base_format(self.units[name])
        )

    def note_failure(self, unit_name: str) -> bool:
        """Notes that a unit cannot run in the format that it has.

        Returns:
            Whether that is the Trainer's own, so that validation must not use it either.
        """
        is_base = self.current[unit_name] == self._base_format(self.units[unit_name]) != "fp32"
        if is_base:
            self.failed_in_base.add(unit_name)
        return is_base

    def is_never_called(self, unit: Unit, applied_steps: int) -> bool:
        """Whether a unit's format was in force for a step at least, and nobody called its forward.

        Args:
            unit: A unit that is not left alone.
            applied_steps: Applied optimizer steps so far.
        """
        was_in_force = self.is_steering and applied_steps > self.changed_at[unit.name]
        return was_in_force and self._is_run_explicitly(unit) and not unit.has_run

    def why_no_room(self, changes: Mapping[str, str]) -> str | None:
        """Says why changes would make one map more than the compiler keeps, ``None`` if they would not.

        Args:
            changes: Format by unit name.
        """
        is_known = self.map_limit is None or self._map_key(changes) in self.maps or len(self.maps) < self.map_limit
        if is_known:
            return None
        return f"torch.compile keeps code for {self.map_limit} maps here, and this would be another one"

    # ---- changes ----

    def change(self, changes: Mapping[str, str], applied_steps: int) -> None:
        """Sets the formats of units without asking or recording; :meth:`hand_over` makes them act.

        Args:
            changes: Format by unit name.
            applied_steps: Applied optimizer steps so far.
        """
        for name, format_name in changes.items():
            if self.current[name] != format_name:
                self.changed_at[name] = applied_steps
            self.current[name] = format_name
        self.named.update(changes)
        self.maps.add(self._map_key({}))

    def set_implementations(self, unit_name: str, choices: Mapping[str, str]) -> None:
        """Chooses how a unit runs in its formats, from the next step on; a choice waits while another format is used.

        Args:
            unit_name: Name of the unit.
            choices: Implementation by format; formats that are not named keep theirs.

        Raises:
            ValueError: If there is no such unit, or an implementation is none of its candidates.
        """
        unit = self.units.get(unit_name)
        if unit is None:
            raise ValueError(
                f"Passed `set_implementations({unit_name!r}, ...)`. There is no unit of that name; units are"
                f" {sorted(self.units)}."
            )
        for format_name, implementation in choices.items():
            check(unit.kind, format_name, self._device_type, implementation)
        kept = {**self._implementations.get(unit_name, {}), **choices}
        before, was_steering = self.implementation(unit_name), self.is_steering
        self._implementations[unit_name] = {name: each for name, each in kept.items() if each != DEFAULT}
        if self.is_masked or unit.reason is not None or self.implementation(unit_name) == before:
            return
        if was_steering:
            self.changes += 1
            self._hand_over_unit(unit)
        else:
            self.hand_over()

    def implementation(self, unit_name: str) -> str:
        """Returns how a unit runs in its current format."""
        return self._implementations.get(unit_name, {}).get(self.current[unit_name], DEFAULT)

    @property
    def implementations(self) -> dict[str, str]:
        """Units that run otherwise than torch would run them in their format, with the implementation."""
        chosen = {name: self.implementation(name) for name in self._implementations}
        return {name: each for name, each in chosen.items() if each != DEFAULT}

    def go_back(self, applied_steps: int) -> None:
        """Notes that the run has gone back: no change lies after so many applied steps."""
        for name, at in self.changed_at.items():
            self.changed_at[name] = min(at, applied_steps)

    def hand_over(self) -> None:
        """Hands the formats to the layers; leaves them untouched while they match what the Trainer would run."""
        matches = all(self.current[unit.name] == self._base_format(unit) for unit in self.units.values())
        steers_fp16 = self._base.format == "fp16"  # its range must be watched although nothing differs
        matches = matches and not self.implementations
        is_touched = not matches or self.is_ambient_raised or steers_fp16 or bool(self.named & self._norms())
        # once steered, always: the user may carry low-precision tensors over windows (hidden states, queues)
        self.is_steering = self.is_steering or is_touched
        self.changes += 1
        for unit in self.units.values():
            if unit.reason is None:
                self._hand_over_unit(unit)

    def _hand_over_unit(self, unit: Unit) -> None:
        is_plain = not self.is_steering or not self._is_run_explicitly(unit)
        set_format(unit, None if is_plain else self.current[unit.name], self.implementation(unit.name))

    def _base_format(self, unit: Unit) -> str:
        base = self._base.format or "fp32"
        return base if unit.has_matrix and base in unit.legal else "fp32"

    def _norms(self) -> set[str]:
        return {unit.name for unit in self.units.values() if not unit.has_matrix}

    def _is_run_explicitly(self, unit: Unit) -> bool:
        """Vectors and containers follow autocast unless they were named; normalisation layers always widen."""
        return unit.has_matrix or unit.kind == "norm" or unit.name in self.named

    def _map_key(self, changes: Mapping[str, str]) -> tuple[str, ...]:
        return tuple({**self.current, **changes}.values())

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {
            "formats": dict(self.current),
            "named": sorted(self.named),
            "changed_at": dict(self.changed_at),
            "ran": {
                name: [[*pair, n] for pair, n in unit.ran.items()] for name, unit in self.units.items() if unit.ran
            },
            "called": [name for name, unit in self.units.items() if unit.has_run],
            "implementations": {name: dict(each) for name, each in self._implementations.items() if each},
            "is_ambient_raised": self.is_ambient_raised,
            "failed_in_base": sorted(self.failed_in_base),
            "has_ambient_failed": self.has_ambient_failed,
            "is_steering": self.is_steering,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned, but does not hand it to the layers.

        Units that are not in this model are left out, and so are formats while the knob is masked.
        """
        if not self.is_masked:
            known = {
                name: value
                for name, value in state["formats"].items()
                if value in getattr(self.units.get(name), "legal", ())
            }
            self.current.update(known)
            self.named = set(state["named"]) & set(self.units)
            for name, choices in state.get("implementations", {}).items():
                self._load_implementations(name, choices)
            self.is_ambient_raised = bool(state["is_ambient_raised"])
            self.failed_in_base = set(state.get("failed_in_base", ())) & set(self.units)
            self.has_ambient_failed = bool(state.get("has_ambient_failed", False))
            self.is_steering = bool(state["is_steering"])
        self.changed_at.update({name: int(at) for name, at in state["changed_at"].items() if name in self.units})
        for name in state["ran"].keys() & self.units.keys():
            self.units[name].ran = Counter({(asked, ran): int(count) for asked, ran, count in state["ran"][name]})
        for name in self.units.keys() & state["called"]:
            self.units[name].has_run = True

    def _load_implementations(self, name: str, choices: Mapping[str, str]) -> None:
        """Takes over choices for a unit as far as there are such implementations here."""
        if name in self.units:
            known = {
                format_name: each
                for format_name, each in choices.items()
                if each in candidates(self.units[name].kind, format_name, self._device_type)
            }
            self._implementations[name] = known
