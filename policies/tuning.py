"""Tunes the parameters of the table and of the rule by black-box search: what anything learned must be better than.

Each search may take as many environment decisions as the training of a policy does, on the same bank of tasks, and is
played as policies are: guard included. ``python -m autoprec.policies.tuning --help`` runs it and writes the result.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.proposals import TableSettings
from autoprec.envs.proxies import REGIMES, Bank, Task
from autoprec.envs.proxy_env import load_tasks
from autoprec.envs.twins import Twin
from autoprec.json_files import read_json, write_json
from autoprec.paired import Interval, paired_difference
from autoprec.policies.play import play_policy
from autoprec.policies.tuning_study import Meter, Metered, Params, Problem, Scores, Tuned, as_json, search

if TYPE_CHECKING:
    from optuna import Trial

Tasks = Sequence[tuple[Task, Twin]]
Progress = Callable[[int, int], None]

SEARCHES = ("plain", "schedule")
"""What can be tuned: the table with one batch size, and the table whose batch size rises over the run."""
RESULTS = Path("docs/results/tuned_table.json")
"""Where results are committed."""
_MOST_RISES = 3
_FIRST_SHARE = 9  # a trial may be pruned after this part of the tasks


def tune_table(
    tasks: Tasks,
    *,
    budget_decisions: int,
    seed: int,
    has_schedule: bool = True,
    journal: Path | None = None,
    progress: Progress | None = None,
) -> TableSettings:
    """Returns the best settings of the table that a search finds.

    Args:
        tasks: Tasks to tune on, with their twins.
        budget_decisions: Most environment decisions.
        seed: Of the private generators.
        has_schedule: Whether the batch size may rise over the run.
        journal: File to go on from; see ``tuning_study.search``.
        progress: Called after each trial with decisions used and the budget.
    """
    problem = table_problem(tasks, "schedule" if has_schedule else "plain")
    tuned = search(problem, budget_decisions=budget_decisions, seed=seed, journal=journal, progress=progress)
    return settings_from(tuned.params)


def table_problem(tasks: Tasks, name: str) -> Problem:
    """Returns the search for settings of the table.

    Args:
        tasks: Tasks to tune on.
        name: One of ``SEARCHES``.
    """
    if name not in SEARCHES:
        raise ValueError(f"Passed `table_problem(tasks, {name!r})`. It searches for one of {SEARCHES}.")
    default = default_settings(name)

    def evaluate(params: Params, part: slice, meter: Meter) -> Scores:
        scores = play_policy(tasks[part], Metered(_keep, meter), settings_from(params)).score
        return np.asarray(scores, dtype=np.float64)

    return Problem(
        name=name,
        suggest=partial(_suggest_table, has_schedule=name == "schedule"),
        evaluate=evaluate,
        first=[_values_of(default, has_schedule=name == "schedule")],
        tasks=len(tasks),
        least_tasks=max(1, len(tasks) // _FIRST_SHARE),
    )


def default_settings(name: str) -> TableSettings:
    """Returns the table's settings before tuning.

    Args:
        name: One of ``SEARCHES``.
    """
    return TableSettings() if name == "schedule" else TableSettings(schedule=())


def settings_from(params: Mapping[str, Any]) -> TableSettings:
    """Returns settings that were written as JSON.

    Args:
        params: The fields of ``TableSettings``.

    Raises:
        ValueError: If a field is not known, or a value not allowed.
    """
    known = {field.name for field in fields(TableSettings)}
    if unknown := sorted(set(params) - known):
        raise ValueError(f"Passed table settings with {unknown}. Settings are {sorted(known)}.")
    schedule = params.get("schedule")
    found = {**params, "schedule": tuple(schedule or ()), "clip": float(params.get("clip", 1.0))}
    return TableSettings(**found)


def read_tuned(name: str, path: Path = RESULTS) -> TableSettings:
    """Returns the settings that a search has written.

    Args:
        name: One of ``SEARCHES``.
        path: The file.

    Raises:
        FileNotFoundError: If the file does not have them.
    """
    found = read_json(path) or {}
    if name not in found:
        raise FileNotFoundError(
            f"Passed `read_tuned({name!r}, {str(path)!r})`. The file has {sorted(found) or 'no results'}."
            f" Run `python -m autoprec.policies.tuning --search {name} --out {path}` first."
        )
    return settings_from(found[name]["settings"])


def held_out(tasks: Tasks, tuned: TableSettings, default: TableSettings) -> dict[str, Interval]:
    """Returns what tuned settings gain over others on tasks they were not tuned on: over all, and by regime.

    Args:
        tasks: Other tasks than those of the search.
        tuned: What the search has found.
        default: What to compare with.
    """
    scores = [play_policy(tasks, None, settings).score for settings in (tuned, default)]
    regimes = np.array([task.regime for task, _ in tasks])
    parts = {"all": np.ones(len(tasks), dtype=bool), **{name: regimes == name for name in REGIMES}}
    return {
        name: paired_difference(scores[0][part].tolist(), scores[1][part].tolist())
        for name, part in parts.items()
        if part.any()
    }


def _keep(rows: Any) -> Any:
    return np.zeros(len(rows), dtype=np.int64)


def _suggest_table(trial: Trial, *, has_schedule: bool) -> Params:
    chosen: Params = {
        "threshold": trial.suggest_float("threshold", 0.01, 1.0, log=True),
        "headroom_bits": float(trial.suggest_int("headroom_bits", 0, 8)),
        "clip": CLIP_MULTIPLIERS[trial.suggest_int("clip", 0, len(CLIP_MULTIPLIERS) - 1)],
        "batch": trial.suggest_int("batch", -2, 2),
        "schedule": (),
        **_suggest_looks(trial),
    }
    if has_schedule:
        # all times are always there, so that the sampler has one space; the first ones count
        times = [trial.suggest_float(f"rise_{rise}", 0.0, 1.0) for rise in range(_MOST_RISES)]
        chosen["schedule"] = tuple(sorted(times[: trial.suggest_int("rises", 0, _MOST_RISES)]))
    return as_json(chosen)


def _suggest_looks(trial: Trial) -> Params:
    known = {field.name for field in fields(TableSettings)}
    chosen: Params = {}
    if "probe_every" in known:
        chosen["probe_every"] = trial.suggest_int("probe_every", 1, 12)
    if "optimism" in known:
        chosen["optimism"] = trial.suggest_float("optimism", 0.0, 3.0)
    return chosen


def _values_of(settings: TableSettings, *, has_schedule: bool) -> Params:
    """The values of a trial that suggests these settings."""
    values: Params = {
        "threshold": settings.threshold,
        "headroom_bits": int(settings.headroom_bits),
        "clip": CLIP_MULTIPLIERS.index(settings.clip),
        "batch": settings.batch,
        **{name: value for name, value in asdict(settings).items() if name in ("probe_every", "optimism")},
    }
    if has_schedule:
        rises = settings.schedule or ()
        values["rises"] = len(rises)
        values.update({f"rise_{place}": (*rises, 0.5, 0.5, 0.5)[place] for place in range(_MOST_RISES)})
    return values


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    """Tunes, compares with the default on other tasks, and writes both.

    Args:
        arguments: Those of the command line by default.
    """
    options = _parser().parse_args(arguments)
    tasks = load_tasks(Bank("train", options.tasks))
    others = load_tasks(Bank("val", options.held_out)) if options.held_out else []
    for name in options.search or SEARCHES:
        print(f"{name}: {len(tasks)} tasks, {options.budget} decisions", flush=True)
        journal = options.journal / f"{name}.log" if options.journal else None
        tuned = search(
            table_problem(tasks, name),
            budget_decisions=options.budget,
            seed=options.seed,
            journal=journal,
            progress=_Reported(name),
        )
        gains = held_out(others, settings_from(tuned.params), default_settings(name)) if others else {}
        command = shlex.join(["python", "-m", "autoprec.policies.tuning", *(arguments or sys.argv[1:])])
        entry = _entry(tuned, options, len(tasks), len(others), gains, command)
        write_json(options.out, {**(read_json(options.out) or {}), name: entry}, allow_nan=False)
        print(f"{name}: {tuned.score:.4f} on the tasks tuned on, default {tuned.default_score:.4f}: {tuned.params}")
        for regime, gain in gains.items():
            print(f"  held out, {regime}: {gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autoprec.policies.tuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python -m autoprec.policies.tuning --budget 60000 --tasks 128 --journal build/tuning",
    )
    add = parser.add_argument
    add("--budget", type=int, default=60_000, help="environment decisions of each search (default: %(default)s)")
    add("--search", action="append", choices=SEARCHES, help="what to tune; may be repeated (default: all)")
    add("--tasks", type=int, default=128, help="tasks of the train bank (default: %(default)s)")
    add("--held-out", type=int, default=128, help="tasks of the val bank to compare on, 0 for none (default: 128)")
    add("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    add("--journal", type=Path, help="folder to keep trials in; an interrupted search goes on from there")
    add("--out", type=Path, default=RESULTS, help="file for the results (default: %(default)s)")
    return parser


class _Reported:
    """Prints how far a search is and when it will be over."""

    def __init__(self, name: str) -> None:
        self._name, self._started, self._first, self._next = name, time.perf_counter(), -1, 0.0

    def __call__(self, used: int, budget: int) -> None:
        now = time.perf_counter()
        if self._first < 0:
            self._first, self._started = used, now
            return
        if now < self._next:
            return
        self._next = now + 10.0
        rate = (used - self._first) / max(now - self._started, 1e-9)
        left = (budget - used) / rate if rate > 0 else math.nan
        print(f"{self._name}: {used} of {budget} decisions, {left:.0f} s left", flush=True)


def _entry(
    tuned: Tuned, options: argparse.Namespace, tasks: int, others: int, gains: Mapping[str, Interval], command: str
) -> Params:
    return {
        "settings": tuned.params,
        "score": round(tuned.score, 5),
        "default_score": round(tuned.default_score, 5),
        "decisions": tuned.decisions,
        "budget": options.budget,
        "trials": tuned.trials,
        "pruned": tuned.pruned,
        "tasks": tasks,
        "seed": options.seed,
        "best": [{"settings": params, "score": round(score, 5)} for params, score in tuned.best],
        "held_out": {
            "tasks": others,
            "gain": {name: [round(value, 5) for value in gain] for name, gain in gains.items()},
        },
        "command": command,
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
