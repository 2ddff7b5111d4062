"""What a policy is trained and validated on: proxy runs, or trainings of the user's own module.

What lives here: which environments a training plays. What does not: how it learns from them (``ppo``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autoprec.config import AutoPrecisionConfig
from autoprec.encoding import FEATURES
from autoprec.envs.proxies import Task
from autoprec.envs.proxy_env import ProxyVecEnv, load_tasks
from autoprec.envs.training_env import TrainingEnv, TrainingTwin
from autoprec.envs.training_rows import TrainingRows
from autoprec.envs.twins import Twin
from autoprec.json_files import read_json, write_json
from autoprec.policies.network import PolicyNetwork
from autoprec.policies.pretrained_policy import live_table
from autoprec.policies.train_settings import SettingsError, Stage, TrainSettings
from autoprec.policies.training_state import TWIN_FILE
from autoprec.policies.training_watch import OnProgress, Progress
from autoprec.target_functions import TargetError

Tasks = Sequence[tuple[Task, Twin]]
RowEnv = ProxyVecEnv | TrainingRows
_VALIDATION_SEED = 2**30
"""First seed of validation trainings, far from those that learning draws."""


class Played(NamedTuple):
    """One run that was played to its end.

    Attributes:
        score: 1 is what fp32 makes of the same time.
        reward: Sum of its rewards.
        diverged: Whether it diverged.
        steps: Optimizer steps that were attempted.
        skipped: How many of them were skipped.
    """

    score: float
    reward: float
    diverged: bool
    steps: int
    skipped: int


class TrainingTasks(ABC):
    """What one training of a policy plays."""

    validation_env: RowEnv
    """What the policy is validated on."""

    @abstractmethod
    def environment(self, share: float) -> RowEnv:
        """Returns a new environment to learn from.

        Args:
            share: Share of all decisions that is over.
        """

    @abstractmethod
    def play(self, network: PolicyNetwork) -> list[Played]:
        """Plays validation with the likeliest actions; always the same runs in the same order.

        Args:
            network: Decides.
        """

    def close(self) -> None:
        """Closes the environment of validation."""
        self.validation_env.close()


class ProxyTasks(TrainingTasks):
    """Banks of proxy runs.

    Args:
        settings: Of the training.
        tell: Called as fp32 twins are done.

    Raises:
        SettingsError: If a bank has no task that is usable.
    """

    def __init__(self, settings: TrainSettings, tell: OnProgress) -> None:
        self._settings = settings
        self._learn, validate = bank_tasks(settings, tell)
        self.validation_env: ProxyVecEnv = self._make(validate, runs=len(validate), is_shuffled=False)

    def environment(self, share: float) -> ProxyVecEnv:
        """Returns runs of the tasks of a stage."""
        return self._make(of_stage(self._learn, self._settings.stage(share)), runs=self._settings.n_envs)

    def play(self, network: PolicyNetwork) -> list[Played]:
        """Plays each task of the bank once."""
        env = self.validation_env
        rows: Any = env.reset()
        ended: list[dict[str, Any]] = []
        first_rows = np.flatnonzero(np.diff(env.run_of_row, prepend=-1))
        while not env.is_idle.all():
            rows, _, _, infos = env.step(_likeliest(network, rows))
            ended += [infos[row] for row in first_rows if infos[row]]
        ended.sort(key=lambda info: info["seed"])
        return [
            Played(info["score"], info["episode"]["r"], info["diverged"], info["steps"], info["skipped"])
            for info in ended
        ]

    def _make(self, tasks: Tasks, **options: Any) -> ProxyVecEnv:
        settings = self._settings
        return ProxyVecEnv(
            tasks,
            mode=settings.mode,
            settings=settings.table,
            weights=settings.reward,
            guard=settings.guard,
            **options,
        )


class ModuleTasks(TrainingTasks):
    """Trainings of the user's own module.

    Its fp32 twin is trained once and kept in the folder of the training.

    Args:
        settings: Of the training, with a module.
        folder: Of the training.
        tell: Called while the twin is trained.

    Raises:
        SettingsError: If the module cannot be found or trained.
    """

    def __init__(self, settings: TrainSettings, folder: Path, tell: OnProgress) -> None:
        assert settings.module is not None
        self._settings, self._module = settings, settings.module
        self._twin: TrainingTwin | None = None
        try:
            with closing(self._make()) as env:
                self._twin = self._found_twin(folder)
                if self._twin is None:
                    tell(Progress(0, 1, "twins"))
                    self._twin = env.twin
                    write_json(folder / TWIN_FILE, asdict(self._twin))
                    tell(Progress(1, 1, "twins"))
        except (TargetError, TypeError, ValueError) as error:
            raise SettingsError(f"Cannot train on `{self._module.target}`: {error}") from error
        self.validation_env: TrainingRows = TrainingRows([self._make()])

    def environment(self, share: float) -> TrainingRows:
        """Returns as many trainings side by side as the settings say."""
        return TrainingRows([self._make() for _ in range(self._module.trainings)])

    def play(self, network: PolicyNetwork) -> list[Played]:
        """Plays as many trainings as the settings say, each from a seed of its own."""
        return [self._play(network, _VALIDATION_SEED + index) for index in range(self._module.validation)]

    def _play(self, network: PolicyNetwork, seed: int) -> Played:
        (env,) = self.validation_env.trainings
        (flat, info), reward, is_over = env.reset(seed=seed), 0.0, False
        while not is_over:
            flat, value, terminated, truncated, info = env.step(_likeliest(network, flat.reshape(-1, len(FEATURES))))
            reward, is_over = reward + float(value), terminated or truncated
        steps = info["applied_steps"] + info["skipped_steps"]
        return Played(info["score"], reward, info["diverged"], steps, info["skipped_steps"])

    def _found_twin(self, folder: Path) -> TrainingTwin | None:
        found = read_json(folder / TWIN_FILE)
        try:
            return TrainingTwin(**found)
        except (TypeError, ValueError):  # none yet, or a file that was cut off
            return None

    def _make(self) -> TrainingEnv:
        module, settings = self._module, self._settings
        return TrainingEnv(
            module.target,
            interval=module.interval,
            budget=module.budget,
            mode=settings.mode,
            config=AutoPrecisionConfig(formats=module.formats, table=live_table(settings.table)),
            metric=module.metric,
            weights=settings.reward,
            twin=self._twin,
        )


def tasks_of(settings: TrainSettings, folder: Path, tell: OnProgress) -> TrainingTasks:
    """Returns what a training plays.

    Args:
        settings: Of the training.
        folder: The training's own.
        tell: Called as fp32 twins are done.

    Raises:
        SettingsError: If there is nothing that can be played.
    """
    if settings.module is not None:
        return ModuleTasks(settings, folder, tell)
    return ProxyTasks(settings, tell)


def bank_tasks(settings: TrainSettings, tell: OnProgress = lambda now: None) -> tuple[Tasks, Tasks]:
    """Returns the tasks to learn from and those of validation; twins that are missing are trained and kept.

    Args:
        settings: Of a training.
        tell: Called as twins are done.

    Raises:
        SettingsError: If a bank has none that is usable.
    """
    banks = [settings.train.bank(), settings.validation.bank()]

    def told(before: int) -> Callable[[int, int], None]:
        return lambda done, _: tell(Progress(before + done, sum(map(len, banks)), "twins"))

    learn = load_tasks(banks[0], progress=told(0))
    validate = load_tasks(banks[1], progress=told(len(banks[0])))
    for bank, usable in zip(banks, (learn, validate), strict=True):
        if not usable:
            raise SettingsError(f"None of the {len(bank)} tasks of bank {bank.name!r} is usable. Draw more, or others.")
    return learn, validate


def of_stage(tasks: Tasks, stage: Stage | None) -> Tasks:
    """Returns the tasks of a stage of a curriculum.

    Args:
        tasks: All tasks.
        stage: The stage; ``None`` takes all.

    Raises:
        SettingsError: If there are none.
    """
    if stage is None:
        return tasks
    chosen = [pair for pair in tasks if pair[0].regime in stage.regimes and pair[0].table_kind in stage.tables]
    if not chosen:
        raise SettingsError(f"No task of the train bank is of {stage!r}. Draw more tasks, or others.")
    return chosen


def _likeliest(network: PolicyNetwork, rows: NDArray[np.float32]) -> NDArray[np.int64]:
    with torch.no_grad():
        logits = network(torch.from_numpy(rows))
    actions: NDArray[np.int64] = logits.argmax(dim=1).numpy()
    return actions
