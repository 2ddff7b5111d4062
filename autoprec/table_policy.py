"""The table policy: what measured costs and errors propose is carried out.

What lives here: the proposal for a live run, when it changes what is there, when errors are looked at anew, and the
reasons. What does not: the arithmetic, which proxies share (``table``), and measuring (``cost_watch``,
``rounding_probe``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.action import Action
from autoprec.config import AutoPrecisionConfig
from autoprec.controller import Controller, Moves
from autoprec.cost_table import NOISE
from autoprec.encoding import Observation
from autoprec.formats import FORMATS, get_format, rank
from autoprec.readings import GlobalReading, UnitReading
from autoprec.table import CLIP_MULTIPLIERS, OVERFLOW_ERROR, Proposal, propose_batch, propose_clip, propose_levels
from autoprec.table import propose_scale as scale_for

Array = NDArray[np.float64]

_TOLERATED = 1.25
_MARGIN = 2.0
_MAX_DOUBLINGS = 6
_MAX_WAIT_DOUBLINGS = 30
_SCALE_BITS = 2.0
_SAME_CLIP = 0.01


class TableController(Controller):
    """Gives every unit the cheapest format whose measured error is small enough, and steers the other knobs by formula.

    **Formats.** A format's error is the largest that it makes in any of a unit's tensors (inputs, outputs, weights,
    gradients), relative to that tensor without its mean, and 2 where a tensor does not fit. The unit takes the format
    that costs least of those whose error is below ``TableSettings.threshold``: by measured times, casts included, and
    where nothing was measured by the stated rates of the device. A format that is not known to pay is not taken. A unit
    of which no error is known stays where it is.

    **Hysteresis.** A unit leaves its format when the error there reaches 1.25 thresholds, when it overflows, or when
    another one saves more than 3 % of its time. It is not lowered into a format of which its outputs come within a bit
    of the largest value. One that was raised, by the table or the guard, stays there for ``guard.hold`` applied steps,
    twice as long after each further time, up to 64 times.

    **Looks.** Errors are measured in the window before a decision, in every ``TableSettings.probe_every``-th one, as
    long as a unit has a choice.

    **Loss scale.** The power of two that leaves ``headroom_bits`` between the largest gradient of the units that need
    one and the end of the range of their formats. It is set when that is two bits or more away, and not raised after a
    skipped step; in between the automaton of the loss scale goes on. A raise that did not last until the next decision
    is tried again two decisions later, twice as many after each further time, and by two bits only: a loss in fp16
    overflows under a scale that its gradients in the layers would bear. One that the user has chosen stays
    (``LossScaleConfig.init_scale``, a GradScaler of another scale than 65536, a request).

    **Clip threshold.** ``TableSettings.clip`` times the running median, once ``ClipConfig.min_norms`` norms are known.
    One that the user has chosen stays (the Trainer's, ``ClipConfig.multiplier``, a request).

    **Batch size.** ``TableSettings.batch`` doublings of the first one, and one more from each share of the run in
    ``TableSettings.schedule`` on. A live run has no schedule unless it is given one.

    Args:
        config: The parameters are taken from its ``table``.
    """

    name = "table"
    is_relative = True

    def __init__(self, config: AutoPrecisionConfig | None = None) -> None:
        self.config = config if config is not None else AutoPrecisionConfig()
        self.settings = self.config.table
        self._begin()

    def _begin(self) -> None:
        self._proposal: Proposal | None = None
        self._units: tuple[UnitReading, ...] = ()
        self._run = GlobalReading()
        self._reasons: dict[str, str] = {}
        self._raises: dict[str, int] = {}
        self._held: set[str] = set()
        self._wait = 0
        self._looks = 0
        self._has_choice = True
        self._first_size = 0
        self._asked_size = 0
        self._raised_scale = 0.0  # by the latest decision, 0 if that did not raise it
        self._scale_wait = self._scale_failures = 0
        self._scale_base = self._moved_scale = 0.0  # what was proposed last, and what was made of it

    def start(self, names: Sequence[str], legal: Sequence[tuple[str, ...]]) -> None:
        """Forgets an earlier run.

        Args:
            names: Not used, readings follow.
            legal: The same.
        """
        self._begin()

    def wants_errors(self) -> bool:
        """Returns whether a look is due."""
        return self._wait == 0 and self._has_choice

    # ---- the proposal ----

    def propose(self, units: Sequence[UnitReading], run: GlobalReading) -> Proposal:
        """Returns what the table proposes; :meth:`decide` asks for it.

        Args:
            units: Readings of the units.
            run: Reading of the run.
        """
        self._units, self._run = tuple(units), run
        self._note_held(units)
        self._note_scale(run)
        self._has_choice = any(len(unit.legal) > 1 or unit.held for unit in units)
        formats = dict(zip((unit.name for unit in units), self._formats(units), strict=True))
        self._proposal = Proposal(
            formats=formats,
            loss_scale=self._loss_scale(units, run, formats),
            clip=self._clip(run),
            batch_size=self._batch_size(run),
        )
        return self._proposal

    def _note_held(self, units: Sequence[UnitReading]) -> None:
        held = {unit.name for unit in units if unit.held}
        for name in held - self._held:
            self._raises[name] = self._raises.get(name, 0) + 1
        self._held = held

    def _note_scale(self, run: GlobalReading) -> None:
        self._scale_wait = max(self._scale_wait - 1, 0)
        if _is_scaled(run) and run.loss_scale < self._raised_scale:
            self._scale_failures += 1
            self._scale_wait = 2 ** min(self._scale_failures, _MAX_WAIT_DOUBLINGS)
        self._raised_scale = 0.0

    def _formats(self, units: Sequence[UnitReading]) -> list[str]:
        if not units:
            return []
        ladders = [sorted({*unit.legal, unit.format}, key=rank) for unit in units]
        names, ladder = list(FORMATS), np.full((len(units), max(map(len, ladders))), -1)
        errors = np.full((len(units), 1, len(names)), math.nan)
        times = np.full_like(errors, math.inf)
        for row, (unit, legal) in enumerate(zip(units, ladders, strict=True)):
            ladder[row, : len(legal)] = [names.index(name) for name in legal]
            for name in legal:
                errors[row, 0, names.index(name)] = _error(unit, name)
                times[row, 0, names.index(name)] = _time(unit, name)
        level = np.array([[legal.index(unit.format)] for unit, legal in zip(units, ladders, strict=True)])
        proposed = propose_levels(errors, times, ladder, level, self.settings.threshold)
        waits = np.array([[unit.steps_since_change < self._hold_of(unit)] for unit in units])
        proposed = np.where(waits, np.minimum(proposed, level), proposed)
        return [legal[int(at)] for legal, at in zip(ladders, proposed[:, 0], strict=True)]

    def _hold_of(self, unit: UnitReading) -> int:
        raises = self._raises.get(unit.name, 0)
        return self.config.guard.hold * 2 ** min(raises - 1, _MAX_DOUBLINGS) if raises else 0

    def _loss_scale(self, units: Sequence[UnitReading], run: GlobalReading, formats: Mapping[str, str]) -> float | None:
        scaled = [(unit, get_format(formats[unit.name])) for unit in units]
        scaled = [(unit, each) for unit, each in scaled if each.needs_loss_scale]
        if not scaled or "loss_scale" in run.chosen:
            return None
        amax = np.array([[np.fmax(unit.grad_amax, unit.passed_amax) for unit, _ in scaled]])
        limit = np.array([[each.gradient_format.amax_limit for _, each in scaled]])
        wanted = scale_for(amax, limit, np.ones_like(amax, bool), np.full(1, math.nan), self.settings.headroom_bits)
        if math.isnan(wanted[0]):
            return None
        low, high = run.loss_scale_limits
        scale = min(max(float(wanted[0]), low), high)
        if not _is_scaled(run):
            return scale
        # somebody may have moved what was proposed; what is near to the proposal is no reason for another one
        base = self._scale_base if run.loss_scale == self._moved_scale else run.loss_scale
        bits = math.log2(scale / base)
        is_early = bits > 0 and (run.applied_share < 1.0 or self._scale_wait > 0)
        if abs(bits) < _SCALE_BITS or is_early:
            return base
        return min(scale, base * 2.0**_SCALE_BITS) if self._scale_failures else scale

    def _clip(self, run: GlobalReading) -> float | None:
        median = run.median_norm
        is_known = len(run.norms) >= self.config.clip.min_norms and 0 < median < math.inf
        if not is_known or "clip" in run.chosen or "clip" not in run.movable:
            return None
        (index,) = propose_clip(1, self.settings)
        wanted = CLIP_MULTIPLIERS[index] * median
        is_near = math.isfinite(wanted) and abs(run.clip_threshold / wanted - 1.0) < _SAME_CLIP
        return run.clip_threshold if is_near else wanted

    def _batch_size(self, run: GlobalReading) -> int | None:
        settings, bounds = self.settings, self.config.batch
        self._first_size = self._first_size or run.batch_size
        if not self._first_size or (settings.schedule is None and not settings.batch):
            return None
        (moves,) = propose_batch(np.array([run.progress]), settings, base=0)
        size = max(int(self._first_size * 2.0**moves), bounds.min_size)
        return size if bounds.max_size is None else min(size, bounds.max_size)

    # ---- the decision ----

    def decide(self, observation: Observation) -> Moves | Action | None:
        """Returns what the proposal changes.

        Args:
            observation: Not used, the readings came before it.
        """
        proposal, self._proposal = self._proposal, None
        self._note_look()
        self._reasons = {}
        return None if proposal is None else self.request_for(proposal)

    def _note_look(self) -> None:
        is_known = any(unit.errors for unit in self._units)
        if self.wants_errors() and is_known:
            self._wait, self._looks = self.settings.probe_every, self._looks + 1
        self._wait = max(self._wait - 1, 0)

    def request_for(self, proposal: Proposal) -> Action:
        """Returns what carries out a proposal, and keeps the reasons; what is there already is not asked for.

        Args:
            proposal: For the readings that :meth:`propose` was given.
        """
        run = self._run
        wishes = [(unit, proposal.formats.get(unit.name, unit.format)) for unit in self._units]
        changes = [(unit, wanted) for unit, wanted in wishes if wanted != unit.format]
        for unit, wanted in changes:
            self._reasons[unit.name] = self._why(unit, wanted)
            if rank(wanted) < rank(unit.format):
                self._raises[unit.name] = self._raises.get(unit.name, 0) + 1
        scale = None if proposal.loss_scale == run.loss_scale and _is_scaled(run) else proposal.loss_scale
        self._raised_scale = scale if scale is not None and scale > run.loss_scale else 0.0
        clip = None if proposal.clip == run.clip_threshold else proposal.clip
        size = proposal.batch_size
        size = None if size in (None, run.batch_size, self._asked_size) else size
        self._asked_size = size or self._asked_size
        self._note_reasons(scale, clip, size)
        return Action(
            precision={unit.name: wanted for unit, wanted in changes} or None,
            loss_scale=scale,
            clip=clip,
            batch_size=size,
        )

    # ---- reasons ----

    def _why(self, unit: UnitReading, wanted: str) -> str:
        limit, now = self.settings.threshold, _error(unit, unit.format)
        if unit.overflow_count:
            return f"it overflowed in {unit.format}"
        if now >= limit:
            return f"error {now * _TOLERATED:.2g} in {unit.format} (limit {limit:g})"
        time = unit.times.get(wanted, math.nan)
        return (
            f"error {unit.errors.get(wanted, math.nan):.2g} (limit {limit:g}), {time:.2g} x its time in {unit.format}"
        )

    def _note_reasons(self, scale: float | None, clip: float | None, size: int | None) -> None:
        if scale is not None:
            self._reasons["loss_scale"] = f"{self.settings.headroom_bits:g} bits above the largest gradient"
        if clip is not None:
            self._reasons["clip"] = f"{self.settings.clip:g} x the running median"
        if size is not None:
            share = self._run.progress
            self._reasons["batch_size"] = "as set" if math.isnan(share) else f"{share:.0%} of the run is over"

    def reasons(self) -> Mapping[str, str]:
        """Returns what the latest changes rest on."""
        return self._reasons

    def notes(self) -> Sequence[str]:
        """Returns one line about errors and their limit."""
        if not self._looks:
            return ("errors were not measured: no layer had a choice of formats when a decision was due",)
        known = sum(bool(unit.errors) for unit in self._units)
        times = "once" if self._looks == 1 else f"{self._looks} times"
        return (f"errors of {known} layers measured {times}, limit {self.settings.threshold:g}",)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns what was raised, when the next look is due, and which batch sizes and scales there were."""
        return {
            "raises": dict(self._raises),
            "held": sorted(self._held),
            "wait": self._wait,
            "looks": self._looks,
            "has_choice": self._has_choice,
            "first_size": self._first_size,
            "asked_size": self._asked_size,
            "raised_scale": self._raised_scale,
            "scale_wait": self._scale_wait,
            "scale_failures": self._scale_failures,
            "scale_base": self._scale_base,
            "moved_scale": self._moved_scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned.

        Args:
            state: The saved state.
        """
        self._raises = {str(name): int(count) for name, count in state["raises"].items()}
        self._held = set(state["held"])
        self._wait, self._looks = int(state["wait"]), int(state["looks"])
        self._has_choice = bool(state["has_choice"])
        self._first_size, self._asked_size = int(state["first_size"]), int(state["asked_size"])
        # not in a checkpoint of an earlier version
        self._scale_wait, self._scale_failures = (int(state.get(key, 0)) for key in ("scale_wait", "scale_failures"))
        self._raised_scale, self._scale_base, self._moved_scale = (
            float(state.get(key, 0.0)) for key in ("raised_scale", "scale_base", "moved_scale")
        )


def _is_scaled(run: GlobalReading) -> bool:
    """Whether a loss scale is in use; what is not reads as 1."""
    return "loss_scale" in run.movable


def _error(unit: UnitReading, format_name: str) -> float:
    """The error that counts: more of it is tolerated where a unit is than where it might go."""
    error = unit.errors.get(format_name, math.nan)
    if format_name != unit.format:
        overflows = unit.act_amax * _MARGIN > get_format(format_name).amax_limit
        return OVERFLOW_ERROR if overflows and rank(format_name) > rank(unit.format) else error
    if math.isnan(error):  # it has come there since the last look
        return 0.0 if unit.errors else math.nan
    return math.inf if unit.overflow_count else error / _TOLERATED


def _time(unit: UnitReading, format_name: str) -> float:
    """Relative time, ``inf`` if it is not known; the current format is given what noise may amount to."""
    if format_name == unit.format:
        return 1.0 - NOISE
    return unit.times.get(format_name, math.inf)
