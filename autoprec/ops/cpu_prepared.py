"""What optimizer steps in C have in common: checks and tables of addresses, made once for lists that stay the same.

Later calls only make sure that every tensor is where it was.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from autoprec.ops import native
from autoprec.ops.cpu import MEASURED, codes_of
from autoprec.ops.reference_steps import WeightCopy, stream_starts

_SHAPE = attrgetter("shape")
_FORMATS = {"bf16": native.BF16, "fp16": native.FP16, "e4m3": native.E4M3, "int8": native.INT8}


class Prepared:
    """Lists that a step works on again and again, and the rows that the C library reads.

    Args:
        params: float32 on a CPU, each filling one block of memory in any order of its dimensions.
        states: Lists of tensors that are laid out like the parameters, under the names of ``ap_parameter``.
        steps: Counters, float32 with one entry each, or empty.
        copies: Copies to write, one entry for each parameter.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: dict[str, Sequence[Tensor]],
        steps: Sequence[Tensor],
        copies: Sequence[WeightCopy | None],
    ) -> None:
        self._params, self._states, self._steps, self._copies = params, states, steps, copies
        self._written = [*params, *(tensor for tensors in states.values() for tensor in tensors), *steps]
        self._addresses: list[int] = []
        self._rows: ctypes.Array[native.Parameter]
        self._build()

    def _build(self) -> None:
        """Checks everything and notes where it is."""
        for param in self._params:
            _check(param, "params", param, (torch.float32,))
        for name, tensors in self._states.items():
            allowed = tuple(MEASURED) if name == "exp_avg_sq" else (torch.float32,)
            for param, tensor in zip(self._params, tensors, strict=True):
                _check(tensor, name, param, allowed)
        for step in self._steps:
            if step.dtype is not torch.float32 or step.numel() != 1 or not step.is_cpu:
                raise ValueError(f"Passed a step counter of {step.dtype} {tuple(step.shape)}. It must be float32 `[]`.")
        self._shapes = list(map(_SHAPE, self._params))
        self._are_contiguous = all(map(Tensor.is_contiguous, self._params))
        elements = stream_starts([param.numel() for param in self._params])
        self._rows = (native.Parameter * len(self._params))(*map(self._row, range(len(self._params)), elements))
        # last: where a check raises, the next call checks again
        self._addresses = list(map(Tensor.data_ptr, self._written))

    def _row(self, index: int, element: int) -> native.Parameter:
        param = self._params[index]
        states = {name: tensors[index] for name, tensors in self._states.items()}
        moment = states.get("exp_avg_sq")
        return native.Parameter(
            param=param.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in states.items()},
            step=self._steps[index].data_ptr() if self._steps else None,
            size=param.numel(),
            rows=param.shape[0] if param.ndim else 1,
            cols=param.shape[1:].numel(),
            moment_format=native.FP32 if moment is None else MEASURED[moment.dtype],
            element=element,
            copy=_copy(param, self._copies[index]),
        )

    def rows(self) -> ctypes.Array[native.Parameter]:
        """What the C library reads about every parameter, made again if a tensor has moved."""
        if list(map(Tensor.data_ptr, self._written)) != self._addresses:
            self._build()
        return self._rows

    def pointers(self, grads: Sequence[Tensor]) -> tuple[array[int], bytes, Sequence[Tensor]]:
        """Addresses and dtypes of gradients, laid out like their parameters; the last item keeps them alive."""
        codes = codes_of(grads) if self._are_contiguous else None
        if codes is None or list(map(_SHAPE, grads)) != self._shapes:
            grads = [_like(grad, param) for grad, param in zip(grads, self._params, strict=True)]
            codes = bytes(MEASURED[grad.dtype] for grad in grads)
        return array("Q", map(Tensor.data_ptr, grads)), codes, grads

    def stale(self, samples: int, seed: int) -> int | None:
        """Position of the first parameter of whose entries one differs from its copy."""
        if list(map(Tensor.data_ptr, self._params)) != self._addresses[: len(self._params)]:
            self._build()
        found: int = native.library().ap_stale(len(self._params), self._rows, samples, seed & native.MASK64)
        return None if found < 0 else found

    def refresh(self) -> None:
        """Writes the copies of weights as they are."""
        native.library().ap_refresh(len(self._params), self.rows(), torch.get_num_threads())


def _check(tensor: Tensor, name: str, param: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed or not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(
            f"Passed {tensor.dtype} on {tensor.device} in `{name}` of a fused step. The implementation `cpu` needs"
            f" dense CPU tensors of {' or '.join(map(str, allowed))}."
        )
    if tensor.shape != param.shape or not _is_dense(tensor) or not _has_layout_of(tensor, param):
        raise ValueError(
            f"Passed a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} in `{name}` for a parameter"
            f" of shape {tuple(param.shape)} and strides {param.stride()}. Both must fill one block of memory in the"
            " same order."
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the entries fill one block of memory."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and tensor.numel():
            if stride != expected:
                return False
            expected *= size
    return True


def _has_layout_of(tensor: Tensor, param: Tensor) -> bool:
    strides = zip(tensor.stride(), param.stride(), param.shape, strict=True)
    return tensor.shape == param.shape and all(mine == other or size == 1 for mine, other, size in strides)


def _like(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient in the layout of its parameter."""
    if grad.dtype not in MEASURED or grad.layout is not torch.strided or not grad.is_cpu or grad.shape != param.shape:
        raise ValueError(
            f"Passed a gradient of {grad.dtype} {tuple(grad.shape)} on {grad.device} ({grad.layout}) to a fused step,"
            f" for a parameter {tuple(param.shape)}. It must be a dense CPU tensor of that shape in float32, bfloat16"
            " or float16."
        )
    if _has_layout_of(grad, param):
        return grad
    return torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def _copy(param: Tensor, copy: WeightCopy | None) -> native.Copy:
    if copy is None:
        return native.Copy(format=native.FP32)
    for values in (copy.values, copy.transposed_values):
        if values is not None and values.numel() != param.numel():
            raise ValueError(f"Passed a copy of {values.numel()} values for a parameter of {param.numel()}.")
    if not _has_layout_of(copy.values.view(param.shape), param) or (
        copy.format == "int8" and not param.is_contiguous()
    ):
        raise ValueError(
            f"Passed a {copy.format} copy with strides {copy.values.stride()} for a parameter with strides"
            f" {param.stride()}. Both must be laid out alike, and contiguous for int8."
        )
    return native.Copy(_FORMATS[copy.format], *(None if t is None else t.data_ptr() for t in copy.tensors))
