"""``autoprec report``: a page on runs, comparisons and sweeps."""

from __future__ import annotations

import importlib
import json
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from autoprec.report import Prices, Report

_HELP = """Makes one HTML file of the folders of runs, comparisons and sweeps. It is read without a network.

FOLDER is one of

- the record of a run: `AutoPrecisionCallback(record=True)` writes it into the folder `autoprec` in the Trainer's log
folder while the run trains; its report can be made at any time, after a crash too.

- the folder of `autoprec compare`.

- the folder of `autoprec sweep`.

Several folders become chapters of one page: verdict, table with intervals, loss over time and steps, speed and memory,
formats of the layers over the run, the other knobs, what was refused and why, what formats cost, what the run cost and
how to run it again. With prices it says what runs cost and what they save, and what that rests on.

With `--wandb` a report is made in Weights & Biases instead, which compares the runs of a group with static precision.

Examples:

    autoprec report lightning_logs/version_0

    autoprec report autoprec-compare --out report.html --open

    autoprec report runs/long --price-per-hour 2.5 --currency EUR

    autoprec report autoprec-compare --json | jq .chapters[0].headline

    autoprec report --wandb my-team/my-project --group my-experiment
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    folders_argument = typer.Argument(None, metavar="FOLDER", help="What is reported, see above.")
    out_option = typer.Option(Path("report.html"), dir_okay=False, help="File to write.")
    price_option = typer.Option(None, help="Price of an hour of the machine.")
    energy_option = typer.Option(None, help="Price of a kilowatt-hour, where it is not part of the other price.")
    currency_option = typer.Option("USD", help="Currency of both.")
    open_option = typer.Option(False, "--open", help="Open the page in a browser.")
    json_option = typer.Option(False, "--json", help="Print texts and tables as JSON and write no page.")
    wandb_option = typer.Option(None, metavar="ENTITY/PROJECT", help="Make a report in Weights & Biases.")
    group_option = typer.Option(None, help="Group of runs in Weights & Biases, for `--wandb`.")

    @app.command("report", help=_HELP)
    def report_(
        folders: list[Path] = folders_argument,
        out: Path = out_option,
        price_per_hour: float = price_option,
        energy_price: float = energy_option,
        currency: str = currency_option,
        should_open: bool = open_option,
        as_json: bool = json_option,
        wandb: str = wandb_option,
        group: str = group_option,
    ) -> None:
        from autoprec.report import Prices

        if wandb is not None or group is not None:
            _publish(wandb, group, folders or [])
            return
        if not folders:
            raise typer.BadParameter("Name a folder at least. `autoprec report --help` says which ones there are.")
        try:
            prices = Prices(per_hour=price_per_hour, energy=energy_price, currency=currency)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        _report(folders, prices, out, as_json, should_open)


def _report(folders: list[Path], prices: Prices, out: Path, as_json: bool, should_open: bool) -> None:
    import typer

    from autoprec.report import ReportError, build

    try:
        report = build(folders, prices=prices)
    except ReportError as error:
        raise typer.BadParameter(str(error), param_hint="'FOLDER'") from error
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1, allow_nan=False))
        return
    _write(report, out)
    for chapter in report.chapters:
        typer.echo(f"{chapter.title}: {chapter.headline}")
    typer.echo(f"Written: {out}")
    if should_open and not webbrowser.open(out.resolve().as_uri()):
        typer.echo("No browser could be opened; open the file yourself.", err=True)


def _write(report: Report, out: Path) -> None:
    import typer

    from autoprec.report import write_html

    try:
        write_html(report, out)
    except ModuleNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        message = f"Cannot write `{out}`: {error.strerror or error}. Choose another file."
        raise typer.BadParameter(message, param_hint="'--out'") from error


def _publish(where: str | None, group: str | None, folders: list[Path]) -> None:
    """Makes a report in Weights & Biases and prints its address."""
    import typer

    entity, slash, project = (where or "").partition("/")
    if not (entity and slash and project) or "/" in project:
        raise typer.BadParameter(f"Passed `--wandb {where or ''}`. It must be ENTITY/PROJECT.", param_hint="'--wandb'")
    if not group:
        raise typer.BadParameter("`--wandb` compares the runs of a group: name it.", param_hint="'--group'")
    if folders:
        raise typer.BadParameter("`--wandb` reads runs from Weights & Biases: name no folder.", param_hint="'FOLDER'")
    try:
        publish = importlib.import_module("autoprec.wandb_report").publish
    except ModuleNotFoundError as error:
        name = error.name or "wandb"
        typer.echo(f"A report in Weights & Biases needs `{name}`. Run `pip install 'autoprec[wandb]'`.", err=True)
        raise typer.Exit(1) from error
    typer.echo(publish(entity, project, group))
