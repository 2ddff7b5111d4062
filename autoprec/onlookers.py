"""Finds out whether user code may look at gradients, or write weights, where a step would like to be private.

Gradients may stay in low precision, scaled and unclipped, and copies of weights may be kept over steps, only where
nobody can tell. What lives here: which hooks and names matter. What does not: how code is read (``code_reading``), and
what follows from it (``fast_path``, ``stepping``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn
from torch.optim import optimizer as torch_optimizer

from autoprec.code_reading import Reading, is_known, is_known_function, unwrapped

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
# the gradients of a step are still there in these
_COMES_LATER = (
    *_RUNS_BETWEEN,
    "on_train_end",
    "on_fit_end",
    "on_exception",
    "on_save_checkpoint",
    "state_dict",
    "on_validation_start",
    "on_validation_model_eval",
    "on_validation_model_zero_grad",
)
_WRITES_GRADIENTS = ("on_before_optimizer_step",)
_MATTERS = {*_SEES_GRADIENTS, *_COMES_LATER, "training_step", "forward"}
# names through which code reads gradients, or writes weights without a trace
_READS = {
    **dict.fromkeys(("grad", "grad_norm", "get_total_norm", "clip_grad_norm_", "clip_grad_value_"), "gradients"),
    **dict.fromkeys(("next_functions", "get_gradient_edge"), "the graph, where hooks see gradients"),
}
_WRITES = dict.fromkeys(("data", "set_"), "weights past autograd")


class Onlookers:
    """Who takes part in the steps of a fit, asked anew where callbacks or hooks have come or gone.

    Args:
        root: The module.
        trainer: Its Trainer.
        machinery: What else takes part in a step: strategy and precision plugin.

    Attributes:
        name: Who may see gradients or write weights in the middle of a step, ``None`` if nobody does.
        run_between: Whether user code runs between a step and the next forward.
        write_gradients: Whether user code may write gradients just before clipping, where a write through ``.data`` or
            numpy leaves no trace in a tensor's version.
    """

    def __init__(self, root: pl.LightningModule, trainer: Any, machinery: Sequence[object]) -> None:
        self.name: str | None = ""  # of nobody: the first answer is another one
        self.run_between = self.write_gradients = True
        self._root = root
        self._trainer = trainer
        self._machinery = machinery
        self._epoch = -1
        self._callbacks: list[pl.Callback] = []
        self._known: list[object] = []

    def have_changed(self) -> bool:
        """Asks again if that may be due; called at the start of each step, and true at the first.

        A changed list of callbacks is noticed at once, a hook that was assigned on an instance in the next epoch.

        Returns:
            Whether the answer is another one than before.
        """
        trainer, callbacks = self._trainer, self._trainer.callbacks
        if callbacks == self._callbacks and trainer.current_epoch == self._epoch:
            return False
        self._epoch, self._callbacks = trainer.current_epoch, list(callbacks)
        owners = [self._root, *callbacks]
        # kept as they are: an address may be used again
        known = owners + [value for owner in owners for name, value in vars(owner).items() if name in _MATTERS]
        if list(map(id, known)) == list(map(id, self._known)):
            return False
        self._known, before = known, (self.name, self.run_between)
        self.name = onlooker(self._root, callbacks, self._machinery)
        self.run_between = runs_between_steps(self._root, callbacks)
        self.write_gradients = any(
            True for owner, plain in _owners(self._root, callbacks) for _ in _overrides(owner, plain, _WRITES_GRADIENTS)
        )
        return (self.name, self.run_between) != before


def onlooker(root: pl.LightningModule, callbacks: Sequence[pl.Callback], machinery: Sequence[object]) -> str | None:
    """Returns who may see gradients or write weights in the middle of a step, ``None`` if nobody does.

    Args:
        root: The module.
        callbacks: The Trainer's callbacks.
        machinery: What else takes part in a step: strategy and precision plugin.
    """
    for owner, plain in _owners(root, callbacks):
        hook = next(_overrides(owner, plain, _SEES_GRADIENTS), None)
        if hook is not None:
            return f"`{type(owner).__qualname__}.{hook}`"
    foreign = next((part for part in machinery if not is_known(type(part).__module__) or _is_shared(part)), None)
    if foreign is not None:
        return f"`{type(foreign).__qualname__}`"
    later = [getattr(o, name) for o, plain in _owners(root, callbacks) for name in _overrides(o, plain, _COMES_LATER)]
    reading = Reading([*root.modules(), *callbacks])
    return reading.telltale(_steps(root), {**_READS, **_WRITES}) or reading.telltale(later, _READS)


def runs_between_steps(root: pl.LightningModule, callbacks: Sequence[pl.Callback]) -> bool:
    """Whether user code runs between a step and the next forward, where it might write weights.

    Args:
        root: The module.
        callbacks: The Trainer's callbacks.
    """
    return any(True for owner, plain in _owners(root, callbacks) for _ in _overrides(owner, plain, _RUNS_BETWEEN))


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of an optimizer, or of all optimizers, may look at gradients before or after its step."""
    own = bool(optimizer._optimizer_step_pre_hooks) or bool(optimizer._optimizer_step_post_hooks)
    before = tuple(torch_optimizer._global_optimizer_pre_hooks)  # one of them is the plugin's guard
    return own or bool(torch_optimizer._global_optimizer_post_hooks) or _are_foreign(before)


@functools.lru_cache(maxsize=16)
def _are_foreign(handles: tuple[int, ...]) -> bool:
    # handles are numbered once and for all, so that an answer stays right
    return any(_is_foreign(torch_optimizer._global_optimizer_pre_hooks[handle]) for handle in handles)


def _is_shared(part: object) -> bool:
    """Whether other processes take part: reducers wait for each gradient, by hooks that Python does not see."""
    return isinstance(part, ParallelStrategy) or getattr(part, "world_size", 1) > 1


def _owners(root: pl.LightningModule, callbacks: Sequence[pl.Callback]) -> list[tuple[Any, type]]:
    return [(root, pl.LightningModule), *((callback, pl.Callback) for callback in callbacks)]


def _overrides(owner: Any, plain: type, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        found, original = getattr(owner, name, None), getattr(plain, name, None)
        if found is None or getattr(found, "__func__", found) is original:
            continue
        if _is_foreign(found):
            yield name


def _is_foreign(hook: Any) -> bool:
    layers = list(unwrapped(hook))
    return not layers or not all(map(is_known_function, layers))


def _steps(root: nn.Module) -> Iterator[Any]:
    """What runs in a training step: the step, and forwards and hooks of all modules."""
    yield getattr(root, "training_step", None)
    for module in root.modules():
        yield getattr(module, "forward", None)
        forward, backward = module._forward_hooks, module._backward_hooks
        for hooks in (module._forward_pre_hooks, forward, module._backward_pre_hooks, backward):
            yield from hooks.values()
