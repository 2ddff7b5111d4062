"""A module's outputs as plain tensors with names, and which of them are logits."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Any]

_INPUT_NAMES = ("input", "inputs", "x", "image", "images", "features", "data")
_TARGET_NAMES = ("labels", "label", "target", "targets", "y")
_NOT_OUTPUTS = ("loss", "past_key_values", "encoder_last_hidden_state")
_NOT_OUTPUTS_END = ("hidden_states", "attentions")  # of every layer, of encoder and decoder


class Output(NamedTuple):
    """One output of a module.

    Args:
        name: Its place in what the module returned, as in ``heads.0.logits``; ``output`` for a bare tensor.
        value: Floating-point, one row or more.
        class_dim: The dimension of the classes if these are logits, else ``None``.
    """

    name: str
    value: Tensor
    class_dim: int | None


def call(module: nn.Module, batch: Any, index: int = 0) -> Any:
    """Calls a module on a batch in the way that fits it.

    Args:
        module: A LightningModule with a ``predict_step`` of its own predicts. Of a mapping, the entries that
            ``forward`` names are passed by name; of a pair of inputs and targets, the inputs; anything else as it is.
        batch: A batch of a data loader, on the module's device.
        index: Index of the batch.
    """
    if isinstance(module, LightningModule) and type(module).predict_step is not LightningModule.predict_step:
        return module.predict_step(batch, index)
    if isinstance(batch, Mapping):
        return _call_by_name(module, batch)
    return module(batch[0] if _is_pair(batch) else batch)


def _call_by_name(module: nn.Module, batch: Mapping[str, Any]) -> Any:
    parameters = inspect.signature(module.forward).parameters
    named = {name: value for name, value in batch.items() if name in parameters}
    if named:
        return module(**named)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return module(**batch)
    inputs = [batch[name] for name in _INPUT_NAMES if name in batch]
    return module(inputs[0] if inputs else batch)


def flatten(outputs: Any, batch: Any) -> Iterator[Output]:
    """Yields the floating-point tensors of nested outputs; losses, caches, hidden states and scalars are no outputs.

    Args:
        outputs: A tensor, a mapping (a ``ModelOutput`` of transformers is one), a sequence or a dataclass of these.
        batch: What was passed in: integer targets of fitting shape and range tell that a tensor holds logits.
    """
    targets = list(_targets(batch))
    for name, value in _tensors(outputs, ""):
        if value.is_floating_point() and value.ndim and value.numel():
            yield Output(name or "output", value.detach(), _class_dim(name, value, targets))


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", range(len(value)))
        entries = list(zip(fields, value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    for key, entry in entries:
        if key not in _NOT_OUTPUTS and not str(key).endswith(_NOT_OUTPUTS_END):
            yield from _tensors(entry, f"{name}.{key}" if name else str(key))


def _targets(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Mapping):
        found = [batch[name] for name in _TARGET_NAMES if name in batch]
    else:
        found = list(batch[1:]) if _is_pair(batch) else []
    yield from (value for value in found if isinstance(value, Tensor) and not value.is_floating_point())


def _class_dim(name: str, value: Tensor, targets: list[Tensor]) -> int | None:
    if name.rpartition(".")[2].endswith("logits") and value.shape[-1] > 1:
        return value.ndim - 1
    for target in targets:
        for dim in (value.ndim - 1, 1):
            if 0 < dim < value.ndim and _are_classes(target, value, dim):
                return dim
    return None


def _are_classes(target: Tensor, value: Tensor, dim: int) -> bool:
    shape = [size for index, size in enumerate(value.shape) if index != dim]
    return list(target.shape) == shape and value.shape[dim] > 1 and int(target.max()) < value.shape[dim]


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (list, tuple)) and len(batch) > 1 and isinstance(batch[0], (Tensor, Mapping))


def rows_of(output: Output) -> Tensor:
    """Returns an output as float32 rows on the CPU: ``[rows, classes]`` for logits, else ``[samples, values]``.

    Args:
        output: One output.
    """
    value = output.value
    if output.class_dim is not None:
        value = value.movedim(output.class_dim, -1)
        return value.reshape(-1, value.shape[-1]).to("cpu", torch.float32)
    return value.reshape(value.shape[0], -1).to("cpu", torch.float32)
