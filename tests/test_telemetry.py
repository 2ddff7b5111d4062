"""What is measured while a model trains: norms, samples, compute, windows that roll.

Time budget: 10 s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.layers import Record
from autoprec.telemetry import WINDOW, Telemetry
from autoprec.units import find_units
from tests.steered import steered
from tests.wrapped_tensors import Wrapped


def made(*sizes: int) -> tuple[nn.Sequential, Telemetry]:
    net = nn.Sequential(*(nn.Linear(size, size) for size in sizes))
    return net, Telemetry(find_units(net))


def note(telemetry: Telemetry, net: nn.Module, total: float = 1.0, clipped: bool = False, scale: float = 1.0) -> None:
    parameters = [parameter for parameter in net.parameters() if parameter.grad is not None]
    norms = torch.tensor([float(parameter.grad.norm()) for parameter in parameters if parameter.grad is not None])
    telemetry.note_applied(parameters, norms, total, clipped, scale)


# ---- per step ----


def test_norms_are_per_unit_and_global() -> None:
    net, telemetry = made(2, 2)
    for parameter in net[0].parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    note(telemetry, net, total=12.0)
    assert telemetry.norms[-1] == 12.0
    assert not telemetry.units["0"].norms  # still on the device
    telemetry.flush()
    assert list(telemetry.units["0"].norms) == pytest.approx([3.0 * math.sqrt(6)])
    assert not telemetry.units["1"].norms


def test_parameters_outside_all_units_count_in_the_global_norm_only() -> None:
    net, telemetry = made(2)
    stranger = nn.Parameter(torch.zeros(2))
    telemetry.note_applied([stranger, net.get_parameter("0.weight")], torch.tensor([5.0, 2.0]), 7.0, False, 1.0)
    telemetry.flush()
    assert list(telemetry.units["0"].norms) == [2.0]
    assert list(telemetry.norms) == [7.0]


def test_losses_wait_on_the_device_and_keep_no_graph() -> None:
    _, telemetry = made(2)
    weight = nn.Parameter(torch.tensor(2.0))
    telemetry.note_loss(weight * 3)
    telemetry.note_loss(torch.tensor([1.0, 2.0]).bfloat16())
    assert not any(loss.requires_grad for loss in telemetry._pending_losses)
    telemetry.flush()
    telemetry.flush()
    assert list(telemetry.losses) == [6.0, 1.5]


def test_a_loss_of_another_library_is_read_at_once() -> None:
    _, telemetry = made(2)
    for loss in (torch.tensor(3.0), torch.tensor([1.0, 2.0]).bfloat16()):
        telemetry.note_loss(Wrapped(loss))
    assert {type(loss) for loss in telemetry._pending_losses} == {Tensor}
    telemetry.flush()
    assert list(telemetry.losses) == [3.0, 1.5]


def test_windows_roll() -> None:
    net, telemetry = made(1)
    net[0].weight.grad = torch.ones(1, 1)
    for step in range(3 * WINDOW):
        telemetry.note_loss(torch.tensor(float(step)))
        note(telemetry, net, total=float(step), clipped=step % 2 == 0)
        telemetry.note_skipped()
    telemetry.flush()
    assert len(telemetry.losses) == len(telemetry.norms) == len(telemetry.units["0"].norms) == WINDOW
    assert telemetry.losses[-1] == telemetry.norms[-1] == 3 * WINDOW - 1
    assert sum(telemetry.outcomes) == WINDOW / 2
    assert sum(telemetry.clipped) == WINDOW / 2


@pytest.mark.parametrize(
    ("norms", "median"), [([], math.nan), ([3.0], 3.0), ([3.0, 1.0], 2.0), ([1.0, 100.0, 2.0], 2.0)]
)
def test_median_norm(norms: list[float], median: float) -> None:
    _, telemetry = made(1)
    telemetry.norms.extend(norms)
    assert telemetry.median_norm == pytest.approx(median, nan_ok=True)


# ---- samples of gradients ----


def sample_gradients(
    telemetry: Telemetry,
    net: nn.Module,
    formats: dict[str, tuple[str, str | None]],
    scale: float = 1.0,
    factor: float = 1.0,
) -> None:
    parameters = [parameter for parameter in net.parameters() if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    telemetry.sample_gradients(parameters, grads, factor, formats, scale)


def sampled(grads: dict[str, Tensor], formats: dict[str, tuple[str, str | None]], scale: float = 1.0) -> Telemetry:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in formats))
    telemetry = Telemetry(find_units(net))
    for name, grad in grads.items():
        net.get_parameter(name).grad = grad
    sample_gradients(telemetry, net, formats, scale)
    return telemetry


def test_sample_measures_each_unit() -> None:
    weight, bias = torch.tensor([[1.0, -8.0], [0.0, 2.0]]), torch.tensor([math.inf, 1.0])
    telemetry = sampled({"0.weight": weight, "0.bias": bias}, {"0": ("fp32", "bf16"), "1": ("fp32", "bf16")})
    unit = telemetry.units["0"]
    assert (unit.amax, unit.nonfinite_count, unit.underflow_fraction) == (8.0, 1, 0.0)
    assert math.isnan(telemetry.units["1"].amax)


@pytest.mark.parametrize(("scale", "now", "lower"), [(1.0, 0.0, 0.75), (2.0**14, 0.0, 0.5), (2.0**27, 0.0, 0.25)])
def test_underflow_is_that_of_the_scaled_gradient(scale: float, now: float, lower: float) -> None:
    grad = torch.tensor([[1.0, 1e-8], [1e-12, 1e-16]])
    unit = sampled({"0.weight": grad}, {"0": ("bf16", "fp16")}, scale).units["0"]
    assert (unit.underflow_fraction, unit.underflow_fraction_lower) == (now, lower)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_gradients_are_measured_as_unscaled_ones(dtype: torch.dtype) -> None:
    scale = 2.0**14
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    formats: dict[str, tuple[str, str | None]] = {"0": ("bf16", "fp16"), "1": ("fp16", None)}
    grads = [
        torch.randn(parameter.shape).to(dtype) * 10.0 ** (-index) for index, parameter in enumerate(net.parameters())
    ]
    grads[0].view(-1)[0] = 0.9 * 2.0**-28
    unscaled, scaled = (Telemetry(find_units(net)) for _ in range(2))
    unscaled.sample_gradients(list(net.parameters()), [grad.float() for grad in grads], 1.0, formats, scale)
    scaled.sample_gradients(list(net.parameters()), [grad * scale for grad in grads], 1 / scale, formats, scale)
    assert unscaled.units["0"].underflow_fraction_lower > 0.0
    assert json.dumps(scaled.state_dict()) == json.dumps(unscaled.state_dict())


def test_weights_are_read_only_where_a_format_could_lose_them(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.get_parameter("0.weight").data.fill_(1e-6)
    net.get_parameter("1.weight").data.fill_(1e-6)
    units = find_units(net)
    telemetry = Telemetry(units)
    telemetry.sample_weights(units, {"0": ("fp32", "bf16"), "1": ("bf16", "fp16")})
    assert (telemetry.units["0"].weight_subnormal, telemetry.units["0"].weight_subnormal_lower) == (0.0, 0.0)
    assert telemetry.units["1"].weight_subnormal == 0.0
    assert telemetry.units["1"].weight_subnormal_lower > 0.5
    monkeypatch.setattr("autoprec.telemetry.grad_stats", None)  # no weight is read from here on
    telemetry.sample_weights(units, {"0": ("fp32", "bf16"), "1": ("bf16", None)})
    assert telemetry.units["1"].weight_subnormal_lower == 0.0


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_scaled_formats_underflow_as_bf16_does(name: str) -> None:
    grad = torch.tensor([[1e-8, 1e-30], [1e-44, 0.0]])
    unit = sampled({"0.weight": grad}, {"0": (name, None)}).units["0"]
    assert unit.underflow_fraction == pytest.approx(1 / 3)
    assert unit.underflow_fraction_lower == 0.0


def test_sample_of_sparse_and_missing_gradients() -> None:
    net = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    telemetry = Telemetry(find_units(net))
    sample_gradients(telemetry, net, {"0": ("fp32", None), "1": ("fp32", None)}, 1.0)
    assert math.isnan(telemetry.units["0"].amax)
    net[0](torch.tensor([1, 1, 2])).sum().backward()
    sample_gradients(telemetry, net, {"0": ("fp32", None), "1": ("fp32", None)}, 1.0)
    assert telemetry.units["0"].amax == 2.0


# ---- samples of outputs ----


def record(name: str, low: float, high: float, is_input: bool = False, numel: int = 4) -> Record:
    return Record(name, is_input, torch.tensor([low, high]), numel)


def test_outputs_keep_the_largest_magnitude_and_count_overflows() -> None:
    _, telemetry = made(2, 2)
    telemetry.note_outputs(
        [
            record("0", -5.0, 2.0),
            record("0", -1.0, 3.0),
            record("1", 0.0, math.inf),
            record("1", 0.0, 9.0, is_input=True),
        ]
    )
    first, second = telemetry.units.values()
    assert (list(first.act_amax), first.overflow_count) == ([5.0], 0)
    assert (list(second.act_amax), second.overflow_count) == ([], 1)
    telemetry.note_outputs([record("1", math.nan, math.nan)])
    telemetry.note_overflow("1")
    assert second.overflow_count == 3
    telemetry.start_window()
    assert second.overflow_count == 0
    telemetry.note_outputs([])


def compute_of(net: nn.Module, forward: Callable[[], Any], granularity: str = "layer") -> dict[str, float]:
    telemetry = Telemetry(find_units(net, granularity=granularity))
    with steered(net, "bf16", granularity=granularity) as runtime:
        runtime.records_all = True
        forward()
    telemetry.note_outputs(runtime.records)
    return {name: unit.compute for name, unit in telemetry.units.items()}


def test_compute_counts_multiplications() -> None:
    net = nn.ModuleDict(
        {
            "linear": nn.Linear(16, 32, bias=False),
            "conv": nn.Conv1d(4, 8, 3, groups=2, bias=False),
            "norm": nn.LayerNorm(16),
            "table": nn.Embedding(50, 16),
        }
    )
    x = torch.randn(2, 4, 16)

    def forward() -> None:
        net["linear"](x)
        net["conv"](x)
        net["norm"](x)
        net["table"](torch.arange(10))

    expected = {"linear": 8 * 16 * 32, "conv": 2 * 8 * 14 * 2 * 3, "norm": 0, "table": 0}
    assert compute_of(net, forward) == pytest.approx(expected, rel=0.05)


def test_compute_of_a_tied_head_is_that_of_the_head() -> None:
    table, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = table.weight
    net = nn.ModuleDict({"table": table, "head": head})
    found = compute_of(net, lambda: head(table(torch.arange(10))))
    assert found == pytest.approx({"table": 10 * 16 * 50}, rel=0.05)


def test_compute_of_a_block_is_the_sum_of_its_layers() -> None:
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)) for _ in range(2))
    )
    found = compute_of(net, lambda: net(torch.randn(10, 16)), granularity="block")
    assert found == pytest.approx({"0": 20480, "1": 20480}, rel=0.05)


def test_compute_of_a_transposed_convolution_and_of_wholes() -> None:
    transposed, attention = nn.ConvTranspose1d(4, 8, 3, stride=2, bias=False), nn.MultiheadAttention(16, 2, bias=False)
    recurrent = nn.LSTM(8, 8, bias=False)
    net = nn.ModuleDict({"t": transposed, "a": attention, "r": recurrent})
    x = torch.randn(5, 3, 16)

    def forward() -> None:
        transposed(torch.randn(2, 4, 10))
        attention(x, x, x)
        recurrent(torch.randn(5, 2, 8))

    expected = {"t": 2 * 10 * 4 * 8 * 3, "a": 15 * 4 * 16 * 16, "r": 10 * 4 * 8 * 16}
    assert compute_of(net, forward) == pytest.approx(expected, rel=0.15)


# ---- state ----


def test_state_is_primitive_and_goes_round() -> None:
    net, telemetry = made(2, 2)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    telemetry.note_loss(torch.tensor(1.0))
    note(telemetry, net, total=3.0, clipped=True, scale=512.0)
    telemetry.note_skipped()
    sample_gradients(telemetry, net, {"0": ("bf16", "fp16"), "1": ("fp32", None)}, 1.0)
    telemetry.note_outputs([record("0", -5.0, 2.0), record("1", 0.0, math.inf)])
    state = json.loads(json.dumps(telemetry.state_dict()))
    _, other = made(2, 2)
    other.note_loss(torch.tensor(9.0))
    other.load_state_dict(state)
    assert json.dumps(other.state_dict()) == json.dumps(telemetry.state_dict())  # NaN included
    other.norms.extend(range(2 * WINDOW))
    assert len(other.norms) == WINDOW


def test_windows_roll_after_a_load_too() -> None:
    _, telemetry = made(2)
    _, other = made(2)
    other.load_state_dict(json.loads(json.dumps(telemetry.state_dict())))
    unit = other.units["0"]
    windows: list[Any] = [
        unit.norms,
        unit.act_amax,
        other.losses,
        other.loss_scales,
        other.norms,
        other.outcomes,
        other.clipped,
    ]
    for window in windows:
        window.extend(range(2 * WINDOW))
    assert [len(window) for window in windows] == [WINDOW] * 7


def test_state_of_another_model_is_taken_where_it_fits() -> None:
    net, telemetry = made(2, 2)
    net[0].weight.grad = torch.ones(2, 2)
    note(telemetry, net)
    _, smaller = made(2)
    smaller.load_state_dict(telemetry.state_dict())
    assert list(smaller.units) == ["0"]
    assert list(smaller.units["0"].norms) == [2.0]
