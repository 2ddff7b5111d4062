"""Facts about torch on which the design rests: what a leaf does whose gradient has another dtype than its values.

Gradients in low precision are kept in a table of the project's own, never in ``.grad``, although ``Tensor.grad_dtype``
would allow it: the attribute cannot change while a gradient exists, a gradient that user code reads, assigns or
replaces in float32 no longer fits, copies of a model forget it, and the optimizers that users bring raise, some of them
after they have written half a step. A test that fails here says that one of these reasons is gone.

Time budget: 5 s.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # by the first optimizer otherwise, and it leaves an environment variable behind
from torch import Tensor, nn

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not hasattr(Tensor, "grad_dtype"), reason=f"torch {torch.__version__} has no `Tensor.grad_dtype`"
)


def narrow(value: float = 1.0) -> Any:
    """A float32 weight whose gradient is bfloat16."""
    weight: Any = nn.Parameter(torch.full((3,), value))
    weight.grad_dtype = BF16
    return weight


def test_the_backward_writes_the_gradient_in_its_dtype() -> None:
    weight = narrow()
    (weight * 2).sum().backward()
    assert weight.dtype == torch.float32
    assert weight.grad.dtype == BF16
    assert torch.equal(weight.grad, torch.full((3,), 2.0, dtype=BF16))


def test_sums_of_micro_batches_are_rounded_to_it() -> None:
    """256 + 1 is no bfloat16 number: a window that accumulates loses what a float32 gradient keeps."""
    for dtype, expected in ((BF16, 256.0), (torch.float32, 257.0)):
        weight: Any = nn.Parameter(torch.ones(3))
        weight.grad_dtype = dtype
        for factor in (256.0, 1.0):
            (weight * factor).sum().backward()
        assert weight.grad.tolist() == [expected] * 3


def test_it_cannot_be_set_while_a_gradient_exists() -> None:
    weight: Any = nn.Parameter(torch.ones(3))
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="already a gradient"):
        weight.grad_dtype = BF16
    weight.grad = None
    weight.grad_dtype = BF16
    assert weight.grad_dtype == BF16


def test_a_float32_gradient_cannot_be_assigned_while_it_is_bfloat16() -> None:
    weight = narrow()
    for has_gradient in (False, True):
        if has_gradient:
            weight.sum().backward()
        with pytest.raises(RuntimeError, match="attempting to assign a gradient with dtype 'float'"):
            weight.grad = torch.ones(3)


def test_take_clear_set_assign_is_the_only_way_to_a_float32_gradient() -> None:
    weight = narrow()
    (weight * 2).sum().backward()
    taken = weight.grad
    with pytest.raises(RuntimeError, match="already a gradient"):
        weight.grad_dtype = torch.float32
    weight.grad = None
    weight.grad_dtype = torch.float32
    weight.grad = taken.float()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def saved_and_loaded(weight: Tensor) -> Any:
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def in_copied_module(weight: nn.Parameter) -> Any:
    layer = nn.Linear(3, 1)
    layer.weight = weight
    return copy.deepcopy(layer).weight


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda weight: pickle.loads(pickle.dumps(weight)), saved_and_loaded, in_copied_module],
    ids=["deepcopy", "pickle", "file", "module"],
)
def test_copies_forget_it(duplicate: Callable[[Any], Any]) -> None:
    """Averaged models, spawned processes and snapshots would train with another dtype than the original."""
    weight = narrow()
    twin = duplicate(weight)
    assert weight.grad_dtype == BF16
    assert torch.equal(twin, weight)
    assert twin.grad_dtype == torch.float32


REFUSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.1),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.1),
    "AdamW foreach": lambda weights: torch.optim.AdamW(weights, lr=0.1, foreach=True),
    "AdamW fused": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "SGD fused": lambda weights: torch.optim.SGD(weights, lr=0.1, fused=True),
    "SGD fused with momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", REFUSE)
def test_stock_optimizers_raise_on_it(name: str) -> None:
    weight = narrow()
    weight.sum().backward()
    optimizer = REFUSE[name]([weight])
    with pytest.raises(RuntimeError, match="dtype|scalar type"):
        optimizer.step()


def test_adamw_has_decayed_the_weight_when_it_raises() -> None:
    weight = narrow()
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="dtype"):
        torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(weight.detach(), torch.full((3,), 1.0 - 0.1 * 0.5))


def test_other_optimizers_take_it_and_round_their_update_to_it() -> None:
    """SGD with momentum keeps its buffer in the gradient's dtype: 1 + 0.9 x 1 ... is rounded at every step."""
    weight = narrow()
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert buffer.dtype == BF16
    assert float(buffer[0]) != pytest.approx(1 + 0.9 + 0.81, abs=1e-3)


class TestImplementationChoices:
    """Facts on which other ways to compute the same thing rest."""

    def test_the_two_flags_for_float32_products_are_one_setting(self) -> None:
        """Setting either would show to the user, in all threads: products are called without a flag instead."""
        flags: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = flags.fp32_precision
        try:
            flags.fp32_precision = "bf16"
            assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16"
        finally:
            flags.fp32_precision = before

    @pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="built without oneDNN")
    def test_the_compilers_linear_is_not_cast_by_autocast(self) -> None:
        operation = torch.ops.mkldnn._linear_pointwise
        with torch.autocast("cpu", dtype=BF16):
            assert operation(torch.ones(2, 4), torch.ones(3, 4), None, "none", [], "").dtype == torch.float32

    def test_the_fused_attention_takes_four_dimensions_and_no_gradient_of_a_mask(self) -> None:
        q = torch.randn(2, 4, 6, 8)
        choice = torch._fused_sdp_choice
        assert choice(q, q, q, None, 0.0, True) == 1
        assert choice(q, q, q, torch.ones(6, 6, dtype=torch.bool), 0.0, False) == 1
        assert choice(q[0], q[0], q[0], None, 0.0, True) == 0
        assert choice(q.requires_grad_(), q, q, torch.zeros(6, 6, requires_grad=True), 0.0, False) == 0

    def test_rows_that_see_no_key_are_zero(self) -> None:
        q = torch.randn(1, 1, 3, 8)
        mask = torch.ones(3, 3, dtype=torch.bool)
        mask[1] = False
        assert torch.equal(nn.functional.scaled_dot_product_attention(q, q, q, mask)[0, 0, 1], torch.zeros(8))

    def test_a_softmax_may_be_written_over_its_input(self) -> None:
        x, grad = torch.randn(5, 7, 33), torch.randn(5, 7, 33)
        expected = torch.softmax(x, -1)
        assert torch.equal(torch.softmax(x, -1, out=x), expected)
        backward = torch.ops.aten._softmax_backward_data
        usual = backward(grad, expected, -1, torch.float32)
        assert torch.equal(backward.out(grad, expected, -1, torch.float32, grad_input=grad), usual)

    def test_a_gradient_takes_the_layout_of_its_weight(self) -> None:
        conv = nn.Conv2d(4, 6, 3)
        conv(torch.randn(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)).sum().backward()
        assert conv.weight.grad is not None
        assert conv.weight.grad.stride() == conv.weight.stride()
