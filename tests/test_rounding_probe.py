"""What the probe says that rounding would do is what rounding does.

Time budget: 30 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

from autoprec.formats import BF16, E4M3, FORMATS, FP16, FP32, INT8, TF32, get_format
from autoprec.layers import detach
from autoprec.ops.reference import round_fp8, round_int8
from autoprec.planning import UnitErrors
from autoprec.rounding_probe import RoundingProbe
from autoprec.what_if import SAMPLE, expected_error, output_format, rounded, take_rows, take_sample
from tests.small_fits import clone, differences
from tests.steered import attached, steered

TRIED = ("fp32", "bf16", "fp16", "fp8", "int8")


def note_step(probe: RoundingProbe, root: nn.Module, optimizer: Optimizer, factor: float = 1.0) -> None:
    trained = [parameter for parameter in root.parameters() if parameter.grad is not None]
    grads = [parameter.grad for parameter in trained if parameter.grad is not None]
    probe.note_step(trained, grads, factor, optimizer)


def probed(
    root: nn.Module,
    losses: Sequence[Callable[[], Tensor]],
    optimizer: Optimizer | None = None,
    formats: Sequence[str] = TRIED,
    is_compiled: bool = False,
    **options: Any,
) -> dict[str, UnitErrors]:
    """Errors of all units after one window with so many micro-batches."""
    units, _ = attached(root, {})
    probe = RoundingProbe(units, lambda: False)
    settings = {"inv_scale": 1.0, "scale": 1.0, "headroom_bits": 0.0, **options}
    probe.begin_window({u.name: [f for f in formats if f in u.legal] for u in units if u.reason is None}, **settings)
    root.zero_grad()
    for loss in losses:
        with probe.region(is_compiled):
            value = loss()
        (value / len(losses) / settings["inv_scale"]).backward()
    note_step(probe, root, optimizer or SGD(root.parameters(), lr=0.1), settings["inv_scale"])
    probe.commit()
    detach(units)
    assert not any(module._forward_hooks for module in root.modules())
    return probe.errors


# rounding of samples


@pytest.mark.parametrize("name", list(FORMATS))
def test_samples_are_rounded_as_tensors_are(name: str) -> None:
    x = torch.randn(40, 24) * 3
    number_format = get_format(name)
    expected = {"fp8": round_fp8(torch.float8_e4m3fn)(x), "int8": round_int8(x)}.get(name)
    expected = number_format.round(x) if expected is None else expected
    assert torch.equal(rounded(x, x.abs().amax(), number_format), expected)


def test_a_sample_is_even_and_bounded() -> None:
    small = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(take_rows(small), small)
    large = torch.randn(4096, 64)
    large[7, 3] = -99.0
    sample = take_sample(large)
    assert SAMPLE / 2 < sample.values.numel() <= 2 * SAMPLE
    assert sample.ratio * sample.values.numel() == large.numel()
    assert float(sample.amax) == 99.0, "the range is that of the whole tensor"
    assert take_sample(torch.tensor(2.0)).values.tolist() == [[2.0]]


@pytest.mark.parametrize("number_format", [TF32, BF16, FP16, E4M3, INT8])
def test_expected_errors_are_those_of_ordinary_values(number_format: Any) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    error = rounded(x, x.abs().amax(), number_format) - x
    measured = float(error.square().sum().sqrt() / x.square().sum().sqrt())
    assert measured == pytest.approx(expected_error(number_format), rel=0.25)


def test_fp32_loses_nothing() -> None:
    assert expected_error(FP32) == 0.0
    assert output_format(TF32) is FP32
    assert output_format(INT8) is BF16


# sums


def test_both_scores_of_a_single_layer() -> None:
    """Its input is such that bf16 can hold it, so that outputs, weights and biases are all that is rounded."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4), torch.randn(16, 8).bfloat16().float()
    (errors,) = probed(nn.Sequential(layer), [lambda: layer(x).square().mean()]).values()
    y = layer(x)
    (g,) = torch.autograd.grad(y.square().mean(), y)
    pairs = [(parameter.detach(), parameter.grad) for parameter in layer.parameters()]
    first_order, second_order = [], []
    for value, gradient in ((y.detach(), g), *pairs):
        assert gradient is not None
        product = gradient * (value.bfloat16().float() - value)
        first_order.append(float(product.sum()))
        second_order.append(float(product.square().sum()))
    assert errors.formats["bf16"].taylor == pytest.approx(abs(first_order[0]) + abs(sum(first_order[1:])), rel=1e-4)
    assert errors.formats["bf16"].fisher == pytest.approx(16 / 2 * sum(second_order), rel=1e-4)
    assert errors.formats["fp32"].fisher == errors.formats["fp32"].taylor == 0.0


def test_micro_batches_and_loss_scale_do_not_show() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(32, 16)
    whole = probed(net, [lambda: net(x).square().mean()])
    parts = probed(net, [lambda: net(x[:16]).square().mean(), lambda: net(x[16:]).square().mean()], inv_scale=2.0**-8)
    for name in whole:
        assert parts[name].multiplications == whole[name].multiplications > 0
        for each in ("bf16", "fp16"):  # fp8 and int8 are scaled by the amax of each tensor
            assert parts[name].formats[each].fisher == pytest.approx(whole[name].formats[each].fisher, rel=1e-4)


def test_gradient_errors_are_those_of_a_layer_in_the_format() -> None:
    """The weight gradient of a layer that runs in the format is as far off as the probe says, in fp8 by far."""
    torch.manual_seed(0)
    net, x, target = nn.Sequential(nn.Linear(64, 64)), torch.randn(64, 64), torch.randn(64, 64)

    def loss() -> Tensor:
        return nn.functional.mse_loss(net(x).float(), target)

    (errors,) = probed(net, [loss]).values()
    exact = clone(net[0].weight.grad)
    for name in ("bf16", "fp8"):
        net.zero_grad()
        with steered(net, name):
            value = loss()
        value.backward()
        off = float((clone(net[0].weight.grad) - exact).norm() / exact.norm())
        assert errors.formats[name].own_gradient == pytest.approx(off, rel=0.5), name


@pytest.mark.parametrize("steps", [0, 3])
def test_share_of_the_update(steps: int) -> None:
    """For Adam it is what the newest gradient contributes, relative to the weights; a change of it moves as much."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8, bias=False)), torch.randn(32, 8)
    adam = Adam(net.parameters(), lr=0.01)
    for _ in range(steps):
        adam.zero_grad()
        net(x).square().mean().backward()
        adam.step()
    (errors,) = probed(net, [lambda: net(x).square().mean()], adam, formats=("fp32", "bf16")).values()
    weight = net[0].weight
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is not None
    if steps:
        state = adam.state[weight]
        scale = (state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8
    else:
        scale = weight.grad.abs() + 1e-8
    expected = 0.01 * (1 - 0.9) * float((weight.grad / scale).norm() / weight.detach().norm())
    assert errors.update_share == pytest.approx(expected, rel=1e-4)


# what cannot be used


def test_a_layer_whose_output_overflows_is_barred_from_fp16_alone() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(16, 8)
    with torch.no_grad():
        net[1].weight.mul_(2e6)  # type: ignore[operator]
    errors = probed(net, [lambda: net(x).square().mean()])
    assert "no headroom in fp16" in errors["1"].reasons["fp16"]
    assert list(errors["1"].formats) == ["fp32", "bf16", "int8"]
    assert not errors["3"].reasons
    assert not errors["0"].reasons


@pytest.mark.parametrize(("scale", "is_barred"), [(1.0, True), (2.0**16, False)])
def test_a_layer_with_tiny_gradients_is_barred_from_fp16_alone(scale: float, is_barred: bool) -> None:
    """A loss scale brings them back into the range."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(16, 16)
    errors = probed(net, [lambda: net(x).square().mean() * 1e-7], scale=scale)
    assert ("fp16" in errors["1"].reasons) == is_barred
    assert set(errors["1"].formats) >= {"fp32", "bf16", "int8"}


def test_headroom_is_kept() -> None:
    net, x = nn.Sequential(nn.Linear(8, 2)), torch.ones(4, 8) * 20000.0
    assert not probed(net, [lambda: net(x).mean()], headroom_bits=1.0)["0"].reasons
    assert "fp16" in probed(net, [lambda: net(x).mean()], headroom_bits=2.0)["0"].reasons


def test_values_that_are_not_finite_leave_fp32_alone_out() -> None:
    net, x = nn.Sequential(nn.Linear(4, 2)), torch.full((4, 4), math.nan)
    assert not probed(net, [lambda: net(x).mean()])["0"].formats


# kinds of layers


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.rows = nn.Embedding(50, 16, sparse=True)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.idle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.rows(ids)
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x, _ = self.rnn(x)
        x, _ = self.attention(x, x, x)
        out: Tensor = self.head(x)
        return out


def test_kinds_of_layers() -> None:
    torch.manual_seed(0)
    net, ids = Kinds(), torch.randint(50, (4, 6))
    errors = probed(net, [lambda: net(ids).square().mean()])
    assert not errors["idle"].formats
    for name in ("table", "rows", "conv", "rnn", "attention", "head"):
        assert 0 < errors[name].formats["bf16"].fisher < 1.0, name
        assert errors[name].formats["fp16"].fisher < errors[name].formats["bf16"].fisher, name
        assert errors[name].update_share > 0, name


def test_frozen_layers_count_through_their_outputs() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(16, 8)
    for frozen in (net[0], net[2]):
        frozen.requires_grad_(False)
    assert not probed(net, [lambda: net(x).square().mean()])["0"].formats, "nothing flows back to it"
    net[0].requires_grad_(True)
    errors = probed(net, [lambda: net(x).square().mean()])["2"]
    assert errors.formats["bf16"].fisher > 0
    assert errors.update_share == 0.0
    with_gradient = net.requires_grad_(True)
    trained = probed(with_gradient, [lambda: net(x).square().mean()])["2"]
    assert errors.formats["bf16"].fisher == pytest.approx(trained.formats["bf16"].fisher, rel=1.0)


def test_checkpointed_forwards_and_hooks_of_the_user() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(16, 8)
    seen: list[int] = []
    handle = net[0].register_forward_hook(lambda *_: seen.append(1))

    def loss() -> Tensor:
        out: Tensor = checkpoint(net, x, use_reentrant=False)
        return out.square().mean()

    loss().backward()
    plain = [clone(parameter.grad) for parameter in net.parameters()]
    units, _ = attached(net, {})
    probe = RoundingProbe(units, lambda: False)
    probe.begin_window({unit.name: ("fp32", "bf16") for unit in units}, 1.0, 1.0, 0.0)
    net.zero_grad()
    with probe.region(is_compiled=False):
        value = loss()
    value.backward()
    note_step(probe, net, SGD(net.parameters(), lr=0.1))
    probe.commit()
    assert not differences([parameter.grad for parameter in net.parameters()], plain)
    assert probe.errors["0"].formats["bf16"].fisher > 0
    assert seen == [1] * 4
    handle.remove()
    detach(units)


class Table(nn.Module):
    """Returns its parameter, which must not keep a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> Tensor:
        weight: Tensor = self.weight
        return weight


def test_parameters_and_batched_tensors() -> None:
    torch.manual_seed(0)
    table, layer, x = Table(), nn.Linear(4, 4), torch.randn(6, 4)
    net = nn.ModuleList([table, layer])

    def loss() -> Tensor:
        rows: Tensor = torch.func.vmap(layer)(x)
        value: Tensor = (rows @ table()).square().mean() + layer(x).square().mean()
        return value

    errors = probed(net, [loss], formats=("fp32", "bf16"))
    assert table.weight._backward_hooks is None or not table.weight._backward_hooks
    assert errors["1"].elements == 24
    assert errors["0"].formats["bf16"].fisher > 0


def test_under_the_compiler_weights_alone_are_looked_at() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(16, 8)
    whole = probed(net, [lambda: net(x).square().mean()])["2"].formats["bf16"]
    weights = probed(net, [lambda: net(x).square().mean()], is_compiled=True)["2"]
    assert weights.elements == 0
    assert 0 < weights.formats["bf16"].fisher < whole.fisher
    assert weights.formats["bf16"].passed_gradient == pytest.approx(whole.passed_gradient, rel=0.5)


# errors relative to the centred tensors


def test_the_error_of_a_unit_is_the_largest_of_its_tensors_without_their_means() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False)
    for mean in (0.0, 30.0, 300.0):
        x = torch.randn(64, 8) + mean
        (errors,) = probed(nn.Sequential(layer), [lambda x=x: layer(x).square().mean()], formats=TRIED).values()  # type: ignore[misc]
        y = layer(x).detach()
        (g,) = torch.autograd.grad(layer(x).square().mean(), layer.weight)
        for name, inner in (("bf16", BF16), ("fp16", FP16)):
            tensors = [x, y, layer.weight.detach()]
            expected = max(
                float((rounded(t, t.abs().amax(), inner) - t).norm() / (t - t.mean()).norm()) for t in tensors
            )
            assert errors.relative[name] == pytest.approx(expected, rel=0.05), (name, mean)
        assert errors.relative["fp32"] == 0.0
        assert errors.gradient_amax >= float(g.abs().amax())


def test_the_error_is_two_where_a_tensor_does_not_fit_and_none_where_all_values_are_alike() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False)
    x = torch.full((16, 8), 40.0)
    (errors,) = probed(nn.Sequential(layer), [lambda: layer(x).sum() * 1e-3], formats=TRIED).values()
    assert 0 < errors.relative["bf16"] < 0.01, "that of outputs and weights; the input has no signal to lose"
    (errors,) = probed(nn.Sequential(layer), [lambda: layer(x * 2000).sum() * 1e-3], formats=TRIED).values()
    assert errors.relative["fp16"] == 2.0
    assert errors.relative["bf16"] < 0.01
    (errors,) = probed(nn.Sequential(layer), [lambda: layer(x * math.inf).sum()], formats=TRIED).values()
    assert set(errors.relative.values()) == {2.0}


def test_without_a_gradient_the_tensors_of_the_forward_count() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 4).requires_grad_(False), nn.Linear(4, 4)), torch.randn(16, 8) + 50.0
    errors = probed(net, [lambda: net(x).square().mean()], formats=("fp32", "bf16"))
    assert errors["0"].formats == {}, "no plan rests on it"
    assert errors["0"].relative["bf16"] > 0.05
    assert math.isnan(errors["0"].gradient_amax)


# what is known of a format that the layer already runs in


def test_a_format_in_use_is_not_taken_for_free_of_errors() -> None:
    """Where outputs are in bf16 already, nothing is left to round; the errors measured before that go on counting."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(64, 32)
    units, _ = attached(net, {})
    probe = RoundingProbe(units, lambda: False)

    def window(dtype: torch.dtype) -> dict[str, float]:
        probe.begin_window({unit.name: ("fp32", "bf16", "fp16") for unit in units}, 1.0, 1.0, 0.0)
        net.zero_grad()
        with probe.region(is_compiled=False), torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            value = net(x.to(dtype)).float().square().mean()
        value.backward()
        note_step(probe, net, SGD(net.parameters(), lr=0.1))
        probe.commit()
        return {f"{name}.{each}": e.formats[each].fisher for name, e in probe.errors.items() for each in e.formats}

    wide, low = window(torch.float32), window(torch.bfloat16)
    state = probe.state_dict()
    fresh = RoundingProbe(units, lambda: False)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert fresh.errors == probe.errors
    for name, value in wide.items():
        assert low[name] == pytest.approx(value, rel=0.5), name
    probe._relative.clear()  # a run that begins in bf16
    for name, value in window(torch.bfloat16).items():
        assert value == pytest.approx(wide[name], rel=0.8), name
    detach(units)


# against the loss itself


def test_ranks_units_and_formats_as_the_loss_does() -> None:
    """After training, the divergence of the outputs when one unit alone is rounded, for all units and formats.

    The expected increase of a log-likelihood is the KL divergence, which has no first-order noise to hide it.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    )
    teacher = nn.Linear(16, 16)
    adam = Adam(net.parameters(), lr=3e-3)

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(512, 16)
        return x, (3 * teacher(x) + torch.randn(512, 16)).argmax(dim=1)

    for _ in range(150):
        x, y = batch()
        adam.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        adam.step()
    x, y = batch()
    errors = probed(net, [lambda: nn.functional.cross_entropy(net(x), y)], adam)
    with torch.no_grad():
        exact = net(x).log_softmax(dim=1)
    rows = []
    for name, unit in errors.items():
        for each in ("bf16", "fp8", "int8"):
            with steered(net, {**dict.fromkeys(errors, "fp32"), name: each}), torch.no_grad():
                low = net(x).float().log_softmax(dim=1)
            kl = nn.functional.kl_div(low.double(), exact.double(), reduction="batchmean", log_target=True)
            rows.append(
                (float(kl), unit.formats[each].fisher, unit.formats[each].taylor, unit.formats[each].loss_divergence)
            )
    measured, fisher, taylor, divergence = np.array(rows).T
    assert spearmanr(measured, fisher).statistic > 0.85
    assert spearmanr(measured, taylor).statistic > 0.7
    assert spearmanr(measured, divergence).statistic > 0.8
    assert np.exp(np.abs(np.log(measured / fisher)).mean()) < 5.0, "the expected increase is the measured one"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_samples_are_taken_under_autocast_of_any_layer(dtype: torch.dtype) -> None:
    x = torch.tensor([[-3.0, 2.0, 0.5, 1.0]]).to(dtype)
    for autocast in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=autocast):
            sample = take_sample(x)
        assert sample.amax.dtype is torch.float32
        assert float(sample.amax) == 3.0
