"""The arms of a comparison: ways of training, by name, and which of them this device can run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoprec.formats import nearest
from autoprec.target_functions import PlainError

AUTOPREC = "autoprec"
FP32 = "32-true"
STATIC = (FP32, "32-true-medium", "bf16-mixed", "bf16-true", "16-mixed")
"""Static arms: the Trainer's ``precision``, ``-medium`` with ``torch.set_float32_matmul_precision("medium")``."""

DEFAULT = (*STATIC, AUTOPREC)


class NotRunnableError(PlainError):
    """An arm cannot run here."""


@dataclass(frozen=True)
class Arm:
    """One way of training.

    Args:
        name: Name in the output.
        precision: The Trainer's ``precision``; ``None`` leaves the user's to a callback that the user already has.
        matmul: What ``torch.set_float32_matmul_precision`` is called with, ``None`` leaves it as the target has it.
        policy: ``policy`` of the callback, or ``module:function`` that returns a controller or a callback; ``None`` for
            the default one. Only of steered arms.
        options: All arguments of the callback, in place of ``policy``; ``None`` for those that ``policy`` leaves open.
    """

    name: str
    precision: str
    matmul: str | None = None
    policy: str | None = None
    options: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def is_steered(self) -> bool:
        """Whether a callback of autoprec takes part."""
        return self.name == AUTOPREC or self.name.startswith(f"{AUTOPREC}:")


def parse_arm(name: str) -> Arm:
    """Returns the arm of a name.

    Args:
        name: One of :data:`STATIC`, ``autoprec``, or ``autoprec:`` with a policy's name, the path of a map, or
            ``module:function`` that returns a controller or a callback.

    Raises:
        ValueError: If there is no such arm.
        FileNotFoundError: If a map has no file.
    """
    if name in STATIC:
        precision = name.removesuffix("-medium")
        matmul = {FP32: "highest", "32-true-medium": "medium"}.get(name)
        return Arm(name, precision, matmul)
    head, colon, policy = name.partition(":")
    if head != AUTOPREC or (colon and not policy):
        known = [*DEFAULT, f"{AUTOPREC}:rule"]
        raise ValueError(
            f"Passed `--arms {name}`. Arms are {', '.join(STATIC)}, {AUTOPREC} (default policy) and {AUTOPREC}:POLICY,"
            " with a policy such as `rule`, `fixed:bf16`, the path of a map, or `module:function` for your own."
            f"{nearest(name, known)}"
        )
    if policy and not _is_reference(policy):
        from autoprec.controller import resolve_policy

        resolve_policy(policy)
        # the run may have another working directory
        policy = str(Path(policy).resolve()) if Path(policy).is_file() else policy
    return Arm(name, FP32, None, policy or None)


def parse_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Returns the arms of some names.

    Args:
        names: Names of arms.

    Raises:
        ValueError: If there are none, one twice, or one that is unknown.
        FileNotFoundError: If a map has no file.
    """
    if not names or len(set(names)) != len(names):
        raise ValueError(f"Passed `--arms {','.join(names)}`. There must be one arm at least, and none twice.")
    return tuple(map(parse_arm, names))


def check_runnable(arm: Arm, device: torch.device) -> None:
    """Refuses an arm whose number format the device does not compute in.

    Args:
        arm: The arm.
        device: Where the run trains.

    Raises:
        NotRunnableError: If the device would emulate it, or Lightning would use something else in its place.
    """
    from autoprec.hardware import native_formats

    native = native_formats(device)
    if arm.name == "16-mixed" and (device.type == "cpu" or "fp16" not in native):
        substitute = " (on a CPU, Lightning trains as bf16-mixed in its place)" if device.type == "cpu" else ""
        raise NotRunnableError(f"fp16 is not native on {device.type}{substitute}; native: {', '.join(native)}")


def make_callback(arm: Arm, interval: int | None) -> Any:
    """Returns the callback of a steered arm.

    Args:
        arm: A steered arm.
        interval: Applied steps between decisions, ``None`` for the callback's default.

    Raises:
        NotRunnableError: If ``module:function`` gives neither a controller nor a callback.
    """
    from autoprec import AutoPrecisionCallback, Controller

    if arm.options is not None:
        return AutoPrecisionCallback(**arm.options)
    options: dict[str, Any] = {} if interval is None else {"interval": interval}
    if arm.policy is None:
        return AutoPrecisionCallback(**options)
    if not _is_reference(arm.policy):
        return AutoPrecisionCallback(arm.policy, **options)
    module, _, function = arm.policy.rpartition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise NotRunnableError(f"`{arm.policy}` names no function: {error}") from error
    if isinstance(made, AutoPrecisionCallback):
        return made
    if isinstance(made, Controller):
        return AutoPrecisionCallback(made, **options)
    raise NotRunnableError(
        f"`{arm.policy}` returned a `{type(made).__qualname__}`; it must return a Controller or a callback of autoprec"
    )


def _is_reference(policy: str) -> bool:
    module, colon, function = policy.rpartition(":")
    dotted = all(part.isidentifier() for part in module.split("."))
    return bool(colon) and module != "fixed" and dotted and function.isidentifier()
