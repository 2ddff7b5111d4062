"""Layers in bf16, fp16 and fp32 against ``torch.autocast``; fallbacks for subclasses and wrappers; norms and records.

Time budget: 20 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

from autoprec import AutoPrecisionCallback
from autoprec.formats import FP16
from tests.steered import (
    BF16,
    HALF,
    LAYERS,
    TORCH_REMARKS,
    Make,
    Scaled,
    Shapes,
    assert_equal,
    assert_near,
    every_layer,
    in_format,
    inputs,
    run,
    seeded,
    steered,
    tensors,
    under_autocast,
)
from tests.support import Task, cpu, fp16cpu

pytestmark = TORCH_REMARKS

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


# ---- a whole fit ----


class Mixed(nn.Module):
    """Layers of several kinds, raw operations between them, a loss in autocast's list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(1, 4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x[:, None]).transpose(1, 2).relu()
        h = h + self.attention(h, h, h)[0]
        scores = h @ h.transpose(1, 2)
        y: Tensor = self.head((scores @ h).mean(1))
        return y


def fitted(**trainer: Any) -> tuple[dict[str, Tensor], Task]:
    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return F.cross_entropy(net(batch), torch.arange(len(batch)) % 3)

    module = Task(Mixed(), inputs([(64, 10)])[0].detach(), 8, loss=loss)
    cpu(**trainer).fit(module)
    return module.state_dict(), module


def fixed(name: str) -> AutoPrecisionCallback:
    return AutoPrecisionCallback(policy=f"fixed:{name}", knobs=("precision", "loss_scale"), verbose=False)


@pytest.mark.parametrize("base", ["32-true", "bf16-mixed"])
def test_a_fit_in_bf16_is_bf16_mixed_bit_for_bit(base: str) -> None:
    found, _ = fitted(callbacks=[fixed("bf16")], precision=base)
    expected, _ = fitted(precision="bf16-mixed")
    plain, _ = fitted()
    assert_equal(list(found.values()), list(expected.values()))
    assert not torch.equal(found["net.head.weight"], plain["net.head.weight"])


def test_a_fit_in_fp32_under_bf16_mixed_is_32_true_bit_for_bit() -> None:
    found, _ = fitted(callbacks=[fixed("fp32")], precision="bf16-mixed")
    expected, _ = fitted()
    assert_equal(list(found.values()), list(expected.values()))


def test_a_fit_in_fp16_is_16_mixed_to_the_rounding() -> None:
    scaler = {"plugins": fp16cpu(256.0)}
    found, _ = fitted(callbacks=[fixed("fp16")], **scaler)
    expected, _ = fitted(plugins=fp16cpu(256.0))
    assert_near(list(found.values()), list(expected.values()), 5e-3)


class Spectral(nn.Module):
    """A complex weight between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight, n=16)
        return y


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_a_complex_weight_trains_between_low_layers(name: str) -> None:
    net = nn.Sequential(nn.Linear(16, 16), Spectral(), nn.Linear(16, 4))
    before = net.get_parameter("1.weight").detach().clone()
    ap = AutoPrecisionCallback(policy=f"fixed:{name}", verbose=False)
    cpu(callbacks=[ap], gradient_clip_val=1.0).fit(Task(net, torch.randn(40, 16), 4))
    after = net.get_parameter("1.weight").detach()
    assert ap.applied_steps >= 9  # the first loss scale may be one too high
    assert after.dtype == torch.complex64
    assert not torch.equal(after, before)
    assert torch.isfinite(torch.view_as_real(after)).all()
    assert ap.precision_map()["net.0"] == ap.precision_map()["net.2"] == name


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
        lambda layer: prune.random_unstructured(layer, "weight", 0.5),
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
    layer, x = prune.random_unstructured(nn.Linear(16, 16), "weight", 0.5), torch.randn(16, 16)
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
    plain = net(x).detach()
    with steered(net, name):
        output = net(x)
        output.float().sum().backward()
    difference = output.detach().float() - plain
    assert float(difference.norm()) <= (0.15 if name != "fp32" else 0.0) * float(plain.norm())
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


# ---- norms, clamping, records ----


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(16), lambda: nn.GroupNorm(4, 16), lambda: nn.RMSNorm(16)])
def test_norms_in_fp32_widen_and_named_ones_return_their_format(make: Make) -> None:
    layer, x = (
        make(),
        torch.randn(4, 16, 3).to(BF16) if isinstance(make(), nn.GroupNorm) else torch.randn(4, 16).to(BF16),
    )
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
    assert bool((output.abs() <= 3.0).all()) == is_clamped


@pytest.mark.parametrize("name", ["fp16", "fp8", "int8"])
def test_formats_that_can_overflow_record_the_range_of_what_they_return(name: str) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(16, 16)
    with steered(nn.Sequential(layer), name) as runtime:
        output = layer(x)
    (record,) = runtime.records
    assert (record.name, record.is_input) == ("0", False)
    assert record.bounds.tolist() == [output.min().item(), output.max().item()]


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
