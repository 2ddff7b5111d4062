"""``autoprec apply``: a map of formats on the user's validation data: how far outputs move, and what time it saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

_HELP = """Measures what a map of formats does to the predictions of your model: fidelity and time.

TARGET is what `autoprec compare` takes: a function, the config of a LightningCLI, or a script. Nothing is trained: its
validation runs in fp32 and in the map, with the same batches. The outputs are those of the last layer that gives a
matrix, as in `autoprec compare`. Times are those of validation batches, in turns; believe them on an idle machine.

The map is a YAML file that `callback.save_map(path)` writes, or one by hand; in your own code
`autoprec.apply_map(model, "map.yaml")` has a model compute in it.

    version: 1
    precision: {"*attention*": fp32, "*intermediate*": bf16}

Weights are those that the target builds, or those of `--checkpoint`.

Examples:

    autoprec apply train.py --map map.yaml --checkpoint last.ckpt

    autoprec apply examples/compare_target.py:text --map map.yaml

    autoprec apply config.yaml --map map.yaml --batches 64 --json
"""


def add_to(app: typer.Typer) -> None:
    """Adds the command to an application.

    Args:
        app: The application.
    """
    import typer

    target_argument = typer.Argument(..., metavar="TARGET", help="What is validated, see above.")
    words_argument = typer.Argument(None, metavar="[-- ARGUMENTS]", help="Arguments of the target.")
    map_option = typer.Option(..., "--map", metavar="FILE", help="File of the map, or a folder that holds one.")
    checkpoint_option = typer.Option(None, metavar="FILE", help="Checkpoint of Lightning with the weights.")
    batches_option = typer.Option(16, min=1, help="Most validation batches of each loader.")
    rounds_option = typer.Option(3, min=0, help="Rounds in which time is measured; 0 for no times.")
    threads_option = typer.Option(None, min=1, help="Threads for one operation. By default what torch would use.")
    out_option = typer.Option(Path("autoprec-apply.json"), dir_okay=False, help="File for the results.")
    json_option = typer.Option(False, "--json", help="Print the results as JSON, and all else to standard error.")

    @app.command("apply", help=_HELP)
    def apply_(
        target: str = target_argument,
        words: list[str] = words_argument,
        map: str = map_option,
        checkpoint: Path = checkpoint_option,
        batches: int = batches_option,
        rounds: int = rounds_option,
        threads: int = threads_option,
        out: Path = out_option,
        as_json: bool = json_option,
    ) -> None:
        from autoprec.commands.map_effect import MapError, Settings, measure
        from autoprec.compare.targets import load_target
        from autoprec.inference import read_map
        from autoprec.target_functions import TargetError

        try:
            settings = Settings(
                precision=read_map(map), checkpoint=checkpoint, batches=batches, rounds=rounds, threads=threads
            )
            loaded = load_target(target, words or [])
            _check_writable(out)
        except (ValueError, OSError, TargetError) as error:
            raise typer.BadParameter(str(error)) from error
        try:
            found = measure(loaded, settings, as_json)
        except (TargetError, MapError) as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo("Stopped. Nothing was written; the model's files are as they were.", err=True)
            raise typer.Exit(130) from error
        _write(found, map, out, as_json)


def _check_writable(out: Path) -> None:
    """Raises before anything is measured."""
    is_new = not out.exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8"):
        pass
    if is_new:
        out.unlink()


def _write(found: dict[str, Any], map: str, out: Path, as_json: bool) -> None:
    import typer

    text = json.dumps({"map": map, **found}, indent=1, allow_nan=False)
    out.write_text(text + "\n", encoding="utf-8")
    for line in _lines(found):
        typer.echo(line, err=as_json)
    typer.echo(f"Every number: {out}", err=as_json)
    if as_json:
        typer.echo(text)


def _lines(found: dict[str, Any]) -> list[str]:
    counts = {name: list(found["formats"].values()).count(name) for name in dict.fromkeys(found["formats"].values())}
    lines = [f"formats    {', '.join(f'{count} layers in {name}' for name, count in counts.items())}"]
    if found["emulated"]:
        names = ", ".join(sorted(set(found["emulated"].values())))
        lines.append(
            f"emulated   {names}: rounded, computed in a wider format; times say nothing of a device that has it"
        )
    lines += [f"left       {name}: {reason}" for name, reason in found["refused"].items()]
    if found["uncalled"]:
        lines.append(
            f"uncalled   {', '.join(found['uncalled'])}: nobody called their forward, so nothing changed there"
        )
    lines += [f"repaired   {name}: {reason}, ran in float32" for name, reason in found["repaired"].items()]
    lines.append(f"weights    {found['weights']}")
    lines += [f"fidelity   {name} {value:.4g}" for name, value in found["fidelity"].items() if value is not None]
    lines += [f"fidelity   {name} unbounded" for name, value in found["fidelity"].items() if value is None]
    if found["time_ratio"] is None:
        lines.append("time       not measured")
    else:
        without, with_map = found["seconds"]["without"], found["seconds"]["with_map"]
        lines.append(
            f"time       {found['time_ratio']:.3f} of that without the map: {with_map:.3g} s against {without:.3g} s"
            f" for {found['batches']} batches"
        )
    return lines
