"""Runs a module's units in given formats without a Trainer, as a training step would, and the layers to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autoprec.autocast import ambient, float32_recomputation
from autoprec.layers import Runtime, attach, detach, set_format
from autoprec.units import Unit, find_units

BF16, HALF = torch.bfloat16, torch.float16
Make = Callable[[], nn.Module]
Shapes = Sequence[tuple[int, ...]]
FORMATS_OF_A_LINEAR = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")


def attached(
    root: nn.Module, formats: str | Mapping[str, str], *, granularity: str = "layer", clamp: float | None = None
) -> tuple[list[Unit], Runtime]:
    """Attaches all units. A name in ``formats`` is for all that can run in it, a mapping for the units it names."""
    units, runtime = find_units(root, granularity=granularity), Runtime("cpu", clamp)
    assert not attach(units, runtime)
    for unit in units:
        name = formats if isinstance(formats, str) else formats.get(unit.name)
        if name is not None and unit.reason is None and (name in unit.legal or not isinstance(formats, str)):
            assert name in unit.legal, f"{unit.name} cannot run in {name}"
            set_format(unit, name)
    return units, runtime


@contextmanager
def steered(
    root: nn.Module,
    formats: str | Mapping[str, str],
    *,
    dtype: torch.dtype = torch.float32,
    granularity: str = "layer",
    clamp: float | None = None,
) -> Iterator[Runtime]:
    """A training step: units in their formats, operations before the first unit in ``dtype``."""
    units, runtime = attached(root, formats, granularity=granularity, clamp=clamp)
    runtime.is_active = runtime.is_recording = True
    try:
        with ambient("cpu", dtype), float32_recomputation("cpu"):
            yield runtime
    finally:
        runtime.is_active = runtime.is_recording = False
        detach(units)


class Scaled(nn.Linear):
    """A subclass with a forward of its own that relies on ``super`` and keeps a note on itself."""

    calls = 0

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        assert isinstance(self, nn.Linear)
        return super().forward(input) * 2


class Own(nn.Module):
    """A module that owns a parameter and multiplies it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6))

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.table


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def inputs(shapes: Shapes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run(module: Any, xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of inputs and parameters."""
    outputs = tensors(module(*xs))
    for x in (*xs, *module.parameters()):
        x.grad = None
    sum((output.float().pow(2).sum() for output in outputs), torch.zeros(())).backward()
    return outputs, [x.grad for x in (*xs, *module.parameters()) if x.grad is not None]


def in_format(module: nn.Module, name: str, xs: Sequence[Tensor], **kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    root = nn.Module()
    root.add_module("layer", module)
    with steered(root, {"layer": name}, **kwargs):
        return run(module, xs)


def under_autocast(module: nn.Module, dtype: torch.dtype, xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    # without the cache a weight used several times sums its gradients in float32, as it does here
    with torch.autocast("cpu", dtype, cache_enabled=False):
        return run(module, xs)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor], relative: float) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        mine, theirs = mine.detach().double(), theirs.detach().double()
        if mine.numel():
            assert float((mine - theirs).abs().max()) <= relative * float(theirs.abs().max())


LAYERS: dict[str, tuple[Make, Shapes]] = {
    "linear": (lambda: nn.Linear(8, 12), [(4, 8)]),
    "linear of a vector": (lambda: nn.Linear(8, 12), [(8,)]),
    "linear of a sequence": (lambda: nn.Linear(8, 12, bias=False), [(2, 3, 8)]),
    "linear of nothing": (lambda: nn.Linear(8, 12), [(0, 8)]),
    "conv1d": (lambda: nn.Conv1d(3, 5, 3, stride=2), [(2, 3, 9)]),
    "conv2d in groups": (lambda: nn.Conv2d(4, 8, 3, padding=1, groups=2), [(2, 4, 6, 6)]),
    "conv2d on a circle": (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), [(2, 4, 6, 6)]),
    "conv2d of one image": (lambda: nn.Conv2d(4, 8, 3, bias=False), [(4, 6, 6)]),
    "conv2d of nothing": (lambda: nn.Conv2d(4, 8, 3), [(0, 4, 6, 6)]),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), [(2, 2, 5, 5, 5)]),
    "conv transpose1d": (lambda: nn.ConvTranspose1d(3, 5, 3, stride=2), [(2, 3, 5)]),
    "conv transpose2d": (lambda: nn.ConvTranspose2d(3, 5, 3, stride=2, output_padding=1), [(2, 3, 5, 5)]),
    "conv transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), [(2, 2, 3, 3, 3)]),
    "lstm": (lambda: nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True), [(2, 5, 4)]),
    "lstm with projection": (lambda: nn.LSTM(4, 6, proj_size=3), [(5, 2, 4)]),
    "gru": (lambda: nn.GRU(4, 6), [(5, 2, 4)]),
    "rnn": (lambda: nn.RNN(4, 6, nonlinearity="relu"), [(5, 2, 4)]),
    "lstm cell": (lambda: nn.LSTMCell(4, 6), [(2, 4)]),
    "gru cell": (lambda: nn.GRUCell(4, 6), [(2, 4)]),
    "rnn cell": (lambda: nn.RNNCell(4, 6), [(2, 4)]),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), [(2, 5, 8)] * 3),
    "attention with other widths": (
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4),
        [(5, 2, 8), (5, 2, 6), (5, 2, 4)],
    ),
    "bilinear": (lambda: nn.Bilinear(4, 5, 6), [(3, 4), (3, 5)]),
    "subclass": (lambda: Scaled(8, 6), [(4, 8)]),
    "own parameter": (Own, [(4, 8)]),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), [(4, 8)]),
}
every_layer = pytest.mark.parametrize(("make", "shapes"), LAYERS.values(), ids=LAYERS)

# torch's own remarks about its CPU kernels and its older programs
TORCH_REMARKS = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
