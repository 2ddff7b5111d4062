"""Buffers go back to their value at the start of a window whose step is skipped.

Time budget: 5 s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.buffers import BufferShadow


class Counter(nn.Module):
    """Writes its buffers in the ways that modules do."""

    table: Tensor
    count: Tensor
    history: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("history", torch.zeros(2), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("nothing", None)

    def in_place(self) -> None:
        self.count += 1
        self.history[0] = 7.0

    def replace(self) -> None:
        self.count = self.count + 1
        self.history = torch.full((2,), 7.0)

    def grow(self) -> None:
        self.history = torch.cat([self.history, torch.ones(1)])

    def through_data(self) -> None:
        self.history.data.add_(1.0)

    def bind_data(self) -> None:
        self.history.data = torch.full((2,), 7.0)


WRITES = {name: getattr(Counter, name) for name in ("in_place", "replace", "grow", "through_data", "bind_data")}
every_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(module: nn.Module, expected: dict[str, Tensor]) -> None:
    found = values(module)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@every_write
def test_a06_first_window(write: Callable[[Counter], None]) -> None:
    module = Counter()
    shadow, before = BufferShadow(module), values(module)
    shadow.refresh()
    write(module)
    assert shadow.restore() == []
    assert_same(module, before)


@every_write
def test_a06_later_windows_keep_what_applied_steps_wrote(write: Callable[[Counter], None]) -> None:
    module = Counter()
    shadow = BufferShadow(module)
    for _ in range(3):
        shadow.refresh()
        write(module)
    shadow.refresh()
    before = values(module)
    write(module)
    assert shadow.restore() == []
    assert_same(module, before)
    write(module)
    shadow.refresh()
    after = values(module)
    write(module)
    shadow.restore()
    assert_same(module, after)


@pytest.mark.parametrize("name", ["in_place", "replace", "grow"])
def test_a06_a_buffer_that_is_written_late_is_put_back(name: str) -> None:
    module = Counter()
    shadow = BufferShadow(module)
    for _ in range(4):
        shadow.refresh()
    before = values(module)
    WRITES[name](module)
    assert shadow.restore() == []
    assert_same(module, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a06_statistics_of_batch_norm(dtype: torch.dtype, momentum: float | None) -> None:
    norm, other = nn.BatchNorm2d(4, momentum=momentum), nn.InstanceNorm2d(4, track_running_stats=True)
    net = nn.Sequential(nn.Conv2d(1, 4, 1), norm, other)
    shadow = BufferShadow(net)
    for _ in range(3):
        shadow.refresh()
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            net(torch.randn(2, 1, 3, 3))
    shadow.refresh()
    before = values(net)
    net(torch.full((2, 1, 3, 3), float("nan")))
    assert norm.running_mean is not None
    assert norm.running_mean.isnan().all()
    assert shadow.restore() == []
    assert_same(net, before)


def test_a06_two_writes_in_one_window_go_back_to_its_start() -> None:
    module = Counter()
    shadow, before = BufferShadow(module), values(module)
    shadow.refresh()
    for _ in range(3):  # three micro-batches
        module.in_place()
    shadow.restore()
    assert_same(module, before)


def test_identity_of_a_buffer_is_kept() -> None:
    module = Counter()
    shadow, table, history = BufferShadow(module), module.table, module.history
    shadow.refresh()
    module.in_place()
    shadow.restore()
    assert module.table is table
    assert module.history is history
    module.replace()
    shadow.restore()
    assert module.history is history


def test_nothing_written_means_nothing_changed() -> None:
    module = Counter()
    shadow = BufferShadow(module)
    for _ in range(3):
        shadow.refresh()
        assert shadow.restore() == []
    assert_same(module, values(Counter()))


@pytest.mark.parametrize("name", ["through_data", "bind_data"])
def test_a06_a_hidden_late_write_is_named_once_and_then_put_back(name: str) -> None:
    module = Counter()
    shadow = BufferShadow(module)
    for _ in range(3):
        shadow.refresh()
    WRITES[name](module)
    assert shadow.restore() == ["history"]  # nobody knows in which window it was written
    shadow.refresh()
    before = values(module)
    module.history.data.add_(3.0)
    assert shadow.restore() == []
    assert_same(module, before)


def test_a_large_mask_written_late_is_named_and_not_guessed() -> None:
    module = Counter()
    shadow = BufferShadow(module)
    for _ in range(3):
        shadow.refresh()
    module.mask[0] = False
    assert shadow.restore() == ["mask"]


def test_a_buffer_deleted_before_the_window_stays_deleted() -> None:
    module = Counter()
    shadow = BufferShadow(module)
    for _ in range(2):
        shadow.refresh()
    del module.history
    module.table = None  # type: ignore[assignment]
    module.nothing = torch.ones(2)
    shadow.refresh()
    assert shadow.restore() == []
    assert not hasattr(module, "history")
    assert module.table is None
    assert torch.equal(module.nothing, torch.ones(2))


def test_a_buffer_deleted_in_the_skipped_window_comes_back() -> None:
    module = Counter()
    shadow, before = BufferShadow(module), values(module)
    for _ in range(2):
        shadow.refresh()
    module.history = None  # type: ignore[assignment]
    shadow.restore()
    assert_same(module, before)


def test_shared_and_copied_modules() -> None:
    norm = nn.BatchNorm1d(2)
    net = nn.Sequential(norm, norm)
    shadow = BufferShadow(net)
    shadow.refresh()
    before, other = values(net), copy.deepcopy(net)
    net(torch.randn(4, 2))
    other(torch.randn(4, 2))
    shadow.restore()
    assert_same(net, before)
    assert norm.num_batches_tracked == 0
    assert other[0].num_batches_tracked == 2


def test_inference_buffers_are_left_alone() -> None:
    module = Counter()
    with torch.inference_mode():
        module.table = torch.arange(4.0)
    shadow = BufferShadow(module)
    shadow.refresh()
    module.in_place()
    assert shadow.restore() == []
    assert int(module.count) == 0


def add_layer(net: nn.Sequential) -> None:
    net.add_module("late", nn.BatchNorm1d(4))


def replace_layer(net: nn.Sequential) -> None:
    net[1] = nn.BatchNorm1d(4)


def register(net: nn.Sequential) -> None:
    net[0].register_buffer("calls", torch.zeros(()))


def fill(net: nn.Sequential) -> None:
    net[0].nothing = torch.zeros(2)


LATE = {function.__name__: function for function in (add_layer, replace_layer, register, fill)}


def touch(net: nn.Sequential) -> None:
    """Writes every buffer, as a forward in training does."""
    net(torch.rand(8, 4))
    for _, buffer in net.named_buffers():
        buffer.add_(1)


@pytest.mark.parametrize("change", LATE.values(), ids=LATE)
def test_a06_buffers_that_appear_in_mid_run_are_put_back(change: Callable[[nn.Sequential], None]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[0].register_buffer("nothing", None)
    shadow = BufferShadow(net)
    for _ in range(3):
        shadow.refresh()
        touch(net)
    change(net)
    for _ in range(3):  # the first window that sees them, and two later ones
        shadow.refresh()
        before = values(net)
        touch(net)
        assert shadow.restore() == []
        assert_same(net, before)
        touch(net)


@pytest.mark.parametrize("change", LATE.values(), ids=LATE)
def test_a06_buffers_that_appear_in_the_skipped_window_are_named(change: Callable[[nn.Sequential], None]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[0].register_buffer("nothing", None)
    shadow = BufferShadow(net)
    for _ in range(3):
        shadow.refresh()
        touch(net)
    change(net)
    lost = shadow.restore()
    assert (lost == []) == (change is fill)  # None is a value to go back to
    shadow.refresh()
    before = values(net)
    touch(net)
    assert shadow.restore() == []
    assert_same(net, before)


def restored_after(module: nn.Module, write: Callable[[Any], None], windows: int = 3) -> list[str]:
    """Lets ``windows`` windows pass, then writes and restores; the values must be those before the write."""
    shadow = BufferShadow(module)
    for _ in range(windows):
        shadow.refresh()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    write(module)
    lost = shadow.restore()
    shadow.refresh()
    for name, buffer in module.named_buffers():
        assert buffer.shape == before[name].shape
        assert torch.equal(buffer.to_dense(), before[name].to_dense()), name
    return lost


class Holder(nn.Module):
    def __init__(self, value: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("value", value)


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {"coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("windows", [1, 3])
def test_sparse_buffers(layout: str, windows: int) -> None:
    value = SPARSE[layout](torch.eye(4))
    assert restored_after(Holder(value), lambda module: module.value.mul_(2), windows) == []
    assert restored_after(Holder(value), lambda module: setattr(module, "value", value * 2), windows) == []


def resized(module: Any) -> None:
    module.value.resize_(5, 3).fill_(1.0)


def grown(module: Any) -> None:
    module.value.data = torch.cat([module.value, torch.ones(1, 3)])


@pytest.mark.parametrize("write", [resized, grown])
@pytest.mark.parametrize("rows", [1, 2])  # one row would broadcast without an error
def test_a_buffer_that_grows_in_place(write: Callable[[Any], None], rows: int) -> None:
    module = Holder(torch.zeros(rows, 3))
    found = module.value
    restored_after(module, write, windows=1)
    assert module.value is found


def test_lazy_buffers_are_kept_from_their_first_window_on() -> None:
    net = nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 1))
    shadow = BufferShadow(net)
    shadow.refresh()
    net(torch.rand(8, 4))
    for _ in range(2):
        shadow.refresh()
        before = values(net)
        net(torch.rand(8, 4))
        assert shadow.restore() == []
        assert_same(net, before)
        net(torch.rand(8, 4))


@pytest.mark.parametrize("windows_between", [0, 1, 3])
def test_a_buffer_that_is_emptied_and_filled_again(windows_between: int) -> None:
    module: Any = Holder(torch.zeros(2))
    shadow = BufferShadow(module)
    for _ in range(2):
        shadow.refresh()
        module.value += 1
    module.value = None
    for _ in range(windows_between):
        shadow.refresh()
    shadow.refresh()
    module.value = torch.full((2,), math.inf)
    assert shadow.restore() == []
    assert module.value is None  # as at the start of the window
    module.value = torch.ones(2)
    shadow.refresh()
    module.value.fill_(math.inf)
    assert shadow.restore() == []
    assert torch.equal(module.value, torch.ones(2))


def test_a_buffer_under_a_new_name() -> None:
    module = Holder(torch.zeros(2))
    shadow = BufferShadow(module)
    shadow.refresh()
    del module.value
    module.register_buffer("other", torch.ones(2))
    shadow.refresh()
    other: Any = module.other
    other.fill_(math.nan)
    assert shadow.restore() == []
    assert torch.equal(other, torch.ones(2))


def test_layers_that_left_the_model_are_forgotten() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    shadow = BufferShadow(net)
    for _ in range(10):
        shadow.refresh()
        net[1] = nn.BatchNorm1d(4)
    shadow.refresh()
    assert len(shadow._entries) == 3
