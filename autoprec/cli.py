"""The ``autoprec`` command. Typer, rich and what the demo needs come with the extra ``cli`` and are imported on use."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from autoprec import __version__
from autoprec.machine import version

if TYPE_CHECKING:
    import torch
    import typer

# modules of the extras that this version uses
_EXTRAS = {
    "cli": ("typer", "rich", "matplotlib", "scipy", "sklearn"),
    "compress": ("zstandard",),
    "plan": ("scipy",),
    "ray": ("ray",),
    "rl": ("gymnasium", "stable_baselines3", "sb3_contrib"),
    "sweep": ("optuna", "optuna_dashboard", "sqlalchemy", "filelock", "plotly"),
}
_UNUSED_EXTRAS = ("wandb", "report", "monitor")  # named for parts that are still to come
_INSTALL = "Run `pip install '.[cli]'` in a checkout of autoprec."
MIN_MINUTES = 1.0

_APP_HELP = """Sets number formats layer by layer, loss scale and gradient clipping while a Lightning model trains.

In your own training there is nothing to run here: add the callback to the Trainer.

    from autoprec import AutoPrecisionCallback

    Trainer(callbacks=[AutoPrecisionCallback()])

Start with `autoprec doctor` (what this machine computes itself; `autoprec hardware` has the rates), then
`autoprec demo` (a comparison, measured here). `autoprec compare` does the same with your own training.
"""
_DEMO_HELP = """Trains two models with and without autoprec, side by side, and compares step time and loss.

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
"""
_DOCTOR_HELP = """Shows what this machine computes itself, what autoprec emulates on it, and what is installed.

Example:

    autoprec doctor
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words after the program's name. ``None``: those of this process.

    Returns:
        The exit code.
    """
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"The command line of autoprec needs `{error.name}`, which is not installed. {_INSTALL}",
            file=sys.stderr,
        )
        return 1
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(words, prog_name="autoprec")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def build_app() -> typer.Typer:
    """Returns the typer application.

    Raises:
        ModuleNotFoundError: If typer is not installed.
    """
    import typer

    from autoprec.commands import compare, evaluate_policy, hardware, sweep, train_policy

    app = typer.Typer(
        help=_APP_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode="markdown",
    )

    version_option = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    )
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

    @app.callback()
    def options(show_version: bool = version_option) -> None:
        """Holds the options that stand before the command."""

    @app.command(help=_DEMO_HELP)
    def demo(
        out: Path = out_option,
        minutes: float = minutes_option,
        threads: int = threads_option,
        quick: bool = quick_option,
    ) -> None:
        _demo(out, minutes, threads, quick)

    @app.command(help=_DOCTOR_HELP)
    def doctor() -> None:
        for line in diagnosis():
            typer.echo(line)

    compare.add_to(app)
    hardware.add_to(app)
    sweep.add_to(app)
    train_policy.add_to(app)
    evaluate_policy.add_to(app)

    @app.command("version", help="Prints the version.")
    def version_() -> None:
        _print_version(True)

    return app


def _demo(out: Path, minutes: float, threads: int, quick: bool) -> None:
    import typer

    missing = _missing("cli")
    if missing:  # found out now, not after minutes of training
        typer.echo(f"The demo needs {', '.join(missing)}. {_INSTALL}", err=True)
        raise typer.Exit(1)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        message = f"Cannot write into '{out}': {error.strerror}. Choose another folder."
        raise typer.BadParameter(message, param_hint="'--out'") from error
    from autoprec.compare.turns import RunError
    from autoprec.demo.run import DemoSettings, run_demo

    try:
        run_demo(DemoSettings(out=out, minutes=minutes, threads=threads, quick=quick))
    except RunError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


def _print_version(wanted: bool) -> None:
    import typer

    if wanted:
        typer.echo(f"autoprec {__version__}")
        raise typer.Exit


def diagnosis() -> list[str]:
    """Returns what this machine computes itself, what is emulated on it, and what is installed, line by line."""
    import torch

    from autoprec.hardware import devices

    lines = [
        f"autoprec   {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"torch      {torch.__version__}, lightning {version('lightning')}",
        f"threads    {torch.get_num_threads()}",
    ]
    for device in devices():
        lines += _device_lines(device)
    for extra in _EXTRAS:
        missing = _missing(extra)
        state = f"missing {', '.join(missing)}: pip install '.[{extra}]' in a checkout" if missing else "installed"
        lines.append(f"extra      {extra}: {state}")
    return [*lines, f"           not used yet: {', '.join(_UNUSED_EXTRAS)}"]


def _missing(extra: str) -> list[str]:
    return [module for module in _EXTRAS[extra] if importlib.util.find_spec(module) is None]


def _device_lines(device: torch.device) -> list[str]:
    from autoprec.formats import FORMATS
    from autoprec.hardware import describe

    described = describe(device)
    emulated = [name for name in FORMATS if name not in described.native]
    rows = ", ".join(described.row) or f"family {described.family}"
    return [
        f"device     {described.device}: {described.name}, {rows}",
        f"  native   {', '.join(described.native)}",
        f"  emulated {', '.join(emulated) or 'none'}",
        *(f"  note     {note}" for note in described.notes),
    ]


if __name__ == "__main__":
    sys.exit(main())
