"""Kernels take the steps of torch's optimizers: same state, same interface, and nothing left behind.

Time budget: 15 s.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from autoprec.fused import FusedStep, is_fusible
from tests.fused_steps import copied, give_gradients, parameters, take

Make = Callable[..., Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.05),
    "sgd decay": partial(SGD, lr=0.05, weight_decay=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "dampening": partial(SGD, lr=0.05, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd uphill": partial(SGD, lr=0.05, momentum=0.9, maximize=True),
    "sgd tensor": partial(SGD, lr=torch.tensor(0.05), momentum=0.9),
    "adam": partial(Adam, lr=0.01),
    "adam decay": partial(Adam, lr=0.01, weight_decay=0.1),
    "adam decoupled": partial(Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": partial(AdamW, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "adamw uphill": partial(AdamW, lr=0.01, maximize=True),
    "adamw tensor": partial(AdamW, lr=torch.tensor(0.01)),
    "adamw tensor betas": partial(
        AdamW, lr=torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.95)), foreach=False
    ),
    "adamw foreach": partial(AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(AdamW, lr=0.01, fused=True),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
adamw, momentum = OPTIMIZERS["adamw"], OPTIMIZERS["momentum"]


def torchs_own(make: Make, params: Any) -> Optimizer:
    """Torch's fused optimizer; where a setting excludes it, the one that was asked for."""
    assert isinstance(make, partial)
    options = {**make.keywords}
    if options.pop("foreach", None) is False:  # betas that are tensors
        options["betas"] = tuple(map(float, options["betas"]))
    optimizer: Optimizer = make.func(params, **{**options, "fused": True})
    return optimizer


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor], ulps: int = 64) -> None:
    """Many steps of at most 4 units in the last place each, which partly go on growing."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        torch.testing.assert_close(mine, theirs, rtol=ulps * 2**-23, atol=ulps * 2**-23)


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in state.values() if tensor is not None]


def assert_same_form(found: Any, expected: Any) -> None:
    """The same keys, dtypes and shapes."""
    assert type(found) is type(expected)
    if isinstance(found, Mapping):
        assert list(found) == list(expected)
        for key in found:
            assert_same_form(found[key], expected[key])
    elif isinstance(found, Tensor):
        assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device)


# ---- the same results ----


@every_optimizer
@pytest.mark.parametrize("sometimes", [False, True])
def test_many_steps_are_those_of_torchs_fused_optimizer(make: Make, sometimes: bool) -> None:
    ours, theirs = parameters(), parameters()
    # torch's fused SGD fails where a parameter gets its first gradient later than others
    optimizer, reference = make(ours), (make if sometimes else partial(torchs_own, make))(theirs)
    fused = FusedStep(optimizer)
    by_kernel = 0
    for step in range(30):
        give_gradients(ours, step, sometimes)
        give_gradients(theirs, step, sometimes)
        by_kernel += take(fused, optimizer)
        reference.step()
    assert by_kernel == fused.taken >= 27
    assert_near(ours, theirs)
    assert_near(tensors_of(optimizer), tensors_of(reference))
    assert_same_form(optimizer.state_dict()["state"], reference.state_dict()["state"])


def test_groups_have_settings_of_their_own_and_may_come_in_mid_run() -> None:
    def groups(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[:3], "lr": 0.1, "weight_decay": 0.3}, {"params": params[3:6], "betas": (0.5, 0.6)}]

    ours, theirs = parameters(), parameters()
    optimizer, reference = AdamW(groups(ours), lr=0.01), AdamW(groups(theirs), lr=0.01, fused=True)
    fused = FusedStep(optimizer)
    for step in range(12):
        if step == 5:
            optimizer.add_param_group({"params": ours[6:], "lr": 0.05})
            reference.add_param_group({"params": theirs[6:], "lr": 0.05})
        give_gradients(ours, step)
        give_gradients(theirs, step)
        assert take(fused, optimizer)
        reference.step()
    assert_near(ours, theirs)


def test_settings_may_change_between_steps() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = SGD(ours, lr=0.1, momentum=0.9), SGD(theirs, lr=0.1, momentum=0.9, fused=True)
    fused = FusedStep(optimizer)
    for step in range(10):
        for each in (optimizer, reference):
            each.param_groups[0].update(lr=0.1 / (step + 1), momentum=0.9 - 0.05 * step, weight_decay=0.01 * step)
        give_gradients(ours, step)
        give_gradients(theirs, step)
        take(fused, optimizer)
        reference.step()
    assert_near(ours, theirs)


def test_a_factor_multiplies_the_gradients() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = SGD(ours, lr=0.1), SGD(theirs, lr=0.1, fused=True)
    fused = FusedStep(optimizer)
    give_gradients(ours, 0)
    give_gradients(theirs, 0)

    def closure() -> None:
        fused.plan(ours, [p.grad for p in ours if p.grad is not None])
        fused.arm(0.25)

    with fused.standing_in():
        optimizer.step(closure)
    for param in theirs:
        assert param.grad is not None
        param.grad.mul_(0.25)
    reference.step()
    assert_near(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_low_precision_are_widened(dtype: torch.dtype) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = adamw(ours), torchs_own(adamw, theirs)
    fused = FusedStep(optimizer)
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        low = [p.grad.to(dtype) for p in ours if p.grad is not None]
        for param, grad in zip(theirs, low, strict=True):
            param.grad = grad.float()
        if step == 0:
            for param, grad in zip(ours, low, strict=True):
                param.grad = grad.float()
            optimizer.step()
        else:
            with fused.standing_in():
                optimizer.step(partial(fused.plan, ours, low))
        reference.step()
    assert fused.taken == 4
    assert_near(ours, theirs)


# ---- state ----


@pytest.mark.parametrize("make", [momentum, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("at", [1, 4])
def test_state_dicts_go_in_both_directions(make: Make, at: int) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = make(ours), torchs_own(make, theirs)
    for step in range(9):
        if step == at:
            mine, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(reference.state_dict())
            for group in mine["param_groups"]:
                group["fused"] = True
            for group in other["param_groups"]:
                group["fused"] = None
            optimizer.load_state_dict(other)
            reference.load_state_dict(mine)
        if step in (0, at):
            fused = FusedStep(optimizer)
        give_gradients(ours, step)
        give_gradients(theirs, step)
        assert take(fused, optimizer) == (step > 0 or make is adamw)  # SGD takes gradients over as moments
        reference.step()
    assert_near(ours, theirs)


def test_loading_in_mid_run_is_noticed() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = adamw(ours), torchs_own(adamw, theirs)
    fused = FusedStep(optimizer)
    saved: Any = None
    for step in range(9):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        take(fused, optimizer)
        reference.step()
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(reference.state_dict())
        if step == 6:
            optimizer.load_state_dict(saved[0])
            reference.load_state_dict(saved[1])
    assert_near(tensors_of(optimizer), tensors_of(reference))
    assert_near(ours, theirs)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
def test_a_state_tensor_that_the_user_replaces_is_used(name: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = adamw(ours), torchs_own(adamw, theirs)
    fused = FusedStep(optimizer)
    for step in range(6):
        if step == 3:
            for each in (optimizer, reference):
                for state in each.state.values():
                    state[name] = state[name] * 2
        give_gradients(ours, step)
        give_gradients(theirs, step)
        take(fused, optimizer)
        reference.step()
    assert_near(ours, theirs)


@pytest.mark.parametrize("what", ["weight", "moment"])
def test_storage_that_is_replaced_is_used(what: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = adamw(ours), torchs_own(adamw, theirs)
    fused = FusedStep(optimizer)
    for step in range(6):
        if step == 3:
            for params, each in ((ours, optimizer), (theirs, reference)):
                target = params[0] if what == "weight" else each.state[params[0]]["exp_avg"]
                target.data = target.data.clone() * 0.5
        give_gradients(ours, step)
        give_gradients(theirs, step)
        assert take(fused, optimizer)
        reference.step()
    assert_near(ours, theirs)


def test_a_weight_in_another_layout_goes_to_torch() -> None:
    ours = [nn.Parameter(torch.randn(4, 3, 3, 3))]
    optimizer = adamw(ours)
    fused = FusedStep(optimizer)
    taken = []
    for step in range(4):
        if step == 2:
            ours[0].data = ours[0].data.contiguous(memory_format=torch.channels_last)
        give_gradients(ours, step)
        taken.append(take(fused, optimizer))
    assert taken == [True, True, False, False]


# ---- what is left to torch ----

OTHERS: dict[str, Callable[[], Optimizer]] = {
    "amsgrad": lambda: AdamW([nn.Parameter(torch.ones(3))], lr=0.1, amsgrad=True),
    "float64": lambda: AdamW([nn.Parameter(torch.ones(3, dtype=torch.float64))], lr=0.1),
    "bfloat16": lambda: AdamW([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], lr=0.1),
    "complex": lambda: AdamW([nn.Parameter(torch.ones(3, dtype=torch.complex64))], lr=0.1),
    "not one block": lambda: AdamW([nn.Parameter(torch.ones(3, 4).t()[::2])], lr=0.1),
    "one of two": lambda: SGD([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))], lr=0.1),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_steps_are_torchs_own_bit_for_bit(make: Callable[[], Optimizer]) -> None:
    optimizer, reference = make(), make()
    fused = FusedStep(optimizer)
    for step in range(4):
        for each in (optimizer, reference):
            for param in each.param_groups[0]["params"]:
                param.grad = torch.full_like(param, 0.1 * (step + 1))
        assert not take(fused, optimizer)
        reference.step()
    assert fused.taken == 0
    for mine, theirs in zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)


def test_sparse_gradients_go_to_torch() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = SGD(table.parameters(), lr=0.1)
    fused = FusedStep(optimizer)
    before = table.weight.detach().clone()
    table(torch.tensor([1, 1])).sum().backward()
    assert not take(fused, optimizer)
    assert torch.allclose(table.weight[1], before[1] - 0.2)


def test_a_differentiable_step_goes_to_torch() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = SGD([param], lr=0.1, differentiable=True)
    fused = FusedStep(optimizer)
    param.grad = torch.ones(3)
    given = [param]
    assert not fused.plan(given, [param.grad])


def test_torch_makes_the_moments_and_the_kernel_takes_the_first_step() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = adamw(ours), adamw(theirs)
    fused = FusedStep(optimizer)
    give_gradients(ours, 0)
    give_gradients(theirs, 0)
    assert take(fused, optimizer)
    reference.step()
    assert fused.updated == list(map(id, ours))
    assert_near(ours, theirs)
    for mine, other in zip(optimizer.state.values(), reference.state.values(), strict=True):
        assert list(mine) == list(other)
        assert float(mine["step"]) == float(other["step"]) == 1.0
        assert all(mine[name].stride() == other[name].stride() for name in ("exp_avg", "exp_avg_sq"))


def test_a_first_step_that_is_not_taken_makes_no_moments() -> None:
    params = parameters()
    optimizer = adamw(params)
    fused = FusedStep(optimizer)
    give_gradients(params, 0)

    def closure() -> float:
        assert fused.plan(params, [p.grad for p in params if p.grad is not None], are_in_grad=True)
        raise KeyError("skipped")

    with pytest.raises(KeyError), fused.standing_in():
        optimizer.step(closure)
    assert not optimizer.state


def test_gradients_that_torch_does_not_find_wait_for_moments() -> None:
    params = parameters()
    optimizer = adamw(params)
    assert not FusedStep(optimizer).plan(params, [torch.ones_like(param) for param in params])


def test_moments_that_the_kernel_cannot_use_leave_the_first_step_to_torch() -> None:
    """Torch counts steps in the default dtype."""
    ours, theirs = parameters(), parameters()
    optimizer, reference = adamw(ours), adamw(theirs)
    fused = FusedStep(optimizer)
    torch.set_default_dtype(torch.float64)
    try:
        for params, step in ((ours, lambda: take(fused, optimizer)), (theirs, reference.step)):
            give_gradients(params, 0)
            step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert not fused.taken
    assert all(map(torch.equal, ours, theirs))


def test_a_switch_in_mid_run_goes_to_torch_and_back() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    fused = FusedStep(optimizer)
    taken = []
    for step, differentiable in enumerate([False, True, False]):
        optimizer.param_groups[0]["maximize"] = differentiable
        optimizer.param_groups[0]["differentiable"] = differentiable
        give_gradients(params, step)
        given = [param.grad for param in params if param.grad is not None]
        taken.append(fused.plan(params, given))
    assert taken == [True, False, True]


class Mine(AdamW):
    """A subclass may do anything."""


def replaced(optimizer: Optimizer) -> Optimizer:
    optimizer.step = types.MethodType(lambda self, closure=None: closure(), optimizer)  # type: ignore[method-assign]
    return optimizer


def replaced_under_a_schedule(optimizer: Optimizer) -> Optimizer:
    StepLR(replaced(optimizer), 1)
    return optimizer


def own_groups(optimizer: Any) -> Optimizer:
    optimizer._init_group = optimizer._init_group
    return optimizer  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [replaced, replaced_under_a_schedule, own_groups])
def test_an_optimizer_that_was_changed_is_not_fusible(change: Callable[[Optimizer], Optimizer]) -> None:
    assert is_fusible(adamw(parameters()))
    assert not is_fusible(change(adamw(parameters())))


def test_only_torchs_own_classes_are_fusible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_fusible(Mine(parameters()))
    assert not is_fusible(torch.optim.NAdam(parameters()))
    optimizer = adamw(parameters())
    StepLR(optimizer, 1)
    assert is_fusible(optimizer)
    monkeypatch.setattr(AdamW, "step", lambda self, closure=None: None)
    assert not is_fusible(AdamW(parameters()))


# ---- torch's interface ----


def test_hooks_see_every_step() -> None:
    params = parameters()
    optimizer = adamw(params)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
    optimizer.register_step_post_hook(lambda *args: seen.append("after"))
    fused = FusedStep(optimizer)
    for step in range(3):
        give_gradients(params, step)
        take(fused, optimizer)
    assert seen == ["before", "after"] * 3
    assert fused.taken == 3


def test_schedules_count_steps_and_set_the_rate() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = SGD(ours, lr=1.0), SGD(theirs, lr=1.0, fused=True)
    fused = FusedStep(optimizer)
    schedules = [LambdaLR(each, lambda step: 0.5**step) for each in (optimizer, reference)]
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        assert take(fused, optimizer)
        reference.step()
        for schedule in schedules:
            schedule.step()
    assert_near(ours, theirs)


def test_the_profiler_names_the_step() -> None:
    params = parameters()
    optimizer = adamw(params)
    fused = FusedStep(optimizer)
    with torch.autograd.profiler.profile() as profile:
        for step in range(2):
            give_gradients(params, step)
            take(fused, optimizer)
    names = [event.name for event in profile.function_events or ()]
    assert names.count("Optimizer.step#AdamW.step") == 2


def test_the_closure_runs_with_gradients_and_its_result_is_returned() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    fused = FusedStep(optimizer)
    give_gradients(params, 0)

    def closure() -> str:
        assert torch.is_grad_enabled()
        fused.plan(params, [p.grad for p in params if p.grad is not None])
        return "loss"

    with torch.no_grad(), fused.standing_in():
        assert optimizer.step(closure) == "loss"


def test_weights_count_versions_so_that_old_graphs_raise() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    x = torch.randn(2, 3, requires_grad=True)
    optimizer = SGD([weight], lr=0.1)
    fused = FusedStep(optimizer)
    loss = (x @ weight).sum()
    weight.grad = torch.ones(3, 3)
    version = weight._version
    assert take(fused, optimizer)
    assert weight._version == version + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- nothing stays behind ----


def test_an_exception_in_the_closure_leaves_the_optimizer_as_found() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    fused = FusedStep(optimizer)
    before = [param.detach().clone() for param in params]
    give_gradients(params, 0)

    def closure() -> None:
        fused.plan(params, [p.grad for p in params if p.grad is not None])
        raise KeyError("closure")

    with pytest.raises(KeyError), fused.standing_in():
        optimizer.step(closure)
    assert "_init_group" not in vars(optimizer)
    assert fused.taken == 0
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    optimizer.step()  # no plan is left for a step outside
    assert not torch.equal(before[0], params[0])


def test_a_plan_that_was_dropped_leaves_the_step_to_torch() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    fused = FusedStep(optimizer)
    give_gradients(params, 0)

    def closure() -> None:
        assert fused.plan(params, [p.grad for p in params if p.grad is not None])
        assert not fused.plan(params, [p.grad.double() for p in params if p.grad is not None])

    with fused.standing_in():
        optimizer.step(closure)
    assert fused.taken == 0
    assert fused.updated == []


def test_what_an_earlier_step_updated_is_forgotten_where_torch_steps() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    fused = FusedStep(optimizer)
    give_gradients(params, 0)
    assert take(fused, optimizer)
    assert fused.updated == list(map(id, params))
    optimizer.param_groups[0]["differentiable"] = True
    with fused.standing_in():
        optimizer.step(lambda: fused.plan(params, [p.grad for p in params if p.grad is not None]))
    assert fused.updated == []
    assert fused.taken == 1


def test_a_step_that_never_reaches_the_groups_updates_nothing() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    fused = FusedStep(optimizer)
    give_gradients(params, 0)
    with fused.standing_in():
        assert fused.plan(params, [p.grad for p in params if p.grad is not None])
    assert fused.updated == []
    assert fused.taken == 0


def test_a_step_without_gradients_changes_nothing() -> None:
    params = parameters()
    optimizer = adamw(params)
    fused = FusedStep(optimizer)
    before = [param.detach().clone() for param in params]
    take(fused, optimizer)
    assert fused.taken == 0
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    assert not optimizer.state


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_an_optimizer_is_copied_in_mid_run_and_even_in_its_closure(way: str) -> None:
    params = parameters()
    optimizer = adamw(params)
    fused = FusedStep(optimizer)
    give_gradients(params, 0)
    take(fused, optimizer)

    copies: list[Any] = []
    give_gradients(params, 1)
    assert take(fused, optimizer, lambda: copies.append(copied(optimizer, way)))
    (other,) = copies
    assert "_init_group" not in vars(other)
    others = other.param_groups[0]["params"]
    give_gradients(others, 1)
    assert take(FusedStep(other), other)
    assert_near(others, params, ulps=0)


def test_two_optimizers_may_step_inside_each_other() -> None:
    params, others = parameters(), parameters()
    outer, inner = SGD(params, lr=0.1), SGD(others, lr=0.1)
    fused, fused_inner = FusedStep(outer), FusedStep(inner)
    give_gradients(params, 0)
    give_gradients(others, 0)
    assert take(fused, outer, lambda: take(fused_inner, inner))
    assert fused.taken == fused_inner.taken == 1
    assert_near(params, others, ulps=0)
