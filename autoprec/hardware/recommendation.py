"""Formats for a scenario on a device, from a table with a reason and a source for each row.

A recommendation knows families of devices and kinds of layers, not the model: what pays in a given layer is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoprec.formats import get_format, nearest, rank
from autoprec.hardware.database import read_toml
from autoprec.hardware.detection import describe
from autoprec.hardware.device import Device, Source

if TYPE_CHECKING:
    from autoprec.hardware.rows import RecommendationRow, ScenarioRow

_TABLE = Path(__file__).parent / "data" / "scenarios.toml"
BOUNDS = ("compute", "memory")


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Formats for one scenario on one device.

    Attributes:
        device: What the device calls itself.
        family: Its family.
        scenario: The scenario.
        bound: Whether arithmetic or memory limits it.
        by_kind: Format by kind of layer; fits ``AutoPrecisionConfig(tiers=...)``, kind ``"norm"`` excepted.
        formats: The formats in use, widest first; fits ``AutoPrecisionConfig(formats=...)``.
        needs_loss_scale: Whether fp16 is among them.
        passed_over: Formats that would have come first and why they do not, by kind of layer.
        reason: Why these formats.
        source: The document behind it.
    """

    device: str
    family: str
    scenario: str
    bound: str
    by_kind: Mapping[str, str]
    formats: tuple[str, ...]
    needs_loss_scale: bool
    passed_over: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    reason: str
    source: Source

    def to_dict(self) -> dict[str, Any]:
        """Returns the same as plain data, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Table:
    scenarios: dict[str, ScenarioRow]
    rows: list[RecommendationRow]
    sources: dict[str, Source]


@functools.cache
def _table() -> _Table:
    from autoprec.hardware.rows import RecommendationRow, ScenarioRow, SourceRow

    document = read_toml(_TABLE)
    scenarios = [ScenarioRow.model_validate(each) for each in document["scenario"]]
    rows = [RecommendationRow.model_validate(each) for each in document["recommendation"]]
    sources = {key: SourceRow.model_validate(each) for key, each in document["sources"].items()}
    documents = {key: Source(title=row.title, url=row.url) for key, row in sources.items()}
    return _Table({row.name: row for row in scenarios}, rows, documents)


def scenarios() -> dict[str, str]:
    """Returns the scenarios that there are recommendations for, with what is meant by each."""
    return {name: row.title for name, row in _table().scenarios.items()}


def recommend(device: torch.device | Device, scenario: str, *, bound: str | None = None) -> Recommendation:
    """Returns formats for a scenario on a device.

    Args:
        device: A device of torch's, or one that was described.
        scenario: One of :func:`scenarios`.
        bound: ``"compute"`` or ``"memory"``, whichever limits the model. Default: what usually does.

    Raises:
        ValueError: If the scenario or the bound is not known.

    Example:
        >>> recommend(torch.device("cpu"), "fine-tuning").by_kind["norm"]
        'fp32'
    """
    table = _table()
    if scenario not in table.scenarios:
        raise ValueError(
            f"Passed `recommend(scenario={scenario!r})`. Known scenarios: {sorted(table.scenarios)}."
            f"{nearest(scenario, table.scenarios)}"
        )
    if bound not in (*BOUNDS, None):
        raise ValueError(f"Passed `recommend(bound={bound!r})`. `bound` must be 'compute', 'memory' or None.")
    described = device if isinstance(device, Device) else describe(device)
    limit = bound or table.scenarios[scenario].bound
    row = _row(table.rows, scenario, limit, described.family)
    chosen = {kind: _choose(described, names, limit) for kind, names in row.formats.items()}
    by_kind: dict[str, str] = {kind: name for kind, (name, _) in chosen.items()}
    used = tuple(sorted({"fp32", *by_kind.values()}, key=rank))
    return Recommendation(
        device=described.name,
        family=described.family,
        scenario=scenario,
        bound=limit,
        by_kind=by_kind,
        formats=used,
        needs_loss_scale="fp16" in used,
        passed_over={kind: why for kind, (_, why) in chosen.items() if why},
        reason=row.reason,
        source=table.sources[row.source],
    )


def _row(rows: Sequence[RecommendationRow], scenario: str, bound: str, family: str) -> RecommendationRow:
    fitting = [
        (row.families is not None, row.bound is not None, position, row)
        for position, row in enumerate(rows)
        if row.scenario == scenario and row.bound in (bound, None) and (row.families is None or family in row.families)
    ]
    return max(fitting, key=lambda each: each[:3])[3]


def _choose(device: Device, names: Sequence[str], bound: str) -> tuple[str, dict[str, str]]:
    """The first format that is native and, where arithmetic limits, faster than the next one with more bits."""
    passed_over: dict[str, str] = {}
    for position, name in enumerate(names):
        if name not in device.native:
            passed_over[name] = "emulated on this device"
            continue
        bits = get_format(name).bits
        later = [other for other in names[position + 1 :] if other in device.native]
        wider = next((other for other in later if get_format(other).bits > bits), "fp32")
        ratio = device.ratio(name, wider)
        if bound == "compute" and name != wider and ratio is not None and ratio <= 1.0:
            passed_over[name] = f"no faster than {wider} by the stated rates"
            continue
        return name, passed_over
    return "fp32", passed_over
