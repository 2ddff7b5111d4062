"""From workloads of units to costs of units: which ways to run them are compared, and which is the best of a format."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from autoprec.calibration.calibrator import Calibrator
from autoprec.calibration.layer_runs import Choice
from autoprec.calibration.workloads import Workload, multiplications
from autoprec.cost_table import NOISE, CostTable, UnitCost
from autoprec.formats import get_format
from autoprec.units import Unit

_LARGEST_ERROR = 2.0
_SMALL_ERROR = 1e-7
_ON_COPIES = {"bf16": ("linear", "conv"), "fp16": ("linear", "conv"), "int8": ("linear",)}

Counts = Mapping[str, Mapping[Workload, int]]
"""For each unit how often it computes what in a step."""
Candidates = Callable[[str, str, str], tuple[str, ...]]
"""Names the implementations of a kind of layer in a format on a type of device, torch's own first."""


def only_default(kind: str, format_name: str, device_type: str) -> tuple[str, ...]:
    """Names torch's own implementation alone."""
    return ("default",)


class Pricing:
    """What is compared for the units of a fit, and what they cost.

    Args:
        units: All units by name.
        formats: Formats to compare, by unit name, widest first.
        device_type: Where they run.
        keeps_copies: Whether layers may run on kept copies of their weights.
        candidates: Names implementations.
    """

    def __init__(
        self,
        units: Mapping[str, Unit],
        formats: Mapping[str, Sequence[str]],
        device_type: str,
        keeps_copies: bool,
        candidates: Candidates = only_default,
    ) -> None:
        self._units = units
        # 8 bits that are emulated are never offered, and slow to measure
        self._formats = {
            name: [n for n in names if get_format(n).bits > 8 or not units[name].is_emulated(n)]
            for name, names in formats.items()
        }
        self._device_type = device_type
        self._keeps_copies = keeps_copies
        self._candidates = candidates

    def demand(self, workloads: Counts) -> dict[Workload, list[Choice]]:
        """Returns what is to be known, the workloads with most to compute first.

        Args:
            workloads: Of each unit.
        """
        demand: dict[Workload, dict[Choice, None]] = {}
        work: Counter[Workload] = Counter()
        for name, counts in workloads.items():
            for workload, count in counts.items():
                work[workload] += count * multiplications(workload)
                for format_name in self._formats[name]:
                    choices = self._choices(self._units[name], workload, format_name, counts)
                    demand.setdefault(workload, {}).update(dict.fromkeys(choices))
        return {workload: list(demand[workload]) for workload in sorted(demand, key=lambda each: -work[each])}

    def table(self, workloads: Counts, calibrator: Calibrator) -> CostTable:
        """Returns what is known of the costs of units.

        Args:
            workloads: Of each unit.
            calibrator: Knows what workloads cost.
        """
        costs: dict[str, dict[str, UnitCost]] = {}
        for name, counts in workloads.items():
            found = {each: self._unit_cost(name, each, counts, calibrator) for each in self._formats[name]}
            costs[name] = {format_name: cost for format_name, cost in found.items() if cost is not None}
        return CostTable(costs)

    def _choices(
        self, unit: Unit, workload: Workload, format_name: str, counts: Mapping[Workload, int]
    ) -> Sequence[Choice]:
        is_emulated = unit.is_emulated(format_name)
        # layers that run once in a step, on weights of their own
        is_lone = sum(counts.values()) <= len(unit.modules) and (len(unit.modules) == 1 or unit.kind == "block")
        is_kind = workload.kind in _ON_COPIES.get(format_name, ()) and not workload.layer.startswith("ConvTranspose")
        on_copies = self._keeps_copies and is_kind and is_lone and workload.trains and not is_emulated
        # an implementation is chosen for a unit as a whole, which may mix kinds
        names = self._candidates(unit.kind, format_name, self._device_type)
        return [Choice(format_name, name, is_emulated and format_name == "fp16", on_copies) for name in names]

    def _unit_cost(
        self, name: str, format_name: str, counts: Mapping[Workload, int], calibrator: Calibrator
    ) -> UnitCost | None:
        """All calls of a unit in the cheapest implementation whose error is small enough."""
        totals: dict[str, UnitCost] = {}
        for workload, count in counts.items():
            for choice in self._choices(self._units[name], workload, format_name, counts):
                so_far = totals.get(
                    choice.implementation, UnitCost(0.0, implementation=choice.implementation, error=0.0)
                )
                measured = calibrator.cost(workload, choice)
                if measured is None:
                    totals[choice.implementation] = so_far._replace(ms=math.inf)
                    continue
                totals[choice.implementation] = so_far._replace(
                    ms=so_far.ms + count * measured.ms,
                    activation_bytes=so_far.activation_bytes + count * measured.activation_bytes,
                    copy_bytes=so_far.copy_bytes + count * measured.copy_bytes,
                    error=max(so_far.error, measured.error),
                )
        return best_of(list(totals.values()))


def best_of(costs: Sequence[UnitCost]) -> UnitCost | None:
    """Returns the fastest of some implementations of a format.

    One other than torch's own must be faster by more than noise, and its error at most twice that of torch's own.

    Args:
        costs: Costs of the implementations, torch's own first; infinite where one was not measured.

    Returns:
        The best, ``None`` where torch's own was not measured.
    """
    if not costs or math.isinf(costs[0].ms):
        return None
    default, *others = costs
    limit = max(_LARGEST_ERROR * default.error, _SMALL_ERROR)
    rivals = [cost for cost in others if cost.error <= limit and cost.ms < default.ms * (1.0 - NOISE)]
    return min(rivals, key=lambda cost: cost.ms, default=default)
