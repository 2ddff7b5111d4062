"""Layers in formats: numerics against ``torch.autocast`` and fp64, and everything about a module that must not change.

Time budget: 40 s.
"""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from autoprec.autocast import ambient
from autoprec.formats import FP16, TF32
from autoprec.layers import Runtime, attach, detach, set_format
from autoprec.ops import quantize_rows
from autoprec.ops.reference import round_fp8
from autoprec.trial import Trial
from autoprec.units import find_units
from tests.steered import attached, steered

BF16, HALF = torch.bfloat16, torch.float16
Make = Callable[[], nn.Module]
Shapes = Sequence[tuple[int, ...]]


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


def run(module: nn.Module, xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
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
    "attention with other widths": (lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4), [(5, 2, 8), (5, 2, 6), (5, 2, 4)]),
    "bilinear": (lambda: nn.Bilinear(4, 5, 6), [(3, 4), (3, 5)]),
    "subclass": (lambda: Scaled(8, 6), [(4, 8)]),
    "own parameter": (Own, [(4, 8)]),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)), [(4, 8)]),
}
every_layer = pytest.mark.parametrize(("make", "shapes"), LAYERS.values(), ids=LAYERS)
# torch's own remarks about its CPU kernels and its older programs
pytestmark = [
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


# ---- bf16, fp16 and fp32 against autocast ----


@every_layer
def test_bf16_is_autocast_bit_for_bit(make: Make, shapes: Shapes) -> None:
    outputs, gradients = in_format(seeded(make), "bf16", inputs(shapes))
    expected, expected_gradients = under_autocast(seeded(make), BF16, inputs(shapes))
    assert_equal(outputs, expected)
    assert_equal(gradients, expected_gradients)


@every_layer
def test_bf16_is_plain_autocast_to_the_rounding(make: Make, shapes: Shapes) -> None:
    _, gradients = in_format(seeded(make), "bf16", inputs(shapes))
    with torch.autocast("cpu", BF16):
        _, expected = run(seeded(make), inputs(shapes))
    assert_near(gradients, expected, 3 * 2.0**-8)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, BF16, HALF])
def test_fp32_is_the_plain_layer_whatever_is_around_it(make: Make, shapes: Shapes, dtype: torch.dtype) -> None:
    outputs, gradients = in_format(seeded(make), "fp32", inputs(shapes), dtype=dtype)
    expected, expected_gradients = run(seeded(make), inputs(shapes))
    assert_equal(outputs, expected)
    assert_equal(gradients, expected_gradients)


@every_layer
def test_fp16_is_autocast_to_the_rounding(make: Make, shapes: Shapes) -> None:
    outputs, gradients = in_format(seeded(make), "fp16", inputs(shapes))
    module, xs = seeded(make), inputs(shapes)
    if isinstance(module, nn.LSTM):  # torch has no fp16 LSTM for CPUs
        expected, expected_gradients = run(module, xs)
    else:
        expected, expected_gradients = under_autocast(module, HALF, xs)
    is_whole = isinstance(module, nn.RNNBase)
    assert [output.dtype for output in outputs] == [HALF if is_whole else output.dtype for output in expected]
    assert_near(outputs, expected, 4 * 2.0**-10)
    assert_near(gradients, expected_gradients, 4 * 2.0**-10)


@every_layer
@pytest.mark.parametrize("factor", [2e-7, 1e6])
def test_fp16_rounds_the_weights_of_every_kind_of_layer(make: Make, shapes: Shapes, factor: float) -> None:
    """Weights among fp16's last subnormals, or beyond its range, act as rounded weights do."""
    modules = seeded(make), seeded(make)
    for module in modules:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(factor)
    with torch.no_grad():
        for parameter in modules[1].parameters():
            parameter.copy_(FP16.round(parameter))
    xs = inputs(shapes)
    outputs, _ = in_format(modules[0], "fp16", xs)
    expected = tensors(modules[1](*xs))
    for mine, theirs in zip(outputs, expected, strict=True):
        rounded = FP16.round(theirs)
        assert torch.equal(torch.isfinite(mine), torch.isfinite(rounded))
        near = torch.isfinite(rounded)
        assert torch.allclose(mine.float()[near], rounded[near], rtol=4e-3, atol=3e-7)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "fp32"])
def test_embedding_returns_its_rows_in_the_compute_dtype(name: str) -> None:
    torch.manual_seed(0)
    layer, indices = nn.Embedding(20, 16, padding_idx=0), torch.tensor([[0, 3, 3], [19, 5, 0]])
    with steered(nn.Sequential(layer), name):
        output = layer(indices)
    dtype = {"bf16": BF16, "fp16": HALF, "fp32": torch.float32}.get(name, BF16)
    assert output.dtype == dtype
    expected = F.embedding(indices, layer.weight, padding_idx=0)
    tolerance = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 0.01, "fp8": 0.07}[name]
    assert torch.all((output.float() - expected).abs() <= tolerance * expected.abs().amax())
    output.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad[[0, 3, 19, 7]].sum(dim=1).tolist() == [0.0, 32.0, 16.0, 0.0]


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_embedding_bag_matches_autocast(name: str) -> None:
    torch.manual_seed(0)
    layer, indices = nn.EmbeddingBag(20, 16, mode="sum"), torch.tensor([[0, 3, 3], [19, 5, 0]])
    with steered(nn.Sequential(layer), name):
        output = layer(indices)
    dtype = {"bf16": BF16, "fp16": HALF, "fp32": torch.float32}[name]
    assert output.dtype == dtype
    assert_near([output], [layer(indices).to(dtype)], 2.0**-7 if name == "bf16" else 2.0**-10)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("low_input", [BF16, HALF])
def test_inputs_of_another_low_dtype_are_cast_at_the_boundary(name: str, low_input: torch.dtype) -> None:
    for kind, (make, shapes) in LAYERS.items():
        if kind == "bilinear":  # torch cannot run it on low inputs under its own autocast either
            continue
        xs = [x.detach().to(low_input) for x in inputs(shapes)]
        root = nn.Sequential()
        root.append(seeded(make))
        with steered(root, name):
            outputs = tensors(root[0](*xs))
        wide = [x.float() for x in xs]
        with steered(root, name):
            assert_near(outputs, tensors(root[0](*wide)), 2.0**-7)


def test_rnn_takes_its_state_back_in_whatever_dtype_it_was_returned() -> None:
    for make in (lambda: nn.LSTM(4, 6), lambda: nn.GRU(4, 6), lambda: nn.RNN(4, 6)):
        root = nn.Sequential(make())
        state: Any = None
        for name in ("bf16", "fp16", "fp32", "fp16", "bf16"):
            with steered(root, name):
                output, state = root[0](torch.randn(3, 2, 4), state)
            assert torch.isfinite(output.float()).all()


def test_integers_and_float64_are_left_alone() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor, wide: Tensor, index: Tensor) -> Tensor:
            self.seen = [x.dtype, wide.dtype, index.dtype]
            return x @ self.weight

    for name in ("fp32", "bf16", "fp16"):
        layer = Picky()
        with steered(nn.Sequential(layer), name):
            layer(torch.randn(2, 4, dtype=BF16), torch.randn(2, dtype=torch.float64), torch.arange(2))
        assert layer.seen[1:] == [torch.float64, torch.int64]
        assert name != "fp32" or layer.seen[0] == torch.float32


# ---- g01: fp32 means fp32 ----


class RawMatmuls(nn.Module):
    """Multiplies by its own weight, twice, with a softmax in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.weight
        mixed = torch.softmax(scores, dim=-1) @ self.weight
        self.dtypes = [scores.dtype, mixed.dtype]
        return torch.einsum("ij,jk->ik", mixed, self.weight)


@pytest.mark.parametrize("low", ["bf16", "fp16", "fp8", "int8"])
def test_g01_a_module_in_fp32_really_computes_in_fp32(low: str) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8), RawMatmuls())
    x = torch.randn(16, 16)
    with steered(net, {"0": low, "1": "fp32", "2": "fp32"}, dtype=BF16):
        a = net[0](x)
        b = net[1](a)
        c = net[2](a[:, :8])
    assert a.dtype in (BF16, HALF)
    assert b.dtype == c.dtype == torch.float32
    assert net[2].dtypes == [torch.float32] * 2
    assert torch.allclose(b, net[1](a.float()), rtol=1e-6, atol=1e-6)
    assert torch.allclose(c, net[2](a[:, :8].float()), rtol=1e-6, atol=1e-6)


# ---- tf32 and 8 bits ----

CONVS = {name: case for name, case in LAYERS.items() if "conv" in name and "nothing" not in name}


def tf32_64(x: Tensor) -> Tensor:
    return TF32.round(x.detach().float()).double()


def fp8_64(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: round_fp8(dtype)(x.detach()).double()


def int8_64(x: Tensor) -> Tensor:
    values, scale = quantize_rows(x.detach().flatten(1))
    return (values.double() / scale.double()).reshape(x.shape)


@pytest.mark.parametrize(("make", "shapes"), CONVS.values(), ids=CONVS)
@pytest.mark.parametrize(
    ("name", "operand", "gradient"),
    [
        ("tf32", tf32_64, tf32_64),
        ("fp8", fp8_64(torch.float8_e4m3fn), fp8_64(torch.float8_e5m2)),
        ("int8", int8_64, lambda g: g.double()),
    ],
    ids=["tf32", "fp8", "int8"],
)
def test_convolutions_equal_fp64_on_the_same_rounded_operands(
    make: Make, shapes: Shapes, name: str, operand: Callable[[Tensor], Tensor], gradient: Callable[[Tensor], Tensor]
) -> None:
    layer, exact, (x,) = seeded(make), seeded(make).double(), inputs(shapes)
    with steered(nn.Sequential(layer), name):
        output = layer(x)
    with torch.no_grad():
        exact.weight.copy_(operand(layer.weight))  # type: ignore[arg-type, operator]
    x64 = operand(x).requires_grad_()
    expected = exact(x64)
    rounding = 2.0**-7 if output.dtype == BF16 else 1e-5
    assert output.dtype == (torch.float32 if name == "tf32" else BF16)
    assert_near([output], [expected], rounding)
    grad = torch.randn_like(output)
    output.backward(grad)
    expected.backward(gradient(grad.float()))
    mine = [x.grad, *(p.grad for p in layer.parameters())]
    theirs = [x64.grad, *(p.grad for p in exact.parameters())]
    assert_near(mine, theirs, 1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tf32", "fp8", "int8"])
def test_8_bit_gradients_are_float32_and_complete(name: str) -> None:
    for layer, x in ((nn.Linear(16, 16), torch.randn(16, 16)), (nn.Conv1d(4, 4, 3), torch.randn(2, 4, 8))):
        with steered(nn.Sequential(layer), name):
            layer(x).float().pow(2).sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "tf32", "fp32"])
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Linear(16, 16), torch.randn(0, 16)),
        (lambda: nn.Linear(16, 16), torch.randn(2, 0, 16)),
        (lambda: nn.Conv2d(3, 4, 3), torch.randn(0, 3, 5, 5)),
        (lambda: nn.ConvTranspose1d(3, 4, 3), torch.randn(0, 3, 5)),
        (lambda: nn.Embedding(8, 16), torch.zeros(0, 3, dtype=torch.long)),
    ],
    ids=["linear", "sequence", "conv", "transpose", "embedding"],
)
def test_empty_batch(name: str, make: Make, x: Tensor) -> None:
    layer = make()
    plain = layer(x)
    with steered(nn.Sequential(layer), name):
        output = layer(x)
        output.float().sum().backward()
    assert output.shape == plain.shape
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "tf32", "fp32"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_inputs_come_out_non_finite(name: str, bad: float) -> None:
    for layer, x in ((nn.Linear(16, 16), torch.randn(16, 16)), (nn.Conv1d(4, 4, 3), torch.randn(2, 4, 8))):
        x[1].view(-1)[3] = bad
        with steered(nn.Sequential(layer), name):
            output = layer(x)
        assert not torch.isfinite(output[1]).all()


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "tf32", "fp32"])
def test_zero_rows_give_the_bias(name: str) -> None:
    layer = nn.Linear(16, 16)
    x = torch.randn(16, 16)
    x[4] = 0.0
    with steered(nn.Sequential(layer), name):
        output = layer(x)
    assert torch.equal(output[4], layer.bias.detach().to(output.dtype))


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "tf32", "fp32"])
def test_strided_inputs_give_the_same_result(name: str) -> None:
    linear, conv = nn.Linear(16, 16), nn.Conv2d(4, 4, 3)
    for layer, x in ((linear, torch.randn(16, 16).t()), (conv, torch.randn(2, 6, 6, 4).permute(0, 3, 1, 2))):
        assert not x.is_contiguous()
        with steered(nn.Sequential(layer), name):
            assert_near([layer(x)], [layer(x.contiguous())], 2.0**-7)
            row = x[:1].expand(16, *x.shape[1:])
            assert_near([layer(row)], [layer(row.contiguous())], 2.0**-7)


def test_fp8_runs_a_batch_that_is_no_multiple_of_16_in_bf16() -> None:
    layer, x = nn.Linear(16, 32), torch.randn(20, 16)
    with steered(nn.Sequential(layer), "fp8"):
        odd, even = layer(x), layer(x[:16])
    with torch.autocast("cpu", BF16):
        assert_near([odd], [layer(x)], 2.0**-7)
        assert not torch.equal(even, layer(x[:16]))


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "tf32"])
def test_torch_func_works_inside_a_step(name: str) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    parameters, x = dict(net.named_parameters()), torch.randn(16, 16)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(net, parameters, (x,))
        return output.float().pow(2).mean()

    expected = torch.func.grad(loss)(parameters)
    with steered(net, name):
        found = torch.func.grad(loss)(parameters)
        assert torch.func.vmap(net)(torch.randn(3, 16, 16)).shape == (3, 16, 16)
    for key, value in expected.items():
        assert float((found[key] - value).norm()) < 0.2 * float(value.norm())


# ---- d08: neighbours in different formats ----


class Neighbours(nn.Module):
    """A residual sum, a concatenation of branches and a custom autograd function between three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(Doubled.apply(a))
        y: Tensor = x + self.third(torch.cat([a, b.relu()], dim=-1)) + a * b
        return y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


@pytest.mark.parametrize("first", ["fp32", "bf16", "fp16", "fp8", "int8"])
def test_d08_any_map_on_neighbouring_layers_runs(first: str) -> None:
    names = ("fp32", "bf16", "fp16", "fp8", "int8")
    x = torch.randn(16, 16)
    net = Neighbours()
    exact = net(x)
    for second, third in itertools.product(names, names):
        # torch cannot concatenate bf16 and fp16 under autocast; the first window under a map repeats that in fp32
        with steered(net, {"first": first, "second": second, "third": third}), Trial() as trial:
            net.zero_grad()
            y = net(x)
            y.float().pow(2).mean().backward()
        is_mixed = {"fp16"} < {first, second} & {"fp16", "bf16", "fp8", "int8"}
        assert bool(trial.failures) == is_mixed
        assert float((y.float() - exact).norm()) < 0.2 * float(exact.norm()), (second, third)
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert torch.isfinite(parameter.grad).all()


def test_d08_residual_of_embedding_and_two_linears() -> None:
    net = nn.ModuleDict({"e": nn.Embedding(8, 16), "a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    with steered(net, {"e": "fp32", "a": "fp16", "b": "bf16"}):
        x = net["e"](torch.arange(8))
        a = net["a"](x)
        y = x + net["b"](a)
        y.sum().backward()
    assert (x.dtype, a.dtype, y.dtype) == (torch.float32, HALF, torch.float32)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "fp32"])
def test_functional_use_of_a_weight(name: str) -> None:
    embedding, head = nn.Embedding(16, 16), nn.Linear(16, 16)
    indices = torch.arange(16)
    with steered(nn.ModuleDict({"e": embedding, "h": head}), name):
        hidden = embedding(indices)
        logits = F.linear(hidden, embedding.weight)
        raw = hidden @ head.weight
        (logits.float().sum() + raw.float().sum() + head(raw).float().sum()).backward()
    expected = F.linear(F.embedding(indices, embedding.weight), embedding.weight)
    assert float((logits.float() - expected).norm()) < 0.1 * float(expected.norm())
    assert embedding.weight.grad is not None
    assert torch.isfinite(embedding.weight.grad).all()


def test_a_weight_used_by_two_modules_takes_both_gradients() -> None:
    embedding, head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
    head.weight = embedding.weight
    net = nn.ModuleDict({"e": embedding, "h": head})
    for name in ("bf16", "fp16", "int8", "fp8"):
        net.zero_grad()
        with steered(net, name):
            head(embedding(torch.arange(16))).float().sum().backward()
        assert head.weight is embedding.weight
        expected = copy.deepcopy(net)
        expected.zero_grad()
        expected["h"](expected["e"](torch.arange(16))).sum().backward()
        assert head.weight.grad is not None
        assert_near([head.weight.grad], [expected["h"].weight.grad], 0.06)


def test_a_module_used_twice_takes_both_gradients() -> None:
    shared = nn.Linear(16, 16)
    x = torch.randn(16, 16)
    shared(shared(x)).sum().backward()
    expected = [p.grad for p in shared.parameters()]
    for name in ("bf16", "fp16", "int8", "fp8", "fp32"):
        shared.zero_grad()
        with steered(nn.Sequential(shared), name):
            shared(shared(x)).float().sum().backward()
        assert_near([p.grad for p in shared.parameters()], expected, 0.1)  # type: ignore[misc, arg-type]


# ---- what is a subclass, a wrapper, a container ----


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
def test_subclass_keeps_super_isinstance_and_its_own_attributes(name: str) -> None:
    layer, x = Scaled(8, 8), torch.randn(4, 8)
    plain = layer(x)
    with steered(nn.Sequential(layer), name):
        output = layer(x)
    assert layer.calls == 2
    assert_near([output], [plain], 2.0**-6)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
        lambda layer: nn.utils.prune.random_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "pruned"],
)
def test_reparametrized_and_pruned_layers_train_their_own_parameters(name: str, wrap: Callable[..., nn.Module]) -> None:
    layer, x = wrap(nn.Linear(16, 16)).eval(), torch.randn(16, 16)
    plain, expected = run(layer, [x])
    with steered(nn.Sequential(layer), name):
        outputs, gradients = run(layer, [x])
    assert_near(outputs, plain, 2.0**-6)
    assert_near(gradients, expected, 2.0**-4)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_pruned_layer_in_8_bits_keeps_its_zeros(name: str) -> None:
    layer, x = nn.utils.prune.random_unstructured(nn.Linear(16, 16), "weight", 0.5), torch.randn(16, 16)
    with steered(nn.Sequential(layer), name):
        layer(x).float().pow(2).sum().backward()
    weight: Any = layer.weight_orig
    mask: Any = layer.weight_mask
    assert weight.grad is not None
    assert torch.equal(weight.grad != 0, mask != 0)


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "fp8", "fp32"])
def test_peft_adapters_and_their_frozen_base_run_in_formats(name: str) -> None:
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    net = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0", "2"], r=16, init_lora_weights=False))
    classes, x = [type(m) for m in net.modules()], torch.randn(16, 16)
    plain = net(x)
    with steered(net, name):
        output = net(x)
        output.float().sum().backward()
    assert float((output.float() - plain).norm()) <= (0.15 if name != "fp32" else 0.0) * float(plain.norm())
    assert [type(m) for m in net.modules()] == classes
    for parameter in net.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return self.act(y[0] if isinstance(y, tuple) else y)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "tf32"])
def test_block_of_one_layer_runs_as_the_layer_does(name: str) -> None:
    torch.manual_seed(0)
    alone, x = nn.Sequential(*(Block(nn.Linear(16, 16)) for _ in range(2))), torch.randn(16, 16)
    with steered(alone, name):
        expected = alone(x)
    with steered(alone, name, granularity="block"):
        assert torch.equal(alone(x), expected)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("make", [lambda: nn.LSTM(16, 16), lambda: nn.RNNCell(16, 16), lambda: nn.Conv1d(3, 3, 1)])
def test_block_of_another_layer_runs_as_the_layer_does(name: str, make: Make) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Block(make()), Block(make()))
    x = torch.randn(3, 16).to(BF16)
    with steered(net, name):
        expected = net(x)
    with steered(net, name, granularity="block"):
        assert torch.equal(net(x), expected)


# ---- a module stays what it is ----

FORMATS_OF_A_LINEAR = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")


@pytest.mark.parametrize("name", FORMATS_OF_A_LINEAR)
def test_a_steered_layer_looks_like_itself(name: str) -> None:
    layer = nn.Linear(16, 16)
    net = nn.Sequential(layer, nn.ReLU())
    parameters = list(net.named_parameters())
    before = repr(net), list(net.state_dict()), inspect.signature(layer.forward), inspect.signature(type(layer))
    with steered(net, name):
        assert isinstance(layer, nn.Linear)
        assert issubclass(type(layer), nn.Linear)
        assert (type(layer).__name__, type(layer).__module__) == ("Linear", nn.Linear.__module__)
        assert type(layer).__doc__ == nn.Linear.__doc__
        seen = repr(net), list(net.state_dict()), inspect.signature(layer.forward), inspect.signature(type(layer))
        assert seen == before
        assert all(a is b for (_, a), (_, b) in zip(net.named_parameters(), parameters, strict=True))
    assert type(layer) is nn.Linear
    assert "_autoprec" not in vars(layer)


def test_hooks_run_once_and_see_what_the_layer_takes_and_returns() -> None:
    layer, seen = nn.Linear(16, 16), []
    layer.register_forward_pre_hook(lambda m, args: seen.append(("pre", args[0].dtype)))
    layer.register_forward_hook(lambda m, args, out: seen.append(("forward", out.dtype)))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append(("backward", go[0].dtype)))
    with steered(nn.Sequential(layer), "bf16"):
        layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert seen == [("pre", torch.float32), ("forward", BF16), ("backward", BF16)]
    layer(torch.randn(4, 16))
    assert seen[3:] == [("pre", torch.float32), ("forward", torch.float32)]


def test_detach_gives_every_class_back_at_any_time() -> None:
    net = nn.Sequential(*(seeded(make) for make, _ in LAYERS.values()), nn.LayerNorm(4), nn.BatchNorm1d(4))
    classes = [type(module) for module in net.modules()]
    units = find_units(net)
    for _ in range(2):
        attach(units, Runtime("cpu"))
        attach(units, Runtime("cpu"))
        assert [type(module) for module in net.modules()] != classes
        detach(units)
        detach(units)
        assert [type(module) for module in net.modules()] == classes
        assert not any("_autoprec" in vars(module) for module in net.modules())


def test_two_layers_of_one_class_share_one_steered_class() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    units, _ = attached(net, "bf16")
    assert type(net[0]) is type(net[1])
    detach(units)


def test_outside_a_training_step_a_layer_is_untouched() -> None:
    net, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    plain = net(x)
    units, runtime = attached(net, "bf16")
    assert torch.equal(net(x), plain)
    with torch.autocast("cpu", BF16):
        assert net(x).dtype == BF16
    runtime.is_active = True
    assert torch.equal(net(x), plain)  # no autocast: nobody is in a step
    detach(units)


def test_a_region_that_the_user_protects_is_respected() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Conv1d(16, 4, 1))
    x = torch.randn(16, 16)
    plain = net(x)
    for name in FORMATS_OF_A_LINEAR:
        with steered(net, name), torch.autocast("cpu", enabled=False):
            assert torch.equal(net(x), plain)


@pytest.mark.parametrize("name", FORMATS_OF_A_LINEAR)
def test_nothing_of_the_step_stays_in_torchs_state(name: str) -> None:
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    net = nn.Sequential(nn.Linear(16, 16))
    with steered(net, name):
        net(torch.randn(16, 16))
    assert before == (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
    with pytest.raises(RuntimeError), steered(net, name):
        net(torch.randn(16, 5))
    assert before == (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
    assert type(net[0]) is nn.Linear


# ---- copies and pickles ----


class Reduced(nn.Linear):
    """Rebuilds itself through a function of its own."""

    def __reduce__(self) -> Any:
        return _rebuilt, (self.in_features, self.out_features, self.state_dict())


def _rebuilt(in_features: int, out_features: int, state: dict[str, Tensor]) -> Reduced:
    layer = Reduced(in_features, out_features)
    layer.load_state_dict(state)
    return layer


class DeepCopied(nn.Linear):
    """Copies itself as torch's parametrized modules do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepCopied:
        twin = self.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


class Slotted(nn.Linear):
    __slots__ = ("extra",)
    extra: float

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.extra


COPIED: dict[str, Make] = {
    "linear": lambda: nn.Linear(8, 6),
    "lstm": lambda: nn.LSTM(8, 6),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "subclass": lambda: Scaled(8, 6),
    "own parameter": Own,
    "own reduce": lambda: Reduced(8, 6),
    "own deepcopy": lambda: DeepCopied(8, 6),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)),
    "traced": lambda: torch.fx.symbolic_trace(nn.Bilinear(8, 8, 6)),
}


def assert_plain(module: nn.Module) -> None:
    for part in module.modules():
        assert "_autoprec" not in vars(part)
        assert "_autoprec_base" not in type(part).__dict__


@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
def test_deepcopies_come_out_plain(make: Make) -> None:
    net = nn.Sequential(seeded(make))
    plain = type(net[0])
    units, runtime = attached(net, "bf16")
    runtime.is_active = True  # a copy made inside a step
    twin = copy.deepcopy(net)
    assert_plain(twin)
    assert isinstance(net[0], plain)
    assert "_autoprec" in vars(net[0])
    for (name, value), other in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
        assert value.data_ptr() != other.data_ptr()
    detach(units)
    assert type(net[0]) is plain
    if plain.__name__ not in ("ParametrizedLinear", "Bilinear", "GraphModuleImpl"):
        assert type(twin[0]) is plain


PICKLED = {name: make for name, make in COPIED.items() if name != "weight norm"}  # torch refuses to pickle that


@pytest.mark.parametrize("make", PICKLED.values(), ids=PICKLED)
def test_pickles_come_out_plain_and_do_not_name_the_plugin(make: Make) -> None:
    net = nn.Sequential(seeded(make))
    units, _ = attached(net, "bf16")
    for protocol in (2, 4, 5):
        data = pickle.dumps(net, protocol)
        assert b"autoprec" not in data.replace(b"autoprec_test", b"")
        twin = pickle.loads(data)
        assert_plain(twin)
        for value, other in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(value, other)
    detach(units)


def test_a_module_saved_inside_a_fit_loads_where_the_plugin_is_not_installed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.LSTM(6, 4), nn.Conv1d(4, 4, 1))
    units, _ = attached(net, "bf16")
    torch.save(net, tmp_path / "net.pt")
    detach(units)
    code = (
        "import sys, torch\n"
        "sys.modules['autoprec'] = None\n"
        "net = torch.load('net.pt', weights_only=False)\n"
        "print([type(m).__name__ for m in net], net[0](torch.ones(8)).dtype)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['Linear', 'LSTM', 'Conv1d'] torch.float32"


def test_slotted_layers_are_steered_or_refused_and_come_back() -> None:
    layer = Slotted(8, 8)
    layer.extra = 2.0
    net, x = nn.Sequential(layer), torch.randn(4, 8)
    plain = net(x)
    units, runtime = find_units(net), Runtime("cpu")
    refused = attach(units, runtime)
    assert set(refused) <= {"0"}
    detach(units)
    assert type(layer) is Slotted
    assert torch.equal(net(x), plain)


def test_a_class_that_cannot_be_extended_is_refused_with_the_reason() -> None:
    class Final(nn.Linear):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            raise TypeError("Final is final")

    net = nn.Sequential(Final(4, 4), nn.Linear(4, 4))
    units = find_units(net)
    refused = attach(units, Runtime("cpu"))
    assert list(refused) == ["0"]
    assert "Final is final" in refused["0"]
    assert type(net[0]) is Final
    detach(units)
    assert type(net[1]) is nn.Linear


# ---- export, scripting, tracing ----


def test_a_restored_module_exports_scripts_and_traces() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    plain = net(x)
    with steered(net, "bf16"):
        net(x)
    exported = torch.export.export(net, (x,))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.linear.default", "aten.relu.default"]
    assert torch.equal(exported.module()(x), plain)
    for program in (torch.jit.trace(net, x), torch.jit.script(net)):
        assert torch.equal(program(x), plain)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    assert b"autoprec" not in buffer.getvalue()


def test_export_between_steps_sees_the_plain_layer() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(4, 4, 1)), torch.randn(4, 8)
    units, _ = attached(net, "bf16")
    exported = torch.export.export(net, (x,))
    assert torch.equal(exported.module()(x), net(x))
    assert not any("to" in str(node.target) for node in exported.graph.nodes)
    detach(units)


# ---- attention layers ----


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("is_training", [True, False])
def test_encoder_layer_runs_in_its_formats(name: str, is_training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(is_training)
    x = torch.randn(4, 5, 16)
    plain = layer(x)
    with steered(layer, name):
        output = layer(x)
        output.float().sum().backward()
    assert output.dtype == {"bf16": BF16, "fp16": HALF, "fp32": torch.float32}[name]
    assert_near([output], [plain], {"bf16": 0.02, "fp16": 0.002, "fp32": 1e-6}[name])
    assert layer.self_attn.out_proj.weight.grad is not None


def test_attention_is_one_unit_whose_parts_follow_it() -> None:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    with steered(nn.Sequential(layer), "bf16"):
        output, scores = layer(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.bool))
        without, nothing = layer(x, x, x, need_weights=False)
    assert output.dtype == scores.dtype == without.dtype == BF16
    assert nothing is None
    with torch.autocast("cpu", BF16):
        expected, _ = layer(x, x, x)
    assert torch.equal(output, expected)


# ---- gradient checkpointing ----


class Checkpointed(nn.Module):
    """A layer, then a checkpointed function that starts with a raw matmul of what the layer returned."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.use_reentrant = use_reentrant
        self.dtypes: list[list[torch.dtype]] = []

    def inner(self, h: Tensor) -> Tensor:
        raw = h @ h.transpose(-1, -2)
        y = self.second(torch.tanh(raw / 16))
        self.dtypes.append([h.dtype, raw.dtype, y.dtype])
        return y @ y

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.use_reentrant is None:
            return self.inner(h)
        y: Tensor = checkpoint(self.inner, h, use_reentrant=self.use_reentrant)
        return y


def checkpointed_gradients(formats: dict[str, str], use_reentrant: bool | None, dtype: torch.dtype) -> list[Tensor]:
    net, x = Checkpointed(use_reentrant), inputs([(16, 16)])[0]
    with steered(net, formats, dtype=dtype):
        net(x).float().pow(2).mean().backward()
    if use_reentrant is not None:
        assert len(net.dtypes) == 2
        assert net.dtypes[0] == net.dtypes[1]
    assert x.grad is not None
    return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, HALF])
@pytest.mark.parametrize("first", ["bf16", "fp16", "fp8", "fp32"])
@pytest.mark.parametrize("second", ["bf16", "fp16", "int8", "tf32", "fp32"])
def test_a08_recomputation_repeats_the_forward(use_reentrant: bool, dtype: torch.dtype, first: str, second: str) -> None:
    formats = {"first": first, "second": second}
    expected = checkpointed_gradients(formats, None, dtype)
    assert_equal(checkpointed_gradients(formats, use_reentrant, dtype), expected)


def test_recomputations_are_not_recorded() -> None:
    net = Checkpointed(False)
    units, runtime = attached(net, "fp16")
    runtime.is_active = runtime.is_recording = True
    with ambient("cpu", torch.float32):
        y = net(torch.randn(16, 16))
    runtime.is_recording = False
    count = len(runtime.records)
    y.float().sum().backward()
    assert count == len(runtime.records) == 2
    detach(units)


# ---- compiled ----


@pytest.fixture
def graphs() -> Any:
    """Counts compiled graphs."""

    class Counting:
        count = 0

        def __call__(self, graph: Any, example: Any) -> Any:
            self.count += 1
            return graph.forward

    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def test_a20_a_compiled_unit_is_bounded_and_settles(graphs: Any) -> None:
    net, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(16, 16)
    for layer in (net[0], net[2]):
        layer.compile(backend=graphs)
    units, runtime = attached(net, {})
    runtime.is_active = runtime.is_recording = True
    counts, rounds = [], ("bf16", "fp32", "bf16", "fp32", "bf16")
    with ambient("cpu", torch.float32):
        for name in rounds:
            for unit in units:
                set_format(unit, name)
            for _ in range(3):
                y = net(x)
                y.float().sum().backward()
            counts.append(graphs.count)
            assert y.dtype == (BF16 if name == "bf16" else torch.float32)
    runtime.is_active = False
    detach(units)
    assert graphs.count <= 2 * len(net) * 2
    assert counts[-1] <= counts[1] + 4  # formats seen before cost at most what their closures cost


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "fp8", "tf32", "fp32"])
def test_compiled_layers_compute_what_eager_ones_do(name: str, graphs: Any) -> None:
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(16, 16)
    with steered(net, name):
        eager, expected = run(net, [x])
    compiled = torch.compile(net, backend=graphs)
    with steered(net, name):
        outputs, gradients = run(net, [x])
        for _ in range(3):
            y = compiled(x)
    assert graphs.count == 1
    assert y.dtype == eager[0].dtype
    assert_near([y], eager, 2.0**-6)
    assert_near(gradients, expected, 2.0**-6)


# ---- norms, clamping, records ----


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(16), lambda: nn.GroupNorm(4, 16), lambda: nn.RMSNorm(16)])
def test_norms_in_fp32_widen_and_named_ones_return_their_format(make: Make) -> None:
    layer, x = make(), torch.randn(4, 16, 3).to(BF16) if isinstance(make(), nn.GroupNorm) else torch.randn(4, 16).to(BF16)
    wide = layer(x.float())
    for name, dtype in (("fp32", torch.float32), ("bf16", BF16), ("fp16", HALF)):
        with steered(nn.Sequential(layer), name):
            output = layer(x)
        assert output.dtype == dtype
        assert_near([output], [wide], 2.0**-6)


def test_batch_norm_statistics_stay_float32() -> None:
    layer, x = nn.BatchNorm1d(16), torch.randn(8, 16).to(BF16)
    with steered(nn.Sequential(layer), "bf16"):
        assert layer(x).dtype == BF16
    assert layer.running_mean is not None
    assert layer.running_mean.dtype == torch.float32
    assert torch.allclose(layer.running_mean, 0.1 * x.float().mean(0), atol=1e-5)


@pytest.mark.parametrize(("name", "is_clamped"), [("fp16", True), ("fp8", True), ("int8", True), ("fp32", False)])
def test_clamp_limits_what_low_formats_return(name: str, is_clamped: bool) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(16, 16) * 100
    with steered(nn.Sequential(layer), name, clamp=3.0):
        output = layer(x)
    assert (float(output.abs().max()) <= 3.0) == is_clamped


@pytest.mark.parametrize("name", ["fp16", "fp8", "int8"])
def test_formats_that_can_overflow_record_the_range_of_what_they_return(name: str) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(16, 16)
    with steered(nn.Sequential(layer), name) as runtime:
        output = layer(x)
    (record,) = runtime.records
    assert (record.name, record.is_input, record.numel) == ("0", False, 256)
    assert record.bounds.tolist() == [float(output.min()), float(output.max())]


def test_other_formats_record_only_on_demand() -> None:
    net, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(16, 16)
    with steered(net, "bf16") as runtime:
        net(x)
        assert not runtime.records
        runtime.records_all = runtime.records_inputs = True
        net(x)
        assert [(r.name, r.is_input) for r in runtime.records] == [("0", True), ("0", False)]
        runtime.is_recording = False
        net(x)
        assert len(runtime.records) == 2


def test_fp16_overflow_is_an_inf_in_the_output_and_on_record() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    with steered(nn.Sequential(layer), "fp16") as runtime:
        output = layer(torch.full((2, 4), 30000.0))
    assert torch.isinf(output).all()
    assert not torch.isfinite(runtime.records[0].bounds).all()
