"""Finds out whether low precision is what keeps a loss from falling, by trying fp32 for a while.

What lives here: when to try, and what follows from the outcome, judged from nothing but the observation. What does not:
the moves themselves (``rule``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.encoding import Observation, feature, log_steps

_FIRST_WAIT, _GROWTH, _LONGEST_WAIT = 4, 4, 1024
_STILL = 0.01
_LOUDEST = 0.5
_LEAST_BITS = 0.15
_READINGS = 32  # losses in a level

Flags = NDArray[np.bool_]


class PlateauProbe:
    """Raises all units once a loss stands still, and keeps there what the loss has shown to need it.

    While any unit is below fp32 and the loss has changed by less than 1 % over several decisions, all units go to fp32
    until the next decision. If the loss is lower there by more than its noise, the last unit stays in fp32 and the
    others go back; where the loss rises again then, all stay. If it is not lower, all go back, and the next trial waits
    four times as long: 4 decisions at first, then 16, 64 and so on. Losses that spread by more than half of their mean
    are not tried: nothing could be seen.

    Attributes:
        pinned: Units that stay in fp32.
    """

    def __init__(self) -> None:
        self.pinned: set[str] = set()
        self._phase = "watch"
        self._wait = _FIRST_WAIT
        self._waited = 0
        self._gain_bits = 0.0

    def look(self, names: Sequence[str], units: Observation) -> str | None:
        """Looks at an observation; called once for each decision.

        Args:
            names: Unit names in the order of their rows.
            units: ``[n_units, n_features]``, their rows.

        Returns:
            Why all units must go to fp32 now, ``None`` if they need not.
        """
        if not len(units):
            return None
        if self._phase == "watch":
            return self._watch(units)
        bits, noise = self._change(units)
        if self._phase == "probe":
            self._gain_bits -= bits
            if (feature(units, "can_raise") == 1).any():
                return "on the way to fp32, to see whether the loss falls there"
            self._judge(names, units, self._gain_bits > noise)
            return None
        self._phase = "watch"
        if bits > noise:
            self.pinned.update(names)
            return f"the loss rose by {_percent(bits)} when all but the last layer were lowered"
        return None

    def _judge(self, names: Sequence[str], units: Observation, has_gained: bool) -> None:
        self._wait, self._waited = min(self._wait * _GROWTH, _LONGEST_WAIT), 0
        self._phase = "watch"
        if has_gained and self.pinned:
            self.pinned.update(names)
        elif has_gained:
            self.pinned.add(names[int(np.argmax(feature(units, "depth")))])
            self._phase = "last alone"

    def may_lower(self, names: Sequence[str]) -> Flags:
        """Which units may be lowered, as far as this knows."""
        return np.array([self._phase != "probe" and name not in self.pinned for name in names], dtype=np.bool_)

    def _watch(self, units: Observation) -> str | None:
        is_low = bool((feature(units, "can_raise") == 1).any())
        loudness = float(feature(units, "loss_cv")[0])
        # relative changes are shown ten times as large
        change = abs(float(feature(units, "loss_slow")[0])) / 10.0
        # compared as encoded, where both sides are rounded alike
        has_settled = float(feature(units, "steps_since_change").min()) >= np.float32(log_steps(_READINGS))
        if not (is_low and has_settled and 0.0 < loudness < _LOUDEST and change < _STILL):
            return None
        self._waited += 1
        if self._waited < self._wait:
            return None
        self._phase, self._gain_bits = "probe", 0.0
        return f"the loss stands still ({change:.1%} over half of the window); is it for want of precision?"

    @staticmethod
    def _change(units: Observation) -> tuple[float, float]:
        """Change of the loss since the last change of formats, in bits, and what noise may make of it."""
        is_known = feature(units, "loss_since_change_known")[0] == 1
        bits = float(feature(units, "loss_since_change")[0]) if is_known else 0.0
        spread = float(feature(units, "loss_cv")[0])
        # the window holds both levels; their distance must not count as noise
        noise = max(spread - abs(2.0**bits - 1.0) / 2.0, 0.0) * math.sqrt(2.0 / _READINGS) / math.log(2.0)
        return bits, max(3.0 * noise, _LEAST_BITS)

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        counts = {"wait": self._wait, "waited": self._waited, "gain_bits": self._gain_bits}
        return {"pinned": sorted(self.pinned), "phase": self._phase, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned."""
        self.pinned = set(state["pinned"])
        self._phase, self._gain_bits = str(state["phase"]), float(state["gain_bits"])
        self._wait, self._waited = int(state["wait"]), int(state["waited"])


def _percent(bits: float) -> str:
    return f"{2.0 ** min(bits, 64.0) - 1.0:.0%}"
