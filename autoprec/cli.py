"""The ``autoprec`` command. Typer, rich and what commands need come with extras and are imported on use.

What lives here: the application, exit codes, and what becomes of an error. What does not: the commands (``commands``).
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoprec import __version__
from autoprec.target_functions import PlainError

if TYPE_CHECKING:
    import typer

TRACEBACK = "--traceback"
TRACEBACK_VARIABLE = "AUTOPREC_TRACEBACK"
FAILED, INTERRUPTED = 1, 130

_HELP = """Sets number formats layer by layer, loss scale and gradient clipping while a Lightning model trains.

In your own training there is nothing to run here: add the callback to the Trainer.

    from autoprec import AutoPrecisionCallback

    Trainer(callbacks=[AutoPrecisionCallback()])

Start with `autoprec doctor` (what this machine computes itself; `autoprec hardware` has the rates), then
`autoprec demo` (a comparison, measured here). `autoprec compare` does the same with your own training.

Exit codes: 0 fine, 1 the work failed, 2 wrong usage, 130 Ctrl-C. Errors are one message; `--traceback`, anywhere on the
line, or `AUTOPREC_TRACEBACK=1` shows where they come from. With `--json` standard output is JSON and nothing else.

Examples:

    autoprec compare --help          # each command's help has examples

    autoprec --install-completion    # commands and options by the Tab key
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words after the program's name. ``None``: those of this process.

    Returns:
        The exit code.
    """
    _replace_what_cannot_be_written()
    words, shows_traceback = _without_traceback(list(sys.argv[1:] if arguments is None else arguments))
    try:
        app = build_app()
        app(words, prog_name="autoprec")
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning ends the process so
            return _interrupted()
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        _report(error, shows_traceback)
        return FAILED
    return 0


def _replace_what_cannot_be_written() -> None:
    """Has a character that the terminal's encoding lacks come out as ``?``, where it would end the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _without_traceback(words: list[str]) -> tuple[list[str], bool]:
    """Takes the option out wherever it stands before ``--``; what follows that is the target's own."""
    end = words.index("--") if "--" in words else len(words)
    own = [word for word in words[:end] if word != TRACEBACK]
    is_set = os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")
    return [*own, *words[end:]], is_set or len(own) < end


def _interrupted() -> int:
    print("Stopped.", file=sys.stderr)
    return INTERRUPTED


def _report(error: Exception, shows_traceback: bool) -> None:
    if shows_traceback:
        traceback.print_exception(error, file=sys.stderr)
        return
    print(_message(error), file=sys.stderr)


def _message(error: Exception) -> str:
    from autoprec.commands import extras

    words = str(error).strip() or "without a message"
    if isinstance(error, PlainError):
        return words
    if isinstance(error, ModuleNotFoundError) and (extra := extras.extra_of(error.name)) is not None:
        return f"This command of autoprec needs `{error.name}`, which is not installed. {extras.how_to_install(extra)}"
    return f"{type(error).__name__}: {words}\nThe same command with `{TRACEBACK}` shows where this comes from."


def build_app() -> typer.Typer:
    """Returns the typer application.

    Raises:
        ModuleNotFoundError: If typer is not installed.
    """
    import typer

    from autoprec.commands import (
        apply,
        calibrate,
        compare,
        demo,
        doctor,
        evaluate_policy,
        hardware,
        monitoring,
        report,
        sweep,
        train_policy,
    )

    app = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    version_option = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    )
    traceback_option = typer.Option(False, TRACEBACK, help="Show where errors come from.")  # taken out before

    @app.callback()
    def options(show_version: bool = version_option, show_traceback: bool = traceback_option) -> None:
        """Holds the options that stand before the command."""

    demo.add_to(app)
    doctor.add_to(app)
    hardware.add_to(app)
    calibrate.add_to(app)
    compare.add_to(app)
    report.add_to(app)
    apply.add_to(app)
    sweep.add_to(app)
    monitoring.add_to(app)
    train_policy.add_to(app)
    evaluate_policy.add_to(app)

    @app.command("version", help="Prints the version.\n\nExample:\n\n    autoprec version")
    def version_() -> None:
        _print_version(True)

    return app


def _print_version(wanted: bool) -> None:
    import typer

    if wanted:
        typer.echo(f"autoprec {__version__}")
        raise typer.Exit


if __name__ == "__main__":
    sys.exit(main())
