"""``autoprec compare``: the user's own training under static settings and under autoprec."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.compare.arms import DEFAULT

if TYPE_CHECKING:
    import typer

    from autoprec.compare.settings import CompareSettings

_HELP = """Trains your own model with static precision settings and with autoprec, side by side, and says what to keep.

TARGET is one of

- `package.module:function` or `path/to/file.py:function`. The function returns (LightningModule, data, Trainer
arguments): data is a LightningDataModule, a loader, or a pair (training loader, validation loader). An argument `seed`
of the function gets the seed; what follows `--` as `name=value` goes to it by name.

- `config.yaml` of a LightningCLI, with `class_path` for model and data. What follows `--` goes to the CLI.

- `train.py`, a script that calls `Trainer.fit`. What follows `--` are its arguments. It runs unchanged in a process of
its own; its Trainers are given precision, callbacks, seed and logger, and every change is printed.

Each arm (way of training) runs with the same seeds and the same order of samples, in a process of its own, a few steps
in turn with the others, so that a slow spell of the machine hits all of them. Arms: 32-true, 32-true-medium (with
`torch.set_float32_matmul_precision("medium")`), bf16-mixed, bf16-true, 16-mixed where fp16 is native, and autoprec;
others are `autoprec:rule`, `autoprec:fixed:bf16`, `autoprec:map.yaml` and `autoprec:module:function` (a controller of
your own). Checkpoints and logs of runs go into the output folder, your files stay as they are.

The answer may be "keep bf16-mixed"; the exit code is 0 then too. Stopped by Ctrl-C or killed, it goes on where it was
when it is started again. `comparison.json` in the output folder holds every number.

Examples:

    autoprec compare train.py -- --epochs 3

    autoprec compare mypackage.train:build --steps 500 --seeds 5

    autoprec compare examples/compare_target.py:text --quick   # a minute

    autoprec compare config.yaml --arms bf16-mixed,autoprec

    autoprec compare config.yaml --metric val_accuracy --margin 0.002

    WANDB_MODE=offline autoprec compare train.py --wandb myproject
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    target_argument = typer.Argument(..., metavar="TARGET", help="What is trained, see above.")
    words_argument = typer.Argument(None, metavar="[-- ARGUMENTS]", help="Arguments of the target.")
    arms_option = typer.Option(",".join(DEFAULT), help="Ways of training, with commas between them.")
    seeds_option = typer.Option(None, help="Number of seeds, from 0 on. By default 3; fewer give no intervals.")
    steps_option = typer.Option(None, help="Optimizer steps of each run. By default the target's whole training.")
    minutes_option = typer.Option(30.0, help="No new round of turns starts after these minutes; runs are cut equally.")
    threads_option = typer.Option(1, help="Threads for one operation, the same in every run.")
    clock_option = typer.Option(None, help="wall, or cpu for processor time. By default cpu with one thread on a CPU.")
    metric_option = typer.Option(None, help="Metric that is compared. By default val_loss, or what is nearest to it.")
    mode_option = typer.Option(None, help="min or max: which values of the metric are better. By default by its name.")
    margin_option = typer.Option(None, help="Difference of the metric that counts as none. By default 1% of it.")
    target_loss_option = typer.Option(None, help="Value of the metric that times are counted to.")
    interval_option = typer.Option(
        None, help="Steps between decisions of autoprec. By default 50; short runs need less."
    )
    evaluate_option = typer.Option(None, help="Steps between validations. By default as the target has it.")
    together_option = typer.Option(None, help="Runs at a time, for memory's sake. By default all arms of a seed.")
    consistency_option = typer.Option(False, "--consistency", help="Run an arm once more with AVX2 instructions only.")
    out_option = typer.Option(
        None,
        help="Folder for results; goes on with what it holds. By default autoprec-compare; with --quick"
        " autoprec-compare-quick, which every quick try begins anew.",
    )
    fresh_option = typer.Option(False, "--fresh", help="Forget results in the folder.")
    wandb_option = typer.Option(
        None, metavar="PROJECT", help="Log every run to Weights & Biases, as one group, once all have ended."
    )
    quick_option = typer.Option(False, "--quick", help="12 steps, 2 seeds unless you set them: does it run?")
    json_option = typer.Option(False, "--json", help="Print the results as JSON, and all else to standard error.")

    @app.command("compare", help=_HELP)
    def compare_(
        target: str = target_argument,
        words: list[str] = words_argument,
        arms: str = arms_option,
        seeds: int = seeds_option,
        steps: int = steps_option,
        minutes: float = minutes_option,
        threads: int = threads_option,
        clock: str = clock_option,
        metric: str = metric_option,
        mode: str = mode_option,
        margin: float = margin_option,
        target_loss: float = target_loss_option,
        interval: int = interval_option,
        evaluate_every: int = evaluate_option,
        together: int = together_option,
        consistency: bool = consistency_option,
        out: Path = out_option,
        fresh: bool = fresh_option,
        wandb: str = wandb_option,
        quick: bool = quick_option,
        as_json: bool = json_option,
    ) -> None:
        from autoprec.compare.settings import with_defaults
        from autoprec.target_functions import TargetError

        chosen: dict[str, Any] = {
            "seeds": seeds,
            "steps": steps,
            "minutes": minutes,
            "threads": threads,
            "clock": clock,
            "metric": metric,
            "mode": mode,
            "margin": margin,
            "target_loss": target_loss,
            "interval": interval,
            "evaluate_every": evaluate_every,
            "together": together,
            "consistency": consistency,
            "out": out,
        }
        fresh = fresh or (quick and out is None)  # the next try may be of another target
        try:
            settings = _settings(target, words or [], arms, with_defaults(chosen, quick))
        except (ValueError, FileNotFoundError, TargetError) as error:
            raise typer.BadParameter(str(error)) from error
        _compare(settings, fresh, as_json, wandb)


def _settings(target: str, words: list[str], arms: str, chosen: dict[str, Any]) -> CompareSettings:
    from autoprec.compare.arms import parse_arms
    from autoprec.compare.settings import CompareSettings
    from autoprec.compare.targets import load_target

    names = [name.strip() for name in arms.split(",") if name.strip()]
    return CompareSettings(target=load_target(target, words), arms=parse_arms(names), **chosen)


def _check_installed(with_wandb: bool) -> None:
    import typer

    needed = {"rich": "'.[cli]'", "matplotlib": "'.[cli]'"} | ({"wandb": "'.[wandb]'"} if with_wandb else {})
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:  # found out now, not after hours of training
        extras = " ".join(dict.fromkeys(needed[name] for name in missing))
        typer.echo(
            f"`autoprec compare` needs {', '.join(missing)}. Run `pip install {extras}` in a checkout.", err=True
        )
        raise typer.Exit(1)


def _compare(settings: CompareSettings, fresh: bool, as_json: bool, wandb: str | None) -> None:
    import typer

    _check_installed(wandb is not None)
    from rich.console import Console

    from autoprec.compare.report import document, judged, show_report, write_report
    from autoprec.compare.run import MetricError, NothingRanError, compare, finished
    from autoprec.compare.store import StoreError
    from autoprec.target_functions import TargetError

    console = Console(stderr=as_json)
    try:
        result = compare(settings, console, fresh)
    except (TargetError, StoreError, MetricError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except NothingRanError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        partial, said = finished(settings), "No run had finished."
        if partial is not None:
            write_report(partial, judged(partial, settings), settings.out)
            count = len(partial.comparison.runs)
            said = (
                f"{count} finished runs are in `{settings.out}`, with what they say so far in `comparison.json`."
                " Run the same command again to go on."
            )
        typer.echo(f"Stopped. {said}", err=True)
        raise typer.Exit(130) from error
    verdict = judged(result, settings)
    write_report(result, verdict, settings.out)
    if wandb is not None:
        from autoprec.compare.wandb_runs import send

        send(result, verdict, settings, wandb, lambda text: console.print(text, markup=False, highlight=False))
    show_report(result, verdict, settings, console)
    if as_json:
        typer.echo(json.dumps(document(result, verdict), indent=1, allow_nan=False))
