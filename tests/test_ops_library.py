"""The operations as ``torch.library`` operators: ``opcheck``, gradients, ``torch.compile``.

Time budget: 30 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autoprec import ops
from autoprec.ops import library, registry
from tests.kernels import assert_same_bits

STEP: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "maximize": False, "grad_factor": 0.5}
ADAM = {**STEP, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "decoupled": True, "seed": 1, "offset": 2}
SGD = {**STEP, "momentum": 0.9, "dampening": 0.1, "nesterov": False, "is_first": False}
FORMATS = torch.tensor([5, 4]), torch.tensor([10, 3]), torch.tensor([False, True])


def int8_arguments(requires_grad: bool) -> tuple[Any, ...]:
    x, weight, bias = torch.randn(6, 20).bfloat16(), torch.randn(18, 20), torch.randn(18)
    copy = ops.new_copy(weight, "int8")
    ops.refresh_copies_([weight], [copy])
    leaves = [tensor.requires_grad_(requires_grad) for tensor in (x, weight, bias)]
    return (*leaves, copy.values, copy.scale, copy.transposed_values, copy.transposed_scale)


def lists(count: int) -> list[list[Tensor]]:
    return [[torch.rand(3, 5), torch.rand(7)] for _ in range(count)]


CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grad_stats": (library.grad_stats, lambda: (lists(1)[0], [0.5, 0.5], [0.1, 0.1]), {}),
    "grad_stats without limits": (library.grad_stats, lambda: (lists(1)[0], [], []), {}),
    "cast": (library.cast, lambda: (torch.randn(3, 5), "bf16", None, None, False, None, 0), {}),
    "cast rows": (library.cast, lambda: (torch.randn(3, 5).bfloat16(), "int8", "row", None, True, 3, 1), {}),
    "cast blocks": (library.cast, lambda: (torch.randn(3, 200), "e4m3", "1x128", None, True, None, 0), {}),
    "cast with a scale": (
        library.cast,
        lambda: (torch.randn(3, 5), "e4m3", None, torch.tensor(64.0), True, None, 0),
        {},
    ),
    "cast a number": (library.cast, lambda: (torch.tensor(1.5), "e4m3", "row", None, True, None, 0), {}),
    "cast nothing": (library.cast, lambda: (torch.zeros(0, 4), "e4m3", "1x128", None, True, None, 0), {}),
    "restore": (library.restore, lambda: (*ops.cast(torch.randn(3, 5), "int8", granularity="row")[:2], "row"), {}),
    "restore without a scale": (library.restore, lambda: (torch.randn(3, 5).bfloat16(), None, None), {}),
    "fake_cast": (library.fake_cast, lambda: (torch.randn(2, 3, requires_grad=True), *FORMATS), {}),
    "int8_matmul": (library.int8_matmul, lambda: (int8_arguments(False)[0], *int8_arguments(False)[3:5], None), {}),
    "int8_linear": (library.int8_linear, lambda: int8_arguments(True), {}),
    "refresh_copy_": (library.refresh_copy_, lambda: (int8_arguments(False)[1], *int8_arguments(False)[3:]), {}),
    "refresh_copy_ bf16": (
        library.refresh_copy_,
        lambda: (torch.randn(3, 5), torch.zeros(3, 5).bfloat16(), None, None, None),
        {},
    ),
    "fused_adam_": (library.fused_adam_, lambda: (*lists(4), [torch.zeros(()), torch.ones(())]), ADAM),
    "fused_sgd_": (library.fused_sgd_, lambda: (*lists(3),), SGD),
    "fused_sgd_ without momentum": (library.fused_sgd_, lambda: (*lists(2), []), SGD),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator, make, keywords = CALLS[name]
    torch.library.opcheck(operator, make(), keywords)


def test_int8_linear_has_the_gradients_of_the_eager_function() -> None:
    arguments = int8_arguments(True)
    x, weight, bias = arguments[:3]
    grad = torch.randn(6, 18).bfloat16()
    found = torch.autograd.grad(library.int8_linear(*arguments), [x, weight, bias], grad)
    expected = torch.autograd.grad(ops.int8_linear(x, weight, bias), [x, weight, bias], grad)
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_bits(actual, wanted)


def test_operators_equal_the_eager_functions() -> None:
    grads = lists(1)[0]
    assert_same_bits(library.grad_stats(grads, [], []), ops.grad_stats(grads).table)
    params, grads, first, second = lists(4)
    twins = [[tensor.clone() for tensor in tensors] for tensors in (params, first, second)]
    library.fused_adam_(params, grads, first, second, [torch.zeros(())] * 2, **ADAM)
    ops.fused_adam_(twins[0], grads, twins[1], twins[2], [torch.zeros(())] * 2, **ADAM)
    for actual, expected in zip(params + second, twins[0] + twins[2], strict=True):
        assert_same_bits(actual, expected)


def test_a_copy_is_written_by_a_compiled_function() -> None:
    def refresh(weight: Tensor, values: Tensor) -> Tensor:
        library.refresh_copy_(weight * 2, values, None, None, None)
        return values.float()

    torch._dynamo.reset()
    weight, values = torch.randn(3, 5), torch.zeros(3, 5).bfloat16()
    result = torch.compile(refresh, backend="aot_eager", fullgraph=True)(weight, values)
    assert_same_bits(values, (weight * 2).bfloat16())
    assert torch.equal(result, values.float())
    torch._dynamo.reset()


@pytest.mark.parametrize("operator", [library.grad_stats, library.fake_cast, library.refresh_copy_])
def test_operators_run_what_is_chosen_at_the_call(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the registry decides, on every device: Triton's kernels need no registration of their own."""
    monkeypatch.setattr(registry, "chosen", lambda: "triton")
    _, make, keywords = next(call for call in CALLS.values() if call[0] is operator)
    with pytest.raises(RuntimeError, match=r"Passed `'triton'`.* on cpu: it runs on cuda"):
        operator(*make(), **keywords)
    monkeypatch.setattr(registry, "chosen", lambda: "reference")
    operator(*make(), **keywords)


def test_a_compiled_function_calls_the_kernel() -> None:
    def loss(x: Tensor) -> Tensor:
        rounded: Tensor = library.fake_cast(x * 2, *FORMATS)
        return rounded.sum()

    torch._dynamo.reset()
    x = torch.randn(2, 8, requires_grad=True)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (actual,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(actual, torch.full_like(x, 2.0))
    torch._dynamo.reset()
