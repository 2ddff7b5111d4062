"""The knobs of one fit: their values, and what becomes of a request.

What lives here: resolving a request to units, asking the guard, making it act, putting it on record. What does not:
when a boundary is reached (``precision``) and who decides (``controller``, ``callback``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from autoprec.action import Action
from autoprec.base import Base
from autoprec.clip import ClipThreshold
from autoprec.config import AutoPrecisionConfig
from autoprec.formats import get_format, rank
from autoprec.guard import Guard
from autoprec.history import Decision, History, Knob, Outcome, Value
from autoprec.judgement import JudgedFormat, judge_formats
from autoprec.layers import Runtime, set_format
from autoprec.loss_scale import LossScale
from autoprec.units import Unit

KNOBS: tuple[Knob, ...] = ("precision", "loss_scale", "batch_size", "clip")
CLIPS_BY_VALUE = "the Trainer clips by value; the threshold on the norm does not apply"
_NOT_STEERED: dict[Knob, str] = {
    "batch_size": "the batch size is not steered yet; set it on the DataLoader",
    "accumulate": "accumulation is not steered yet; set `Trainer(accumulate_grad_batches=...)`",
}


class Knobs:
    """Values of all knobs of one fit.

    Args:
        units: Decision units, attached to ``runtime`` if the precision knob is steered.
        runtime: State shared by the layers.
        config: Settings.
        masked: Knob to the reason why it cannot be moved.
        base: What the Trainer had.
        loss_scale: The loss scale's state machine.
        history: Where decisions are recorded.

    Attributes:
        map_limit: How many different maps may be requested in a fit, ``None`` for any number. The compiler makes new
            code for each and gives up after some; the guard's own changes are always carried out.
        maps: The different maps so far.
        restrictions: Format to the reason why no unit may run in it.
        changes: How often formats were handed to the layers.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        runtime: Runtime,
        config: AutoPrecisionConfig,
        masked: Mapping[str, str],
        base: Base,
        loss_scale: LossScale,
        history: History,
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.runtime = runtime
        self.config = config
        self.masked = dict(masked)
        self.base = base
        self.loss_scale = loss_scale
        self.history = history
        self.guard = Guard(config.guard, config.clip)
        self.threshold = ClipThreshold(config.clip, base.clip, base.clip is None and "clip" not in masked, history)
        self.restrictions: dict[str, str] = {}
        self.map_limit: int | None = None
        self.changed_at = dict.fromkeys(self.units, 0)
        self.formats = {unit.name: self._base_format(unit) for unit in units}
        self.maps: set[tuple[str, ...]] = {self._map_key({})}
        self._named: set[str] = set()
        self.is_ambient_raised = False
        self.changes = 0
        self._is_steering = False
        if "precision" not in self.masked:
            self._make_act()

    # ---- what is ----

    def steerable(self, unit: Unit) -> tuple[str, ...]:
        """Formats that a policy may choose for a unit, widest first."""
        if unit.reason is not None or "precision" in self.masked or not unit.has_matrix:
            return (self.formats[unit.name],)  # vectors and normalisation stay as they are unless named
        if self.config.formats is not None:
            allowed = {*self.config.formats, "fp32"}
        else:
            # fp16 adds a loss scale and no speed where bf16 is native
            allowed = {"fp32", "bf16" if "bf16" in unit.native else "fp16"} & set(unit.native)
        allowed |= {self.formats[unit.name], self._base_format(unit)}
        return tuple(name for name in unit.legal if name in allowed)

    @property
    def clip(self) -> float:
        """Threshold on the global norm of the unscaled gradients, ``math.inf`` for off."""
        return self.threshold.value

    @property
    def is_steering(self) -> bool:
        """Whether any layer runs otherwise than under the Trainer's own precision."""
        return self._is_steering

    def is_run_explicitly(self, unit: Unit) -> bool:
        """Whether a unit runs in its format while layers are steered.

        Vectors and containers follow autocast unless they were named; normalisation layers always widen.
        """
        return unit.has_matrix or unit.kind == "norm" or unit.name in self._named

    @property
    def uses_fp16(self) -> bool:
        """Whether something runs in a format that needs a loss scale."""
        return self.base.format == "fp16" or any(get_format(name).needs_loss_scale for name in self.formats.values())

    @property
    def is_all_wide(self) -> bool:
        """Whether everything runs in fp32 already, or cannot be moved."""
        if "precision" in self.masked:
            return True
        units_wide = all(rank(self.formats[u.name]) <= rank("tf32") for u in self.units.values() if u.reason is None)
        return units_wide and (self.base.format == "fp32" or self.is_ambient_raised)

    @property
    def runs_in_fp32(self) -> bool:
        """Whether nothing that could be raised runs below fp32."""
        return self.is_all_wide and ("precision" not in self.masked or self.base.precision in ("32-true", "64-true"))

    @property
    def width(self) -> str:
        """What the run is as wide as, for a message."""
        if self.runs_in_fp32:
            return "everything that can be moved runs in fp32"
        return f"the loss scale is down to {self.loss_scale.scale:g} and the precision of {self.base.precision} stays"

    @property
    def ambient_dtype(self) -> torch.dtype:
        """Target of autocast at the start of a training step, before the first unit sets it."""
        return torch.float32 if self.is_ambient_raised else get_format(self.base.format or "fp32").compute_dtype

    def precision_map(self) -> dict[str, str]:
        """Format asked of every unit by name, in the model's order; a unit that nobody calls has one as well."""
        return dict(self.formats)

    def map_to_save(self) -> tuple[dict[str, str], float | None, float | None]:
        """Formats, loss scale and threshold of a run that starts from here; ``None`` for what it decides by itself."""
        names = [u.name for u in steered_units(self) if u.has_matrix or u.name in self._named]
        scale = self.loss_scale.scale if self.loss_scale.enabled and "loss_scale" not in self.masked else None
        clip = None if "clip" in self.masked or self.threshold.follows_median else self.clip
        return {name: self.formats[name] for name in names}, scale, clip

    # ---- requests ----

    def apply(
        self,
        action: Action,
        step: int,
        applied_steps: int,
        median_norm: float,
        why: str = "requested",
        reasons: Mapping[str, str] = MappingProxyType({}),
        is_move: bool = False,
    ) -> None:
        """Carries out a request at a boundary and puts every part of it on record.

        Args:
            action: What is asked for.
            step: Index of the window that begins.
            applied_steps: Applied optimizer steps so far.
            median_norm: Running median of finite norms, NaN before the first.
            why: Reason to record for what is applied as asked.
            reasons: More, by unit name or ``"clip"``.
            is_move: Whether a policy moved the threshold by a notch, which leaves it following the median.
        """
        was_enabled = self.loss_scale.enabled
        changes = {}
        for unit, requested, outcome, reason in self._judged_formats(action, applied_steps):
            before = self.formats.get(unit or "")
            applied = requested if outcome in ("applied", "limited") else before
            reason = reason or _joined(why, reasons, unit)
            if unit is not None and outcome != "refused" and self.units[unit].is_emulated(requested):
                reason += "; emulated on this device"
            self._record(step, "precision", unit, before, requested, applied, outcome, reason)
            if unit is not None and outcome != "refused":
                changes[unit] = requested
        self._carry_out(changes, applied_steps)
        if self.loss_scale.enabled and not was_enabled:
            scale = self.loss_scale.scale
            self._record(step, "loss_scale", None, 1.0, scale, scale, "applied", "in use from now on: fp16 needs it")
        self._apply_loss_scale(action, step, why)
        self._apply_clip(action, step, median_norm, _joined(why, reasons, "clip"), is_move)
        self._refuse_batch_size(action, step)

    def check(self, action: Action, step: int, applied_steps: int, median_norm: float) -> Action:
        """Judges a request made inside a window: refusals are recorded now, the rest as deferred.

        Returns:
            The part that is left to apply at the next boundary.
        """
        precision: dict[str, str] = {}
        for unit, requested, outcome, reason in self._judged_formats(action, applied_steps):
            before = self.formats.get(unit or "")
            if unit is None or outcome == "refused":
                self._record(step, "precision", unit, before, requested, before, "refused", reason)
            else:
                precision[unit] = requested
                note = f"to the next boundary; {reason}" if reason else "to the next boundary"
                self._record(step, "precision", unit, before, requested, before, "deferred", note)
        kept: dict[str, Any] = {"precision": precision or None}
        values: tuple[tuple[Knob, float, float | None], ...] = (
            ("loss_scale", self.loss_scale.scale, action.loss_scale),
            ("clip", self.clip, action.clip),
        )
        for knob, current, value in values:
            if value is None:
                continue
            is_refused, reason = self._is_refused(knob, value, median_norm)
            if is_refused:
                self._record(step, knob, None, current, value, current, "refused", reason)
                continue
            kept[knob] = value
            self._record(step, knob, None, current, value, current, "deferred", "to the next boundary")
        self._refuse_batch_size(action, step)
        return Action(**kept)

    def raise_units(self, reasons: Mapping[str, str], step: int, applied_steps: int, forever: bool = False) -> None:
        """Guard, level 2: moves units to fp32 and holds them there.

        Args:
            reasons: Unit name to the reason.
            step: Index of the window that begins.
            applied_steps: Applied optimizer steps so far.
            forever: Hold for the whole fit instead of ``GuardConfig.hold`` applied steps.
        """
        changes: dict[str, str] = {}
        for name, reason in reasons.items():
            unit = self.units.get(name)
            if unit is None or unit.reason is not None or "precision" in self.masked:
                continue
            self.guard.hold(name, applied_steps, forever)
            if self.formats[name] != "fp32":
                changes[name] = "fp32"
                self._record(step, "precision", name, self.formats[name], "fp32", "fp32", "applied", f"guard: {reason}")
        self._carry_out(changes, applied_steps)

    def raise_all(self, step: int, applied_steps: int, reason: str) -> None:
        """Guard, level 2 for everything: all units and the operations between them."""
        self.is_ambient_raised = True
        self.raise_units(dict.fromkeys(self.units, reason), step, applied_steps)
        self._make_act()

    def move_loss_scale(self, found_inf: bool, step: int) -> None:
        """Lets the loss scale follow its rule after a window.

        Args:
            found_inf: Whether a step of the window was skipped.
            step: Index of the window that begins.
        """
        before = self.loss_scale.scale
        self.loss_scale.update(found_inf)
        after = self.loss_scale.scale
        if after != before:
            reason = "guard: a gradient was not finite" if found_inf else "no overflow for a growth interval"
            self._record(step, "loss_scale", None, before, after, after, "applied", reason)

    def take_trainer_clip(self, value: float | None, is_by_norm: bool, step: int) -> None:
        """Takes over a threshold that user code sets on the Trainer in mid-run.

        Args:
            value: ``trainer.gradient_clip_val``, ``None`` or 0 for off.
            is_by_norm: Whether it limits the norm, not single entries.
            step: Index of the current window.
        """
        if "clip" in self.masked:
            return
        if not is_by_norm:
            self.masked["clip"] = CLIPS_BY_VALUE
            return
        threshold = float(value) if value else math.inf
        self.threshold.set(threshold, threshold, "applied", step, "set on the Trainer")

    def change_formats(self, changes: Mapping[str, str], applied_steps: int) -> None:
        """Sets formats without asking or recording."""
        for name, format_name in changes.items():
            if self.formats[name] != format_name:
                self.changed_at[name] = applied_steps
            self.formats[name] = format_name

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {
            "formats": dict(self.formats),
            "named": sorted(self._named),
            "changed_at": dict(self.changed_at),
            "ran": {
                name: [[*pair, n] for pair, n in unit.ran.items()] for name, unit in self.units.items() if unit.ran
            },
            "called": [name for name, unit in self.units.items() if unit.has_run],
            "clip": self.threshold.state_dict("clip" in self.masked),
            "is_ambient_raised": self.is_ambient_raised,
            "is_steering": self._is_steering,
            "loss_scale": self.loss_scale.state_dict(),
            "guard": self.guard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned; units that are not in this model are left out."""
        if "precision" not in self.masked:
            known = {
                name: value
                for name, value in state["formats"].items()
                if value in getattr(self.units.get(name), "legal", ())
            }
            self.formats.update(known)
            self._named = set(state["named"]) & set(self.units)
            self.is_ambient_raised = bool(state["is_ambient_raised"])
            self._is_steering = bool(state["is_steering"])
        self.changed_at.update({name: int(at) for name, at in state["changed_at"].items() if name in self.units})
        for name in state["ran"].keys() & self.units.keys():
            self.units[name].ran = Counter({(asked, ran): int(count) for asked, ran, count in state["ran"][name]})
        for name in self.units.keys() & state["called"]:
            self.units[name].has_run = True
        self.guard.load_state_dict(state["guard"])
        was_enabled = self.loss_scale.enabled
        self.loss_scale.load_state_dict(state["loss_scale"])
        if "loss_scale" in self.masked:
            self.loss_scale.enabled = was_enabled
        if "clip" not in self.masked:
            self.threshold.load_state_dict(state["clip"])
        if "precision" not in self.masked:
            self._make_act()

    # ---- inside ----

    def _carry_out(self, changes: Mapping[str, str], applied_steps: int) -> None:
        if not changes:
            return
        self.change_formats(changes, applied_steps)
        self._named.update(changes)
        self._make_act()
        self.maps.add(self._map_key({}))

    def _base_format(self, unit: Unit) -> str:
        base = self.base.format or "fp32"
        return base if unit.has_matrix and base in unit.legal else "fp32"

    def _make_act(self) -> None:
        """Hands the formats to the layers; leaves them untouched while they match what the Trainer would run."""
        matches = all(self.formats[unit.name] == self._base_format(unit) for unit in self.units.values())
        steers_fp16 = self.base.format == "fp16"  # its range must be watched although nothing differs
        is_touched = not matches or self.is_ambient_raised or steers_fp16 or bool(self._named & self._norms())
        # once steered, always: the user may carry low-precision tensors over windows (hidden states, queues)
        self._is_steering = self._is_steering or is_touched
        self.changes += 1
        for unit in self.units.values():
            if unit.reason is None:
                is_plain = not self._is_steering or not self.is_run_explicitly(unit)
                set_format(unit, None if is_plain else self.formats[unit.name])
        if self.uses_fp16 and not self.loss_scale.enabled and "loss_scale" not in self.masked:
            self.loss_scale.enabled = True

    def _norms(self) -> set[str]:
        return {unit.name for unit in self.units.values() if not unit.has_matrix}

    def _map_key(self, changes: Mapping[str, str]) -> tuple[str, ...]:
        return tuple({**self.formats, **changes}.values())

    def _within_map_limit(self, judged: list[JudgedFormat]) -> list[JudgedFormat]:
        """Refuses a request that would make one map more than the compiler keeps."""
        changes = {row.unit: row.requested for row in judged if row.unit is not None and row.outcome != "refused"}
        is_known = self.map_limit is None or self._map_key(changes) in self.maps or len(self.maps) < self.map_limit
        if is_known:
            return judged
        reason = f"torch.compile keeps code for {self.map_limit} maps here, and this would be another one"
        return [row if row.outcome == "refused" else row._replace(outcome="refused", reason=reason) for row in judged]

    def _judged_formats(self, action: Action, applied_steps: int) -> list[JudgedFormat]:
        judged = judge_formats(
            action.precision or {},
            self.units,
            self.guard,
            applied_steps,
            self.masked.get("precision"),
            self.restrictions,
        )
        return self._within_map_limit(list(judged))

    def _apply_loss_scale(self, action: Action, step: int, why: str) -> None:
        if action.loss_scale is None:
            return
        before = self.loss_scale.scale
        if "loss_scale" in self.masked:
            reason = f"the loss-scale knob is masked: {self.masked['loss_scale']}"
            self._record(step, "loss_scale", None, before, action.loss_scale, before, "refused", reason)
            return
        applied, outcome, reason = self.loss_scale.request(action.loss_scale)
        reason = why if outcome == "applied" else reason
        self._record(step, "loss_scale", None, before, action.loss_scale, applied, outcome, reason)

    def _apply_clip(self, action: Action, step: int, median_norm: float, why: str, is_move: bool) -> None:
        if action.clip is None:
            return
        is_refused, reason = self._is_refused("clip", action.clip, median_norm)
        if is_refused:
            self._record(step, "clip", None, self.clip, action.clip, self.clip, "refused", reason)
            return
        applied, outcome, reason = self.guard.check_clip(action.clip, median_norm)
        assert applied is not None
        reason = why if outcome == "applied" else reason
        self.threshold.set(action.clip, applied, outcome, step, reason, median_norm if is_move else None)

    def _is_refused(self, knob: str, value: float, median_norm: float) -> tuple[bool, str]:
        if knob in self.masked:
            return True, f"the {knob.replace('_', '-')} knob is masked: {self.masked[knob]}"
        if knob == "clip":
            applied, _, reason = self.guard.check_clip(value, median_norm)
            return applied is None, reason
        reason = self.loss_scale.refusal(value)
        return bool(reason), reason

    def _refuse_batch_size(self, action: Action, step: int) -> None:
        requests: tuple[tuple[Knob, int | None], ...] = (
            ("batch_size", action.batch_size),
            ("accumulate", action.accumulate),
        )
        for knob, value in requests:
            if value is not None:
                reason = self.masked.get(knob, _NOT_STEERED[knob])
                self._record(step, knob, None, None, value, None, "refused", reason)

    def _record(
        self,
        step: int,
        knob: Knob,
        unit: str | None,
        before: Value,
        requested: Value,
        applied: Value,
        outcome: Outcome,
        reason: str,
    ) -> None:
        self.history.append(Decision(step, knob, unit, before, requested, applied, outcome, reason))


def _joined(why: str, reasons: Mapping[str, str], name: str | None) -> str:
    return f"{why}: {reasons[name]}" if name is not None and name in reasons else why


def steered_units(knobs: Knobs) -> list[Unit]:
    """Returns the units that are not left alone, in the model's order."""
    return [unit for unit in knobs.units.values() if unit.reason is None]
