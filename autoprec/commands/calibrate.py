"""``autoprec calibrate``: what the layers of the user's model cost on this device, format by format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

_HELP = """Times the layers of your model on this device in each format, and shows what pays.

TARGET is what `autoprec compare` takes: a function, the config of a LightningCLI, or a script. A few steps of its
training are taken, to see which layers are called with which sizes. Then each different one is timed, forward, backward
and casts, and its error against float64 is measured. Nothing of yours is written.

What was measured goes into the cache, from which trainings with the same number of threads take it: they then need not
measure. The choice is what the policy `table` makes of costs and errors. With `*` a way of computing other than torch's
own was faster; `--json` names it.

Examples:

    autoprec calibrate train.py -- --epochs 3

    autoprec calibrate mypackage.train:build --threads 8

    autoprec calibrate config.yaml --formats fp32,bf16,int8 --budget 60

    autoprec calibrate examples/compare_target.py:text --json
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    target_argument = typer.Argument(..., metavar="TARGET", help="What is trained, see above.")
    words_argument = typer.Argument(None, metavar="[-- ARGUMENTS]", help="Arguments of the target.")
    formats_option = typer.Option(None, help="Formats to compare, with commas. By default those native here, 16 bits.")
    budget_option = typer.Option(20.0, min=0.1, help="Seconds that timing may take; the largest layers come first.")
    steps_option = typer.Option(12, min=3, help="Most optimizer steps of the target.")
    threads_option = typer.Option(None, min=1, help="Threads for one operation. By default what torch would use.")
    cache_option = typer.Option(True, "--cache/--no-cache", help="Read and keep results on disk.")
    json_option = typer.Option(False, "--json", help="Print the results as JSON, and all else to standard error.")

    @app.command("calibrate", help=_HELP)
    def calibrate_(
        target: str = target_argument,
        words: list[str] = words_argument,
        formats: str = formats_option,
        budget: float = budget_option,
        steps: int = steps_option,
        threads: int = threads_option,
        cache: bool = cache_option,
        as_json: bool = json_option,
    ) -> None:
        from autoprec.commands.layer_costs import Settings, measure
        from autoprec.compare.targets import load_target
        from autoprec.target_functions import TargetError

        try:
            loaded = load_target(target, words or [])
            names = None if formats is None else tuple(name.strip() for name in formats.split(",") if name.strip())
            settings = Settings(formats=names, budget_s=budget, steps=steps, threads=threads, cache=cache)
        except (ValueError, TargetError) as error:
            raise typer.BadParameter(str(error)) from error
        try:
            found = measure(loaded, settings, as_json)
        except TargetError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo(_stopped(cache), err=True)
            raise typer.Exit(130) from error
        _show(found, as_json)


def _stopped(cache: bool) -> str:
    if not cache:
        return "Stopped. Nothing was kept, because of `--no-cache`."
    from autoprec.calibration.cache import cache_folder

    return (
        f"Stopped. What was measured so far is in `{cache_folder()}`; the same command goes on from there, and"
        " trainings use it."
    )


def _show(found: dict[str, Any], as_json: bool) -> None:
    import typer

    if as_json:
        typer.echo(json.dumps(found, indent=1, allow_nan=False))
    else:
        from rich.console import Console

        from autoprec.commands.layer_costs_table import show

        show(found, Console())
    if not found["units"]:
        raise typer.Exit(1)
