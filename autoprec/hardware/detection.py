"""From what a device says of itself to what the database knows about it.

A row is found by the device's name, a family by its capability. A device without a row has its family's formats and no
rates; one newer than every family has those of the closest; both are said in its notes.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from autoprec.formats import FORMATS
from autoprec.hardware import database, probing
from autoprec.hardware.database import Database, Entry, Family
from autoprec.hardware.device import Device, FormatRate

if TYPE_CHECKING:
    from autoprec.hardware.probing import Facts

UNKNOWN = "unknown"
_UNKNOWN_FORMATS = {"rocm": ("fp32", "fp16"), "xpu": ("fp32", "fp16"), "mps": ("fp32", "fp16")}
_SLICE = re.compile(r" mig \d+g\.\d+gb.*$")


def describe(device: torch.device) -> Device:
    """Returns what is known of a device: formats with rates, memory, alignment, sources.

    Args:
        device: Any torch device. One that is not known, or not there, is described as far as it goes.
    """
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _describe(device)


@functools.cache
def _describe(device: torch.device) -> Device:
    known = database.load()
    _warn_of(known)
    return match(probing.probe(device), known, str(device))


def native_formats(device: torch.device) -> tuple[str, ...]:
    """Returns the formats that the device multiplies itself, widest first; all others are emulated there.

    Args:
        device: Any torch device. float32 is always among them.
    """
    return describe(device).native


def reload() -> None:
    """Forgets what was read and detected, so that changed files count in this process."""
    for cache in (database.load, _describe, _warn):
        cache.cache_clear()


def _warn_of(known: Database) -> None:
    for problem in known.problems:
        _warn(str(problem))


@functools.cache
def _warn(problem: str) -> None:
    warnings.warn(f"autoprec leaves out a part of your hardware files. {problem}", stacklevel=2)


def match(facts: Facts, known: Database, device: str) -> Device:
    """Puts together what a device says and what the database has.

    Args:
        facts: What the device says.
        known: The database.
        device: torch's name of the device.
    """
    family, notes = _family(facts, known)
    if family is None:
        formats = {name: FormatRate() for name in _UNKNOWN_FORMATS.get(facts.device_type, ("fp32",))}
        return Device(
            device=device,
            name=facts.name,
            family=UNKNOWN,
            formats=formats,
            memory_bytes=facts.memory_bytes,
            notes=(*facts.notes, *notes),
        )
    entries = _entries(facts, known.entries.get(family.row.name, []))
    if facts.device_type != "cpu" and not any(entry.row.match for entry in entries):
        notes.append(_no_row(facts, family))
    described = _merge(facts, family, entries, device)
    return replace(described, notes=(*facts.notes, *notes, *described.notes))


def _no_row(facts: Facts, family: Family) -> str:
    if "laptop" in facts.name.lower() or "max-q" in facts.name.lower():
        why = "Laptop cards run at clocks that their makers choose"
    else:
        why = "No row of the database has this name"
    return f"{why}: formats are those of {family.row.title}, rates are not known."


def _family(facts: Facts, known: Database) -> tuple[Family | None, list[str]]:
    families = [family for family in known.families.values() if family.row.device_type == facts.device_type]
    open_to_all = [family for family in families if not family.row.capabilities]
    if facts.capability is None:
        if open_to_all and not any("does not answer" in note for note in facts.notes):
            return open_to_all[-1], []
        return None, [_no_family(facts)]
    exact = [family for family in families if facts.capability in family.row.capabilities]
    if exact:
        return exact[-1], []
    closest = _closest(facts, families)
    if closest is None:
        return None, [_no_family(facts)]
    family, capability = closest
    note = f"{facts.capability} is not in the database: taken as {family.row.title}, the closest family ({capability})."
    return family, [note]


def _no_family(facts: Facts) -> str:
    capability = f" {facts.capability}" if facts.capability else ""
    return (
        f"The database has no family for {facts.device_type}{capability}: formats are the least that such a device has."
    )


def _closest(facts: Facts, families: Iterable[Family]) -> tuple[Family, str] | None:
    """The newest family of the same line that is older than the device."""
    ours = _version(str(facts.capability))
    if ours is None:
        return None
    older = [
        (version, family, capability)
        for family in families
        for capability in family.row.capabilities
        if (version := _version(capability)) is not None and version <= ours and version[0] == ours[0]
    ]
    if not older:
        return None
    _, family, capability = max(older, key=lambda each: each[0])
    return family, capability


def _version(capability: str) -> tuple[str, tuple[int, ...]] | None:
    """A line of products in which a larger number is a later one, and the number."""
    found = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if found:
        return "sm", (int(found[1]), int(found[2]))
    found = re.fullmatch(r"gfx(\d+)(\d)([0-9a-f])", capability)
    if found:
        line = "cdna" if int(found[1]) <= 9 else "rdna"
        return line, (int(found[1]), int(found[2]), int(found[3], 16))
    return None


def plain_name(name: str) -> str:
    """Returns a device's name as patterns see it: lower case, without trade marks and without a MIG slice.

    Args:
        name: What the device calls itself.
    """
    bare = re.sub(r"\((r|tm|c)\)|[®™]", "", name.lower())
    return _SLICE.sub("", re.sub(r"\s+", " ", bare).strip())


def _entries(facts: Facts, entries: Sequence[Entry]) -> list[Entry]:
    """Rows that fit: instruction sets in the order of the file, then the row with the longest pattern that fits."""
    name = plain_name(facts.name)
    able = [entry for entry in entries if set(entry.row.requires) <= facts.flags]
    named = [
        (max(map(len, patterns)), position, entry)
        for position, entry in enumerate(able)
        if (patterns := [pattern for pattern in entry.row.match if fnmatchcase(name, pattern)])
    ]
    best = [max(named, key=lambda each: each[:2])[2]] if named else []
    return [entry for entry in able if not entry.row.match] + best


def _merge(facts: Facts, family: Family, entries: Sequence[Entry], device: str) -> Device:
    rows = [entry.row for entry in entries]
    share, notes = _share(facts, rows)
    layers: list[dict[str, Any]] = [family.row.formats, *(row.formats for row in rows)]
    formats = {name: _rate(name, layers, facts, share) for name in FORMATS if any(name in layer for layer in layers)}
    alignment = dict(family.row.alignment)
    bandwidth = None
    for row in rows:
        alignment |= row.alignment
        bandwidth = row.memory_gb_per_s or bandwidth
    documents = [source for entry in reversed(entries) for source in entry.sources] + list(family.sources)
    return Device(
        device=device,
        name=facts.name,
        family=family.row.name,
        row=tuple(row.name for row in rows),
        formats=formats,
        memory_bytes=facts.memory_bytes,
        memory_gb_per_s=bandwidth and round(bandwidth * _memory_share(facts, rows, share), 1),
        alignment={name: size for name, size in alignment.items() if name in formats},
        sources=tuple(dict.fromkeys([*documents, *family.alignment_sources])),
        notes=(*notes, *(f"{row.name}: {row.note}." for row in rows if row.note)),
    )


def _rate(name: str, layers: Iterable[dict[str, Any]], facts: Facts, share: float) -> FormatRate:
    given: dict[str, Any] = {}
    for layer in layers:
        if name in layer:
            given |= layer[name].model_dump(exclude_none=True)
    per_cycle = given.get("flops_per_cycle")
    tflops = given.get("tflops")
    if tflops is not None:
        tflops = round(tflops * share, 2)
    elif per_cycle is not None and facts.cores and facts.ghz:
        tflops = round(per_cycle * facts.cores * facts.ghz / 1e3, 2)
    return FormatRate(
        tflops=tflops,
        accumulate=given.get("accumulate"),
        is_native=given.get("native", True),
        other_tflops={kind: round(rate * share, 2) for kind, rate in given.get("other_tflops", {}).items()},
        flops_per_cycle=per_cycle,
        note=given.get("note"),
    )


def _share(facts: Facts, rows: Sequence[Any]) -> tuple[float, list[str]]:
    """Which part of a whole device this is: MIG slices and compute partitions have fewer multiprocessors."""
    whole = next((row.multiprocessors for row in reversed(rows) if row.multiprocessors), None)
    ours = facts.multiprocessors
    if whole is None or ours is None or ours >= whole:
        return 1.0, []
    note = f"A slice: {ours} of {whole} multiprocessors. Rates and bandwidth are the whole device's, scaled down."
    return ours / whole, [note]


def _memory_share(facts: Facts, rows: Sequence[Any], share: float) -> float:
    """A slice has as much of the bandwidth as of the memory."""
    whole = next((row.memory_gb for row in reversed(rows) if row.memory_gb), None)
    if share == 1.0 or whole is None or facts.memory_bytes is None:
        return share
    return float(min(1.0, facts.memory_bytes / (whole * 1e9)))
