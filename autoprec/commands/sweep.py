"""``autoprec sweep``: offline tuning of a training, its precision and its hyper-parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from autoprec.sweep import SweepResult

_HELP = """Tunes the callback, maps of formats and your own hyper-parameters with Optuna, and says what is best.

CONFIG is a YAML file: what is trained, what is searched, and what is best. In `arguments`, `callback` and `map` a value
is fixed, and a mapping with `choices`, or with `low` and `high`, is searched:

    target: train.py:build           # or the YAML of a LightningCLI

    arguments:                       # of your function, or dotted keys

      lr: {low: 1e-4, high: 1e-2, log: true}

    callback:                        # of AutoPrecisionCallback, by dotted names

      policy: {choices: [rule, table, "fixed:bf16"]}

      config.clip.multiplier: {low: 1.0, high: 4.0}

    objectives: [val_loss, training_seconds]

    trials: 30

Static precisions (32-true, bf16-mixed, ...) are always tried first, with your own defaults. Every trial trains in a
fresh process. A trial that diverges is a result with its reason.

Stopped by Ctrl-C or killed, it goes on where it was when it is started again; no finished trial is lost. The output
folder holds the study (`study.db`), each trial (`trials/`), the Pareto front (`pareto.html`, `pareto.json`), and the
winner for LightningCLI (`best.yaml`). Several machines work on one sweep when each runs the same command with one
`--storage`. docs/sweep.md has every key.

Examples:

    autoprec sweep examples/sweep.yaml

    autoprec sweep sweep.yaml --workers 2 --trials 50

    autoprec sweep sweep.yaml --storage postgresql://me@host/sweeps

    optuna-dashboard sqlite:///autoprec-sweep/study.db

Needs the extra `sweep`.
"""
_INTERRUPTED = 130


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    config_argument = typer.Argument(..., metavar="CONFIG", help="YAML file of the sweep.")
    workers_option = typer.Option(
        None, min=1, help="Trials at a time on this machine. By default as CONFIG says, or 1."
    )
    trials_option = typer.Option(None, min=1, help="Trials of the whole sweep, those that are finished included.")
    storage_option = typer.Option(
        None, help="SQLAlchemy URL, journal:FILE or grpc://HOST:PORT. By default study.db in the output folder."
    )
    out_option = typer.Option(None, file_okay=False, help="Folder for results. By default as CONFIG says.")
    resume_option = typer.Option(
        False, "--resume", help="Refuse to begin a new sweep: there must be one to go on with."
    )
    fresh_option = typer.Option(False, "--fresh", help="Forget what the folder holds.")
    launcher_option = typer.Option("processes", help="processes, ray (extra `ray`), or inline for debugging.")
    json_option = typer.Option(False, "--json", help="Print the results as JSON, and all else to standard error.")

    @app.command("sweep", help=_HELP)
    def sweep_(
        config: Path = config_argument,
        workers: int = workers_option,
        trials: int = trials_option,
        storage: str = storage_option,
        out: Path = out_option,
        resume: bool = resume_option,
        fresh: bool = fresh_option,
        launcher: str = launcher_option,
        as_json: bool = json_option,
    ) -> None:
        if resume and fresh:
            raise typer.BadParameter("--resume goes on with what is there and --fresh forgets it: choose one.")
        chosen = {"workers": workers, "trials": trials, "storage": storage, "out": out, "launcher": launcher}
        _sweep(config, {**chosen, "resume": resume, "fresh": fresh}, as_json)


def _sweep(config: Path, chosen: dict[str, Any], as_json: bool) -> None:
    import typer
    from rich.console import Console

    console = Console(stderr=as_json)
    try:
        from autoprec.sweep import SweepError, SweepInterruptedError, run
    except ModuleNotFoundError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    from autoprec.sweep.launchers import LAUNCHERS, WorkerError
    from autoprec.target_functions import TargetError

    if chosen["launcher"] not in LAUNCHERS:
        message = f"Passed `--launcher {chosen['launcher']}`. It must be one of {', '.join(LAUNCHERS)}."
        raise typer.BadParameter(message)
    try:
        result = run(config, console=console, **chosen)
    except (SweepError, TargetError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except (WorkerError, ModuleNotFoundError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except SweepInterruptedError as end:
        _show(end.result, console)
        typer.echo("Stopped. Run the same command again to go on.", err=True)
        raise typer.Exit(_INTERRUPTED) from end
    _show(result, console)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=1, allow_nan=False))
    raise typer.Exit(0 if result.best is not None else 1)


def _show(result: SweepResult, console: Console) -> None:
    from rich import box
    from rich.table import Table

    from autoprec.sweep.pareto_page import counts_text, value_text

    if result.front:
        title = "Pareto front" if len(result.objectives) > 1 else "Best"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("trial", justify="right")
        table.add_column("arm", no_wrap=True)
        for one in result.objectives:
            table.add_column(one.name, justify="right", overflow="fold")
        table.add_column("values", overflow="fold")
        shown = [trial for trial in result.trials if trial.number in result.front or trial.baseline is not None]
        for trial in sorted(shown, key=lambda trial: (trial.number not in result.front, trial.number)):
            mark = " *" if result.best is not None and trial.number == result.best.number else ""
            values = [f"{value:.5g}" for value in trial.values] or ["-"] * len(result.objectives)
            said = "\n".join(f"{_short(name)} {value_text(value)}" for name, value in trial.params.items())
            on_front = "" if trial.number in result.front else " (baseline)"
            table.add_row(f"{trial.number}{mark}", f"{trial.arm}{on_front}", *values, trial.reason or said)
        console.print(table)
    console.print(f"{counts_text(result)}. {result.message}", markup=False, highlight=False)
    folder = result.out
    files = [
        "pareto.html",
        "pareto.json",
        *(name for name in ("best.yaml", "best_map.yaml") if (folder / name).exists()),
    ]
    console.print(f"Written to {folder}: {', '.join(files)}", markup=False, highlight=False, soft_wrap=True)


def _short(name: str) -> str:
    for section in ("callback.config.", "callback.", "arguments."):
        name = name.removeprefix(section)
    return name
