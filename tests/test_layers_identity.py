"""A steered layer stays what it is: looks, hooks, copies, pickles, exports, classes.

Time budget: 20 s.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec.layers import Runtime, attach, detach, swapped
from autoprec.units import find_units
from tests.steered import (
    BF16,
    FORMATS_OF_A_LINEAR,
    LAYERS,
    TORCH_REMARKS,
    Make,
    Own,
    Scaled,
    attached,
    seeded,
    steered,
    tensors,
)

pytestmark = TORCH_REMARKS

# ---- a module stays what it is ----


@pytest.mark.parametrize("name", FORMATS_OF_A_LINEAR)
def test_a_steered_layer_looks_like_itself(name: str) -> None:
    layer = nn.Linear(16, 16)
    net = nn.Sequential(layer, nn.ReLU())
    parameters = list(net.named_parameters())
    before = repr(net), list(net.state_dict()), inspect.signature(layer.forward), inspect.signature(type(layer))
    with steered(net, name):
        assert isinstance(layer, nn.Linear)
        assert issubclass(type(layer), nn.Linear)
        assert (type(layer).__name__, type(layer).__module__) == ("Linear", nn.Linear.__module__)
        assert type(layer).__doc__ == nn.Linear.__doc__
        seen = repr(net), list(net.state_dict()), inspect.signature(layer.forward), inspect.signature(type(layer))
        assert seen == before
        assert all(a is b for (_, a), (_, b) in zip(net.named_parameters(), parameters, strict=True))
    assert type(layer) is nn.Linear
    assert "_autoprec" not in vars(layer)


def test_hooks_run_once_and_see_what_the_layer_takes_and_returns() -> None:
    layer = nn.Linear(16, 16)
    seen: list[tuple[str, torch.dtype]] = []
    layer.register_forward_pre_hook(lambda m, args: seen.append(("pre", args[0].dtype)))
    layer.register_forward_hook(lambda m, args, out: seen.append(("forward", out.dtype)))
    layer.register_full_backward_hook(lambda m, gi, go: seen.append(("backward", tensors(go)[0].dtype)))
    with steered(nn.Sequential(layer), "bf16"):
        layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert seen == [("pre", torch.float32), ("forward", BF16), ("backward", BF16)]
    layer(torch.randn(4, 16))
    assert seen[3:] == [("pre", torch.float32), ("forward", torch.float32)]


def test_detach_gives_every_class_back_at_any_time() -> None:
    net = nn.Sequential(*(seeded(make) for make, _ in LAYERS.values()), nn.LayerNorm(4), nn.BatchNorm1d(4))
    classes = [type(module) for module in net.modules()]
    units = find_units(net)
    for _ in range(2):
        attach(units, Runtime("cpu"))
        attach(units, Runtime("cpu"))
        assert [type(module) for module in net.modules()] != classes
        detach(units)
        detach(units)
        assert [type(module) for module in net.modules()] == classes
        assert not any("_autoprec" in vars(module) for module in net.modules())


def test_two_layers_of_one_class_share_one_steered_class() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    units, _ = attached(net, "bf16")
    assert type(net[0]) is type(net[1])
    detach(units)


def test_outside_a_training_step_a_layer_is_untouched() -> None:
    net, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
    plain = net(x)
    units, runtime = attached(net, "fp16")
    assert torch.equal(net(x), plain)
    with torch.autocast("cpu", BF16):
        assert net(x).dtype == BF16
    runtime.is_active = True
    assert torch.equal(net(x), plain)  # no autocast: nobody is in a step
    detach(units)


def test_a_region_that_the_user_protects_is_respected() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Conv1d(16, 4, 1))
    x = torch.randn(16, 16)
    plain = net(x)
    for name in FORMATS_OF_A_LINEAR:
        with steered(net, name), torch.autocast("cpu", enabled=False):
            assert torch.equal(net(x), plain)


def autocast_state() -> tuple[object, ...]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("name", FORMATS_OF_A_LINEAR)
def test_nothing_of_the_step_stays_in_torchs_state(name: str) -> None:
    before = autocast_state()
    net = nn.Sequential(nn.Linear(16, 16))
    with steered(net, name):
        net(torch.randn(16, 16))
    assert before == (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    with pytest.raises(RuntimeError), steered(net, name):
        net(torch.randn(16, 5))
    assert before == (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    assert type(net[0]) is nn.Linear


# ---- copies and pickles ----


class Reduced(nn.Linear):
    """Rebuilds itself through a function of its own."""

    def __reduce__(self) -> Any:
        return _rebuilt, (self.in_features, self.out_features, self.state_dict())


def _rebuilt(in_features: int, out_features: int, state: dict[str, Tensor]) -> Reduced:
    layer = Reduced(in_features, out_features)
    layer.load_state_dict(state)
    return layer


class DeepCopied(nn.Linear):
    """Copies itself as torch's parametrized modules do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepCopied:
        twin = self.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


class Slotted(nn.Linear):
    __slots__ = ("extra",)
    extra: float

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.extra


COPIED: dict[str, Make] = {
    "linear": lambda: nn.Linear(8, 6),
    "lstm": lambda: nn.LSTM(8, 6),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "subclass": lambda: Scaled(8, 6),
    "own parameter": Own,
    "own reduce": lambda: Reduced(8, 6),
    "own deepcopy": lambda: DeepCopied(8, 6),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)),
    "traced": lambda: torch.fx.symbolic_trace(nn.Bilinear(8, 8, 6)),
}


def assert_plain(module: nn.Module) -> None:
    for part in module.modules():
        assert "_autoprec" not in vars(part)
        assert "_autoprec_base" not in type(part).__dict__


@pytest.mark.parametrize("make", COPIED.values(), ids=COPIED)
def test_deepcopies_come_out_plain(make: Make) -> None:
    net = nn.Sequential(seeded(make))
    plain = type(net[0])
    units, runtime = attached(net, "bf16")
    runtime.is_active = True  # a copy made inside a step
    twin = copy.deepcopy(net)
    assert_plain(twin)
    assert isinstance(net[0], plain)
    assert "_autoprec" in vars(net[0])
    for (name, value), other in zip(net.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
        assert value.data_ptr() != other.data_ptr()
    detach(units)
    assert type(net[0]) is plain
    if plain.__name__ not in ("ParametrizedLinear", "Bilinear", "GraphModuleImpl"):
        assert type(twin[0]) is plain


@pytest.mark.parametrize("name", FORMATS_OF_A_LINEAR)
def test_a_parametrization_added_inside_a_step(name: str) -> None:
    """Torch derives the parametrized class from the one that it finds."""
    net = nn.Sequential(nn.Linear(16, 16))
    units, runtime = attached(net, name)
    runtime.is_active = True
    with torch.autocast("cpu", torch.bfloat16):
        nn.utils.parametrizations.weight_norm(net[0])
        inside = net(torch.ones(16, 16))
    detach(units)
    assert_plain(net[0])
    assert type(net[0]).__mro__[1] is nn.Linear
    assert torch.allclose(net(torch.ones(16, 16)), inside.float(), atol=0.1)
    with swapped(units), torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(net(torch.ones(16, 16)).float(), inside.float(), atol=0.1)


PICKLED = {name: make for name, make in COPIED.items() if name != "weight norm"}  # torch refuses to pickle that


@pytest.mark.parametrize("make", PICKLED.values(), ids=PICKLED)
def test_pickles_come_out_plain_and_do_not_name_the_plugin(make: Make) -> None:
    net = nn.Sequential(seeded(make))
    units, _ = attached(net, "bf16")
    for protocol in (2, 4, 5):
        data = pickle.dumps(net, protocol)
        assert b"autoprec" not in data.replace(b"autoprec_test", b"")
        twin = pickle.loads(data)
        assert_plain(twin)
        for value, other in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(value, other)
    detach(units)


def test_a_module_saved_inside_a_fit_loads_where_the_plugin_is_not_installed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.LSTM(6, 4), nn.Conv1d(4, 4, 1))
    units, _ = attached(net, "bf16")
    torch.save(net, tmp_path / "net.pt")
    detach(units)
    code = (
        "import sys, torch\n"
        "sys.modules['autoprec'] = None\n"
        "net = torch.load('net.pt', weights_only=False)\n"
        "print([type(m).__name__ for m in net], net[0](torch.ones(8)).dtype)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['Linear', 'LSTM', 'Conv1d'] torch.float32"


def test_slotted_layers_are_steered_or_refused_and_come_back() -> None:
    layer = Slotted(8, 8)
    layer.extra = 2.0
    net, x = nn.Sequential(layer), torch.randn(4, 8)
    plain = net(x)
    units, runtime = find_units(net), Runtime("cpu")
    refused = attach(units, runtime)
    assert set(refused) <= {"0"}
    detach(units)
    assert type(layer) is Slotted
    assert torch.equal(net(x), plain)


def test_a_class_with_a_registry_of_subclasses_is_refused_and_sees_nothing() -> None:
    seen: list[type] = []

    class Registered(nn.Linear):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            seen.append(cls)

    units = find_units(nn.Sequential(Registered(4, 4)))
    refused = attach(units, Runtime("cpu"))
    assert "__init_subclass__" in refused["0"]
    assert seen == []


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_a_class_that_cannot_be_extended_is_refused_with_the_reason(error: type[Exception]) -> None:
    class Sealing(type):
        def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
            if any(isinstance(base, Sealing) for base in bases):
                raise error("Final is final")
            return super().__new__(mcs, name, bases, body)

    class Final(nn.Linear, metaclass=Sealing):
        pass

    net = nn.Sequential(Final(4, 4), nn.Linear(4, 4))
    units = find_units(net)
    refused = attach(units, Runtime("cpu"))
    assert list(refused) == ["0"]
    assert "Final is final" in refused["0"]
    assert type(net[0]) is Final
    detach(units)
    assert type(net[1]) is nn.Linear


# ---- export, scripting, tracing ----


def test_a_restored_module_exports_scripts_and_traces() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    plain = net(x)
    with steered(net, "bf16"):
        net(x)
    exported = torch.export.export(net, (x,))
    targets = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.linear.default", "aten.relu.default"]
    assert torch.equal(exported.module()(x), plain)
    for program in (torch.jit.trace(net, x), torch.jit.script(net)):
        assert torch.equal(program(x), plain)
    buffer = io.BytesIO()
    torch.export.save(exported, buffer)
    assert b"autoprec" not in buffer.getvalue()


def test_export_between_steps_sees_the_plain_layer() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(4, 4, 1)), torch.randn(4, 8)
    units, _ = attached(net, "bf16")
    exported = torch.export.export(net, (x,))
    assert torch.equal(exported.module()(x), net(x))
    assert not any("to" in str(node.target) for node in exported.graph.nodes)
    detach(units)
