"""A contextual bandit over settings of the table: what is known when a run begins chooses the settings it runs with.

It is the control for anything that adapts: a policy that gains by telling kinds of task apart must do so better than
this. The algorithm is LinUCB with a model for each arm (Li et al., *A Contextual-Bandit Approach to Personalized News
Article Recommendation*, arXiv:1003.0146). Rewards are differences to the first arm on the same task.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.baselines import Table
from autoprec.envs.costs import Charges
from autoprec.envs.proxies import BASE_BATCH, Bank, Task, nominal_costs
from autoprec.envs.proxy_env import load_tasks
from autoprec.envs.simulation import Simulation
from autoprec.envs.twins import Twin
from autoprec.json_files import read_json, write_json
from autoprec.policies.rivals import table_settings
from autoprec.policies.tuning import (
    RESULTS,
    TABLES,
    Reported,
    Tasks,
    by_regime,
    held_out_entry,
    play_settings,
    positive,
    print_gains,
    run_command,
)
from autoprec.policies.tuning_study import BudgetSpentError, Meter, as_json
from autoprec.table import TableSettings

Array = NDArray[Any]
Play = Callable[[Sequence[tuple[Task, Twin]], TableSettings, Meter], Array]

CONTEXT = (
    *("intercept", "table_known", "look_costs", "units", "run_length", "levels"),
    *("price_16_bit", "price_cheapest", "growth_lower", "growth_higher"),
)
"""What the choice rests on, all of it known after the first step of a run. Nothing of the optimizer, no true cost."""
FITTED = RESULTS.with_name("bandit.json")
"""Where the fitted bandit is committed."""
_ARMS_TUNED = 4
_ROUND = 32
_NEVER = -1e9


def default_arms(path: Path = RESULTS) -> list[TableSettings]:
    """Returns the arms: the table's defaults, constants and schedules around them, and the best trials of tuning.

    Args:
        path: Results of tuning; without them there are only the others.
    """
    arms = [
        TableSettings(),
        TableSettings(optimism=None),
        TableSettings(schedule=()),
        TableSettings(batch=1, schedule=()),
        TableSettings(batch=2, schedule=()),
        TableSettings(batch=1),
        TableSettings(batch=-1),
        TableSettings(threshold=0.03),
        TableSettings(threshold=0.3),
    ]
    found = read_json(path) or {}
    for name in TABLES:
        best = found.get(name, {}).get("best", [])
        arms += [table_settings(trial["settings"]) for trial in best[:_ARMS_TUNED]]
    return list(dict.fromkeys(arms))


def context(tasks: Sequence[Task]) -> Array:
    """Returns what is known of tasks when their runs have made their first step.

    Costs are those that the table tells. Where it is hidden they are nominal, and the growth of step times with the
    batch size is 0.

    Args:
        tasks: The tasks.

    Returns:
        ``[tasks, CONTEXT]``, every entry about 1 in size.
    """
    return np.array([_context(task) for task in tasks])


@dataclass(frozen=True, kw_only=True, eq=False)
class Bandit:
    """Chooses settings of the table for each run. Deterministic. Plays as a ``choose`` of ``baselines.play``.

    Args:
        arms: Settings to choose from; the first is the one that others are compared with.
        weights: ``[arms, CONTEXT]``: expected gain over the first arm.
        decisions: Environment decisions that fitting took.
    """

    arms: tuple[TableSettings, ...]
    weights: Array
    decisions: int = 0

    def chosen(self, tasks: Sequence[Task]) -> Array:
        """Returns the index of the arm for each task.

        Args:
            tasks: The tasks; only their context is looked at.
        """
        return np.asarray((context(tasks) @ self.weights.T).argmax(axis=1))

    def __call__(self, simulation: Simulation) -> None:
        """Sets the knobs of each run as its arm does."""
        names = ("level", "loss_scale", "batch_index", "clip_index", "probes")
        before = {name: getattr(simulation, name).copy() for name in names}
        result = {name: values.copy() for name, values in before.items()}
        chosen = self.chosen(simulation.tasks)
        for index in np.unique(chosen):
            for name, values in before.items():
                setattr(simulation, name, values.copy())
            Table(settings=self.arms[index])(simulation)
            for name in names:
                result[name][chosen == index] = getattr(simulation, name)[chosen == index]
        for name, values in result.items():
            setattr(simulation, name, values)

    def play(self, tasks: Tasks) -> Array:
        """Returns the score of each task, played as policies are: guard included.

        Args:
            tasks: Tasks with their twins.
        """
        chosen, scores = self.chosen([task for task, _ in tasks]), np.zeros(len(tasks))
        for index in np.unique(chosen):
            own = np.flatnonzero(chosen == index)
            scores[own] = play_settings([tasks[place] for place in map(int, own)], self.arms[index])
        return scores

    def to_dict(self) -> dict[str, Any]:
        """Returns the bandit as strict JSON can hold it."""
        arms = [as_json(asdict(arm)) for arm in self.arms]
        return {"context": list(CONTEXT), "arms": arms, "weights": self.weights.tolist(), "decisions": self.decisions}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Bandit:
        """Returns the bandit that :meth:`to_dict` wrote.

        Args:
            found: What it returned.

        Raises:
            ValueError: If its context is another one.
        """
        if tuple(found["context"]) != CONTEXT:
            raise ValueError(
                f"Passed a bandit with context {found['context']}. It must be {list(CONTEXT)}; fit it anew."
            )
        arms = tuple(table_settings(arm) for arm in found["arms"])
        return cls(arms=arms, weights=np.array(found["weights"]), decisions=int(found["decisions"]))


def fit_bandit(
    tasks: Tasks,
    *,
    budget_decisions: int,
    seed: int,
    arms: Sequence[TableSettings] | None = None,
    ridge: float = 8.0,
    confidence: float = 0.5,
    play: Play | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Bandit:
    """Fits a bandit. Same seed, same bandit.

    Args:
        tasks: Tasks to learn from, with their twins; they are visited in turn, in an order drawn anew each time.
        budget_decisions: Most environment decisions.
        seed: Of the private generator.
        arms: Settings to choose from; :func:`default_arms` by default.
        ridge: Pull of an arm's expected gain to 0, in observations.
        confidence: Standard errors above its expected gain that an arm is tried at.
        play: Scores of tasks under settings; ``play_settings`` by default.
        progress: Called after each round with decisions used and the budget.

    Raises:
        ValueError: If there is no task, or fewer than two arms.
    """
    arms = default_arms() if arms is None else list(arms)
    if not tasks or len(arms) < 2:
        raise ValueError(f"Passed `fit_bandit` {len(tasks)} tasks and {len(arms)} arms. It needs a task and two arms.")
    play = play_settings if play is None else play
    rng, meter = np.random.Generator(np.random.PCG64(seed)), Meter(budget_decisions)
    models = _Models(len(arms), ridge, confidence)
    rows = context([task for task, _ in tasks])
    reference = np.full(len(tasks), np.nan)
    tried = np.zeros((len(tasks), len(arms)), dtype=bool)
    tried[:, 0] = True
    try:
        while not tried.all():
            for batch in np.array_split(rng.permutation(len(tasks)), max(1, len(tasks) // _ROUND)):
                _one_round(tasks, arms, batch, rows, reference, tried, models, play, meter)
                if progress is not None:
                    progress(meter.used, meter.budget)
    except BudgetSpentError:
        pass  # what was learnt until then is what the budget bought
    return Bandit(arms=tuple(arms), weights=models.weights(), decisions=meter.used)


class _Models:
    """A ridge regression of the gain on the context for each arm; the first arm gains nothing."""

    def __init__(self, arms: int, ridge: float, confidence: float) -> None:
        self._confidence = confidence
        self._gram = np.repeat(ridge * np.eye(len(CONTEXT))[None], arms, axis=0)
        self._sums = np.zeros((arms, len(CONTEXT)))
        self._noise, self._count = 0.0, 0

    def add(self, arm: int, rows: Array, gains: Array) -> None:
        """Learns from gains of an arm."""
        self._gram[arm] += rows.T @ rows
        self._sums[arm] += gains @ rows
        self._noise, self._count = self._noise + float((gains**2).sum()), self._count + len(gains)

    def weights(self) -> Array:
        """Returns ``[arms, CONTEXT]``."""
        return np.asarray(np.linalg.solve(self._gram, self._sums[:, :, None])[:, :, 0])

    def best(self, rows: Array, tried: Array) -> Array:
        """Returns the arm to try for each row: the most promising of those that it has not had; -1 if there is none."""
        inverse = np.linalg.inv(self._gram)
        spread = np.sqrt(self._noise / max(self._count, 1)) if self._count else 1.0
        doubt = spread * np.sqrt(np.einsum("nf,afg,ng->na", rows, inverse, rows))
        promise = np.where(tried, _NEVER, rows @ self.weights().T + self._confidence * doubt)
        return np.where(tried.all(axis=1), -1, promise.argmax(axis=1))


def _one_round(
    tasks: Tasks,
    arms: Sequence[TableSettings],
    batch: Array,
    rows: Array,
    reference: Array,
    tried: Array,
    models: _Models,
    play: Play,
    meter: Meter,
) -> None:
    """Tries one arm on each task of a batch, and the first arm where it was not played yet."""
    new = batch[np.isnan(reference[batch])]
    if len(new):
        reference[new] = play([tasks[index] for index in new], arms[0], meter)
    chosen = models.best(rows[batch], tried[batch])
    for arm in np.unique(chosen[chosen >= 0]):
        own = batch[chosen == arm]
        scores = play([tasks[index] for index in own], arms[arm], meter)
        models.add(int(arm), rows[own], scores - reference[own])
        tried[own, arm] = True


def _context(task: Task) -> list[float]:
    is_known = not np.isnan(task.table).any()
    table = task.table if is_known else nominal_costs(task.compute_share)
    prices = table[:, list(task.ladder)].sum(axis=0)
    growth = [0.0, 0.0]
    if is_known:
        one, is_unit = np.ones(1), np.ones((1, task.units), dtype=bool)
        charges = Charges(table[None], is_unit, one * task.overhead, one * task.batch_exponent, one * task.cast_cost)
        wide = np.zeros((1, task.units), dtype=np.int64)
        times = [float(charges.step_time(wide, np.array([BASE_BATCH + step]))[0]) for step in (-1, 0, 1)]
        growth = [float(np.log2(times[1] / times[0])), float(np.log2(times[2] / times[1]))]
    return [
        *(1.0, float(is_known), float(task.probe_cost > 0), task.units / 8.0),
        *(np.log2(task.budget / 240.0), len(task.ladder) / 5.0),
        *(float(np.log2(prices[1 : min(3, len(prices))].min())), float(np.log2(prices.min()))),
        *growth,
    ]


# ---- the command ----

_COMMAND = ("python", "-m", "autoprec.policies.bandit")
_DESCRIPTION = """Fits a contextual bandit (LinUCB) over settings of the table: what is known when
a run begins chooses the settings that it runs with. A policy that gains by
telling kinds of task apart must do so better than this.

Tune the table first: its best trials are arms too. `autoprec evaluate-policy`
in a checkout plays what docs/results/bandit.json holds."""
_EPILOG = """examples:
  python -m autoprec.policies.bandit
  python -m autoprec.policies.bandit --budget 600 --tasks 12 --held-out 8 \\
      --out build/bandit.json                   # seconds: does it run here?"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits a bandit, compares it with its first arm on other tasks, and writes both.

    Args:
        arguments: Those of the command line by default.
    """
    return run_command(_fit, _parser(), _COMMAND, arguments)


def _fit(options: argparse.Namespace, command: str) -> int:
    tasks = load_tasks(Bank("train", options.tasks))
    others = load_tasks(Bank("val", options.held_out)) if options.held_out else []
    print(f"bandit: {len(tasks)} tasks, {options.budget} decisions", flush=True)
    bandit = fit_bandit(
        tasks,
        budget_decisions=options.budget,
        seed=options.seed,
        arms=default_arms(options.tuned),
        progress=Reported("bandit"),
    )
    if not bandit.weights.any():
        raise ValueError(
            f"Passed a budget of {options.budget} decisions. It does not last for one comparison of two arms on"
            f" {len(tasks)} tasks. Allow more decisions, or pass fewer tasks."
        )
    gains = by_regime(others, bandit.play(others), play_settings(others, bandit.arms[0])) if others else {}
    entry = {
        "budget": options.budget,
        "tasks": len(tasks),
        "seed": options.seed,
        "held_out": held_out_entry(len(others), gains),
        "command": command,
        "date": datetime.date.today().isoformat(),
    }
    write_json(options.out, {**bandit.to_dict(), **entry}, allow_nan=False)
    print_gains("bandit", gains)
    print(f"bandit: written to {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=" ".join(_COMMAND),
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--budget", type=positive, default=60_000, help="environment decisions (default: %(default)s)")
    add("--tasks", type=positive, default=128, help="tasks drawn from the train bank (default: %(default)s)")
    add("--held-out", type=int, default=128, help="tasks of the val bank to compare on, 0 for none (default: 128)")
    add("--seed", type=int, default=0, help="of the fit (default: %(default)s)")
    add(
        "--tuned",
        type=Path,
        default=RESULTS,
        help="results of tuning; best trials are arms (default: %(default)s)",
    )
    add("--out", type=Path, default=FITTED, help="file for the bandit (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
