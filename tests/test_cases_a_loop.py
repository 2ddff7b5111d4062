"""Cases A-13 to A-17 and A-19: odd training steps, closures, evaluation after tuning, averaged weights.

Time budget: 40 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

from autoprec import Action, AutoPrecision, AutoPrecisionCallback
from tests.support import (
    Lin,
    Manual,
    Task,
    Watch,
    assert_finite,
    assert_same_state,
    cpu,
    fp16cpu,
    loader,
    rows,
    scripted,
    squares,
    state_of,
    watch_dtypes,
    weights_of,
)

BF16 = Action(precision={"*": "bf16"})
NO_LOSS = "ignore:.training_step. returned .None."


def user_skipped(ap: AutoPrecisionCallback) -> int:
    assert ap.steering is not None
    return ap.steering.user_skipped_steps


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
    import logging

    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    cpu(callbacks=[scripted()]).fit(Sparing(32, 8, none=[1]))
    assert "3 applied, 0 skipped as non-finite, 1 without a loss" in caplog.text


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


def mean_of(net: nn.Module, batch: Tensor, index: int) -> Tensor:
    """Its gradients are ones in every format, so that nothing but a wrong scale can change them."""
    output: Tensor = net(batch)
    return output.float().mean()


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
    ap, task = scripted({0: BF16}), Bare(nn.Linear(4, 1), torch.ones(32, 4), loss=mean_of)
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


@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16"])
def test_a15_second_order_gradient_is_right(name: str) -> None:
    """Every weight gets the gradient of the penalty, within the rounding of the format."""
    results = []
    for format_ in ("fp32", name):
        torch.manual_seed(0)
        task = Task(critic(), torch.rand(8, 4), loss=penalised)
        watch = Watch()
        cpu(callbacks=[scripted({0: Action(precision={"*": format_})}), watch]).fit(task)
        results.append(watch.gradients[0])
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)


# ---- LBFGS and other closures ----


def lbfgs(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return LBFGS(parameters, lr=0.1, max_iter=4)


def test_a16_lbfgs_refuses_fp16_and_the_scale_at_the_start() -> None:
    script = {0: Action(precision={"*": "fp16"}, loss_scale=128.0), 2: Action(precision={"*": "fp16"})}
    ap, task = scripted(script), Lin(32, 8, optimizer=lbfgs)
    cpu(callbacks=[ap]).fit(task)
    assert [(d.step, d.outcome) for d in rows(ap.history, "precision")] == [(0, "refused"), (2, "refused")]
    (scale,) = rows(ap.history, "loss_scale")
    assert scale.outcome == "refused"
    assert "LBFGS" in scale.reason
    assert all("LBFGS" in d.reason for d in rows(ap.history, "precision"))
    assert ap.precision_map() == {"net": "fp32"}
    assert ap.loss_scale == 1.0


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_a16_lbfgs_trains_in_other_formats(name: str) -> None:
    ap, task = scripted({1: Action(precision={"*": name})}), Lin(64, 8, optimizer=lbfgs)
    watch, seen = Watch(ap), watch_dtypes(task)
    cpu(callbacks=[ap, watch]).fit(task)
    assert ap.precision_map() == {"net": name}
    assert ap.applied_steps == 8  # one a step, not one a closure
    assert len(seen["net"]) > 16
    assert watch.losses[-1] < watch.losses[0]


def test_a16_script_counts_steps_not_closures() -> None:
    ap, task = scripted({2: BF16}), Lin(32, 8, optimizer=lbfgs)
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(task)
    assert [m["net"] for m in watch.maps] == ["fp32", "fp32", "bf16", "bf16"]


def test_a16_lbfgs_under_fp16_from_the_trainer_is_an_error_that_says_why() -> None:
    with pytest.raises(MisconfigurationException, match="LBFGS") as caught:
        cpu(plugins=fp16cpu(), callbacks=[scripted()]).fit(Lin(16, 8, optimizer=lbfgs))
    assert "bf16" in str(caught.value)


def test_a16_policy_that_starts_in_fp16_is_refused_too() -> None:
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        cpu(plugins=[AutoPrecision({"*": "fp16"})]).fit(Lin(16, 8, optimizer=lbfgs))
    ap = AutoPrecisionCallback(policy="fixed:fp16")
    cpu(callbacks=[ap]).fit(Lin(16, 8, optimizer=lbfgs))
    assert ap.precision_map() == {"net": "fp32"}


def test_a16_lbfgs_equals_the_plain_run() -> None:
    results = []
    for callbacks in ([], [scripted({0: Action(precision={"*": "fp32"})}, knobs=("precision",))]):
        torch.manual_seed(0)
        task = Lin(64, 8, optimizer=lbfgs)
        cpu(callbacks=callbacks).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)


@pytest.mark.parametrize("bad_call", [0, 1, 2, 5, 6])
def test_a16_lbfgs_is_put_back_when_a_closure_is_not_finite(bad_call: int) -> None:
    """Whichever evaluation of the line search it is: weights and curvature are those before the step."""
    calls: list[int] = []

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        calls.append(index)
        return squares(net, batch, index) * (math.nan if len(calls) - 1 == bad_call else 1.0)

    ap, task = scripted(), Lin(64, 8, optimizer=lbfgs, loss=loss)
    initial = weights_of(task)
    watch = Watch(ap)
    cpu(callbacks=[ap, watch]).fit(task)
    bad = calls[bad_call]
    assert (ap.skipped_steps, ap.applied_steps) == (1, 7)
    before = watch.weights[bad - 1] if bad else initial
    assert all(map(torch.equal, watch.weights[bad], before))
    assert_finite(task)


def test_a16_lbfgs_under_manual_optimization() -> None:
    class ManualLbfgs(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self._loss(self.net, batch, batch_idx)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

    results = []
    for action in (Action(precision={"*": "fp32"}), BF16):
        torch.manual_seed(0)
        task = ManualLbfgs(nn.Linear(4, 1), torch.ones(32, 4), optimizer=lbfgs)
        ap = scripted({0: action})
        cpu(callbacks=[ap]).fit(task)
        assert (ap.applied_steps, ap.skipped_steps) == (4, 0)
        results.append(weights_of(task)[0])
    torch.testing.assert_close(results[1], results[0], rtol=0.05, atol=0.02)


# ---- evaluation and prediction ----


class Evaluated(Task):
    """Keeps what evaluation returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[torch.dtype] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        output = self.net(batch)
        self.seen.append(output.dtype)
        self.log("val", output.float().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.net(batch).dtype)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch)

    def val_dataloader(self) -> Any:
        return loader(self.data, self.bs)

    test_dataloader = predict_dataloader = val_dataloader


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.Flatten(),
        nn.Linear(16, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 1),
    )


def evaluated(**kwargs: Any) -> Evaluated:
    return Evaluated(conv_net(), torch.rand(32, 1, 4), **kwargs)


LOW = ["bf16", "fp16", "int8"]


@pytest.mark.parametrize("name", LOW)
def test_a17_predictions_go_to_numpy_after_tuning(name: str) -> None:
    ap, task = scripted({0: Action(precision={"*": name})}), evaluated()
    trainer = cpu(callbacks=[ap], max_epochs=2)
    trainer.fit(task)
    assert ap.applied_steps == 8
    predictions: Any = trainer.predict(task)
    assert predictions[0].numpy().dtype == "float32"
    plain: Any = cpu().predict(task)
    assert torch.equal(predictions[0], plain[0])
    assert task.eval()(task.data[:8]).detach().numpy().dtype == "float32"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", LOW)
def test_a17_evaluation_runs_in_the_base_precision_by_default(name: str, precision: Any) -> None:
    ap, task = scripted({0: Action(precision={"*": name})}), evaluated()
    trainer = cpu(precision=precision, callbacks=[ap], max_epochs=2)
    trainer.fit(task)
    expected = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    assert set(task.seen) == {expected}
    task.seen.clear()
    trainer.validate(task, verbose=False)
    trainer.test(task, verbose=False)
    assert set(task.seen) == {expected}


def test_a17_metric_of_an_evaluation_is_that_of_the_plain_module() -> None:
    ap, task = scripted({0: BF16}), evaluated()
    trainer = cpu(callbacks=[ap], max_epochs=2)
    trainer.fit(task)
    with torch.no_grad():
        expected = task.eval().net(task.data).mean()
    assert float(trainer.callback_metrics["val"]) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a17_evaluation_in_the_current_formats_is_a_setting(name: str) -> None:
    ap, task = scripted({0: Action(precision={"*": name})}, eval_precision="current"), evaluated()
    trainer = cpu(callbacks=[ap], max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(task)
    assert set(task.seen) == {getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[name])}
    assert trainer.predict(task)[0].dtype is torch.float32  # type: ignore[index, union-attr]


@pytest.mark.parametrize("eval_precision", ["base", "current"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", LOW)
def test_a17_validation_between_steps_leaves_nothing_behind(
    eval_precision: Literal["base", "current"], precision: Any, name: str
) -> None:
    """After every second batch: no inference tensor may meet the backward that follows, and no value may change."""
    results = []
    for val_check_interval in (2, 1.0):
        torch.manual_seed(0)
        ap = scripted({0: Action(precision={"*": name})}, eval_precision=eval_precision, knobs=("precision",))
        task = evaluated()
        cpu(precision=precision, callbacks=[ap], max_epochs=2, val_check_interval=val_check_interval).fit(task)
        assert (ap.applied_steps, ap.skipped_steps) == (8, 0)
        results.append(state_of(task))
    assert_same_state(*results)


def test_a17_masked_constant_only_in_validation_under_current_formats() -> None:
    """Evaluation code need not be covered by what the training step tried."""

    class MasksInValidation(Evaluated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            output = self.net(batch)
            self.log("val", output.masked_fill(output > 0, -1e9).float().mean())

    ap = scripted({0: Action(precision={"*": "fp16"})}, eval_precision="current")
    task = MasksInValidation(conv_net(), torch.rand(32, 1, 4))
    cpu(callbacks=[ap], num_sanity_val_steps=0).fit(task)
    assert ap.applied_steps == 4


def test_a17_module_is_its_plain_self_after_fit() -> None:
    ap, task = scripted({0: BF16}), evaluated()
    cpu(callbacks=[ap], max_epochs=2).fit(task)
    plain = evaluated()
    assert [type(m) for m in task.modules()] == [type(m) for m in plain.modules()]
    assert [sorted(vars(m)) for m in task.net.modules()] == [sorted(vars(m)) for m in plain.net.modules()]
    with torch.inference_mode():
        assert task.net(task.data).dtype is torch.float32


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a17_module_is_its_plain_self_after_an_exception(error: type[BaseException]) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            if args[-1] == 2:
                raise error("stop")

    ap, task = scripted({0: BF16}), evaluated()
    trainer = cpu(callbacks=[ap, Stop()])
    plugin = trainer.strategy.precision_plugin
    with pytest.raises((error, SystemExit)):
        trainer.fit(task)
    assert trainer.strategy.precision_plugin is plugin
    assert [type(m) for m in task.modules()] == [type(m) for m in evaluated().modules()]
    assert task.eval()(task.data).dtype is torch.float32


def test_a17_training_goes_on_after_a_prediction() -> None:
    """fit, predict, fit again with the same callback and the same trainer."""
    ap, task = scripted({0: BF16}), evaluated()
    trainer = cpu(callbacks=[ap], max_epochs=1)
    trainer.fit(task)
    trainer.predict(task)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(task)
    assert ap.precision_map()["net.0"] == "bf16"
    assert_finite(task)


# ---- averaged weights ----

DECAY = 0.999


class OwnAverage(Callback):
    """An exponential moving average as users write it, of whatever dtype the weights have."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        weights = [p.detach() for p in pl_module.parameters()]
        if not self.average:
            self.average = [w.clone() for w in weights]
        for average, weight in zip(self.average, weights, strict=True):
            average.lerp_(weight, 1 - DECAY)


class Exact(Lin):
    """A gradient of one in every format, so that low precision must not show in the weights at all."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps, 1, loss=mean_of, optimizer=lambda p: SGD(p, lr=2.0**-10))


def average_in_fp32(weights: list[Tensor], steps: int) -> list[Tensor]:
    """The same run without a Trainer: every weight goes down by the learning rate in every step."""
    average: list[Tensor] = []
    for step in range(steps):
        weights = [w - 2.0**-10 for w in weights]
        average = [w.clone() for w in weights] if step == 0 else average
        average = [a.lerp(w, 1 - DECAY) for a, w in zip(average, weights, strict=True)]
    return average


@pytest.mark.parametrize(("name", "steps"), [("bf16", 2000), ("fp16", 200)])
def test_a19_average_moves_as_in_fp32(name: str, steps: int) -> None:
    average, task = OwnAverage(), Exact(steps)
    before = weights_of(task)
    ap = scripted({0: Action(precision={"*": name})}, knobs=("precision", "loss_scale"), verbose=False)
    cpu(callbacks=[ap, average]).fit(task)
    assert ap.applied_steps == steps
    for ours, expected, start in zip(average.average, average_in_fp32(before, steps), before, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        assert float((start - ours).min()) > 0.01  # it did move


def test_a19_averages_of_lightning() -> None:
    results = []
    for callbacks in ([], [scripted({0: BF16}, knobs=("precision",), verbose=False)]):
        torch.manual_seed(0)
        task = Exact(200)
        cpu(callbacks=[*callbacks, EMAWeightAveraging(decay=0.9)]).fit(task)
        results.append(state_of(task))
        assert type(task.net) is nn.Linear
    for key, value in results[0].items():
        assert results[1][key].dtype is torch.float32
        torch.testing.assert_close(results[1][key], value, rtol=1e-5, atol=1e-5)


class Normed(Task):
    def __init__(self) -> None:
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        super().__init__(net, torch.rand(64, 4), optimizer=lambda p: SGD(p, lr=0.01))


def test_a19_extra_pass_of_swa_touches_neither_scaler_nor_counters() -> None:
    ap, task = scripted(), Normed()
    windows: list[tuple[int, int, float]] = []

    class Counters(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            windows.append((ap.applied_steps, ap.skipped_steps, ap.loss_scale))

    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    trainer = cpu(plugins=fp16cpu(128), callbacks=[ap, swa, Counters()], max_epochs=4)
    trainer.fit(task)
    assert windows == [(8, 0, 128.0), (16, 0, 128.0), (24, 0, 128.0), (32, 0, 128.0), (32, 0, 128.0)]
    assert (ap.applied_steps, ap.skipped_steps, user_skipped(ap)) == (32, 0, 0)
    assert_finite(task)
    assert int(state_of(task)["net.1.num_batches_tracked"]) == 8  # of the extra pass alone


@pytest.mark.parametrize("action", [None, Action(precision={"*": "fp32"})])
def test_a19_swa_ends_where_the_plain_run_ends(action: Action | None) -> None:
    results = []
    for callbacks in ([], [scripted({0: action} if action else {}, knobs=("precision",))]):
        torch.manual_seed(0)
        task = Normed()
        swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
        cpu(callbacks=[*callbacks, swa], max_epochs=4).fit(task)
        results.append(state_of(task))
    assert_same_state(*results)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_a19_swa_with_low_precision_keeps_fp32_averages(name: str) -> None:
    ap, task = scripted({0: Action(precision={"*": name})}), Normed()
    plain = state_of(task)
    swa = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    cpu(callbacks=[ap, swa], max_epochs=4).fit(task)
    found = state_of(task)
    assert {k: v.dtype for k, v in found.items()} == {k: v.dtype for k, v in plain.items()}
    assert_finite(task)
    # the averages are not on the grid of the low format
    weight = found["net.0.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())
