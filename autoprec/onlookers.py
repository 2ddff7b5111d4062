"""Finds out whether user code may look at gradients, or write weights, where a step would like to be private.

Gradients may stay in low precision, scaled and unclipped, and copies of weights may be kept over steps, only where
nobody can tell. What lives here: reading classes and code objects of a module and its callbacks. What does not: what
follows from it (``fast_path``, ``stepping``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

# from the backward to the end of the batch: gradients exist, are used and have been used
_SEES_GRADIENTS = (
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "on_before_zero_grad",
    "lr_scheduler_step",
    "on_train_batch_end",
)
# other code that runs between one step and the next forward
_RUNS_BETWEEN = (
    "on_train_batch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_start",
)
# attributes through which a training step reads gradients, or writes weights without a trace
_TELLTALE = {"grad": "gradients", "data": "weights past autograd", "set_": "weights past autograd"}
# their code is known: it reads no gradient and writes no weight in a training step
_KNOWN = ("torch", "lightning", "lightning_fabric", "lightning_utilities", "autoprec", "numpy", "torchmetrics")


def onlooker(root: pl.LightningModule, callbacks: Sequence[pl.Callback], machinery: Sequence[object]) -> str | None:
    """Returns who may see gradients or write weights in the middle of a step, ``None`` if nobody does.

    Args:
        root: The module.
        callbacks: The Trainer's callbacks.
        machinery: What else takes part in a step: strategy and precision plugin.
    """
    for owner, plain in [(root, pl.LightningModule), *((callback, pl.Callback) for callback in callbacks)]:
        hook = next(_overrides(owner, plain, _SEES_GRADIENTS), None)
        if hook is not None:
            return f"`{type(owner).__qualname__}.{hook}`"
    foreign = next((part for part in machinery if not _is_known(type(part).__module__)), None)
    return f"`{type(foreign).__qualname__}`" if foreign is not None else _telltale(root)


def runs_between_steps(root: pl.LightningModule, callbacks: Sequence[pl.Callback]) -> bool:
    """Whether user code runs between a step and the next forward, where it might write weights.

    Args:
        root: The module.
        callbacks: The Trainer's callbacks.
    """
    owners = [(root, pl.LightningModule), *((callback, pl.Callback) for callback in callbacks)]
    return any(next(_overrides(owner, plain, _RUNS_BETWEEN), None) is not None for owner, plain in owners)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of an optimizer, or of all optimizers, may look at gradients before or after its step."""
    own = bool(optimizer._optimizer_step_pre_hooks) or bool(optimizer._optimizer_step_post_hooks)
    return own or bool(torch_optimizer._global_optimizer_post_hooks)


def _overrides(owner: Any, plain: type, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        found, original = getattr(owner, name, None), getattr(plain, name, None)
        if found is None or getattr(found, "__func__", found) is original:
            continue
        if not _is_known(getattr(found, "__module__", None)):
            yield name


def _is_known(module: str | None) -> bool:
    top = (module or "").partition(".")[0]
    return top in _KNOWN or top in sys.stdlib_module_names


def _telltale(root: nn.Module) -> str | None:
    """The first function that a training step may call and that mentions gradients or raw data of tensors."""
    seen: set[CodeType] = set()
    pending: list[tuple[Any, type]] = [(getattr(root, "training_step", None), type(root))]
    pending += [(getattr(module, "forward", None), type(module)) for module in root.modules()]
    while pending:
        function, owner = pending.pop()
        plain = _plain_function(function)
        if plain is None or plain.__code__ in seen or _is_known(plain.__module__):
            continue
        seen.add(plain.__code__)
        names = set(_names(plain.__code__))
        found = next((name for name in sorted(_TELLTALE) if name in names), None)
        if found is not None:
            return f"`{plain.__qualname__}`, which mentions `.{found}` ({_TELLTALE[found]})"
        for name in names:
            pending += [(callee, owner) for callee in (getattr(owner, name, None), plain.__globals__.get(name))]
    return None


def _plain_function(function: Any) -> FunctionType | None:
    while isinstance(function, MethodType) or hasattr(function, "__wrapped__"):
        function = function.__func__ if isinstance(function, MethodType) else function.__wrapped__
    return function if isinstance(function, FunctionType) else None


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
