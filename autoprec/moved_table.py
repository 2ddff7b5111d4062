"""A table whose proposal somebody else moves: an environment's agent, or a network.

What lives here: what a proposal with moves on it asks for, and which moves lead somewhere. What does not: the proposal
(``table_policy``), and who moves it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoprec.action import Action
from autoprec.config import AutoPrecisionConfig
from autoprec.controller import Moves
from autoprec.encoding import Observation, decode, encode
from autoprec.feature_rows import INDEX, RUN_KNOBS
from autoprec.formats import rank
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table import Proposal
from autoprec.table_policy import TableController

Mode = Literal["offset", "ladder"]
MODES: tuple[Mode, ...] = ("offset", "ladder")

_WORDS = {-1: "lower", 1: "raise"}
_RUN_KNOBS = ("loss_scale", "batch_size", "clip")  # in the order of their rows


class MovedTableController(TableController):
    """Carries out what the table proposes, each knob moved by -1, 0 or 1.

    -1 takes the next narrower legal format, half the loss scale or batch size, or the next tighter clip threshold; 1
    the opposite. Where a move leads nowhere, the proposal stays; a narrower format that is not known to pay is no
    choice. A unit that the guard holds stays where it is, and so does what the user has chosen. The batch size moves
    only where the table moves it, which takes a ``schedule`` or ``batch`` in ``AutoPrecisionConfig.table``.

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

    @property
    def is_ladder(self) -> bool:
        """Whether moves are relative to where knobs are."""
        return self.mode == "ladder"

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
        return super().decide(observation)

    def masks(self) -> NDArray[np.bool_]:
        """Returns ``[n_knobs, 3]``: whether lowering, keeping and raising lead somewhere; for :meth:`moves_for`."""
        proposal = Proposal() if self._proposal is None else self._proposal
        units, run = _placed(self._units, self._run, Proposal() if self.is_ladder else proposal)
        rows = encode(units, run)
        still = _still(self._run, proposal)
        may_move = np.array([*(not unit.held for unit in units), *(knob not in still for knob in _RUN_KNOBS)])
        low, high = (rows[:, INDEX[name]] > 0 for name in ("can_lower", "can_raise"))
        return np.stack([low & may_move, np.ones_like(may_move), high & may_move], axis=1)

    def request_for(self, proposal: Proposal) -> Action:
        """Returns what carries out a proposal, moved as it was decided, and keeps the reasons.

        Args:
            proposal: For the readings that :meth:`propose` was given.
        """
        is_ladder = self.is_ladder
        units, run = _placed(self._units, self._run, Proposal() if is_ladder else proposal)
        moved = self._moved(units, run, proposal)
        if is_ladder:
            self._reasons = {name: f"policy: {_WORDS[move]}" for name, move in self._named_moves() if move}
            return moved
        knobs = {name: value for name in _RUN_KNOBS if (value := getattr(moved, name)) is not None}
        self._scale_base, self._moved_scale = proposal.loss_scale or 0.0, moved.loss_scale or 0.0
        # the table counts what it raises itself, so it is not told of formats that were moved
        action = super().request_for(replace(proposal, **knobs))
        wanted = {unit.name: (moved.precision or {}).get(unit.name, unit.format) for unit in units}
        self._note_formats(units, wanted)
        self._note_knobs(proposal, {name for name in knobs if getattr(action, name) is not None})
        changes = {unit.name: wanted[unit.name] for unit in self._units if wanted[unit.name] != unit.format}
        return replace(action, precision=changes or None)

    def _moved(self, units: Sequence[UnitReading], run: GlobalReading, proposal: Proposal) -> Action:
        held = np.array([unit.held for unit in units] + [False] * RUN_KNOBS)
        moved = decode(np.where(held, 0, self._moves), units, run)
        return replace(moved, **dict.fromkeys(_still(run, proposal).intersection(_RUN_KNOBS)))

    def _named_moves(self) -> Iterator[tuple[str, int]]:
        return zip((*(unit.name for unit in self._units), *_RUN_KNOBS), self._moves.tolist(), strict=True)

    def _note_formats(self, units: Sequence[UnitReading], wanted: Mapping[str, str]) -> None:
        for current, proposed in zip(self._units, units, strict=True):
            name = current.name
            if wanted[name] == current.format:
                self._reasons.pop(name, None)  # the table would have moved it, and is not followed
                continue
            why = f"table: {proposed.format}" + (f", {self._reasons[name]}" if name in self._reasons else "")
            moved = "" if wanted[name] == proposed.format else f"; policy: {wanted[name]}"
            self._reasons[name] = f"{why}{moved}"

    def _note_knobs(self, proposal: Proposal, moved: set[str]) -> None:
        for name, move in self._named_moves():
            if name in moved:
                why = "as it is" if getattr(proposal, name) is None else self._reasons[name]
                self._reasons[name] = f"table: {why}; policy: {_WORDS[move]}"


def _still(run: GlobalReading, proposal: Proposal) -> set[str]:
    """Knobs of the run that no move acts on."""
    return set(run.chosen) | ({"batch_size"} if proposal.batch_size is None else set())


def _placed(
    units: Sequence[UnitReading], run: GlobalReading, proposal: Proposal
) -> tuple[list[UnitReading], GlobalReading]:
    """Readings of a run in which the proposal was carried out, from which moves are made."""
    named = {"loss_scale": proposal.loss_scale, "clip_threshold": proposal.clip, "batch_size": proposal.batch_size}
    knobs: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    return [_placed_unit(unit, proposal.formats.get(unit.name)) for unit in units], replace(run, **knobs)


def _placed_unit(unit: UnitReading, proposed: str | None) -> UnitReading:
    if unit.held:
        return unit
    name = proposed if proposed is not None and proposed in unit.legal else unit.format
    # as for the table, a format that is not known to pay is no choice
    legal = tuple(other for other in unit.legal if rank(other) <= rank(name) or other in unit.times)
    return unit if (name, legal) == (unit.format, unit.legal) else replace(unit, format=name, legal=legal)
