"""Cases A-13, A-14 and A-15: odd training steps.

Time budget: 15 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from autoprec import Action, AutoPrecisionCallback
from tests.support import (
    Lin,
    Manual,
    Task,
    Watch,
    all_in,
    assert_finite,
    assert_same_state,
    cpu,
    fp16cpu,
    loader,
    mean_of,
    reported,
    rows,
    scripted,
    state_of,
    user_skipped,
    weights_of,
)

NO_LOSS = "ignore:.training_step. returned .None."


# ---- no loss ----


class Sparing(Lin):
    """Returns nothing for the batches in ``none``."""

    def __init__(self, n: int, bs: int, none: Iterable[int], **kwargs: Any) -> None:
        super().__init__(n, bs, **kwargs)
        self.none = set(none)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx in self.none else loss


@pytest.mark.filterwarnings(NO_LOSS)
@pytest.mark.parametrize("plugins", [None, "fp16"])
def test_a13_step_without_a_loss_counts_as_skipped_by_the_user(plugins: str | None) -> None:
    kwargs = {"plugins": fp16cpu(1024, growth_interval=3)} if plugins else {}
    ap, task = scripted(), Sparing(32, 8, none=[1])
    watch = Watch(ap)
    cpu(callbacks=[ap, watch], **kwargs).fit(task)
    assert user_skipped(ap) == 1
    assert (ap.applied_steps, ap.skipped_steps) == (3, 0)
    assert torch.equal(watch.weights[1][0], watch.weights[0][0])
    if plugins:  # the batch counts neither towards growth nor against it
        assert watch.scales == [1024.0, 1024.0, 1024.0, 2048.0]


@pytest.mark.filterwarnings(NO_LOSS)
def test_a13_step_without_a_loss_is_left_out_of_the_readings() -> None:
    ap, task = scripted(), Sparing(32, 8, none=[1])
    cpu(callbacks=[ap]).fit(task)
    assert ap.steering is not None
    telemetry = ap.steering.telemetry
    telemetry.flush()
    assert len(telemetry.losses) == len(telemetry.norms) == len(telemetry.outcomes) == 3


@pytest.mark.filterwarnings(NO_LOSS)
def test_a13_report_has_the_count(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    report = reported(caplog, monkeypatch)
    cpu(callbacks=[scripted()]).fit(Sparing(32, 8, none=[1]))
    assert "3 applied, 0 skipped as non-finite, 1 without a loss" in report()


@pytest.mark.filterwarnings(NO_LOSS)
def test_a13_weights_are_those_of_a_run_without_the_batch() -> None:
    results = []
    for n, none in ((32, [1]), (24, [])):
        torch.manual_seed(0)
        task = Sparing(n, 8, none=none, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
        cpu(plugins=fp16cpu(1024), callbacks=[scripted()]).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)


@pytest.mark.filterwarnings(NO_LOSS)
def test_a13_every_step_without_a_loss() -> None:
    ap, task = scripted(), Sparing(32, 8, none=range(4))
    before = weights_of(task)
    cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(task)
    assert (user_skipped(ap), ap.applied_steps, ap.skipped_steps, ap.loss_scale) == (4, 0, 0, 1024.0)
    assert all(map(torch.equal, weights_of(task), before))


@pytest.mark.filterwarnings(NO_LOSS)
@pytest.mark.parametrize("none", [[0], [1], [3]])
def test_a13_accumulation_with_one_micro_batch_missing(none: list[int]) -> None:
    """The window still has a gradient, so it is applied."""
    results = []
    for callbacks in ([scripted()], []):
        torch.manual_seed(0)
        task = Sparing(32, 8, none=none)
        cpu(callbacks=callbacks, accumulate_grad_batches=2).fit(task)
        results.append(state_of(task))
        if callbacks:
            assert (callbacks[0].applied_steps, callbacks[0].skipped_steps) == (2, 0)
    assert_same_state(*results)


@pytest.mark.filterwarnings(NO_LOSS)
def test_a13_accumulation_with_a_whole_window_missing() -> None:
    ap, task = scripted(), Sparing(48, 8, none=[2, 3])
    cpu(plugins=fp16cpu(1024), callbacks=[ap], accumulate_grad_batches=2).fit(task)
    assert (user_skipped(ap), ap.applied_steps, ap.skipped_steps) == (1, 2, 0)


class TwoCalls(SGD):
    """Evaluates its closure twice a step."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@pytest.mark.filterwarnings(NO_LOSS)
def test_a13_a_closure_that_is_called_twice_makes_one_window() -> None:
    ap, task = scripted(), Sparing(32, 8, none=[1], optimizer=lambda p: TwoCalls(p, lr=0.1))
    cpu(callbacks=[ap]).fit(task)
    assert ap.steering is not None
    assert (ap.steering.window, user_skipped(ap), ap.applied_steps, ap.skipped_steps) == (4, 1, 3, 0)


@pytest.mark.filterwarnings(NO_LOSS)
def test_a13_a_window_that_an_exception_ends_is_not_counted() -> None:
    class Raises(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 1:
                raise ValueError("stop")

    ap = scripted()
    with pytest.raises(ValueError, match="stop"):
        cpu(callbacks=[ap, Raises()]).fit(Sparing(32, 8, none=[1]))
    assert ap.steering is not None
    assert (ap.steering.window, user_skipped(ap), ap.applied_steps, ap.skipped_steps) == (1, 0, 1, 0)


@pytest.mark.filterwarnings(NO_LOSS)
def test_a13_a_schedule_does_not_count_it_as_skipped() -> None:
    """The user left the batch out, so the schedule does what Lightning does."""
    rates = []
    for callbacks in ([scripted()], []):
        schedule = lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 1, 0.5), "interval": "step"}  # noqa: E731
        task = Sparing(32, 8, none=[1], schedule=schedule)
        trainer = cpu(callbacks=callbacks)
        trainer.fit(task)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1]


class Idle(LightningModule):
    """The second optimizer's parameters take part in the loss in every other batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: Tensor = self.a(batch).square().mean()
        if batch_idx % 2:
            loss = loss + self.b(batch).square().mean()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return SGD(self.a.parameters(), lr=0.1), torch.optim.Adam(self.b.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return loader(torch.ones(32, 4), 8)


def test_a13_optimizer_whose_parameters_got_no_gradient() -> None:
    """Stepping it through a scaler raises in plain Lightning."""
    ap, task = scripted(), Idle()
    before = weights_of(task)
    cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(task)
    assert (ap.applied_steps, ap.skipped_steps) == (6, 0)  # two of the eight had nothing to apply
    assert ap.loss_scale == 1024.0
    assert not any(map(torch.equal, weights_of(task), before))
    assert_finite(task)


@pytest.mark.parametrize("output", [{}, {"log": 1.0}, {"prediction": torch.zeros(1)}, 3.0, "loss"])
def test_a13_outputs_that_lightning_refuses_give_its_own_error(output: Any) -> None:
    class Odd(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    errors = []
    for callbacks in ([], [scripted()]):
        with pytest.raises(MisconfigurationException) as caught:
            cpu(plugins=fp16cpu(1024), callbacks=callbacks).fit(Odd(16, 8))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_a13_outputs_with_more_keys_than_the_loss() -> None:
    class Rich(Lin):
        def training_step(self, batch: Any, batch_idx: int) -> Mapping[str, Any]:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "batch": batch, "nested": {"text": "x", "none": None}}

    ap = scripted()
    cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(Rich(16, 8))
    assert ap.applied_steps == 2


# ---- a bare backward ----


class Bare(Manual):
    """Calls ``loss.backward()`` in the batches named and ``manual_backward`` in the others."""

    def __init__(self, *args: Any, bare: Iterable[int] = range(1000), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bare = set(bare)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self._loss(self.net, batch, batch_idx)
        if batch_idx in self.bare:
            loss.backward()
        else:
            self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("bare", [[0, 1, 2, 3], [0], [2], [1, 3]])
def test_a14_bare_backward_is_never_unscaled(bare: list[int]) -> None:
    ap, task = scripted(), Bare(nn.Linear(4, 1), torch.ones(32, 4), bare=bare, loss=mean_of)
    watch = Watch(ap)
    with pytest.warns(UserWarning, match="manual_backward"):
        cpu(plugins=fp16cpu(1024), callbacks=[ap, watch]).fit(task)
    assert [float(g) for gradients in watch.gradients for g in gradients[0].flatten()] == [1.0] * 16
    assert ap.applied_steps == 4


def test_a14_message_names_cause_and_fix() -> None:
    ap, task = scripted(), Bare(nn.Linear(4, 1), torch.ones(16, 4))
    with pytest.warns(UserWarning, match="manual_backward") as caught:
        cpu(plugins=fp16cpu(1024), callbacks=[ap]).fit(task)
    text = next(str(w.message) for w in caught if "manual_backward" in str(w.message))
    assert "loss scale" in text
    assert "self.manual_backward(loss)" in text
    assert "loss.backward()" in text


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a14_without_a_loss_scale_nothing_is_wrong(precision: Any) -> None:
    """No warning either; filterwarnings would turn it into an error."""
    ap, task = scripted({0: all_in("bf16")}), Bare(nn.Linear(4, 1), torch.ones(32, 4), loss=mean_of)
    watch = Watch(ap)
    cpu(precision=precision, callbacks=[ap, watch]).fit(task)
    assert all(torch.equal(g, torch.ones_like(g)) for gradients in watch.gradients for g in gradients)


class BareSecond(LightningModule):
    """Two optimizers in one batch: ``manual_backward`` for the first, a bare backward for the second."""

    def __init__(self, is_bare_first: bool) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.automatic_optimization = False
        self.is_bare_first = is_bare_first
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for index, (net, optimizer) in enumerate(zip(self.nets, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = net(batch).float().mean()
            if (index == 0) == self.is_bare_first:
                loss.backward()
            else:
                self.manual_backward(loss)
            optimizer.step()
            gradient = next(net.parameters()).grad
            assert gradient is not None
            self.seen.append(float(gradient.mean()))

    def configure_optimizers(self) -> Any:
        return [SGD(net.parameters(), lr=0.1) for net in self.nets]

    def train_dataloader(self) -> Any:
        return loader(torch.ones(16, 4), 8)


@pytest.mark.parametrize("is_bare_first", [True, False])
def test_a14_one_of_two_optimizers(is_bare_first: bool) -> None:
    """Neither the scaled nor the bare gradient may come out wrong."""
    task = BareSecond(is_bare_first)
    with pytest.warns(UserWarning, match="manual_backward"):
        cpu(plugins=fp16cpu(1024), callbacks=[scripted()]).fit(task)
    assert task.seen == [1.0] * 4


def test_a14_overridden_backward_is_not_bare() -> None:
    """Lightning's own hook for automatic optimization; the loss that it gets is scaled already."""

    class Own(Lin):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()

    ap, task = scripted(), Own(16, 8, loss=mean_of)
    watch = Watch(ap)
    cpu(plugins=fp16cpu(1024), callbacks=[ap, watch]).fit(task)
    assert all(torch.equal(g, torch.ones_like(g)) for gradients in watch.gradients for g in gradients)


# ---- double backward ----


def penalised(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    """A quadratic with a penalty on the gradient with respect to the input."""
    x = batch.detach().requires_grad_()
    output = net(x)
    (gradient,) = torch.autograd.grad(output.float().sum(), x, create_graph=True)
    fit: Tensor = (output.float() - batch.sum(1, keepdim=True)).square().mean()
    penalty: Tensor = (gradient.float().norm(dim=1) - 1).square().mean()
    return fit + 0.1 * penalty


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 1))


def penalised_losses(action: Action | None, steps: int = 120) -> tuple[AutoPrecisionCallback, list[float], Task]:
    torch.manual_seed(0)
    data = torch.rand(8, 4).repeat(steps, 1)  # one batch over and over
    task = Task(critic(), data, loss=penalised, optimizer=lambda p: SGD(p, lr=0.1))
    ap = scripted({0: action} if action else {})
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(task)
    return ap, watch.losses, task


def test_a15_gradient_penalty_overflows_and_recovers() -> None:
    ap, losses, task = penalised_losses(Action(precision={"*": "fp16"}, loss_scale=65536.0))
    _, expected, _ = penalised_losses(None)
    assert ap.skipped_steps >= 1  # at this scale the second order overflows
    assert ap.loss_scale < 65536.0 or "fp32" in ap.precision_map().values()
    assert ap.applied_steps >= 110
    assert_finite(task)
    assert losses[-1] == pytest.approx(expected[-1], rel=0.05)
    assert losses[-1] < losses[0] / 5


def test_a15_every_skipped_step_is_answered() -> None:
    """The scale or the precision goes down after each of them."""
    ap, _, _ = penalised_losses(Action(precision={"*": "fp16"}, loss_scale=2.0**24), steps=30)
    lower = math.log2(2.0**24 / ap.loss_scale)
    up = sum(d.applied == "fp32" for d in rows(ap.history, "precision"))
    assert ap.skipped_steps <= lower + up


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("is_manual", [False, True])
def test_a15_penalty_sees_first_order_gradients_unscaled(name: str, is_manual: bool) -> None:
    """The gradient inside the step is that of fp32 up to rounding, whatever the loss scale."""
    seen: list[Tensor] = []

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        x = batch.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).float().sum(), x, create_graph=True)
        seen.append(gradient.detach().float())
        return gradient.float().square().sum()

    for format_ in ("fp32", name):
        torch.manual_seed(0)
        task = (Manual if is_manual else Task)(critic(), torch.rand(8, 4), loss=loss)
        cpu(callbacks=[scripted({0: Action(precision={"*": format_}, loss_scale=4096.0)})]).fit(task)
    torch.testing.assert_close(seen[1], seen[0], rtol=0.03, atol=0.01)


def penalty_alone(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    x = batch.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(net(x).float().square().sum(), x, create_graph=True)
    loss: Tensor = gradient.float().square().sum(1).mean()
    return loss


@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16", "int8", "fp8"])
def test_a15_second_order_gradient_is_right(name: str) -> None:
    """Every weight gets the gradient of the penalty, within the rounding of the format; none of it may be missing."""
    results = []
    for format_ in ("fp32", name):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 16))
        task = Task(net, torch.rand(8, 16), loss=penalty_alone)
        ap, watch = scripted({0: all_in(format_)}), Watch()
        cpu(callbacks=[ap, watch]).fit(task)
        assert ap.precision_map() == {"net.0": format_, "net.2": format_}
        results.append(watch.gradients[0])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert F.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.999
        assert float(ours.norm() / theirs.norm()) == pytest.approx(1.0, abs=0.05)
