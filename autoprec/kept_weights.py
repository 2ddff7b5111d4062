"""Low-precision copies of weights that are made once for many forwards, and made anew where a weight was written.

A copy is used while version, address and layout of its weight are those it was made from; at the start of each forward
a sample of entries is compared, since ``.data`` writes change no version. ``AUTOPREC_CHECK=1`` compares all entries.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from autoprec.fused import is_one_block, layouts_of
from autoprec.memory_errors import is_out_of_memory
from autoprec.ops import WeightCopy, new_copy, prepare_sgd
from autoprec.runners import is_functorch_active, is_kernel_input, run_on_copies, run_on_int8_copy
from autoprec.units import is_exact

_KINDS: dict[str, tuple[type, ...]] = {"bf16": (nn.Linear, _ConvNd), "fp16": (nn.Linear, _ConvNd), "int8": (nn.Linear,)}
_SAMPLES = 4


class Layer(Protocol):
    """A layer with a format; a state of ``layers`` is one."""

    module: nn.Module
    unit: Any
    runtime: Any
    format_name: str | None


class KeptWeights:
    """The copies of some layers; written when they are first needed.

    Args:
        layers: Layers in formats. Those that cannot run on copies are left out.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        samples = os.environ.get("AUTOPREC_CHECK", "0") in ("", "0")
        self._samples = _SAMPLES if samples else -1
        self._layers = {id(layer): layer for layer in layers if _can_run(layer)}
        self._copies: dict[int, _Copies] | None = None
        self._keeper: Any = None
        self._parameters: list[Tensor] = []
        self._marks: list[Any] = []
        self._checks = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Memory of the copies that are there now."""
        copies = [copy for each in (self._copies or {}).values() for copy in each.copies]
        return sum(tensor.nbytes for copy in copies for tensor in copy.tensors if tensor is not None)

    def forget(self) -> None:
        """Lets go of all copies."""
        with self._lock:
            self._copies = None

    def check(self) -> None:
        """Called before a forward: makes the copies if they are not there or not right."""
        if not self._layers or _are_parameters_stand_ins():
            return
        with self._lock:
            if self._copies is None or not self._are_right():
                try:
                    self._make()
                except (RuntimeError, MemoryError) as error:
                    self._copies, self._keeper = {}, None
                    if not is_out_of_memory(error, error.__context__):
                        raise
                    # layers cast their weights at each call instead

    def _are_right(self) -> bool:
        assert self._copies is not None, "it is looked up before"
        now = [parameter for layer in self._layers.values() for parameter in _parameters(layer)]
        is_same = len(now) == len(self._parameters) and all(map(_is, now, self._parameters))
        if not is_same or self._marks != _marks(now):
            return False
        self._checks += 1
        return self._keeper is None or self._keeper.stale(self._samples, self._checks) is None

    def _make(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            usable = [(key, layer) for key, layer in self._layers.items() if _lies_well(layer)]
            self._copies, self._keeper = None, None
            self._parameters = [parameter for layer in self._layers.values() for parameter in _parameters(layer)]
            self._marks = _marks(self._parameters)
            copies = {key: _Copies(layer) for key, layer in usable}
            pairs = [pair for each in copies.values() for pair in each.pairs]
            if pairs:
                plain = [parameter.detach() for parameter, _ in pairs]
                keeper = prepare_sgd(plain, None, [copy for _, copy in pairs])
                keeper.refresh()
                self._keeper = keeper
            self._copies = copies

    def run(self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a layer on its copies, ``None`` where it must run on its weights.

        Args:
            layer: One of the layers.
            args: Arguments of its forward.
            kwargs: The same.
        """
        copies = None if self._copies is None else self._copies.get(id(layer))
        if copies is None or len(args) != 1 or kwargs or is_tracing() or not copies.are_right:
            return None
        x = args[0]
        if not is_kernel_input(x) or (torch.is_grad_enabled() and copies.want_gradients(x)):
            return None
        return copies.run(x)


class _Copies:
    """The copies of one layer."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._parameters = _parameters(layer)
        self._versions = _versions(self._parameters)
        names = self._parameters[:1] if layer.format_name == "int8" else self._parameters
        self.copies = [new_copy(parameter, str(layer.format_name), transposed=False) for parameter in names]
        self.pairs = list(zip(names, self.copies, strict=True))

    @property
    def are_right(self) -> bool:
        """Whether the layer still has its parameters, unwritten since this forward began as far as versions tell."""
        now = _parameters(self._layer)
        is_same = len(now) == len(self._parameters) and all(map(_is, now, self._parameters))
        return is_same and self._versions == _versions(now)

    def want_gradients(self, x: Tensor) -> bool:
        """Whether a gradient is wanted that a copy would not pass on; int8 ones pass none on to the input either."""
        is_for_input = x.requires_grad and self._layer.format_name == "int8"
        return is_for_input or any(parameter.requires_grad for parameter in self._parameters)

    def run(self, x: Tensor) -> Tensor:
        module, device_type = self._layer.module, self._layer.runtime.device_type
        if self._layer.format_name == "int8":
            copy = self.copies[0]
            stand_in = torch.zeros((), dtype=torch.bfloat16, device=x.device).expand(copy.values.shape)
            return run_on_int8_copy(module, x, stand_in, copy, device_type)
        bias: WeightCopy | None = self.copies[1] if len(self.copies) > 1 else None
        return run_on_copies(module, x, self.copies[0].values, None if bias is None else bias.values, device_type)


def _can_run(layer: Layer) -> bool:
    format_name = layer.format_name or ""
    is_kind = isinstance(layer.module, _KINDS.get(format_name, ())) and not isinstance(layer.module, _ConvTransposeNd)
    return is_kind and is_exact(layer.module) and not layer.unit.is_emulated(format_name)


def _lies_well(layer: Layer) -> bool:
    parameters = _parameters(layer)
    if layer.module._parameters.get("weight") is None:  # parametrized or pruned since
        return False
    are_plain = all(type(each) is nn.Parameter and each.dtype is torch.float32 for each in parameters)
    if not are_plain or any(each.numel() and not each.data_ptr() for each in parameters):
        return False  # on the meta device, or memory was given back, as offloading does between forwards
    if layer.format_name == "int8":
        return parameters[0].is_contiguous()
    return all(map(is_one_block, parameters))


def _parameters(layer: Layer) -> list[Tensor]:
    table = layer.module._parameters
    return [value for value in (table.get("weight"), table.get("bias")) if value is not None]


def _marks(parameters: Sequence[Tensor]) -> list[Any]:
    # others, as quantised ones, have no memory of their own to look at; they get no copies
    return [*_versions(parameters), *layouts_of([each for each in parameters if type(each) is nn.Parameter])]


def is_tracing() -> bool:
    """Inside ``torch.jit.trace``, which would keep copies as constants."""
    return torch._C._get_tracing_state() is not None


def _are_parameters_stand_ins() -> bool:
    """Whether what layers hold now may be no tensors with memory: in the compiler, a trace or ``torch.func``."""
    return torch.compiler.is_compiling() or is_tracing() or is_functorch_active()


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    # a tensor that was made under inference mode counts none
    return [-1 if parameter.is_inference() else parameter._version for parameter in parameters]


def _is(left: object, right: object) -> bool:
    return left is right
