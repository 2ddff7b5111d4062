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
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoprec.encoding import CLIP_MULTIPLIERS
from autoprec.envs.proxies import REGIMES, Bank, Task
from autoprec.envs.proxy_env import load_tasks
from autoprec.envs.twins import Twin
from autoprec.json_files import read_json, write_json
from autoprec.paired import Interval, paired_difference
from autoprec.policies.play import play_policy
from autoprec.policies.rivals import table_settings
from autoprec.policies.rule_rival import RuleKnobs, RulePolicy
from autoprec.policies.tuning_study import Meter, Metered, Params, Problem, Scores, Tuned, as_json, search
from autoprec.table import TableSettings

if TYPE_CHECKING:
    from optuna import Trial

Tasks = Sequence[tuple[Task, Twin]]
Progress = Callable[[int, int], None]
Settings = TableSettings | RuleKnobs

TABLES = ("plain", "schedule")
"""The table with one batch size, and the table whose batch size rises over the run."""
SEARCHES = (*TABLES, "rule")
"""What can be tuned."""
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
    problem = problem_of(tasks, "schedule" if has_schedule else "plain")
    tuned = search(problem, budget_decisions=budget_decisions, seed=seed, journal=journal, progress=progress)
    return table_settings(tuned.params)


def problem_of(tasks: Tasks, name: str) -> Problem:
    """Returns a search.

    Args:
        tasks: Tasks to tune on.
        name: One of ``SEARCHES``.
    """
    if name not in SEARCHES:
        raise ValueError(f"Passed `problem_of(tasks, {name!r})`. It searches for one of {SEARCHES}.")
    has_schedule = name == "schedule"

    def evaluate(params: Params, part: slice, meter: Meter) -> Scores:
        return play_settings(tasks[part], settings_from(name, params), meter)

    if name == "rule":
        suggest, first = _suggest_rule, [_values_of_rule(RuleKnobs())]
    else:
        suggest = partial(_suggest_table, has_schedule=has_schedule)
        default = default_settings(name)
        assert isinstance(default, TableSettings), "only the rule has other settings"
        # with and without costs that are learnt from step times
        first = [_values_of_table(each, has_schedule) for each in (default, replace(default, optimism=None))]
    least = max(1, len(tasks) // _FIRST_SHARE)
    return Problem(name=name, suggest=suggest, evaluate=evaluate, first=first, tasks=len(tasks), least_tasks=least)


def play_settings(tasks: Tasks, settings: Settings, meter: Meter | None = None) -> Scores:
    """Returns the score of each task, played as policies are: guard included.

    Args:
        tasks: Tasks with their twins.
        settings: Those of the table or of the rule.
        meter: Counts the decisions.
    """
    is_rule = isinstance(settings, RuleKnobs)
    decide = RulePolicy(settings) if isinstance(settings, RuleKnobs) else _keep
    found = play_policy(
        tasks,
        decide if meter is None else Metered(decide, meter),
        settings if isinstance(settings, TableSettings) else None,
        mode="ladder" if is_rule else "offset",
    )
    return np.asarray(found.score, dtype=np.float64)


def default_settings(name: str) -> Settings:
    """Returns settings before tuning.

    Args:
        name: One of ``SEARCHES``.
    """
    return RuleKnobs() if name == "rule" else TableSettings() if name == "schedule" else TableSettings(schedule=())


def settings_from(name: str, params: Mapping[str, Any]) -> Settings:
    """Returns settings that were written as JSON.

    Args:
        name: One of ``SEARCHES``.
        params: The fields of ``TableSettings``, or those of ``RuleKnobs``.

    Raises:
        ValueError: If a field is not known, or a value not allowed.
    """
    if name != "rule":
        return table_settings(params)
    known = {field.name for field in fields(RuleKnobs)}
    if unknown := sorted(set(params) - known):
        raise ValueError(f"Passed settings of the rule with {unknown}. Settings are {sorted(known)}.")
    found = {**params, "schedule": tuple(params.get("schedule", ())), "clip": float(params.get("clip", 1.0))}
    return RuleKnobs(**found)


def read_tuned(name: str, path: Path = RESULTS) -> Settings:
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
    return settings_from(name, found[name]["settings"])


def by_regime(tasks: Tasks, scores: Scores, others: Scores) -> dict[str, Interval]:
    """Returns what scores are above others on the same tasks: over all, and by regime.

    Args:
        tasks: The tasks.
        scores: Score of each task.
        others: What to compare with.
    """
    regimes = np.array([task.regime for task, _ in tasks])
    parts = {"all": np.ones(len(tasks), dtype=bool), **{name: regimes == name for name in REGIMES}}
    return {
        name: paired_difference(scores[part].tolist(), others[part].tolist())
        for name, part in parts.items()
        if part.any()
    }


def _keep(rows: Any) -> Any:
    return np.zeros(len(rows), dtype=np.int64)


def _suggest_shared(trial: Trial) -> Params:
    return {
        "headroom_bits": float(trial.suggest_int("headroom_bits", 0, 8)),
        "clip": CLIP_MULTIPLIERS[trial.suggest_int("clip", 0, len(CLIP_MULTIPLIERS) - 1)],
        "batch": trial.suggest_int("batch", -2, 2),
        "schedule": (),
    }


def _suggest_table(trial: Trial, *, has_schedule: bool) -> Params:
    optimism = trial.suggest_float("optimism", 0.0, 3.0)
    chosen: Params = {
        **_suggest_shared(trial),
        "threshold": trial.suggest_float("threshold", 0.01, 1.0, log=True),
        "probe_every": trial.suggest_int("probe_every", 1, 16),
        "optimism": optimism if trial.suggest_int("learns_costs", 0, 1) else None,
    }
    if has_schedule:
        # all times are always there, so that the sampler has one space; the first ones count
        times = [trial.suggest_float(f"rise_{rise}", 0.0, 1.0) for rise in range(_MOST_RISES)]
        chosen["schedule"] = tuple(sorted(times[: trial.suggest_int("rises", 0, _MOST_RISES)]))
    return as_json(chosen)


def _suggest_rule(trial: Trial) -> Params:
    bound = trial.suggest_float("stable_cv", 0.1, 4.0, log=True)
    return as_json({**_suggest_shared(trial), "stable_cv": bound})


def _values_of_shared(settings: Settings) -> Params:
    """The values of a trial that suggests these settings."""
    return {
        "headroom_bits": round(settings.headroom_bits),
        "clip": CLIP_MULTIPLIERS.index(settings.clip),
        "batch": settings.batch,
    }


def _values_of_table(settings: TableSettings, has_schedule: bool) -> Params:
    values = {
        **_values_of_shared(settings),
        "threshold": settings.threshold,
        "probe_every": settings.probe_every,
        "optimism": 1.0 if settings.optimism is None else settings.optimism,
        "learns_costs": int(settings.optimism is not None),
    }
    if has_schedule:
        rises = settings.schedule or ()
        values["rises"] = len(rises)
        values.update({f"rise_{place}": (*rises, 0.5, 0.5, 0.5)[place] for place in range(_MOST_RISES)})
    return values


def _values_of_rule(settings: RuleKnobs) -> Params:
    return {**_values_of_shared(settings), "stable_cv": settings.stable_cv}


# ---- the command ----

_COMMAND = ("python", "-m", "autoprec.policies.tuning")
_DESCRIPTION = """Tunes parameters of the table and of the rule by black-box search: what anything
learned must be better than. Each search may make as many decisions as the
training of a policy does, on the same bank of tasks, with the same guard.

A result is written when its search ends, with its gain over the default on
tasks that were not tuned on. `autoprec evaluate-policy` in a checkout plays
what docs/results/tuned_table.json holds."""
_EPILOG = """examples:
  python -m autoprec.policies.tuning --journal build/tuning
  python -m autoprec.policies.tuning --budget 600 --tasks 12 --held-out 8 \\
      --search plain --out build/tuned.json     # seconds: does it run here?"""


def positive(text: str) -> int:
    """Returns a number of the command line that must be 1 or more.

    Args:
        text: What was passed.

    Raises:
        argparse.ArgumentTypeError: If it is not.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"passed {text!r}. Pass a whole number from 1 on")
    return int(text)


def run_command(
    work: Callable[[argparse.Namespace, str], int],
    parser: argparse.ArgumentParser,
    command: Sequence[str],
    arguments: Sequence[str] | None,
) -> int:
    """Runs what a command line asks for; what is wrong with it ends in a line of usage.

    Args:
        work: Called with the options and the whole command line as text; returns the exit status.
        parser: Reads the options.
        command: What stands before the arguments.
        arguments: Those of the command line by default.
    """
    options = parser.parse_args(arguments)
    try:
        return work(options, shlex.join([*command, *(sys.argv[1:] if arguments is None else arguments)]))
    except (ValueError, ModuleNotFoundError) as error:
        parser.error(str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Tunes, compares with the default on other tasks, and writes both.

    Args:
        arguments: Those of the command line by default.
    """
    return run_command(_tune, _parser(), _COMMAND, arguments)


def _tune(options: argparse.Namespace, command: str) -> int:
    tasks = load_tasks(Bank("train", options.tasks))
    others = load_tasks(Bank("val", options.held_out)) if options.held_out else []
    for name in options.search or SEARCHES:
        print(f"{name}: {len(tasks)} tasks, {options.budget} decisions", flush=True)
        journal = options.journal / f"{name}.log" if options.journal else None
        tuned = search(
            problem_of(tasks, name),
            budget_decisions=options.budget,
            seed=options.seed,
            journal=journal,
            progress=Reported(name),
        )
        found, default = settings_from(name, tuned.params), default_settings(name)
        gains = by_regime(others, play_settings(others, found), play_settings(others, default)) if others else {}
        entry = _entry(tuned, options, len(tasks), len(others), gains, command)
        write_json(options.out, {**(read_json(options.out) or {}), name: entry}, allow_nan=False)
        print(f"{name}: score {tuned.score:.4f} on the tasks tuned on, default {tuned.default_score:.4f}")
        settings = ", ".join(f"{key}={value}" for key, value in tuned.params.items())
        print(textwrap.fill(settings, 78, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
        print_gains(name, gains)
        print(f"{name}: written to {options.out}")
    return 0


def print_gains(name: str, gains: Mapping[str, Interval]) -> None:
    """Prints gains on tasks that were not tuned on.

    Args:
        name: What gains.
        gains: From :func:`by_regime`.
    """
    for regime, gain in gains.items():
        print(
            f"{name}: gain on held-out tasks, {regime}: {gain.mean:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]",
            flush=True,
        )


def held_out_entry(tasks: int, gains: Mapping[str, Interval]) -> Params:
    """Returns gains as results hold them.

    Args:
        tasks: How many tasks were compared.
        gains: From :func:`by_regime`.
    """
    return {"tasks": tasks, "gain": {name: [round(value, 5) for value in gain] for name, gain in gains.items()}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=" ".join(_COMMAND),
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--budget", type=positive, default=60_000, help="environment decisions of each search (default: %(default)s)")
    add("--search", action="append", choices=SEARCHES, help="what to tune; may be repeated (default: all)")
    add("--tasks", type=positive, default=128, help="tasks drawn from the train bank (default: %(default)s)")
    add("--held-out", type=int, default=128, help="tasks of the val bank to compare on, 0 for none (default: 128)")
    add("--seed", type=int, default=0, help="of the search (default: %(default)s)")
    add("--journal", type=Path, help="folder to keep trials in; an interrupted search goes on from there")
    add("--out", type=Path, default=RESULTS, help="file for the results (default: %(default)s)")
    return parser


class Reported:
    """Prints how far something is and when it will be over.

    Args:
        name: What it is.
    """

    def __init__(self, name: str) -> None:
        self._name, self._started, self._first, self._next = name, time.perf_counter(), -1, 0.0

    def __call__(self, used: int, budget: int) -> None:
        """Takes note, and prints every ten seconds.

        Args:
            used: Decisions that are used.
            budget: Decisions that may be used.
        """
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
        "held_out": held_out_entry(others, gains),
        "command": command,
        "date": datetime.date.today().isoformat(),
    }


if __name__ == "__main__":
    sys.exit(main())
