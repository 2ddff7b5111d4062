"""The study of a sweep: made or gone on with, filled with what comes first, and kept free of dead workers' trials."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import optuna
from filelock import FileLock, Timeout
from optuna import Study, Trial
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import OperationalError

from autoprec.compare.arms import AUTOPREC
from autoprec.sweep.config import SweepConfig, SweepError
from autoprec.sweep.outcome import REASON, read_outcome, tell
from autoprec.sweep.plan import BASELINE, start_params
from autoprec.sweep.storage import GRACE_S, SEEN, open_storage, quiet_optuna

WORKER, IDENTITY = "worker", "autoprec"
_LOCK_S = 300
_PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
    "wilcoxon": "WilcoxonPruner",
}


class SweepStudy:
    """A study with its folder.

    Args:
        config: The sweep.
        must_exist: Refuse to begin one.

    Attributes:
        study: Optuna's.
        storage: Where it is.
        worker: Name of this process; a trial of a worker whose lock is free is dead.

    Raises:
        SweepError: If the storage cannot be opened or holds another sweep, or there is none where one must be.
    """

    def __init__(self, config: SweepConfig, must_exist: bool = False) -> None:
        self.config = config
        self.folder = config.out.resolve()
        self._make_folder()
        self.worker = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._lock = FileLock(self.folder / "sweep.lock", timeout=_LOCK_S)
        self._own = FileLock(self._lock_of(self.worker), timeout=_LOCK_S)
        with quiet_optuna(), self._lock:
            self.storage: BaseStorage = open_storage(config.storage, self.folder, config.max_retry)
            try:
                self.study = self._open(must_exist)
            except (StorageInternalError, OperationalError) as error:  # read-only, damaged, a disk that is full
                raise SweepError(
                    f"Cannot use the storage `{config.storage or self.folder / 'study.db'}`: {error.__cause__ or error}"
                    ". It must be one that can be written: see to its permissions and its disk, or choose another one."
                ) from error

    def _make_folder(self) -> None:
        try:
            for part in ("trials", "workers", "artifacts"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SweepError(f"Cannot write into `{self.folder}`: {error.strerror}. Choose another `--out`.") from error

    def _open(self, must_exist: bool) -> Study:
        config = self.config
        names = [each.study_name for each in optuna.get_all_study_summaries(self.storage, include_best_trial=False)]
        if must_exist and config.study_name not in names:
            raise SweepError(
                f"There is no sweep `{config.study_name}` to go on with in `{config.storage or self.folder}`."
            )
        study = optuna.create_study(
            storage=self.storage,
            study_name=config.study_name,
            directions=[objective.aim for objective in config.objectives],
            pruner=make_pruner(config),
            load_if_exists=True,
        )
        known, own = study.user_attrs.get(IDENTITY), config.identity()
        if known is None:
            study.set_user_attr(IDENTITY, own)
            study.set_metric_names([objective.name for objective in config.objectives])
        elif _as_json(known) != _as_json(own):
            other = sorted(name for name in {*known, *own} if known.get(name) != own.get(name))
            listed = "; ".join(f"`{name}` was {known.get(name)!r} and is {own.get(name)!r}" for name in other)
            raise SweepError(
                f"The study `{config.study_name}` holds trials of another sweep: {listed}. Give this one another `name`"
                " and another folder by `--out`, or forget the old trials by `--fresh`."
            )
        return study

    # ---- workers ----

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Marks this worker as alive, by a lock that the system frees when the process is gone."""
        with self._own:
            try:
                yield
            finally:
                self._lock_of(self.worker).unlink(missing_ok=True)

    def _lock_of(self, worker: str) -> Path:
        return self.folder / "workers" / f"{worker}.lock"

    def is_dead(self, worker: str) -> bool:
        """Returns whether a worker that had this folder is gone; ``False`` where that cannot be known from here.

        Args:
            worker: Its name.
        """
        path = self._lock_of(worker)
        return worker != self.worker and path.exists() and not is_held(path)

    # ---- trials ----

    def ask(self) -> Trial | None:
        """Returns the next trial, ``None`` where all have begun."""
        with quiet_optuna(), self._lock:
            self.bury()
            self._fill()
            trials = self.study.get_trials(deepcopy=False)
            waiting = any(trial.state == TrialState.WAITING for trial in trials)
            begun = sum(trial.state != TrialState.WAITING and not is_lost(trial) for trial in trials)
            if begun >= self.config.trials or (self.config.sampler.name == "grid" and not waiting):
                return None
            self.study.sampler = make_sampler(self.config, len(trials))
            trial = self.study.ask()
            trial.set_user_attr(WORKER, self.worker)
            return trial

    def bury(self, workers: tuple[str, ...] = ()) -> int:
        """Ends trials whose worker is gone: as their result on disk says, else they are queued again.

        Args:
            workers: Workers that are known to be gone.

        Returns:
            How many there were.
        """
        with quiet_optuna(), self._lock:
            running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            stale = self._stale()
            dead = [trial for trial in running if self._is_dead(trial, workers, trial._trial_id in stale)]
            for trial in dead:
                self._bury(trial, self.config.max_retry)
        return len(dead)

    def _stale(self) -> set[int]:
        """Trials that gave no sign of life for too long, by the heartbeat of a database."""
        return set(self.storage._get_stale_trial_ids(self.study._study_id)) if has_heartbeat(self.storage) else set()

    def _is_dead(self, trial: FrozenTrial, workers: tuple[str, ...], is_stale: bool) -> bool:
        worker = trial.user_attrs.get(WORKER)
        if worker is None:  # it went between asking and saying who it is, or it is another machine that is about to
            started = trial.datetime_start
            is_old = started is not None and time.time() - started.timestamp() > GRACE_S
            return self.config.storage is None or is_old or is_stale
        if worker in workers or self.is_dead(worker):
            return True
        if self._lock_of(worker).exists():
            return False  # its lock is held; signs of life are late too where the clock or the machine was set forward
        seen = trial.user_attrs.get(SEEN)
        return is_stale or (seen is not None and time.time() - float(seen) > GRACE_S)

    def _bury(self, dead: FrozenTrial, max_retry: int | None) -> None:
        """Ends a trial as its result on disk says; without one it is queued again with the values it had."""
        folder = self.trial_folder(dead.number)
        outcome = read_outcome(folder, self.mark(dead))
        try:
            if outcome is not None:
                tell(self.study, Trial(self.study, dead._trial_id), outcome, folder, self.folder / "artifacts")
                return
            self.study.tell(dead.number, state=TrialState.FAIL)
        except (UpdateFinishedTrialError, ValueError):
            return  # another process was faster
        with quiet_optuna():
            RetryHeartbeatStaleTrialCallback(max_retry=max_retry)(self.study, dead)

    def give_back(self, trial: Trial) -> None:
        """Ends a trial of this process that was stopped from outside, and queues it again.

        Args:
            trial: The trial.
        """
        self._bury(self.study.get_trials(deepcopy=False)[trial.number], None)

    def _fill(self) -> None:
        """Queues what comes first and has not been tried."""
        trials = self.study.get_trials(deepcopy=False)
        self._queue_baselines(trials)
        if self.config.sampler.name == "grid" and all(BASELINE in trial.user_attrs for trial in trials):
            self._queue_grid()

    def _queue_baselines(self, trials: list[FrozenTrial]) -> None:
        known = {trial.user_attrs.get(BASELINE) for trial in trials if not is_lost(trial)}
        lost = [trial.user_attrs.get(BASELINE) for trial in trials if is_lost(trial)]
        for name in first_trials(self.config):
            if name not in known and lost.count(name) <= self.config.max_retry:
                self.study.enqueue_trial(start_params(self.config, name), user_attrs={BASELINE: name})

    def _queue_grid(self) -> None:
        space = self.config.space()
        for values in itertools.product(*(dimension.grid() for dimension in space.values())):
            self.study.enqueue_trial(dict(zip(space, values, strict=True)), skip_if_exists=True)

    def clear_locks(self) -> None:
        """Removes what workers that are gone have left."""
        for path in (self.folder / "workers").glob("*.lock"):
            if self.is_dead(path.stem):
                path.unlink(missing_ok=True)

    def has_complete_trials(self) -> bool:
        """Returns whether the target has been trained to its end by now."""
        with quiet_optuna():
            return bool(self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))

    def trial_folder(self, number: int) -> Path:
        """Returns the folder of a trial.

        Args:
            number: Its number.
        """
        return self.folder / "trials" / str(number)

    def mark(self, trial: FrozenTrial | Trial) -> str:
        """Returns what tells a trial from that of another study with the same number.

        Args:
            trial: The trial.
        """
        started = trial.datetime_start
        return f"{self.study.study_name}/{trial.number}/{None if started is None else started.isoformat()}"


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # in which NaN is like NaN


def is_held(path: Path) -> bool:
    """Returns whether a process that lives has a lock.

    Args:
        path: File of the lock, which exists.
    """
    try:
        with FileLock(path, timeout=0):
            return False
    except Timeout:
        return True


def first_trials(config: SweepConfig) -> list[str]:
    """Returns what is tried first: static precisions that run here, and autoprec as it comes.

    Args:
        config: The sweep.
    """
    import torch

    from autoprec.hardware import native_formats

    native = native_formats(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    runs_here = [
        name for name in config.baselines if name != "16-mixed" or (torch.cuda.is_available() and "fp16" in native)
    ]
    return [*runs_here, AUTOPREC]


def is_lost(trial: FrozenTrial) -> bool:
    """Returns whether a trial was lost with its worker, which is no result.

    Args:
        trial: The trial.
    """
    return trial.state == TrialState.FAIL and REASON not in trial.user_attrs


def make_sampler(config: SweepConfig, number: int) -> BaseSampler:
    """Returns the sampler of the next trial; a new one for each, so that workers do not draw the same.

    Args:
        config: The sweep.
        number: How many trials there are.

    Raises:
        SweepError: If Optuna does not take its options.
    """
    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0])
    options: dict[str, Any] = {"seed": seed, **config.sampler.options}
    try:
        if config.sampler.name == "tpe":
            # groups: static trials have none of the callback's parameters
            return TPESampler(**{"multivariate": True, "group": True, **options})
        return RandomSampler(**options)
    except (TypeError, ValueError) as error:
        raise SweepError(f"`sampler.options`: {error}.") from error


def make_pruner(config: SweepConfig) -> BasePruner:
    """Returns the pruner.

    Args:
        config: The sweep.

    Raises:
        SweepError: If Optuna does not take its options.
    """
    try:
        made: BasePruner = getattr(optuna.pruners, _PRUNERS[config.pruner.name])(**config.pruner.options)
    except (TypeError, ValueError) as error:
        raise SweepError(f"`pruner.options`: {error}.") from error
    return made


def has_heartbeat(storage: BaseStorage) -> TypeGuard[RDBStorage]:
    """Returns whether a storage keeps signs of life itself.

    Args:
        storage: The storage.
    """
    return isinstance(storage, RDBStorage)
