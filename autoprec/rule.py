"""The rule: a good hand-written policy.

What lives here: when a unit is lowered and raised, judged from nothing but the observation, so that any training loop
can use it. What does not: the automaton of the loss scale, and what the guard does on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.config import AutoPrecisionConfig
from autoprec.controller import Controller
from autoprec.encoding import HEADROOM_BITS, READINGS, Observation, feature, log_steps
from autoprec.plateau import PlateauProbe

_MIN_READINGS = 8
_MAX_DOUBLINGS = 6
_TOO_OFTEN_CLIPPED = 0.9
_FULL = {"memory": 0.85, "utilization": 0.9}
_EMPTY = 0.6
_BATCH_DOUBLINGS = 4

Flags = NDArray[np.bool_]


class RuleController(Controller):
    """Lowers a unit when its gradients are stable and there is headroom, raises it on overflow or underflow.

    A unit is **lowered** by one format when all of this holds:

    - it may be: a lower legal format exists and the guard does not hold it;
    - warm-up is over: ``warmup_steps`` steps were applied, or the global gradient norm has settled;
    - its turn has come, where lowering spreads over several ``stages``, from both ends of the model inwards;
    - nothing went wrong in the window: no overflow, no non-finite value;
    - its gradients are stable: at least 8 norms are known and their relative spread around a steady rise or
      fall is below ``stable_cv``;
    - they fit: ``headroom_bits`` bits lie between their amax and the largest value of the lower format, and would still
      lie there after another window of the present drift;
    - its outputs fit in the same sense, where they were sampled;
    - little underflows: at most half of ``guard.underflow_fraction``, now and, where it is known, in the lower format;
    - its weights fit: at most that share of them is below the lower format's smallest normal number.

    A frozen unit has no gradients. It is lowered on the headroom of its outputs alone, once they were sampled.

    A unit is **raised** by one format when an output overflowed in the window, when its outputs will leave the range
    within another window of the present drift, or when more than ``guard.underflow_fraction`` of its gradient
    underflows. A non-finite gradient alone raises nothing: most often the loss scale was too high, which corrects
    itself, and the guard deals with what remains.

    **Weight of accuracy.** ``headroom_bits`` is multiplied by it, ``stable_cv`` and the bounds on underflow are divided
    by it. It moves from ``accuracy_weight_start`` to ``accuracy_weight_end`` with the share of the run that is over,
    where that is known.

    **Plateaus.** When the loss stands still, all units go to fp32 for a decision interval; those without which the loss
    is higher stay there (:class:`~autoprec.plateau.PlateauProbe`).

    **Hysteresis.** The bounds for lowering are stricter than those for raising. A unit that the rule has raised stays
    for ``guard.hold`` applied steps, and twice as long after each further raise, up to 64 times.

    **All at once.** Every unit that may be lowered is lowered in the same decision. A change of the map costs something
    whatever its size (copies are made anew, compiled code may be dropped, the windows of statistics start over), and
    units fail independently, so that one at a time would pay this once per unit and learn no more. What was wrong
    is found by unit, and only that unit goes back.

    **Other knobs.** The loss scale is left to its automaton, which acts at every step. The batch size is left alone
    unless ``RuleConfig.batch`` says otherwise. The clip threshold follows the median norm by itself. When it acts in
    more than 90 % of the steps in the window it has stopped to be a limit for the exceptional, and goes up one notch. A
    threshold that the user gave to the Trainer stays as it is.

    Args:
        config: Thresholds are taken from here.
    """

    name = "rule"

    def __init__(self, config: AutoPrecisionConfig | None = None) -> None:
        self.config = config if config is not None else AutoPrecisionConfig()
        self._names: tuple[str, ...] = ()
        self._reasons: dict[str, str] = {}
        self._begin()

    def _begin(self) -> None:
        self._raises: dict[str, int] = {}
        self._is_warm = self.config.rule.warmup_steps == 0
        self._stage = 0
        self._plateau = PlateauProbe()
        self._has_halved = False
        self._first_size: float | None = None  # as encoded
        self._weight = self.config.rule.accuracy_weight_start

    def start(self, names: Sequence[str], legal: Sequence[tuple[str, ...]]) -> None:
        """Forgets what it raised in an earlier run.

        Args:
            names: Unit names in the order of their rows.
            legal: Not used, the observation says which moves there are.
        """
        self._names = tuple(names)
        self._reasons = {}
        self._begin()

    def initial_map(self) -> Mapping[str, str] | None:
        """Returns fp32 for all units if there is a warm-up, else ``None``."""
        return {"*": "fp32"} if self.config.rule.warmup_steps else None

    def decide(self, observation: Observation) -> NDArray[np.int64]:
        """Returns one move per row.

        Args:
            observation: ``[n_knobs, n_features]``.
        """
        moves = np.zeros(len(observation), dtype=np.int64)
        is_unit = feature(observation, "knob_precision") == 1
        units = observation[is_unit]
        names = self._names if len(self._names) == len(units) else tuple(map(str, range(len(units))))
        self._weight = self._accuracy_weight(observation)
        trial = self._plateau.look(names, units) if self.config.rule.probe_plateaus else None
        raised = self._should_raise(units)
        lowered = self._should_lower(units) & self._has_waited(units, names) & ~raised & self._has_its_turn(observation)
        lowered &= self._plateau.may_lower(names)
        for name in np.asarray(names, dtype=object)[raised]:
            self._raises[name] = self._raises.get(name, 0) + 1
        self._reasons = {
            name: self._why_raised(row) if is_raised else self._why_lowered(row)
            for name, row, is_raised, is_lowered in zip(names, units, raised, lowered, strict=True)
            if is_raised or is_lowered
        }
        if trial is not None:
            tried = (feature(units, "can_raise") == 1) & ~raised
            self._reasons.update(dict.fromkeys(np.asarray(names, dtype=object)[tried], trial))
            raised = raised | tried
            lowered &= ~tried
        moves[is_unit] = raised.astype(np.int64) - lowered.astype(np.int64)
        is_loosened = _should_loosen_clip(observation)
        moves[is_loosened] = 1
        if is_loosened.any():
            self._reasons["clip"] = f"it acted in more than {_TOO_OFTEN_CLIPPED:.0%} of the last steps"
        self._move_batch(observation, moves)
        return moves

    def _move_batch(self, observation: Observation, moves: NDArray[np.int64]) -> None:
        kind, size = self.config.rule.batch, float(feature(observation[:1], "batch_size")[0])
        if self._first_size is None and size > 0.0:
            self._first_size = size
        (row,) = np.nonzero(feature(observation, "knob_batch_size") == 1)[0]
        if kind == "leave" or feature(observation[row], f"{kind}_known") != 1:
            return
        share = float(feature(observation[row], kind))
        if share > _FULL[kind] and feature(observation[row], "can_lower") == 1:
            self._has_halved = True
            moves[row] = -1
        elif share < _EMPTY and feature(observation[row], "can_raise") == 1 and self._may_double(size):
            moves[row] = 1
        if moves[row]:
            self._reasons["batch_size"] = f"{kind} is at {share:.0%}"

    def _may_double(self, size: float) -> bool:
        most = (self._first_size or 0.0) + (_BATCH_DOUBLINGS - 0.5) / 16.0
        return not self._has_halved and (self.config.batch.max_size is not None or size < most)

    def reasons(self) -> Mapping[str, str]:
        """Returns the measurements that the latest moves rest on."""
        return self._reasons

    def _why_raised(self, row: Observation) -> str:
        if feature(row, "overflows") > 0:
            return "its output overflowed"
        underflow, limit = float(feature(row, "underflow")), self._underflow_limit
        if underflow > limit:
            return f"{underflow:.0%} of its gradient underflows (limit {limit:.0%})"
        return "its outputs will leave the range of the format within a window"

    def _why_lowered(self, row: Observation) -> str:
        outputs = ""
        if feature(row, "act_known") == 1:
            outputs = f"outputs {_bits_left(row, 'act_headroom_lower', 'act_drift'):.0f} bits below the range"
        if feature(row, "frozen") == 1:
            return f"frozen; {outputs}"
        gradients = (
            f"gradient norm spreads {feature(row, 'grad_cv'):.2f} (limit {self._cv_limit:g}), gradients"
            f" {_bits_left(row, 'grad_headroom_lower', 'grad_trend'):.0f} bits below the range,"
            f" {feature(row, 'underflow_lower'):.0%} underflow"
        )
        return f"{gradients}; {outputs}" if outputs else gradients

    def state_dict(self) -> dict[str, Any]:
        """Returns how often each unit was raised, and how far lowering has come."""
        return {
            "raises": dict(self._raises),
            "is_warm": self._is_warm,
            "stage": self._stage,
            "plateau": self._plateau.state_dict(),
            "has_halved": self._has_halved,
            "first_size": self._first_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned.

        Args:
            state: The saved state.
        """
        self._raises = {str(name): int(count) for name, count in state["raises"].items()}
        self._is_warm = bool(state.get("is_warm", True))
        self._stage = int(state.get("stage", self.config.rule.stages))
        self._has_halved = bool(state.get("has_halved", False))
        first_size = state.get("first_size")
        self._first_size = None if first_size is None else float(first_size)
        if "plateau" in state:
            self._plateau.load_state_dict(state["plateau"])

    def _accuracy_weight(self, observation: Observation) -> float:
        first, last = self.config.rule.accuracy_weight_start, self.config.rule.accuracy_weight_end
        is_known = len(observation) and feature(observation, "progress_known")[0] == 1
        return first + (last - first) * float(feature(observation, "progress")[0]) if is_known else first

    @property
    def _underflow_limit(self) -> float:
        return self.config.guard.underflow_fraction / self._weight

    @property
    def _cv_limit(self) -> float:
        return self.config.rule.stable_cv / self._weight

    @property
    def _bits_wanted(self) -> float:
        return self.config.rule.headroom_bits * self._weight

    def _has_its_turn(self, observation: Observation) -> Flags:
        """Which units may be lowered by now, as warm-up and stages have it."""
        rule = self.config.rule
        units = observation[feature(observation, "knob_precision") == 1]
        if not self._is_warm and len(units):
            steps = float(feature(units, "steps_since_change").max())
            # compared as encoded, where both sides are rounded alike
            is_over = steps >= np.float32(log_steps(rule.warmup_steps))
            # two norms are alike often enough
            are_enough = float(feature(units, "grad_readings").max()) >= _MIN_READINGS / READINGS
            has_settled = are_enough and 0 < float(feature(units, "norm_cv")[0]) < rule.settled_cv
            self._is_warm = is_over or has_settled
        if not self._is_warm:
            return np.zeros(len(units), dtype=np.bool_)
        self._stage = min(self._stage + 1, rule.stages)
        depths = feature(units, "depth")
        places = np.argsort(np.argsort(np.minimum(depths, 1 - depths), kind="stable"), kind="stable")
        return np.asarray(places < np.ceil(len(units) * self._stage / rule.stages))

    def _should_raise(self, units: Observation) -> Flags:
        overflows = feature(units, "overflows") > 0
        underflows = feature(units, "underflow") > self._underflow_limit
        leaves = (feature(units, "act_known") == 1) & (_bits_left(units, "act_headroom", "act_drift") < 0)
        should: Flags = (feature(units, "can_raise") == 1) & (overflows | underflows | leaves)
        return should

    def _should_lower(self, units: Observation) -> Flags:
        is_legal = (feature(units, "can_lower") == 1) & (feature(units, "held") == 0)
        is_clean = (feature(units, "overflows") == 0) & (feature(units, "nonfinite") == 0)
        outputs_fit = _bits_left(units, "act_headroom_lower", "act_drift") >= self._bits_wanted
        outputs_known = feature(units, "act_known") == 1
        is_frozen = feature(units, "frozen") == 1
        outputs_pass = np.where(outputs_known, outputs_fit, ~is_frozen)
        weights_pass = feature(units, "weight_subnormal_lower") <= self._underflow_limit / 2
        should: Flags = is_legal & is_clean & outputs_pass & weights_pass & (is_frozen | self._gradients_pass(units))
        return should

    def _gradients_pass(self, units: Observation) -> Flags:
        is_known = (feature(units, "grad_known") == 1) & (feature(units, "grad_readings") >= _MIN_READINGS / READINGS)
        is_stable = feature(units, "grad_cv") < self._cv_limit
        fits = _bits_left(units, "grad_headroom_lower", "grad_trend") >= self._bits_wanted
        most = self._underflow_limit / 2
        survives = (feature(units, "underflow") <= most) & (feature(units, "underflow_lower") <= most)
        passes: Flags = is_known & is_stable & fits & survives
        return passes

    def _has_waited(self, units: Observation, names: Sequence[str]) -> Flags:
        raises = [self._raises.get(name, 0) for name in names]
        waits = [self.config.guard.hold * 2 ** min(count - 1, _MAX_DOUBLINGS) if count else 0 for count in raises]
        # compared as encoded, where both sides are rounded alike
        encoded = np.array([log_steps(wait) for wait in waits], dtype=np.float32)
        return np.asarray(feature(units, "steps_since_change") >= encoded)


def _bits_left(units: Observation, headroom: str, drift: str) -> NDArray[np.float32]:
    """Returns the headroom in bits after another window of a rising drift."""
    rising = np.maximum(feature(units, drift), 0)
    return np.asarray(feature(units, headroom) * np.float32(HEADROOM_BITS) - rising)


def _should_loosen_clip(observation: Observation) -> Flags:
    is_clip = (feature(observation, "knob_clip") == 1) & (feature(observation, "can_raise") == 1)
    return np.asarray(is_clip & (feature(observation, "clipped_share") > _TOO_OFTEN_CLIPPED))
