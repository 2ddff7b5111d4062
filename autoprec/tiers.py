"""Tiers: the narrowest format that policies may choose for a layer, by pattern of names or by kind."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence

from autoprec.config import RECIPES
from autoprec.readings import LAYER_KINDS
from autoprec.units import Unit


def tier_of(unit: Unit, tiers: Mapping[str, str]) -> str | None:
    """Returns the narrowest format that policies may choose for a unit, ``None`` where that is left open.

    Args:
        unit: The unit.
        tiers: Format by pattern of unit names or by kind; the first pattern that fits counts before the kind.
    """
    for pattern, name in tiers.items():
        if pattern not in LAYER_KINDS and fnmatch.fnmatchcase(unit.name, pattern):
            return name
    return tiers.get(unit.kind)


def describe_unused(tiers: Mapping[str, str] | None, units: Sequence[Unit]) -> str | None:
    """Says which tiers fit no layer, and what comes closest to each; ``None`` if all do.

    Args:
        tiers: Format by pattern of unit names or by kind, ``None`` for none. A recipe's own are for any model.
        units: Decision units of the model.
    """
    if not tiers or tiers == RECIPES["tiers"].tiers:
        return None
    names, kinds = [unit.name for unit in units], sorted({unit.kind for unit in units})
    unused = [key for key in tiers if not _fits(key, names, kinds)]
    if not unused:
        return None
    texts = [f"{key!r}{_closest(key, names, kinds)}" for key in unused]
    return (
        f"autoprec: `tiers` has keys that fit no layer of this model: {'; '.join(texts)}. A key is a pattern of layer"
        f" names or a kind of layer; the kinds here are {', '.join(kinds) or 'none'}."
    )


def _fits(key: str, names: Sequence[str], kinds: Sequence[str]) -> bool:
    return key in kinds if key in LAYER_KINDS else bool(fnmatch.filter(names, key))


def _closest(key: str, names: Sequence[str], kinds: Sequence[str]) -> str:
    found = difflib.get_close_matches(key.strip("*"), [*kinds, *names], n=2, cutoff=0.5)
    return f" (closest: {', '.join(map(repr, found))})" if found else ""
