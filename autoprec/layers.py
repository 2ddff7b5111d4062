"""Runs units in formats: swaps a layer's class for one whose forward sets the precision of the call.

A steered class is a subclass of the layer's own class with the same name, so ``isinstance``, hooks, parameters, keys
and ``repr`` stay as they are; copies and pickles come out as the plain class. Outside training steps, after
``detach`` and in regions where the user switched autocast off, the layer's own forward runs untouched.

How a call gets its precision: while a fit is steered, autocast is on, and a unit switches its target to the unit's
dtype before it runs. Torch then casts inputs and weights itself, exactly as plain autocast would. The target stays
after the call, so operations between units (attention scores, residual additions, losses) run in the precision of the
unit before them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.parameter import is_lazy

from autoprec.lookalike import lookalike, undo_lookalike
from autoprec.runners import Runner, make_runner
from autoprec.units import Unit, kind_of

# formats whose range is short enough to watch the output in every step
_WATCHED = ("fp16", "fp8", "int8")


class Record(NamedTuple):
    """Range of one tensor: unit name, whether it went in or came out, ``[2]`` (minimum, maximum), multiplications."""

    name: str
    is_input: bool
    bounds: Tensor
    compute: float


class Runtime:
    """State that all steered layers of one fit share.

    Args:
        device_type: Type of the device the model runs on.
        clamp_output: Limit on the magnitude of what low-precision units return, ``None`` for none.

    Attributes:
        is_active: Inside a training step or its backward; elsewhere layers run untouched.
        is_recording: Inside the forward of a training step; recomputations are not recorded.
        records_all: Record the output range of every unit, not only of those that can overflow.
        records_inputs: Also record what goes into a unit, to tell it from the operations before it.
        records: What units took and returned, in order of execution.
        untouched: Units that ran as they are because the user switched autocast off around them.
        on_output: Called with unit name and output of each recorded unit, ``None`` for nothing.
    """

    def __init__(self, device_type: str, clamp_output: float | None = None) -> None:
        self.device_type = device_type
        self.clamp_output = clamp_output
        self.is_active = False
        self.is_recording = False
        self.records_all = False
        self.records_inputs = False
        self.records: list[Record] = []
        self.untouched: set[str] = set()
        self.on_output: Callable[[str, Tensor], None] | None = None

    def record(self, state: ModuleState, is_input: bool, value: Any) -> None:
        """Notes the range of the first tensor in ``value``; no synchronisation with the device."""
        tensor = _first_tensor(value)
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            bounds = torch.stack([bound.float() for bound in torch.aminmax(tensor.detach())])
            self.records.append(Record(state.name, is_input, bounds, tensor.numel() * state.fan_in))


class ModuleState:
    """What a steered module carries: its unit's name, the shared runtime and how it runs now."""

    __slots__ = ("fan_in", "is_watched", "name", "run", "runtime")

    def __init__(self, name: str, runtime: Runtime, fan_in: float) -> None:
        self.name = name
        self.fan_in = fan_in
        self.runtime = runtime
        self.run: Runner | None = None
        self.is_watched = False


def attach(units: Sequence[Unit], runtime: Runtime) -> dict[str, str]:
    """Swaps the classes of all steered units' modules; they run untouched until :func:`set_format`.

    Args:
        units: From :func:`autoprec.units.find_units`.
        runtime: Shared state.

    Returns:
        Units that could not be swapped, with the reason.
    """
    refused: dict[str, str] = {}
    for unit in units:
        if unit.reason is not None:
            continue
        if any("_autoprec" in module.__dict__ for module in unit.modules):
            refused[unit.name] = "another fit steers it"
            continue
        try:
            for module in unit.modules:
                module.__class__ = _steered_class(type(module))
                module.__dict__["_autoprec"] = ModuleState(unit.name, runtime, _fan_in(module))
        except TypeError as error:
            detach([unit])
            refused[unit.name] = f"its class cannot be extended ({error})"
    return refused


def detach(units: Sequence[Unit], runtime: Runtime | None = None) -> None:
    """Gives every module its own class back; may be called at any time, also twice.

    Args:
        units: Units to let go.
        runtime: Only let go of modules that were attached with it, ``None`` for all.
    """
    for unit in units:
        for module in unit.modules:
            state: ModuleState | None = module.__dict__.get("_autoprec")
            if state is None or runtime is None or state.runtime is runtime:
                module.__dict__.pop("_autoprec", None)
                undo_lookalike(module)


def set_format(unit: Unit, format_name: str | None) -> None:
    """Makes a unit run in a format from the next call on.

    Args:
        unit: An attached unit.
        format_name: A legal format, or ``None`` for the layer's own forward under whatever autocast is on.
    """
    for module in unit.modules:
        state: ModuleState = module.__dict__["_autoprec"]
        runtime = state.runtime
        state.is_watched = format_name in _WATCHED
        state.run = None
        if format_name is not None:
            is_emulated = unit.is_emulated(format_name)
            state.run = make_runner(module, format_name, is_emulated, runtime.device_type, runtime.clamp_output)


def _fan_in(module: nn.Module) -> float:
    """Multiplications per element that a layer returns."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and isinstance(module, _ConvTransposeNd):
        return weight.numel() / module.out_channels / math.prod(module.stride)
    if isinstance(weight, Tensor) and kind_of(module) in ("linear", "conv"):
        return weight.numel() / weight.shape[0]
    if kind_of(module) in ("embedding", "norm"):
        return 0.0
    width = getattr(module, "hidden_size", None) or getattr(module, "embed_dim", None)
    matrices = [p for p in module.parameters() if not is_lazy(p) and p.ndim > 1]
    return sum(p.numel() for p in matrices) / float(width or max((p.shape[0] for p in matrices), default=1))


# one class for all layers of a kind, as long as one is steered
_classes: WeakValueDictionary[type[nn.Module], type[nn.Module]] = WeakValueDictionary()


def _steered_class(cls: type[nn.Module]) -> type[nn.Module]:
    steered = _classes.get(cls)
    if steered is None:
        steered = lookalike(cls, "forward", _steered_forward)
        _classes[cls] = steered
    return steered


def _steered_forward(base_forward: Runner) -> Runner:
    @functools.wraps(base_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: ModuleState | None = self.__dict__.get("_autoprec")
        if state is None or state.run is None or not state.runtime.is_active:
            return base_forward(self, *args, **kwargs)
        if not torch.is_autocast_enabled(state.runtime.device_type):
            # the user protects this region with autocast(enabled=False)
            if state.runtime.is_recording and not torch.compiler.is_compiling():
                state.runtime.untouched.add(state.name)
            return base_forward(self, *args, **kwargs)
        return _call(state, self, args, kwargs)

    return forward


def _call(state: ModuleState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    runtime, run = state.runtime, state.run
    assert run is not None
    if torch.compiler.is_compiling() or not runtime.is_recording:
        return run(module, *args, **kwargs)
    if runtime.records_inputs:
        runtime.record(state, True, (args, kwargs))
    output = run(module, *args, **kwargs)
    if runtime.records_all or state.is_watched:
        runtime.record(state, False, output)
    if runtime.on_output is not None:
        tensor = _first_tensor(output)
        if tensor is not None:
            runtime.on_output(state.name, tensor)
    return output


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
