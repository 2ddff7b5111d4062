"""Tables of ``autoprec hardware``, narrow enough for 80 columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoprec.formats import FORMATS
from autoprec.hardware import Device, FormatRate, Recommendation, Source
from autoprec.hardware.database import Database


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(*headings: str) -> Table:
    return Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)


def _pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in pairs:
        if value:
            table.add_row(key, escape(value))
    return table


def _documents(sources: Sequence[Source]) -> list[tuple[str, str]]:
    return [("source", f"{source.title}\n{source.url}" if source.url else source.title) for source in sources]


def of_device(device: Device) -> RenderableType:
    """Returns what is known of one device.

    Args:
        device: The device.
    """
    is_cpu = any(rate.flops_per_cycle is not None for rate in device.formats.values())
    table = _table("format", "computed")
    table.add_column("op/cycle/core" if is_cpu else "TFLOP/s", justify="right")
    table.add_column("summed in")
    table.add_column("multiple\nof", justify="right")
    table.add_column("remark", overflow="fold")
    for name in FORMATS:
        rate = device.formats.get(name, FormatRate(is_native=False))
        table.add_row(
            name,
            "[green]native[/]" if rate.is_native else "[yellow]emulated[/]",
            _number(rate.flops_per_cycle if is_cpu else rate.tflops),
            rate.accumulate or "",
            str(device.alignment.get(name, "")),
            escape(_remark(rate)),
        )
    memory = "" if device.memory_bytes is None else f"{device.memory_bytes / 1e9:.1f} GB"
    bandwidth = "" if device.memory_gb_per_s is None else f"{_number(device.memory_gb_per_s)} GB/s"
    head = [
        ("family", device.family),
        ("row", ", ".join(device.row) or "none"),
        ("memory", ", ".join(part for part in (memory, bandwidth) if part)),
    ]
    tail = [*(("note", note) for note in device.notes), *_documents(device.sources)]
    title = Text.assemble((device.device, "bold"), f"  {device.name}")
    return Group(title, Padding(Group(_pairs(head), table, _pairs(tail)), (0, 0, 1, 2), expand=False))


def _remark(rate: FormatRate) -> str:
    others = [f"{_number(value)} summed in {kind}" for kind, value in rate.other_tflops.items() if value != rate.tflops]
    return "; ".join([*others, *([rate.note] if rate.note else [])])


def family_data(known: Database, name: str) -> dict[str, Any]:
    """Returns one family with its rows as plain data.

    Args:
        known: The database.
        name: The family.
    """
    family = known.families[name]
    rows = [
        {
            **entry.row.model_dump(exclude_none=True, exclude={"family", "source"}),
            "sources": [{"title": source.title, "url": source.url} for source in entry.sources],
            "file": str(entry.file),
        }
        for entry in known.entries[name]
    ]
    sources = (*family.sources, *family.alignment_sources)
    return {
        **family.row.model_dump(exclude_none=True, exclude={"source", "alignment_sources"}),
        "sources": [{"title": source.title, "url": source.url} for source in sources],
        "devices": rows,
    }


def of_database(known: Database, names: Sequence[str], *, is_detailed: bool) -> RenderableType:
    """Returns the rows of some families.

    Args:
        known: The database.
        names: The families.
        is_detailed: Whether documents and remarks are wanted as well.
    """
    table = _table("device")
    for heading in ("GB", "GB/s", *FORMATS):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in names:
        table.add_row(f"[bold]{name}[/]")
        for entry in known.entries[name]:
            row = entry.row
            cells = [_number(row.memory_gb), _number(row.memory_gb_per_s)]
            for format_name in FORMATS:
                rate = row.formats.get(format_name)
                cells.append(_number(rate.tflops or rate.flops_per_cycle) if rate else "")
            table.add_row(f" {escape(row.name)}", *cells)
        table.add_section()
    legend = Text("Dense TFLOP/s; for CPUs operations per cycle and core. Empty: no vendor states it.", style="dim")
    details = [_details(known, name) for name in names] if is_detailed else []
    return Group(table, *details, legend)


def _details(known: Database, name: str) -> RenderableType:
    family, entries = known.families[name], known.entries[name]
    alignment = ", ".join(f"{key} {size}" for key, size in family.row.alignment.items())
    notes = [("note", f"{entry.row.name}: {entry.row.note}") for entry in entries if entry.row.note]
    remarks = [("note", f"{key}: {rate.note}") for key, rate in family.row.formats.items() if rate.note]
    sources = [source for entry in entries for source in entry.sources]
    pairs = [
        ("family", family.row.title),
        ("capability", ", ".join(family.row.capabilities)),
        ("formats", ", ".join(family.row.formats)),
        ("multiples of", alignment),
        *remarks,
        *notes,
        *_documents(list(dict.fromkeys([*family.sources, *family.alignment_sources, *sources]))),
    ]
    return Padding(_pairs(pairs), (0, 0, 1, 0), expand=False)


def of_recommendation(found: Recommendation, title: str) -> RenderableType:
    """Returns one recommendation.

    Args:
        found: The recommendation.
        title: What the scenario means.
    """
    table = _table("kind of layer", "format", "passed over")
    for kind, name in found.by_kind.items():
        why = "; ".join(f"{other}: {reason}" for other, reason in found.passed_over.get(kind, {}).items())
        table.add_row(kind, name, escape(why))
    formats = json.dumps(found.formats)[1:-1] + ("," if len(found.formats) == 1 else "")
    pairs = [
        ("scenario", f"{found.scenario}: {title}"),
        ("limited by", found.bound),
        ("reason", found.reason),
        ("loss scale", "needed for fp16" if found.needs_loss_scale else ""),
        ("use", f"AutoPrecisionConfig(formats=({formats}))"),
        *_documents([found.source]),
    ]
    heading = Text.assemble((found.device, "bold"), f"  family {found.family}")
    return Group(heading, Padding(Group(table, _pairs(pairs)), (0, 0, 1, 2), expand=False))
