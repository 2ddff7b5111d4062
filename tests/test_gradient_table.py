"""Gradients that wait in the table become what autocast would have left in ``.grad``, bit for bit.

Time budget: 5 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from autoprec.gradient_table import GradientTable, is_node_kept, is_observed, uses_of

BF16 = torch.bfloat16
Weights = Sequence[nn.Parameter]
Loss = Callable[[Weights, Tensor, Sequence[Tensor]], Tensor]


def made() -> tuple[list[nn.Parameter], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (6,), (3, 6), (3,)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes], torch.randn(
        5, 4, generator=generator
    )


def two_layers(x: Tensor, low: Sequence[Tensor]) -> Tensor:
    return linear(linear(x, low[0], low[1]).relu(), low[2], low[3])


@contextmanager
def autocast() -> Iterator[None]:
    with torch.autocast("cpu", BF16, cache_enabled=False):
        yield


def gradients_under_autocast(loss: Loss) -> list[Tensor | None]:
    weights, x = made()
    with autocast():
        value = loss(weights, x, [weight.to(BF16) for weight in weights])
    value.backward()
    return [weight.grad for weight in weights]


def handed_out(table: GradientTable, weights: Weights) -> tuple[Tensor, ...]:
    return table.hand_out(weights, [weight.detach().to(BF16) for weight in weights])


def on_copies(loss: Loss, table: GradientTable, weights: Weights, x: Tensor) -> Tensor:
    with autocast():
        return loss(weights, x, handed_out(table, weights))


def assert_same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype == torch.float32
            assert mine.stride() == theirs.stride()
            assert torch.equal(mine, theirs)


def gradients_of(weights: Weights) -> list[Tensor | None]:
    return [weight.grad for weight in weights]


# ---- losses: weights themselves, input, weights in low precision ----


def plain(weights: Weights, x: Tensor, low: Sequence[Tensor]) -> Tensor:
    return two_layers(x, low).float().pow(2).mean()


def used_directly_too(weights: Weights, x: Tensor, low: Sequence[Tensor]) -> Tensor:
    return plain(weights, x, low) + weights[0].pow(2).sum() + weights[3].exp().sum()


def used_in_part(weights: Weights, x: Tensor, low: Sequence[Tensor]) -> Tensor:
    return linear(x, low[0]).float().pow(2).mean()


def with_a_penalty(weights: Weights, x: Tensor, low: Sequence[Tensor]) -> Tensor:
    loss = plain(weights, x, low)
    grads = torch.autograd.grad(loss, [weights[0], weights[3]], create_graph=True)
    return loss + sum((grad.pow(2).sum() for grad in grads), torch.zeros(()))


def with_a_penalty_on_the_input(weights: Weights, x: Tensor, low: Sequence[Tensor]) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(two_layers(x, low).float().sum(), x, create_graph=True)
    penalty: Tensor = grad.norm()
    return plain(weights, x, low) + penalty


def checkpointed(use_reentrant: bool) -> Loss:
    def loss(weights: Weights, x: Tensor, low: Sequence[Tensor]) -> Tensor:
        first = linear(x, low[0], low[1]).relu()
        second = checkpoint(lambda y: linear(y, low[2], low[3]), first, use_reentrant=use_reentrant)
        result: Tensor = second.float().pow(2).mean()
        return result

    return loss


LOSSES = {
    "plain": plain,
    "used directly too": used_directly_too,
    "used in part": used_in_part,
    "gradient penalty": with_a_penalty,
    "penalty on the input": with_a_penalty_on_the_input,
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant checkpoint": checkpointed(use_reentrant=True),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@every_loss
def test_gradients_are_those_of_autocast(loss: Loss) -> None:
    expected = gradients_under_autocast(loss)
    weights, x = made()
    table = GradientTable()
    value = on_copies(loss, table, weights, x)
    with table.open(value):
        value.backward()
    table.materialize()
    assert_same(gradients_of(weights), expected)
    assert not table.held


def test_gradients_wait_in_low_precision_and_grad_stays_empty() -> None:
    weights, x = made()
    table = GradientTable()
    value = on_copies(plain, table, weights, x)
    with table.open(value):
        value.backward()
    assert gradients_of(weights) == [None] * 4
    assert {key: grad.dtype for key, grad in table.held.items()} == {id(weight): BF16 for weight in weights}


def test_merging_touches_only_what_has_a_gradient_from_elsewhere() -> None:
    weights, x = made()
    table = GradientTable()
    value = on_copies(used_directly_too, table, weights, x)
    with table.open(value):
        value.backward()
    table.merge()
    assert [weight.grad is None for weight in weights] == [False, True, True, False]
    assert set(table.held) == {id(weights[1]), id(weights[2])}
    table.materialize()
    assert_same(gradients_of(weights), gradients_under_autocast(used_directly_too))


@pytest.mark.parametrize("times", [2, 4])
@every_loss
def test_micro_batches_add_up_in_float32(loss: Loss, times: int) -> None:
    weights, x = made()
    others, _ = made()
    table = GradientTable()
    for step in range(times):
        with autocast():
            value = loss(weights, x + step, handed_out(table, weights))
            expected = loss(others, x + step, [other.to(BF16) for other in others])
        with table.open(value):
            value.backward()
        table.materialize()
        expected.backward()
    assert_same(gradients_of(weights), gradients_of(others))


def test_a_layer_that_runs_twice_is_said_to_be_shared() -> None:
    def twice(x: Tensor, low: Sequence[Tensor], again: Sequence[Tensor], third: Sequence[Tensor]) -> Tensor:
        return sum(
            (two_layers(x * (n + 1), each).float().pow(2).mean() for n, each in enumerate((low, again, third))),
            torch.zeros(()),
        )

    weights, x = made()
    others, _ = made()
    table = GradientTable()
    with autocast():
        value = twice(x, handed_out(table, weights), *([w.to(BF16) for w in weights] for _ in range(2)))
        expected = twice(x, *([other.to(BF16) for other in others] for _ in range(3)))
    table.shared.update(map(id, weights))
    with table.open(value):
        value.backward()
    assert not table.held
    expected.backward()
    assert_same(gradients_of(weights), gradients_of(others))


# ---- backwards that are not the one of the step ----


def test_outside_of_the_open_backward_gradients_go_their_way() -> None:
    weights, x = made()
    table = GradientTable()
    on_copies(plain, table, weights, x).backward()
    assert not table.held
    assert all(weight.grad is not None and weight.grad.dtype is torch.float32 for weight in weights)


def test_autograd_grad_returns_float32_and_leaves_the_table_alone() -> None:
    weights, x = made()
    table = GradientTable()
    value = on_copies(plain, table, weights, x)
    found = torch.autograd.grad(value, weights, retain_graph=True)
    assert_same(found, gradients_under_autocast(plain))
    assert not table.held
    with table.open(value):
        value.backward()
    assert len(table.held) == 4


def test_autograd_grad_for_an_unused_weight_raises_as_always() -> None:
    weights, x = made()
    table = GradientTable()
    value = on_copies(used_in_part, table, weights, x)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(value, weights, retain_graph=True)
    found = torch.autograd.grad(value, weights, allow_unused=True)
    assert [grad is None for grad in found] == [False, True, True, True]


def test_a_second_backward_adds_up() -> None:
    weights, x = made()
    table = GradientTable()
    value = on_copies(plain, table, weights, x)
    with table.open(value):
        value.backward(retain_graph=True)
        value.backward()
    table.merge()
    table.materialize()
    (once, *_) = gradients_under_autocast(plain)
    assert once is not None
    assert weights[0].grad is not None
    assert torch.equal(weights[0].grad, once * 2)


def test_a_graph_of_the_backward_can_be_differentiated() -> None:
    weights, x = made()
    table = GradientTable()
    value = on_copies(plain, table, weights, x)
    with table.open(value), pytest.warns(UserWarning, match="create_graph=True"):
        value.backward(create_graph=True)
    assert not table.held, "a graph is wanted, which `.grad` has and the table has not"
    assert weights[0].grad is not None
    assert weights[0].grad.requires_grad
    (second,) = torch.autograd.grad(weights[0].grad.sum(), weights[2])
    assert bool(second.abs().sum() > 0)
    for weight in weights:
        weight.grad = None


def test_the_table_is_closed_after_an_exception() -> None:
    weights, x = made()
    table = GradientTable()
    value = on_copies(plain, table, weights, x)
    with pytest.raises(KeyError), table.open(value):
        raise KeyError("before the backward")
    value.backward()
    assert not table.held


def test_opening_for_a_loss_without_a_graph_leaves_the_error_to_the_backward() -> None:
    table = GradientTable()
    with table.open(torch.zeros(())), pytest.raises(RuntimeError, match="does not require grad"):
        torch.zeros(()).backward()


def test_opening_leaves_no_hook_on_the_loss() -> None:
    weights, x = made()
    table = GradientTable()
    value = on_copies(plain, table, weights, x)
    with table.open(value):
        value.backward()
    assert not value._backward_hooks


# ---- hooks ----


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_a_weight_are_called_with_float32(kind: str, is_early: bool) -> None:
    weights, x = made()
    table = GradientTable()
    seen: list[torch.dtype] = []

    def on_gradient(grad: Tensor) -> None:
        seen.append(grad.dtype)

    if is_early:
        getattr(weights[0], kind)(on_gradient)
    value = on_copies(plain, table, weights, x)
    if not is_early:
        getattr(weights[0], kind)(on_gradient)
    with table.open(value):
        value.backward()
    assert seen == [torch.float32]
    assert id(weights[0]) not in table.held
    assert_same([weights[0].grad], gradients_under_autocast(plain)[:1])


def test_a_hook_may_change_the_gradient() -> None:
    weights, x = made()
    table = GradientTable()
    weights[0].register_hook(lambda grad: grad * 2)
    value = on_copies(plain, table, weights, x)
    with table.open(value):
        value.backward()
    (expected, *_) = gradients_under_autocast(plain)
    assert expected is not None
    assert weights[0].grad is not None
    assert torch.equal(weights[0].grad, expected * 2)


def test_hooks_are_seen() -> None:
    weights, _ = made()
    assert not any(map(is_observed, weights))
    handle = weights[0].register_hook(lambda grad: grad)
    assert is_observed(weights[0])
    handle.remove()
    assert not is_observed(weights[0])
    weights[1].register_post_accumulate_grad_hook(lambda parameter: None)
    assert is_observed(weights[1])


# ---- layouts ----


@pytest.mark.parametrize("is_last", [False, True], ids=["contiguous", "channels last"])
def test_convolutions_get_gradients_that_lie_like_their_weights(is_last: bool) -> None:
    layout = torch.channels_last if is_last else torch.contiguous_format
    weight = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=layout))
    other = nn.Parameter(weight.detach().clone(memory_format=torch.preserve_format))
    x = torch.randn(2, 3, 6, 6).to(BF16).to(memory_format=torch.channels_last)
    table = GradientTable()
    (low,) = handed_out(table, [weight])
    value = nn.functional.conv2d(x, low).float().pow(2).mean()
    with table.open(value):
        value.backward()
    table.materialize()
    nn.functional.conv2d(x, other.to(BF16)).float().pow(2).mean().backward()
    assert_same([weight.grad], [other.grad])


def test_storage_is_shared_not_copied() -> None:
    weights, _ = made()
    values = [weight.detach().to(BF16) for weight in weights]
    for value, handed in zip(values, GradientTable().hand_out(weights, values), strict=True):
        assert handed.data_ptr() == value.data_ptr()
        assert handed.requires_grad
        assert not value.requires_grad


# ---- counting uses ----


def test_uses_are_counted_by_gradient() -> None:
    weights, x = made()
    loss = linear(x, weights[0], weights[1]).sum() + (weights[0] * weights[0]).sum()
    uses = uses_of(loss)
    assert [uses[id(weight)] for weight in weights] == [3, 1, 0, 0]


def test_a_shared_part_of_a_graph_is_counted_once() -> None:
    weights, _ = made()
    doubled = weights[0] * 2
    loss = doubled.sum() + doubled.pow(2).sum()
    assert uses_of(loss)[id(weights[0])] == 1
    assert uses_of(torch.zeros(()))[id(weights[0])] == 0


def test_nodes_that_somebody_keeps() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not is_node_kept(weight)
    (weight * 2).sum().backward()
    assert not is_node_kept(weight)
    kept: Any = get_gradient_edge(weight).node
    assert is_node_kept(weight)
    assert not kept.metadata
    kept = weight.expand_as(weight)  # a graph keeps its nodes
    assert is_node_kept(weight)
    del kept
    assert not is_node_kept(weight)
