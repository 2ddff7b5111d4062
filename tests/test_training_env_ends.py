"""However a training ends, nothing is left of it, and the user's error reaches whoever steps the environment.

Time budget: 20 s.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")
import gymnasium

from autoprec.envs.training_env import TrainingEnv
from tests.small_fits import QUIET, Full, loader
from tests.training_envs import SETTINGS, Maker, ctrl_c, make_env, nothing_left, play


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with nothing_left(draws=True):
        yield


def keep(env: TrainingEnv) -> Any:
    return np.ones(env.rows, dtype=np.int64)


class Failing(Full):
    """Raises in one of its training steps."""

    at = 12  # in the second step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(self.losses) == self.at and type(self.trainer.strategy.precision_plugin).__name__ == "AutoPrecision":
            self.fails_here()
        return super().training_step(batch, batch_idx)

    def fails_here(self) -> None:
        raise LookupError("no such row")


class FailingAtOnce(Failing):
    at = 2


def twin() -> Any:
    env = make_env()
    try:
        return env.twin
    finally:
        env.close()


def test_an_error_in_the_users_code_ends_the_step_with_its_traceback() -> None:
    make = Maker(Failing)
    env = make_env(make, twin=twin())
    env.reset(seed=0)
    env.step(keep(env))
    with pytest.raises(LookupError, match="no such row") as found:
        env.step(keep(env))
    assert {"fails_here", "training_step", "step"} <= {frame.name for frame in traceback.extract_tb(found.tb)}
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(keep(env))
    make.kind = Full
    assert play(env)[2]["ending"] == "finished"
    env.close()


def test_an_error_before_the_first_decision_ends_the_reset() -> None:
    env = make_env(Maker(FailingAtOnce), twin=twin())
    with pytest.raises(LookupError, match="no such row"):
        env.reset(seed=0)


@pytest.mark.parametrize("where", ["make", "setup", "validation"])
def test_errors_elsewhere_arrive_too(where: str) -> None:
    class Elsewhere(Full):
        def setup(self, stage: str) -> None:
            if where == "setup":
                raise LookupError(where)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if where == "validation" and self.global_rank == 0:
                raise LookupError(where)

    def make() -> Any:
        if where == "make":
            raise LookupError(where)
        return Elsewhere(), (loader(), loader(32)), {**QUIET, "max_epochs": 2}

    with pytest.raises(LookupError, match=where):
        make_env(make).reset(seed=0)


def test_closing_and_starting_anew_in_mid_episode() -> None:
    env = make_env()
    env.reset(seed=0)
    env.step(keep(env))
    env.reset(seed=1)
    assert [each.name for each in threading.enumerate()].count("autoprec-episode") == 1
    env.step(keep(env))
    env.close()


def test_an_environment_that_is_dropped() -> None:
    env = make_env()
    env.reset(seed=0)
    del env
    gc.collect()


@pytest.mark.parametrize("when", ["twin", "episode"])
def test_ctrl_c_while_waiting(when: str) -> None:
    class Interrupting(Full):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if len(self.losses) == 12:
                press()
            return super().training_step(batch, batch_idx)

    known = twin() if when == "episode" else None
    env = make_env(Maker(Interrupting), twin=known)
    with ctrl_c() as press, pytest.raises(KeyboardInterrupt):
        play(env)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(keep(env))
    env.close()


def test_hooks_and_trainers_of_an_episode_are_released() -> None:
    make = Maker()
    env = make_env(make)
    env.reset(seed=0)
    module = make.modules[-1]
    env.close()
    assert type(module.net[0]) is torch.nn.Linear
    assert not module.net[0]._forward_hooks
    assert not module.net[0]._forward_pre_hooks
    assert "forward" not in vars(module.net[0])
    assert pl.Trainer.fit.__module__.startswith("lightning.")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_loaders_end_with_the_episode() -> None:
    def make() -> Any:
        train = torch.utils.data.DataLoader(loader().dataset, batch_size=8, num_workers=1, persistent_workers=True)
        return Full(), (train, loader(32)), {**QUIET, "max_epochs": 3}

    env = TrainingEnv(make, twin=twin(), **SETTINGS)
    env.reset(seed=0)
    env.step(keep(env))
    env.close()
    gc.collect()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, MemoryError])
def test_whatever_the_users_code_raises_arrives(kind: type[BaseException]) -> None:
    class Raising(Failing):
        def fails_here(self) -> None:
            raise kind("so")

    make = Maker(Raising)
    env = make_env(make, twin=twin())
    env.reset(seed=0)
    env.step(keep(env))
    with pytest.raises(kind, match="so"):
        env.step(keep(env))
    module = make.modules[-1]
    assert not module.net[0]._forward_hooks
    assert not module.net[0]._forward_pre_hooks
    assert "forward" not in vars(module.net[0])
    env.close()
