"""The table of ``autoprec calibrate``: layers that cost the same share a row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from os.path import commonprefix
from typing import Any

from rich.console import Console
from rich.table import Table

from autoprec.formats import rank

_MOST_ROWS = 24
_MOST_NAMES = 6


def show(found: Mapping[str, Any], console: Console) -> None:
    """Prints costs and choices.

    Args:
        found: What ``measure`` returned.
        console: Where to print.
    """
    units = found["units"]
    if not units:
        console.print(_nothing(found), markup=False, highlight=False)
        return
    formats = sorted({name for unit in units.values() for name in unit["formats"]}, key=rank)
    groups, prefix = _groups(units), _common_prefix(units)
    table = Table(title=f"ms a step on {found['device']}, {_count(found['threads'], 'thread')}; relative error below")
    table.add_column("units", overflow="fold", ratio=3)
    table.add_column("computes", overflow="fold", ratio=3)
    for name in formats:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("choice", no_wrap=True)
    for names in groups[:_MOST_ROWS]:
        unit = units[names[0]]
        table.add_row(
            _named(names, prefix), _calls(unit["calls"]), *(_cell(unit, name) for name in formats), unit["choice"]
        )
    console.print(table)
    lines = [f"Names of units begin with `{prefix}`."] if prefix != "." else []
    for line in lines + _lines(found, groups, formats):
        console.print(line, markup=False, highlight=False)


def _groups(units: Mapping[str, Any]) -> list[list[str]]:
    """Names of units with equal costs and choice, the most expensive first."""
    groups: dict[str, list[str]] = {}
    for name, unit in units.items():
        groups.setdefault(json.dumps([unit["kind"], unit], sort_keys=True), []).append(name)

    def total_ms(names: list[str]) -> float:
        return len(names) * max(float(cost["ms"]) for cost in units[names[0]]["formats"].values())

    return sorted(groups.values(), key=total_ms, reverse=True)


def _common_prefix(names: Iterable[str]) -> str:
    """The modules that all units are in, with the last dot."""
    return commonprefix([name.rpartition(".")[0] + "." for name in names]).rpartition(".")[0] + "."


def _named(names: list[str], prefix: str) -> str:
    name = names[0].removeprefix(prefix)
    return name if len(names) == 1 else f"{name} and {len(names) - 1} alike"


def _calls(calls: Mapping[str, int]) -> str:
    return "; ".join(text if count == 1 else f"{count} times {text}" for text, count in calls.items())


def _cell(unit: Mapping[str, Any], name: str) -> str:
    cost = unit["formats"].get(name)
    if cost is None:
        return ""
    mark = "" if cost["implementation"] == "default" else "*"
    return f"{cost['ms']:.3g}{mark}\n{cost['error']:.0e}"


def _lines(found: Mapping[str, Any], groups: list[list[str]], formats: list[str]) -> list[str]:
    units, sums = found["units"], found["map_ms"]
    lines = [] if len(groups) <= _MOST_ROWS else [f"{len(groups) - _MOST_ROWS} more rows; `--json` has all units."]
    lines.append(
        f"All layers together: {sums['fp32']:.3g} ms in fp32, {sums['fastest']:.3g} ms each in its fastest format,"
        f" {sums['chosen']:.3g} ms as chosen."
    )
    for name in formats[1:]:
        slow = [unit for unit, each in units.items() if name in each["formats"] and not each["formats"][name]["pays"]]
        known = [unit for unit, each in units.items() if name in each["formats"]]
        lines.append(f"{name} pays for {len(known) - len(slow)} of {len(known)} layers.")
    if any(cost["implementation"] != "default" for unit in units.values() for cost in unit["formats"].values()):
        lines.append("* computed otherwise than torch does by itself (oneDNN's products for fp32).")
    if found["not_timed"]:
        names = list(found["not_timed"])
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        lines.append(f"Not timed: {', '.join(names[:_MOST_NAMES])}{more}; `--json` says why.")
    where = f"; kept in {found['cache']}" if found["cache"] else ""
    lines.append(
        f"{_count(found['measured'], 'layer shape')} measured in {found['seconds']:.1f} s,"
        f" {found['from_cache']} from the cache{where}"
    )
    return lines + [f"Note: {note}" for note in found["notes"]]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _nothing(found: Mapping[str, Any]) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in list(found["not_timed"].items())[:4])
    notes = "; ".join(found["notes"])
    return (
        f"No layer was timed.{f' {why}.' if why else ''}{f' {notes}.' if notes else ''} A larger `--budget` or more"
        " `--steps` may help; layers of other kinds than Linear, convolution and Embedding are not timed."
    )
