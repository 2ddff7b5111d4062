"""The rules for the learning rate, and putting its values into groups and back.

Time budget: 5 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, NAdam, Optimizer

from autoprec.learning_rate import LearningRate, adascale_gain, sde_beta, sde_eps, why_not_rule


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(("rule", "gain"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0), ("sde", 2.0)])
def test_rules(rule: str, gain: float) -> None:
    rates = LearningRate(rule)
    assert rates.is_neutral
    rates.set_batch_factor(4)
    assert rates.factor == gain
    rates.set_batch_factor(1)
    assert (rates.factor, rates.is_neutral) == (1.0, True)


@pytest.mark.parametrize("k", [0.25, 0.5, 1.0, 2.0, 8.0])
def test_adascale_is_the_ratio_of_variances(k: float) -> None:
    """Johnson et al. 2020: (variance + mean^2) / (variance / k + mean^2), of the gradient of the first batch."""
    variance, mean, first = 6.0, 0.5, 32
    noise_scale = first * variance / mean**2
    gain = (variance + mean**2) / (variance / k + mean**2)
    assert adascale_gain(k, noise_scale, first) == pytest.approx(gain)
    assert min(1.0, k) <= gain <= max(1.0, k)


def test_adascale_ends_at_k_and_1() -> None:
    assert adascale_gain(8.0, math.inf, 32) == 8.0
    assert adascale_gain(8.0, 0.0, 32) == 1.0


def test_adascale_waits_for_its_noise_scale() -> None:
    rates = LearningRate("adascale")
    rates.set_batch_factor(4)
    rates.set_first_batch(16)
    assert rates.is_neutral
    rates.set_noise_scale(48)
    assert rates.factor == pytest.approx(4 / 1.75)
    for estimate in (math.nan, -3.0):
        rates.set_noise_scale(estimate)
        assert rates.factor == pytest.approx(4 / 1.75)


def test_sde_scales_betas_and_epsilon() -> None:
    assert sde_beta(0.9, 4) == pytest.approx(0.6)
    assert sde_beta(0.999, 0.5) == pytest.approx(0.9995)
    assert sde_beta(0.5, 4) == 0.0
    assert sde_eps(1e-8, 4) == pytest.approx(5e-9)


def test_sde_has_a_largest_batch() -> None:
    rates = LearningRate("sde")
    rates.attach([AdamW([weight()], betas=(0.9, 0.99))])
    assert rates.why_not(9.9) is None
    assert "beta = 0.9; it must be > 0" in str(rates.why_not(10))
    with pytest.raises(ValueError, match="Passed `set_batch_factor\\(16\\)`. Rule 'sde' would make Adam's beta"):
        rates.set_batch_factor(16)
    optimizer = AdamW([weight()], betas=(0.95, 0.99))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)  # goes down to 0.85
    rates.attach([optimizer])
    assert rates.why_not(6.0) is None
    assert rates.why_not(7.0) is not None


class AdamW8bit(SGD):
    """Named like other libraries' Adam."""


@pytest.mark.parametrize("rule", ["sqrt", "linear", "adascale", "sde"])
def test_which_optimizers_a_rule_fits(rule: str) -> None:
    for optimizer in (Adam([weight()]), AdamW([weight()])):
        assert why_not_rule(rule, [optimizer]) is None
    other = AdamW8bit([weight()])
    other.param_groups[0].update(betas=(0.9, 0.99), eps=1e-8)
    assert why_not_rule(rule, [other]) is None
    for name, unfit in (("SGD", SGD([weight()])), ("NAdam", NAdam([weight()]))):
        reason = why_not_rule(rule, [Adam([weight()]), unfit])
        assert reason is None if rule != "sde" else f"`{name}` is not Adam or AdamW" in str(reason)
    del other.param_groups[0]["lr"]
    assert "`AdamW8bit` has groups without a learning rate" in str(why_not_rule(rule, [other]))
    assert why_not_rule("none", [other]) is None


@pytest.mark.parametrize("k", [0, -1.0, math.nan, math.inf])
def test_impossible_factors_are_refused(k: float) -> None:
    rates = LearningRate("linear")
    with pytest.raises(ValueError, match="Passed `set_batch_factor"):
        rates.set_batch_factor(k)
    with pytest.raises(ValueError, match="Passed `set_factor\\('rollback', .*must be a finite number > 0"):
        rates.set_factor("rollback", k)
    with pytest.raises(ValueError, match="Passed `set_first_batch"):
        rates.set_first_batch(k)
    assert rates.is_neutral


def test_named_factors_multiply() -> None:
    rates = LearningRate("sqrt")
    rates.set_batch_factor(4)
    rates.set_factor("rollback", 0.25)
    rates.set_factor("recipe", 0.5)
    assert rates.factor == 0.25
    rates.set_factor("rollback", 0.5)
    assert rates.factor == 0.5
    assert rates.named == {"rollback": 0.5, "recipe": 0.5}


def test_state_comes_back() -> None:
    rates, other = LearningRate("adascale"), LearningRate("adascale")
    rates.set_batch_factor(3)
    rates.set_factor("rollback", 0.7)
    rates.set_first_batch(8)
    rates.set_noise_scale(5.5)
    other.load_state_dict(rates.state_dict())
    assert other.factor == rates.factor != 1.0
    assert other.state_dict() == rates.state_dict()


# ---- around a step ----


class Seen:
    """The groups' values at some place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.values: dict[str, list[Any]] = {}

    def look(self, place: str) -> None:
        group = self.optimizer.param_groups[0]
        lr = group["lr"]
        value = lr.clone() if isinstance(lr, Tensor) else lr
        self.values.setdefault(place, []).append((float(value), group.get("betas"), group.get("eps")))


class Looks(SGD):
    """Looks at its rate where it updates."""

    seen: Seen
    change: Callable[[], None] | None = None

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        self.seen.look("update")
        if self.change is not None:
            self.change()
        return loss


def looking(**options: Any) -> tuple[Looks, Seen]:
    optimizer = Looks([weight()], **{"lr": 0.1, **options})
    optimizer.seen = Seen(optimizer)
    return optimizer, optimizer.seen


def take(rates: LearningRate, optimizer: Optimizer, closure: Callable[[], Any] = lambda: None) -> None:
    rates.take(optimizer, closure)


def tripled() -> LearningRate:
    rates = LearningRate()
    rates.set_factor("test", 3.0)
    return rates


@pytest.mark.parametrize("make", [float, lambda x: torch.tensor(x, dtype=torch.float32)], ids=["float", "tensor"])
def test_effective_value_is_there_in_the_update_only(make: Any) -> None:
    optimizer, seen = looking(lr=make(0.1))
    own = optimizer.param_groups[0]["lr"]
    bits = float(own)
    optimizer.register_step_pre_hook(lambda *args: seen.look("before"))
    optimizer.register_step_post_hook(lambda *args: seen.look("after"))
    for _ in range(2):
        take(tripled(), optimizer, lambda: seen.look("closure"))
    found = {place: [value for value, *_ in values] for place, values in seen.values.items()}
    assert found == {place: [bits] * 2 for place in ("before", "closure", "after")} | {
        "update": [pytest.approx(0.3)] * 2
    }
    assert optimizer.param_groups[0]["lr"] is own
    assert float(own) == bits
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_groups_that_share_a_tensor_are_multiplied_once() -> None:
    lr = torch.tensor(0.1)
    optimizer = SGD([{"params": [weight()]}, {"params": [weight()]}], lr=lr)
    for group in optimizer.param_groups:
        group["lr"] = lr
    found: list[float] = []

    def look(group: dict[str, Any], *lists: Any) -> bool:
        found.append(float(group["lr"]))
        return False

    optimizer._init_group = look  # type: ignore[method-assign]
    take(tripled(), optimizer)
    assert found == [pytest.approx(0.3)] * 2
    assert torch.equal(lr, torch.tensor(0.1))


@pytest.mark.parametrize("make", [float, torch.tensor], ids=["float", "tensor"])
def test_what_others_write_acts_and_stays(make: Any) -> None:
    """In the closure, and in hooks of the optimizer, where a relative change must not meet the factor."""

    def set_to(value: float) -> None:
        lr = optimizer.param_groups[0]["lr"]
        if isinstance(lr, Tensor):
            lr.fill_(value)
        else:
            optimizer.param_groups[0]["lr"] = value

    def halve(*args: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    optimizer, seen = looking(lr=make(0.1))
    take(tripled(), optimizer, lambda: set_to(0.5))
    assert seen.values["update"][-1][0] == 1.5
    assert float(optimizer.param_groups[0]["lr"]) == 0.5
    optimizer.register_step_post_hook(halve)
    take(tripled(), optimizer)
    assert seen.values["update"][-1][0] == 1.5
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    optimizer.register_step_pre_hook(halve)
    take(tripled(), optimizer)
    assert seen.values["update"][-1][0] == 0.375
    assert float(optimizer.param_groups[0]["lr"]) == 0.0625


@pytest.mark.parametrize("make", [float, torch.tensor], ids=["float", "tensor"])
def test_an_optimizer_that_changes_its_own_rate_does_not_meet_the_factor_again(make: Any) -> None:
    optimizer, seen = looking(lr=make(0.1))

    def decay() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    optimizer.change = decay
    for _ in range(3):
        take(tripled(), optimizer)
    assert [value for value, *_ in seen.values["update"]] == pytest.approx([0.3, 0.15, 0.075])
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.0125)


@pytest.mark.parametrize("place", ["closure", "update"])
def test_values_come_back_after_an_exception(place: str) -> None:
    def fail() -> None:
        raise RuntimeError(place)

    optimizer, _ = looking()
    optimizer.register_step_post_hook(lambda *args: None)
    if place == "update":
        optimizer.change = fail
    with pytest.raises(RuntimeError, match=place):
        take(tripled(), optimizer, fail if place == "closure" else lambda: None)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_lbfgs_reads_its_rate_before_the_closure() -> None:
    def run(lr: float, rates: LearningRate | None) -> Tensor:
        x = weight()
        optimizer = LBFGS([x], lr=lr, max_iter=3)

        def closure() -> Tensor:
            assert optimizer.param_groups[0]["lr"] == lr
            optimizer.zero_grad()
            loss = (x**4).sum()
            loss.backward()
            return loss

        for _ in range(2):
            if rates is None:
                optimizer.step(closure)
            else:
                take(rates, optimizer, closure)
        assert not optimizer._optimizer_step_pre_hooks
        return x.detach()

    assert torch.equal(run(0.1, tripled()), run(0.1 * 3.0, None))
    assert not torch.equal(run(0.1, tripled()), run(0.1, None))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_sde_steps_are_those_of_adam_with_its_values(options: dict[str, Any]) -> None:
    ours, theirs = weight(), weight()
    optimizer = AdamW([ours], lr=0.01, betas=(0.9, 0.99), eps=1e-6, **options)
    expected = AdamW(
        [theirs],
        lr=0.01 * 2.0,
        betas=(1.0 - 4.0 * (1.0 - 0.9), 1.0 - 4.0 * (1.0 - 0.99)),
        eps=1e-6 / 2.0,
        **options,
    )
    rates = LearningRate("sde")
    rates.attach([optimizer])
    rates.set_batch_factor(4.0)
    for step in range(3):
        ours.grad = theirs.grad = torch.arange(3.0) + step
        take(rates, optimizer)
        expected.step()
    assert torch.equal(ours, theirs)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.9, 0.99), 1e-6)
