"""Fused optimizer steps in C against torch's fused optimizers and the reference, on every instruction set.

Time budget: 30 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from autoprec import ops
from autoprec.formats import BF16, FP16
from autoprec.ops import native
from autoprec.ops.reference_random import random_words, round_stochastic
from tests.kernels import ISAS, assert_same_bits, isa, needs_cpu_kernels, threads, unaligned

pytestmark = needs_cpu_kernels
__all__ = ["isa", "threads"]
SIZES = [1, 15, 16, 64, 1000, 1024, 1040, 40_000]
ADAM: dict[str, Any] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}


class Tensors:
    """Parameters and Adam's state for a list of shapes."""

    def __init__(self, shapes: list[Any], moment: torch.dtype = torch.float32) -> None:
        self.params = [torch.randn(shape) for shape in shapes]
        self.exp_avgs = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sqs = [torch.zeros_like(p, dtype=moment) for p in self.params]
        self.steps = [torch.zeros(()) for _ in self.params]

    def copy(self) -> Tensors:
        twin = Tensors([])
        for name, tensors in vars(self).items():
            setattr(twin, name, [tensor.clone() for tensor in tensors])
        return twin

    def lists(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        return self.params, self.exp_avgs, self.exp_avg_sqs, self.steps

    def step(self, grads: list[Tensor], **options: Any) -> None:
        params, *state = self.lists()
        ops.fused_adam_(params, grads, *state, **{**ADAM, **options})

    def all(self) -> list[Tensor]:
        return [tensor for tensors in self.lists() for tensor in tensors]


def ulps(actual: Tensor, expected: Tensor, unit: Tensor) -> float:
    """Largest difference in units in the last place of ``unit``."""
    spacing = torch.ldexp(torch.ones_like(unit), torch.frexp(unit.abs()).exponent - 24).clamp(min=2.0**-149)
    return float(((actual.double() - expected.double()).abs() / spacing.double()).max()) if actual.numel() else 0.0


def torch_steps(optimizer: Optimizer, leaves: list[Tensor], grads: list[list[Tensor]]) -> None:
    for round_ in grads:
        for leaf, grad in zip(leaves, round_, strict=True):
            leaf.grad = grad.clone()
        optimizer.step()


def leaves_of(params: list[Tensor]) -> list[Tensor]:
    return [param.clone().requires_grad_() for param in params]


# ---- against torch ----


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("decoupled", "weight_decay"), [(True, 0.1), (True, 0.0), (False, 0.0), (False, 0.1)])
def test_adam_has_the_bits_of_torchs_fused_kernel(
    isa: str, decoupled: bool, weight_decay: float, maximize: bool
) -> None:
    mine = Tensors([(64, 16), 16, (3, 5, 32), 48])
    leaves = leaves_of(mine.params)
    cls = AdamW if decoupled else Adam
    optimizer = cls(leaves, 1e-2, (0.9, 0.99), 1e-8, weight_decay, maximize=maximize, fused=True)
    rounds = [[torch.randn_like(p) for p in mine.params] for _ in range(5)]
    torch_steps(optimizer, leaves, rounds)
    for grads in rounds:
        mine.step(grads, decoupled=decoupled, weight_decay=weight_decay, maximize=maximize)
    for index, leaf in enumerate(leaves):
        state = optimizer.state[leaf]
        assert_same_bits(mine.params[index], leaf.detach())
        assert_same_bits(mine.exp_avgs[index], state["exp_avg"])
        assert_same_bits(mine.exp_avg_sqs[index], state["exp_avg_sq"])
        assert_same_bits(mine.steps[index], state["step"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.5, "maximize": True},
    ],
)
def test_sgd_has_the_bits_of_torchs_fused_kernel(isa: str, options: dict[str, Any]) -> None:
    params = [torch.randn(64, 16), torch.randn(16)]
    leaves = leaves_of(params)
    optimizer = SGD(leaves, 0.1, fused=True, **options)
    buffers = [torch.full_like(p, torch.nan) for p in params] if "momentum" in options else None
    rounds = [[torch.randn_like(p) for p in params] for _ in range(4)]
    torch_steps(optimizer, leaves, rounds)
    for index, grads in enumerate(rounds):
        ops.fused_sgd_(params, grads, buffers, lr=0.1, is_first=index == 0, **options)
    for index, leaf in enumerate(leaves):
        assert_same_bits(params[index], leaf.detach())
        if buffers is not None:
            assert_same_bits(buffers[index], optimizer.state[leaf]["momentum_buffer"])


def test_odd_sizes_stay_within_ulps_of_torch(isa: str) -> None:
    """Torch works on what is left over from full vectors with scalars, in another order of roundings."""
    mine = Tensors([17, 1, (3, 7), 1023])
    leaves = leaves_of(mine.params)
    optimizer = AdamW(leaves, 1e-2, (0.9, 0.99), weight_decay=0.1, fused=True)
    rounds = [[torch.randn_like(p) for p in mine.params] for _ in range(3)]
    torch_steps(optimizer, leaves, rounds)
    for grads in rounds:
        mine.step(grads)
    for param, leaf in zip(mine.params, leaves, strict=True):
        # two float32 roundings more or fewer in each of three updates of at most 1.1 x lr
        assert float((param - leaf.detach()).abs().max()) <= 4 * 2.0**-24 * max(1.0, float(leaf.detach().abs().max()))


def test_second_moments_of_every_magnitude_give_torchs_bits(isa: str) -> None:
    """The first division is computed from an approximation and has to be exact all the same."""
    mine = Tensors([32_768])
    moments = torch.exp2(torch.empty(32_768).uniform_(-149, 128))
    moments[:8] = torch.tensor([0.0, 1e-45, 2.0**-126, 2.0**-90, 2.0**126, 3.4e38, torch.inf, 1.0])
    mine.exp_avg_sqs = [moments]
    (leaf,) = leaves_of(mine.params)
    optimizer = AdamW([leaf], 1e-2, (0.9, 0.99), weight_decay=0.1, fused=True)
    state = {"step": torch.tensor(6.0), "exp_avg": torch.ones(32_768), "exp_avg_sq": moments.clone()}
    mine.exp_avgs, mine.steps = [torch.ones(32_768)], [torch.tensor(6.0)]
    optimizer.state[leaf].update(state)
    grad = torch.randn(32_768) * moments.clamp(max=1e30).sqrt()
    torch_steps(optimizer, [leaf], [[grad]])
    mine.step([grad])
    assert_same_bits(mine.exp_avg_sqs[0], optimizer.state[leaf]["exp_avg_sq"])
    assert_same_bits(mine.params[0], leaf.detach())


@given(
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    which=st.sampled_from(ISAS or ["none"]),
    # a coupled decay may cancel the gradient, and then the sign of the step hangs on the last rounding
    decay=st.sampled_from([(True, 0.1), (True, 0.0), (False, 0.0)]),
    factor=st.sampled_from([1.0, 2.0**-16, 0.37]),
)
def test_adam_is_within_ulps_of_the_reference(
    sizes: list[int], dtype: torch.dtype, which: str, decay: tuple[bool, float], factor: float
) -> None:
    mine = Tensors(sizes)
    twin = mine.copy()
    native.select_isa(which)
    for _ in range(3):
        before = [param.clone() for param in twin.params]
        grads = [torch.randn(size).mul(0.1 / factor).to(dtype) for size in sizes]
        for tensors, implementation in ((mine, "cpu"), (twin, "reference")):
            options = {"decoupled": decay[0], "weight_decay": decay[1], "grad_factor": factor}
            tensors.step(grads, implementation=implementation, **options)
        for index, param in enumerate(mine.params):
            expected, moment = twin.params[index], twin.exp_avgs[index]
            assert ulps(mine.exp_avgs[index], moment, torch.maximum(moment.abs(), torch.tensor(0.1))) <= 4
            assert ulps(mine.exp_avg_sqs[index], twin.exp_avg_sqs[index], twin.exp_avg_sqs[index]) <= 16
            scale = torch.maximum(before[index].abs(), (expected - before[index]).abs())
            assert ulps(param, expected, torch.maximum(scale, torch.tensor(1e-2))) <= 16
    native.select_isa(None)


def test_grad_factor_is_unscaling_and_clipping_in_one_rounding() -> None:
    mine = Tensors([64])
    twin = mine.copy()
    grad = torch.randn(64)
    mine.step([grad * 2.0**10], grad_factor=2.0**-10)
    twin.step([grad])
    for actual, expected in zip(mine.all(), twin.all(), strict=True):
        assert_same_bits(actual, expected)


# ---- independence of machine, threads and preparation ----


def run_all(shapes: list[Any], moment: torch.dtype, grad: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    tensors = Tensors(shapes, moment)
    formats = ["bf16", "fp16", "int8", "e4m3"]
    copies = [ops.new_copy(p, formats[i % 4]) if p.ndim > 1 else None for i, p in enumerate(tensors.params)]
    for count in range(3):
        grads = [torch.randn_like(p).to(grad) for p in tensors.params]
        tensors.step(grads, copies=copies, seed=4, offset=count)
    written = [t for copy in copies if copy for t in vars(copy).values() if isinstance(t, Tensor)]
    return tensors.all() + written


@pytest.mark.parametrize("moment", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
def test_all_instruction_sets_and_thread_counts_give_the_same_bits(moment: torch.dtype, grad: torch.dtype) -> None:
    shapes = [(130, 70), (300, 41), (257, 65), (40, 1000), 77]
    results = []
    for which in ISAS:
        native.select_isa(which)
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run_all(shapes, moment, grad))
    torch.set_num_threads(1)
    native.select_isa(None)
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert_same_bits(actual, expected)


def test_a_prepared_step_follows_tensors_whose_storage_is_replaced() -> None:
    mine = Tensors([(8, 4), 5])
    twin = mine.copy()
    step = ops.prepare_adam(*mine.lists())
    for round_ in range(3):
        grads = [torch.randn_like(p) for p in mine.params]
        if round_ == 1:
            mine.params[0].data = mine.params[0].clone()
            mine.exp_avgs[1].data = mine.exp_avgs[1].clone()
        step(grads, **ADAM)
        twin.step(grads)
    for actual, expected in zip(mine.all(), twin.all(), strict=True):
        assert_same_bits(actual, expected)
    mine.params[0].data = torch.zeros(8, 4, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Passed torch.float64 on cpu in `params`"):
            step([torch.zeros(8, 4), torch.zeros(5)], **ADAM)


def test_parameters_of_a_module_and_a_step_under_autograd() -> None:
    module = nn.Linear(4, 3)
    module(torch.randn(2, 4)).sum().backward()
    params = list(module.parameters())
    before = [param.detach().clone() for param in params]
    grads = [param.grad for param in params if param.grad is not None]
    ops.prepare_sgd(params)(grads, lr=0.5)
    for param, old, grad in zip(params, before, grads, strict=True):
        assert torch.equal(param, old - 0.5 * grad)


# ---- layouts ----


def test_layouts(threads: int) -> None:
    image = torch.randn(8, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    params = [image, unaligned(torch.randn(9, 7)), torch.tensor(1.5), torch.zeros(0, 3), torch.randn(6, 4).t()]
    grads = [
        torch.randn(8, 4, 3, 3),
        torch.randn(7, 9).t(),
        torch.tensor(0.5).bfloat16(),
        torch.zeros(0, 3),
        torch.randn(4).unsqueeze(1).expand(4, 6),
    ]
    results = []
    for implementation in ("cpu", "reference"):
        mine = [param.clone() for param in params]
        buffers = [torch.empty_like(param) for param in mine]
        copies = [
            ops.new_copy(mine[0], "bf16"),
            None,
            ops.new_copy(mine[2], "fp16"),
            None,
            ops.new_copy(mine[4], "e4m3"),
        ]
        options: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "is_first": True, "implementation": implementation}
        ops.fused_sgd_(mine, grads, buffers, copies=copies, **options)
        results.append([*mine, *buffers, *(copy.values for copy in copies if copy is not None)])
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)


def test_nothing_outside_a_parameter_is_written() -> None:
    storage = torch.full((64,), torch.nan)
    param = storage[8:41]
    param.fill_(1.0)
    values = torch.full((64,), torch.nan, dtype=torch.bfloat16)
    copy = ops.WeightCopy("bf16", values[5:38])
    ops.fused_sgd_([param], [torch.ones(33)], lr=0.5, copies=[copy])
    assert int(storage.isnan().sum()) == int(values.isnan().sum()) == 64 - 33
    assert torch.equal(copy.values, torch.full((33,), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"grads": [torch.randn(3, 4)]}, "Passed a gradient of torch.float32"),
        ({"grads": [torch.randn(4, 3).double()]}, "float32, bfloat16 or float16"),
        ({"params": [torch.randn(4, 3).bfloat16()]}, "dense CPU tensors of torch.float32"),
        ({"params": [torch.randn(4, 6)[:, ::2]]}, "fill one block of memory"),
        ({"exp_avgs": [torch.zeros(3, 4).t()]}, "in the same order"),
        ({"steps": [torch.zeros((), dtype=torch.int64)]}, "step counter of torch.int64"),
        ({"copies": [ops.WeightCopy("bf16", torch.zeros(5).bfloat16())]}, "a copy of 5 values for a parameter of 12"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], match: str) -> None:
    mine = Tensors([(4, 3)])
    lists = {**vars(mine), "grads": [torch.randn(4, 3)], "copies": None, **change}
    grads, copies = lists.pop("grads"), lists.pop("copies")
    with pytest.raises(ValueError, match=match):
        ops.fused_adam_(grads=grads, copies=copies, implementation="cpu", **lists, **ADAM)


def test_amsgrad_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"Passed `prepare_adam\(amsgrad=True\)`.*call its own `step\(\)`"):
        ops.prepare_adam(*Tensors([3]).lists(), amsgrad=True)


def test_found_inf_leaves_everything_as_it_is() -> None:
    mine = Tensors([20])
    twin = mine.copy()
    mine.step([torch.randn(20)], found_inf=torch.ones(()))
    for actual, expected in zip(mine.all(), twin.all(), strict=True):
        assert_same_bits(actual, expected)


# ---- 16-bit second moments ----


@pytest.mark.parametrize(("dtype", "number_format"), [(torch.bfloat16, BF16), (torch.float16, FP16)])
def test_a_16_bit_moment_is_the_32_bit_one_rounded_stochastically(
    isa: str, dtype: torch.dtype, number_format: Any
) -> None:
    shapes: list[Any] = [(65, 30), 100]
    low = Tensors(shapes, dtype)
    for moment in low.exp_avg_sqs:
        moment.copy_(torch.rand(moment.shape))
    wide = low.copy()
    wide.exp_avg_sqs = [moment.float() for moment in wide.exp_avg_sqs]
    grads = [torch.randn(shape) for shape in shapes]
    low.step(grads, seed=9, offset=77)
    wide.step(grads)
    for index, start in enumerate((0, 1984)):
        exact = wide.exp_avg_sqs[index]
        words = random_words(9, 77, start + torch.arange(exact.numel()).reshape(exact.shape))
        assert_same_bits(low.exp_avg_sqs[index], round_stochastic(exact, number_format, words).to(dtype))
        assert_same_bits(low.params[index], wide.params[index])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_words_go_by_the_place_in_memory(isa: str, dtype: torch.dtype) -> None:
    runs = []
    for implementation in ("cpu", "reference"):
        torch.manual_seed(1)
        mine = Tensors([(4, 6, 3, 3), 5], dtype)
        grads = [torch.zeros_like(param) for param in mine.params]  # so that rounding has nothing else to decide
        moment = torch.rand(4, 6, 3, 3).to(dtype)
        for tensors, value in ((mine.params, torch.randn(4, 6, 3, 3)), (mine.exp_avgs, torch.zeros(4, 6, 3, 3))):
            tensors[0] = value.contiguous(memory_format=torch.channels_last)
        mine.exp_avg_sqs[0] = moment.contiguous(memory_format=torch.channels_last)
        mine.step(grads, beta2=0.999, seed=9, offset=77, implementation=implementation)
        runs.append(mine.exp_avg_sqs)
    for actual, expected in zip(*runs, strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, 0.042), (torch.float16, 0.0064)])
def test_the_noise_of_a_narrow_moment_is_the_documented_one(dtype: torch.dtype, expected: float) -> None:
    wide, narrow = Tensors([4000]), Tensors([4000], dtype)
    magnitudes = torch.exp2(torch.rand(4000) / 2)  # squares fill one binade
    for count in range(6000):
        grads = [torch.randn(4000) * magnitudes]
        for tensors in (wide, narrow):
            tensors.step(grads, beta2=0.999, lr=0.0, seed=1, offset=count)
    error = narrow.exp_avg_sqs[0].double() / wide.exp_avg_sqs[0].double() - 1
    assert float(error.square().mean().sqrt()) == pytest.approx(expected, rel=0.1)
    # the mean of 4000 independent errors
    assert abs(float(error.mean())) < 5 * expected / 4000**0.5


def test_d07_a_bf16_second_moment_does_not_stall() -> None:
    mine = Tensors([256], torch.bfloat16)
    grad = torch.full((256,), 10.0)
    for count in range(2000):
        mine.step([grad], beta2=0.999, lr=0.0, seed=1, offset=count)
    assert float(mine.exp_avg_sqs[0].float().mean()) == pytest.approx(86.5, rel=0.02)


def test_d05_small_updates_are_not_lost_in_the_weight() -> None:
    weight = torch.ones(1)
    copy = ops.new_copy(weight, "bf16")
    step = ops.prepare_sgd([weight], copies=[copy])
    for _ in range(1000):
        step([torch.ones(1).bfloat16()], lr=1e-3)
    assert float(weight) == pytest.approx(0.0, abs=1e-4)
    assert float(copy.values) == float(weight.bfloat16())


def test_d06_zero_gradients_in_half_precision_stay_finite() -> None:
    mine = Tensors([(2, 4)])
    twin = mine.copy()
    grad = torch.tensor([[0.0] * 4, [1e-4] * 4])
    mine.step([grad.half()])
    twin.step([grad])
    assert torch.isfinite(mine.params[0]).all()
    assert torch.allclose(mine.params[0], twin.params[0], rtol=1e-3)
