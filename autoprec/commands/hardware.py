"""``autoprec hardware``: what this machine's devices compute, what the database knows, and what it recommends."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from autoprec.commands import hardware_tables as tables
from autoprec.formats import nearest
from autoprec.hardware import database, describe, devices, recommend, scenarios
from autoprec.hardware.recommendation import BOUNDS

_HELP = """Shows which formats this machine's devices compute themselves, how fast, and where the numbers come from.

Rates are the vendor's **dense** figures in TFLOP/s; figures for sparse matrices, twice as large, are nowhere in the
table. For CPUs they are operations per cycle and core. What is not stated by a vendor is left empty, not guessed.

Your own devices: put files with rows into the folder that `--folders` names (`docs/hardware.md` has an example), and
check them with `--check`.

Examples:

    autoprec hardware

    autoprec hardware --all                        # every known device

    autoprec hardware --family ada                 # with its documents

    autoprec hardware --recommend training-large   # formats for it here

    autoprec hardware --check my_card.toml         # is this file right?

    autoprec hardware --json
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command.

    Args:
        app: The application.
    """
    all_option = typer.Option(False, "--all", help="List every device of the database.")
    family_option = typer.Option(None, metavar="NAME", help="Show one family of the database.")
    recommend_option = typer.Option(None, metavar="SCENARIO", help=f"Formats for {', '.join(scenarios())}.")
    bound_option = typer.Option(
        None, metavar="LIMIT", help="With --recommend: compute or memory, what limits the model."
    )
    check_option = typer.Option(None, metavar="FILE", help="Check a file of your own; ends with 1 if it is broken.")
    folders_option = typer.Option(False, "--folders", help="Print the folders where files of your own are looked for.")
    json_option = typer.Option(False, "--json", help="Print JSON.")

    @app.command(help=_HELP)
    def hardware(
        everything: bool = all_option,
        family: str | None = family_option,
        recommend: str | None = recommend_option,
        bound: str | None = bound_option,
        check: Path | None = check_option,
        folders: bool = folders_option,
        as_json: bool = json_option,
    ) -> None:
        wanted = {"--all": everything, "--family": family, "--recommend": recommend, "--check": check}
        given = [name for name, value in {**wanted, "--folders": folders}.items() if value]
        if len(given) > 1:
            raise typer.BadParameter(f"{' and '.join(given)} do not go together. Choose one.")
        if bound is not None and (recommend is None or bound not in BOUNDS):
            raise typer.BadParameter("compute or memory, together with --recommend.", param_hint="'--bound'")
        if check is not None:
            _check(check, as_json)
        elif folders:
            _print_folders(as_json)
        elif everything or family is not None:
            _list(family, as_json)
        elif recommend is not None:
            _recommend(recommend, bound, as_json)
        else:
            _describe(as_json)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2))


def _known() -> database.Database:
    """The database, with a line on the error stream for each thing that was left out of the user's files."""
    known = database.load()
    for problem in known.problems:
        typer.echo(f"left out: {problem}", err=True)
    return known


def _described() -> list[Any]:
    _known()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said already
        return [describe(device) for device in devices()]


def _describe(as_json: bool) -> None:
    described = _described()
    if as_json:
        return _print_json([device.to_dict() for device in described])
    console = Console()
    for device in described:
        console.print(tables.of_device(device))
    return None


def _list(family: str | None, as_json: bool) -> None:
    known = _known()
    if family is not None and family not in known.families:
        names = sorted(known.families)
        message = f"Known families: {', '.join(names)}.{nearest(family, names)}"
        raise typer.BadParameter(message, param_hint="'--family'")
    names = [family] if family is not None else list(known.families)
    if as_json:
        return _print_json([tables.family_data(known, name) for name in names])
    Console().print(tables.of_database(known, names, is_detailed=family is not None))
    return None


def _recommend(scenario: str, bound: str | None, as_json: bool) -> None:
    if scenario not in scenarios():
        message = f"Known scenarios: {', '.join(scenarios())}.{nearest(scenario, scenarios())}"
        raise typer.BadParameter(message, param_hint="'--recommend'")
    found = [recommend(device, scenario, bound=bound) for device in _described()]
    if as_json:
        return _print_json([each.to_dict() for each in found])
    console = Console()
    for each in found:
        console.print(tables.of_recommendation(each, scenarios()[scenario]))
    return None


def _check(path: Path, as_json: bool) -> None:
    problems = database.check(path)
    if as_json:
        _print_json([{"file": str(p.file), "row": p.row, "field": p.field, "message": p.message} for p in problems])
    elif problems:
        for problem in problems:
            typer.echo(str(problem), err=True)
    else:
        typer.echo(f"{path}: every row is right.")
    if problems:
        raise typer.Exit(1)


def _print_folders(as_json: bool) -> None:
    folders = [str(folder) for folder in database.user_directories()]
    if as_json:
        return _print_json(folders)
    sys.stdout.write("".join(f"{folder}\n" for folder in folders))
    return None
