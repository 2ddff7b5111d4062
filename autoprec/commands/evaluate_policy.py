"""``autoprec evaluate-policy``: what a policy is worth on held-out tasks, against all rivals."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from autoprec.commands.time_left import TimeLeft, duration

if TYPE_CHECKING:
    import typer

    from autoprec.policies.evaluate import EvaluationSettings, Progress

QUICK_TASKS = 48
_NO_POLICY = """This version ships no policy: the table is played in its place.
`autoprec train-policy` trains a policy, `--policy FOLDER` evaluates it.
"""
_HELP = """Plays a policy and all its rivals on tasks that no policy has learnt from, and says what the policy is worth.

A task is a short training whose time and hardware are simulated and whose numerics are real. Each has a fixed budget of
time. The score is the fall of the held-out log loss in units of what fp32 without clipping makes of the same budget.

Rivals have the same knobs as the policy: fp32, bf16, fp16 with a GradScaler and the narrowest format, all with a clip;
random moves; the rule; the table of costs and errors, plain, with a batch schedule, with costs learnt from step times;
plans by Fisher, Taylor and SNIP; and, in a checkout, what searches have found and left in `docs/results`.

Intervals are 95% bootstraps over tasks and training seeds. `evaluation.json` in the output folder holds every number,
`evaluation.md` the tables, and each bank has a picture. Stopped by Ctrl-C or killed, it goes on where it was when it is
started again. Where this version ships no policy and none is passed, the table is played in its place.

Banks: test, val, train, deep (8 and 10 layers), wide (96 units), and `only-mlp`, `only-cnn`, `only-transformer`,
`only-recurrent` for a policy that was trained without one architecture.

Examples:

    autoprec evaluate-policy                  # the shipped policy, 400 tasks

    autoprec evaluate-policy --quick          # a minute or two: does it run?

    autoprec evaluate-policy --policy autoprec-policy/seed-0

    autoprec evaluate-policy --policy runs/seed-0 --policy runs/seed-1

    autoprec evaluate-policy --bank test --bank deep --bank wide

    autoprec evaluate-policy --policy table   # the table in a policy's place
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    policy_option = typer.Option(
        None,
        metavar="FOLDER",
        help="Folder of a policy, or `table` for the table. Repeat it for each seed of one policy."
        " By default the shipped policy.",
    )
    bank_option = typer.Option(
        ["test"], metavar="BANK", help="Bank of tasks. Repeatable; the last line is about the first one."
    )
    tasks_option = typer.Option(400, min=2, help="Tasks of the first bank that count.")
    other_option = typer.Option(150, min=2, help="Tasks of each further bank.")
    out_option = typer.Option(Path("autoprec-evaluation"), file_okay=False, help="Folder for results; goes on there.")
    processes_option = typer.Option(None, min=1, help="Processes, one thread each. By default one for each core.")
    quick_option = typer.Option(False, "--quick", help=f"{QUICK_TASKS} tasks: does it run here?")
    json_option = typer.Option(False, "--json", help="Print the results as JSON, and all else to standard error.")

    @app.command("evaluate-policy", help=_HELP)
    def evaluate_policy(
        policy: list[str] = policy_option,
        bank: list[str] = bank_option,
        tasks: int = tasks_option,
        other_tasks: int = other_option,
        out: Path = out_option,
        processes: int = processes_option,
        quick: bool = quick_option,
        as_json: bool = json_option,
    ) -> None:
        _check_extras()
        counts = [min(count, QUICK_TASKS) if quick else count for count in (tasks, other_tasks)]
        _evaluate(_settings(_chosen(policy or [], as_json), bank, counts, out, processes), as_json)


def _check_extras() -> None:
    import typer

    needed = {"stable_baselines3": "rl", "gymnasium": "rl", "scipy": "cli", "matplotlib": "cli"}
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:  # found out now, not after minutes
        extras = ",".join(sorted({needed[name] for name in missing}))
        message = (
            f"`autoprec evaluate-policy` needs {', '.join(missing)}. Run `pip install '.[{extras}]'` in a checkout."
        )
        typer.echo(message, err=True)
        raise typer.Exit(1)


def _chosen(policies: list[str], as_json: bool) -> list[str]:
    import typer

    from autoprec.policies.evaluation_report import SHIPPED, TABLE_WORD

    if policies:
        return policies
    if SHIPPED.is_dir():
        return [str(SHIPPED)]
    typer.echo(_NO_POLICY, err=as_json)
    return [TABLE_WORD]


def _settings(
    policies: list[str], banks: list[str], counts: list[int], out: Path, processes: int | None
) -> EvaluationSettings:
    import typer

    from autoprec.policies.evaluate import EvaluationSettings
    from autoprec.policies.evaluation_report import chosen_rivals

    try:
        found = chosen_rivals(policies)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return EvaluationSettings(
            rivals=found,
            banks=tuple(dict.fromkeys(banks)),
            tasks=counts[0],
            other_tasks=counts[1],
            out=out,
            processes=processes or cores,
        )
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error


def _evaluate(settings: EvaluationSettings, as_json: bool) -> None:
    import typer

    from autoprec.policies.evaluation_report import RESULT, TABLES, run_evaluation, short_tables

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    left: dict[int, TimeLeft] = {}

    def say_twins(done: int, total: int) -> None:
        say(f"{done} of {total} fp32 twins trained{left.setdefault(total, TimeLeft()).text(done, total)}")

    try:
        document = run_evaluation(settings, progress=lambda now: say(_progress_text(now)), twins=say_twins)
    except KeyboardInterrupt as error:
        typer.echo(f"Stopped. Run the same command again to go on from what is in `{settings.out}`.", err=True)
        raise typer.Exit(130) from error
    say(f"\n{short_tables(document)}")
    say(f"All tables, by group of tasks too: {settings.out / TABLES}")
    say(f"Every number: {settings.out / RESULT}; a picture for each bank lies beside it.")
    say(document["summary"])
    if as_json:
        typer.echo(json.dumps(document, indent=1, allow_nan=False))


def _progress_text(now: Progress) -> str:
    left = "" if now.seconds_left is None else f", about {duration(now.seconds_left)} left"
    return f"{now.done} of {now.total} played{left}: {now.what}"
