"""What a step is charged where it is not measured: a declared simulation of devices by their stated rates.

A step costs a fixed overhead, and for each unit its share of the model's multiplications, divided by the rate of its
format. That is how the proxies that policies are trained on are charged, too. Models of this study are far too small
for a GPU to reach those rates; the simulation says what the same choices of formats would be worth in models that are
large enough. The time of decisions and of looking at rounding errors is not simulated.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.cost_table import CostTable, StepModel, UnitCost
from autoprec.envs.profiles import Profile, Range
from autoprec.hardware import database
from autoprec.units import Unit, find_units

MEASURED = "cpu"
"""The charge that is measured: processor time on the machine at hand."""
SIMULATED = {"h100": ("hopper", "H100 SXM"), "a100": ("ampere", "A100 SXM4 80GB")}
"""Family and row of the capability database by the name of a charge."""
CHARGES = (MEASURED, *SIMULATED)
OVERHEAD = 0.4
"""Fixed time of a step relative to its products in fp32: the middle of what proxies are given."""
_WIDE_PRODUCT = 1.0 / 3.0
"""Share of the products of an int8 layer that stay in bf16: that of the weight gradient."""
_STEP_MS = 10.0
_FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8")


@functools.cache
def profile_of(charge: str) -> Profile:
    """Returns what a device of the capability database charges, relative to fp32 without TF32.

    Args:
        charge: One of ``SIMULATED``.
    """
    family, name = SIMULATED[charge]
    (entry,) = [each for each in database.load().entries[family] if each.row.name == name]
    native = database.load().families[family].row.formats
    rates = {key: row.tflops for key, row in entry.row.formats.items() if key in native and row.tflops is not None}
    cost = {key: rates["fp32"] / rates[key] for key in _FORMATS if key in rates}
    if "int8" in cost:
        cost["int8"] = _WIDE_PRODUCT * cost["bf16"] + (1.0 - _WIDE_PRODUCT) * cost["int8"]
    fixed = Range(low=OVERHEAD, high=OVERHEAD)
    return Profile(name=charge, cost=cost, overhead=fixed, batch_exponent=Range(low=1.0, high=1.0))


@dataclass(frozen=True)
class StepCharge:
    """Charges the steps of one model, in steps in fp32 at the first batch size.

    Args:
        profile: What the device charges; the middle of its ranges counts.
        shares: Share of the model's multiplications by unit, in the model's order.
    """

    profile: Profile
    shares: Mapping[str, float]

    def step(self, formats: Mapping[str, str], batch_ratio: float = 1.0) -> float:
        """Returns the time of a step.

        Args:
            formats: Format by unit.
            batch_ratio: Samples in units of those of the first batch size.
        """
        overhead = _middle(self.profile.overhead)
        names = [formats[unit] for unit in self.shares]
        changes = sum(a != b for a, b in zip(names, names[1:], strict=False))
        products = sum(share * self.profile.cost[name] for share, name in zip(self.shares.values(), names, strict=True))
        growth = float(batch_ratio ** _middle(self.profile.batch_exponent))
        return (overhead + (products + self.profile.cast_cost * changes) * growth) / (1.0 + overhead)

    def table(self) -> CostTable:
        """Returns the same as the table of costs that a policy would have measured on the device."""
        return CostTable(
            {
                unit: {name: UnitCost(_STEP_MS * share * cost) for name, cost in self.profile.cost.items()}
                for unit, share in self.shares.items()
            }
        )

    def note_step(self, model: StepModel) -> None:
        """Lets a fit know what a whole step takes in fp32.

        Args:
            model: Predicts the time of its steps.
        """
        model.observe(_STEP_MS, _STEP_MS * (1.0 + _middle(self.profile.overhead)))


def _middle(range: Range) -> float:
    return (range.low + range.high) / 2.0


def unit_shares(module: nn.Module, answer: Any, batch: Any) -> dict[str, float]:
    """Returns the share of each unit in the multiplications by weight matrices.

    Args:
        module: The model, in fp32.
        answer: Computes its output for the batch.
        batch: Any batch.
    """
    work: dict[str, float] = {}
    handles = []
    for unit in find_units(module):
        if unit.has_matrix and unit.kind != "embedding":
            for part in unit.modules:
                handles.append(part.register_forward_hook(functools.partial(_note, work, unit)))
    try:
        with torch.no_grad():
            answer(module, batch)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(work.values())
    return {unit.name: work[unit.name] / total for unit in find_units(module) if unit.name in work}


def _note(work: dict[str, float], unit: Unit, module: nn.Module, inputs: Any, output: Any) -> None:
    """Every weight is used once for each place of the output: row, pixel or point of time."""
    found = output[0] if isinstance(output, tuple) else output
    channels = found.shape[1] if unit.kind == "conv" else found.shape[-1]
    weights = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1)
    work[unit.name] = work.get(unit.name, 0.0) + weights * found.numel() / channels
