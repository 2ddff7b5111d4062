"""Decision units: which modules share a format, their names, what they may run in, and who is left alone.

Time budget: 10 s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from autoprec.formats import FORMATS
from autoprec.units import Unit, find_units, select

CAST = ("fp32", "bf16", "fp16")


def units_of(**modules: nn.Module) -> dict[str, Unit]:
    return {unit.name: unit for unit in find_units(nn.ModuleDict(modules))}


def only(module: nn.Module) -> Unit:
    (unit,) = find_units(nn.ModuleDict({"layer": module}))
    return unit


# ---- kinds, formats, counts ----


@pytest.mark.parametrize(
    ("make", "kind", "legal", "count"),
    [
        (lambda: nn.Linear(16, 32), "linear", tuple(FORMATS), 16 * 32 + 32),
        (lambda: nn.Linear(16, 30), "linear", ("fp32", "tf32", "bf16", "fp16", "int8"), 16 * 30 + 30),
        (lambda: nn.Conv1d(2, 3, 4), "conv", tuple(FORMATS), 2 * 3 * 4 + 3),
        (lambda: nn.Conv2d(2, 3, 4), "conv", tuple(FORMATS), 2 * 3 * 16 + 3),
        (lambda: nn.Conv3d(2, 3, 2), "conv", tuple(FORMATS), 2 * 3 * 8 + 3),
        (lambda: nn.ConvTranspose1d(2, 3, 4), "conv", tuple(FORMATS), 2 * 3 * 4 + 3),
        (lambda: nn.ConvTranspose2d(2, 3, 4), "conv", tuple(FORMATS), 2 * 3 * 16 + 3),
        (lambda: nn.ConvTranspose3d(2, 3, 2), "conv", tuple(FORMATS), 2 * 3 * 8 + 3),
        (lambda: nn.Embedding(5, 4), "embedding", ("fp32", "bf16", "fp16", "fp8", "int8"), 20),
        (lambda: nn.EmbeddingBag(5, 4), "embedding", CAST, 20),
        (lambda: nn.LSTM(4, 6), "rnn", CAST, 4 * 6 * (4 + 6 + 2)),
        (lambda: nn.GRU(4, 6), "rnn", CAST, 3 * 6 * (4 + 6 + 2)),
        (lambda: nn.RNN(4, 6), "rnn", CAST, 6 * (4 + 6 + 2)),
        (lambda: nn.LSTMCell(4, 6), "rnn", CAST, 4 * 6 * (4 + 6 + 2)),
        (lambda: nn.MultiheadAttention(8, 2), "attention", CAST, 4 * 8 * 8 + 4 * 8),
        (lambda: nn.Bilinear(2, 3, 4), "other", CAST, 2 * 3 * 4 + 4),
    ],
)
def test_layers_with_a_matrix(make: Callable[[], nn.Module], kind: str, legal: tuple[str, ...], count: int) -> None:
    unit = only(make())
    assert (unit.name, unit.kind, unit.legal, unit.parameter_count) == ("layer", kind, legal, count)
    assert unit.has_matrix
    assert unit.reason is None
    assert not unit.is_frozen
    assert set(unit.native) <= set(unit.legal)
    assert [unit.is_emulated(name) for name in unit.legal] == [name not in unit.native for name in unit.legal]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.LayerNorm(4), "norm"),
        (lambda: nn.GroupNorm(2, 4), "norm"),
        (lambda: nn.RMSNorm(4), "norm"),
        (lambda: nn.BatchNorm1d(4), "norm"),
        (lambda: nn.InstanceNorm2d(4, affine=True), "norm"),
        (lambda: nn.SyncBatchNorm(4), "norm"),
        (lambda: nn.PReLU(), "other"),
    ],
)
def test_vectors_are_units_that_a_star_leaves_out(make: Callable[[], nn.Module], kind: str) -> None:
    unit = only(make())
    assert (unit.kind, unit.has_matrix, unit.legal) == (kind, False, CAST)
    assert select([unit], "*") == []
    assert select([unit], "layer") == [unit]


def test_norms_of_other_libraries_are_known_by_name() -> None:
    class TinyRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    assert only(TinyRMSNorm()).kind == "norm"


def test_layers_without_parameters_are_no_units() -> None:
    assert find_units(nn.Sequential(nn.ReLU(), nn.Dropout(), nn.LayerNorm(4, elementwise_affine=False))) == []
    assert find_units(nn.Sequential()) == []


def test_frozen_layers_count_and_say_so() -> None:
    units = units_of(a=nn.Linear(4, 4).requires_grad_(False), b=nn.Linear(4, 4))
    units["b"].modules[0].bias.requires_grad_(False)
    assert (units["a"].is_frozen, units["b"].is_frozen) == (True, False)
    assert units["a"].reason is None


def test_order_depth_and_names_are_the_models() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), nn.Linear(4, 4))
    units = find_units(net)
    assert [(unit.name, unit.depth) for unit in units] == [
        ("0", 0.0),
        ("1.0", pytest.approx(1 / 3)),
        ("1.1", pytest.approx(2 / 3)),
        ("2", 1.0),
    ]
    assert [unit.name for unit in find_units(copy.deepcopy(net))] == [unit.name for unit in units]
    assert all(net.get_submodule(unit.name) is unit.modules[0] for unit in units)


def test_what_is_native_depends_on_the_device() -> None:
    layer = nn.Sequential(nn.Linear(16, 16))
    (cpu,), (other,) = find_units(layer), find_units(layer, torch.device("mps"))
    assert "fp16" not in cpu.native
    assert other.native == ("fp32", "fp16")
    assert other.is_emulated("int8")


# ---- wholes and owners ----


def test_attention_is_a_whole() -> None:
    units = units_of(layer=nn.TransformerEncoderLayer(8, 2, 16))
    assert [(u.name, u.kind) for u in units.values()] == [
        ("layer.self_attn", "attention"),
        ("layer.linear1", "linear"),
        ("layer.linear2", "linear"),
        ("layer.norm1", "norm"),
        ("layer.norm2", "norm"),
    ]
    assert len(units["layer.self_attn"].parameters) == 4


class Owner(nn.Module):
    """Owns a matrix directly and another one in a list."""

    def __init__(self, child: nn.Module | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 4))
        self.more = nn.ParameterList([nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(2))])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.scale + x @ self.more[0]
        return y


def test_parameter_lists_belong_to_their_owner() -> None:
    unit = only(Owner())
    assert (unit.kind, unit.parameter_count, unit.has_matrix, unit.legal) == ("other", 37, True, CAST)


def test_an_owner_with_layers_below_it_is_its_own_unit_and_not_chosen_by_a_star() -> None:
    units = units_of(owner=Owner(nn.Linear(4, 4)))
    assert list(units) == ["owner", "owner.child"]
    assert (units["owner"].parameter_count, units["owner"].has_matrix) == (37, False)
    assert select(list(units.values()), "*") == [units["owner.child"]]


def test_the_roots_own_parameters_are_left_alone() -> None:
    root = nn.Sequential(nn.Linear(4, 4))
    root.scale = nn.Parameter(torch.ones(3))
    units = find_units(root)
    assert [(u.name, u.legal) for u in units] == [("(root)", ("fp32",)), ("0", units[1].legal)]
    assert units[0].reason is not None
    assert "outside any forward" in units[0].reason


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(
    "holder",
    [
        Container(),
        nn.ModuleList([nn.ParameterList([nn.Parameter(torch.ones(4, 4))])]),
        nn.ModuleDict({"p": nn.ParameterDict({"a": nn.Parameter(torch.ones(4, 4))})}),
    ],
    ids=["module", "list", "dict"],
)
def test_container_without_a_forward_is_left_alone(holder: nn.Module) -> None:
    unit = only(holder)
    assert unit.legal == ("fp32",)
    assert unit.reason is not None
    assert "forward" in unit.reason


def parametrized_lstm() -> nn.Module:
    lstm: nn.Module = parametrizations.weight_norm(nn.LSTM(4, 4), "weight_hh_l0")
    return lstm


@pytest.mark.parametrize(
    ("make", "kind", "count"),
    [
        (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "linear", 4 + 16 + 4),
        (lambda: parametrizations.spectral_norm(nn.Conv1d(4, 4, 1)), "conv", 20),
        (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), "linear", 20),
    ],
)
def test_reparametrized_layers_are_one_unit_on_the_generic_path(
    make: Callable[[], nn.Module], kind: str, count: int
) -> None:
    unit = only(make())
    assert (unit.name, unit.kind, unit.parameter_count, unit.legal) == ("layer", kind, count, CAST)
    assert unit.reason is None


def test_pruned_layers_are_one_unit() -> None:
    unit = only(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5))
    assert (unit.name, unit.kind, unit.parameter_count, unit.reason) == ("layer", "linear", 20, None)


class Sub(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class SubLSTM(nn.LSTM):
    pass


def test_subclasses_take_the_generic_path() -> None:
    assert only(Sub(16, 16)).legal == CAST
    assert only(SubLSTM(4, 4)).legal == ("fp32", "bf16")  # torch has no fp16 LSTM for a CPU
    assert only(SubLSTM(4, 4)).kind == "rnn"


def test_adapters_of_peft_are_units_beside_their_frozen_base() -> None:
    peft = pytest.importorskip("peft")
    net = peft.get_peft_model(nn.Sequential(nn.Linear(16, 16)), peft.LoraConfig(target_modules=["0"], r=4))
    units = {unit.name.rpartition("model.")[2]: unit for unit in find_units(net)}
    assert list(units) == ["0.base_layer", "0.lora_A.default", "0.lora_B.default"]
    assert [unit.is_frozen for unit in units.values()] == [True, False, False]
    assert all(unit.reason is None and unit.kind == "linear" for unit in units.values())


# ---- left alone ----


def with_forward_on_the_instance() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_forward_on_the_instance, "its `forward` is replaced on the instance"),
        (Complex, "complex"),
        (lambda: nn.LazyLinear(4), "not initialised"),
        (lambda: nn.LazyConv2d(4, 3), "not initialised"),
        (lambda: torch.jit.script(nn.Linear(4, 4)), "scripted"),
        (lambda: torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)), "scripted"),
        (lambda: nn.Linear(4, 4).bfloat16(), "less than 32 bits"),
        (lambda: nn.LSTM(4, 4).half(), "less than 32 bits"),
        (lambda: nn.Linear(4, 4).double(), "float64"),
    ],
)
def test_left_alone_with_the_reason(make: Callable[[], nn.Module], reason: str) -> None:
    unit = only(make())
    assert unit.reason is not None
    assert reason in unit.reason
    assert unit.legal == ("fp32",)
    assert select([unit], "*") == []


def test_a_lazy_layer_that_was_initialised_is_an_ordinary_one() -> None:
    layer: Any = nn.LazyLinear(16)
    layer(torch.ones(1, 32))
    unit = only(layer)
    assert (unit.reason, unit.kind, unit.legal) == (None, "linear", tuple(FORMATS))


# ---- ties ----


def test_tied_weights_are_one_unit() -> None:
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    units = units_of(embedding=embedding, between=nn.Linear(8, 8), head=head)
    assert list(units) == ["embedding", "between"]
    tied = units["embedding"]
    assert tied.names == ("embedding", "head")
    assert tied.modules == (embedding, head)
    assert tied.parameter_count == 128
    assert "tf32" not in tied.legal
    for pattern in ("embedding", "head", "hea*"):
        assert select(list(units.values()), pattern) == [tied]


def test_a_chain_of_ties_is_one_unit() -> None:
    a, b, c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight, b.bias = a.weight, c.bias
    units = units_of(a=a, c=c, b=b, d=nn.Linear(4, 4))
    assert [unit.names for unit in units.values()] == [("a", "c", "b"), ("d",)]


def test_a_tie_to_a_layer_that_is_left_alone_is_left_alone() -> None:
    a, b = nn.Linear(4, 4), with_forward_on_the_instance()
    b.weight = a.weight
    (unit,) = units_of(a=a, b=b).values()
    assert unit.legal == ("fp32",)
    assert unit.reason is not None


def test_a_module_under_two_names_answers_to_both() -> None:
    shared = nn.Linear(4, 4)
    (unit,) = units_of(first=shared, second=shared).values()
    assert unit.modules == (shared,)
    assert unit.name == "first"
    assert select([unit], "second") == select([unit], "sec*") == [unit]


# ---- blocks ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(self.norm(x)))
        return y


def test_blocks_group_the_matrices_of_repeated_parts() -> None:
    net = nn.ModuleDict(
        {"e": nn.Embedding(8, 16), "blocks": nn.ModuleList([Block(), Block()]), "head": nn.Linear(16, 8)}
    )
    units = find_units(net, granularity="block")
    assert [(u.name, u.kind, u.has_matrix) for u in units] == [
        ("e", "embedding", True),
        ("blocks.0.norm", "norm", False),
        ("blocks.0", "block", True),
        ("blocks.1.norm", "norm", False),
        ("blocks.1", "block", True),
        ("head", "linear", True),
    ]
    block = units[2]
    assert block.names == ("blocks.0.up", "blocks.0.down")
    assert block.legal == tuple(FORMATS)
    assert select(units, "blocks.0.up") == select(units, "blocks.0.down") == [block]


def test_a_block_is_chosen_by_its_own_name() -> None:
    units = find_units(nn.Sequential(Block(), Block()), granularity="block")
    assert [unit.name for unit in select(units, "0")] == ["0"]


def test_different_or_single_parts_are_no_blocks() -> None:
    for net in (nn.Sequential(Block(), nn.Linear(16, 16)), nn.Sequential(Block()), nn.Sequential(nn.Linear(4, 4))):
        names = [unit.name for unit in find_units(net, granularity="block")]
        assert names == [unit.name for unit in find_units(net)]


def test_unknown_granularity() -> None:
    with pytest.raises(ValueError, match=r"Passed `granularity='row'`. `granularity` must be 'layer' or 'block'."):
        find_units(nn.Linear(1, 1), granularity="row")


# ---- names and patterns ----


def test_names_do_not_show_compilation() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    net[1] = torch.compile(net[1], backend="eager")  # type: ignore[assignment]
    assert [unit.name for unit in find_units(net)] == ["0", "1.0"]


def test_patterns() -> None:
    units = find_units(nn.ModuleDict({"a": nn.Linear(4, 4), "a2": nn.Linear(4, 4), "n": nn.LayerNorm(4)}))

    def names(pattern: str) -> list[str]:
        return [unit.name for unit in select(units, pattern)]

    assert names("*") == ["a", "a2"]
    assert names("a*") == ["a", "a2"]
    assert names("a") == ["a"]
    assert names("?") == names("[an]") == ["a"]  # norms and vectors are named by what meets nothing else
    assert names("n") == names("n*") == names("[n-z]") == ["n"]
    assert names("A") == names("b") == []
