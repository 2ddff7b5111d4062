"""Which implementation of an operation runs: ``reference`` (eager PyTorch), ``cpu`` (C) or ``triton``.

The choice is automatic (the fastest one that works on the device) or explicit: the argument ``implementation`` of an
operation, else the environment variable ``AUTOPREC_OPS``, which is read once. An explicit choice works or raises.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autoprec.formats import nearest
from autoprec.ops import native

VARIABLE = "AUTOPREC_OPS"
NAMES = ("reference", "cpu", "triton")
# Triton kernels have run under the interpreter and through the compiler, not on a GPU yet: only on request
_AUTOMATIC = ("cpu",)

# operation -> implementation -> where it is; imported on first use
_WHERE: dict[str, dict[str, str]] = {
    "grad_stats": {
        "reference": "autoprec.ops.statistics:grad_stats",
        "cpu": "autoprec.ops.cpu:grad_stats",
        "triton": "autoprec.ops.triton_statistics:grad_stats",
    },
    "prepare_adam": {
        "reference": "autoprec.ops.reference_prepared:PreparedAdam",
        "cpu": "autoprec.ops.cpu_steps:PreparedAdam",
        "triton": "autoprec.ops.triton_optimizers:PreparedAdam",
    },
    "prepare_sgd": {
        "reference": "autoprec.ops.reference_prepared:PreparedSgd",
        "cpu": "autoprec.ops.cpu_steps:PreparedSgd",
        "triton": "autoprec.ops.triton_optimizers:PreparedSgd",
    },
    "int8_matmul": {
        "reference": "autoprec.ops.reference:int8_matmul",
        "cpu": "autoprec.ops.cpu_matmul:int8_matmul",
        "triton": "autoprec.ops.triton_matmul:int8_matmul",
    },
    "refresh_copies_": {
        "reference": "autoprec.ops.copies:write_copies",
        "cpu": "autoprec.ops.cpu_steps:refresh_copies_",
        "triton": "autoprec.ops.triton_optimizers:refresh_copies_",
    },
    "cast": {
        "reference": "autoprec.ops.reference_casts:cast",
        "cpu": "autoprec.ops.cpu_casts:cast",
        "triton": "autoprec.ops.triton_casts:cast",
    },
    "restore": {
        "reference": "autoprec.ops.reference_casts:restore",
        "cpu": "autoprec.ops.cpu_casts:restore",
        "triton": "autoprec.ops.triton_casts:restore",
    },
    "fake_cast": {
        "reference": "autoprec.ops.reference_casts:fake_cast",
        "cpu": "autoprec.ops.cpu_casts:fake_cast",
        "triton": "autoprec.ops.triton_casts:fake_cast",
    },
}


@dataclass(frozen=True)
class Implementation:
    """What is known about one implementation.

    Attributes:
        name: One of ``NAMES``.
        is_available: Whether it can run on this machine.
        detail: What runs, or why nothing does.
    """

    name: str
    is_available: bool
    detail: str


def implementations() -> dict[str, Implementation]:
    """Returns what is known about every implementation, for reports; nothing is compiled or run."""
    return {name: Implementation(name, *probe()) for name, probe in _PROBES.items()}


def _probe_reference() -> tuple[bool, str]:
    return True, "eager PyTorch"


def _probe_cpu() -> tuple[bool, str]:
    reason = native.missing()
    return (True, f"C kernels for {native.selected_isa()}") if reason is None else (False, reason)


def missing_triton() -> str | None:
    """Says why there is no Triton that the kernels were tested with, ``None`` if there is one."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "triton is not installed"
    # older ones interpret and compile some of the kernels differently
    is_tested = tuple(map(int, version.split(".")[:2])) >= (3, 9)
    return None if is_tested else f"the kernels need triton 3.9, {version} is installed"


def _probe_triton() -> tuple[bool, str]:
    reason = missing_triton()
    if reason is not None:
        return False, reason
    if not torch.cuda.is_available():
        return False, "there is no GPU"
    return True, f"Triton kernels for {torch.cuda.get_device_name()}"


_PROBES: dict[str, Callable[[], tuple[bool, str]]] = {
    "reference": _probe_reference,
    "cpu": _probe_cpu,
    "triton": _probe_triton,
}
_DEVICES = {"cpu": ("cpu",), "triton": ("cuda",)}


def resolve(operation: str, device_type: str, implementation: str | None = None) -> Callable[..., Any]:
    """Returns the function that runs an operation.

    Args:
        operation: A name in the table.
        device_type: Type of the device that the tensors are on.
        implementation: An explicit choice; ``None`` for ``AUTOPREC_OPS`` or, without it, the automatic one.

    Raises:
        ValueError: If there is no implementation of that name.
        RuntimeError: If an explicit choice cannot run.
    """
    return _resolve(operation, device_type, implementation or chosen())


@functools.cache
def chosen() -> str | None:
    """Returns what ``AUTOPREC_OPS`` asks for, ``None`` for the automatic choice."""
    return os.environ.get(VARIABLE) or None


@functools.cache
def _resolve(operation: str, device_type: str, name: str | None) -> Callable[..., Any]:
    if name is None:
        name = automatic(operation, device_type)
    elif name not in NAMES:
        raise ValueError(
            f"Passed `{name!r}` as an implementation of `{operation}`. Known implementations: {sorted(NAMES)}."
            f"{nearest(name, NAMES)}"
        )
    else:
        _require(operation, device_type, name)
    module, function = _WHERE[operation][name].split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def has_kernel(operation: str, device_type: str) -> bool:
    """Whether something faster than the reference runs an operation on a device.

    Args:
        operation: A name in the table.
        device_type: Type of the device that the tensors are on.
    """
    return (chosen() or _remembered(operation, device_type)) != "reference"


def describe(operation: str, device_type: str) -> str:
    """Says what runs an operation on a device, and why nothing faster does.

    Args:
        operation: A name in the table.
        device_type: Type of the device that the tensors are on.
    """
    name = chosen() or automatic(operation, device_type)
    if name != "reference":
        return _PROBES[name]()[1]
    if chosen():
        return f"eager PyTorch (`{VARIABLE}=reference`)"
    if device_type != "cpu":
        return f"eager PyTorch (kernels for {device_type} run on request)"
    return f"eager PyTorch ({_reason_against(operation, device_type, 'cpu')})"


def automatic(operation: str, device_type: str) -> str:
    """Returns the name of the implementation that runs when nobody chooses."""
    return next((name for name in _AUTOMATIC if _reason_against(operation, device_type, name) is None), "reference")


_remembered = functools.cache(automatic)  # asked in every step


def _require(operation: str, device_type: str, name: str) -> None:
    reason = _reason_against(operation, device_type, name)
    if reason is not None:
        able = [other for other in NAMES if _reason_against(operation, device_type, other) is None]
        raise RuntimeError(
            f"Passed `{name!r}` (as `implementation` or `{VARIABLE}`) for `{operation}` on {device_type}: {reason}."
            f" Available: {able}."
        )


def _reason_against(operation: str, device_type: str, name: str) -> str | None:
    if name not in _WHERE[operation]:
        return f"`{operation}` has no such implementation"
    if name in _DEVICES and device_type not in _DEVICES[name]:
        return f"it runs on {' and '.join(_DEVICES[name])}"
    is_available, detail = _PROBES[name]()
    return None if is_available else detail
