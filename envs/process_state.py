"""What a process has once: random generators, global flags of torch, the environment, how much Lightning says.

Two that run in turns each find what they left, as if the other were in another process. What lives here: taking that
state and putting it back. What does not: whose turn it is (``paused_thread``).
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

_LOGGERS = tuple(logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric"))
_Flag = tuple[Callable[[], Any], Callable[[Any], object]]


def _attribute(path: str) -> _Flag:
    """A flag of ``torch.backends``; ``None`` where this torch has it not, or cannot say what it is."""
    *owners, name = path.split(".")

    def owner() -> Any:
        return reduce(getattr, owners, torch.backends)

    def get() -> Any:
        try:
            return getattr(owner(), name)
        except (AttributeError, RuntimeError):  # the latter where old and new names of a flag were both set
            return None

    def put(value: Any) -> None:
        if value is not None:
            setattr(owner(), name, value)

    return get, put


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # old and new names of the flag were both set
        return None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


_FLAGS: tuple[_Flag, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    *map(_attribute, ("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32")),
    (_matmul_precision, _set_matmul_precision),
    # what the two before set has names of its own, the general ones first
    *map(_attribute, ("fp32_precision", "cudnn.fp32_precision", "mkldnn.fp32_precision")),
    *map(_attribute, ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision")),
    *(_attribute(f"mkldnn.{kind}.fp32_precision") for kind in ("matmul", "conv", "rnn")),
)


@dataclass(frozen=True)
class ProcessState:
    """The state at one moment.

    Attributes:
        generators: States of the generators of ``random``, numpy and torch on the CPU.
        devices: States of torch's generators on CUDA devices, none where CUDA is not in use.
        flags: Values of the flags.
        levels: Below what Lightning's loggers are silent.
        environment: Variables of the environment.
    """

    generators: tuple[Any, Any, torch.Tensor]
    devices: tuple[torch.Tensor, ...]
    flags: tuple[Any, ...]
    levels: tuple[int, ...]
    environment: dict[str, str]

    @classmethod
    def take(cls) -> ProcessState:
        """Returns the state now."""
        return cls(
            generators=(random.getstate(), np.random.get_state(), torch.get_rng_state()),
            devices=tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else (),
            flags=tuple(get() for get, _ in _FLAGS),
            levels=tuple(logger.level for logger in _LOGGERS),
            environment=dict(os.environ),
        )

    def put_back(self) -> None:
        """Makes it the state again; what is as it was is left alone."""
        own, numpys, torchs = self.generators
        random.setstate(own)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if self.devices:
            torch.cuda.set_rng_state_all(self.devices)
        for (get, put), value in zip(_FLAGS, self.flags, strict=True):
            if get() != value:
                put(value)
        for logger, level in zip(_LOGGERS, self.levels, strict=True):
            if logger.level != level:
                logger.setLevel(level)
        self._put_back_environment()

    def _put_back_environment(self) -> None:
        if os.environ == self.environment:
            return
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def quieten() -> None:
    """Has Lightning say only what is a warning, until the state is put back."""
    for logger in _LOGGERS:
        logger.setLevel(logging.WARNING)


@contextmanager
def isolated() -> Iterator[None]:
    """Puts the state back at the end of the block."""
    state = ProcessState.take()
    try:
        yield
    finally:
        state.put_back()
