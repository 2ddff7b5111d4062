"""``autoprec monitoring``: files for Prometheus and Grafana."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from autoprec.monitoring.files import PORT, write_files

_HELP = """Writes settings of Prometheus, alert rules, and a dashboard for Grafana into a folder.

A run shows its metrics with `AutoPrecisionCallback(monitor=9753)`, or, where its code cannot be edited, with
`AUTOPREC_MONITOR_PORT=9753` in the environment. `docs/monitoring.md` has the metrics, and how to watch a run without
either program. The settings make Prometheus scrape runs on this machine, one port for each. Its own pages are at
http://localhost:9090/graph and /alerts. Grafana takes the dashboard under *Dashboards, New, Import*.

Examples:

    autoprec monitoring watch

    prometheus --config.file=watch/prometheus.yml

    autoprec monitoring watch --port 9753 --port 9754 --force
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command.

    Args:
        app: The application.
    """
    folder_argument = typer.Argument(..., metavar="FOLDER", file_okay=False, help="Where to; it is made if missing.")
    port_option = typer.Option([PORT], "--port", min=1, max=65535, help="Port of a run; several times for several.")
    force_option = typer.Option(False, "--force", help="Replace files that are there already.")
    json_option = typer.Option(False, "--json", help="Print JSON.")

    @app.command(help=_HELP)
    def monitoring(
        folder: Path = folder_argument,
        port: list[int] = port_option,
        force: bool = force_option,
        as_json: bool = json_option,
    ) -> None:
        _write(folder, port, force, as_json)


def _write(folder: Path, ports: list[int], force: bool, as_json: bool) -> None:
    try:
        paths = write_files(folder, ports, force)
    except FileExistsError as error:
        typer.echo(f"Already there: {error}. `--force` replaces them; nothing was written.", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        typer.echo(f"Cannot write into '{folder}': {error.strerror}. Choose another folder.", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({"files": [str(path) for path in paths], "ports": ports}, indent=2))
        return
    for path in paths:
        typer.echo(f"written  {path}")
    for port in ports:
        typer.echo(f"next     in a run: AutoPrecisionCallback(monitor={port})")
    typer.echo(f"         prometheus --config.file={paths[0]}")
