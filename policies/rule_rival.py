"""The rule of live runs on proxy runs: the very same controller decides, one for each run, from the rows it sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.config import AutoPrecisionConfig, GuardConfig, RuleConfig
from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.baselines import GROWTH_INTERVAL
from autoprec.envs.engine import FORMATS
from autoprec.envs.observing import neighbours
from autoprec.envs.proxies import BATCH_SIZES
from autoprec.envs.proxy_env import ProxyVecEnv
from autoprec.feature_rows import INDEX
from autoprec.rule import RuleController
from autoprec.table import TableSettings, propose_batch

Array = NDArray[Any]

_FIRST_SCALE = 2.0**16
_IS_4_BIT = np.array([name.endswith("4") for name in FORMATS])


@dataclass(frozen=True, kw_only=True)
class RuleKnobs:
    """The rule's thresholds, and the knobs that it leaves alone.

    Loss changes since formats changed are not known of proxy runs, so plateaus are not probed there: the question could
    be asked but not answered.

    Args:
        stable_cv: See ``RuleConfig``.
        headroom_bits: See ``RuleConfig``.
        underflow_fraction: See ``GuardConfig``.
        hold: Applied steps that a raised unit stays. The 200 of live runs are most of a proxy run.
        clip: In units of the median norm.
        batch: Moves of the batch size from where it starts.
        schedule: Shares of the budget from which on the batch size is one move larger.
    """

    stable_cv: float = RuleConfig.stable_cv
    headroom_bits: float = RuleConfig.headroom_bits
    underflow_fraction: float = GuardConfig.underflow_fraction
    hold: int = 32
    clip: float = 1.0
    batch: int = 0
    schedule: tuple[float, ...] = ()

    def config(self) -> AutoPrecisionConfig:
        """Returns the settings of a live run with these thresholds."""
        config = AutoPrecisionConfig()
        rule = replace(config.rule, stable_cv=self.stable_cv, headroom_bits=self.headroom_bits, probe_plateaus=False)
        guard = replace(config.guard, hold=self.hold, underflow_fraction=self.underflow_fraction)
        return replace(config, rule=rule, guard=guard)


class RulePolicy:
    """Decides as live runs do under ``policy="rule"``; to be played in ladder mode.

    Args:
        knobs: Thresholds and constants.
    """

    def __init__(self, knobs: RuleKnobs | None = None) -> None:
        self._knobs = knobs or RuleKnobs()
        self._batch = TableSettings(batch=self._knobs.batch, schedule=self._knobs.schedule)
        self._env: ProxyVecEnv | None = None

    def start(self, env: ProxyVecEnv) -> None:
        """Gives every run a controller, and sets the knobs that the rule leaves alone.

        Args:
            env: The runs.
        """
        s, config = env.simulation, self._knobs.config()
        self._env = env
        self._rows = [np.flatnonzero(env.run_of_row == run) for run in range(len(s))]
        self._controllers = [RuleController(config) for _ in range(len(s))]
        for controller, units in zip(self._controllers, s.is_unit.sum(axis=1), strict=True):
            controller.start([str(unit) for unit in range(units)], [()] * int(units))
        s.clip_index[:] = CLIP_MULTIPLIERS.index(self._knobs.clip)
        s.loss_scale[:], s.growth_interval[:] = _FIRST_SCALE, GROWTH_INTERVAL

    def __call__(self, rows: NDArray[np.float32]) -> Array:
        """Returns the moves of all runs that still have budget."""
        assert self._env is not None, "`start` comes first"
        s, moves = self._env.simulation, np.zeros(len(rows), dtype=np.int64)
        rows = rows.copy()
        rows[self._is_masked(rows), INDEX["can_lower"]] = 0.0
        for run in np.flatnonzero(~self._env.is_idle):
            own = self._rows[run]
            moves[own] = self._controllers[run].decide(rows[own])
        s.batch_index = np.clip(propose_batch(s.share, self._batch), 0, len(BATCH_SIZES) - 1)
        return moves

    def _is_masked(self, rows: NDArray[np.float32]) -> Array:
        """Which rows a live run would not let lower: the next format does not pay, or live runs do not have it."""
        assert self._env is not None, "`start` comes first"
        s = self._env.simulation
        masked = (rows[:, INDEX["cost_known"]] == 1.0) & (rows[:, INDEX["cost_lower"]] >= 0.0)
        is_unit = rows[:, INDEX["knob_precision"]] == 1.0
        below = neighbours(s)[0][s.is_unit]
        masked[is_unit] |= _IS_4_BIT[below]
        return np.asarray(masked & is_unit)
