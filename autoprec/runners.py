"""How a layer runs in a format: one small function per layer and format, made when the format changes.

A native format switches autocast's target in place and calls the layer's own forward, so torch does the casts. Emulated
and quantised formats do the work here. What does not live here: when these functions are called (``layers``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from autoprec import onednn
from autoprec.autocast import set_ambient
from autoprec.formats import FORMATS, get_format
from autoprec.implementations import DEFAULT, check
from autoprec.lookalike import plain_class
from autoprec.ops import WeightCopy, fake_quantize, int8_linear
from autoprec.ops import embedding as round_embedding
from autoprec.ops import linear as low_linear
from autoprec.ops.reference import Tf32Linear, is_fp8_shape, round_fp8, round_int8
from autoprec.units import is_exact, kind_of

Runner = Callable[..., Any]
_LOW = (torch.bfloat16, torch.float16)
_ARE_TRANSFORMS_ACTIVE: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", bool)
# calls are counted: one that runs in another format instead shows in no dtype
_COUNTED = ("tf32", "fp8", "int8")


def make_runner(
    module: nn.Module,
    format_name: str,
    is_emulated: bool,
    device_type: str,
    clamp: float | None = None,
    implementation: str = DEFAULT,
) -> Runner:
    """Returns how a layer runs in a format: a function of the layer and its forward's arguments.

    Args:
        module: A layer.
        format_name: A format that is legal for it.
        is_emulated: Whether the device only emulates the format.
        device_type: Where it runs; autocast must be on there at the call.
        clamp: Limit on the magnitude of low-precision outputs, ``None`` for none.
        implementation: One of :func:`autoprec.implementations.candidates`. Layers that it cannot run, subclasses for
            instance, run as torch does; so does a call with inputs that it cannot take. A convolution in
            ``"channels_last"`` returns its result in that layout, as it does inside of a chain (``layouts``).

    Raises:
        ValueError: If ``implementation`` is none of them.
    """
    number_format = get_format(format_name)
    cls = plain_class(module)
    kind = kind_of(module)  # a tied unit or a block mixes kinds
    if implementation != DEFAULT:
        check(kind, format_name, device_type, implementation)
    if kind == "norm":
        run = _norm_runner(module, cls, number_format.compute_dtype)
    elif format_name in _COUNTED:
        run = _quantised_runner(cls, kind, format_name, device_type)
    elif format_name == "fp16" and is_emulated and _is_emulated_whole(module, kind):
        run = _emulated_fp16_runner(cls, device_type)
    else:
        run = _autocast_runner(cls, kind, number_format.compute_dtype, device_type, module)
    if implementation != DEFAULT and is_exact(module):
        run = {"onednn": _onednn_runner, "channels_last": _channels_last_runner}[implementation](run)
    if clamp is not None and format_name in ("fp16", "fp8", "int8"):
        run = _clamped(run, clamp)
    return run


def _cast(value: Any, dtype: torch.dtype, sources: tuple[torch.dtype, ...] = (*_LOW, torch.float32)) -> Any:
    """Casts the float tensors in a nest; float64 and integers stay."""
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.dtype in sources else v, value)


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


def make_base_runner(module: nn.Module, dtype: torch.dtype, device_type: str) -> Runner:
    """Returns how a layer runs as under plain autocast, behind one that has switched the target.

    Args:
        module: A layer with a weight matrix.
        dtype: Target of the Trainer's own autocast.
        device_type: Where it runs; autocast must be on there at the call.
    """
    return _autocast_runner(plain_class(module), "", dtype, device_type, module)


def _onednn_runner(run: Runner) -> Runner:
    """A float32 linear layer on oneDNN's products wherever that behaves as torch's own."""

    def run_onednn(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling() and not is_functorch_active():
            x, weight, bias = args[0], module.weight, module.bias
            if onednn.can_run(x, weight, bias):
                set_ambient("cpu", torch.float32)
                note_implementation(module, "onednn")
                return onednn.linear(x, weight, bias)  # type: ignore[arg-type]
        return run(module, *args, **kwargs)

    return run_onednn


def _channels_last_runner(run: Runner) -> Runner:
    def run_channels_last(module: nn.Module, input: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(input, Tensor) and input.ndim == 4 and not torch.compiler.is_compiling():
            input = input.contiguous(memory_format=torch.channels_last)
        return run(module, input, *args, **kwargs)

    return run_channels_last


def note_implementation(module: nn.Module, name: str) -> None:
    """Counts a call in a training step that an implementation other than torch's own ran; no recomputations."""
    state = module.__dict__.get("_autoprec")
    if state is not None and state.runtime.is_recording:
        state.unit.implemented[name] += 1


def run_on_copies(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, device_type: str) -> Tensor:
    """Runs torch's own linear or convolution layer on low-precision copies of its parameters, as autocast would.

    Args:
        module: The layer.
        x: Its input.
        weight: Copy of its weight in the dtype that autocast would cast it to.
        bias: Copy of its bias.
        device_type: Where it runs; autocast must be on there.
    """
    set_ambient(device_type, weight.dtype)
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    output: Tensor = module._conv_forward(x, weight, bias)  # type: ignore[operator]
    return output


def run_on_int8_copy(module: nn.Module, x: Tensor, weight: Tensor, copy: WeightCopy, device_type: str) -> Tensor:
    """Runs torch's own linear layer on a kept int8 copy of its weight, as the layer's runner would.

    Args:
        module: The layer.
        x: Its input.
        weight: What gets the weight's gradient, bfloat16.
        copy: Copy of its weight, the transposed one included.
        device_type: Where it runs; autocast must be on there.
    """
    set_ambient(device_type, torch.bfloat16)
    _note_call(module, "int8", "int8")
    with torch.autocast(device_type, enabled=False):
        bias: Tensor | None = module.bias  # type: ignore[assignment]
        return int8_linear(x, weight, bias, copy, master=module.weight)  # type: ignore[arg-type]


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
        args, kwargs = _to_fp16_and_back((args, kwargs))
        with torch.autocast(device_type, enabled=False):
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
    fallback = "fp32" if format_name == "tf32" else "bf16"

    def run_linear(module: nn.Linear, input: Tensor) -> Tensor:
        set_ambient(device_type, dtype)
        if is_functorch_active() or input.is_nested:  # neither has the operations of a quantised layer
            _note_call(module, format_name, fallback)
            output: Tensor = base_forward(module, input)
            return output
        _note_call(module, format_name, _format_of_call(format_name, input, module.weight))
        with torch.autocast(device_type, enabled=False):
            if format_name == "tf32":
                return Tf32Linear.call(input.float(), module.weight, module.bias)
            if format_name == "int8" and is_kernel_input(input, module.weight, module.bias):
                return int8_linear(input, module.weight, module.bias)
            return low_linear(input, module.weight, module.bias, format_name)

    def run_embedding(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        set_ambient(device_type, dtype)
        _note_call(module, format_name, fallback if is_functorch_active() else format_name)
        rows: Tensor = base_forward(module, *args, **kwargs)
        return rows.to(dtype) if is_functorch_active() else round_embedding(rows, format_name)

    def run_conv(module: nn.Module, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        set_ambient(device_type, dtype)
        _note_call(module, format_name, fallback if is_functorch_active() else format_name)
        if is_functorch_active():
            plain: Tensor = base_forward(module, input, *args, **kwargs)
            return plain
        rounding, gradient_rounding = _conv_roundings(format_name)
        source = _RoundedWeights(module, lambda w: fake_quantize(w, rounding) if w.ndim > 1 else w)
        with torch.autocast(device_type, enabled=False):
            output = base_forward(source, fake_quantize(input.float(), rounding), *args, **kwargs)
            return fake_quantize(output, None, gradient_rounding).to(dtype)

    runners: dict[str, Runner] = {"linear": run_linear, "embedding": run_embedding, "conv": run_conv}
    return runners[kind]


def _format_of_call(format_name: str, input: Tensor, weight: Tensor) -> str:
    """What a call of a linear layer runs in: fp8 takes some numbers of rows only."""
    is_fallback = format_name == "fp8" and not is_fp8_shape(input.shape[:-1].numel(), weight)
    return "bf16" if is_fallback else format_name


def _note_call(module: nn.Module, asked: str, ran: str) -> None:
    """Counts a call in a training step; neither what is recomputed nor what was compiled."""
    if torch.compiler.is_compiling():
        return
    state = module.__dict__.get("_autoprec")
    if state is not None and state.runtime.is_recording:
        state.unit.ran[asked, ran] += 1


def is_kernel_input(*tensors: Tensor | None) -> bool:
    """Whether kernels may read the tensors' memory: neither the compiler's stand-ins nor another library's class."""
    return not torch.compiler.is_compiling() and all(type(t) in (Tensor, nn.Parameter, type(None)) for t in tensors)


def is_functorch_active() -> bool:
    """Inside ``torch.func`` transforms the quantised layers run in their compute dtype: they have no rules for it."""
    return bool(_ARE_TRANSFORMS_ACTIVE())


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
