"""Requests and windows: a request acts between windows, and one that is made inside a window waits for its end.

What lives here: the requests that wait, and what a run is told of those that cannot be carried out. What does not: what
becomes of a single request (``knobs``), and when a window ends (``steering``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from autoprec.action import Action
from autoprec.knobs import Knobs
from autoprec.telemetry import Telemetry


class RequestQueue:
    """Hands requests to the knobs of one fit.

    Args:
        knobs: What carries them out.
        telemetry: Knows the median norm.
        on_new_map: Called when a request has changed a format.
    """

    def __init__(self, knobs: Knobs, telemetry: Telemetry, on_new_map: Callable[[], None]) -> None:
        self._knobs = knobs
        self._telemetry = telemetry
        self._on_new_map = on_new_map
        self._pending: list[Action] = []
        self._has_warned_of_maps = False

    def apply(
        self,
        action: Action,
        window: int,
        applied_steps: int,
        why: str = "requested",
        reasons: Mapping[str, str] = MappingProxyType({}),
        is_move: bool = False,
    ) -> None:
        """Carries out a request now; the caller is at a boundary.

        Args:
            action: What is asked for.
            window: Index of the window that begins.
            applied_steps: Applied optimizer steps so far.
            why: Reason to record for what is applied as asked.
            reasons: More, by unit name or ``"clip"``.
            is_move: Whether these are moves of a policy, relative to what is there.
        """
        before = self._knobs.precision_map()
        self._knobs.apply(action, window, applied_steps, self._telemetry.median_norm, why, reasons, is_move)
        if self._knobs.precision_map() != before:
            self._on_new_map()
        self._warn_of_last_map()

    def _warn_of_last_map(self) -> None:
        formats = self._knobs.unit_formats
        if len(formats.maps) == formats.map_limit and not self._has_warned_of_maps:
            self._has_warned_of_maps = True
            rank_zero_warn(
                f"autoprec has tried {formats.map_limit} maps of a model that uses torch.compile. Requests for"
                " others are refused from here on: the compiler gives up after"
                " `torch._dynamo.config.recompile_limit` versions of a function."
            )

    def defer(self, action: Action, window: int, applied_steps: int) -> None:
        """Checks a request at once and keeps what is left of it.

        Args:
            action: What is asked for.
            window: Index of the current window.
            applied_steps: Applied optimizer steps so far.
        """
        rest = self._knobs.check(action, window, applied_steps, self._telemetry.median_norm)
        if not rest.is_empty:
            self._pending.append(rest)

    def apply_pending(self, window: int, applied_steps: int) -> None:
        """Applies what was kept; called at a boundary.

        Args:
            window: Index of the window that begins.
            applied_steps: Applied optimizer steps so far.
        """
        pending, self._pending = self._pending, []
        for action in pending:
            self.apply(action, window, applied_steps, "requested inside the last window")

    def warn_of_unknown_names(self) -> None:
        """Says at once that what a run begins with names units which this model does not have."""
        unknown = [d.reason for d in self._knobs.history if d.knob == "precision" and d.unit is None]
        if unknown and "precision" not in self._knobs.masked:
            more = f" And {len(unknown) - 1} more, see the history." if len(unknown) > 1 else ""
            rank_zero_warn(f"autoprec: {unknown[0]}{more}")

    def state(self) -> list[dict[str, Any]]:
        """Returns what waits, as primitives."""
        return [asdict(action) for action in self._pending]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Takes over what ``state`` returned."""
        self._pending = [Action(**fields) for fields in state]
