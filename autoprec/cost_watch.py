"""What formats cost in one fit: asks for measurements, keeps the table, and compares its predictions with the steps.

What lives here: which workloads the fit has, when something is measured, the table that follows, the times of its steps
and which formats do not pay. What does not: measuring (``calibration``) and the table itself (``cost_table``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

from autoprec.attention import AttentionSignature
from autoprec.attention_costs import choose as choose_attention
from autoprec.attention_costs import find_cases
from autoprec.calibration.attention import AttentionCase
from autoprec.calibration.calibrator import SHORTEST_S, Calibrator
from autoprec.calibration.pricing import Candidates, Pricing, best_of, only_default
from autoprec.calibration.workloads import Workload, find_workloads
from autoprec.config import CalibrationConfig
from autoprec.cost import Product
from autoprec.cost_table import CostTable, StepModel, UnitCost
from autoprec.formats import rank
from autoprec.hardware import describe
from autoprec.layers import Runtime
from autoprec.machine_load import total_bytes
from autoprec.step_clock import StepClock
from autoprec.unit_formats import UnitFormats
from autoprec.units import Unit

SHORTEST_RUN_S = 30.0
"""A run that is expected to train for less than this measures nothing unless it is asked to."""
_MOST_OF_HOST = 0.1

Counts = dict[str, Counter[Workload]]


class CostWatch:
    """Costs of one fit.

    Args:
        unit_formats: Formats of its units.
        runtime: Shared state of its layers.
        config: Settings.
        candidates: Names the implementations of a kind of layer in a format on a device, torch's own first.
        choose: Called with the name of a unit and its best implementation by format; ``None`` where there is only one.

    Attributes:
        table: What is known, empty before the first measurement.
        model: Predicts the time of a step.
        workloads: What each unit was seen to compute in a step.
        calibrator: Measures.
        is_wanted: Whether this fit is to know costs at all.
        is_asked: Whether it measures however short it is.
        sees_calls: Whether windows that are measured for a decision note which calls layers get.
        attention_cases: Returns the kinds of calls of attention that this fit makes.
        attention: Implementation by the key of a case.
        keeps_copies: Whether layers may run on kept copies of their weights.
        has_decided: Whether a time has decided something, so that another run may decide otherwise.
        clock: Times of the steps, where a clock is read.
    """

    def __init__(
        self,
        unit_formats: UnitFormats,
        runtime: Runtime,
        config: CalibrationConfig,
        candidates: Candidates = only_default,
        choose: Callable[[str, Mapping[str, str]], None] | None = None,
    ) -> None:
        self.table = CostTable()
        self.model = StepModel()
        self.is_wanted = self.sees_calls = False
        self.is_asked = config.enabled is True
        self.attention_cases: Callable[[], Sequence[AttentionCase]] = partial(find_cases, runtime, runtime.device_type)
        self.attention: dict[str, str] = {}
        self.keeps_copies = False
        self.has_decided = False
        self.clock = StepClock()
        self._device = _device_of(unit_formats.units.values(), runtime.device_type)
        self.calibrator = Calibrator(self._device, config.cache)
        self._unit_formats = unit_formats
        self._runtime = runtime
        self._config = config
        self._candidates = candidates
        self._choose = choose
        self.workloads: Counts = {}
        self._settled: tuple[Counts, bool, list[str]] | None = None
        self._is_incomplete = False
        self._is_timed = False

    def begin(self, looks: bool) -> None:
        """Called when a fit begins: finds out whether it is to know costs.

        Args:
            looks: Whether its policy looks at measurements.
        """
        is_enabled = self.is_asked or (self._config.enabled == "auto" and looks)
        self.is_wanted = is_enabled and not self._unit_formats.is_masked
        self.sees_calls = (self.is_asked or looks) and not self._unit_formats.is_masked
        # same seed, same bits: no clock is read
        self._is_timed = self.is_wanted and not torch.are_deterministic_algorithms_enabled()

    # ---- windows ----

    def open_window(self, is_sampling: bool, has_new_formats: bool) -> None:
        """Called when a window opens.

        Args:
            is_sampling: Whether it is measured for a decision.
            has_new_formats: Whether it is the first one in some formats.
        """
        self._runtime.calls = [] if is_sampling and self.sees_calls else None
        self._runtime.wants_attention = is_sampling and self.is_wanted
        if self._runtime.wants_attention:
            self._runtime.attention_seen.clear()
        if not self._is_timed:
            return
        self.clock.note(perf_counter(), has_new_formats)

    def forget_calls(self) -> None:
        """Called when a training step is tried again."""
        if self._runtime.calls is not None:
            self._runtime.calls.clear()

    def take_calls(self) -> None:
        """Turns the calls of the window that was looked at into workloads."""
        calls, self._runtime.calls = self._runtime.calls, None
        if calls:
            self.workloads = find_workloads(calls, self._unit_formats.units, self._unit_formats.current)

    @property
    def step_ms(self) -> float | None:
        """Median of the latest step times, ``None`` while there are too few."""
        return self.clock.step_ms

    # ---- decisions ----

    def update(self, expected_s: Callable[[float], float]) -> None:
        """Called when a decision is due, on the training thread: measures what is new, within the budget.

        Args:
            expected_s: Returns how long the run trains in all, from the seconds that a step takes.
        """
        self.take_calls()
        cases = self.attention_cases() if self.is_wanted else ()
        if not self.is_wanted or not (self.workloads or cases):
            return
        budget_s = self._budget_s(expected_s) - self.calibrator.spent_s if self._is_timed else 0.0
        now = self.workloads, self.keeps_copies, sorted(case.key for case in cases)
        if self._settled != now or (self._is_incomplete and budget_s >= SHORTEST_S):
            self._look(budget_s, cases)
            self._settled = now
        self._check_prediction()

    def _look(self, budget_s: float, cases: Sequence[AttentionCase]) -> None:
        """Makes the table anew, from what is there and what the budget lets it measure."""
        pricing, before = self._pricing, self.calibrator.spent_s
        demand = pricing.demand(self.workloads)
        is_complete = self._choose_attention(budget_s, cases)
        self.calibrator.look_up(demand)
        self.calibrator.measure(demand, budget_s - (self.calibrator.spent_s - before))
        if self.calibrator.spent_s != before:
            self.clock.note_pause()
        self.table = pricing.table(self.workloads, self.calibrator)
        self._is_incomplete = not (is_complete and self.calibrator.knows(demand))
        self.has_decided = self.has_decided or bool(self.table.implementations())
        if self._choose is not None:
            for name in self.table.units:
                best = {each: self.table.best_implementation(name, each) for each in self.table.formats(name)}
                self._choose(name, best)

    def _choose_attention(self, budget_s: float, cases: Sequence[AttentionCase]) -> bool:
        """Compares the implementations of attention; returns whether all cases are known."""
        found = self.calibrator.compare_attention(cases, budget_s)
        for key, costs in found.items():
            names = sorted(costs, key=lambda name: name != "default")
            best = best_of([UnitCost(costs[n].ms, costs[n].activation_bytes, 0, n, costs[n].error) for n in names])
            self.attention[key] = "default" if best is None else best.implementation
            self.has_decided |= self.attention[key] != "default"
        choose_attention(self._runtime, self.attention, self._left_bytes)
        return len(found) == len(cases)

    @property
    def _left_bytes(self) -> float:
        """What calls of attention may keep beyond what torch's own keep."""
        budget = self._config.memory_budget_bytes
        if budget is None:
            return _MOST_OF_HOST * (total_bytes() or 0)
        return max(budget - self.table.map_bytes(self._unit_formats.current), 0)

    def _budget_s(self, expected_s: Callable[[float], float]) -> float:
        if self.is_asked:
            return self._config.budget_s
        step_ms = self.step_ms
        if step_ms is None:
            return 0.0
        training_s = expected_s(step_ms * 1e-3)
        if training_s < SHORTEST_RUN_S:
            return 0.0
        return min(self._config.budget_share * training_s, self._config.budget_s)

    def _check_prediction(self) -> None:
        step_ms, formats = self.step_ms, self._unit_formats.current
        if step_ms is not None and self.table and self.table.covers(formats):
            self.model.observe(self.table.map_ms(formats), step_ms)

    @property
    def _pricing(self) -> Pricing:
        units, current = self._unit_formats.units, self._unit_formats.current
        formats = {
            name: sorted({*self._unit_formats.steerable(units[name]), current[name]}, key=rank)
            for name in self.workloads
        }
        return Pricing(units, formats, self._runtime.device_type, self.keeps_copies, self._candidates)

    # ---- which formats pay ----

    def products(self, unit_name: str) -> list[Product]:
        """What the linear layers of a unit were seen to multiply in a step, nothing if it was not looked at.

        Args:
            unit_name: The unit.
        """
        counts: Counter[Workload] = self.workloads.get(unit_name, Counter())
        return [product for workload in counts if (product := workload.product) is not None]

    def has_seen(self, unit_name: str) -> bool:
        """Whether it is known what a unit computes."""
        return unit_name in self.workloads or unit_name in self.table.units

    def knows(self, unit_name: str, format_name: str) -> bool:
        """Whether a unit was measured in a format."""
        return self.table.cost(unit_name, format_name) is not None

    def relative_cost(self, unit_name: str, format_name: str) -> float:
        """By which share of a step's time a step would change if a unit took another format; NaN if not known.

        Args:
            unit_name: The unit.
            format_name: The other format.
        """
        formats = self._unit_formats.current
        now, then = (self.table.unit_ms(unit_name, name) for name in (formats[unit_name], format_name))
        if now is None or then is None:
            return math.nan
        units_ms = self.table.map_ms(formats)
        return (then - now) / (self.model.predict_ms(units_ms) if self.model.is_fitted else units_ms)

    def relative_times(self, unit_name: str, formats: Iterable[str]) -> dict[str, float]:
        """Times of a unit in formats, in units of that in its current one.

        Args:
            unit_name: The unit.
            formats: What is asked for.

        Returns:
            Times as measured; where its current format was not measured, by the stated rates of the device. Formats
            that are not known to save anything by either are left out.
        """
        current = self._unit_formats.current[unit_name]
        measured = self.table.unit_ms(unit_name, current)
        if measured is not None:
            known = {name: self.table.unit_ms(unit_name, name) for name in formats}
            return {name: ms / measured for name, ms in known.items() if ms is not None}
        times = {name: self._stated_time(unit_name, name) for name in formats}
        now = times.get(current) or math.nan
        return {current: 1.0, **{name: t / now for name, t in times.items() if t is not None and not math.isnan(now)}}

    def _stated_time(self, unit_name: str, format_name: str) -> float | None:
        if format_name == "fp32":
            return 1.0
        unit = self._unit_formats.units[unit_name]
        # rates are those of products, and a table is only read
        if unit.is_emulated(format_name) or all(isinstance(module, nn.Embedding) for module in unit.modules):
            return None
        ratio = describe(self._device).ratio(format_name)
        return None if ratio is None or ratio <= 1.0 else 1.0 / ratio

    def why_not(self, unit_name: str, format_name: str, offered: Iterable[str]) -> str | None:
        """Says why a format is not offered for a unit, ``None`` if it is.

        Args:
            unit_name: The unit.
            format_name: A format other than its current one.
            offered: Formats that are offered otherwise, the current one included.
        """
        budget = self._config.memory_budget_bytes
        formats = self._unit_formats.current
        more = self._more_bytes(unit_name, format_name)
        if budget is not None and more is not None:
            total = self.table.map_bytes(formats)
            if more > 0 and total + more > budget:
                return f"{format_name} would take {total + more} bytes of activations and copies, {budget} are allowed"
            if more < 0 and total > budget:
                return None  # slower, but it saves memory that must be saved
        reason = self.table.why_too_slow(unit_name, format_name, offered)
        self.has_decided = self.has_decided or reason is not None
        return reason

    def _more_bytes(self, unit_name: str, format_name: str) -> int | None:
        new = self.table.unit_bytes(unit_name, format_name)
        old = self.table.unit_bytes(unit_name, self._unit_formats.current[unit_name])
        return None if new is None or old is None else new - old

    # ---- reports ----

    def lines(self) -> list[str]:
        """Lines of the table at the end of fit; none where costs were not wanted."""
        if not self.is_wanted:
            return []
        calibrator, lines = self.calibrator, []
        if self.table:
            line = f"  calibration: {len(calibrator.measured)} layer shapes measured in {calibrator.spent_s:.1f} s"
            line += f", {len(calibrator.from_cache)} from the cache" if calibrator.from_cache else ""
            lines.append(line + ("; timing decided: the same seed may give other formats" if self.has_decided else ""))
        lines += [f"  calibration: {note}" for note in calibrator.notes]
        return lines + self._prediction_lines()

    def _prediction_lines(self) -> list[str]:
        if not self.model.is_fitted:
            return []
        formats = self._unit_formats.current
        predicted = self.model.predict_ms(self.table.map_ms(formats))
        measured = "" if self.step_ms is None else f", measured {self.step_ms:.3g} ms"
        megabytes = self.table.map_bytes(formats) / 1e6
        lines = [f"  cost       a step predicted as {predicted:.3g} ms{measured}; layers keep {megabytes:.3g} MB"]
        if self.model.corrections:
            lines.append(
                f"  cost       predictions were off by up to {self.model.largest_error:.0%} and were corrected: layers"
                f" times {self.model.factor:.3g}, the rest {self.model.rest_ms:.3g} ms"
            )
        return lines

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Returns primitives only."""
        self.take_calls()
        return {
            "attention": dict(self.attention),
            "table": self.table.to_dict(),
            "model": self.model.state_dict(),
            "calibrator": self.calibrator.state_dict(),
            "workloads": _plain(self.workloads),
            "settled": None if self._settled is None else [_plain(self._settled[0]), *self._settled[1:]],
            "attention_seen": [[each.to_list(), calls] for each, calls in self._runtime.attention_seen.items()],
            "is_incomplete": self._is_incomplete,
            "keeps_copies": self.keeps_copies,
            "has_decided": self.has_decided,
            "first_ms": self.clock.first_ms,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned; units that are not in this model are left out.

        Args:
            state: The saved state, empty if the checkpoint is of an earlier version.
        """
        if not state:
            return
        known = self._unit_formats.units
        self.table = CostTable.from_dict({name: costs for name, costs in state["table"].items() if name in known})
        self.attention = dict(state["attention"])
        self.model.load_state_dict(state["model"])
        self.calibrator.load_state_dict(state["calibrator"])
        self.workloads = _counts(state["workloads"], known)
        settled = state["settled"]
        self._settled = None if settled is None else (_counts(settled[0], known), bool(settled[1]), list(settled[2]))
        for fields, calls in state["attention_seen"]:
            self._runtime.attention_seen[AttentionSignature.from_list(fields)] = int(calls)
        self._is_incomplete = bool(state["is_incomplete"])
        self.keeps_copies = bool(state["keeps_copies"])  # a decision may come before the first step
        self.has_decided = bool(state["has_decided"])
        self.clock.first_ms = float(state.get("first_ms", math.nan))


def _plain(workloads: Counts) -> dict[str, list[list[Any]]]:
    return {name: [[list(w), count] for w, count in counts.items()] for name, counts in workloads.items()}


def _counts(plain: Mapping[str, Sequence[Sequence[Any]]], known: Container[str]) -> Counts:
    return {
        name: Counter({Workload.from_list(fields): count for fields, count in counts})
        for name, counts in plain.items()
        if name in known
    }


def _device_of(units: Iterable[Unit], device_type: str) -> torch.device:
    devices = (parameter.device for unit in units for parameter in unit.parameters)
    return next((device for device in devices if device.type == device_type), torch.device(device_type))
