"""The planners of whole maps inside proxy runs: Fisher or Taylor scores, and SNIP's divergence, against cost.

What lives here: an adapter from what a simulation has measured to the facts that planners take, and planners as a
``choose`` of ``baselines.play``. What does not: the planners (``analytic_planners``).

A proxy measures less than a live run does, so the facts are derived from what its probes know of a unit: the relative
errors of its input (``e_x``), its weight (``e_w``) and its gradient (``e_g``) in each format, the norm of its weight's
gradient ``|g|`` and the amax of the weight.

- A weight's root mean square ``r`` is taken as a third of its amax, as of a normal distribution.
- Were errors independent of gradients, those of the weight would change the loss by ``|g| * r * e_w`` (one standard
  deviation), and those of the input, which reach the output through the weight, by ``|g| * r * e_x``: the output moves
  as far. So ``loss_divergence`` and ``taylor`` are ``|g| * r * sqrt(e_x**2 + e_w**2)``, and ``fisher`` is half the
  batch size times its square. Gradients and losses are those of the likelihood: the task's loss factor is divided out.
- ``own_gradient`` and ``passed_gradient`` are ``sqrt(e_g**2 + e_x**2)`` and ``sqrt(e_g**2 + e_w**2)``, as in live runs.
- ``update_share`` is the learning rate over ``r`` for Adam, whose steps have about that size, and times the root mean
  square of the gradient for SGD.
- A format in which a tensor overflows, or would with one bit more, or that would flush more than a quarter of a
  gradient to zero, is out. Gradients are probed under the loss scale that fp16 would need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.engine import OPTIMIZERS
from autoprec.envs.observing import ACTIVATION_LIMIT, GRADIENT_LIMIT, NEEDS_SCALE
from autoprec.envs.proxies import BATCH_SIZES
from autoprec.envs.simulation import Simulation
from autoprec.formats import FORMATS
from autoprec.plan_config import PlanConfig
from autoprec.planning import FormatErrors, MapPlanner, ModelFacts, UnitErrors, UnitFacts
from autoprec.policies.analytic_planners import FisherPlanner, SnipPlanner
from autoprec.table import OVERFLOW_ERROR, TableSettings, propose_batch, propose_clip, propose_scale

Array = NDArray[Any]

STAND_INS = tuple(FORMATS)
"""Names that planners know, from wide to narrow, for the places of a ladder; proxies have formats of their own."""
_MOST_FLUSHED = 0.25
_NORMAL_AMAX = 3.0


@dataclass(frozen=True)
class _LevelCosts:
    """What the table of a run says that a unit costs at a level."""

    prices: Array

    def unit_ms(self, unit_name: str, format_name: str) -> float:
        """Returns the time in fp32 steps."""
        return float(self.prices[int(unit_name), STAND_INS.index(format_name)])

    def unit_bytes(self, unit_name: str, format_name: str) -> None:
        """Returns nothing: memory is no limit in proxies."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Follows a planner. Formats are planned whenever errors were measured; a unit that overflows goes up one level.

    Args:
        planner: Makes the map.
        plan: Its budgets; ``replan`` is the number of decisions from one look at errors to the next.
        settings: Those of the table for loss scale, batch size and clip, which planners leave alone.
    """

    planner: MapPlanner
    plan: PlanConfig = field(default_factory=PlanConfig)
    settings: TableSettings = TableSettings()

    def __call__(self, simulation: Simulation) -> None:
        """Sets the knobs."""
        s = simulation
        running = s.share < 1.0
        for run in np.flatnonzero(running & (s.since_probe == 0)):
            s.level[run] = self._planned(s, int(run))
        (runs,) = np.nonzero(running & (s.since_probe > 0) & (s.windows["first_unit"] >= 0))
        units = s.windows["first_unit"][runs]
        s.level[runs, units] = np.maximum(s.level[runs, units] - 1, 0)
        amax = s.windows["gradient_amax"][:, : s.is_unit.shape[1]].astype(np.float64)
        s.loss_scale = propose_scale(amax, *_scale_limits(s), s.loss_scale, self.settings.headroom_bits)
        s.batch_index = np.clip(propose_batch(s.share, self.settings), 0, len(BATCH_SIZES) - 1)
        s.clip_index = propose_clip(len(s), self.settings)
        s.probes = s.since_probe + 1 >= max(self.plan.replan, 1)

    def _planned(self, s: Simulation, run: int) -> Array:
        levels = s.level[run].copy()
        for name, chosen in self.planner.plan(facts_of(s, run, self.plan.headroom_bits)).formats.items():
            levels[int(name)] = STAND_INS.index(chosen)
        return np.asarray(levels)


def fisher(config: PlanConfig | None = None, settings: TableSettings | None = None) -> Planned:
    """Returns the fastest map within a budget of expected loss, as a ``choose``.

    Args:
        config: Budgets; ``PlanConfig(score="taylor")`` for the first-order score.
        settings: See :class:`Planned`.

    Raises:
        ModuleNotFoundError: If SciPy is not installed.
    """
    plan = PlanConfig() if config is None else config
    return Planned(planner=FisherPlanner(plan), plan=plan, settings=settings or TableSettings())


def snip(config: PlanConfig | None = None, settings: TableSettings | None = None) -> Planned:
    """Returns the least disturbing map that saves enough time, as a ``choose``.

    Args:
        config: Budgets.
        settings: See :class:`Planned`.

    Raises:
        ModuleNotFoundError: If SciPy is not installed.
    """
    plan = PlanConfig() if config is None else config
    return Planned(planner=SnipPlanner(plan), plan=plan, settings=settings or TableSettings())


def facts_of(simulation: Simulation, run: int, headroom_bits: float = 1.0) -> ModelFacts:
    """Returns what a planner is told of a run. Units are named by their number, formats by ``STAND_INS``.

    Args:
        simulation: The runs, just probed.
        run: Which of them.
        headroom_bits: See ``PlanConfig``.
    """
    s, task = simulation, simulation.tasks[run]
    ladder = np.array(task.ladder)
    harm = _Harm.of(s, run)
    usable = _usable(s, run, ladder, headroom_bits)
    errors = s.errors[run, : task.units][:, :, ladder].astype(np.float64)
    units = []
    for unit in range(task.units):
        formats = {
            STAND_INS[place]: harm.errors(unit, errors[unit, :, place], bool(usable[unit, place]))
            for place in range(len(ladder))
            if not np.isnan(errors[unit, :, place]).any()
        }
        legal = STAND_INS[: len(ladder)]
        measured = UnitErrors(formats=formats, update_share=float(harm.update_share[unit]))
        name, now = str(unit), STAND_INS[s.level[run, unit]]
        units.append(UnitFacts(name=name, format=now, legal=legal, native=legal, errors=measured))
    return ModelFacts(units=tuple(units), loss=harm.loss, costs=_LevelCosts(s.table.cost[run][:, ladder]))


@dataclass(frozen=True, kw_only=True)
class _Harm:
    """What turns relative errors of a run into changes of its loss.

    Attributes:
        change: ``[units]``: change of the loss by a relative error of 1, one standard deviation.
        update_share: ``[units]``: size of an optimizer step relative to the weights.
        loss: Mean of the latest losses.
        batch: Batch size.
    """

    change: Array
    update_share: Array
    loss: float
    batch: int

    @classmethod
    def of(cls, s: Simulation, run: int) -> _Harm:
        task = s.tasks[run]
        factor = float(task.spec["loss_factor"])
        norms = _latest(s.gradient_norm[run, : task.units]) / factor
        size = np.maximum(s.windows["weight_amax"][run, : task.units].astype(np.float64) / _NORMAL_AMAX, 1e-12)
        losses = s.losses[run][np.isfinite(s.losses[run])] / factor
        parameters = task.parameter_share * s.engine.read(run, "parameters").size
        share = float(s.engine.knobs["lr_end"][run]) / size
        if OPTIMIZERS[int(task.spec["optimizer"])] == "sgd":
            share = share * norms / np.sqrt(np.maximum(parameters, 1.0))
        return cls(
            change=norms * size,
            update_share=share,
            loss=float(losses[-8:].mean()) if len(losses) else math.nan,
            batch=BATCH_SIZES[int(s.batch_index[run])],
        )

    def errors(self, unit: int, error: Array, is_usable: bool) -> FormatErrors:
        """Returns the harm of a format; ``error`` is that of input, weight and gradient."""
        if not is_usable:
            return FormatErrors(**dict.fromkeys(_FIELDS, math.inf))
        of_input, of_weight, of_gradient = map(float, error)
        spread = float(self.change[unit]) * math.hypot(of_input, of_weight)
        return FormatErrors(
            fisher=self.batch / 2.0 * spread**2,
            taylor=spread,
            loss_divergence=spread,
            own_gradient=math.hypot(of_gradient, of_input),
            passed_gradient=math.hypot(of_gradient, of_weight),
        )


_FIELDS = ("fisher", "taylor", "loss_divergence", "own_gradient", "passed_gradient")


def _latest(history: Array) -> Array:
    """``[units]``: the last finite value of each history, 0 where there is none."""
    known = np.isfinite(history)
    last = history.shape[1] - 1 - known[:, ::-1].argmax(axis=1)
    return np.where(known.any(axis=1), history[np.arange(len(history)), last], 0.0).astype(np.float64)


def _usable(s: Simulation, run: int, ladder: Array, headroom_bits: float) -> Array:
    """``[units, levels]``: which formats may be chosen; the widest always."""
    units = s.tasks[run].units
    room = 2.0**headroom_bits
    activation = _latest(s.activation_amax[run, :units])[:, None] * room <= ACTIVATION_LIMIT[ladder]
    gradient_amax = s.windows["gradient_amax"][run, :units, None].astype(np.float64) * s.loss_scale[run]
    gradient = ~NEEDS_SCALE[ladder] | (gradient_amax * room <= GRADIENT_LIMIT[ladder])
    fits = (s.errors[run, :units][:, :, ladder] < OVERFLOW_ERROR).all(axis=1)
    survives = s.underflow[run, :units, 2][:, ladder] <= _MOST_FLUSHED
    usable = activation & gradient & fits & survives
    usable[:, 0] = True
    return np.asarray(usable)


def _scale_limits(s: Simulation) -> tuple[Array, Array]:
    """The tightest limit of the formats that a run may use and that need a loss scale, and whether there is one."""
    formats = np.maximum(s.ladder, 0)
    needs = NEEDS_SCALE[formats] & (s.ladder >= 0)
    limit = np.where(needs, GRADIENT_LIMIT[formats], np.inf).min(axis=1)
    shape = s.is_unit.shape
    return np.broadcast_to(limit[:, None], shape), needs.any(axis=1)[:, None] & s.is_unit
