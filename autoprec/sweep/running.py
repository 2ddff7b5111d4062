"""A sweep from its settings to its result."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from optuna.exceptions import StorageInternalError
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from autoprec.compare.session import digests
from autoprec.json_files import read_json, write_whole
from autoprec.sweep.config import SweepConfig, SweepError
from autoprec.sweep.launchers import Launcher, UserError, WorkerError, make_launcher
from autoprec.sweep.progress import show_sweep
from autoprec.sweep.reading import checked_config, load_config
from autoprec.sweep.results import SweepResult, collect, write_results
from autoprec.sweep.space import load_yaml
from autoprec.sweep.storage import quiet_optuna
from autoprec.sweep.studies import SweepStudy, is_held, make_sampler

SETTINGS = "sweep.yaml"
_HEAD = "# Settings as `autoprec sweep` used them.\n"
_FILES = (SETTINGS, "study.db", "pareto.json", "pareto.html", "best.yaml", "best_map.yaml", "sweep.lock")
_CONTENTS = {
    "trials": ("[0-9]*",),
    "workers": ("worker-*.log", "*.lock"),
    "artifacts": (f"{'[0-9a-f]' * 8}-*-*-*-*",),
}
_STORAGE_ERRORS = (OSError, StorageInternalError, SQLAlchemyError)


class SweepInterruptedError(KeyboardInterrupt):
    """Ctrl-C; finished trials are stored, and the files of results are written.

    Args:
        result: What there is so far.
    """

    def __init__(self, result: SweepResult) -> None:
        super().__init__("the sweep was stopped")
        self.result = result


def run(
    config: SweepConfig | str | Path | Mapping[str, Any],
    *,
    workers: int | None = None,
    trials: int | None = None,
    storage: str | None = None,
    out: str | Path | None = None,
    launcher: str = "processes",
    resume: bool = False,
    fresh: bool = False,
    console: Console | None = None,
) -> SweepResult:
    """Runs a sweep, or what is left of one, and writes its results.

    Args:
        config: Settings, a YAML file of them, or a mapping.
        workers: Trials at a time on this machine, in place of that of the settings.
        trials: Trials of the study, in place of that of the settings.
        storage: Where the study is, in place of that of the settings.
        out: Folder, in place of that of the settings.
        launcher: ``processes``, ``ray``, or ``inline`` for this process.
        resume: Refuse to begin a new study. A study that is there is gone on with in any case.
        fresh: Forget what the folder holds. Only with the default storage.
        console: Where progress is shown; nowhere by default.

    Returns:
        What it gave. ``best`` is ``None`` where no trial is usable.

    Raises:
        SweepError: If the settings are wrong, or the storage holds another sweep.
        TargetError: If the target cannot be trained at all.
        WorkerError: If workers break down again and again.
        SweepInterruptedError: If it is stopped by Ctrl-C; it is a ``KeyboardInterrupt`` and holds the result so far.
    """
    changes = {"workers": workers, "trials": trials, "storage": storage, "out": None if out is None else str(out)}
    settings = _settings(config, {name: value for name, value in changes.items() if value is not None})
    _check_folder(settings, fresh)
    if fresh:
        _forget(settings)
    with quiet_optuna():
        make_sampler(settings, 0)  # so that wrong options are found now
    sweep = SweepStudy(settings, must_exist=resume)
    _check_sources(settings)
    document = {**_plain(settings.model_dump(exclude_defaults=True)), "name": sweep.study.study_name}
    write_whole(settings.out / SETTINGS, (_HEAD + yaml.safe_dump(document, sort_keys=False)).encode())
    deadline = math.inf if settings.minutes is None else time.time() + 60.0 * settings.minutes
    workers_of_it = make_launcher(launcher, sweep, settings.workers, deadline)
    return _run(settings, sweep, workers_of_it, deadline, console or Console(quiet=True))


def _run(config: SweepConfig, sweep: SweepStudy, launcher: Launcher, deadline: float, console: Console) -> SweepResult:
    sweep.bury()
    try:
        with show_sweep(console, config, deadline) as screen:
            screen.on_result(collect(config, sweep.study))
            for event in launcher.run():
                screen.on_event(event)
                if screen.wants_result(event):
                    screen.on_result(collect(config, sweep.study))
            screen.on_result(collect(config, sweep.study))
    except UserError as error:
        from autoprec.target_functions import TargetError

        launcher.stop()
        raise TargetError(str(error)) from error
    except KeyboardInterrupt as error:
        launcher.stop()
        raise SweepInterruptedError(_finish(config, sweep)) from error
    except WorkerError:
        with suppress(*_STORAGE_ERRORS):
            launcher.stop()
            _finish(config, sweep)
        raise
    except _STORAGE_ERRORS as error:
        with suppress(*_STORAGE_ERRORS):
            launcher.stop()
        raise _no_storage(config, error) from error
    try:
        return _finish(config, sweep)
    except _STORAGE_ERRORS as error:
        raise _no_storage(config, error) from error


def _no_storage(config: SweepConfig, error: Exception) -> WorkerError:
    why = next(iter(str(error.__cause__ or error).splitlines()), type(error).__name__)
    return WorkerError(
        f"The sweep in `{config.out}` cannot be written: {why}. Free space on its disk, see to the permissions, and run"
        " the same command again to go on."
    )


def _finish(config: SweepConfig, sweep: SweepStudy) -> SweepResult:
    sweep.clear_locks()
    result = collect(config, sweep.study)
    write_results(config, sweep.study, result)
    return result


def _settings(config: SweepConfig | str | Path | Mapping[str, Any], changes: dict[str, Any]) -> SweepConfig:
    if isinstance(config, (str, Path)):
        return load_config(config, **changes)
    document = (
        config.model_dump(mode="json", exclude_defaults=True) if isinstance(config, SweepConfig) else dict(config)
    )
    return checked_config({**document, **changes})


def _forget(config: SweepConfig) -> None:
    if config.storage is not None:
        raise SweepError(
            f"Passed `fresh` with the storage `{config.storage}`, which others may use. Give the sweep another `name`,"
            " or delete the study there."
        )
    if not (config.out / SETTINGS).exists():
        return
    for name in _FILES:
        (config.out / name).unlink(missing_ok=True)
    for name, patterns in _CONTENTS.items():  # there may be other things in them that are not of a sweep
        for pattern in patterns:
            for path in (config.out / name).glob(pattern):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        with suppress(OSError):
            (config.out / name).rmdir()


def _check_folder(config: SweepConfig, fresh: bool) -> None:
    """Refuses a folder with settings that no sweep has written, of another study, or to forget one that runs.

    Raises:
        SweepError: If it is one.
    """
    path = config.out / SETTINGS
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise SweepError(f"Cannot read `{path}`: {error}. Choose another folder by `--out`.") from error
    if not text.startswith(_HEAD):
        raise SweepError(
            f"The folder `{config.out}` of this sweep holds a `{SETTINGS}` that `autoprec sweep` has not written and"
            " would write over. Choose another folder by `--out`."
        )
    if fresh:
        if any(map(is_held, (config.out / "workers").glob("*.lock"))):
            raise SweepError(f"Passed `fresh`, but a sweep runs in `{config.out}`. Stop it, or choose another `--out`.")
        return
    with suppress(yaml.YAMLError, AttributeError):
        name = load_yaml(text).get("name")
        if name != config.study_name:
            raise SweepError(
                f"The folder `{config.out}` holds the sweep `{name}`, and this one is `{config.study_name}`. Trials of"
                " two would write over each other's files: choose another folder by `--out`, or forget the old sweep by"
                " `--fresh`."
            )


def _check_sources(config: SweepConfig) -> None:
    """Refuses to go on with trials of code that has changed.

    Raises:
        SweepError: If a file of the target, or a module of the user's that it loads, is another one now.
    """
    before: dict[str, str] = {}
    for path in sorted((config.out / "trials").glob("*/seed-*.json")):
        document = read_json(path)
        if isinstance(document, dict):
            before |= document.get("extra", {}).get("sources", {})
    now = digests([Path(file) for file in before])
    changed = [file for file in sorted(before) if before[file] != now[file]]
    if changed:
        raise SweepError(
            f"{', '.join(f'`{file}`' for file in changed)} changed since trials of `{config.out}` were trained, which"
            " would be compared with trials of the new code. Pass `--fresh` to forget them, or another folder by"
            " `--out`."
        )


def _plain(value: Any) -> Any:
    """A value as YAML can hold it; JSON would make words of dates and of keys that are numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
