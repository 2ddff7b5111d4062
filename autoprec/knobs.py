"""The knobs of one fit: their values, and what becomes of a request.

What lives here: resolving a request to units, asking the guard, making it act, putting it on record. What does not:
what each knob is made of (``unit_formats``, ``loss_scale``, ``clip``, ``batch_size``, ``accumulation``), when a
boundary is reached (``precision``) and who decides (``controller``, ``callback``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from autoprec.accumulation import Accumulation
from autoprec.action import Action
from autoprec.attention import AttentionSignature
from autoprec.base import Base
from autoprec.batch_size import BatchSize
from autoprec.clip import ClipThreshold
from autoprec.config import AutoPrecisionConfig
from autoprec.formats import rank
from autoprec.guard import Guard
from autoprec.history import Decision, History, Knob, Outcome, Value
from autoprec.judgement import JudgedFormat, judge_formats
from autoprec.layers import Runtime
from autoprec.loss_scale import LossScale
from autoprec.unit_formats import UnitFormats
from autoprec.units import Unit

KNOBS: tuple[Knob, ...] = ("precision", "loss_scale", "batch_size", "clip")
VALIDATED_SO = "; validation runs it in fp32 as well"
CLIPS_BY_VALUE = "the Trainer clips by value; the threshold on the norm does not apply"


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
        unit_formats: State of the precision knob.
        threshold: State of the clip knob.
        batch_size: State of the batch-size knob.
        accumulation: State of the accumulation, which goes with it.
        guard: Knows what is legal and what is held.
        restrictions: Format to the reason why no unit may run in it.
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
        self.runtime = runtime
        self.masked = dict(masked)
        self.base = base
        self.loss_scale = loss_scale
        self.history = history
        self.guard = Guard(config.guard, config.clip)
        self.threshold = ClipThreshold(config.clip, base.clip, base.clip is None and "clip" not in masked, history)
        self.unit_formats = UnitFormats(
            units, base, config.formats, "precision" in masked, config.tiers, runtime.device_type
        )
        self.units = self.unit_formats.units
        self.batch_size = BatchSize(config.batch, self.masked, history)
        self.accumulation = Accumulation(config.batch, self.masked, history)
        self.restrictions: dict[str, str] = {}
        if "precision" not in self.masked:
            self._make_act()

    # ---- what is ----

    @property
    def formats(self) -> Mapping[str, str]:
        """Format of every unit by name, as it changes; :meth:`precision_map` returns a copy."""
        return self.unit_formats.current

    def steerable(self, unit: Unit) -> tuple[str, ...]:
        """Formats that a policy may choose for a unit, widest first."""
        return self.unit_formats.steerable(unit)

    @property
    def clip(self) -> float:
        """Threshold on the global norm of the unscaled gradients, ``math.inf`` for off."""
        return self.threshold.value

    @property
    def is_steering(self) -> bool:
        """Whether any layer runs otherwise than under the Trainer's own precision."""
        return self.unit_formats.is_steering

    @property
    def changes(self) -> int:
        """How often formats were handed to the layers."""
        return self.unit_formats.changes

    @property
    def uses_fp16(self) -> bool:
        """Whether something runs in a format that needs a loss scale."""
        return self.unit_formats.uses_fp16

    @property
    def is_all_wide(self) -> bool:
        """Whether everything runs in fp32 already, or cannot be moved."""
        return self.unit_formats.is_all_wide

    @property
    def is_any_low(self) -> bool:
        """Whether a unit that can be moved runs in less than tf32."""
        return any(rank(self.formats[unit.name]) > rank("tf32") for unit in steered_units(self))

    @property
    def runs_in_fp32(self) -> bool:
        """Whether nothing that could be raised runs below fp32."""
        return self.is_all_wide and ("precision" not in self.masked or self.base.precision in ("32-true", "64-true"))

    @property
    def ambient_dtype(self) -> torch.dtype:
        """Target of autocast at the start of a training step, before the first unit sets it."""
        return self.unit_formats.ambient_dtype

    def precision_map(self) -> dict[str, str]:
        """Format asked of every unit by name, in the model's order; a unit that nobody calls has one as well."""
        return dict(self.formats)

    def map_to_save(self) -> tuple[dict[str, str], float | None, float | None, int | None]:
        """Formats, loss scale, threshold and batch size of a run from here; ``None`` for what it decides by itself."""
        names = [u.name for u in steered_units(self) if u.has_matrix or u.name in self.unit_formats.named]
        scale = self.loss_scale.scale if self.loss_scale.enabled and "loss_scale" not in self.masked else None
        clip = None if "clip" in self.masked or self.threshold.follows_median else self.clip
        return {name: self.formats[name] for name in names}, scale, clip, self.batch_size.chosen

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
            reasons: More, by unit name or name of the knob.
            is_move: Whether a policy moved it from what is there: the threshold goes on following the median, and the
                loss scale is nobody's choice.
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
        self._apply_loss_scale(action, step, _joined(why, reasons, "loss_scale"), is_move)
        self._apply_clip(action, step, median_norm, _joined(why, reasons, "clip"), is_move)
        if action.batch_size is not None:
            self.batch_size.request(action.batch_size, step, _joined(why, reasons, "batch_size"), is_move)
        if action.accumulate is not None:
            self.accumulation.request(action.accumulate, step, why, acts_now=True)

    def check(self, action: Action, step: int, applied_steps: int, median_norm: float) -> Action:
        """Judges a request made inside a window: refusals are recorded now, the rest as deferred.

        Returns:
            The part that is left to apply at the next boundary; batch size and accumulation keep theirs themselves.
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
        if action.batch_size is not None:
            self.batch_size.request(action.batch_size, step, "requested")
        if action.accumulate is not None:
            self.accumulation.request(action.accumulate, step, "requested", acts_now=False)
        return Action(**kept)

    def raise_units(
        self,
        reasons: Mapping[str, str],
        step: int,
        applied_steps: int,
        forever: bool = False,
        have_failed: bool = False,
    ) -> None:
        """Guard, level 2: moves units to fp32 and holds them there.

        Args:
            reasons: Unit name to the reason.
            step: Index of the window that begins.
            applied_steps: Applied optimizer steps so far.
            forever: Hold for the whole fit instead of ``GuardConfig.hold`` applied steps.
            have_failed: Whether they cannot run in the format that they have. Where that is the Trainer's own,
                validation runs them in fp32 as well.
        """
        changes: dict[str, str] = {}
        for name, reason in reasons.items():
            unit = self.units.get(name)
            if unit is None or unit.reason is not None or "precision" in self.masked:
                continue
            self.guard.hold(name, applied_steps, forever)
            if self.formats[name] != "fp32":
                changes[name] = "fp32"
                is_validated_so = have_failed and self.unit_formats.note_failure(name)
                reason = f"guard: {reason}{VALIDATED_SO if is_validated_so else ''}"
                self._record(step, "precision", name, self.formats[name], "fp32", "fp32", "applied", reason)
        self._carry_out(changes, applied_steps)

    def raise_all(self, step: int, applied_steps: int, reason: str, have_failed: bool = False) -> None:
        """Guard, level 2 for everything: all units and the operations between them.

        Args:
            step: Index of the window that begins.
            applied_steps: Applied optimizer steps so far.
            reason: Why.
            have_failed: Whether the formats that they have are the cause.
        """
        self.unit_formats.is_ambient_raised = True
        self.unit_formats.has_ambient_failed |= have_failed
        self.raise_units(dict.fromkeys(self.units, reason), step, applied_steps, have_failed=have_failed)
        self._make_act()

    def quarantine(self, step: int, applied_steps: int, steps: int, reason: str) -> None:
        """Guard, level 3: everything to fp32, held there for so many applied steps.

        Args:
            step: Index of the window that begins.
            applied_steps: Applied optimizer steps so far.
            steps: How long.
            reason: Why.
        """
        self.loss_scale.growth_tracker = 0
        if "precision" in self.masked:
            return
        if not self.is_all_wide:
            self.raise_all(step, applied_steps, reason)
        for name in self.units:
            self.guard.hold(name, applied_steps, steps=steps)

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

    def set_implementations(self, unit_name: str, choices: Mapping[str, str]) -> None:
        """Chooses how a unit computes in its formats, from the next step on; called at a boundary.

        Args:
            unit_name: Name of the unit.
            choices: Implementation by format, see :func:`autoprec.implementations.candidates`.

        Raises:
            ValueError: If there is no such unit, or an implementation is none of its candidates.
        """
        self.unit_formats.set_implementations(unit_name, choices)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        return {
            **self.unit_formats.state_dict(),
            "attention": [[*signature.to_list(), name] for signature, name in self.runtime.attention.items()],
            "clip": self.threshold.state_dict("clip" in self.masked),
            "loss_scale": self.loss_scale.state_dict(),
            "guard": self.guard.state_dict(),
            "batch_size": self.batch_size.state_dict(),
            "accumulation": self.accumulation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int = 0) -> None:
        """Takes over what ``state_dict`` returned; units that are not in this model are left out.

        Args:
            state: The saved state.
            step: Index of the window that begins.
        """
        self.unit_formats.load_state_dict(state)
        for *fields, name in state.get("attention", ()):
            self.runtime.attention[AttentionSignature.from_list(fields)] = name
        self.guard.load_state_dict(state["guard"])
        was_enabled = self.loss_scale.enabled
        self.loss_scale.load_state_dict(state["loss_scale"])
        if "loss_scale" in self.masked:
            self.loss_scale.enabled = was_enabled
        if "clip" not in self.masked:
            self.threshold.load_state_dict(state["clip"])
        self.batch_size.load_state_dict(state.get("batch_size", {}))
        self.accumulation.load_state_dict(state.get("accumulation", {}), step)
        if "precision" not in self.masked:
            self._make_act()

    # ---- inside ----

    def _carry_out(self, changes: Mapping[str, str], applied_steps: int) -> None:
        if changes:
            self.unit_formats.change(changes, applied_steps)
            self._make_act()

    def _make_act(self) -> None:
        self.unit_formats.hand_over()
        if self.uses_fp16 and not self.loss_scale.enabled and "loss_scale" not in self.masked:
            self.loss_scale.enabled = True

    def _judged_formats(self, action: Action, applied_steps: int) -> list[JudgedFormat]:
        mask = self.masked.get("precision")
        return judge_formats(
            action.precision or {}, self.unit_formats, self.guard, applied_steps, mask, self.restrictions
        )

    def _apply_loss_scale(self, action: Action, step: int, why: str, is_move: bool) -> None:
        if action.loss_scale is None:
            return
        before = self.loss_scale.scale
        if "loss_scale" in self.masked:
            reason = f"the loss-scale knob is masked: {self.masked['loss_scale']}"
            self._record(step, "loss_scale", None, before, action.loss_scale, before, "refused", reason)
            return
        applied, outcome, reason = self.loss_scale.request(action.loss_scale)
        self.loss_scale.is_pinned |= not is_move and outcome != "refused"
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
