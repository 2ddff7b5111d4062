"""A sweep from its settings to its result."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from autoprec.json_files import write_whole
from autoprec.sweep.config import SweepConfig, SweepError, checked_config, load_config
from autoprec.sweep.launchers import Launcher, UserError, WorkerError, make_launcher
from autoprec.sweep.progress import show_sweep
from autoprec.sweep.results import SweepResult, collect, write_results
from autoprec.sweep.storage import quiet_optuna
from autoprec.sweep.studies import SweepStudy, make_sampler

_FILES = ("sweep.yaml", "study.db", "pareto.json", "pareto.html", "best.yaml", "best_map.yaml", "sweep.lock")
_FOLDERS = ("trials", "workers", "artifacts")


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
    if fresh:
        _forget(settings)
    with quiet_optuna():
        make_sampler(settings, 0)  # so that wrong options are found now
    sweep = SweepStudy(settings, must_exist=resume)
    document = settings.model_dump(mode="json", exclude_defaults=True)
    write_whole(settings.out / "sweep.yaml", yaml.safe_dump(document, sort_keys=False).encode())
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
        launcher.stop()
        _finish(config, sweep)
        raise
    return _finish(config, sweep)


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
    if not (config.out / "sweep.yaml").exists():
        return
    for name in _FILES:
        (config.out / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        shutil.rmtree(config.out / name, ignore_errors=True)
