"""Runs a layer of a workload in a format, forward and backward, exactly as a training step runs it.

What lives here: the call that is timed, its error against float64, and the bytes that it keeps for the backward. What
does not: how a layer runs in a format (``runners``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoprec.autocast import ambient
from autoprec.calibration.workloads import Workload, make_layer
from autoprec.formats import get_format
from autoprec.ops import new_copy, refresh_copies_
from autoprec.runners import Runner, make_runner, run_on_copies, run_on_int8_copy

_SAMPLES = 64
_COPIED = ("bf16", "fp16", "int8")


class Choice(NamedTuple):
    """One way to run a layer.

    Attributes:
        format: Name of the format.
        implementation: Name of the implementation, ``"default"`` for torch's own.
        is_emulated: Whether the device only emulates the format for this kind of layer.
        on_copies: Whether the layer runs on kept copies of its weights.
    """

    format: str
    implementation: str = "default"
    is_emulated: bool = False
    on_copies: bool = False


class Measured(NamedTuple):
    """What one way to run a workload costs.

    Attributes:
        ms: Forward, backward and casts.
        error: Relative error against float64, the largest of output and gradients.
        activation_bytes: What it keeps for the backward, copies of weights left out.
        copy_bytes: Copies of weights.
    """

    ms: float
    error: float
    activation_bytes: int
    copy_bytes: int


class LayerRuns:
    """A layer of a workload, and the ways to run it.

    Args:
        workload: What it computes.
        device: Where.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self._workload = workload
        self._device = device
        self._module, self._x = make_layer(workload, device)
        self._reference: list[Tensor] | None = None
        self._exact: list[Tensor] | None = None
        self._kept = [parameter.detach() for parameter in self._module.parameters()]

    def in_turn(self, choice: Choice) -> Callable[[], list[Tensor]]:
        """Returns a call that runs the layer forward and backward once.

        Args:
            choice: How.

        Returns:
            The call; it returns the output and the gradients of input and weight.
        """
        device_type, compute = self._device.type, get_format(choice.format).compute_dtype
        x, run = self._input(choice), self._runner(choice)
        leaves, call = self._leaves(choice, run)
        if self._workload.needs_grad and x.is_floating_point():
            leaves = [x.requires_grad_(), *leaves]
        out_gradient: list[Tensor] = []

        def forward_and_backward() -> list[Tensor]:
            with ambient(device_type, compute):
                output = call(x)
            if not leaves:
                return [output]
            if not out_gradient:
                out_gradient.append(whole_numbers(output))
            return [output, *torch.autograd.grad(output, leaves, out_gradient[0])]

        return forward_and_backward

    def saved_bytes(self, call: Callable[[], object], choice: Choice) -> int:
        """Counts what a call keeps for its backward, the layer's parameters and copies of them aside.

        Args:
            call: What :meth:`in_turn` returned.
            choice: How it runs.
        """
        own = {tensor.untyped_storage().data_ptr() for tensor in self._kept}
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call()
        # then the cast weight is in it, for the gradient of the input
        is_cast = choice.format in _COPIED and not choice.on_copies and self._workload.needs_grad
        return max(sum(found.values()) - (self._weight_copy_bytes(choice.format) if is_cast else 0), 0)

    def copy_bytes(self, choice: Choice) -> int:
        """Counts the low-precision copies of the layer's weights in a format.

        Args:
            choice: How the layer runs.
        """
        if choice.format not in _COPIED or self._workload.kind == "embedding":
            return 0
        bytes_each = self._weight_copy_bytes(choice.format)
        # of an int8 layer the second, transposed copy is what the backward keeps
        return 2 * bytes_each if choice.format == "int8" else bytes_each

    def _weight_copy_bytes(self, format_name: str) -> int:
        weights = [parameter for parameter in self._module.parameters() if parameter.ndim > 1]
        if self._workload.kind == "embedding":
            return 0
        if format_name == "int8":
            return sum(weight.numel() + 4 * weight.shape[0] for weight in weights)
        return 2 * sum(weight.numel() for weight in weights)

    def error(self, outputs: list[Tensor]) -> float:
        """Relative error of what a call returned, the largest of output and gradients.

        Output and input gradient are compared with float64 on some rows, the gradient of the weight with float32.

        Args:
            outputs: Output, gradient of the input if there is one, and of the parameters.
        """
        if self._exact is None:
            self._exact = self._in_float64()
            self._reference = self.in_turn(Choice("fp32"))()
        assert self._reference is not None, "it is made together with the exact one"
        rows = self._exact[0].shape[0]
        errors = [relative_error(found[:rows], exact) for found, exact in zip(outputs, self._exact, strict=False)]
        errors += [
            relative_error(found, reference)
            for found, reference in zip(outputs[len(self._exact) :], self._reference[len(self._exact) :], strict=True)
        ]
        return max(errors)

    def _in_float64(self) -> list[Tensor]:
        """Output and, if there is one, input gradient of the first rows."""
        rows = max(min(_SAMPLES, len(self._x)) if self._workload.kind != "conv" else 1, 1)
        x = self._x[:rows].detach()
        x = x.double() if x.is_floating_point() else x
        module = make_layer(self._workload, self._device)[0].double()
        wants_gradient = self._workload.needs_grad and x.is_floating_point()
        with torch.autocast(self._device.type, enabled=False):
            output: Tensor = module(x.requires_grad_(wants_gradient))
            if not wants_gradient:
                return [output.detach()]
            # of the whole batch's gradient, the first rows
            full = torch.empty((len(self._x), *output.shape[1:]), device=self._device, dtype=torch.float32)
            return [output.detach(), *torch.autograd.grad(output, [x], whole_numbers(full)[:rows].double())]

    def _input(self, choice: Choice) -> Tensor:
        x = self._x.detach()
        if choice.implementation == "channels_last" and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)  # as inside of a chain of such layers
        if not x.is_floating_point() or not self._workload.follows:
            return x.clone() if x.is_floating_point() else x
        return x.to(get_format(choice.format).compute_dtype, copy=True)

    def _runner(self, choice: Choice) -> Runner:
        return make_runner(
            self._module,
            choice.format,
            choice.is_emulated,
            self._device.type,
            implementation=choice.implementation,
        )

    def _leaves(self, choice: Choice, run: Runner) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
        """What takes gradients beside the input, and the call of the layer."""
        module, device_type = self._module, self._device.type
        weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not choice.on_copies or not weights:
            return list(weights), lambda x: run(module, x)
        if choice.format == "int8":
            return self._leaves_on_int8()
        copies = [new_copy(weight, choice.format) for weight in weights]
        refresh_copies_([weight.detach() for weight in weights], copies)
        self._kept += [copy.values for copy in copies]
        handed = [copy.values.requires_grad_() for copy in copies]
        bias = handed[1] if len(handed) > 1 else None
        return handed, lambda x: run_on_copies(module, x, handed[0], bias, device_type)

    def _leaves_on_int8(self) -> tuple[list[Tensor], Callable[[Tensor], Tensor]]:
        module, device_type = self._module, self._device.type
        weight: Any = module.weight
        copy = new_copy(weight, "int8")
        refresh_copies_([weight.detach()], [copy])
        self._kept += [tensor for tensor in copy.tensors if tensor is not None]
        handed = torch.zeros((), dtype=torch.bfloat16, device=weight.device).expand(weight.shape).requires_grad_()
        others = [parameter for parameter in module.parameters() if parameter is not weight]
        return [handed, *others], lambda x: run_on_int8_copy(module, x, handed, copy, device_type)


def whole_numbers(output: Tensor) -> Tensor:
    """Returns a gradient that is the same in every format: small whole numbers, not all alike.

    Args:
        output: What it is the gradient of.
    """
    steps = torch.arange(output.numel(), device=output.device, dtype=torch.int64) % 7 - 3
    gradient = torch.empty_like(output)
    return gradient.copy_(steps.reshape(output.shape))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Returns the norm of a difference over that of what is exact.

    Args:
        found: What was computed.
        exact: What it should be.
    """
    if found.layout is not torch.strided:
        return 0.0  # sparse gradients of an embedding are copies of rows
    found, exact = found.detach().double(), exact.detach().double()
    norm, distance = float(exact.norm()), float((found - exact).norm())
    return distance / norm if norm else math.inf if distance else 0.0
