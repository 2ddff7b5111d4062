"""The learned policy: what a table proposes, moved where a network has learned to do better.

What lives here: the controller, and which folder is meant. What does not: the table (``autoprec.table_policy``), the
network (``network``), its files (``policy_file``), and the guard, which holds whatever the two would move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from autoprec.action import Action
from autoprec.config import AutoPrecisionConfig
from autoprec.controller import Moves
from autoprec.encoding import Observation, decode
from autoprec.feature_rows import RUN_KNOBS
from autoprec.formats import rank
from autoprec.policies.policy_file import load_policy
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table import Proposal, TableConfig, TableSettings
from autoprec.table_policy import TableController

SHIPPED = Path(__file__).parent / "pretrained"
"""Where the policy lies that comes with autoprec."""
_WORDS = {-1: "lower", 1: "raise"}
_RUN_KNOBS = ("loss_scale", "batch_size", "clip")  # in the order of their rows
_LONGEST_FAULT = 200


class PretrainedController(TableController):
    """Carries out what the table proposes, each knob moved by -1, 0 or 1 as a network says.

    -1 takes the next narrower legal format, half the loss scale or batch size, or the next tighter clip threshold; 1
    the opposite. Where a move leads nowhere, the proposal stays; a narrower format that is not known to pay is no
    choice. A unit that the guard holds stays where it is, and so does what the user has chosen. The batch size moves
    only where the table moves it, which takes a ``schedule`` or ``batch`` in ``AutoPrecisionConfig.table``. A network
    of mode ``"ladder"`` moves knobs from where they are, whatever the table proposes.

    The table has the settings that the policy was trained with, unless the config has others than the defaults. Its
    batch size is the config's business in either case.

    If the network fails in mid-run, the table decides alone from there on, which is warned of once.

    Args:
        folder: Folder of a policy, as ``save_policy`` has written it. ``None`` for the one that comes with autoprec.
        config: Settings of the run.

    Attributes:
        network: Says how to move.
        card: What its file says of it.

    Raises:
        FileNotFoundError: If there is no such folder, or one of its files is missing.
        ValueError: If the files are not those of a policy for this version of autoprec.
    """

    def __init__(self, folder: str | Path | None = None, config: AutoPrecisionConfig | None = None) -> None:
        if folder is None and not SHIPPED.is_dir():
            raise FileNotFoundError(
                "Passed `policy='pretrained'`. This version of autoprec comes without a trained policy."
                " Use `policy='table'` or `policy='rule'`, or the folder of a policy of your own."
            )
        self.network, self.card = load_policy(SHIPPED if folder is None else folder)
        config = config if config is not None else AutoPrecisionConfig()
        super().__init__(replace(config, table=_table_settings(self.card.table_settings(), config.table)))
        self.name = "pretrained" if folder is None else f"policy:{self.card.name}"

    def _begin(self) -> None:
        super()._begin()
        self._moves: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._fault = ""

    def decide(self, observation: Observation) -> Moves | Action | None:
        """Returns what the moved proposal changes.

        Args:
            observation: ``[n_knobs, n_features]``.
        """
        self._moves = self._moves_for(observation)
        return super().decide(observation)

    def _moves_for(self, observation: Observation) -> NDArray[np.int64]:
        none = np.zeros(len(observation), dtype=np.int64)
        if self._fault:
            return none
        try:
            return self.network.moves(observation)
        except Exception as error:  # whatever it is, the user's run goes on, and the table knows what to do
            self._fault = f"{type(error).__qualname__}: {error}"[:_LONGEST_FAULT]
            rank_zero_warn(f"autoprec: the network of {self.name!r} failed ({self._fault}); its table decides alone.")
            return none

    def request_for(self, proposal: Proposal) -> Action:
        """Returns what carries out a proposal, moved as the network says, and keeps the reasons.

        Args:
            proposal: For the readings that :meth:`propose` was given.
        """
        is_ladder = self.card.mode == "ladder" and not self._fault
        units, run = _placed(self._units, self._run, Proposal() if is_ladder else proposal)
        moved = self._moved(units, run, proposal)
        if is_ladder:
            self._reasons = {name: f"policy: {_WORDS[move]}" for name, move in self._named_moves() if move}
            return moved
        knobs = {name: value for name in _RUN_KNOBS if (value := getattr(moved, name)) is not None}
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
        still = set(run.chosen) | ({"batch_size"} if proposal.batch_size is None else set())
        return replace(moved, **dict.fromkeys(still.intersection(_RUN_KNOBS)))

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

    def notes(self) -> Sequence[str]:
        """Returns the table's line, and one about a network that has failed."""
        failed = (f"the network failed, the table decided alone: {self._fault}",) if self._fault else ()
        return (*super().notes(), *failed)

    def state_dict(self) -> dict[str, Any]:
        """Returns the table's state, and which network decided."""
        return {**super().state_dict(), "weights": self.card.weights_sha256, "fault": self._fault}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned; says so if another network decided before.

        Args:
            state: The saved state.
        """
        super().load_state_dict(state)
        self._fault = str(state["fault"])
        if state["weights"] != self.card.weights_sha256:
            self._fault = ""
            rank_zero_warn(
                f"The checkpoint was written under another network of policy {self.name!r}. The run goes on with the"
                " one that is there now, so it will not be the run that it would have been."
            )


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


def _table_settings(trained: TableSettings, wanted: TableSettings) -> TableSettings:
    return replace(trained, schedule=wanted.schedule, batch=wanted.batch) if wanted == TableConfig() else wanted


def pretrained_policy(config: AutoPrecisionConfig | None = None) -> PretrainedController:
    """Returns ``policy="pretrained"``.

    Args:
        config: Settings of the run.

    Raises:
        FileNotFoundError: If no policy comes with this version of autoprec.
    """
    return PretrainedController(None, config)
