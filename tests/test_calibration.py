"""Measuring layers: workloads of a model, layers that are made for it, laps in turns, and what a budget allows.

Nothing here depends on real times: stopwatches are scripted. Time budget: 20 s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoprec.calibration.attention import AttentionCase, measure_attention
from autoprec.calibration.calibrator import Calibrator
from autoprec.calibration.layer_runs import Choice, LayerRuns
from autoprec.calibration.pricing import best_of
from autoprec.calibration.timing import FEWEST_ROUNDS, MOST_ROUNDS, Deadline, is_clear, make_lap, time_in_turns
from autoprec.calibration.workloads import Workload, bytes_of, find_workloads, make_layer, multiplications, workload_of
from autoprec.cost import UnitCost
from autoprec.layers import Call
from autoprec.units import find_units
from tests.steered import steered

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


class Clock:
    """A time that only laps move: each takes what is said for its call."""

    def __init__(self, seconds: Callable[[Any], float]) -> None:
        self.now = 0.0
        self.laps: list[Any] = []
        self._seconds = seconds

    def __call__(self) -> float:
        return self.now

    def lap(self, call: Any, count: int) -> float:
        call()
        seconds = self._seconds(call)
        self.now += seconds * count
        self.laps.append(call)
        return seconds


def linear(rows: int = 8, inner: int = 16, outer: int = 12, **fields: Any) -> Workload:
    options = json.dumps({"in_features": inner, "out_features": outer, "bias": True}, sort_keys=True)
    return Workload("Linear", options, (rows, inner), **{**FLOW, **fields})


FLOW = {"follows": True, "needs_grad": True, "trains": True}


def call_of(module: nn.Module, *shape: int, name: str = "layer", dtype: torch.dtype = F32, **fields: Any) -> Call:
    return Call(name, module, shape, dtype, **{"needs_grad": True, "is_channels_last": False, **fields})


# ---- workloads ----

MADE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(16, 12), (4, 3, 16)),
    "linear without bias": (lambda: nn.Linear(16, 12, bias=False), (5, 16)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), groups=2, bias=False), (2, 4, 9, 8)),
    "same padding": (lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (2, 4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5, 5)),
    "embedding": (lambda: nn.Embedding(20, 6, padding_idx=1), (3, 7)),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_layer_is_made_again(kind: str) -> None:
    make, shape = MADE[kind]
    module = make()
    is_table = kind == "embedding"
    workload = workload_of(call_of(module, *shape, needs_grad=not is_table), follows=False)
    assert workload is not None
    assert json.loads(json.dumps(list(workload))) == [*workload[:2], list(workload.shape), *workload[3:]]
    assert Workload.from_list(json.loads(json.dumps(list(workload)))) == workload
    state = torch.get_rng_state()
    again, x = make_layer(workload, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(again) == str(module)
    assert {name: p.shape for name, p in again.named_parameters()} == {n: p.shape for n, p in module.named_parameters()}
    output = again(x)
    expected = module(torch.zeros(shape, dtype=torch.int64) if is_table else torch.zeros(shape))
    assert output.numel() == expected.numel()
    assert torch.isfinite(output).all()
    assert output.std() > 0
    assert bytes_of(workload) > 0
    with_weights = sum(p.numel() for p in module.parameters() if p.ndim > 1)
    assert multiplications(workload) >= (x.numel() if is_table else with_weights)
    assert str(workload).startswith(type(module).__name__)


def test_a_default_device_and_dtype_of_the_users_make_no_difference() -> None:
    expected = make_layer(linear(), CPU)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            module, x = make_layer(linear(), CPU)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(x, expected[1])
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), expected[0].parameters(), strict=True))


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(4, 4),
        nn.LayerNorm(4),
        nn.MultiheadAttention(4, 2),
        type("Own", (nn.Linear,), {})(4, 4),
        nn.Bilinear(4, 4, 4),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_cannot_be_made_again_is_not_known(module: nn.Module) -> None:
    assert workload_of(call_of(module, 2, 4), follows=False) is None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("cls", "sizes", "shape"), [(nn.Linear, (4, 0), (2, 4)), (nn.Embedding, (5, 0), (2,))])
def test_a_layer_without_weights_is_not_known(cls: Any, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    assert workload_of(call_of(cls(*sizes), *shape), follows=False) is None


@pytest.mark.parametrize(("cls", "shape"), [(nn.Conv2d, (3, 8, 8)), (nn.ConvTranspose1d, (3, 8))])
def test_a_sample_without_a_batch_is_not_known(cls: Any, shape: tuple[int, ...]) -> None:
    assert workload_of(call_of(cls(3, 4, 1), *shape), follows=False) is None
    assert workload_of(call_of(cls(3, 4, 1), 2, *shape), follows=False) is not None


def test_an_empty_batch_is_not_known() -> None:
    assert workload_of(call_of(nn.Linear(4, 4), 0, 4), follows=False) is None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.third = (
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )


def calls_of(net: Net, dtypes: Mapping[str, torch.dtype], *names: str) -> list[Call]:
    return [call_of(getattr(net, name), 2, 4, name=name, dtype=dtypes.get(name, F32)) for name in names]


@pytest.mark.parametrize(
    ("formats", "dtypes", "follows"),
    [
        # after the data and after a norm float32 comes in every format
        ({}, {}, {"first": False, "second": False, "third": True}),
        ({"first": "bf16", "second": "bf16", "third": "bf16"}, {"third": BF16}, {"second": False, "third": True}),
        ({"first": "bf16", "second": "bf16", "third": "bf16"}, {}, {"second": False, "third": False}),
        ({"second": "bf16"}, {"third": BF16}, {"third": True}),
        ({"second": "bf16"}, {}, {"third": False}),  # something between widens
    ],
)
def test_where_a_layers_input_comes_from(
    formats: dict[str, str], dtypes: dict[str, torch.dtype], follows: dict[str, bool]
) -> None:
    net = Net()
    units = {unit.name: unit for unit in find_units(net)}
    calls = calls_of(net, dtypes, "first", "norm", "second", "third")
    found = find_workloads(calls, units, {**dict.fromkeys(units, "fp32"), **formats})
    seen = {name: next(iter(counts)).follows for name, counts in found.items()}
    assert {name: seen[name] for name in follows} == follows


def test_calls_of_a_unit_are_counted_and_one_unknown_call_hides_it() -> None:
    net = Net()
    units = {unit.name: unit for unit in find_units(net)}
    formats = dict.fromkeys(units, "fp32")
    calls = calls_of(net, {}, "first", "first", "first", "norm", "second")
    found = find_workloads(calls, units, formats)
    assert {name: list(counts.values()) for name, counts in found.items() if name != "first"} == {"second": [1]}
    assert sum(found["first"].values()) == 3
    empty = call_of(net.second, 0, 4, name="second")
    assert "second" not in find_workloads([*calls, empty], units, formats)


# ---- running a layer ----


def results_of(runs: LayerRuns, choice: Choice) -> list[Tensor]:
    call = runs.in_turn(choice)
    call()
    return call()


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "tf32", "int8", "fp8"])
@pytest.mark.parametrize("follows", [False, True])
def test_a_layer_runs_as_in_a_step(name: str, follows: bool) -> None:
    workload = linear(16, 16, 32, follows=follows)
    module, x = make_layer(workload, CPU)
    x = x.to(
        BF16
        if follows and name not in ("fp32", "tf32", "fp16")
        else torch.float16
        if follows and name == "fp16"
        else F32
    )
    found = results_of(LayerRuns(workload, CPU), Choice(name, is_emulated=True))
    with steered_output(module, name) as layer:
        output = layer(x.requires_grad_())
        gradient = (torch.arange(output.numel()) % 7 - 3).reshape(output.shape).to(output.dtype)
        expected = [output, *torch.autograd.grad(output, [x, *module.parameters()], gradient)]
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@contextmanager
def steered_output(module: nn.Module, name: str) -> Iterator[nn.Module]:
    root = nn.Module()
    root.add_module("layer", module)
    with steered(root, {"layer": name}):
        yield module


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_a_layer_on_copies_gives_what_one_without_gives(name: str) -> None:
    runs = LayerRuns(linear(16, 32, 64), CPU)
    plain, copied = (results_of(runs, Choice(name, on_copies=each)) for each in (False, True))
    assert torch.equal(plain[0], copied[0])
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(plain, copied, strict=True))


@pytest.mark.parametrize(
    ("name", "least", "most"), [("fp32", 1e-9, 1e-6), ("bf16", 1e-4, 1e-2), ("int8", 1e-3, 5e-2), ("fp16", 1e-5, 1e-3)]
)
def test_errors_are_those_of_the_format(name: str, least: float, most: float) -> None:
    runs = LayerRuns(linear(128, 64, 64), CPU)
    assert least < runs.error(results_of(runs, Choice(name, is_emulated=name == "fp16"))) < most


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_an_error_in_any_result_shows(spoilt: int) -> None:
    runs = LayerRuns(linear(128, 64, 64), CPU)
    results = results_of(runs, Choice("fp32"))
    results[spoilt] = results[spoilt] * 1.5
    assert runs.error(results) == pytest.approx(0.5, rel=1e-3)


def test_saved_bytes_are_those_of_input_and_copy() -> None:
    runs = LayerRuns(linear(128, 64, 32), CPU)
    rows, weight = 128 * 64, 64 * 32
    for choice, activations, copies in (
        (Choice("fp32"), 4 * rows, 0),
        (Choice("bf16"), 2 * rows, 2 * weight),
        (Choice("bf16", on_copies=True), 2 * rows, 2 * weight),
        (Choice("int8", on_copies=True), 2 * rows, 2 * (weight + 4 * 32)),
    ):
        assert runs.saved_bytes(runs.in_turn(choice), choice) == activations, choice
        assert runs.copy_bytes(choice) == copies, choice
    # without a gradient of the input nobody needs the weight
    first = LayerRuns(linear(128, 64, 32, needs_grad=False), CPU)
    assert first.saved_bytes(first.in_turn(Choice("bf16")), Choice("bf16")) == 2 * rows


def test_a_frozen_layer_has_no_gradient_of_its_weight() -> None:
    results = results_of(LayerRuns(linear(trains=False), CPU), Choice("bf16", on_copies=True))
    assert [tuple(each.shape) for each in results] == [(8, 12), (8, 16)]
    nothing = results_of(LayerRuns(linear(trains=False, needs_grad=False), CPU), Choice("bf16"))
    assert [tuple(each.shape) for each in nothing] == [(8, 12)]


def test_nothing_of_the_users_is_touched() -> None:
    """Random generators, autocast, flags, gradient mode."""
    calibrator = Calibrator(CPU, uses_cache=False, lap=Clock(lambda call: 1e-3).lap)
    conv = workload_of(call_of(nn.Conv2d(4, 6, 3), 2, 4, 9, 8), follows=True)
    table = workload_of(call_of(nn.Embedding(20, 6), 3, 7, needs_grad=False), follows=False)
    assert conv is not None
    assert table is not None
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        calibrator.measure({w: [Choice("fp32"), Choice("bf16")] for w in (linear(), conv, table)}, 1e9)
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
    assert len(calibrator.measured) == 3
    assert calibrator.notes == []
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]


# ---- timing ----


def test_all_take_turns_and_the_median_counts() -> None:
    names: list[str] = []
    calls = {name: partial(names.append, name) for name in "ab"}
    times = iter([9.0, 1.0, 9.0, 2.0, *(1.0, 2.0, 2.2, 1.2, 50.0, 60.0)])
    found = time_in_turns(calls, lambda call, count: (call(), next(times))[1], Deadline(1e9, lambda: 0.0))
    assert found == {"a": 1.2, "b": 2.2}
    assert "".join(names) == "aabb" + "ab" + "ba" + "ab"


def test_a_clear_winner_ends_it_early() -> None:
    clear, tie = {"a": lambda: 1, "b": lambda: 2}, {"a": lambda: 1, "b": lambda: 1}
    for calls, rounds in ((clear, FEWEST_ROUNDS), (tie, MOST_ROUNDS)):
        clock = Clock(lambda call: float(call()))
        assert time_in_turns(calls, clock.lap, Deadline(1e9, clock)) is not None
        assert len(clock.laps) == 2 * (2 + rounds)


def test_one_that_is_sometimes_slower_is_no_clear_winner() -> None:
    assert is_clear({"a": [1.0, 1.0], "b": [2.0, 1.04]})
    assert not is_clear({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 1.01]})
    assert is_clear({"a": [1.0]})


def test_without_the_time_for_the_fewest_rounds_nothing_is_known() -> None:
    clock = Clock(lambda call: 1.0)
    assert time_in_turns({"a": int, "b": int}, clock.lap, Deadline(9.0, clock)) is None
    assert clock.now <= 9.0


def test_the_budget_ends_rounds_beyond_the_fewest() -> None:
    clock = Clock(lambda call: 1.0)
    assert time_in_turns({"a": int, "b": int}, clock.lap, Deadline(14.0, clock)) is not None
    assert 10.0 <= clock.now <= 14.0


def test_short_calls_are_run_several_times_in_a_lap() -> None:
    counts: list[int] = []

    def lap(call: Any, count: int) -> float:
        counts.append(count)
        return 1e-4

    time_in_turns({"a": int}, lap, Deadline(1e9, lambda: 0.0))
    assert counts == [1, 1, 10, 10, 10]


def test_the_real_stopwatch_counts_calls() -> None:
    calls: list[int] = []
    assert make_lap(CPU)(lambda: calls.append(1), 7) >= 0.0
    assert len(calls) == 7


# ---- within a budget ----


def by_format(**seconds: float) -> Clock:
    """Formats take times of their own, in the order in which choices are compared."""
    order = list(seconds.values())
    seen: dict[int, float] = {}

    def of(call: Any) -> float:
        return seen.setdefault(id(call), order[len(seen) % len(order)])

    return Clock(of)


FP32, LOW = Choice("fp32"), Choice("bf16")


def test_costs_come_from_the_stopwatch() -> None:
    clock = by_format(fp32=2e-3, bf16=1e-3)
    calibrator = Calibrator(CPU, uses_cache=False, lap=clock.lap, clock=clock)
    assert calibrator.cost(linear(), FP32) is None
    calibrator.measure({linear(): [FP32, LOW]}, 10.0)
    measured = [calibrator.cost(linear(), choice) for choice in (FP32, LOW)]
    assert [m.ms for m in measured if m is not None] == [2.0, 1.0]
    assert calibrator.spent_s == clock.now > 0.0


def test_other_sizes_are_scaled_from_the_nearest() -> None:
    clock = by_format(fp32=2e-3, bf16=1e-3)
    calibrator = Calibrator(CPU, uses_cache=False, lap=clock.lap, clock=clock)
    calibrator.measure({linear(64): [FP32, LOW]}, 10.0)
    half, same = calibrator.cost(linear(32), FP32), calibrator.cost(linear(64), FP32)
    assert half is not None
    assert same is not None
    assert half.ms == 1.0
    assert half.activation_bytes == same.activation_bytes / 2
    assert calibrator.cost(linear(64 * 20), FP32) is None, "too far away"
    assert calibrator.cost(linear(64, 32), FP32) is None, "another layer"
    assert calibrator.cost(linear(64, needs_grad=False), FP32) is None
    # in float32 it does not matter where the input comes from
    assert calibrator.cost(linear(64, follows=False), FP32) == same
    assert calibrator.cost(linear(64, follows=False), LOW) is None


def test_what_is_nearly_known_is_not_measured_again() -> None:
    clock = by_format(fp32=2e-3, bf16=1e-3)
    calibrator = Calibrator(CPU, uses_cache=False, lap=clock.lap, clock=clock)
    calibrator.measure({linear(64): [FP32, LOW]}, 10.0)
    laps = len(clock.laps)
    calibrator.measure({linear(70): [FP32, LOW]}, 10.0)
    assert len(clock.laps) == laps
    calibrator.measure({linear(128): [FP32, LOW]}, 10.0)
    assert len(clock.laps) > laps


@pytest.mark.parametrize(("budget", "known"), [(0.0, 0), (0.04, 0), (11.0, 1), (25.0, 2), (1000.0, 8)])
def test_the_first_ones_are_measured_while_the_budget_lasts(budget: float, known: int) -> None:
    """Each takes two laps for each of two choices before its rounds, three rounds at least: 10 s."""
    clock = by_format(fp32=1.0, bf16=1.1)
    calibrator = Calibrator(CPU, uses_cache=False, lap=clock.lap, clock=clock)
    demand = {linear(16 * 2**index): [FP32, LOW] for index in range(8)}
    calibrator.measure(demand, budget)
    assert [calibrator.knows({w: c}) for w, c in demand.items()] == [True] * known + [False] * (8 - known)
    assert clock.now <= max(budget * 1.2, 4.4)
    assert calibrator.spent_s == clock.now


@pytest.mark.parametrize("error", [IndexError("out of range"), TypeError("no such option"), ValueError()], ids=repr)
def test_no_error_of_a_measurement_ends_training(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("autoprec.calibration.calibrator.LayerRuns", fail)
    calibrator = Calibrator(CPU, uses_cache=False, lap=Clock(lambda call: 1e-3).lap)
    calibrator.measure({linear(): [FP32]}, 10.0)
    assert not calibrator.known
    (note,) = calibrator.notes
    assert note.endswith(f"could not be measured: {error}" if str(error) else "could not be measured: ValueError")


def test_what_cannot_run_is_noted_once_and_left() -> None:
    broken = linear()._replace(shape=(8, 17))
    calibrator = Calibrator(CPU, uses_cache=False, lap=Clock(lambda call: 1e-3).lap)
    calibrator.measure({broken: [FP32], linear(): [FP32]}, 10.0)
    calibrator.measure({broken: [FP32]}, 10.0)
    assert len(calibrator.notes) == 1
    assert "could not be measured" in calibrator.notes[0]
    assert calibrator.cost(linear(), FP32) is not None
    assert calibrator.knows({broken: [FP32]}), "there is nothing more to learn"


def test_what_does_not_fit_into_memory_is_not_tried() -> None:
    calibrator = Calibrator(CPU, uses_cache=False, lap=Clock(lambda call: 1e-3).lap)
    calibrator.measure({linear(8, 1 << 24, 1 << 24): [FP32]}, 10.0)
    assert (calibrator.known, calibrator.notes) == ({}, [])


def test_results_are_kept_for_the_next_run() -> None:
    demand = {linear(16): [FP32, LOW], linear(64): [FP32, LOW]}
    first = Calibrator(CPU, lap=Clock(lambda call: 1e-3).lap)
    first.look_up(demand)
    first.measure(demand, 10.0)
    clock = Clock(lambda call: 1e-3)
    second = Calibrator(CPU, lap=clock.lap)
    second.look_up(demand)
    second.measure(demand, 10.0)
    assert clock.laps == []
    assert second.known == first.known
    assert (len(second.measured), len(second.from_cache)) == (0, 2)
    without = Calibrator(CPU, uses_cache=False)
    without.look_up(demand)
    assert without.known == {}


def test_the_state_is_plain_and_complete() -> None:
    calibrator = Calibrator(CPU, uses_cache=False, lap=Clock(lambda call: 1e-3).lap)
    calibrator.measure({linear(): [FP32, LOW], linear()._replace(shape=(8, 17)): [FP32]}, 10.0)
    again = Calibrator(CPU, uses_cache=False)
    again.load_state_dict(json.loads(json.dumps(calibrator.state_dict())))
    assert again.state_dict() == calibrator.state_dict()
    assert again.cost(linear(4), LOW) == calibrator.cost(linear(4), LOW)


# ---- implementations ----


@pytest.mark.parametrize(
    ("others", "best"),
    [
        ([], "default"),
        ([UnitCost(0.5, implementation="fast", error=2e-6)], "fast"),
        ([UnitCost(0.5, implementation="wrong", error=1e-3)], "default"),
        ([UnitCost(0.99, implementation="alike", error=1e-6)], "default"),
        ([UnitCost(math.inf, implementation="unknown")], "default"),
        ([UnitCost(0.9, implementation="fast"), UnitCost(0.7, implementation="faster")], "faster"),
    ],
)
def test_the_fastest_implementation_with_a_small_error_is_best(others: list[UnitCost], best: str) -> None:
    found = best_of([UnitCost(1.0, error=1e-6), *others])
    assert found is not None
    assert found.implementation == best


def test_without_torchs_own_nothing_is_best() -> None:
    assert best_of([]) is None
    assert best_of([UnitCost(math.inf), UnitCost(1.0, implementation="fast")]) is None


def attention(scale: float = 1.0, key: str = "a", dtype: torch.dtype = F32) -> AttentionCase:
    def matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).float().softmax(-1)
        return scale * (scores.to(v.dtype) @ v)

    shapes = ((2, 2, 8, 4),) * 3
    runs = {"default": nn.functional.scaled_dot_product_attention, "matmul": matmul}
    return AttentionCase(key, shapes, dtype, runs, {"default": 10, "matmul": 20})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attention_is_measured_like_layers(dtype: torch.dtype) -> None:
    clock = by_format(default=2e-3, matmul=1e-3)
    found = measure_attention(attention(dtype=dtype), CPU, clock.lap, Deadline(1e9, clock))
    assert {name: (m.ms, m.activation_bytes) for name, m in found.items()} == {
        "default": (2.0, 10),
        "matmul": (1.0, 20),
    }
    assert all(m.error < (1e-6 if dtype is F32 else 2e-2) for m in found.values())
    wrong = measure_attention(attention(1.5, dtype=dtype), CPU, clock.lap, Deadline(1e9, clock))
    assert wrong["matmul"].error == pytest.approx(0.5, rel=0.05)


def test_attention_comes_from_the_cache_too() -> None:
    first = Calibrator(CPU, lap=by_format(default=2e-3, matmul=1e-3).lap)
    found = first.compare_attention([attention()], 10.0)
    assert set(found["a"]) == {"default", "matmul"}
    second = Calibrator(CPU)
    assert second.compare_attention([attention(), attention(key="b")], 0.0) == found
    assert second.from_cache == {"a"}
