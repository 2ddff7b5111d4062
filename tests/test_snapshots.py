"""Copies of a run in host memory: what they hold, how they are written back, what they take.

Time budget: 10 s.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from autoprec import machine_load, snapshots
from autoprec.live_state import LiveState
from autoprec.machine_load import free_bytes
from autoprec.packing import Packer
from autoprec.snapshots import SnapshotRing
from tests.small_fits import differences

MB = 2**20


def model() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 16))
    net[4].weight = net[3].weight
    net.register_buffer("counts", torch.arange(3), persistent=False)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def step(net: nn.Module, optimizer: Any) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(torch.randn(4, 3, 4, 4)).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    net.get_buffer("counts").add_(1)


class Nested(torch.optim.Optimizer):
    """State of every kind of container, a shared counter, and a group value that is a tensor."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": torch.tensor(lr), "seen": [0]})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["seen"][0] += 1
            group["lr"].mul_(0.9)
            for parameter in group["params"]:
                row = self.state[parameter]
                shared = cast(Any, self.state)["all"].setdefault("steps", torch.zeros(()))
                row.setdefault("steps", shared)
                row.setdefault("past", deque(maxlen=2)).append(parameter.grad.clone())
                row["pair"] = (parameter.grad.norm(), {"n": len(row["past"])})
                parameter.data.add_(parameter.grad, alpha=-float(group["lr"]))
        cast(Any, self.state)["all"]["steps"] += 1
        return loss


class Wrapping:
    """An optimizer that is none of torch's, with a state_dict of its own."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups, self.state, self.zero_grad = self.inner.param_groups, self.inner.state, self.inner.zero_grad
        self.slow = 0

    def step(self, closure: Any) -> Any:
        self.slow += 1
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.slow = state["slow"]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
    "nested": Nested,
    "wrapping": Wrapping,
}


def listed(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: listed(value) for key, value in nest.items()}
    return [listed(value) for value in nest] if isinstance(nest, (list, tuple, deque)) else nest


def everything(net: nn.Module, optimizer: Any) -> Any:
    state = listed(optimizer.state_dict())
    buffers = [buffer.clone() for buffer in net.buffers()]
    return copy.deepcopy([[p.detach() for p in net.parameters()], buffers, state])


def restored(ring: SnapshotRing, live: LiveState) -> Any:
    newest = ring.newest
    assert newest is not None
    read = newest.reader()
    assert read is not None
    live.write(newest.state, read)
    return newest.note


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_going_back_and_on_again_has_the_same_bits(name: str, steps_before: int) -> None:
    net = model()
    if name == "lbfgs":  # it takes gradients that are contiguous
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    live, ring = LiveState(net, [optimizer]), SnapshotRing(1)
    for _ in range(steps_before):
        step(net, optimizer)
    assert ring.take(live.gather(), {"at": steps_before}, steps_before)
    before, random = everything(net, optimizer), torch.get_rng_state()
    for _ in range(3):
        step(net, optimizer)
    after = everything(net, optimizer)
    assert differences(before, after)
    assert restored(ring, live) == {"at": steps_before}
    assert not differences(before, everything(net, optimizer))
    torch.set_rng_state(random)
    for _ in range(3):
        step(net, optimizer)
    assert not differences(after, everything(net, optimizer))
    restored(ring, live)  # a copy may be used again
    assert not differences(before, everything(net, optimizer))


def test_it_is_written_in_place() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    live, ring = LiveState(net, [optimizer]), SnapshotRing(1)
    step(net, optimizer)
    ring.take(live.gather(), None)
    rows = [value for row in optimizer.state.values() for value in row.values()]
    tensors = [*net.parameters(), *net.buffers(), *rows]
    marks = [(id(tensor), tensor.data_ptr(), tensor.stride()) for tensor in tensors]
    calls: list[int] = []
    net[3].register_forward_hook(lambda *args: calls.append(1))  # type: ignore[index]
    step(net, optimizer)
    versions = [parameter._version for parameter in net.parameters()]
    restored(ring, live)
    again = [value for row in optimizer.state.values() for value in row.values()]
    assert [(id(t), t.data_ptr(), t.stride()) for t in [*net.parameters(), *net.buffers(), *again]] == marks
    assert [p._version for p in net.parameters()] > versions  # whoever keeps copies of weights sees it
    assert net[4].weight is net[3].weight  # type: ignore[index]
    step(net, optimizer)
    assert len(calls) == 2


def test_shared_tensors_of_a_state_stay_shared() -> None:
    net = model()
    optimizer = Nested(list(net.parameters()))
    live, ring = LiveState(net, [optimizer]), SnapshotRing(1)
    step(net, optimizer)
    ring.take(live.gather(), None)
    optimizer.state.clear()
    restored(ring, live)
    first, *_ = optimizer.state.values()
    shared = cast(Any, optimizer.state)["all"]["steps"]
    assert first["steps"] is shared
    assert int(shared) == 1


def test_tied_weights_and_equal_tensors_are_kept_once() -> None:
    net, ring = model(), SnapshotRing(1)
    ring.take(LiveState(net, []).gather(), None)
    tied = sum(p.nbytes for p in net.parameters()) + sum(b.nbytes for b in net.buffers())
    assert tied <= ring.nbytes <= tied + 64 * 12
    assert ring.nbytes < tied + 16 * 16 * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    net = nn.Linear(8, 8).to(dtype)
    live, ring = LiveState(net, []), SnapshotRing(1)
    ring.take(live.gather(), None)
    before = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        net.weight.fill_(float("nan"))
    assert live.nonfinite() == ["weight"]
    restored(ring, live)
    assert not live.nonfinite()
    assert not differences(before, list(net.parameters()))


def test_values_beyond_float32_are_finite_in_float64() -> None:
    net = nn.Linear(2, 2).double()
    with torch.no_grad():
        net.weight.fill_(1e200)
    assert not LiveState(net, []).nonfinite()


def test_large_weights_are_finite() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.fill_(1e30)  # its square is not
    assert not LiveState(net, []).nonfinite()


class Odd(nn.Module):
    """Buffers that cannot be copied into a block, or that forwards replace."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("mask", torch.zeros(3, 3))
        self.register_buffer("later", None)
        self.register_buffer("flags", torch.tensor([True, False]))

    def write(self) -> None:
        self.sparse = torch.ones(3, 3).to_sparse()
        self.expanded = torch.ones(4)
        self.mask = torch.full((5, 5), -float("inf"))
        self.later = torch.ones(2)
        self.flags.logical_not_()  # type: ignore[operator]


def test_buffers_of_any_kind_go_back() -> None:
    net = Odd()
    live, ring = LiveState(net, []), SnapshotRing(1)
    ring.take(live.gather(), None)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.write()
    assert not live.nonfinite()  # a mask may hold inf
    restored(ring, live)
    for name, buffer in before.items():
        assert torch.equal(net.get_buffer(name).to_dense(), buffer.to_dense()), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_running_statistics_and_moments_are_looked_at(value: float) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    live = LiveState(net, [optimizer])
    step(net, optimizer)
    assert not live.nonfinite()
    net.get_buffer("1.running_var")[1] = value
    optimizer.state[net.get_parameter("0.weight")]["exp_avg_sq"][0, 0, 0, 0] = value
    assert live.nonfinite() == ["1.running_var", "exp_avg_sq of 0.weight"]


def test_a_moment_of_another_width_is_replaced() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    live, ring = LiveState(net, [optimizer]), SnapshotRing(1)
    ring.take(live.gather(), None)
    row = optimizer.state[net.weight]
    wide = row["exp_avg_sq"].clone()
    row["exp_avg_sq"] = row["exp_avg_sq"].bfloat16()
    restored(ring, live)
    assert not differences(optimizer.state[net.weight]["exp_avg_sq"], wide)


def test_parameters_and_groups_that_joined_stay() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    live, ring = LiveState(net, [optimizer]), SnapshotRing(1)
    ring.take(live.gather(), None)
    net["b"] = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(net["b"].parameters()), "lr": 0.5})
    kept = net["b"].weight.detach().clone()  # type: ignore[operator]
    restored(ring, live)
    assert torch.equal(net["b"].weight, kept)  # type: ignore[arg-type]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_lazy_parameters_are_left_out() -> None:
    net = nn.Sequential(nn.LazyLinear(2))
    live, ring = LiveState(net, []), SnapshotRing(1)
    assert live.has_lazy
    assert not live.nonfinite()
    ring.take(live.gather(), None)
    net(torch.ones(1, 3))
    assert not live.has_lazy
    restored(ring, live)
    assert net[0].weight.shape == (2, 3)


# ---- how many, and what they take ----


def big(megabytes: int = 1) -> dict[str, Tensor]:
    return {"x": torch.zeros(megabytes * MB // 4)}


def test_memory_of_a_copy_is_used_again() -> None:
    ring, state = SnapshotRing(2), big()
    blocks = []
    for index in range(5):
        ring.take(state, index)
        newest = ring.newest
        assert newest is not None
        assert newest.block is not None
        blocks.append(newest.block.data_ptr())
    assert len(ring) == 2
    assert blocks[2:] == [blocks[0], blocks[1], blocks[0]]
    assert ring.nbytes == 2 * (MB + 64)


@pytest.mark.parametrize(("megabytes", "count"), [(10, 3), (3, 2), (2, 1)])
def test_memory_is_bounded(megabytes: int, count: int) -> None:
    ring, state = SnapshotRing(3, megabytes * MB), big()
    for index in range(5):
        assert ring.take(state, index)
        assert ring.nbytes <= megabytes * MB
    assert len(ring) == count
    assert (ring.reason is None) == (count == 3)
    newest = ring.newest
    assert newest is not None
    assert newest.note == 4


def test_a_copy_that_does_not_fit_turns_copies_off_and_says_so() -> None:
    ring = SnapshotRing(2, MB)
    assert not ring.take(big(), 0)
    assert ring.is_off
    assert ring.reason is not None
    assert "1.05 MB" in ring.reason
    assert ring.nbytes == 0
    assert not ring.take({"x": torch.zeros(2)}, 1)


@pytest.mark.parametrize("bound", [8 * MB, 3 * MB])
def test_a_run_that_grows_gets_other_memory(bound: int) -> None:
    """Moments come with the first step."""
    ring = SnapshotRing(1, bound)
    assert ring.take(big(1), 0)
    assert ring.take(big(2), 1)
    assert len(ring) == 1
    assert ring.nbytes == 2 * MB + 64


def test_the_default_bound_is_a_quarter_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_bytes() < 2**50
    monkeypatch.setattr(snapshots, "free_bytes", lambda: 4000)
    assert SnapshotRing(1).max_bytes == 1000


def test_a_system_that_tells_nothing_sets_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "_available", lambda: None)
    monkeypatch.setattr(machine_load, "_left_in_cgroup", lambda: None)
    assert free_bytes() == 2**62


# ---- copies that are none ----


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_copy_that_was_interrupted_does_not_count(error: type[BaseException]) -> None:
    ring, state = SnapshotRing(1), {"x": torch.zeros(8), "y": torch.zeros(8)}
    ring.take(state, "good")

    def interrupt(*args: Any) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "checksum", interrupt)  # after the bytes, before the copy counts
        with pytest.raises(error):
            ring.take(state, "half")
    assert len(ring) == 0
    assert ring.take(state, "next")


@pytest.mark.parametrize("place", [64, 70, -1])
def test_a_copy_that_somebody_wrote_into_is_refused(place: int) -> None:
    ring = SnapshotRing(1)
    ring.take({"x": torch.randn(16)}, None)
    newest = ring.newest
    assert newest is not None
    assert newest.block is not None
    assert newest.reader() is not None
    newest.block[place] ^= 1
    assert newest.reader() is None


# ---- compression ----


@pytest.fixture
def packer() -> Any:
    pytest.importorskip("zstandard")
    packer = Packer()
    yield packer
    packer.close()


def test_compressed_copies_are_the_same_and_smaller(packer: Packer) -> None:
    net, ring = model(), SnapshotRing(3, None, packer)
    net.register_buffer("large", torch.randn(3 * MB // 2))
    net.register_buffer("halves", torch.randn(MB).bfloat16())
    live = LiveState(net, [])
    states = []
    for index in range(4):
        with torch.no_grad():
            net.get_buffer("large").mul_(1.01)
        states.append(everything(net, torch.optim.SGD(net.parameters(), lr=0.1)))
        packer.wait()
        assert ring.take(live.gather(), index)
    packer.wait()
    assert packer.error is None
    assert len(ring) == 3
    raw = 8 * MB
    assert ring.nbytes < raw + 3 * 0.92 * raw  # what is written next, and three that are compressed
    for index in (3, 2, 1):
        assert restored(ring, live) == index
        found = everything(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert not differences(states[index], found)
        ring.drop_newest()
    ring.close()


def test_a_copy_waits_for_the_one_before(packer: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, state, go = SnapshotRing(2, None, packer), big(), threading.Event()
    own = packer._codec

    class Slow:
        ZstdDecompressor, ZstdError = own.ZstdDecompressor, own.ZstdError

        @staticmethod
        def ZstdCompressor(level: int) -> Any:
            go.wait(10)
            return own.ZstdCompressor(level=level)

    monkeypatch.setattr(packer, "_codec", Slow)
    assert ring.take(state, 0)
    assert not ring.take(state, 1)  # and does not block
    newest = ring.newest
    assert newest is not None
    assert newest.note == 0
    assert newest.reader() is not None
    go.set()
    packer.wait()
    assert ring.take(state, 1)
    ring.close()
    assert not [each for each in threading.enumerate() if each.name == "autoprec-compress"]


def test_a_deterministic_run_waits_instead(packer: Packer) -> None:
    ring, state = SnapshotRing(2, None, packer), big()
    torch.use_deterministic_algorithms(True)
    try:
        assert all(ring.take(state, index) for index in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    ring.close()


def test_a_fault_of_the_thread_is_kept_for_its_owner(packer: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, state = SnapshotRing(2, None, packer), big()
    monkeypatch.setattr(packer, "_codec", None)
    ring.take(state, 0)
    packer.wait()
    assert isinstance(packer.error, AttributeError)
    assert ring.take(state, 1)
    assert ring.take(state, 2)
    newest = ring.newest
    assert newest is not None
    assert newest.note == 2
    assert newest.reader() is not None
    ring.close()


def test_damage_of_a_compressed_copy_is_found(packer: Packer) -> None:
    ring = SnapshotRing(2, None, packer)
    for index in range(2):
        packer.wait()
        ring.take(big(), index)
    packer.wait()
    ring.drop_newest()
    oldest = ring.newest
    assert oldest is not None
    assert oldest.block is None
    assert oldest.packed is not None
    assert oldest.reader() is not None
    oldest.packed._parts[0] = oldest.packed._parts[0][:-3]
    assert oldest.reader() is None
    ring.close()


def test_compression_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, RollbackConfig

    monkeypatch.setitem(sys.modules, "zstandard", None)
    config = AutoPrecisionConfig(rollback=RollbackConfig(compress=True))
    with pytest.raises(ModuleNotFoundError, match=r"pip install '.\[compress\]'"):
        AutoPrecisionCallback(config=config)


def test_the_benchmark_of_copies_measures_twelve_bytes_a_weight_under_adam() -> None:
    from benchmarks.snapshots import measure_cost
    from benchmarks.workloads import WORKLOADS

    cost = measure_cost(WORKLOADS["mlp-128-64"], 6)
    assert 12.0 <= cost.nbytes / cost.weights < 12.5
    assert min(cost.step, cost.copy, cost.boundary) > 0
    assert cost.share(100) > cost.share(200)
