"""Runs units in formats: swaps a layer's class for one whose forward sets the precision of the call.

A steered class is a subclass of the layer's own class with the same name, so ``isinstance``, hooks, parameters, keys
and ``repr`` stay as they are; copies and pickles come out as the plain class. Classes are swapped for the time of a
step only, so that code between steps meets the layer's own. In regions where the user switched autocast off, the
layer's own forward runs untouched.

How a call gets its precision: while a fit is steered, autocast is on, and a unit switches its target to the unit's
dtype before it runs. Torch then casts inputs and weights itself, exactly as plain autocast would. The target stays
after the call, so operations between units (attention scores, residual additions, losses) run in the precision of the
unit before them.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from autoprec.attention import AttentionSignature
from autoprec.implementations import DEFAULT, candidates
from autoprec.layouts import Container
from autoprec.lookalike import lookalike, plain_class, registers_subclasses, undo_lookalike
from autoprec.onednn import is_watched
from autoprec.runners import Runner, is_functorch_active, make_base_runner, make_runner, note_implementation
from autoprec.units import Unit, kind_of

# formats whose range is short enough to watch the output in every step
_WATCHED = ("fp16", "fp8", "int8")
# what a record of the loss is called, which no module can be
_LOSS = "the loss"


class Record(NamedTuple):
    """Range of one tensor: unit name, whether it went in or came out, ``[2]`` (minimum, maximum), multiplications."""

    name: str
    is_input: bool
    bounds: Tensor
    compute: float


class Call(NamedTuple):
    """One call of a layer, as far as its cost depends on it.

    Attributes:
        name: Unit name.
        module: The layer.
        shape: That of its input.
        dtype: That of its input.
        needs_grad: Whether its input takes a gradient.
        is_channels_last: Whether its input lies channels last.
    """

    name: str
    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    is_channels_last: bool


class Runtime:
    """State that all steered layers of one fit share.

    Args:
        device_type: Type of the device the model runs on.
        clamp_output: Limit on the magnitude of what low-precision units return, ``None`` for none.

    Attributes:
        is_active: Inside a training step or its backward; elsewhere layers run untouched.
        is_recording: Inside the forward of a training step; recomputations are not recorded.
        runs_on_copies: Whether layers run on kept copies of their weights in this step.
        records_all: Record the output range of every unit, not only of those that can overflow.
        records_inputs: Also record what goes into a unit, to tell it from the operations before it.
        records: What units took and returned, in order of execution; each loss counts as taken.
        calls: Calls of layers in a window in which they are looked at, in order of execution; ``None`` elsewhere.
        untouched: Units that ran as they are because the user switched autocast off around them.
        attention: Implementation of calls of ``scaled_dot_product_attention`` that do not run as torch runs them.
        attention_seen: How often each kind of call came, while somebody wants to know.
        attention_ran: Kinds of calls that something else than torch's own ran.
        wants_attention: Whether calls are noted.
        had_autocast: Whether autocast was on when the latest training step began that looked at calls.
        containers: Sequentials with chains of convolutions that may run in ``channels_last``.
        thread: The thread that trains.
        on_output: Called with unit name and output of each recorded unit, ``None`` for nothing.
        entry: Returns the region for a call that comes from outside of any, ``None`` inside of one; in a fit there is
            nothing to ask, the steps are the regions.
    """

    def __init__(self, device_type: str, clamp_output: float | None = None) -> None:
        self.device_type = device_type
        self.clamp_output = clamp_output
        self.thread = threading.get_ident()
        self.is_active = False
        self.is_recording = False
        self.runs_on_copies = False
        self.records_all = False
        self.records_inputs = False
        self.records: list[Record] = []
        self.calls: list[Call] | None = None
        self.untouched: set[str] = set()
        self.attention: dict[AttentionSignature, str] = {}
        self.attention_seen: dict[AttentionSignature, int] = {}
        self.attention_ran: set[AttentionSignature] = set()
        self.wants_attention = False
        self.had_autocast = False
        self.containers: Sequence[Container] = ()
        self.on_output: Callable[[str, Tensor], None] | None = None
        self.entry: Callable[[ModuleState], AbstractContextManager[Any] | None] | None = None

    def is_other_thread(self) -> bool:
        """Whether the caller is not the thread that trains; evaluation in the background has its own autocast state."""
        return threading.get_ident() != self.thread

    def record(self, state: ModuleState, is_input: bool, value: Any) -> None:
        """Notes the range of the first tensor in ``value``; no synchronisation with the device."""
        tensor = first_tensor(value)
        if tensor is not None and is_measurable(tensor):
            bounds = torch.stack([bound.float() for bound in torch.aminmax(tensor.detach())])
            self.records.append(Record(state.name, is_input, bounds, tensor.numel() * state.fan_in))

    def note_call(self, state: ModuleState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes what a layer is called with, for its cost; reads nothing from the device."""
        x = first_tensor((args, kwargs))
        if self.calls is None or x is None or not self.is_recording or self.is_other_thread():
            return
        if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_nested:
            is_last = x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
            self.calls.append(Call(state.name, state.module, tuple(x.shape), x.dtype, x.requires_grad, is_last))

    def record_loss(self, loss: Tensor) -> None:
        """Notes where in the order of execution a backward began; nothing while no unit is recorded.

        Args:
            loss: Unscaled, ``[]``.
        """
        if self.records:
            self.records.append(Record(_LOSS, True, loss.expand(2), 0.0))


class ModuleState:
    """What a steered module carries during a step: its unit, the shared runtime and how it runs now.

    Args:
        module: The layer.
        unit: Its unit.
        runtime: Shared state.

    Attributes:
        run: How the layer runs in its format, ``None`` for its own forward.
        override: Runs instead of that, for as long as it is there.
    """

    __slots__ = (
        "fan_in",
        "format_name",
        "implementation",
        "is_watched",
        "module",
        "name",
        "override",
        "plain",
        "run",
        "runtime",
        "steered",
        "unit",
        "_for_validation",
    )

    def __init__(self, module: nn.Module, unit: Unit, runtime: Runtime) -> None:
        self.module, self.unit, self.runtime = module, unit, runtime
        self.name = unit.name
        self.fan_in = _fan_in(module)
        self.override: Runner | None = None
        self._for_validation: dict[bool, Runner] = {}
        self.set_format(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Copies of modules carry none; torch's parametrized classes copy all that is in a module by themselves."""

    def set_format(self, format_name: str | None, implementation: str = DEFAULT) -> None:
        """Chooses how the layer runs, for the class it has now.

        Args:
            format_name: A legal format, ``None`` for the layer's own forward.
            implementation: One of :func:`autoprec.implementations.candidates`. ``"channels_last"`` acts in chains
                only, where the Sequential around the layer converts (``layouts``).
        """
        self.format_name = format_name
        self.implementation = implementation
        self.is_watched = format_name in _WATCHED
        self.plain = plain_class(self.module)
        self.steered = _steered_class(self.plain)
        self.run: Runner | None = None
        if format_name is not None:
            runtime, is_emulated = self.runtime, self.unit.is_emulated(format_name)
            offered = candidates(kind_of(self.module), format_name, runtime.device_type)  # a tied unit mixes kinds
            local = implementation if implementation in offered and implementation != "channels_last" else DEFAULT
            self.run = make_runner(
                self.module, format_name, is_emulated, runtime.device_type, runtime.clamp_output, local
            )

    def base_runner(self, dtype: torch.dtype, is_raised: bool) -> Runner | None:
        """How the layer runs in validation: in fp32 if raised, else as under the Trainer's own autocast.

        Args:
            dtype: Target of that.
            is_raised: Whether the guard has raised it because it cannot run so.
        """
        if not is_raised and not self.unit.has_matrix:
            return None  # it follows what is before it
        runner = self._for_validation.get(is_raised)  # kept: the compiler makes code for each
        if runner is None:
            make = make_runner(self.module, "fp32", False, self.runtime.device_type) if is_raised else None
            runner = make or make_base_runner(self.module, dtype, self.runtime.device_type)
            self._for_validation[is_raised] = runner
        return runner

    def run_plain(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer in its format, whatever overrides that."""
        run: Runner = self.run or self.plain.forward  # type: ignore[attr-defined]
        return run(self.module, *args, **kwargs)

    def swap_in(self) -> ModuleState | None:
        """Gives the module its lookalike class and this state; returns the state of another fit that it carried."""
        module = self.module
        other: ModuleState | None = module.__dict__.get("_autoprec")
        if type(module) is not self.plain and plain_class(module) is not self.plain:
            self._for_validation.clear()
            self.set_format(self.format_name, self.implementation)  # a parametrization was added or removed since
        # past nn.Module's own, slow assignment
        object.__setattr__(module, "__class__", self.steered)
        module.__dict__["_autoprec"] = self
        return other

    def swap_out(self, other: ModuleState | None = None) -> None:
        """Undoes ``swap_in``."""
        if other is not None:
            self.module.__dict__["_autoprec"] = other
            return
        module = self.module
        module.__dict__.pop("_autoprec", None)
        if type(module) is self.steered:
            object.__setattr__(module, "__class__", self.plain)
        else:
            undo_lookalike(module)


def attach(units: Sequence[Unit], runtime: Runtime) -> dict[str, str]:
    """Prepares all steered units and swaps their modules' classes; they run untouched until :func:`set_format`.

    Args:
        units: From :func:`autoprec.units.find_units`. Each gets a state for every module.
        runtime: Shared state.

    Returns:
        Units that could not be swapped, with the reason.
    """
    refused: dict[str, str] = {}
    for unit in units:
        if unit.reason is not None:
            continue
        if any(registers_subclasses(type(module)) for module in unit.modules):
            refused[unit.name] = "its class runs code when it is extended (`__init_subclass__`)"
            continue
        try:
            unit.states[:] = [ModuleState(module, unit, runtime) for module in unit.modules]
            for state in unit.states:
                state.swap_in()
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            detach([unit])
            unit.states.clear()
            refused[unit.name] = f"its class cannot be extended ({error})"
    return refused


def detach(units: Sequence[Unit]) -> None:
    """Gives every module its own class back; may be called at any time, also twice."""
    for unit in units:
        for state in unit.states:
            if state.module.__dict__.get("_autoprec") is state:
                state.swap_out()


def prepare(units: Sequence[Unit], runtime: Runtime) -> None:
    """Prepares units for :func:`swapped`; those that cannot be are left alone from here on, with the reason.

    Args:
        units: From :func:`autoprec.units.find_units`; changed in place.
        runtime: Shared state.
    """
    refused = attach(units, runtime)
    detach(units)
    for unit in units:
        if unit.name in refused:
            unit.reason, unit.legal, unit.native = refused[unit.name], ("fp32",), ("fp32",)


@contextmanager
def swapped(units: Sequence[Unit]) -> Iterator[None]:
    """Swaps the classes of prepared units for the time of a step, so that hooks between steps meet the plain ones.

    Args:
        units: Units that were prepared.
    """
    states: list[ModuleState] = [state for unit in units for state in unit.states]
    others = [state.swap_in() for state in states]
    try:
        yield
    finally:
        for state, other in zip(states, others, strict=True):
            if other is not state:  # else an outer region of the same fit ends later
                state.swap_out(other)


def set_format(unit: Unit, format_name: str | None, implementation: str = DEFAULT) -> None:
    """Makes a unit run in a format from the next call on.

    Args:
        unit: A prepared unit.
        format_name: A legal format, or ``None`` for the layer's own forward under whatever autocast is on.
        implementation: One of :func:`autoprec.implementations.candidates`.
    """
    for state in unit.states:
        state.set_format(format_name, implementation)


def runs_channels_last(module: nn.Module) -> bool:
    """Whether a convolution that is called now runs in ``channels_last``, if it is part of a chain."""
    state: ModuleState | None = module.__dict__.get("_autoprec")
    if state is None or state.implementation != "channels_last" or not state.runtime.is_active:
        return False
    if not torch.is_autocast_enabled(state.runtime.device_type) or is_functorch_active() or is_watched():
        return False
    return not (state.runtime.is_recording and state.runtime.is_other_thread())


def note_channels_last(module: nn.Module) -> None:
    """Counts a call of a convolution that ran in ``channels_last``."""
    note_implementation(module, "channels_last")


@contextmanager
def run_in_base(units: Sequence[Unit], dtype: torch.dtype, raised: Collection[str]) -> Iterator[None]:
    """Has units run in the Trainer's own precision for the time of a region, but for some.

    Args:
        units: Units that were prepared.
        dtype: Target of the Trainer's own autocast.
        raised: Names of units that run in fp32 instead.
    """
    states = [(state, state.run, state.override) for unit in units for state in unit.states]
    for state, _, _ in states:
        state.run, state.override = state.base_runner(dtype, state.name in raised), None
    try:
        yield
    finally:
        for state, run, override in states:
            state.run, state.override = run, override


def _fan_in(module: nn.Module) -> float:
    """Multiplications per element returned; reads sizes, since reading a parametrized weight computes it."""
    if isinstance(module, _ConvNd):
        per_output = module.in_channels * math.prod(module.kernel_size) / module.groups
        return per_output / math.prod(module.stride) if isinstance(module, _ConvTransposeNd) else per_output
    if isinstance(module, nn.Linear):
        return float(module.in_features)
    if kind_of(module) in ("embedding", "norm"):
        return 0.0
    matrices = [p for p in module.parameters() if not is_lazy(p) and p.ndim > 1]
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        width = module.hidden_size
    elif isinstance(module, nn.MultiheadAttention):
        width = module.embed_dim
    else:
        width = max((p.shape[0] for p in matrices), default=1)
    return sum(p.numel() for p in matrices) / float(max(width, 1))


# one class for all layers of a kind, as long as one is steered, so that compiled code stays valid
_classes: WeakValueDictionary[type, type] = WeakValueDictionary()


def _steered_class(cls: type) -> type:
    steered = _classes.get(cls)
    if steered is None:
        steered = lookalike(cls, "forward", _steered_forward)
        _classes[cls] = steered
    return steered


def _steered_forward(base_forward: Runner) -> Runner:
    @functools.wraps(base_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: ModuleState | None = self.__dict__.get("_autoprec")
        if state is None or not state.runtime.is_active:
            return base_forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and state.runtime.calls is not None:
            state.runtime.note_call(state, args, kwargs)
        if state.run is None and state.override is None:
            return base_forward(self, *args, **kwargs)
        if state.runtime.is_recording and not torch.compiler.is_compiling() and state.runtime.is_other_thread():
            return base_forward(self, *args, **kwargs)
        if not torch.is_autocast_enabled(state.runtime.device_type):
            region = None if state.runtime.entry is None else state.runtime.entry(state)
            if region is not None:
                with region:
                    return _call(state, self, args, kwargs)
            # the user protects this region with autocast(enabled=False)
            if state.run is not None and state.runtime.is_recording and not torch.compiler.is_compiling():
                state.runtime.untouched.add(state.name)
                state.unit.has_run = True
            return base_forward(self, *args, **kwargs)
        return _call(state, self, args, kwargs)

    return forward


def _call(state: ModuleState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling():
        return state.run_plain(*args, **kwargs)
    state.unit.has_run = True
    if is_functorch_active():
        return state.run_plain(*args, **kwargs)
    runtime = state.runtime
    run = state.override or state.run or state.plain.forward  # type: ignore[attr-defined]
    if not runtime.is_recording:
        return run(module, *args, **kwargs)
    if runtime.records_inputs:
        runtime.record(state, True, (args, kwargs))
    output = run(module, *args, **kwargs)
    if runtime.records_all or state.is_watched:
        runtime.record(state, False, output)
    if runtime.on_output is not None:
        tensor = first_tensor(output)
        if tensor is not None:
            runtime.on_output(state.name, tensor)
    return output


def is_measurable(tensor: Tensor) -> bool:
    """Whether a tensor has floats to look at: not nested, sparse, quantised, or of another library's class."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.is_floating_point() and tensor.numel() > 0


def first_tensor(value: Any) -> Tensor | None:
    """Returns the first tensor in a nest of mappings, tuples and lists, ``None`` if there is none."""
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for item in items if (found := first_tensor(item)) is not None), None)
