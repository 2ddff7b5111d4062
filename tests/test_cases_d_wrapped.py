"""Case D-03: fp8 where linear layers are hidden in adapters and wrappers. What ran is said, and emulation is called so.

Time budget: 20 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW

from autoprec import Action, AutoPrecisionCallback, ops
from tests.support import Task, all_in, assert_finite, cpu, fp16cpu, reported, rows, scripted

BF16 = torch.bfloat16


@pytest.fixture
def report(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    return reported(caplog, monkeypatch)


class Adapted(nn.Module):
    """A frozen layer and two small ones beside it, as adapters have it."""

    def __init__(self, inner: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x) + self.up(self.down(x))
        return output


class Reads(nn.Module):
    """Uses the weight of the layer inside without calling it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.inner.weight, self.inner.bias)


class Scales(nn.Linear):
    """A subclass whose forward is its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


def ran(root: nn.Module) -> dict[str, set[str]]:
    """From now on, by name, in which format each call of a linear layer ran, judged by its result."""
    found: dict[str, set[str]] = {}

    def hook(name: str, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        x, weight = args[0].detach(), module.weight.detach()
        bias = None if module.bias is None else module.bias.detach()
        with torch.autocast("cpu", enabled=False):
            results = {
                "fp8": ops.linear(x, weight, bias, "fp8"),
                "int8": ops.linear(x, weight, bias, "int8"),
                "bf16": nn.functional.linear(x.to(BF16), weight.to(BF16), None if bias is None else bias.to(BF16)),
                "fp32": nn.functional.linear(x.float(), weight, bias),
            }
        same = [key for key, value in results.items() if value.dtype == output.dtype and torch.equal(value, output)]
        found.setdefault(name, set()).update(same[:1] if len(same) == 1 else [f"unclear: {same}"])

    for name, module in root.named_modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(functools.partial(hook, name))
    return found


def task_of(net: nn.Module, **kwargs: Any) -> Task:
    torch.manual_seed(0)
    return Task(net, torch.randn(48, 32), 16, **kwargs)


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
@pytest.mark.parametrize("start", ["32-true", "bf16-mixed", "fp16"])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_d03_layers_inside_a_wrapper_are_found_and_run(
    name: str, start: str, optimizer: Callable[..., Any], report: Callable[[], str]
) -> None:
    net = nn.Sequential(Adapted(nn.Linear(32, 32)), nn.ReLU(), nn.Sequential(Adapted(nn.Linear(32, 16))))
    task, ap = task_of(net, optimizer=lambda p: optimizer(p, lr=1e-3)), scripted({0: all_in(name)})
    found = ran(task)
    base: dict[str, Any] = {"plugins": fp16cpu(128.0)} if start == "fp16" else {"precision": start}
    cpu(callbacks=[ap], **base).fit(task)
    layers = [f"net.{block}.{layer}" for block in ("0", "2.0") for layer in ("inner", "down", "up")]
    assert found == dict.fromkeys(layers, {name})
    assert ap.precision_map() == dict.fromkeys(layers, name)
    assert {d.outcome for d in rows(ap.history, "precision")} == {"applied"}
    assert "calls ran in" not in report()
    assert "never called" not in report()
    assert_finite(task)


def test_d03_adapters_of_a_rank_that_fp8_cannot_take_are_listed(report: Callable[[], str]) -> None:
    task, ap = task_of(nn.Sequential(Adapted(nn.Linear(32, 32), rank=4))), scripted({0: all_in("fp8")})
    found = ran(task)
    cpu(callbacks=[ap]).fit(task)
    assert found == {"net.0.inner": {"fp8"}, "net.0.down": {"fp32"}, "net.0.up": {"fp32"}}
    assert [(d.unit, d.outcome) for d in rows(ap.history, "precision")] == [
        ("net.0.inner", "applied"),
        ("net.0.down", "refused"),
        ("net.0.up", "refused"),
    ]
    assert "refused    net.0.down to fp8: the unit cannot run in fp8" in report()


@pytest.mark.parametrize(("rank", "adapter"), [(16, "fp8"), (4, "fp32")])
@pytest.mark.parametrize("policy", ["scripted", "fixed"])
def test_d03_layers_adapted_by_peft(rank: int, adapter: str, policy: str, report: Callable[[], str]) -> None:
    peft = pytest.importorskip("peft")
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    config = peft.LoraConfig(r=rank, target_modules=["0"], init_lora_weights=False)
    task = task_of(peft.get_peft_model(net, config))
    ap = scripted({0: all_in("fp8")}) if policy == "scripted" else AutoPrecisionCallback("fixed:fp8")
    found = ran(task)
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    cpu(callbacks=[ap]).fit(task)
    block = "net.base_model.model"
    expected = {f"{block}.0.base_layer": "fp8", f"{block}.2": "fp8"}
    expected |= {f"{block}.0.lora_{part}.default": adapter for part in "AB"}
    assert found == {name: {format_name} for name, format_name in expected.items()}
    assert ap.precision_map() == expected
    assert "emulated on this device" in report()
    changed = {name for name, p in task.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora" in name}


def test_d03_a_layer_whose_weight_others_read_is_said_not_to_run(report: Callable[[], str]) -> None:
    """Nothing runs in fp8 here although the request was legal: the table must not pass it off as fp8."""
    task, ap = task_of(nn.Sequential(Reads(nn.Linear(32, 32)), nn.Linear(32, 32))), scripted({0: all_in("fp8")})
    found = ran(task)
    cpu(callbacks=[ap]).fit(task)
    assert found == {"net.1": {"fp8"}}
    (line,) = [line for line in report().splitlines() if line.strip().startswith("fp8")]
    assert "net.0.inner: never called" in line
    assert "net.1" not in line


@pytest.mark.parametrize(
    "make",
    [lambda: Scales(32, 32), lambda: parametrizations.weight_norm(nn.Linear(32, 32))],
    ids=["own", "parametrized"],
)
@pytest.mark.parametrize("name", ["fp8", "int8", "tf32"])
def test_d03_layers_with_a_forward_of_their_own_are_refused(name: str, make: Callable[[], nn.Module]) -> None:
    task, ap = task_of(nn.Sequential(make(), nn.Linear(32, 32))), scripted({0: all_in(name)})
    cpu(callbacks=[ap]).fit(task)
    (refused,) = rows(ap.history, "precision", "refused")
    assert (refused.unit, refused.applied) == ("net.0", "fp32")
    assert refused.reason == f"the unit cannot run in {name}; legal here: fp32, bf16, fp16"
    assert ap.precision_map() == {"net.0": "fp32", "net.1": name}


def test_d03_a_forward_replaced_on_the_instance_is_left_alone(report: Callable[[], str]) -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    plain = net[0].forward
    net[0].forward = lambda x: plain(x) * 0.5
    task, ap = task_of(net), scripted({0: Action(precision={"net.*": "fp8"})})
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net.0": "fp32", "net.1": "fp8"}
    assert "left alone net.0: its `forward` is replaced on the instance" in report()


@pytest.mark.parametrize(
    ("name", "net"),
    [
        ("fp8", lambda: nn.Sequential(nn.Linear(32, 32))),
        ("fp16", lambda: nn.Sequential(nn.Linear(32, 32))),
        ("tf32", lambda: nn.Sequential(nn.Linear(32, 32))),
        ("int8", lambda: nn.Sequential(nn.Unflatten(1, (4, 8)), nn.Conv1d(4, 4, 3))),
        ("fp8", lambda: nn.Sequential(nn.Unflatten(1, (4, 8)), nn.Conv1d(4, 4, 3))),
        ("bf16", lambda: nn.Sequential(nn.Linear(32, 32))),
    ],
    ids=["fp8", "fp16", "tf32", "int8 conv", "fp8 conv", "bf16"],
)
@pytest.mark.parametrize("way", ["script", "request"])
def test_d03_emulation_is_called_so_in_table_and_record(
    name: str, net: Callable[[], nn.Module], way: str, report: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoprec.units.native_formats", lambda device: ("fp32", "bf16", "int8"))
    task, ap = task_of(net()), scripted({1: all_in(name)} if way == "script" else {})
    if way == "request":
        task._loss = asking(ap, name)
    cpu(callbacks=[ap]).fit(task)
    *_, applied = rows(ap.history, "precision", "applied")
    assert applied.applied == name
    (line,) = [line for line in report().splitlines() if line.strip().startswith(name)]
    is_emulated = name != "bf16"
    assert applied.reason.endswith("; emulated on this device") is is_emulated
    assert ("emulated on this device" in line) is is_emulated


def asking(ap: AutoPrecisionCallback, name: str) -> Callable[[nn.Module, Any, int], Tensor]:
    def loss(net: nn.Module, batch: Any, index: int) -> Tensor:
        if index == 0:
            ap.request(all_in(name))
        output: Tensor = net(batch)
        return output.float().pow(2).mean()

    return loss
