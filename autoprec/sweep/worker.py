"""A worker: asks for trials, trains each in fresh processes, and ends them in the study, until there is none left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

from optuna import Trial, TrialPruned
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage

from autoprec import __version__
from autoprec.machine import version
from autoprec.sweep.config import SweepConfig
from autoprec.sweep.measure import FailedTrialError, Measured, OnProgress, Progress, TrialSpec, UnusableError, measure
from autoprec.sweep.outcome import Outcome, complete, tell, write_outcome
from autoprec.sweep.plan import reference_arm, suggest, trial_arm, trial_target
from autoprec.sweep.storage import HEARTBEAT_S, SEEN, quiet_optuna
from autoprec.sweep.studies import SweepStudy, has_heartbeat
from autoprec.target_functions import TargetError

Notice = dict[str, Any]
Notify = Callable[[Notice], object]
Measure = Callable[[TrialSpec, OnProgress], Measured]


class SweepWorker:
    """Runs trials one after the other.

    Args:
        sweep: The study.
        notify: Is told of the beginning, the progress and the end of each trial.
        deadline: Value of ``time.time()`` after which no trial begins.
        measuring: Trains a trial; for tests.
    """

    def __init__(
        self,
        sweep: SweepStudy,
        notify: Notify = lambda event: None,
        deadline: float = math.inf,
        measuring: Measure = measure,
    ) -> None:
        self._sweep = sweep
        self._config: SweepConfig = sweep.config
        self._target = sweep.config.load_target()
        self._notify = notify
        self._deadline = deadline
        self._measure = measuring

    def run(self) -> None:
        """Runs trials until all have begun or time is up.

        Raises:
            TargetError: If the target cannot be trained at all.
            KeyboardInterrupt: If it is stopped; the trial under way is queued again.
        """
        with quiet_optuna(), self._sweep.alive():
            while time.time() < self._deadline and (trial := self._sweep.ask()) is not None:
                self._run(trial)

    def _run(self, trial: Trial) -> None:
        sweep = self._sweep
        folder = sweep.trial_folder(trial.number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with _pulse(sweep, trial):
                outcome = self._outcome(trial)
                write_outcome(outcome, folder, sweep.mark(trial))
                tell(sweep.study, trial, outcome, folder, sweep.folder / "artifacts")
        except UpdateFinishedTrialError:  # another process took this one for dead, and has queued the trial again
            self._notify({"kind": "end", "trial": trial.number, "state": "failed", "reason": "it was taken for dead"})
            return
        except BaseException:
            sweep.give_back(trial)
            raise
        self._notify({"kind": "end", "trial": trial.number, "state": outcome.state, "reason": outcome.reason})

    def _outcome(self, trial: Trial) -> Outcome:
        config = self._config
        try:
            plan = suggest(config, trial)
            attributes = {"arm": plan.arm, "seeds": list(range(config.seeds)), "versions": _versions()}
            for name, value in attributes.items():
                trial.set_user_attr(name, value)
            self._notify({"kind": "begin", "trial": trial.number, "arm": plan.arm, "params": trial.params})
            folder = self._sweep.trial_folder(trial.number)
            spec = TrialSpec(
                target=trial_target(self._target, plan.arguments),
                arm=trial_arm(config, plan, folder),
                reference=reference_arm(config) if config.needs_reference else None,
                seeds=config.seeds,
                folder=folder,
                threads=config.threads,
                clock=config.used_clock,
                steps=config.steps,
                every=config.evaluate_every,
                seconds=None if config.trial_minutes is None else 60.0 * config.trial_minutes,
            )
            return complete(config, self._measure(spec, _Reporter(self._sweep, trial, self._notify)))
        except TrialPruned as end:
            return Outcome("pruned", reason=str(end))
        except UnusableError as error:
            return Outcome("pruned", reason=str(error))
        except FailedTrialError as error:
            return Outcome("failed", reason=str(error))
        except TargetError as error:
            if not self._sweep.has_complete_trials():
                raise
            return Outcome("failed", reason=str(error))  # it can be trained, only not with these values
        except (ValueError, TypeError, OSError) as error:  # values that do not go together, a disk that is full
            return Outcome("failed", reason=f"{type(error).__name__}: {error}")


class _Reporter:
    """Reports the objective of a trial while it trains, and ends it where the pruner says so."""

    def __init__(self, sweep: SweepStudy, trial: Trial, notify: Notify) -> None:
        self._trial = trial
        self._notify = notify
        self._is_watched = sweep.config.pruner.name != "none"
        self._is_by_seed = sweep.config.pruner.name == "wilcoxon"
        self._name = sweep.config.objectives[0].name
        self._reported: set[int] = set()

    def __call__(self, now: Progress) -> None:
        event = {"kind": "step", "trial": self._trial.number, "step": now.step, "steps": now.steps, "loss": now.loss}
        self._notify(event)
        if self._is_watched:
            self._report(now)

    def _report(self, now: Progress) -> None:
        for step, metrics in now.metrics.items():
            if self._name not in metrics or step in self._reported:
                continue
            self._reported.add(step)
            value = metrics[self._name]
            if math.isnan(value):
                raise UnusableError(f"diverged: {self._name} is nan after step {step}")
            if self._is_hopeless(value, now.seed if self._is_by_seed else step):
                raise TrialPruned(f"pruned after step {step}: {self._name} {value:.6g} is worse than other trials'")

    def _is_hopeless(self, value: float, step: int) -> bool:
        try:
            self._trial.report(value, step)
            return self._trial.should_prune()
        except StorageInternalError:  # a storage that does not answer must not end a training
            return False


@contextmanager
def _pulse(sweep: SweepStudy, trial: Trial) -> Iterator[None]:
    """Gives signs of life of a trial from a thread of its own."""
    over = Event()

    def beat() -> None:
        while True:
            with suppress(Exception):  # a sign that is missed says no more than that the storage was busy
                _beat(sweep, trial)
            if over.wait(HEARTBEAT_S):
                return

    thread = Thread(target=beat, name="autoprec-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat(sweep: SweepStudy, trial: Trial) -> None:
    if has_heartbeat(sweep.storage):
        assert isinstance(sweep.storage, RDBStorage)
        sweep.storage.record_heartbeat(trial._trial_id)
    else:
        sweep.storage.set_trial_user_attr(trial._trial_id, SEEN, time.time())


def _versions() -> dict[str, str]:
    return {"autoprec": __version__, **{name: version(name) for name in ("torch", "lightning", "optuna")}}
