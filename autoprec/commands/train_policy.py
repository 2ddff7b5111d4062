"""``autoprec train-policy``: trains policies with PPO on proxy runs, several seeds side by side."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from autoprec.policies.train_settings import TrainSettings

_LONGEST_SEED = 20
_HELP = """Trains a policy with PPO on many small trainings in fp32 and other formats (proxies), and writes its files.

The policy decides, for every knob of a run, whether to take what the table of costs and errors proposes, or one step
lower or higher. It starts as the table itself. Every few minutes it is played on tasks that it does not learn from, and
the best state so far is kept, so that it is not worse than the table there. Progress shows its score on these tasks:
best so far, latest, and at the start. 1 is what fp32 without clipping makes of the same time.

Each seed gets a folder `seed-N`, as `autoprec-policy/seed-0`, for `AutoPrecisionCallback("autoprec-policy/seed-0")` and
for `autoprec evaluate-policy`. `training.json` in it has everything that was measured. `selection.json` beside them
says which seed is the best in validation. Stopped by Ctrl-C or killed, the same command goes on where it was, and ends
with the same policy, byte for byte, as if it had not been stopped.

One seed takes about 25 minutes on one core. Needs the extra `rl` and the compiled kernels.

Examples:

    autoprec train-policy --quick                  # 3 minutes: does it run?

    autoprec train-policy --seeds 0 1 2 --jobs 2   # three seeds, two at a time

    autoprec train-policy --config my.yaml --out my-policy

    autoprec train-policy --set gamma=0.99 --set decisions=200000

    autoprec train-policy --set guard=false --set 'net_arch=[32, 32]'

    autoprec train-policy --section ladder         # from scratch, not offsets

    autoprec train-policy --module train.py:make   # on your own training

With `--module`, trainings are those of what a function of yours returns: (LightningModule, data, Trainer arguments).
Each is a real fit, a decision comes every 50 applied steps (`--set module.interval=20`), and time is the clock's, so a
training is not the same twice. The batch size stays yours. Settings are those of section `module`; with
`--set start=autoprec-policy/seed-0` it goes on with a policy that has learnt from proxies.
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    more_argument = typer.Argument(None, metavar="SEED", help="Further seeds, behind `--seeds`.")
    seeds_option = typer.Option("0", metavar="SEED", help="Seeds, as `--seeds 0 1 2` or `--seeds 0,1,2`.")
    jobs_option = typer.Option(1, min=1, help="Seeds to train at a time, each in a process of one thread.")
    out_option = typer.Option(Path("autoprec-policy"), file_okay=False, help="Folder; goes on with what it holds.")
    config_option = typer.Option(None, help="File with settings (YAML), in place of autoprec/policies/ppo.yaml.")
    section_option = typer.Option(None, help="Settings of that name in the file. Else `default`, or the only ones.")
    set_option = typer.Option(
        [],
        "--set",
        metavar="NAME=VALUE",
        help="A setting that is to be otherwise, in YAML. Repeatable.",
    )
    module_option = typer.Option(
        None, metavar="FILE.py:FUNCTION", help="Train on your own module; also `package.module:function`."
    )
    quick_option = typer.Option(False, "--quick", help="The section `quick`: few tasks and decisions.")
    resume_option = typer.Option(True, "--resume/--fresh", help="Go on, or forget what the folders hold.")
    tensorboard_option = typer.Option(False, "--tensorboard", help="Write files of TensorBoard into each folder.")
    wandb_option = typer.Option(None, metavar="PROJECT", help="Send metrics to Weights & Biases.")
    json_option = typer.Option(False, "--json", help="Print the selection as JSON, and all else to standard error.")

    @app.command("train-policy", help=_HELP)
    def train_policy_(
        more: list[str] = more_argument,
        seeds: str = seeds_option,
        jobs: int = jobs_option,
        out: Path = out_option,
        config: Path = config_option,
        section: str = section_option,
        changes: list[str] = set_option,
        module: str = module_option,
        quick: bool = quick_option,
        resume: bool = resume_option,
        tensorboard: bool = tensorboard_option,
        wandb: str = wandb_option,
        as_json: bool = json_option,
    ) -> None:
        _check_installed(tensorboard, wandb)
        if module is None:
            _check_kernels()
        from autoprec.policies.train_settings import SettingsError, load_settings

        try:
            numbers = _numbers([seeds, *(more or [])])
            default = "quick" if quick else "module" if module is not None and config is None else None
            settings = load_settings(config, section or default, **_changes(changes, module))
        except (ValueError, SettingsError) as error:
            raise typer.BadParameter(str(error)) from error
        _train(settings, numbers, jobs, out, resume, {"tensorboard": tensorboard, "wandb": wandb}, as_json)


def _check_installed(tensorboard: bool, wandb: str | None) -> None:
    import typer

    wanted = {"gymnasium": "'.[rl]'", "stable_baselines3": "'.[rl]'"}
    wanted |= {"tensorboard": "tensorboard"} if tensorboard else {}
    wanted |= {"wandb": "'.[wandb]'"} if wandb is not None else {}
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        how = " ".join(sorted({wanted[name] for name in missing}))
        typer.echo(
            f"`autoprec train-policy` needs {', '.join(missing)}. Run `pip install {how}` in a checkout.", err=True
        )
        raise typer.Exit(1)


def _check_kernels() -> None:
    import typer

    from autoprec.ops import native

    missing = native.missing()
    if missing is not None:
        typer.echo(f"`autoprec train-policy` needs the compiled kernels: {missing}.", err=True)
        raise typer.Exit(1)


def _numbers(words: list[str]) -> list[int]:
    parts = [part for word in words for part in word.replace(",", " ").split()]
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) <= _LONGEST_SEED]
    if not parts or len(set(numbers)) != len(parts):
        raise ValueError(
            f"Passed seeds {' '.join(words)!r}. Seeds are different whole numbers of at most {_LONGEST_SEED} digits, as"
            " `--seeds 0 1 2`."
        )
    return numbers


def _changes(words: list[str], module: str | None) -> dict[str, Any]:
    import yaml

    changes: dict[str, Any] = {} if module is None else {"module": {"target": module}}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"Passed `--set {word}`. Write it as `--set name=value`.")
        if name.strip() in ("path", "section"):  # what ``load_settings`` calls a file and its section
            raise ValueError(f"Passed `--set {word}`. There is no such setting; see `--config` and `--section`.")
        group, dot, inner = name.strip().partition(".")
        if dot and (group != "module" or module is None):
            raise ValueError(f"Passed `--set {word}`. Only settings of a module have a dot, together with `--module`.")
        into, key = (changes[group], inner) if dot else (changes, name.strip())
        try:
            into[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"Passed `--set {word}`. `{value}` is no YAML: {error}") from error
    return changes


def _train(
    settings: TrainSettings,
    seeds: list[int],
    jobs: int,
    out: Path,
    resume: bool,
    logs: dict[str, Any],
    as_json: bool,
) -> None:
    import typer
    from rich.console import Console

    from autoprec.commands.train_progress import show_training
    from autoprec.machine import circumstances
    from autoprec.policies.seeds import folder_of, select, train_seeds
    from autoprec.policies.train_settings import SettingsError
    from autoprec.policies.training_logs import writers_of
    from autoprec.policies.training_state import forget

    console = Console(stderr=as_json)
    try:
        for seed in [] if resume else seeds:
            forget(folder_of(out, seed))
        with show_training(console) as screen:
            failures = train_seeds(
                settings, seeds, out, jobs=jobs, progress=screen.on_progress, writers=partial(writers_of, **logs)
            )
    except KeyboardInterrupt as error:
        typer.echo(f"Stopped. Run the same command again to go on; checkpoints are in `{out}`.", err=True)
        raise typer.Exit(130) from error
    except (SettingsError, FloatingPointError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    for seed, reason in failures.items():
        typer.echo(f"Seed {seed} failed: {reason}", err=True)
    if len(failures) < len(seeds):
        try:
            selection = select(out, seeds, circumstances(1), failed=failures)
        except OSError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error
        _show(selection, out, console)
        if as_json:
            typer.echo(json.dumps(selection, indent=1, allow_nan=False))
    if failures:
        raise typer.Exit(1)


def _show(selection: dict[str, Any], out: Path, console: Any) -> None:
    for row in selection["seeds"]:
        gain = row["gain"]
        console.print(
            f"seed {row['seed']}: score {row['score']:.3f} +- {row['standard_error']:.3f},"
            f" over its start {gain['over_decision_0']:+.3f} +- {gain['standard_error']:.3f}"
            f" (decision {row['decisions']})",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f'Best in validation: AutoPrecisionCallback(policy="{out / selection["folder"]}")', markup=False, soft_wrap=True
    )
