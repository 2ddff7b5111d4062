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

import copy
import copyreg
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from autoprec.autocast import set_ambient
from autoprec.formats import FORMATS, get_format
from autoprec.ops import embedding as round_embedding
from autoprec.ops import fake_quantize
from autoprec.ops import linear as low_linear
from autoprec.ops.reference import Tf32Linear, round_fp8, round_int8
from autoprec.units import Unit, is_exact, kind_of

Runner = Callable[..., Any]
_LOW = (torch.bfloat16, torch.float16)


class Record(NamedTuple):
    """Range of one tensor: unit name, whether it went in or came out, ``[2]`` (minimum, maximum), element count."""

    name: str
    is_input: bool
    bounds: Tensor
    numel: int


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

    def record(self, name: str, is_input: bool, value: Any) -> None:
        """Notes the range of the first tensor in ``value``; no synchronisation with the device."""
        tensor = _first_tensor(value)
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            bounds = torch.stack(torch.aminmax(tensor.detach()))
            self.records.append(Record(name, is_input, bounds, tensor.numel()))


class ModuleState:
    """What a steered module carries: its unit's name, the shared runtime and how it runs now."""

    __slots__ = ("name", "run", "runtime")

    def __init__(self, name: str, runtime: Runtime) -> None:
        self.name = name
        self.runtime = runtime
        self.run: Runner | None = None


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
        try:
            for module in unit.modules:
                if "_autoprec" not in module.__dict__:
                    module.__class__ = _steered_class(type(module))
                module.__dict__["_autoprec"] = ModuleState(unit.name, runtime)
        except TypeError as error:
            detach([unit])
            refused[unit.name] = f"its class cannot be extended ({error})"
    return refused


def detach(units: Sequence[Unit]) -> None:
    """Gives every module its own class back; may be called at any time, also twice."""
    for unit in units:
        for module in unit.modules:
            module.__dict__.pop("_autoprec", None)
            base = type(module).__dict__.get("_autoprec_base")
            if base is not None:
                module.__class__ = base


def set_format(unit: Unit, format_name: str | None) -> None:
    """Makes a unit run in a format from the next call on.

    Args:
        unit: An attached unit.
        format_name: A legal format, or ``None`` for the layer's own forward under whatever autocast is on.
    """
    for module in unit.modules:
        state: ModuleState = module.__dict__["_autoprec"]
        state.run = None if format_name is None else _runner(module, unit, format_name)


_classes: WeakKeyDictionary[type, type] = WeakKeyDictionary()


def _steered_class(cls: type[nn.Module]) -> type[nn.Module]:
    if "_autoprec_base" in cls.__dict__:
        return cls
    if cls not in _classes:
        body = {
            "forward": _steered_forward(cls.forward),
            "__reduce_ex__": _reduce_as(cls),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "_autoprec_base": cls,
        }
        if hasattr(cls, "__deepcopy__"):  # others are copied through __reduce_ex__
            body["__deepcopy__"] = _deepcopy_as(cls)
        metaclass: Any = type(cls)
        _classes[cls] = metaclass(cls.__name__, (cls,), body)
    return _classes[cls]


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


def _reduce_as(cls: type[nn.Module]) -> Runner:
    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = _plain_twin(self, cls).__reduce_ex__(protocol)
        if reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            # the form that names no helper of ours and does not compare classes, so the pickle loads without autoprec
            reduced = (copyreg._reconstructor, (cls, object, None), *reduced[2:])  # type: ignore[attr-defined]
        return reduced

    return __reduce_ex__


def _deepcopy_as(cls: type[nn.Module]) -> Runner:
    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = copy.deepcopy(_plain_twin(self, cls), memo)
        return copied

    return __deepcopy__


def _plain_twin(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """The module as its own class and without our state, sharing everything else."""
    twin = object.__new__(cls)
    twin.__dict__.update({key: value for key, value in module.__dict__.items() if key != "_autoprec"})
    for name in copyreg._slotnames(cls):  # type: ignore[attr-defined]
        if hasattr(module, name):
            object.__setattr__(twin, name, getattr(module, name))
    return twin


def _call(state: ModuleState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    runtime, run = state.runtime, state.run
    assert run is not None
    if torch.compiler.is_compiling() or not runtime.is_recording:
        return run(module, *args, **kwargs)
    if runtime.records_inputs:
        runtime.record(state.name, True, (args, kwargs))
    output = run(module, *args, **kwargs)
    if runtime.records_all or getattr(run, "is_watched", False):
        runtime.record(state.name, False, output)
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


def _cast(value: Any, dtype: torch.dtype, sources: tuple[torch.dtype, ...] = (*_LOW, torch.float32)) -> Any:
    """Casts the float tensors in a nest; float64 and integers stay."""
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.dtype in sources else v, value)


# ---- runners: one small closure per module and format, built when the format changes ----


def _runner(module: nn.Module, unit: Unit, format_name: str) -> Runner:
    number_format = get_format(format_name)
    state: ModuleState = module.__dict__["_autoprec"]
    device_type, clamp = state.runtime.device_type, state.runtime.clamp_output
    cls = type(module).__dict__.get("_autoprec_base", type(module))
    kind = kind_of(module)  # a tied unit or a block mixes kinds
    if kind == "norm":
        run = _norm_runner(module, cls, number_format.compute_dtype)
    elif format_name in ("fp8", "int8", "tf32"):
        run = _quantised_runner(cls, kind, format_name, device_type)
    elif format_name == "fp16" and unit.is_emulated("fp16") and _is_emulated_whole(module, kind):
        run = _emulated_fp16_runner(cls, device_type)
    else:
        run = _autocast_runner(cls, kind, number_format.compute_dtype, device_type, module)
    if clamp is not None and number_format.compute_dtype in _LOW:
        run = _clamped(run, clamp)
    run.is_watched = format_name in ("fp16", "fp8", "int8")  # type: ignore[attr-defined]
    return run


def _is_emulated_whole(module: nn.Module, kind: str) -> bool:
    """Torch's own matrix layers are emulated in float32; everything else has (slow) fp16 operations on a CPU."""
    return (kind in ("linear", "conv") and is_exact(module)) or isinstance(module, nn.RNNBase)


def _autocast_runner(cls: type, kind: str, dtype: torch.dtype, device_type: str, module: nn.Module) -> Runner:
    """The layer's own forward with autocast's target set to ``dtype``."""
    base_forward = cls.forward  # type: ignore[attr-defined]
    casts_inputs = dtype is torch.float32 and not is_exact(module)
    casts_output = kind == "embedding"

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _compiled_call(base_forward, module, dtype, device_type, args, kwargs)
        set_ambient(device_type, dtype)
        if casts_inputs:
            args, kwargs = _cast((args, kwargs), torch.float32, _LOW)
        output = base_forward(module, *args, **kwargs)
        if casts_output:
            output = _cast(output, dtype)
        return output

    if kind == "rnn":
        return _rnn_runner(run, device_type)
    return run


def _rnn_runner(run: Runner, device_type: str) -> Runner:
    """RNNs compare the dtype of input and weights before autocast can act on a CPU, so they are given float32."""

    def run_rnn(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), torch.float32, _LOW)
        return run(module, *args, **kwargs)

    return run_rnn


def _compiled_call(
    base_forward: Runner, module: nn.Module, dtype: torch.dtype, device_type: str, args: Any, kwargs: Any
) -> Any:
    """The same region as a context manager, which the compiler can trace; the target ends with the call."""
    if dtype is torch.float32:
        args, kwargs = _cast((args, kwargs), torch.float32, _LOW)
        with torch.autocast(device_type, enabled=False):
            return base_forward(module, *args, **kwargs)
    with torch.autocast(device_type, dtype=dtype, cache_enabled=False):
        return base_forward(module, *args, **kwargs)


def _norm_runner(module: nn.Module, cls: type, dtype: torch.dtype) -> Runner:
    """Normalisation keeps its statistics in float32; the format decides what goes out.

    Batch statistics layers take their input as it comes, as under autocast: casting it up would double their traffic.
    """
    base_forward = cls.forward  # type: ignore[attr-defined]
    widens = dtype is torch.float32 and not isinstance(module, _NormBase)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if widens:
            args, kwargs = _cast((args, kwargs), torch.float32, _LOW)
        output = base_forward(module, *args, **kwargs)
        return output if dtype is torch.float32 else _cast(output, dtype)

    return run


def _to_fp16_and_back(value: Any) -> Any:
    return _cast(_cast(value, torch.float16), torch.float32)


def _emulated_fp16_runner(cls: type, device_type: str) -> Runner:
    """fp16 where the device has none: inputs, weights and outputs are rounded to fp16, the arithmetic is float32."""
    base_forward = cls.forward  # type: ignore[attr-defined]

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        set_ambient(device_type, torch.float32)
        args, kwargs = _to_fp16_and_back((args, kwargs))
        output = base_forward(_RoundedWeights(module, _to_fp16_and_back), *args, **kwargs)
        set_ambient(device_type, torch.float16)
        return _cast(output, torch.float16)

    return run


class _RoundedWeights:
    """Stands in for ``self`` in a torch layer's forward and hands out rounded weights."""

    def __init__(self, module: nn.Module, rounding: Callable[[Tensor], Tensor]) -> None:
        self._module, self._rounding = module, rounding

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "_flat_weights":
            return [self._rounding(weight) for weight in value]
        return self._rounding(value) if name in ("weight", "bias") and isinstance(value, Tensor) else value


def _quantised_runner(cls: type, kind: str, format_name: str, device_type: str) -> Runner:
    base_forward = cls.forward  # type: ignore[attr-defined]
    dtype = FORMATS[format_name].compute_dtype

    def run_linear(module: nn.Linear, input: Tensor) -> Tensor:
        set_ambient(device_type, dtype)
        if _is_functorch_active():
            output: Tensor = base_forward(module, input)
            return output
        with torch.autocast(device_type, enabled=False):
            if format_name == "tf32":
                return Tf32Linear.call(input.float(), module.weight, module.bias)
            return low_linear(input, module.weight, module.bias, format_name)

    def run_embedding(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        set_ambient(device_type, dtype)
        rows: Tensor = base_forward(module, *args, **kwargs)
        return rows.to(dtype) if _is_functorch_active() else round_embedding(rows, format_name)

    def run_conv(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        set_ambient(device_type, dtype)
        if _is_functorch_active():
            plain: Tensor = base_forward(module, input, *args, **kwargs)
            return plain
        rounding, gradient_rounding = _conv_roundings(format_name)
        source = _RoundedWeights(module, lambda w: fake_quantize(w, rounding) if w.ndim > 1 else w)
        with torch.autocast(device_type, enabled=False):
            output = base_forward(source, fake_quantize(input.float(), rounding), *args, **kwargs)
            return fake_quantize(output, None, gradient_rounding).to(dtype)

    runners: dict[str, Runner] = {"linear": run_linear, "embedding": run_embedding, "conv": run_conv}
    return runners[kind]


def _is_functorch_active() -> bool:
    """Inside ``torch.func`` transforms the quantised layers run in their compute dtype: they have no rules for it."""
    check = getattr(torch._C, "_are_functorch_transforms_active", None)
    return check is not None and bool(check())


def _conv_roundings(format_name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]:
    """Convolutions in 8 bits or tf32 are emulated everywhere: rounded operands, float32 arithmetic."""
    if format_name == "int8":
        return round_int8, None
    if format_name == "fp8":
        return round_fp8(torch.float8_e4m3fn), round_fp8(torch.float8_e5m2)
    return FORMATS["tf32"].round, FORMATS["tf32"].round


def _clamped(run: Runner, limit: float) -> Runner:
    def run_clamped(*args: Any, **kwargs: Any) -> Any:
        output = run(*args, **kwargs)
        return tree_map(lambda v: v.clamp(-limit, limit) if isinstance(v, Tensor) and v.dtype in _LOW else v, output)

    return run_clamped
