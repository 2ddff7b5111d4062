"""Optimizer steps and weight copies under Triton's interpreter, against the reference and the C kernels.

Time budget: 40 s.
"""

from __future__ import annotations

import copy
import math
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("test_ops_triton.py starts it under Triton's interpreter", allow_module_level=True)

from autoprec.ops import native, reference_prepared, reference_steps, triton_copies, triton_optimizers
from autoprec.ops.copies import new_copy
from autoprec.ops.reference_steps import WeightCopy

# numpy, which carries out the interpreter's arithmetic, warns where a GPU goes on with inf and NaN
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def unaligned(x: Tensor) -> Tensor:
    """The same values in a view that starts one element into its storage."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


SHAPES = ((70, 33), (64,), (5000,), (48, 96), (1,), (0,), (8, 3, 3, 4), ())
GRAD_DTYPES = (FP32, BF16, FP16, BF16, FP32, FP32, FP32, BF16)
FORMATS = ("int8", "bf16", "fp16", "e4m3", None, "bf16", "int8", "e4m3")


def weight_copy(param: Tensor, format_name: str | None) -> WeightCopy | None:
    """A copy whose memory holds what no step writes."""
    if format_name is None:
        return None
    if format_name in ("bf16", "fp16"):
        return WeightCopy(format_name, torch.full_like(param, math.nan, dtype=BF16 if format_name == "bf16" else FP16))
    if format_name == "e4m3":
        values = torch.full(param.shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return WeightCopy("e4m3", values, torch.full((), math.nan))
    rows, cols = len(param), param.numel() // len(param)
    return WeightCopy(
        "int8",
        torch.full(param.shape, -128, dtype=torch.int8),
        torch.full((rows, 1), math.nan),
        torch.full((cols, rows), -128, dtype=torch.int8),
        torch.full((cols, 1), math.nan),
    )


def step_of_adam(
    module: Any,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    copies: list[WeightCopy | None] | None = None,
    **options: Any,
) -> None:
    module.PreparedAdam(params, exp_avgs, exp_avg_sqs, steps, copies)(grads, **options)


@dataclass
class Model:
    """Parameters of many shapes with everything that a step reads and writes."""

    moment_dtype: torch.dtype = FP32
    is_contiguous: bool = False
    params: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.params = [torch.randn(shape) for shape in SHAPES]
        self.params[2] = unaligned(self.params[2])
        if not self.is_contiguous:
            self.params[6] = self.params[6].to(memory_format=torch.channels_last)
        self.grads = [torch.randn(s).to(d) for s, d in zip(SHAPES, GRAD_DTYPES, strict=True)]
        self.exp_avgs = [torch.zeros_like(p) for p in self.params]
        self.exp_avg_sqs = [torch.zeros_like(p, dtype=self.moment_dtype) for p in self.params]
        self.steps = [torch.tensor(0.0) for _ in SHAPES]
        self.copies = [weight_copy(p, f) for p, f in zip(self.params, FORMATS, strict=True)]

    def adam(self, module: Any, **options: Any) -> None:
        settings = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
        state = (self.exp_avgs, self.exp_avg_sqs, self.steps)
        step_of_adam(module, self.params, self.grads, *state, **{**settings, **options})

    def sgd(self, module: Any, momentum_buffers: list[Tensor] | None, **options: Any) -> None:
        copies = options.pop("copies", None)
        module.PreparedSgd(self.params, momentum_buffers, copies)(self.grads, **options)

    def written(self) -> list[Tensor]:
        fields = ("values", "scale", "transposed_values", "transposed_scale")
        copies = [getattr(c, name) for c in self.copies if c is not None for name in fields]
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs, *self.steps, *(t for t in copies if t is not None)]


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], places: float) -> None:
    """Equal within units in the last place of each tensor's largest entry, which is where sums can cancel."""
    for one, other in zip(actual, expected, strict=True):
        a, b = one.double(), other.double()
        limit = places * torch.finfo(FP32).eps * (float(b.abs().max()) if b.numel() else 0.0)
        assert torch.all((a - b).abs() <= limit), float((a - b).abs().max()) / limit


def assert_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8)), index


def assert_copies(model: Model) -> None:
    """The copies are what the reference makes of the weights that the step left."""
    for param, copy_, name in zip(model.params, model.copies, FORMATS, strict=True):
        if copy_ is None or not param.numel():
            continue
        expected = weight_copy(param, name)
        assert expected is not None
        reference_steps.write_copy(param, expected)
        for part in ("values", "transposed_values"):
            if getattr(expected, part) is not None:
                assert torch.equal(getattr(copy_, part).float(), getattr(expected, part).float()), (name, part)
        for part in ("scale", "transposed_scale"):
            if getattr(expected, part) is not None:
                torch.testing.assert_close(getattr(copy_, part), getattr(expected, part), rtol=2e-7, atol=0)


@pytest.mark.parametrize("on_device", [False, True], ids=["host scalars", "device scalars"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["Adam", "AdamW"])
def test_adam_is_the_reference(decoupled: bool, on_device: bool) -> None:
    model = Model()
    other = copy.deepcopy(model)
    options: dict[str, Any] = {"decoupled": decoupled, "grad_factor": 0.5, "maximize": decoupled}
    for _ in range(3):
        more = {"found_inf": torch.zeros(()), "grad_factor": torch.tensor(0.5)} if on_device else {}
        model.adam(triton_optimizers, **{**options, **more}, copies=model.copies)
        other.adam(reference_prepared, **options)
    assert_near(model.params, other.params, 4)
    assert_near(model.exp_avgs, other.exp_avgs, 4)
    assert_near(model.exp_avg_sqs, other.exp_avg_sqs, 4)
    assert [float(step) for step in model.steps] == [3.0] * len(SHAPES)
    assert_copies(model)


needs_cpu_kernels = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_adam_gives_the_bits_of_the_cpu_kernels(dtype: torch.dtype) -> None:
    from autoprec.ops import cpu_steps

    model = Model(moment_dtype=dtype, is_contiguous=True)
    other = copy.deepcopy(model)
    for step in range(3):
        for module, one in ((triton_optimizers, model), (cpu_steps, other)):
            one.adam(module, grad_factor=0.3, seed=9, offset=step, copies=one.copies)
    assert_same_bits(model.written(), other.written())


@needs_cpu_kernels
def test_sgd_gives_the_bits_of_the_cpu_kernels() -> None:
    from autoprec.ops import cpu_steps

    model = Model(is_contiguous=True)
    other = copy.deepcopy(model)
    for step in range(3):
        for module, one in ((triton_optimizers, model), (cpu_steps, other)):
            options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "is_first": step == 0}
            one.sgd(module, one.exp_avgs, lr=0.1, copies=one.copies, **options)
    assert_same_bits(model.written(), other.written())


def test_adam_with_counters_that_differ() -> None:
    model = Model()
    for index, step in enumerate(model.steps):
        step.fill_(10 * (index % 3))
    other, device = copy.deepcopy(model), copy.deepcopy(model)
    model.adam(triton_optimizers)
    device.adam(triton_optimizers, found_inf=torch.zeros(()))
    other.adam(reference_prepared)
    assert_near(model.params, other.params, 4)
    assert all(torch.equal(a, b) for a, b in zip(model.written(), device.written(), strict=True) if not a.isnan().any())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_adam_rounds_a_16_bit_moment_with_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    model = Model(moment_dtype=dtype)
    other = copy.deepcopy(model)
    seed, offset = 2**63 + 12345, 2**40
    for step in range(2):
        model.adam(triton_optimizers, seed=seed, offset=offset + step)
        other.adam(reference_prepared, seed=seed, offset=offset + step)
    for one, two in zip(model.exp_avg_sqs, other.exp_avg_sqs, strict=True):
        # a last place of difference before the rounding moves a value across the random threshold now and then
        assert float((one != two).float().mean() if one.numel() else 0.0) <= 0.02
    assert_near(model.params, other.params, 2**17)


def test_a_16_bit_moment_does_not_stall() -> None:
    """Plain rounding to bfloat16 stays at 32 here; the running average of 100 ends at 86.5."""
    param, moment = torch.zeros(256), torch.zeros(256, dtype=BF16)
    state = ([param], [torch.full((256,), 10.0)], [torch.zeros(256)], [moment], [torch.zeros(())])
    options: dict[str, Any] = {
        "lr": 0.0,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled": False,
    }
    for step in range(100):
        step_of_adam(triton_optimizers, *state, **options, offset=step)
    assert float(moment.float().mean()) == pytest.approx(100 * (1 - 0.99**100), rel=0.01)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_found_inf_leaves_everything_as_it_was(kind: str) -> None:
    model = Model(moment_dtype=BF16)
    before = [tensor.clone() for tensor in model.written()]
    found_inf = torch.ones(())
    if kind == "adam":
        model.adam(triton_optimizers, found_inf=found_inf, copies=model.copies)
    else:
        model.sgd(triton_optimizers, model.exp_avgs, lr=0.1, momentum=0.9, found_inf=found_inf, copies=model.copies)
    assert_same_bits(model.written(), before)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True, "grad_factor": torch.tensor(0.5)},
    ],
    ids=["plain", "nesterov", "dampening"],
)
def test_sgd_is_the_reference(options: dict[str, Any]) -> None:
    model = Model()
    other = copy.deepcopy(model)
    for step in range(3):
        for module, one in ((triton_optimizers, model), (reference_prepared, other)):
            buffers = one.exp_avgs if "momentum" in options else None
            copies = model.copies if one is model else None
            one.sgd(module, buffers, is_first=step == 0, copies=copies, **options)
    assert_near(model.params, other.params, 4)
    assert_near(model.exp_avgs, other.exp_avgs, 4)
    assert_copies(model)


def test_steps_work_on_expanded_and_strided_tensors() -> None:
    wide = torch.randn(6, 10)
    param, grad, moments = wide[:, ::2], torch.randn(6, 1).expand(6, 5), torch.zeros(2, 5, 6).transpose(1, 2)
    other = param.clone()
    untouched = wide[:, 1::2].clone()
    options: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    options["decoupled"] = False
    step_of_adam(triton_optimizers, [param], [grad], [moments[0]], [moments[1]], [torch.zeros(())], **options)
    state = ([torch.zeros(6, 5)], [torch.zeros(6, 5)], [torch.zeros(())])
    step_of_adam(reference_prepared, [other], [grad], *state, **options)
    assert_near([param, moments[0], moments[1]], [other, state[0][0], state[1][0]], 4)
    assert torch.equal(wide[:, 1::2], untouched)


def test_a_prepared_step_finds_new_gradients_and_replaced_storage() -> None:
    model = Model()
    other = copy.deepcopy(model)
    settings = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
    lists = (model.params, model.exp_avgs, model.exp_avg_sqs, model.steps, model.copies)
    step = triton_optimizers.PreparedAdam(*lists)
    for turn in range(4):
        grads = [grad.clone() for grad in model.grads] if turn == 1 else model.grads
        if turn == 2:
            model.params[0].data = model.params[0].data.clone()
        if turn == 3:
            grads = [grad.float() for grad in grads]
        step(grads, **settings)  # type: ignore[arg-type]
        other.adam(reference_prepared, **settings)
    assert_near(model.params, other.params, 8)
    assert_copies(model)


def test_a_prepared_step_keeps_no_gradient_alive() -> None:
    param, grad = torch.randn(64), torch.randn(64)
    step = triton_optimizers.PreparedSgd([param])
    step([grad], lr=0.1)
    gone = weakref.ref(grad)
    del grad
    assert gone() is None


def test_a_step_that_is_prepared_once_is_one_prepared_for_each_call() -> None:
    model = Model()
    other = copy.deepcopy(model)
    step = triton_optimizers.PreparedSgd(model.params, model.exp_avgs, model.copies)
    for turn in range(2):
        step(model.grads, lr=0.1, momentum=0.9, is_first=turn == 0)
        other.sgd(triton_optimizers, other.exp_avgs, lr=0.1, momentum=0.9, is_first=turn == 0, copies=other.copies)
    assert_same_bits(model.written(), other.written())


def test_refreshed_copies_are_the_reference() -> None:
    model = Model()
    triton_optimizers.refresh_copies_(model.params, model.copies)
    assert_copies(model)


def test_stale_copies_are_those_of_the_reference() -> None:
    model = Model()
    for param in model.params[:3]:
        param.flatten()[7] = math.nan
    step = triton_optimizers.PreparedSgd(model.params, copies=model.copies)
    reference = reference_prepared.PreparedSgd(model.params, copies=model.copies)
    step.refresh()
    assert step.stale(20, 0) is step.stale(-1, 0) is None
    for change in (0, 1, 2, 3, 4, 6, 7):
        # every other entry, so that some draws miss
        param = model.params[change]
        param.mul_(torch.tensor([3.0, 1.0]).repeat(param.numel())[: param.numel()].view(param.shape))
        found = [step.stale(2, seed) for seed in range(4)]
        assert found == [reference.stale(2, seed) for seed in range(4)]
        assert (None if FORMATS[change] is None else change) in found
        reference.refresh()
    model.params[7].mul_(2)
    assert step.stale(-1, 0) == reference.stale(-1, 0) == 7


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_copies_carry_a_non_finite_weight_in_the_scale(bad: float) -> None:
    weight = torch.randn(70, 80)
    weight[3, 65] = bad
    copies = [weight_copy(weight, name) for name in ("int8", "e4m3")]
    triton_copies.write_scaled_copies([weight, weight], [c for c in copies if c is not None], None)
    int8, e4m3 = copies
    assert int8 is not None
    assert int8.scale is not None
    assert int8.transposed_scale is not None
    assert int8.scale.flatten().isnan().nonzero().flatten().tolist() == [3]
    assert int8.transposed_scale.flatten().isnan().nonzero().flatten().tolist() == [65]
    assert e4m3 is not None
    assert e4m3.scale is not None
    assert not torch.isfinite(e4m3.values.float() / e4m3.scale)[3, 65]


def test_copies_of_a_weight_in_another_memory_order() -> None:
    weight = torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)
    e4m3, int8 = new_copy(weight, "e4m3"), new_copy(weight, "int8")
    assert not e4m3.values.is_contiguous()
    triton_optimizers.refresh_copies_([weight], [e4m3])
    expected = new_copy(weight, "e4m3")
    reference_steps.write_copy(weight, expected)
    assert torch.equal(e4m3.values.float(), expected.values.float())
    with pytest.raises(ValueError, match=r"Passed an int8 copy with strides \(90, 1, 18, 3\)"):
        triton_optimizers.refresh_copies_([weight], [int8])


def test_copies_of_zero_rows_and_odd_shapes() -> None:
    weight = torch.randn(65, 130)
    weight[64] = 0.0
    copies = [weight_copy(weight, name) for name in ("int8", "e4m3")]
    triton_copies.write_scaled_copies([weight, weight], [c for c in copies if c is not None], None)
    for name, copy_ in zip(("int8", "e4m3"), copies, strict=True):
        expected = weight_copy(weight, name)
        assert copy_ is not None
        assert expected is not None
        reference_steps.write_copy(weight, expected)
        assert torch.equal(copy_.values.float(), expected.values.float())


def test_steps_refuse_what_they_cannot_do() -> None:
    model = Model()
    model.grads[0] = model.grads[0].double()
    with pytest.raises(TypeError, match="Passed a gradient of torch.float64"):
        model.adam(triton_optimizers)
    with pytest.raises(ValueError, match="Passed 1 gradients for 8 parameters"):
        triton_optimizers.PreparedSgd(model.params)(model.grads[:1], lr=0.1)
    with pytest.raises(ValueError, match=r"Passed a gradient \[3\] on cpu for a parameter \[4\]"):
        triton_optimizers.PreparedSgd([torch.zeros(4)])([torch.zeros(3)], lr=0.1)
    with pytest.raises(ValueError, match=r"Passed a tensor \[4\] of torch.float16 on cpu"):
        triton_optimizers.PreparedSgd([torch.zeros(4).half()])
    meta = torch.zeros((), device="meta")
    with pytest.raises(ValueError, match="Passed `found_inf` on meta"):
        triton_optimizers.PreparedSgd(model.params)(model.grads, lr=0.1, found_inf=meta)
    triton_optimizers.PreparedSgd([])([], lr=0.1)


def test_calls_run_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which need not be where the tensors are."""
    seen: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        seen.append(tensor)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    model = Model()
    triton_optimizers.refresh_copies_(model.params, model.copies)
    model.adam(triton_optimizers)
    first = next(p for p, name in zip(model.params, FORMATS, strict=True) if name == "int8")
    assert [tensor.data_ptr() for tensor in seen] == [first.data_ptr(), model.grads[0].data_ptr()]


@pytest.mark.parametrize("moment_dtype", [BF16, FP16])
def test_random_words_go_by_the_place_of_a_weight_in_memory(moment_dtype: torch.dtype) -> None:
    """Whatever the memory order of its gradient."""
    weight = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
    moment = torch.rand(4, 6, 3, 3).to(moment_dtype)
    results = []
    for module in (triton_optimizers, reference_prepared):
        param, exp_avg = weight.clone(), torch.zeros_like(weight)
        exp_avg_sq = torch.empty_like(weight, dtype=moment_dtype).copy_(moment)
        grad = torch.zeros(4, 6, 3, 3)  # contiguous, and rounding has nothing else to decide
        settings: dict[str, Any] = {
            "lr": 1e-2,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.1,
            "decoupled": True,
        }
        state = ([exp_avg], [exp_avg_sq], [torch.tensor(1.0)])
        step_of_adam(module, [param], [grad], *state, **settings, seed=9, offset=77)
        assert param.is_contiguous(memory_format=torch.channels_last)
        results.append(exp_avg_sq)
    assert not torch.equal(results[1].float(), moment.float() * 0.999)
    assert_same_bits([results[0].contiguous()], [results[1].contiguous()])
