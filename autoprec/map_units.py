"""Which unit of a model gets which format of a map that is to be applied as it stands.

A fit records what cannot be and goes on (``judgement``); here it is an error that says what is close.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from autoprec.lookalike import registers_subclasses
from autoprec.units import Unit, resolve, select

_CLOSE = 5


def judge(units: Sequence[Unit], precision: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the formats by unit, and the units that a pattern meets and that cannot have its format, with the reason.

    Args:
        units: All units of the model.
        precision: Format by unit name or fnmatch pattern.

    Raises:
        ValueError: If a key names no unit or none that can have its format, or names exactly one that cannot.
    """
    asked, exact, missing = resolve(units, precision)
    if missing or not asked:
        raise ValueError(_unknown(units, missing or list(precision)))
    by_name = {unit.name: unit for unit in units}
    refused = {name: why for name, each in asked.items() if (why := _why_not(by_name[name], each)) is not None}
    hard = {name for name in refused if asked[name] != "fp32"}  # what cannot be steered is in fp32 anyway
    named = sorted(hard & exact.keys())
    fruitless = [pattern for pattern in precision if all(unit.name in hard for unit in select(units, pattern))]
    if named or fruitless:
        first = named[0] if named else next(unit.name for unit in select(units, fruitless[0]))
        raise ValueError(f"The map asks for {asked[first]} for {first!r}, which cannot be: {refused[first]}.")
    return {name: each for name, each in asked.items() if name not in refused}, refused


def _why_not(unit: Unit, format_name: str) -> str | None:
    if unit.reason is not None:
        return unit.reason
    if any(registers_subclasses(type(module)) for module in unit.modules):
        return "its class runs code when it is extended (`__init_subclass__`)"
    return None if format_name in unit.legal else f"this layer runs in {', '.join(unit.legal)}"


def _unknown(units: Sequence[Unit], missing: Sequence[str]) -> str:
    names = [unit.name for unit in units if unit.reason is None]
    if not names:
        reasons = dict.fromkeys(unit.reason for unit in units)
        why = f": {'; '.join(str(reason) for reason in reasons)}" if reasons else ", for it has no parameters"
        return f"This model has no layer that can be given a format{why}. A single layer goes into an `nn.Sequential`."
    if not missing:
        return f"The map names no unit. Keys are names or patterns such as {names[0]!r} or '*', values are formats."
    parts = {part for name in names for part in (name, *name.split("."))}
    close = [match for key in missing for match in difflib.get_close_matches(key.strip("*."), parts, _CLOSE, 0.5)]
    hits = [name for name in names if any(part in (name, *name.split(".")) for part in close)] or names
    keys = ", ".join(repr(key) for key in missing)
    return (
        f"The map names {keys}, which {'meets' if len(missing) == 1 else 'meet'} no unit of this model. Close to it:"
        f" {', '.join(repr(name) for name in hits[:_CLOSE])}. `autoprec.units.find_units(model)` lists all"
        f" {len(names)} units."
    )
