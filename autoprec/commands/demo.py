"""``autoprec demo``: two models trained with and without autoprec, side by side."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from autoprec.commands import extras

if TYPE_CHECKING:
    import typer

MIN_MINUTES = 1.0

_HELP = """Trains two models with and without autoprec, side by side, and compares step time and loss.

A byte-level GPT of about 10 M parameters on the Python standard library's own source, and a small CNN on scikit-learn's
digits; each three ways: with `precision="32-true"`, with `"bf16-mixed"`, and with `"32-true"` and
`AutoPrecisionCallback(interval=10)`, called `autoprec` in the results. It decides every 10 steps, not every 50 as by
default: runs are short. Seeds and order of samples are the same, runs take a few steps in turn. Nothing is downloaded.
About 6 minutes on 2 cores.

Two numbers tell about time, both as a ratio to `bf16-mixed`. *Step time* is the median over rounds and leaves out the
first 10 steps of each run: in them autoprec still computes in fp32. *Whole run* is the sum of all steps, those 10
included. Starting a run and computing held-out losses are in neither. Fewer than 5 rounds give `n/a`.

Prints a table with both, held-out loss, skipped steps, memory and formats, and writes `demo.json` (every number),
`demo.png` (losses, step times and formats over the steps) and `logs/` (what each run printed) into the output folder.

Examples:

    autoprec demo

    autoprec demo --quick            # 30 seconds, tiny models: does it run?

    autoprec demo --minutes 3 --out results/demo

    autoprec demo --threads 8        # on a larger machine

    autoprec demo --quick --json     # every number, for a program
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    out_option = typer.Option(
        Path("autoprec-demo"), file_okay=False, writable=True, help="Folder for the results, created if missing."
    )
    minutes_option = typer.Option(
        6.0,
        min=MIN_MINUTES,
        help="No new round after this time, so that slow machines take fewer steps. 3 rounds are made in any case.",
    )
    threads_option = typer.Option(2, min=1, help="Threads for one operation.")
    quick_option = typer.Option(False, "--quick", help="Tiny models and few steps: does it run here?")
    json_option = typer.Option(False, "--json", help="Print what `demo.json` holds, and all else to standard error.")

    @app.command(help=_HELP)
    def demo(
        out: Path = out_option,
        minutes: float = minutes_option,
        threads: int = threads_option,
        quick: bool = quick_option,
        as_json: bool = json_option,
    ) -> None:
        _demo(out, minutes, threads, quick, as_json)


def _demo(out: Path, minutes: float, threads: int, quick: bool, as_json: bool) -> None:
    import typer

    missing = extras.missing("cli")
    if missing:  # found out now, not after minutes of training
        typer.echo(f"The demo needs {', '.join(missing)}. {extras.how_to_install('cli')}", err=True)
        raise typer.Exit(1)
    _check_folder(out)
    from rich.console import Console

    from autoprec.compare.turns import RunError
    from autoprec.demo.run import DemoSettings, run_demo

    try:
        run_demo(DemoSettings(out=out, minutes=minutes, threads=threads, quick=quick), Console(stderr=as_json))
    except RunError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo(f"Stopped. What the runs printed is in `{out / 'logs'}`; a demo begins anew.", err=True)
        raise typer.Exit(130) from error
    if as_json:
        typer.echo((out / "demo.json").read_text(encoding="utf-8"))


def _check_folder(out: Path) -> None:
    import typer

    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        message = f"Cannot write into '{out}': {error.strerror}. Choose another folder."
        raise typer.BadParameter(message, param_hint="'--out'") from error
