"""A table whose proposal somebody else moves: an environment's agent, or a network.

What lives here: what a proposal with moves on it asks for, and which moves lead somewhere. What does not: the proposal
(``table_policy``), and who moves it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoprec.action import Action
from autoprec.config import AutoPrecisionConfig
from autoprec.controller import Moves
from autoprec.encoding import Observation, decode, encode
from autoprec.feature_rows import INDEX, RUN_KNOBS
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table import Proposal
from autoprec.table_policy import TableController

Mode = Literal["offset", "ladder"]
MODES: tuple[Mode, ...] = ("offset", "ladder")

_MOVES = {-1: "lower", 1: "raise"}
_RUN_KNOBS = ("loss_scale", "batch_size", "clip")


class MovedTableController(TableController):
    """Carries out what the table proposes, each knob moved by -1, 0 or 1.

    -1 takes the next narrower legal format, half the loss scale or batch size, or the next tighter clip threshold; 1
    the opposite. Where a move leads nowhere, the proposal stays. A unit that the guard holds stays where it is. The
    batch size moves only where the table moves it, which takes a ``schedule`` or ``batch`` in
    ``AutoPrecisionConfig.table``.

    Args:
        config: Settings of the run.
        mode: ``"offset"``: moves are relative to the proposal; ``"ladder"``: to where a knob is, whatever is proposed.
    """

    def __init__(self, config: AutoPrecisionConfig | None = None, mode: Mode = "offset") -> None:
        self.mode = mode
        super().__init__(config)

    def _begin(self) -> None:
        super()._begin()
        self._moves: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @abstractmethod
    def moves_for(self, observation: Observation) -> NDArray[np.int64]:
        """Returns ``[n_knobs]`` moves -1, 0 or 1.

        Args:
            observation: ``[n_knobs, n_features]``.
        """

    def decide(self, observation: Observation) -> Moves | Action | None:
        """Returns what the moved proposal changes.

        Args:
            observation: ``[n_knobs, n_features]``.
        """
        self._moves = self.moves_for(observation)
        action = super().decide(observation)
        return self._moves if self.mode == "ladder" else action

    def masks(self, observation: Observation) -> NDArray[np.bool_]:
        """Returns ``[n_knobs, 3]``: whether lowering, keeping and raising lead somewhere.

        Args:
            observation: What :meth:`decide` was given.
        """
        rows, may_move = observation, np.ones(len(observation), dtype=bool)
        if self.mode == "offset" and self._proposal is not None:
            rows = encode(*_placed(self._units, self._run, self._proposal))
            held = [unit.held for unit in self._units]
            knobs = [self._may_move(knob, self._proposal) for knob in _RUN_KNOBS]
            may_move = np.array([*(not each for each in held), *knobs])
        low, high = (rows[:, INDEX[name]] > 0 for name in ("can_lower", "can_raise"))
        return np.stack([low & may_move, np.ones_like(may_move), high & may_move], axis=1)

    def request_for(self, proposal: Proposal) -> Action:
        """Returns what carries out a moved proposal, and keeps the reasons.

        Args:
            proposal: For the readings that :meth:`propose` was given.
        """
        if self.mode == "ladder":
            return super().request_for(proposal)
        units, run = _placed(self._units, self._run, proposal)
        moved = decode(self._moves_within(units), units, run)
        knobs = {
            name: value
            for name in _RUN_KNOBS
            if (value := getattr(moved, name)) is not None and self._may_move(name, proposal)
        }
        # the table counts what it raises itself, so it is not told of formats that were moved
        action = super().request_for(replace(proposal, **knobs))
        wanted = {unit.name: (moved.precision or {}).get(unit.name, unit.format) for unit in units}
        self._note_moves(units, wanted, {name for name in knobs if getattr(action, name) is not None})
        changes = {unit.name: wanted[unit.name] for unit in self._units if wanted[unit.name] != unit.format}
        return replace(action, precision=changes or None)

    def _moves_within(self, units: Sequence[UnitReading]) -> NDArray[np.int64]:
        held = np.array([unit.held for unit in units] + [False] * RUN_KNOBS)
        return np.where(held, 0, self._moves)

    def _may_move(self, knob: str, proposal: Proposal) -> bool:
        if knob == "batch_size":
            return proposal.batch_size is not None
        return knob not in self._run.chosen

    def _note_moves(self, units: Sequence[UnitReading], wanted: Mapping[str, str], knobs: set[str]) -> None:
        for current, proposed in zip(self._units, units, strict=True):
            name = current.name
            if wanted[name] == current.format:
                self._reasons.pop(name, None)  # the table would have moved it, and is not followed
                continue
            why = f"table: {proposed.format}" + (f", {self._reasons[name]}" if name in self._reasons else "")
            moved = "" if wanted[name] == proposed.format else f"; policy: {wanted[name]}"
            self._reasons[name] = f"{why}{moved}"
        rows = dict(zip(_RUN_KNOBS, self._moves[len(units) :].tolist(), strict=True))
        for name in knobs:
            self._reasons[name] = f"table: {self._reasons.get(name, 'as it is')}; policy: {_MOVES[rows[name]]}"


def _placed(
    units: Sequence[UnitReading], run: GlobalReading, proposal: Proposal
) -> tuple[list[UnitReading], GlobalReading]:
    """Readings of a run in which the proposal was carried out, from which moves are made."""
    formats = [proposal.formats.get(unit.name, unit.format) for unit in units]
    placed = [
        unit if name == unit.format or unit.held or name not in unit.legal else replace(unit, format=name)
        for unit, name in zip(units, formats, strict=True)
    ]
    named = {"loss_scale": proposal.loss_scale, "clip_threshold": proposal.clip, "batch_size": proposal.batch_size}
    knobs: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    return placed, replace(run, **knobs)
