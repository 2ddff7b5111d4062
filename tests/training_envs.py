"""What the tests of the training environment share: small trainings, what is left in the process, whole episodes."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from autoprec import AutoPrecisionConfig
from autoprec.envs.process_state import ProcessState
from autoprec.envs.step_cost import FormatCost
from autoprec.envs.training_env import TrainingEnv
from tests.small_fits import QUIET, Full, Plain, differences, loader

SETTINGS: dict[str, Any] = {
    "interval": 4,
    "mode": "ladder",
    "config": AutoPrecisionConfig(formats=("fp32", "bf16", "fp16")),
    "cost": FormatCost(),
}


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Learns fast enough to be a unit of measure, and does not diverge at any batch size."""
    return torch.optim.Adam(parameters, lr=0.02)


class Maker:
    """Makes a small training that shuffles, and keeps the modules that it has made."""

    def __init__(self, kind: type[Plain] = Full, **options: Any) -> None:
        self.kind, self.options, self.modules = kind, options, list[Plain]()

    def __call__(self) -> tuple[Plain, Any, Mapping[str, Any]]:
        module = self.kind()
        module.make_optimizer = adam
        self.modules.append(module)
        options = {**QUIET, "max_epochs": 4, "deterministic": True, **self.options}
        train = loader(shuffle=True)
        return module, (train, loader(32)) if isinstance(module, Full) else train, options


def make_env(make: Any = None, **options: Any) -> TrainingEnv:
    return TrainingEnv(Maker() if make is None else make, **{**SETTINGS, **options})


def play(env: Any, moves: Any = None, seed: int = 7) -> tuple[list[Any], list[float], dict[str, Any]]:
    """Plays one episode; ``moves`` are called with the index of the step, and keep everything by default."""
    observation, info = env.reset(seed=seed)
    observations, rewards, is_over, step = [observation], list[float](), False, 0
    while not is_over:
        action = np.ones(env.unwrapped.rows, dtype=np.int64) if moves is None else moves(step)
        observation, reward, terminated, truncated, info = env.step(action)
        observations.append(observation)
        rewards.append(reward)
        is_over, step = terminated or truncated, step + 1
    return observations, rewards, info


def random_moves(env: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 3, (64, env.unwrapped.rows))
    return lambda step: drawn[step]


@contextmanager
def ctrl_c() -> Iterator[Callable[[], None]]:
    """Hands out what presses Ctrl-C from another thread, also where SIGINT is ignored, as in workers of pytest."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield lambda: signal.pthread_kill(main, signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def nothing_left(draws: bool = False) -> Iterator[None]:
    """Fails if a thread, a process or a change of global state is left at the end of the block.

    Args:
        draws: Whether the block draws from global generators itself.
    """
    before, processes, threads = _state(draws), len(multiprocessing.active_children()), set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - threads]
    assert not left, f"threads are left: {left}"
    assert len(multiprocessing.active_children()) == processes, "a process is left"
    changed = differences(before, _state(draws))
    assert not changed, f"changed: {changed}"


def _state(draws: bool) -> dict[str, Any]:
    state = vars(ProcessState.take()) | {"gradients": torch.is_grad_enabled()}
    variables = state.pop("environment")
    state["variables"] = {name: value for name, value in variables.items() if not name.startswith("PYTEST")}
    return {name: value for name, value in state.items() if not draws or name != "generators"}
