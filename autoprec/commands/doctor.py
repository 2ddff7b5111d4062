"""``autoprec doctor``: what this machine computes itself, what is installed and set, and what does not go together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

_HELP = """Shows what this machine computes itself, what autoprec emulates on it, what is installed, and what is wrong.

The output is what a bug report needs: paste it as it is. `autoprec hardware` has the rates of the devices. Names of
folders are in it, nothing else of yours; values of environment variables only of those that torch, OpenMP, oneDNN, MKL,
CUDA and autoprec read.

Examples:

    autoprec doctor

    autoprec doctor --json > doctor.json
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    json_option = typer.Option(False, "--json", help="Print JSON.")

    @app.command(help=_HELP)
    def doctor(as_json: bool = json_option) -> None:
        from autoprec.commands.diagnosis import diagnose

        found = diagnose()
        if as_json:
            typer.echo(json.dumps(found, indent=1, allow_nan=False))
        else:
            for line in lines_of(found):
                typer.echo(line)


def lines_of(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields a diagnosis as lines to read and to paste.

    Args:
        found: What ``diagnose`` returned.
    """
    versions, system, threads = found["versions"], found["system"], found["threads"]
    others = ", ".join(f"{name} {each}" for name, each in versions.items() if name not in ("autoprec", "python"))
    yield f"autoprec   {versions['autoprec']}, Python {versions['python']}"
    yield f"versions   {others}"
    yield f"system     {system['platform']}"
    yield f"processor  {system['processor']}, {_cores(system)}, {_gib(system['memory_bytes'])} of memory"
    yield f"threads    torch {threads['torch']}, between operations {threads['interop']}"
    for device in found["devices"]:
        yield from _device_lines(device)
    yield from _kernel_lines(found["kernels"])
    yield from _cache_lines(found["caches"])
    for name, value in found["environment"].items():
        yield f"variable   {name}={value}"
    for extra, missing in found["extras"].items():
        how = f"missing {', '.join(missing)}: pip install '.[{extra}]' in a checkout"
        yield f"extra      {extra}: {how if missing else 'installed'}"
    lightning = found["lightning"]
    yield f"lightning  packages {', '.join(lightning['packages'])}; entry point {lightning['entry_point']}"
    for name, reason in lightning["refused_plugins"].items():
        yield f"           {name} is installed; its precision plugin is refused: {reason}"
    for line in found["advice"]:
        yield f"advice     {line}"
    if not found["advice"]:
        yield "advice     none: nothing that is known to go wrong"


def _cores(system: Mapping[str, Any]) -> str:
    usable, cores = system["usable_cores"], system["cores"]
    return f"{cores} cores" if usable == cores else f"{usable} of {cores} cores usable"


def _gib(count: int | None) -> str:
    return "unknown size" if count is None else f"{count / 2**30:.1f} GiB"


def _device_lines(device: Mapping[str, Any]) -> Iterator[str]:
    rows = ", ".join(device["row"]) or f"family {device['family']}"
    yield f"device     {device['device']}: {device['name']}, {rows}"
    yield f"  native   {', '.join(device['native'])}"
    yield f"  emulated {', '.join(device['emulated']) or 'none'}"
    for note in device["notes"]:
        yield f"  note     {note}"


def _kernel_lines(kernels: Mapping[str, Any]) -> Iterator[str]:
    for name, each in kernels["implementations"].items():
        state = "available" if each["available"] else "not available"
        yield f"kernels    {name}: {state}, {each['detail']}"
    yield f"  chosen   {kernels['chosen']}"
    if kernels["extension"] is not None:
        yield f"  file     {kernels['extension']}"


def _cache_lines(caches: Mapping[str, Any]) -> Iterator[str]:
    for name, each in caches.items():
        state = "writable" if each["is_writable"] else "NOT writable"
        yield f"cache      {name}: {each['folder']}, {state}"
        for file in each["files"]:
            yield f"  file     {file['name']}: {file['state']}"
