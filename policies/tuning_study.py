"""Black-box search at a budget of environment decisions: Optuna's TPE, with pruning over growing sets of tasks.

What lives here: the loop, the budget, and going on where an interrupted search stopped. What does not: what is searched
for (``tuning``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.proxy_env import ProxyVecEnv
from autoprec.policies.play import Decide, RunPolicy

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

Scores = NDArray[np.float64]
Params = dict[str, Any]

REDUCTION = 3
"""A trial goes on to this many times more tasks if it is among the best such share of those that came as far."""
_STARTUP_TRIALS = 10
_KEPT = 8


class BudgetSpentError(Exception):
    """A trial would take more decisions than are left."""


class Meter:
    """Counts decisions, and ends a trial rather than exceed the budget.

    Args:
        budget: Most decisions.
        used: Those that are used up already.
    """

    def __init__(self, budget: int, used: int = 0) -> None:
        self.budget, self.used = budget, used

    def spend(self, decisions: int) -> None:
        """Counts some decisions.

        Args:
            decisions: How many runs are about to decide.

        Raises:
            BudgetSpentError: If there are not so many left; none of them is counted.
        """
        if self.used + decisions > self.budget:
            raise BudgetSpentError
        self.used += decisions


class Metered:
    """Decides as something else does, on a meter.

    Args:
        decide: What decides.
        meter: Counts one decision for each run that still has budget.
    """

    def __init__(self, decide: Decide, meter: Meter) -> None:
        self._decide, self._meter = decide, meter
        self._env: ProxyVecEnv | None = None

    def start(self, env: ProxyVecEnv) -> None:
        """Begins a chunk of runs.

        Args:
            env: The runs.
        """
        self._env = env
        if isinstance(self._decide, RunPolicy):
            self._decide.start(env)

    def __call__(self, rows: NDArray[np.float32]) -> NDArray[Any]:
        """Returns a move for each row.

        Args:
            rows: ``[rows, features]``.
        """
        if self._env is None:
            raise RuntimeError("`Metered` was asked before `start`. Play it with `play_policy`.")
        self._meter.spend(int((~self._env.is_idle).sum()))
        return self._decide(rows)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is searched for.

    Args:
        name: Short name, part of the study's.
        suggest: Asks a trial for its values and makes parameters of them, as JSON can hold them.
        evaluate: From parameters, the part of the tasks and the meter to a score for each task of the part. It must
            depend on nothing else.
        first: Values for the trials that come first, on all tasks; the first of them is the default to compare with.
        tasks: How many tasks there are.
        least_tasks: Tasks after which a trial may be pruned for the first time.
    """

    name: str
    suggest: Callable[[Trial], Params]
    evaluate: Callable[[Params, slice, Meter], Scores]
    first: Sequence[Params]
    tasks: int
    least_tasks: int

    def __post_init__(self) -> None:
        if not 1 <= self.least_tasks <= self.tasks or not self.first:
            raise ValueError(
                f"Passed `Problem(tasks={self.tasks}, least_tasks={self.least_tasks}, first={list(self.first)})`."
                " There must be 1 task at least, 1 to `tasks` at first, and a default to compare with."
            )

    def rungs(self) -> list[int]:
        """Returns after how many tasks a trial may be pruned; the last entry is all of them."""
        count = math.floor(math.log(self.tasks / self.least_tasks, REDUCTION) + 1e-9) + 1
        return sorted({*(self.least_tasks * REDUCTION**rung for rung in range(count)), self.tasks})


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a search has found.

    Attributes:
        params: The best parameters among those that were tried on all tasks.
        score: Their mean score.
        default_score: That of the default.
        decisions: Decisions that the search took, those of the trial that the budget ended included.
        trials: Trials that were tried on all tasks.
        pruned: Trials that were given up before.
        best: The best parameters with their scores, best first.
    """

    params: Params
    score: float
    default_score: float
    decisions: int
    trials: int
    pruned: int
    best: tuple[tuple[Params, float], ...]


def search(
    problem: Problem,
    *,
    budget_decisions: int,
    seed: int,
    journal: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tuned:
    """Searches until the budget is spent. Same seed, same result, also after an interruption.

    Args:
        problem: What is searched for.
        budget_decisions: Most environment decisions, those of pruned trials included.
        seed: Of the private generators.
        journal: File that keeps the trials; a search with the same file goes on. In memory by default.
        progress: Called after each trial with decisions used and the budget.

    Raises:
        ModuleNotFoundError: If Optuna is not installed.
        ValueError: If the budget does not last for the default on all tasks, or the journal belongs to another search.
    """
    with _quiet_optuna():
        study = _study(problem, seed, journal)
        meter = Meter(budget_decisions, sum(trial.user_attrs["decisions"] for trial in _done(study)))
        while _run_trial(study, problem, seed, meter):
            if progress is not None:
                progress(meter.used, budget_decisions)
        return _result(study, problem, meter)


def _run_trial(study: Study, problem: Problem, seed: int, meter: Meter) -> bool:
    """Runs the next trial; returns whether there may be another one."""
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    number = len(_done(study))
    # a sampler for each trial: what it draws depends on the trials before and not on when the process began
    entropy = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    study.sampler = TPESampler(seed=entropy, n_startup_trials=_STARTUP_TRIALS)
    fixed = problem.first[number] if number < len(problem.first) else None
    if fixed is not None:
        study.enqueue_trial(fixed)
    trial = study.ask()
    before, scores = meter.used, np.zeros(0)
    params = problem.suggest(trial)
    rungs = problem.rungs()
    try:
        for start, stop in zip([0, *rungs], rungs, strict=False):
            scores = np.concatenate([scores, problem.evaluate(params, slice(start, stop), meter)])
            trial.report(float(scores.mean()), stop)
            if stop < problem.tasks and fixed is None and not _is_promising(study, float(scores.mean()), stop):
                break
    except BudgetSpentError:
        study.tell(trial, state=TrialState.FAIL)
        return False
    trial.set_user_attr("params", params)
    trial.set_user_attr("decisions", meter.used - before)
    if len(scores) == problem.tasks:
        study.tell(trial, float(scores.mean()))
    else:
        study.tell(trial, state=TrialState.PRUNED)
    return meter.used < meter.budget


def _study(problem: Problem, seed: int, journal: Path | None) -> Study:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState

    storage = None
    if journal is not None:
        journal.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.create_study(storage=storage, study_name=problem.name, direction="maximize", load_if_exists=True)
    mark = {"seed": seed, "tasks": problem.tasks, "least_tasks": problem.least_tasks, "first": list(problem.first)}
    known = study.user_attrs.get("mark", mark)
    if known != mark:
        raise ValueError(
            f"Passed the journal {str(journal)!r} of another search: it was made with {known}, this one has {mark}."
            " Choose another file, or remove it to begin anew."
        )
    study.set_user_attr("mark", mark)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)  # the interrupted one is run again from its beginning
    for _ in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.tell(study.ask(), state=TrialState.FAIL)
    return study


def _is_promising(study: Study, score: float, tasks: int) -> bool:
    """Successive halving, as Optuna's pruner has it, but for interrupted trials, which must not count here."""
    others = [trial.intermediate_values[tasks] for trial in _done(study) if tasks in trial.intermediate_values]
    return sum(other >= score for other in others) < math.ceil((len(others) + 1) / REDUCTION)


def _done(study: Study) -> list[FrozenTrial]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _result(study: Study, problem: Problem, meter: Meter) -> Tuned:
    from optuna.trial import TrialState

    done = _done(study)
    whole = [trial for trial in done if trial.state == TrialState.COMPLETE]
    if not whole:
        raise ValueError(
            f"Passed a budget of {meter.budget} decisions. It does not last for the default on all {problem.tasks}"
            " tasks. Allow more decisions, or pass fewer tasks."
        )
    ranked = sorted(whole, key=lambda trial: (-_value(trial), trial.number))
    return Tuned(
        params=dict(ranked[0].user_attrs["params"]),
        score=_value(ranked[0]),
        default_score=_value(whole[0]),
        decisions=meter.used,
        trials=len(whole),
        pruned=len(done) - len(whole),
        best=tuple((dict(trial.user_attrs["params"]), _value(trial)) for trial in ranked[:_KEPT]),
    )


def _value(trial: FrozenTrial) -> float:
    value = trial.value
    assert value is not None, "a trial without a value is not complete"
    return value


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna without its line for each trial, and with its own setting afterwards."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The search needs Optuna. Run `pip install '.[sweep]'` in a checkout of autoprec.", name=error.name
        ) from error
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def as_json(value: Mapping[str, Any]) -> Params:
    """Returns parameters as strict JSON can hold them: tuples become lists, an infinite number its name.

    Args:
        value: Parameters.
    """

    def plain(item: Any) -> Any:
        if isinstance(item, (tuple, list)):
            return [plain(each) for each in item]
        return str(item) if isinstance(item, float) and not math.isfinite(item) else item

    return {name: plain(item) for name, item in value.items()}
