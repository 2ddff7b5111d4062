"""What becomes of the formats that a request asks for, unit by unit.

Nothing is changed or recorded here; that is the work of ``knobs``, as is asking loss scale and clip threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autoprec.formats import nearest, widest
from autoprec.guard import Guard
from autoprec.history import Outcome
from autoprec.unit_formats import UnitFormats
from autoprec.units import Unit, resolve


class JudgedFormat(NamedTuple):
    """The answer for one unit.

    Attributes:
        unit: Its name, ``None`` if there is no such unit.
        requested: Format asked for; the widest one if layers that share a weight were asked for different ones.
        outcome: ``"applied"``, ``"limited"`` or ``"refused"``.
        reason: Why; empty if it is applied as asked.
    """

    unit: str | None
    requested: str
    outcome: Outcome
    reason: str


def judge_formats(
    precision: Mapping[str, str],
    formats: UnitFormats,
    guard: Guard,
    applied_steps: int,
    mask: str | None,
    restrictions: Mapping[str, str],
) -> list[JudgedFormat]:
    """Judges the precision part of a request.

    Args:
        precision: Format by unit name or pattern.
        formats: Knows the units and whether there is room for another map.
        guard: Knows what is held.
        applied_steps: Applied optimizer steps so far.
        mask: Why the precision knob cannot be moved, ``None`` if it can.
        restrictions: Format to the reason why no unit may run in it.
    """
    judged = list(_judge_each(precision, formats.units, guard, applied_steps, mask, restrictions))
    changes = {row.unit: row.requested for row in judged if row.unit is not None and row.outcome != "refused"}
    reason = formats.why_no_room(changes)
    if reason is None:
        return judged
    return [row if row.outcome == "refused" else row._replace(outcome="refused", reason=reason) for row in judged]


def _judge_each(
    precision: Mapping[str, str],
    units: Mapping[str, Unit],
    guard: Guard,
    applied_steps: int,
    mask: str | None,
    restrictions: Mapping[str, str],
) -> Iterator[JudgedFormat]:
    if mask is not None:
        for pattern, requested in precision.items():
            name = pattern if pattern in units else None
            yield JudgedFormat(name, requested, "refused", f"the precision knob is masked: {mask}")
        return
    asked, exact, missing = resolve(list(units.values()), precision)
    for pattern in missing:
        reason = f"no unit is called {pattern!r}.{nearest(pattern, list(units))}"
        yield JudgedFormat(None, precision[pattern], "refused", reason)
    for name, requested in asked.items():
        yield _judge_unit(units[name], requested, exact.get(name, []), guard, applied_steps, restrictions)


def _judge_unit(
    unit: Unit,
    requested: str,
    exact: list[str],
    guard: Guard,
    applied_steps: int,
    restrictions: Mapping[str, str],
) -> JudgedFormat:
    contradicts = len(exact) > 1
    wanted = widest(exact) if contradicts else requested
    outcome, reason = guard.check_format(unit.name, wanted, unit.legal, applied_steps, unit.reason)
    if outcome == "refused":
        why = f"{reason}; {restrictions[wanted]}" if wanted in restrictions else reason
        return JudgedFormat(unit.name, wanted, "refused", why)
    if contradicts:
        shared = f"{', '.join(unit.names)} share weights; the widest of {sorted(set(exact))} counts"
        return JudgedFormat(unit.name, wanted, "limited", shared)
    return JudgedFormat(unit.name, wanted, "applied", "")
