"""The learned policy: what a table proposes, moved where a network has learned to do better.

What lives here: the controller, and which folder is meant. What does not: the table (``autoprec.table_policy``), what
moves on it ask for (``autoprec.moved_table``), the network (``network``), its files (``policy_file``), and the guard,
which holds whatever they would move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from numpy.typing import NDArray

from autoprec.config import AutoPrecisionConfig
from autoprec.encoding import Observation
from autoprec.moved_table import MovedTableController
from autoprec.policies.policy_file import load_policy
from autoprec.table import TableConfig, TableSettings

SHIPPED = Path(__file__).parent / "pretrained"
"""Where the policy lies that comes with autoprec."""
_LONGEST_FAULT = 200


class PretrainedController(MovedTableController):
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
        table = live_table(self.card.table_settings(), config.table)
        super().__init__(replace(config, table=table), self.card.mode)
        self.name = "pretrained" if folder is None else f"policy:{self.card.name}"

    def _begin(self) -> None:
        super()._begin()
        self._fault = ""

    @property
    def is_ladder(self) -> bool:
        """Whether moves are relative to where knobs are; those of a table that decides alone never are."""
        return super().is_ladder and not self._fault

    def moves_for(self, observation: Observation) -> NDArray[np.int64]:
        """Returns the network's moves, none once it has failed.

        Args:
            observation: ``[n_knobs, n_features]``.
        """
        none = np.zeros(len(observation), dtype=np.int64)
        if self._fault:
            return none
        try:
            return self.network.moves(observation)
        except Exception as error:  # whatever it is, the user's run goes on, and the table knows what to do
            self._fault = f"{type(error).__qualname__}: {error}"[:_LONGEST_FAULT]
            rank_zero_warn(f"autoprec: the network of {self.name!r} failed ({self._fault}); its table decides alone.")
            return none

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


def live_table(trained: TableSettings, wanted: TableSettings | None = None) -> TableSettings:
    """Returns the table that a policy moves in a live run.

    Args:
        trained: What it was trained with.
        wanted: That of the run's config.
    """
    wanted = TableConfig() if wanted is None else wanted
    return replace(trained, schedule=wanted.schedule, batch=wanted.batch) if wanted == TableConfig() else wanted


def pretrained_policy(config: AutoPrecisionConfig | None = None) -> PretrainedController:
    """Returns ``policy="pretrained"``.

    Args:
        config: Settings of the run.

    Raises:
        FileNotFoundError: If no policy comes with this version of autoprec.
    """
    return PretrainedController(None, config)
