"""Training of a policy with PPO; goes on where it was stopped, and on proxy runs the same seed gives the same bytes.

What it is trained on, proxy runs or the user's own module, is ``training_tasks``. A training is a chain of segments.
Each begins with fresh seeds and fresh episodes and is made from nothing but the settings and the state that the one
before has left, so that a training that was killed and one that was not are the same. Needs the extra ``rl``.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import KVWriter, Logger

from autoprec.encoding import FEATURES
from autoprec.json_files import read_json, write_json
from autoprec.policies.network import PolicyNetwork
from autoprec.policies.policy_file import PolicyCard, load_policy, save_policy
from autoprec.policies.row_policy import RowPolicy, to_network
from autoprec.policies.train_settings import SettingsError, TrainSettings, schedule
from autoprec.policies.training_state import RESULT_FILE, TrainingState, claim_folder, is_result, load_state
from autoprec.policies.training_tasks import RowEnv, tasks_of
from autoprec.policies.training_watch import Metrics, OnProgress, Progress, Watch
from autoprec.policies.validation import Validation

_STATISTICS, _LEARNING = 0, 1


def train_policy(
    settings: TrainSettings,
    seed: int,
    folder: Path,
    *,
    progress: OnProgress | None = None,
    writers: Callable[[], Sequence[KVWriter]] = tuple,
) -> Path:
    """Trains a policy, or goes on with the training that a folder holds.

    Global random generators and the number of threads are as before when it returns.

    Args:
        settings: What to train, and how.
        seed: Of everything random.
        folder: For checkpoint, results and the policy itself; made if it does not exist.
        progress: Called after each rollout.
        writers: Makes what metrics of stable-baselines3 go to besides ``training.json``: TensorBoard, wandb.

    Returns:
        The folder, which then holds ``policy.safetensors`` and ``policy.json`` of the best state in validation.

    Raises:
        SettingsError: If the folder holds another training, or the settings do not fit the tasks.
        FloatingPointError: If weights are no longer finite.
    """
    claim_folder(folder, settings, seed)
    if is_result(read_json(folder / RESULT_FILE)) and _has_policy(folder):
        return folder
    tell = progress or (lambda now: None)
    # a module's steps are timed as the user runs them
    with _left_as_found(threads=1 if settings.module is None else torch.get_num_threads()):
        _Training(settings, seed, folder, tell).run(writers)
    return folder


def _has_policy(folder: Path) -> bool:
    """Whether the policy of a finished training is still there; if not, it is written anew from the checkpoint."""
    try:
        load_policy(folder)
    except (OSError, ValueError):
        return False
    return True


class _Training:
    """One training of one seed, from its settings to the policy's files."""

    def __init__(self, settings: TrainSettings, seed: int, folder: Path, tell: OnProgress) -> None:
        self._settings, self._seed, self._folder, self._tell = settings, seed, folder, tell
        self._tasks = tasks_of(settings, folder, tell)
        self._validation = Validation(self._tasks, self._network)
        self._state = load_state(folder) or TrainingState()
        self._state.sittings += 1
        self._logger = Logger(None, [Metrics(self._state.metrics)])

    def run(self, writers: Callable[[], Sequence[KVWriter]]) -> None:
        """Trains to the end and writes the result."""
        state, settings = self._state, self._settings
        self._logger.output_formats += writers()
        try:
            total = settings.rollouts(settings.runs)
            while state.rollouts < total or not state.validations:
                started = time.monotonic()
                self._play_segment(total)
                state.seconds += time.monotonic() - started
                state.save(self._folder)
        finally:
            self._tasks.close()
            self._logger.close()
        self._export()
        write_json(self._folder / RESULT_FILE, self._result(), allow_nan=False)

    def _play_segment(self, total: int) -> None:
        state, settings = self._state, self._settings
        env = self._tasks.environment(state.rollouts / total)
        try:
            watch = Watch(state, total, env, self._tell)
            model = self._model(env, watch)
            if not state.validations:
                self._prepare(model, env)
                self._remember(model, self._validation.evaluate(self._network(model)))
            if state.rollouts < total:
                self._learn(model, watch, min(settings.segment, total - state.rollouts))
        finally:
            env.close()

    def _model(self, env: RowEnv, watch: Watch) -> PPO:
        """A model as the last segment has left it, with random generators of this one."""
        state, settings = self._state, self._settings
        rows = settings.n_steps * env.num_envs
        if settings.module is None:  # a few rows of a module make one mini-batch
            settings.check_rollout(rows)
        rate, clip = schedule(settings.learning_rate), schedule(settings.clip_range)
        same = ("n_steps", "n_epochs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm", "target_kl")
        with warnings.catch_warnings():
            # the last mini-batch is a few rows smaller than the others
            warnings.filterwarnings("ignore", "You have specified a mini-batch size")
            model = PPO(
                RowPolicy,
                env,
                learning_rate=lambda _: rate(watch.share),
                clip_range=lambda _: clip(watch.share),
                batch_size=settings.minibatch(rows),
                policy_kwargs={"net_arch": list(settings.net_arch), "keep_bias": settings.keep_bias},
                seed=_seed_of(self._seed, _LEARNING, state.rollouts),
                device="cpu",
                **{name: getattr(settings, name) for name in same},
            )
        model.set_logger(self._logger)
        model.num_timesteps = state.rollouts * rows
        if state.policy:
            try:
                model.policy.load_state_dict(state.policy)
                model.policy.optimizer.load_state_dict(state.optimizer)
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                what = " ".join(str(error).split())[:200]
                raise SettingsError(
                    f"Cannot go on from `{self._folder}`: its checkpoint does not fit the settings"
                    f" ({what}). Choose another folder, or `--fresh` to begin anew."
                ) from error
        return model

    def _prepare(self, model: PPO, env: RowEnv) -> None:
        """Normalises by runs of which one half accepts the table and the other moves at random."""
        settings, runs = self._settings, int(env.run_of_row[-1]) + 1
        seed = _seed_of(self._seed, _STATISTICS, 0)
        rng = np.random.Generator(np.random.PCG64(seed))
        is_random = env.run_of_row % 2 == 1
        env.seed(seed)
        seen = [env.reset()]
        for step in range(1, settings.statistics_steps):
            seen.append(env.step(np.where(is_random, rng.integers(0, 3, env.num_envs), 1))[0])  # type: ignore[arg-type]
            self._tell(Progress(step * runs, settings.statistics_steps * runs, "statistics"))
        rows = torch.from_numpy(np.concatenate(seen))
        policy = model.policy
        assert isinstance(policy, RowPolicy)
        self._state.widen(rows)
        if settings.start is None:
            policy.network.set_normalisation(rows)
        else:
            self._state.widen(policy.begin_with(settings.start))
        model.set_random_seed(model.seed)  # the environment's was used up

    def _learn(self, model: PPO, watch: Watch, rollouts: int) -> None:
        state, validation = self._state, self._validation
        rows = rollouts * model.n_steps * model.n_envs
        try:
            model.learn(rows, [watch, validation], log_interval=1, reset_num_timesteps=False)
        except (ValueError, RuntimeError) as error:  # actions cannot be drawn from weights that are not finite
            self._check_finite(model, error)
            raise
        self._check_finite(model)
        state.rollouts += rollouts
        state.decisions += rollouts * model.n_steps * watch.runs
        state.policy, state.optimizer = model.policy.state_dict(), model.policy.optimizer.state_dict()
        self._remember(model, validation.result)

    def _network(self, model: PPO) -> PolicyNetwork:
        return to_network(model, self._state.low, self._state.high)

    def _check_finite(self, model: PPO, cause: Exception | None = None) -> None:
        lost = [name for name, value in model.policy.named_parameters() if not torch.isfinite(value).all()]
        if lost:
            raise FloatingPointError(
                f"Weights of the policy are no longer finite ({', '.join(lost[:3])}) after {self._state.decisions}"
                f" decisions with `learning_rate={self._settings.learning_rate!r}`. Lower it, or `max_grad_norm`."
            ) from cause

    def _remember(self, model: PPO, result: dict[str, Any]) -> None:
        state = self._state
        state.validations.append({"decisions": state.decisions, **result})
        if len(state.validations) == 1 or result["score"] > state.best_score:
            state.best_at = len(state.validations) - 1
            state.best = self._network(model).state_dict()
            self._export()

    def _export(self) -> None:
        """Writes the best state so far, so that a policy is there before the training has ended."""
        settings, state = self._settings, self._state
        network = PolicyNetwork(len(FEATURES), settings.net_arch)
        network.load_state_dict(state.best)
        plain = settings.model_dump(mode="json")
        training: dict[str, Any] = {
            "seed": self._seed,
            "settings": plain,
            "validation": _summary(state.validations[state.best_at]),
        }
        card = PolicyCard(
            hidden=settings.net_arch,
            mode=settings.mode,
            table=plain["table"],
            training=training,
            name=f"ppo-{settings.mode}-{self._seed}",
        )
        save_policy(self._folder, network, card)

    def _result(self) -> dict[str, Any]:
        state = self._state
        first, best = state.validations[0], state.validations[state.best_at]
        return {
            "seed": self._seed,
            "decisions": state.decisions,
            "rollouts": state.rollouts,
            "seconds": round(state.seconds, 1),
            "sittings": state.sittings,
            "best": _summary(best),
            "gain": _gain(best, first),
            "validations": [{**one, "gain": _gain(one, first)} for one in state.validations],
            "metrics": state.metrics,
        }


def _summary(validation: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in validation.items() if name != "scores"}


def _gain(validation: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    """What was won task by task since decision 0."""
    gains = np.subtract(validation["scores"], first["scores"])
    error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else 0.0
    return {"over_decision_0": float(gains.mean()), "standard_error": error}


def _seed_of(seed: int, purpose: int, rollouts: int) -> int:
    """A seed of its own for each purpose and segment of each training."""
    return int(np.random.SeedSequence([seed, purpose, rollouts]).generate_state(1)[0])


@contextmanager
def _left_as_found(threads: int) -> Iterator[None]:
    """Trains on so many threads, and gives back the threads and the global random generators, which PPO seeds."""
    before, states = torch.get_num_threads(), (random.getstate(), np.random.get_state(), torch.get_rng_state())
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
