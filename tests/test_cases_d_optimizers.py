"""Cases D-05 to D-07: what a low format must not do to weights and moments. Every fit has gradients known beforehand.

Time budget: 45 s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, LossScaleConfig, ScriptedController, ops
from tests.kernels import needs_cpu_kernels
from tests.support import Task, all_in, cpu, fp16cpu, weights_of

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
MakeOptimizer = Callable[..., Optimizer]
LINEAR = torch.ones(16, 16)


class Forced(Task):
    """Repeats one batch. The loss is a sum with given weights, so that the gradient is the same at every step."""

    def __init__(self, net: nn.Module, steps: int, optimizer: MakeOptimizer, factor: Any = 1.0, x: Tensor = LINEAR):
        super().__init__(net, [x] * steps, None, optimizer=optimizer)  # type: ignore[arg-type]
        self.factor = factor
        self.moments: set[torch.dtype] = set()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return weighted_sum(self.net, batch, self.factor)

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer: Any = self.optimizers()
        self.moments |= {t.dtype for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)}


def weighted_sum(net: nn.Module, batch: Tensor, factor: Any) -> Tensor:
    output: Tensor = net(batch)
    loss: Tensor = (output.float() * factor).sum() / len(batch)
    return loss


def steered(name: str, scale: float = 128.0) -> AutoPrecisionCallback:
    """All layers in one format, the Trainer's clipping (none)."""
    config = AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=scale))
    policy = ScriptedController({0: all_in(name)})
    return AutoPrecisionCallback(policy, knobs=("precision", "loss_scale"), config=config, verbose=False)


def in_fp32(
    net: nn.Module, steps: int, optimizer: MakeOptimizer, factor: Any = 1.0, x: Tensor = LINEAR
) -> list[Tensor]:
    """The weights after the same steps of a bare loop in float32."""
    stepper = optimizer(net.parameters())
    for _ in range(steps):
        stepper.zero_grad()
        weighted_sum(net, x, factor).backward()
        stepper.step()
    return weights_of(net)


def ones() -> nn.Linear:
    """Weights of 1: the gradient of the sum of all outputs over 16 rows of ones is exactly 1 in every format."""
    layer = nn.Linear(16, 16, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


# ---- D-05: updates below the resolution of the format ----

STEPS = 1000
SLOW: dict[str, MakeOptimizer] = {
    "sgd": functools.partial(SGD, lr=1e-3),
    "momentum": functools.partial(SGD, lr=1e-4, momentum=0.9),
    "adam": functools.partial(Adam, lr=1e-3),
    "adamw": functools.partial(AdamW, lr=1e-3),
}


def test_d05_pure_bf16_weights_do_stop() -> None:
    """What these cases are about: 1 - 1e-3 rounds to 1."""
    weight = torch.ones(1, dtype=torch.bfloat16)
    for _ in range(STEPS):
        weight.sub_(torch.ones_like(weight), alpha=1e-3)
    assert float(weight) == 1.0


@pytest.mark.parametrize(
    ("optimizer", "name", "steps"),
    [("sgd", name, STEPS if name == "bf16" else 300) for name in FORMATS]
    + [(optimizer, name, 200) for optimizer in ("momentum", "adam", "adamw") for name in ("bf16", "fp8")],
)
def test_d05_small_updates_add_up_as_in_fp32(optimizer: str, name: str, steps: int) -> None:
    task, ap = Forced(ones(), steps, SLOW[optimizer]), steered(name)
    cpu(callbacks=[ap]).fit(task)
    assert (ap.applied_steps, ap.precision_map()) == (steps, {"net": name})
    (weight,), (expected,) = weights_of(task.net), in_fp32(ones(), steps, SLOW[optimizer])
    assert weight.dtype == torch.float32
    assert torch.allclose(weight, expected, rtol=0, atol=1e-5)
    if optimizer == "sgd":
        assert torch.allclose(weight, torch.tensor(1.0 - 1e-3 * steps), rtol=0, atol=1e-5)


@pytest.mark.parametrize("start", ["bf16-mixed", "fp16"])
def test_d05_nor_do_they_stop_in_the_trainers_own_precision(start: str) -> None:
    task, ap = Forced(ones(), 300, SLOW["sgd"]), AutoPrecisionCallback("rule", knobs=(), verbose=False)
    base: dict[str, Any] = {"plugins": fp16cpu(128.0)} if start == "fp16" else {"precision": start}
    cpu(callbacks=[ap], **base).fit(task)
    assert torch.allclose(weights_of(task.net)[0], torch.tensor(0.7), rtol=0, atol=1e-5)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(16, 32), torch.ones(16, 16)),
    "conv": (lambda: nn.Conv1d(2, 4, 3), torch.ones(16, 2, 8)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 4, 2, stride=2), torch.ones(16, 2, 8)),
    "embedding": (lambda: nn.Embedding(4, 8), torch.arange(16).reshape(4, 4) % 4),
}


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize("layer", LAYERS)
def test_d05_in_every_kind_of_layer(layer: str, name: str) -> None:
    """A late phase of decay: 100 updates of about a millionth of the weights."""
    make, x = LAYERS[layer]
    optimizer = functools.partial(SGD, lr=1e-6)
    task, ap = Forced(seeded(make), 100, optimizer, x=x), steered(name)
    before = weights_of(task.net)
    cpu(callbacks=[ap]).fit(task)
    assert ap.precision_map() == {"net": name}
    for weight, start, end in zip(
        weights_of(task.net), before, in_fp32(seeded(make), 100, optimizer, x=x), strict=True
    ):
        assert weight.dtype == torch.float32
        assert bool((weight != start).all())
        # rounded 100 times at the weight's own size
        assert bool(((weight - end).abs() <= 100 * 2**-24 * start.abs() + 0.02 * (end - start).abs()).all())


def test_d05_a_layer_that_changes_its_format_keeps_its_small_updates() -> None:
    script = {50 * i: all_in(name) for i, name in enumerate(("bf16", "fp16", "fp8", "int8", "fp32", "bf16"))}
    ap = AutoPrecisionCallback(ScriptedController(script), knobs=("precision", "loss_scale"), verbose=False)
    task = Forced(ones(), 300, SLOW["sgd"])
    cpu(callbacks=[ap]).fit(task)
    expected = 1.0 - 1e-3 * ap.applied_steps
    assert ap.applied_steps >= 290  # the first loss scale may overflow
    assert torch.allclose(weights_of(task.net)[0], torch.tensor(expected), rtol=0, atol=1e-5)


# ---- D-06: gradients whose squares vanish, and rows without any ----

ADAPTIVE: dict[str, MakeOptimizer] = {
    "adam": functools.partial(Adam, lr=1e-3),
    "adam fused": functools.partial(Adam, lr=1e-3, fused=True),
    "adam foreach": functools.partial(Adam, lr=1e-3, foreach=True),
    "adam amsgrad": functools.partial(Adam, lr=1e-3, amsgrad=True),
    "adamw": functools.partial(AdamW, lr=1e-3),
    "adamw fused": functools.partial(AdamW, lr=1e-3, fused=True),
    "adamw foreach": functools.partial(AdamW, lr=1e-3, foreach=True),
    "rmsprop": functools.partial(RMSprop, lr=1e-3),
    "rmsprop foreach": functools.partial(RMSprop, lr=1e-3, foreach=True, centered=True),
    "adagrad": functools.partial(Adagrad, lr=1e-3),
    "adagrad fused": functools.partial(Adagrad, lr=1e-3, fused=True),
    "adadelta": functools.partial(Adadelta, lr=1e-3),
    "nadam": functools.partial(NAdam, lr=1e-3),
    "radam": functools.partial(RAdam, lr=1e-3),
    "adamax": functools.partial(Adamax, lr=1e-3),
}


def row_factor(gradient: float) -> Tensor:
    """Gradients of the rows of a layer with 16 outputs: none for the first, ``gradient`` for the others."""
    return torch.tensor([0.0] + [gradient] * 15)


def assert_steps_as_in_fp32(name: str, optimizer: str, gradient: float, steps: int = 50, **options: Any) -> None:
    factor = row_factor(gradient)
    task, ap = Forced(seeded(lambda: nn.Linear(16, 16)), steps, ADAPTIVE[optimizer], factor), steered(name, 65536.0)
    before = weights_of(task.net)
    cpu(callbacks=[ap], **options).fit(task)
    assert (ap.applied_steps, ap.skipped_steps, ap.precision_map()) == (steps, 0, {"net": name})
    expected = in_fp32(seeded(lambda: nn.Linear(16, 16)), steps, ADAPTIVE[optimizer], factor)
    for weight, start, end in zip(weights_of(task.net), before, expected, strict=True):
        assert bool(torch.isfinite(weight).all())
        assert torch.equal(weight[0], end[0])
        assert bool((weight[1:] != start[1:]).all())
        # of the way that was gone, plus what float32 rounds at each step
        slack = 1e-3 * (end - start).abs() + steps * 2**-23 * start.abs()
        assert bool(((weight - end).abs() <= slack).all())


@pytest.mark.parametrize("optimizer", ADAPTIVE)
def test_d06_fp16_layers_step_as_in_fp32(optimizer: str) -> None:
    assert_steps_as_in_fp32("fp16", optimizer, 1e-4)


@pytest.mark.parametrize("gradient", [1e-2, 1e-5])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp32"])
def test_d06_in_every_format_and_size_of_gradient(name: str, gradient: float) -> None:
    assert_steps_as_in_fp32(name, "adam", gradient)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adam fused"])
def test_d06_under_the_trainers_own_fp16(optimizer: str) -> None:
    assert_steps_as_in_fp32("fp16", optimizer, 1e-4, plugins=fp16cpu(65536.0))


def test_d06_fp16_optimizer_math_does_fail() -> None:
    """What these cases are about: epsilon and the squares are zero in fp16."""
    gradient = row_factor(1e-4).half()
    quotient = gradient / ((gradient * gradient * 0.001).sqrt() + torch.tensor(1e-8).half())
    assert quotient[0].isnan()
    assert quotient[1:].isinf().all()


# ---- D-07: a second moment that cannot move ----

DECAYS = 2000
EXACT = 100.0 * (1.0 - 0.999**DECAYS)  # 86.5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("optimizer", ["adam", "adamw fused", "rmsprop", "adagrad", "radam"])
def test_d07_moments_are_fp32_whatever_the_layers_run_in(optimizer: str, name: str) -> None:
    class Saves(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint("end.ckpt")

    task, ap = Forced(ones(), 3, ADAPTIVE[optimizer]), steered(name)
    cpu(callbacks=[ap, Saves()]).fit(task)
    assert task.moments == {torch.float32}
    (saved,) = torch.load("end.ckpt", weights_only=True)["optimizer_states"]
    assert {t.dtype for state in saved["state"].values() for t in state.values()} == {torch.float32}


@pytest.mark.parametrize(("optimizer", "name"), [("adam", "bf16"), ("adamw fused", "fp16")])
def test_d07_the_second_moment_gets_where_it_does_in_fp32(optimizer: str, name: str) -> None:
    make = functools.partial(ADAPTIVE[optimizer], lr=1e-6)
    task, ap = Forced(ones(), DECAYS, make, 10.0), steered(name)
    cpu(callbacks=[ap]).fit(task)
    assert ap.applied_steps == DECAYS
    (state,) = task.trainer.optimizers[0].state.values()
    moment = state["exp_avg_sq"]
    assert moment.dtype == torch.float32
    assert torch.allclose(moment, torch.tensor(EXACT), rtol=1e-4)


def test_d07_plain_rounding_to_bf16_does_stall() -> None:
    moment = torch.zeros(1, dtype=torch.bfloat16)
    for _ in range(DECAYS):
        moment = (moment.float() * 0.999 + 0.001 * 100.0).bfloat16()
    assert float(moment) == 32.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", [pytest.param("cpu", marks=needs_cpu_kernels), "reference"])
def test_d07_stochastic_rounding_keeps_a_16_bit_moment_moving(implementation: str, dtype: torch.dtype) -> None:
    """Every rounding adds an error of at most half a unit in standard deviation, which decays by 0.999 a step."""
    count = 4096
    weight, gradient = torch.ones(count), torch.full((count,), 10.0)
    first, second = torch.zeros(count), torch.zeros(count, dtype=dtype)
    step = ops.prepare_adam([weight], [first], [second], [torch.zeros(())], implementation=implementation)
    common: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
    for index in range(DECAYS):
        step([gradient], lr=1e-6, seed=1, offset=index, **common)
    unit = torch.finfo(dtype).eps * 64.0  # of numbers from 64 to 128
    deviation = unit / 2 / math.sqrt(1 - 0.999**2)
    moments = second.double()
    assert abs(float(moments.mean()) - EXACT) < 6 * deviation / math.sqrt(count)
    assert float((moments - EXACT).abs().max()) < 6 * deviation
    assert len(second.unique()) > 10  # the elements do not move in step
