"""Runs layers on kept low-precision copies of their weights, whose gradients go straight to the kernel of the step.

What autocast does in every forward and backward (cast each weight down, cast each gradient up) is left to the kernel
that updates the weights and passes over them anyway. The results are the same bit for bit. What lives here: which
layers take part, and when a copy can be trusted. What does not: whether anybody may look (``onlookers``), the step
itself (``stepping``, ``fused``).

A copy is trusted while nothing else can have written its weight: its version and address are those after the last step,
no evaluation came between, and a sample of its entries still agrees.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from autoprec.fused import FusedStep, is_one_block
from autoprec.gradient_table import GradientTable, is_observed, uses_of
from autoprec.knobs import Knobs, steered_units
from autoprec.layers import ModuleState
from autoprec.ops import new_copy, prepare_sgd
from autoprec.runners import run_on_copies
from autoprec.units import is_exact

_FORMATS = ("bf16", "fp16")
# entries of each weight that are compared with its copy in every step
_SAMPLES = 4
_STALE = (
    "autoprec: `{name}` was written without a trace (through `.data` or from outside of PyTorch) while a low-precision"
    " copy of it was kept. The copies were written anew in time, and from here on none is kept, as with"
    " `AutoPrecisionConfig(fused_step=False)`."
)


class FastPath:
    """Low-precision copies of weights for one fit.

    Args:
        root: The model.
        knobs: Knobs of the fit.
        fused: The step of the optimizer that owns the weights.
        refreshes_always: Write all copies before each step, because user code runs between steps.

    Attributes:
        table: Gradients that wait for the step.
        layers: Layers that run on copies.
    """

    def __init__(self, root: nn.Module, knobs: Knobs, fused: FusedStep, refreshes_always: bool) -> None:
        self.table = GradientTable()
        self.layers: list[_Layer] = []
        self._root = root
        self._knobs = knobs
        self._fused = fused
        self._refreshes_always = refreshes_always
        self._samples = -1 if os.environ.get("AUTOPREC_CHECK", "0") not in ("", "0") else _SAMPLES
        self._has_found_stale = False
        self._candidates: list[_Layer] = []
        self._uses: Counter[int] | None = None
        self._copies: _Copies | None = None
        self._made_for = -1
        self._is_handed_out = False

    def hand_out(self) -> bool:
        """Called before the forward of a training step: gives layers the copies they run on.

        Returns:
            Whether the classes of layers must be swapped for this step.
        """
        if self._is_handed_out:
            self.take_back()
        self.table.clear()
        if self._has_found_stale or not self._fused.taken:
            return False
        if self._made_for != self._knobs.changes or (self._candidates and self._uses is None):
            self._begin_to_count()
            return bool(self._candidates)
        if self._candidates:
            self._choose([layer for layer in self._candidates if self._is_lone(layer)])
        elif self._copies is not None and not self._copies.fit:
            self._choose(self.layers)
        if self._copies is None or not self._are_current(self._copies):
            return False
        handed = iter(self.table.hand_out(*self._copies.pairs))
        for layer in self.layers:
            layer.take(handed)
        self._is_handed_out = True
        return True

    def look_at_graph(self, loss: Tensor) -> None:
        """Called before the backward: finds out which gradients do not come from one call of one layer alone."""
        if self._candidates:
            self._uses = uses_of(loss)
        for layer in self.layers:
            if layer.calls > 1:
                self.table.shared.update(map(id, layer.parameters))

    def take_back(self) -> None:
        """Called after the backward: lets go of the graph, and of copies that a graph which is kept still needs."""
        self._is_handed_out = False
        for layer in self.layers:
            layer.weight_copy = layer.bias_copy = None
        if self._copies is not None and self._copies.are_in_use:
            self._choose(self.layers)

    def distrust(self) -> None:
        """Called where other code may have written weights: the copies are written anew before the next step."""
        self.take_back()
        if self._copies is not None:
            self._copies.is_trusted = False

    def note_step(self) -> None:
        """Called after a step that the kernels took: they have written the copies of what they updated."""
        if self._copies is not None:
            self._copies.note_written(self._fused.updated)

    def release(self) -> None:
        """Lets go of everything."""
        self._drop()
        self.table.clear()

    def _drop(self) -> None:
        for layer in [*self.layers, *self._candidates]:
            layer.state.override = None
        self.layers, self._candidates, self._copies = [], [], None
        self._fused.copies = {}

    # ---- which layers ----

    def _begin_to_count(self) -> None:
        """Lets one window pass in which it is counted how often each layer runs."""
        self._drop()
        self._uses = None
        self._made_for = self._knobs.changes
        owners = Counter(id(p) for module in self._root.modules() for p in module._parameters.values() if p is not None)
        owned = {id(p) for p in self._fused.parameters()}
        for unit in steered_units(self._knobs):
            name = self._knobs.formats[unit.name]
            if name not in _FORMATS or unit.is_emulated(name):
                continue
            self._candidates += [
                layer
                for state in unit.states
                if _runs_on_copies(state.module) and (layer := _Layer(state, name)).is_intact
                if all(id(p) in owned and owners[id(p)] == 1 for p in layer.parameters)
            ]
        for layer in self._candidates:
            layer.state.override = layer.count

    def _is_lone(self, layer: _Layer) -> bool:
        """Whether a layer runs once in a step, and at most one gradient joins that of each of its parameters.

        Gradients of several calls would be added up in low precision, where autocast adds them in float32, and three in
        another order than autograd's.
        """
        assert self._uses is not None
        return layer.calls == 1 and all(self._uses[id(parameter)] < 3 for parameter in layer.parameters)

    def _choose(self, layers: Sequence[_Layer]) -> None:
        self._drop()
        self.layers = [layer for layer in layers if layer.is_intact and all(is_one_block(p) for p in layer.parameters)]
        for layer in self.layers:
            layer.state.override = layer.run
        if self.layers:
            self._copies = _Copies(self.layers)
            self._fused.copies = dict(zip(self._copies.keys, self._copies.copies, strict=True))

    # ---- whether copies are what their weights are ----

    def _are_current(self, copies: _Copies) -> bool:
        if self._refreshes_always or not copies.are_unwritten:
            copies.refresh()
            return True
        stale = copies.first_stale(self._samples)
        if stale is None:
            return True
        self._has_found_stale = True
        self._drop()
        name = next((name for name, parameter in self._root.named_parameters() if parameter is stale), "a parameter")
        rank_zero_warn(_STALE.format(name=name))
        return False


class _Copies:
    """The copies of the weights of some layers, and what the weights looked like when they were written."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = layers
        pairs = [(parameter, layer.format_name) for layer in layers for parameter in layer.parameters]
        self.parameters = [parameter for parameter, _ in pairs]
        self.copies = [new_copy(parameter, name) for parameter, name in pairs]
        self.keys = list(map(id, self.parameters))
        self.pairs = self.parameters, [copy.values for copy in self.copies]
        self.is_trusted = False
        self._index = {key: index for index, key in enumerate(self.keys)}
        self._addresses = list(map(Tensor.data_ptr, self.parameters))
        self._storages = [copy.values.untyped_storage() for copy in self.copies]
        self._owners = self._count_owners()
        self._keeper = prepare_sgd([parameter.detach() for parameter in self.parameters], None, self.copies)
        self._versions = [-1] * len(self.parameters)
        self._checks = 0

    @property
    def fit(self) -> bool:
        """Whether the layers still have these parameters, and their ``.data`` was not replaced by other memory.

        A tensor that was assigned to ``.data`` may lie otherwise in memory.
        """
        is_same = self._addresses == list(map(Tensor.data_ptr, self.parameters))
        return is_same and all(layer.has_parameters for layer in self._layers) and all(map(_is_free, self.parameters))

    @property
    def are_in_use(self) -> bool:
        """Whether somebody keeps a tensor that shares the memory of a copy, which the next step would write."""
        return self._owners != self._count_owners()

    def _count_owners(self) -> list[int]:
        return [torch._C._storage_Use_Count(storage._cdata) for storage in self._storages]

    @property
    def are_unwritten(self) -> bool:
        return self.is_trusted and self._versions == self._read()

    def _read(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def refresh(self) -> None:
        self._keeper.refresh()
        self._versions, self.is_trusted = self._read(), True

    def first_stale(self, samples: int) -> Tensor | None:
        self._checks += 1
        index = self._keeper.stale(samples, self._checks)
        return None if index is None else self.parameters[index]

    def note_written(self, keys: Sequence[int]) -> None:
        for key in keys:
            index = self._index.get(key)
            if index is not None:
                self._versions[index] = self.parameters[index]._version


class _Layer:
    """One layer that may run on copies.

    Attributes:
        calls: How often it ran in the current step; recomputations do not count.
        weight_copy: The weight for the current step, ``None`` while there is none.
        bias_copy: Its bias.
    """

    def __init__(self, state: ModuleState, format_name: str) -> None:
        self.state = state
        self.format_name = format_name
        self.weight: nn.Parameter = state.module._parameters["weight"]  # type: ignore[assignment]
        self.bias = state.module._parameters.get("bias")
        self.parameters = [self.weight] if self.bias is None else [self.weight, self.bias]
        self.weight_copy: Tensor | None = None
        self.bias_copy: Tensor | None = None
        self.calls = 0
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

    def take(self, handed: Iterator[Tensor]) -> None:
        """Gets the copies for a step, in the order of ``parameters``."""
        self.calls = 0
        self.weight_copy = next(handed)
        self.bias_copy = None if self.bias is None else next(handed)
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
        weight, state = self.weight_copy, self.state
        self.calls += state.runtime.is_recording
        if weight is None or self.calls > 1 or len(args) != 1 or kwargs or not self._is_as_handed_out():
            return state.run_plain(*args, **kwargs)
        return run_on_copies(module, args[0], weight, self.bias_copy, state.runtime.device_type)

    def _is_as_handed_out(self) -> bool:
        """Whether the training step has left format and parameters alone: not replaced, written or frozen them."""
        # another runner: a failed attempt has raised the layer
        return self.state.run is self._runner and self.has_parameters and self._marks == self._read()


def _is_free(parameter: Tensor) -> bool:
    """Whether a parameter wants a gradient that nobody else waits for."""
    return parameter.requires_grad and parameter.dtype is torch.float32 and not is_observed(parameter)


def _runs_on_copies(module: nn.Module) -> bool:
    is_kind = isinstance(module, (nn.Linear, _ConvNd)) and not isinstance(module, _ConvTransposeNd)
    return is_kind and is_exact(module) and isinstance(module._parameters.get("weight"), nn.Parameter)
