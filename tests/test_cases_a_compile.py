"""Case A-20: compiled modules.

Time budget: 30 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from autoprec import (
    Action,
)
from tests.support import (
    Task,
    Watch,
    cpu,
    loader,
    rows,
    scripted,
)


class Backend:
    """Runs what the compiler traced as it is, and counts graphs and calls."""

    def __init__(self) -> None:
        self.graphs = 0
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def backend() -> Iterator[Backend]:
    torch._dynamo.reset()
    yield Backend()
    torch._dynamo.reset()


class Counts(Callback):
    """Graphs and calls of compiled code after each batch."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.graphs: list[int] = []
        self.calls: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.graphs.append(self.backend.graphs)
        self.calls.append(self.backend.calls)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))


def compiled_as(how: str, backend: Backend) -> tuple[LightningModule, Any]:
    """The task, and what to hand to ``fit``."""
    net: Any = two_layers()
    if how == "net":
        net = torch.compile(net, backend=backend)
    elif how == "in_place":
        net.compile(backend=backend)
    elif how == "layers":
        net[0].compile(backend=backend)
        net[2] = torch.compile(net[2], backend=backend)
    task = Task(net, torch.rand(24 * 8, 16))
    return task, torch.compile(task, backend=backend) if how == "module" else task


def cycle(maps: list[dict[str, str]], times: int = 1) -> dict[int, Action]:
    return {step: Action(precision=m) for step, m in enumerate(maps * times)}


WAYS = ["net", "in_place", "layers", "module"]
THREE = [{"net.0": "bf16", "net.2": "fp32"}, {"net.0": "bf16", "net.2": "bf16"}, {"net.0": "fp32", "net.2": "fp32"}]


@pytest.mark.parametrize("how", WAYS)
def test_a20_known_map_does_not_compile_again(how: str, backend: Backend) -> None:
    task, to_fit = compiled_as(how, backend)
    ap, counts = scripted(cycle(THREE, 6), knobs=("precision",)), Counts(backend)
    cpu(callbacks=[ap, counts], max_steps=18).fit(to_fit)
    assert ap.applied_steps == 18
    # the first rounds: every map, and batch indices 0 and 1, which the compiler takes for constants
    assert counts.graphs[8] == counts.graphs[-1] > 0
    assert counts.graphs[-1] <= 8
    per_step = np.diff(counts.calls)
    assert (per_step >= 1).all()  # never fell back to uncompiled code


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", ["bf16", "fp16", "int8"])
def test_a20_steady_state_does_not_compile(how: str, name: str, backend: Backend) -> None:
    task, to_fit = compiled_as(how, backend)
    ap, counts = scripted({2: Action(precision={"*": name})}, knobs=("precision", "loss_scale")), Counts(backend)
    cpu(callbacks=[ap, counts], max_steps=16).fit(to_fit)
    assert set(ap.precision_map().values()) == {name}
    assert counts.graphs[6] == counts.graphs[-1]
    # from the first steered window on: torch does not compile a bare layer of its own
    assert (np.diff(counts.calls)[1:] >= 1).all()


TEN = [
    {"net.0": a, "net.2": b}
    for a, b in [
        ("fp32", "bf16"),
        ("bf16", "fp32"),
        ("bf16", "bf16"),
        ("fp16", "fp32"),
        ("fp32", "fp16"),
        ("int8", "fp32"),
        ("fp32", "int8"),
        ("int8", "int8"),
        ("int8", "bf16"),
        ("bf16", "int8"),
    ]
]


@pytest.mark.parametrize("how", ["net", "in_place", "module"])
def test_a20_ten_maps_stay_below_the_limit_of_the_compiler(how: str, backend: Backend) -> None:
    """Past it the compiler gives up and everything runs uncompiled from then on."""
    task, to_fit = compiled_as(how, backend)
    ap, counts = scripted(cycle(TEN, 2), knobs=("precision", "loss_scale")), Counts(backend)
    watch = Watch(ap)
    with pytest.warns(UserWarning, match="compile"):
        cpu(callbacks=[ap, counts, watch], max_steps=22).fit(to_fit)
    assert (np.diff(counts.calls) >= 1).all()
    assert counts.graphs[10] == counts.graphs[-1]  # the second round compiles nothing
    assert len({tuple(m.items()) for m in watch.maps}) < torch._dynamo.config.recompile_limit
    refused = rows(ap.history, "precision", "refused")
    assert refused
    assert all("compile" in d.reason for d in refused)


def test_a20_batch_sizes_compile_once_more_at_most(backend: Backend) -> None:
    net: Any = torch.compile(two_layers(), backend=backend)
    sizes = [8, 4, 16, 6, 32, 8, 4, 16, 6, 32]

    class Sized(Task):
        def train_dataloader(self) -> Any:
            return loader([torch.rand(size, 16) for size in sizes], None)

    ap, counts = scripted({0: Action(precision={"*": "bf16"})}, knobs=("precision",)), Counts(backend)
    cpu(callbacks=[ap, counts]).fit(Sized(net, None))
    assert counts.graphs[-1] <= counts.graphs[0] + 1
    assert counts.graphs[1] == counts.graphs[-1]


@pytest.mark.parametrize("name", ["fp32", "bf16", "tf32", "fp16", "fp8", "int8"])
def test_a20_full_graphs_stay_full_and_compute_what_eager_code_does(name: str, backend: Backend) -> None:
    losses = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        net: Any = two_layers()
        if is_compiled:
            net = torch.compile(net, backend=backend, fullgraph=True)
        ap = scripted({0: Action(precision={"*": name})}, knobs=("precision", "loss_scale"))
        watch = Watch(ap)
        cpu(callbacks=[ap, watch]).fit(Task(net, torch.rand(64, 16)))
        assert ap.precision_map() == {"net.0": name, "net.2": name}
        losses.append(watch.losses)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a20_compiled_module_is_the_users_again_after_fit(backend: Backend) -> None:
    task, _ = compiled_as("net", backend)
    keys = list(task.state_dict())
    ap = scripted({0: Action(precision={"*": "bf16"})}, knobs=("precision",))
    cpu(callbacks=[ap], max_steps=4).fit(task)
    assert list(task.state_dict()) == keys
    net: Any = task.net
    assert type(net._orig_mod[0]) is nn.Linear
    calls, graphs = backend.calls, backend.graphs
    for _ in range(3):
        assert net(torch.rand(8, 16)).dtype is torch.float32
    assert backend.calls == calls + 3
    assert backend.graphs <= graphs + 1
