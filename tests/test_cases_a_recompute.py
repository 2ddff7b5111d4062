"""Case A-08: activation checkpointing.

Time budget: 10 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec import Action
from tests.support import (
    Ask,
    Manual,
    Task,
    Watch,
    all_in,
    assert_finite,
    cpu,
    rows,
    scripted,
    watch_dtypes,
)


class Checkpointed(nn.Module):
    """Two linear layers, recomputed in the backward."""

    def __init__(self, use_reentrant: bool, body: nn.Module | None = None, times: int = 1) -> None:
        super().__init__()
        self.body = body or nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.use_reentrant = use_reentrant
        self.times = times

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()  # the reentrant form needs it
        for _ in range(self.times):
            x = checkpoint(self.body, x, use_reentrant=self.use_reentrant)
        return x


def checkpointed(use_reentrant: bool, ask: tuple[str, int, Action] | None, start: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    net = Checkpointed(use_reentrant, **kwargs)
    task = Task(net, torch.rand(24, 16))
    ap = scripted({0: Action(precision={"*": start})}, knobs=("precision",))
    asks = [] if ask is None else [Ask(ap, *ask)]
    watch, seen = Watch(ap), watch_dtypes(task)
    cpu(callbacks=[ap, *asks, watch]).fit(task)
    return ap, watch, seen


LAYER = "net.body.0"
TARGETS = [("bf16", "fp16"), ("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "int8"), ("int8", "fp8")]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("start", "target"), TARGETS)
def test_a08_precision_requested_before_the_backward_waits(use_reentrant: bool, start: str, target: str) -> None:
    ask = ("on_before_backward", 1, Action(precision={LAYER: target}))
    ap, watch, seen = checkpointed(use_reentrant, ask, start)
    _, expected, _ = checkpointed(use_reentrant, None, start)
    for window in (0, 1):
        assert all(map(torch.equal, watch.gradients[window], expected.gradients[window]))
    assert not all(map(torch.equal, watch.gradients[2], expected.gradients[2]))
    assert [(d.step, d.outcome) for d in rows(ap.history, "precision") if d.requested == target] == [
        (1, "deferred"),
        (2, "applied"),
    ]
    # forward and recomputation of each of the three batches
    assert len(seen[LAYER]) == 6
    assert seen[LAYER][0::2] == seen[LAYER][1::2]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "fp8", "int8"])
def test_a08_recomputation_changes_nothing(use_reentrant: bool, name: str) -> None:
    """Gradients equal those of the same layers without checkpointing, bit for bit."""
    _, watch, seen = checkpointed(use_reentrant, None, name)
    torch.manual_seed(0)
    plain = Task(Checkpointed(use_reentrant).body, torch.rand(24, 16))
    ap = scripted({0: Action(precision={"*": name})}, knobs=("precision",))
    expected = Watch(ap)
    cpu(callbacks=[ap, expected]).fit(plain)
    assert len(watch.gradients) == 3
    for ours, theirs in zip(watch.gradients, expected.gradients, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a08_mixed_formats_and_operations_between_them(use_reentrant: bool) -> None:
    """What runs between units takes the precision of the unit before it, in the recomputation as in the forward."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Any:
            y = self.a(x)
            y = torch.matmul(y, y.transpose(0, 1)) @ x
            return self.c(self.norm(self.b(y) + x))

    ask = ("on_before_backward", 1, Action(precision={"net.body.b": "fp32", "net.body.a": "bf16"}))
    results = []
    for asked in (ask, None):
        torch.manual_seed(0)
        task = Task(Checkpointed(use_reentrant, Between(), times=2), torch.rand(24, 16))
        mixed = {"net.body.a": "fp16", "net.body.b": "bf16", "net.body.c": "int8"}
        ap = scripted({0: Action(precision=mixed)}, knobs=("precision",))
        watch = Watch(ap)
        cpu(callbacks=[ap, watch] + ([Ask(ap, *asked)] if asked else [])).fit(task)
        assert (ap.applied_steps, ap.skipped_steps) == (3, 0)
        results.append(watch.gradients)
    for ours, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a08_every_base_precision(use_reentrant: bool, precision: Any) -> None:
    torch.manual_seed(0)
    ap, task = scripted(), Task(Checkpointed(use_reentrant), torch.rand(24, 16))
    ask = Ask(ap, "on_before_backward", 1, Action(precision={LAYER: "fp16"}))
    seen = watch_dtypes(task)
    cpu(precision=precision, callbacks=[ap, ask]).fit(task)
    assert ap.applied_steps == 3
    assert seen[LAYER][0::2] == seen[LAYER][1::2]
    assert seen[LAYER][-1] is torch.float16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a08_dropout_is_drawn_alike_in_the_recomputation(use_reentrant: bool) -> None:
    results = []
    for wrap in (True, False):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
        net: nn.Module = Checkpointed(use_reentrant, body) if wrap else body
        task = Task(net, torch.rand(24, 16))
        ap = scripted({0: all_in("bf16")}, knobs=("precision",))
        watch = Watch(ap)
        torch.manual_seed(1)
        cpu(callbacks=[ap, watch]).fit(task)
        results.append(watch.gradients)
    for ours, theirs in zip(*results, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a08_manual_optimization(use_reentrant: bool) -> None:
    results = []
    for is_asking in (True, False):
        torch.manual_seed(0)
        task = Manual(Checkpointed(use_reentrant), torch.rand(24, 16))
        ap = scripted({0: all_in("bf16")}, knobs=("precision",))
        asks = [Ask(ap, "on_before_backward", 1, Action(precision={LAYER: "fp16"}))] if is_asking else []
        watch = Watch(ap)
        cpu(callbacks=[ap, *asks, watch]).fit(task)
        results.append(watch.gradients)
    for ours, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert not all(map(torch.equal, results[0][2], results[1][2]))


def test_a08_recomputation_is_not_counted_as_a_forward() -> None:
    """An overflow in the recomputation would be reported twice, and buffers written twice."""
    body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    task = Task(Checkpointed(False, body), torch.rand(24, 16) * 1e5)
    ap = scripted({0: all_in("fp16")})
    cpu(callbacks=[ap], max_epochs=2).fit(task)
    assert ap.steering is not None
    assert ap.steering.fallback.overflows.get(LAYER) == 1
    assert ap.precision_map()[LAYER] == "fp32"
    assert_finite(task)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a08_recomputation_is_not_recorded(use_reentrant: bool) -> None:
    """Each layer's output counts once, also where it overflows and the step is good all the same."""
    names: list[list[str]] = []

    class Looks(Callback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            assert ap.steering is not None
            names.append([record.name for record in ap.steering.runtime.records if not record.is_input])

    first = nn.Linear(16, 16)
    nn.init.ones_(first.weight)
    body = nn.Sequential(first, nn.Tanh(), nn.Linear(16, 16))  # the infinite becomes one
    task = Task(Checkpointed(use_reentrant, body), torch.full((24, 16), 3e4))
    ap = scripted({0: all_in("fp16")}, knobs=("precision",), interval=2)  # the third window is sampled
    cpu(callbacks=[ap, Looks()]).fit(task)
    assert ap.steering is not None
    assert (ap.applied_steps, ap.skipped_steps) == (3, 0)
    assert names == [[LAYER, "net.body.2"]] * 3
    units = ap.steering.telemetry.units
    assert {name: unit.overflow_count for name, unit in units.items()} == {LAYER: 1, "net.body.2": 0}
    assert {name: unit.compute for name, unit in units.items()} == {LAYER: 8 * 16 * 16, "net.body.2": 8 * 16 * 16}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("name", "precision"), [("bf16", "32-true"), ("fp32", "bf16-mixed")])
def test_a08_backward_inside_the_training_step(use_reentrant: bool, name: str, precision: Any) -> None:
    """Without ``manual_backward`` the recomputation runs where the forward ran; torch would switch autocast off."""

    class Bare(Manual):
        def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()

    results = []
    for make in (Manual, Bare):
        torch.manual_seed(0)
        task = make(Checkpointed(use_reentrant, times=2), torch.rand(24, 16))
        ap = scripted({0: all_in(name)}, knobs=("precision",))
        watch, seen = Watch(ap), watch_dtypes(task)
        cpu(callbacks=[ap, watch], precision=precision).fit(task)
        assert ap.applied_steps == 3
        results.append((watch.gradients, seen))
    for ours, theirs in zip(results[0][0], results[1][0], strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert results[0][1] == results[1][1]
