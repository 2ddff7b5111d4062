"""Layers in different formats beside each other, shared weights, attention, recomputation.

Time budget: 20 s.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoprec import Action
from autoprec.autocast import ambient
from autoprec.layers import detach
from autoprec.trial import Trial
from tests.steered import (
    BF16,
    HALF,
    TORCH_REMARKS,
    assert_equal,
    assert_near,
    attached,
    inputs,
    steered,
)
from tests.support import Task, assert_finite, cpu, scripted

pytestmark = TORCH_REMARKS

# ---- d08: neighbours in different formats ----


class Neighbours(nn.Module):
    """A residual sum, a concatenation of branches and a custom autograd function between three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(Doubled.apply(a))  # type: ignore[no-untyped-call]
        y: Tensor = x + self.third(torch.cat([a, b.relu()], dim=-1)) + a * b
        return y


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def is_mixed(first: str, second: str) -> bool:
    """Whether one returns fp16 and the other bf16, as fp8 and int8 do."""
    return {"fp16"} < {first, second} & {"fp16", "bf16", "fp8", "int8"}


@pytest.mark.parametrize("first", ["fp32", "bf16", "fp16", "fp8", "int8"])
def test_d08_any_map_on_neighbouring_layers_runs(first: str) -> None:
    names = ("fp32", "bf16", "fp16", "fp8", "int8")
    x = torch.randn(16, 16)
    net = Neighbours()
    exact = net(x).detach()
    for second, third in itertools.product(names, names):
        # torch cannot concatenate bf16 and fp16 under autocast; the first window under a map repeats that in fp32
        trial = Trial()
        with steered(net, {"first": first, "second": second, "third": third}) as runtime, trial:
            runtime.on_output = trial.note_output
            net.zero_grad()
            y = net(x)
            y.float().pow(2).mean().backward()
        assert bool(trial.failures) == is_mixed(first, second)
        assert bool((y.float() - exact).norm() < 0.2 * exact.norm()), (second, third)
        for parameter in net.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert torch.isfinite(parameter.grad).all()


def test_d08_any_map_survives_a_fit() -> None:
    names = ("fp32", "bf16", "fp16", "fp8", "int8")
    for first, second, third in itertools.product(names, names, names):
        net = Neighbours()
        formats = {"net.first": first, "net.second": second, "net.third": third}
        ap = scripted({0: Action(precision=formats)}, verbose=False)
        cpu(callbacks=[ap]).fit(Task(net, torch.randn(32, 16), 16))
        assert (ap.applied_steps, ap.skipped_steps) == (2, 0), formats
        # bf16 and fp16 cannot be concatenated: both that feed it go to fp32, nothing else ever does
        raised = {"net.first": "fp32", "net.second": "fp32"} if is_mixed(first, second) else {}
        assert ap.precision_map() == {**formats, **raised}
        assert_finite(net)


def test_d08_residual_of_embedding_and_two_linears() -> None:
    net = nn.ModuleDict({"e": nn.Embedding(8, 16), "a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    with steered(net, {"e": "fp32", "a": "fp16", "b": "bf16"}):
        x = net["e"](torch.arange(8))
        a = net["a"](x)
        y = x + net["b"](a)
        y.sum().backward()
    assert (x.dtype, a.dtype, y.dtype) == (torch.float32, HALF, torch.float32)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8", "fp32"])
def test_functional_use_of_a_weight(name: str) -> None:
    embedding, head = nn.Embedding(16, 16), nn.Linear(16, 16)
    indices = torch.arange(16)
    with steered(nn.ModuleDict({"e": embedding, "h": head}), name):
        hidden = embedding(indices)
        logits = F.linear(hidden, embedding.weight)
        raw = hidden @ head.weight
        (logits.float().sum() + raw.float().sum() + head(raw).float().sum()).backward()
    expected = F.linear(F.embedding(indices, embedding.weight), embedding.weight)
    assert bool((logits.float() - expected).norm() < 0.1 * expected.norm())
    assert embedding.weight.grad is not None
    assert torch.isfinite(embedding.weight.grad).all()


def test_a_weight_used_by_two_modules_takes_both_gradients() -> None:
    embedding, head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
    head.weight = embedding.weight
    net = nn.ModuleDict({"e": embedding, "h": head})
    for name in ("bf16", "fp16", "int8", "fp8"):
        net.zero_grad()
        with steered(net, name):
            head(embedding(torch.arange(16))).float().sum().backward()
        assert head.weight is embedding.weight
        expected: Any = copy.deepcopy(net)
        expected.zero_grad()
        expected["h"](expected["e"](torch.arange(16))).sum().backward()
        assert head.weight.grad is not None
        assert_near([head.weight.grad], [expected["h"].weight.grad], 0.06)


def test_a_module_used_twice_takes_both_gradients() -> None:
    shared = nn.Linear(16, 16)
    x = torch.randn(16, 16)
    shared(shared(x)).sum().backward()
    expected = [p.grad for p in shared.parameters()]
    for name in ("bf16", "fp16", "int8", "fp8", "fp32"):
        shared.zero_grad()
        with steered(nn.Sequential(shared), name):
            shared(shared(x)).float().sum().backward()
        assert_near([p.grad for p in shared.parameters()], expected, 0.1)  # type: ignore[misc, arg-type]


# ---- attention layers ----


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("is_training", [True, False])
def test_encoder_layer_runs_in_its_formats(name: str, is_training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(is_training)
    x = torch.randn(4, 5, 16)
    plain = layer(x)
    with steered(layer, name):
        output = layer(x)
        output.float().sum().backward()
    assert output.dtype == {"bf16": BF16, "fp16": HALF, "fp32": torch.float32}[name]
    assert_near([output], [plain], {"bf16": 0.02, "fp16": 0.002, "fp32": 1e-6}[name])
    assert layer.self_attn.out_proj.weight.grad is not None


class Distilled(nn.Module):
    """A frozen teacher in eval mode beside a student; torch runs the teacher through a fused path if it can."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(16, 16)
        self.teacher = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).requires_grad_(False)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.teacher.eval()
        with torch.no_grad():
            target = self.teacher(x)
        self.seen.add(target.dtype)
        y: Tensor = self.student(x) - target
        return y


@pytest.mark.parametrize(("name", "dtype"), [("bf16", BF16), ("fp16", HALF)])
def test_encoder_in_eval_mode_inside_a_training_step_runs_in_its_formats(name: str, dtype: torch.dtype) -> None:
    net, fast_path = Distilled(), torch.backends.mha.get_fastpath_enabled()
    formats = {"net.teacher.*": name, "net.teacher.norm*": name}
    cpu(callbacks=[scripted({0: Action(precision=formats)})]).fit(Task(net, torch.randn(8, 5, 16), 4))
    assert net.seen == {dtype}
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


def test_attention_is_one_unit_whose_parts_follow_it() -> None:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    with steered(nn.Sequential(layer), "bf16"):
        output, scores = layer(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.bool))
        without, nothing = layer(x, x, x, need_weights=False)
    assert output.dtype == scores.dtype == without.dtype == BF16
    assert nothing is None
    with torch.autocast("cpu", BF16):
        expected, _ = layer(x, x, x)
    assert torch.equal(output, expected)


# ---- gradient checkpointing ----


class Checkpointed(nn.Module):
    """A layer, then a checkpointed function that starts with a raw matmul of what the layer returned."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.use_reentrant = use_reentrant
        self.dtypes: list[list[torch.dtype]] = []

    def inner(self, h: Tensor) -> Tensor:
        raw = h @ h.transpose(-1, -2)
        y = self.second(torch.tanh(raw / 16))
        self.dtypes.append([h.dtype, raw.dtype, y.dtype])
        product: Tensor = y @ y
        return product

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.use_reentrant is None:
            return self.inner(h)
        y: Tensor = checkpoint(self.inner, h, use_reentrant=self.use_reentrant)
        return y


def checkpointed_gradients(formats: dict[str, str], use_reentrant: bool | None, dtype: torch.dtype) -> list[Tensor]:
    net, x = Checkpointed(use_reentrant), inputs([(16, 16)])[0]
    with steered(net, formats, dtype=dtype):
        net(x).float().pow(2).mean().backward()
    if use_reentrant is not None:
        assert len(net.dtypes) == 2
        assert net.dtypes[0] == net.dtypes[1]
    assert x.grad is not None
    return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, HALF])
@pytest.mark.parametrize("first", ["bf16", "fp16", "fp8", "fp32"])
@pytest.mark.parametrize("second", ["bf16", "fp16", "int8", "tf32", "fp32"])
def test_a08_recomputation_repeats_the_forward(
    use_reentrant: bool, dtype: torch.dtype, first: str, second: str
) -> None:
    formats = {"first": first, "second": second}
    expected = checkpointed_gradients(formats, None, dtype)
    assert_equal(checkpointed_gradients(formats, use_reentrant, dtype), expected)


def test_recomputations_are_not_recorded() -> None:
    net = Checkpointed(False)
    units, runtime = attached(net, "fp16")
    runtime.is_active = runtime.is_recording = True
    with ambient("cpu", torch.float32):
        y = net(torch.randn(16, 16))
    runtime.is_recording = False
    count = len(runtime.records)
    y.float().sum().backward()
    assert count == len(runtime.records) == 2
    detach(units)
