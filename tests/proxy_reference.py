"""A proxy model in plain torch, differentiated by autograd: what the engine's C is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autoprec.envs.architectures import Graph
from autoprec.envs.engine import ACTIVATIONS, FORMATS, NODES, SPEC
from autoprec.formats import BF16, E4M3, E5M2, FP16, INT8, NumberFormat

E2M1 = NumberFormat(
    name="e2m1", exponent_bits=2, mantissa_bits=1, has_inf=False, dtype=torch.uint8, compute_dtype=torch.bfloat16
)
_FORWARD = {"bf16": BF16, "fp16": FP16, "fp8-unscaled": E4M3, "fp8": E4M3, "int8": INT8}
_BACKWARD = {"bf16": BF16, "fp16": FP16, "fp8-unscaled": E5M2, "fp8": E5M2, "int8": BF16, "fp4": E5M2, "int4": BF16}


def plain_spec(graph: Graph, *, seed: int = 3, optimizer: int = 0, **fields: Any) -> NDArray[Any]:
    """A description without noise, outliers, events or unusual ranges."""
    spec: NDArray[Any] = np.zeros((), SPEC)
    spec["seed"], spec["nodes"][: len(graph.nodes)] = (seed, 7), graph.nodes
    sizes = {"node_count": len(graph.nodes), "unit_count": len(graph.kinds), "classes": 8, "max_batch": 128}
    settings = {"evaluation_samples": 64, "teacher_width": 32, "optimizer": optimizer, "beta1": 0.9, "beta2": 0.999}
    neutral = {"outlier_factor": 1.0, "loss_factor": 1.0, "eps": 1e-8, "drift_steps": 1.0}
    for name, value in {**sizes, **settings, **neutral, **fields}.items():
        spec[name] = value
    return spec


def rounded(x: Tensor, format_name: str, scale: float, mean: float, is_gradient: bool) -> Tensor:
    """What becomes of a tensor that is stored as ``x * scale + mean``."""
    if format_name == "fp32":
        return x
    stored = x * scale + mean
    is_scaled = format_name in ("fp8", "fp4") or (format_name in ("int8", "int4") and not is_gradient)
    format_ = _BACKWARD[format_name] if is_gradient else _FORWARD.get(format_name)
    largest = format_.max if format_ is not None else {"fp4": 6.0, "int4": 7.0}[format_name]
    factor = largest / stored.abs().max().clamp(min=1e-12) if is_scaled else torch.tensor(1.0)
    scaled = stored * factor
    if format_ is not None:
        scaled = format_.round(scaled, saturate=True)
    else:
        scaled = scaled.round().clamp(-7, 7) if format_name == "int4" else _round_e2m1(scaled)
    return (scaled / factor - mean) / scale


def _round_e2m1(x: Tensor) -> Tensor:
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    distance = (x.abs()[..., None] - grid).abs()
    tied = distance == distance.min(dim=-1, keepdim=True).values
    even = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0])  # of two as near, the one with an even code
    return grid[(tied * (1 + even)).argmax(dim=-1)] * x.sign()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, format_name: str, ranges: tuple[float, ...]) -> Tensor:
        activation, mean, weight_scale, ctx.gradient_scale = ranges
        x = rounded(x, format_name, activation, mean, False)
        weight = rounded(weight, format_name, weight_scale, 0.0, False)
        ctx.save_for_backward(x, weight)
        ctx.format_name = format_name
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = rounded(grads[0], ctx.format_name, ctx.gradient_scale, 0.0, True)
        weight_grad = x.flatten(0, -2).T @ grad.flatten(0, -2)
        ctx.bias_grad = grad
        return grad @ weight.T, weight_grad, None, None


class Reference(nn.Module):
    """The model of a description; parameters lie as the engine's do: weight, then bias, unit by unit."""

    def __init__(self, graph: Graph, spec: NDArray[Any], parameters: NDArray[np.float32]) -> None:
        super().__init__()
        self.graph, self.spec = graph, spec
        self.flat = nn.Parameter(torch.from_numpy(parameters.copy()))
        self.formats = ["fp32"] * len(graph.kinds)

    def set_formats(self, codes: NDArray[Any]) -> None:
        self.formats = [FORMATS[int(code)] for code in codes[: len(self.formats)]]

    def forward(self, x: Tensor) -> Tensor:
        places = [x]
        for kind, a, b, unit, _, width, extra in self.graph.nodes[1:]:
            source, name = places[a], NODES[kind]
            if name == "linear":
                places.append(self._linear(source, unit, ACTIVATIONS[extra]))
            elif name == "recurrent":
                places.append(self._recurrent(source, unit))
            elif name == "patches":
                places.append(_patches(source, extra))
            elif name == "mean":
                places.append(source.mean(dim=1, keepdim=True))
            elif name == "norm":
                places.append(nn.functional.layer_norm(source, source.shape[-1:]))
            elif name == "attention":
                places.append(_attention(source, width, extra))
            else:
                places.append(source + places[b])
        return places[-1].squeeze(1)

    def _unit(self, unit: int) -> tuple[Tensor, Tensor]:
        start = sum(wide * out + out for _, wide, out in self.graph.shapes[:unit])
        _, wide, out = self.graph.shapes[unit]
        weight, bias = self.flat[start : start + wide * out + out].split([wide * out, out])
        return weight.view(wide, out), bias

    def _product(self, x: Tensor, weight: Tensor, unit: int) -> Tensor:
        activation = 2.0 ** float(self.spec["activation_bits"][unit])
        mean = float(self.spec["activation_mean"][unit]) * activation
        ranges = (activation, mean, 2.0 ** float(self.spec["weight_bits"][unit]))
        gradient = 2.0 ** float(self.spec["gradient_bits"][unit])
        apply: Any = _Product.apply
        product: Tensor = apply(x, weight, self.formats[unit], (*ranges, gradient))
        return product

    def _linear(self, x: Tensor, unit: int, activation: str) -> Tensor:
        weight, bias = self._unit(unit)
        y = self._product(x, weight, unit) + bias
        return torch.relu(y) if activation == "relu" else torch.tanh(y) if activation == "tanh" else y

    def _recurrent(self, x: Tensor, unit: int) -> Tensor:
        weight, bias = self._unit(unit)
        state = torch.tanh(x[:, 0] + bias)
        for t in range(1, x.shape[1]):
            state = torch.tanh(x[:, t] + self._product(state, weight, unit) + bias)
        return state[:, None]


def _patches(x: Tensor, stride: int) -> Tensor:
    batch, positions, width = x.shape
    side = round(positions**0.5)
    image = x.transpose(1, 2).reshape(batch, width, side, side)
    patches = nn.functional.unfold(image, 3, padding=1, stride=stride)  # [batch, width * 9, positions]
    return patches.view(batch, width, 9, -1).permute(0, 3, 2, 1).flatten(2)


def _attention(x: Tensor, width: int, heads: int) -> Tensor:
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in x.split(width, dim=-1))
    return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
