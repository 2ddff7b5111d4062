"""Layers in tf32, fp8 and int8 against fp64 on the same rounded operands, and inputs at the edge.

Time budget: 15 s.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec import ops
from autoprec.formats import TF32
from autoprec.ops import quantize_rows
from autoprec.ops.reference import round_fp8
from tests.steered import (
    BF16,
    LAYERS,
    TORCH_REMARKS,
    Make,
    Shapes,
    assert_near,
    inputs,
    run,
    seeded,
    steered,
)

pytestmark = TORCH_REMARKS

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


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The inputs of int8 layers that went to the kernel."""
    calls: list[Tensor] = []

    def int8_linear(x: Tensor, *args: Any) -> Tensor:
        calls.append(x)
        return ops.int8_linear(x, *args)

    monkeypatch.setattr("autoprec.runners.int8_linear", int8_linear)
    return calls


class Tagged(torch.Tensor):
    """Another library's tensor, whose memory need not be where it says."""


@pytest.mark.parametrize("has_bias", [True, False])
def test_int8_linear_layers_run_the_kernel_and_equal_its_specification(
    kernel_calls: list[Tensor], has_bias: bool
) -> None:
    layer, x = nn.Linear(24, 16, bias=has_bias), torch.randn(5, 24)
    with steered(nn.Sequential(layer), "int8"):
        output = layer(x)
        assert len(kernel_calls) == 1
        assert torch.equal(output, ops.linear(x, layer.weight, layer.bias, "int8"))
        with torch.no_grad():
            assert torch.equal(layer(x), output)
        assert len(kernel_calls) == 2
        assert torch.equal(layer(x.as_subclass(Tagged)).as_subclass(Tensor), output)
        assert torch.equal(torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)), output)
    assert len(kernel_calls) == 3


def test_int8_leaves_the_kernel_out_where_it_cannot_be_traced(kernel_calls: list[Tensor]) -> None:
    layer, x = nn.Linear(24, 16), torch.randn(5, 24)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with steered(nn.Sequential(layer), "int8"):
        output = compiled(x)
        assert not kernel_calls
        assert torch.equal(output, layer(x))
        kernel_calls.clear()
        torch.func.vmap(layer)(torch.randn(3, 5, 24))
        assert not kernel_calls
    torch._dynamo.reset()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_int8_keeps_no_quantised_weight_over_a_checkpointed_forward(use_reentrant: bool) -> None:
    layer = nn.Linear(24, 16)
    results = []
    with steered(nn.Sequential(layer), "int8"):
        for run in (layer, functools.partial(checkpoint, layer, use_reentrant=use_reentrant)):
            kept: set[torch.dtype] = set()
            x = torch.linspace(-1, 1, 120).reshape(5, 24).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, kept=kept: kept.add(tensor.dtype) or tensor,  # type: ignore[misc]
                lambda tensor: tensor,
            ):
                output = run(x)
            layer.zero_grad()
            output.float().square().sum().backward()
            results.append((kept, [t.grad for t in (x, *layer.parameters()) if t.grad is not None]))
    (plain_kept, plain), (kept, found) = results
    assert torch.int8 in plain_kept
    assert len(found) == len(plain) == 3
    assert torch.int8 not in kept
    assert all(map(torch.equal, found, plain))


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
    parameters: dict[str, Tensor] = dict(net.named_parameters())
    x = torch.randn(16, 16)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(net, parameters, (x,))
        return output.float().pow(2).mean()

    expected = torch.func.grad(loss)(parameters)
    with steered(net, name):
        found = torch.func.grad(loss)(parameters)
        assert torch.func.vmap(net)(torch.randn(3, 16, 16)).shape == (3, 16, 16)
    for key, value in expected.items():
        difference = found[key].detach() - value.detach()
        assert float(difference.norm()) < 0.2 * float(value.detach().norm())


@pytest.mark.parametrize("name", ["tf32", "fp8", "int8"])
def test_nested_inputs_run_in_the_compute_dtype(name: str) -> None:
    layer, rows = nn.Linear(16, 16), [torch.randn(3, 16), torch.randn(13, 16)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with steered(nn.Sequential(layer), name):
        output = layer(x)
        dense = layer(torch.cat(rows))
    assert output.is_nested
    assert output.dtype is dense.dtype
    assert torch.allclose(output.values().float(), dense.float(), atol=0.2)
    output.values().float().sum().backward()
    assert layer.weight.grad is not None


def test_fp8_fit_of_two_layers_matches_torchaos_converted_model() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    theirs: Any = convert_to_float8_training(copy.deepcopy(net), config=Float8LinearConfig(emulate=True))
    x = torch.randn(32, 32)
    with steered(net, "fp8"):
        outputs, gradients = run(net, [x])
    # torchao knows autocast on a GPU only; bf16 inputs have the same effect
    expected, expected_gradients = run(theirs, [x.to(BF16)])
    assert_near(outputs, expected, 2.0**-7)
    assert_near(gradients, expected_gradients, 2.0**-7)
