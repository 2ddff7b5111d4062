"""Layers that run on kept low-precision copies of their weights, and the copies.

A copy is trusted while nothing else can have written its weight: its version and address are those after the last step,
no evaluation came between, and a sample of its entries still agrees. What lives here: one layer's run, and the copies
of a list of layers. What does not: which layers these are, and when (``fast_path``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from autoprec.fused import is_one_block, layouts_of
from autoprec.gradient_table import is_observed
from autoprec.layers import ModuleState
from autoprec.ops import WeightCopy, new_copy, prepare_sgd
from autoprec.runners import is_kernel_input, run_on_copies, run_on_int8_copy
from autoprec.units import is_exact

_KINDS: dict[str, tuple[type, ...]] = {
    "bf16": (nn.Linear, _ConvNd),
    "fp16": (nn.Linear, _ConvNd),
    "int8": (nn.Linear,),
}


class WeightCopies:
    """The copies of the weights of some layers, and what the weights looked like when they were written."""

    def __init__(self, layers: Sequence[CopiedLayer]) -> None:
        self._layers = layers
        for layer in layers:
            layer.copies = [new_copy(parameter, layer.format_name) for parameter in layer.parameters]
        self.parameters = [parameter for layer in layers for parameter in layer.parameters]
        self.copies = [copy for layer in layers for copy in layer.copies]
        self.keys = list(map(id, self.parameters))
        self.pairs = self.parameters, [_handed_out(copy) for copy in self.copies]
        self.is_trusted = False
        self._index = {key: index for index, key in enumerate(self.keys)}
        self._layouts = layouts_of(self.parameters)
        tensors = [tensor for copy in self.copies for tensor in copy.tensors if tensor is not None]
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        self._owners = self._count_owners()
        self._keeper = prepare_sgd([parameter.detach() for parameter in self.parameters], None, self.copies)
        self._versions = [-1] * len(self.parameters)
        self._checks = 0

    @property
    def fit(self) -> bool:
        """Whether the layers still have these parameters, where and as they lay in memory."""
        is_same = self._layouts == layouts_of(self.parameters)
        return is_same and all(layer.has_parameters for layer in self._layers) and all(map(_is_free, self.parameters))

    @property
    def are_in_use(self) -> bool:
        """Whether somebody keeps a tensor that shares the memory of a copy, which the next step would write."""
        return self._owners != self._count_owners()

    def _count_owners(self) -> list[int]:
        return [torch._C._storage_Use_Count(storage._cdata) for storage in self._storages]

    @property
    def are_unwritten(self) -> bool:
        """Whether no weight was written since its copy, as far as versions tell."""
        return self.is_trusted and self._versions == self._read()

    def _read(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def refresh(self) -> None:
        """Writes all copies anew."""
        self._keeper.refresh()
        self._versions, self.is_trusted = self._read(), True

    def first_stale(self, samples: int) -> Tensor | None:
        """Returns a parameter that differs from its copy in one of some entries, ``None`` if none does."""
        self._checks += 1
        index = self._keeper.stale(samples, self._checks)
        return None if index is None else self.parameters[index]

    def note_written(self, keys: Sequence[int]) -> None:
        """Notes that the copies of some parameters, given by ``id``, were written together with them."""
        for key in keys:
            index = self._index.get(key)
            if index is not None:
                self._versions[index] = self.parameters[index]._version


class CopiedLayer:
    """One layer that may run on copies.

    Args:
        state: The layer's state.
        format_name: Its format.

    Attributes:
        parameters: Those of which copies are kept. int8 layers add their bias in float32.
        copies: The copies, in their order.
        calls: How often it ran in the current step; recomputations do not count.
        weight_copy: What stands for the weight in the graph of the current step, ``None`` while nothing does. An int8
            layer computes with its copy and gets the gradient of this one.
        bias_copy: What stands for its bias.
    """

    def __init__(self, state: ModuleState, format_name: str) -> None:
        self.state = state
        self.format_name = format_name
        self.weight: nn.Parameter = state.module._parameters["weight"]  # type: ignore[assignment]
        self.bias = state.module._parameters.get("bias")
        is_int8 = format_name == "int8"
        self.parameters = [self.weight] if self.bias is None or is_int8 else [self.weight, self.bias]
        self.copies: Sequence[WeightCopy] = ()
        self.weight_copy: Tensor | None = None
        self.bias_copy: Tensor | None = None
        self.calls = 0
        self._run = self._run_int8 if is_int8 else self._run_low
        self._limit = None if format_name == "bf16" else state.runtime.clamp_output
        self._runner = state.run
        self._marks: list[Any] = []

    @property
    def has_parameters(self) -> bool:
        """Whether the layer still has its parameters."""
        table = self.state.module._parameters
        return table.get("weight") is self.weight and table.get("bias") is self.bias

    @property
    def is_intact(self) -> bool:
        """Whether the layer still has its parameters, and they want gradients that nobody else waits for."""
        return self.has_parameters and all(map(_is_free, self.parameters))

    @property
    def lies_well(self) -> bool:
        """Whether kernels can write copies of the parameters as they lie in memory."""
        if self.format_name == "int8":
            return self.weight.is_contiguous()
        return all(map(is_one_block, self.parameters))

    def take(self, handed: Iterator[Tensor]) -> None:
        """Gets the copies for a step, in the order of ``parameters``."""
        self.calls = 0
        self.weight_copy = next(handed)
        self.bias_copy = next(handed) if len(self.parameters) > 1 else None
        self._marks = self._read()

    def _read(self) -> list[Any]:
        marks: list[Any] = []
        for parameter in self.parameters:
            marks += parameter._version, parameter.data_ptr(), parameter.requires_grad
        return marks

    def count(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs as always and counts."""
        self.calls += self.state.runtime.is_recording
        return self.state.run_plain(*args, **kwargs)

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs on the copies, or as always where they do not apply."""
        self.calls += self.state.runtime.is_recording
        has_one_input = len(args) == 1 and not kwargs
        if self.weight_copy is None or self.calls > 1 or not has_one_input or not self._is_as_handed_out():
            return self.state.run_plain(*args, **kwargs)
        output = self._run(module, args[0], self.weight_copy)
        return output if self._limit is None else output.clamp(-self._limit, self._limit)

    def _run_low(self, module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        return run_on_copies(module, x, weight, self.bias_copy, self.state.runtime.device_type)

    def _run_int8(self, module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
        if not is_kernel_input(x, self.bias):
            return self.state.run_plain(x)  # type: ignore[no-any-return]
        return run_on_int8_copy(module, x, weight, _alias(self.copies[0]), self.state.runtime.device_type)

    def _is_as_handed_out(self) -> bool:
        """Whether the training step has left format and parameters alone: not replaced, written or frozen them."""
        # another runner: a failed attempt has raised the layer
        return self.state.run is self._runner and self.has_parameters and self._marks == self._read()


def _handed_out(copy: WeightCopy) -> Tensor:
    """What a layer gets in the place of its weight: the copy itself, or what gets the gradient of an int8 one."""
    if copy.format != "int8":
        return copy.values
    return torch.zeros((), dtype=torch.bfloat16, device=copy.values.device).expand(copy.values.shape)


def _alias(copy: WeightCopy) -> WeightCopy:
    """The same memory in other tensors: a graph that keeps them shows in how many own the memory."""
    values, *others = copy.tensors
    return WeightCopy(copy.format, values.detach(), *(None if each is None else each.detach() for each in others))


def _is_free(parameter: Tensor) -> bool:
    """Whether a parameter wants a gradient that nobody else waits for."""
    return parameter.requires_grad and parameter.dtype is torch.float32 and not is_observed(parameter)


def can_run_on_copies(module: nn.Module, format_name: str) -> bool:
    """Whether a layer in a format is of a kind that runs on copies.

    Args:
        module: The layer.
        format_name: A format that the device does not only emulate.
    """
    kinds = _KINDS.get(format_name, ())
    is_kind = isinstance(module, kinds) and not isinstance(module, _ConvTransposeNd)
    return is_kind and is_exact(module) and isinstance(module._parameters.get("weight"), nn.Parameter)
