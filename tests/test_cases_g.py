"""Divergence stories: fp32 that is fp32, drifts, late overflow, attention scores, anomaly detection.

Time budget: 40 s.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, NonFiniteTrainingError, ScriptedController
from autoprec.config import GuardConfig, LossScaleConfig, RollbackConfig
from autoprec.encoding import Observation, feature
from autoprec.locate import is_finite
from autoprec.rule import RuleController
from autoprec.summary import mean_bits, summarize
from tests.support import Task, Watch, assert_finite, cpu, fp16cpu, reported, rows, scripted, squares, watch_dtypes

FP16_ONLY = AutoPrecisionConfig(formats=("fp32", "fp16"), loss_scale=LossScaleConfig(init_scale=16.0))


def task(net: nn.Module, count: int, width: int = 8, **kwargs: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    return Task(net, torch.randn(count, width, generator=generator), 1, **kwargs)


def still(parameters: Any) -> torch.optim.Optimizer:
    """Steps that are counted and move nothing."""
    return torch.optim.SGD(parameters, lr=1e-12)


class Looks(RuleController):
    """The rule, and what it was shown."""

    def __init__(self, config: AutoPrecisionConfig | None = None) -> None:
        super().__init__(config)
        self.seen: list[Observation] = []

    def decide(self, observation: Observation) -> Any:
        self.seen.append(observation)
        return super().decide(observation)


# ---- g01: fp32 that is not fp32 ----


class RawB(nn.Module):
    """Layer B with raw matmuls in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.inner: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.weight
        self.inner.append(scores.dtype)
        y: Tensor = torch.matmul(torch.softmax(scores, -1), self.weight)
        return y


class Pair(nn.Module):
    def __init__(self, b: nn.Module) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = b
        self.kept: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        output: Tensor = self.b(hidden)
        self.kept.append((hidden.detach(), output.detach()))
        return output


@pytest.mark.parametrize("b", [lambda: nn.Linear(8, 8), RawB, lambda: nn.Sequential(nn.Linear(8, 8))])
@pytest.mark.parametrize("a_format", ["bf16", "fp16", "int8"])
@pytest.mark.parametrize("trainer", [{"precision": "bf16-mixed"}, {}, {"plugins": "fp16"}], ids=["bf16", "32", "fp16"])
def test_g01_a_layer_in_fp32_computes_in_fp32(b: Callable[[], nn.Module], a_format: str, trainer: Any) -> None:
    options = {"plugins": fp16cpu(1.0)} if trainer == {"plugins": "fp16"} else trainer
    name = {"net.b": "fp32"} if not isinstance(b(), nn.Sequential) else {"net.b.0": "fp32"}
    pair = Pair(b())
    ap = scripted({0: Action(precision={"net.a": a_format, **name})})
    cpu(callbacks=[ap], **options).fit(task(pair, 3, optimizer=still))
    assert ap.applied_steps == 3
    for hidden, output in pair.kept:
        assert hidden.dtype in (torch.bfloat16, torch.float16)
        assert output.dtype == torch.float32
        with torch.no_grad():
            assert torch.allclose(output, pair.b(hidden.float()), rtol=1e-6, atol=1e-6)
    if isinstance(pair.b, RawB):
        assert set(pair.b.inner) == {torch.float32}


def test_g01_casting_the_input_alone_does_not_do_it() -> None:
    """What the story's author tried; it shows that the test above can fail."""
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16


def test_g01_a_layer_that_is_left_alone_is_not_reported_as_fp32() -> None:
    layer = nn.Linear(8, 8)
    layer.forward = lambda input: nn.functional.linear(input, layer.weight, layer.bias)  # type: ignore[method-assign]
    pair = Pair(layer)
    ap = scripted({0: Action(precision={"*": "bf16"})})
    cpu(callbacks=[ap]).fit(task(pair, 3, optimizer=still))
    assert pair.kept[-1][1].dtype == torch.bfloat16
    assert ap.steering is not None
    text = summarize(ap.steering, "scripted")
    assert "bf16       1 unit, 50.0% of parameters" in text
    assert "fp32  " not in text
    assert "left alone net.b: its `forward` is replaced on the instance" in text
    assert mean_bits(ap.steering.knobs) == 16.0


# ---- g02: a drift that ends in a spike ----


class Growing(nn.Module):
    """Outputs of the first layer grow by 2 % a step; at step ``spike`` they leave fp16's range."""

    def __init__(self, spike: int = 200, growth: float = 1.02) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 8)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(8))
        self.spike, self.growth, self.step = spike, growth, 0

    def forward(self, x: Tensor) -> Tensor:
        gain = 65504.0 * self.growth ** (self.step - self.spike)
        self.step += 1
        hidden = self.first(x.sign() * gain)
        y: Tensor = self.last(hidden / gain).float() * (gain / 65504.0)
        return y


def test_g02_a_drift_is_observed_and_answered_before_the_spike() -> None:
    net, looks = Growing(), Looks(FP16_ONLY)
    ap = AutoPrecisionCallback(policy=looks, interval=10, config=FP16_ONLY)
    module = task(net, 240, optimizer=still)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(module)
    raised = [row for row in rows(ap.history, "precision", "applied") if row.unit == "net.first"]
    assert [(row.before, row.applied) for row in raised] == [("fp16", "fp32")]
    assert 40 < raised[0].step < 200
    assert "rule" in raised[0].reason
    assert (ap.applied_steps, ap.skipped_steps) == (240, 0)
    assert ap.precision_map()["net.last"] == "fp16"
    assert ap.loss_scale >= 16.0  # the scale was not the answer
    before = looks.seen[raised[0].step // 10 - 2]
    assert feature(before, "act_drift")[0] > 0
    assert feature(before, "norm_trend")[0] > 0
    assert feature(before, "act_headroom")[0] < feature(looks.seen[2], "act_headroom")[0]


def test_g02_the_trend_of_the_loss_scale_is_observed() -> None:
    looks = Looks(FP16_ONLY)
    config = AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=16.0))
    ap = AutoPrecisionCallback(policy=looks, interval=10, config=config)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0, growth_interval=5)).fit(task(nn.Linear(8, 8), 40, optimizer=still))
    assert ap.loss_scale > 16.0
    assert feature(looks.seen[-1], "loss_scale_trend")[0] > 0


@pytest.mark.parametrize("growth", [1.02, 1.5])
def test_g02_an_overflow_in_the_forward_raises_its_layer_and_spares_the_scale(growth: float) -> None:
    """Without a policy, the guard alone."""
    net, ap = Growing(spike=20, growth=growth), scripted(config=FP16_ONLY)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(task(net, 30, optimizer=still))
    assert ap.skipped_steps == 1
    assert ap.applied_steps == 29
    assert ap.precision_map()["net.first"] == "fp32"
    assert ap.precision_map()["net.last"] == "fp16"
    assert ap.loss_scale == 16.0
    (row,) = rows(ap.history, "precision")
    assert (row.unit, row.outcome, row.before, row.applied) == ("net.first", "applied", "fp16", "fp32")
    assert "guard" in row.reason
    assert "range" in row.reason


def test_g02_an_overflow_after_the_last_layer_raises_it() -> None:
    def growing(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        factor = 1e6 if index >= 10 else 1.0
        output = net(batch) * factor  # in the format of the last layer
        value: Tensor = (output.float() / factor).pow(2).mean()
        return value

    net, ap = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), scripted(config=FP16_ONLY)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(task(net, 40, loss=growing, optimizer=still))
    assert ap.skipped_steps <= 5
    assert ap.precision_map() == {"net.0": "fp16", "net.1": "fp32"}
    assert ap.loss_scale == 16.0


def test_g02_the_record_says_which_action_was_followed_by_recovery() -> None:
    net, ap = Growing(spike=20), scripted({10: Action(clip=1e9)}, config=FP16_ONLY)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(task(net, 30, optimizer=still))
    assert ap.skipped_steps == 1
    marked = [row for row in ap.history if row.recovered_at is not None]
    assert [(row.knob, row.unit, row.recovered_at) for row in marked] == [("precision", "net.first", marked[0].step)]


def test_g02_a_falling_scale_is_on_record_and_so_is_the_step_that_worked() -> None:
    ap = scripted(config=AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=2.0**20)))
    cpu(callbacks=[ap], plugins=fp16cpu(2.0**20)).fit(task(nn.Linear(8, 8), 30, optimizer=still))
    assert ap.skipped_steps > 1
    moves = [row for row in rows(ap.history, "loss_scale") if row.reason == "guard: a gradient was not finite"]
    assert [row.applied for row in moves] == [2.0**20 / 2**n for n in range(1, ap.skipped_steps + 1)]
    assert [row.recovered_at for row in moves] == [None] * (len(moves) - 1) + [moves[-1].step]


def test_g02_a_spike_of_the_gradient_is_clipped_and_training_goes_on() -> None:
    def spiking(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return squares(net, batch, index) * (1e6 if index == 30 else 1.0)

    module, ap, watch = task(nn.Linear(8, 8), 60, loss=spiking), AutoPrecisionCallback(), Watch()
    cpu(callbacks=[ap, watch]).fit(module)
    moved = [
        float(torch.cat([(a - b).view(-1) for a, b in zip(after, before, strict=True)]).norm())
        for before, after in zip(watch.weights, watch.weights[1:], strict=False)
    ]
    assert ap.applied_steps == 60
    assert moved[29] < 3 * float(np.median(moved[16:29]))


def test_g02_a_scale_at_its_floor_is_not_the_last_answer() -> None:
    """Gradients that overflow at any scale: after a while everything is raised, and training goes on."""

    class Loud(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.dtype = x.dtype
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * (math.inf if ctx.dtype is torch.float16 else 1.0)

    def loud(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        return Loud.apply(net(batch)).float().pow(2).mean()  # type: ignore[no-untyped-call, no-any-return]

    config = AutoPrecisionConfig(
        guard=GuardConfig(max_consecutive_skips=5), loss_scale=LossScaleConfig(init_scale=4.0, floor=1.0)
    )
    ap = scripted(config=config)
    with pytest.warns(UserWarning, match="everything runs in fp32"):
        cpu(callbacks=[ap], plugins=fp16cpu(4.0)).fit(task(nn.Linear(8, 8), 20, loss=loud))
    assert (ap.skipped_steps, ap.applied_steps) == (5, 15)
    assert set(ap.precision_map().values()) == {"fp32"}


def explode(module: LightningModule) -> None:
    """Weights that no precision can compute with, all finite."""
    for parameter in module.parameters():
        parameter.mul_(1e30)


@pytest.mark.parametrize("explosions", [[120], [120, 200, 270]])
def test_g02_explosions_that_no_scale_cures_are_answered_by_going_back(explosions: list[int]) -> None:
    class Explodes(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if args[-1] in explosions:
                with torch.no_grad():
                    explode(pl_module)

    config = AutoPrecisionConfig(
        loss_scale=LossScaleConfig(init_scale=1024.0),
        guard=GuardConfig(max_consecutive_skips=5, hold=20),
        rollback=RollbackConfig(every=25, quarantine=20),
    )
    module, ap = task(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 320), scripted(config=config)
    with pytest.warns(UserWarning, match="."):
        cpu(callbacks=[ap, Explodes()], plugins=fp16cpu(1024.0)).fit(module)
    went_back = rows(ap.history, "rollback", "applied")
    assert len(went_back) == len(explosions)
    for row, window in zip(went_back, explosions, strict=True):
        assert window < row.step <= window + 12
        assert row.recovered_at == row.step
    assert ap.skipped_steps <= 11 * len(explosions)  # lowering the scale was not the only answer
    assert ap.applied_steps + ap.skipped_steps + ap.undone_windows == 320
    assert_finite(module)


# ---- g04: wider is not always safer ----


class UnstableWide(nn.Module):
    """A layer whose gradient is not finite whenever it runs in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.float() * (math.inf if y.dtype is torch.float32 else 1.0)


def test_g04_a_run_that_is_stable_in_bf16_stays_there() -> None:
    module, ap = task(UnstableWide(), 100, optimizer=still), AutoPrecisionCallback(interval=10)
    cpu(callbacks=[ap], precision="bf16-mixed").fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (100, 0)
    assert ap.precision_map() == {"net.layer": "bf16"}


def test_g04_an_unstable_run_in_fp32_is_not_blamed_on_precision() -> None:
    module, ap = task(UnstableWide(), 100, optimizer=still), AutoPrecisionCallback(interval=10)
    with pytest.raises(NonFiniteTrainingError, match="Precision is not the cause"):
        cpu(callbacks=[ap]).fit(module)
    assert not rows(ap.history, "precision", "applied")


@pytest.mark.parametrize("to", ["bf16", "int8"])
def test_g04_leaving_an_unstable_fp32_is_allowed(to: str) -> None:
    """Skips in fp32 do not hold a unit there."""
    module, ap = task(UnstableWide(), 40, optimizer=still), scripted({10: Action(precision={"*": to})})
    cpu(callbacks=[ap]).fit(module)
    assert (ap.skipped_steps, ap.applied_steps) == (10, 30)
    assert ap.precision_map() == {"net.layer": to}
    assert_finite(module)


# ---- g05: overflow only late ----


class Drifts(Callback):
    """The weight of a layer grows in the steps named."""

    def __init__(self, name: str, steps: range, factor: float) -> None:
        self.name, self.steps, self.factor = name, steps, factor

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.steps:
            with torch.no_grad():
                pl_module.get_parameter(self.name).mul_(self.factor)


@pytest.mark.parametrize("policy", [lambda: "rule", ScriptedController], ids=["rule", "guard alone"])
@pytest.mark.parametrize(("steps", "factor"), [(range(250, 300), 1.3), (range(250, 251), 3e5)], ids=["drift", "jump"])
def test_g05_late_overflow_raises_the_layer_within_five_steps(
    policy: Callable[[], Any], steps: range, factor: float
) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ap, watch = AutoPrecisionCallback(policy=policy(), interval=10, config=FP16_ONLY), Watch()
    watch.ap = ap
    callbacks = [Drifts("net.0.weight", steps, factor), ap, watch]
    cpu(callbacks=callbacks, plugins=fp16cpu(16.0)).fit(task(net, 320, optimizer=still))
    formats = [kept["net.0"] for kept in watch.maps]
    assert formats[249] == "fp16"
    assert formats[-1] == "fp32"
    assert ap.applied_steps + ap.skipped_steps == 320
    assert ap.skipped_steps <= 5
    assert ap.precision_map()["net.2"] == "fp16"
    assert_finite(net)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("plugin", [lambda: fp16cpu(16.0), lambda: None], ids=["fp16", "fp32"])
def test_g05_a_weight_that_is_not_finite_late_is_taken_back(bad: float, plugin: Callable[[], Any]) -> None:
    class Breaks(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if args[-1] == 250:
                with torch.no_grad():
                    pl_module.get_parameter("net.0.weight")[0, 0] = bad

    config = AutoPrecisionConfig(rollback=RollbackConfig(every=10))
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ap = AutoPrecisionCallback(interval=10, config=config)
    with pytest.warns(UserWarning, match="goes back to its copy of window 250"):
        cpu(callbacks=[ap, Breaks()], plugins=plugin()).fit(task(net, 320))
    (row,) = rows(ap.history, "rollback")
    assert 250 < row.step <= 261  # tanh hides inf from the loss until the next copy is due
    assert_finite(net)


def test_g05_headroom_is_observed_at_every_decision() -> None:
    looks = Looks(FP16_ONLY)
    ap = AutoPrecisionCallback(policy=looks, interval=10, config=FP16_ONLY)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(task(nn.Sequential(nn.Linear(8, 8)), 60, optimizer=still))
    assert len(looks.seen) >= 5
    for observation in looks.seen:
        assert feature(observation, "act_known")[0] == 1.0
        assert 0.3 < feature(observation, "act_headroom")[0] < 1.5  # 5 to 24 bits below 65504


def test_g05_the_share_of_weights_below_fp16s_resolution_is_observed() -> None:
    net, looks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), Looks(FP16_ONLY)
    with torch.no_grad():
        net.get_parameter("0.weight")[:4].fill_(1e-6)
    ap = AutoPrecisionCallback(policy=looks, interval=10, config=FP16_ONLY)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(task(net, 30, optimizer=still))
    shares = feature(looks.seen[-1], "weight_subnormal")
    assert shares[:2].tolist() == pytest.approx([32 / 72, 0.0], abs=0.02)


# ---- g06: attention scores ----


class Scores(nn.Module):
    """Single-head attention that multiplies queries and keys first and divides later."""

    def __init__(self, is_value_first: bool, size: float = 40.0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 64)
        self.is_value_first = is_value_first
        with torch.no_grad():
            for layer in (self.q, self.k):
                layer.weight.zero_()
                layer.bias.fill_(size)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        if self.is_value_first:
            v = self.v(x)
            scores = q @ k.transpose(-1, -2)
        else:
            scores = q @ k.transpose(-1, -2)
            v = self.v(x)
        y: Tensor = self.out(torch.softmax(scores / 8.0, dim=-1) @ v)
        return y


class Model(nn.Module):
    def __init__(self, is_value_first: bool) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.attention = Scores(is_value_first)
        self.after = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.attention(self.before(x)))
        return y


def overflowing_attention(is_value_first: bool, steps: int = 60) -> tuple[AutoPrecisionCallback, Task]:
    module = Task(Model(is_value_first), torch.randn(steps * 4, 64), 4, optimizer=still)
    ap = scripted(config=FP16_ONLY)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(module)
    return ap, module


@pytest.mark.parametrize("is_value_first", [True, False])
def test_g06_the_overflow_is_located_at_the_attention_and_raised_there(is_value_first: bool) -> None:
    ap, module = overflowing_attention(is_value_first)
    assert ap.skipped_steps <= 5
    assert ap.applied_steps == 60 - ap.skipped_steps
    raised = {name for name, format_name in ap.precision_map().items() if format_name == "fp32"}
    assert raised
    assert all(name.startswith("net.attention.") for name in raised)
    assert "between" in " ".join(row.reason for row in rows(ap.history, "precision", "applied"))
    assert ap.loss_scale == 16.0
    assert_finite(module)


def test_g06_advice_is_given_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        overflowing_attention(True)
    advice = [record.getMessage() for record in caplog.records if "before" in record.getMessage()]
    assert len([text for text in advice if "net.attention" in text]) == 1


def test_g06_scores_that_were_scaled_before_do_not_overflow() -> None:
    class Prescaled(Scores):
        def forward(self, x: Tensor) -> Tensor:
            scores = (self.q(x) / 8.0) @ self.k(x).transpose(-1, -2)
            y: Tensor = self.out(torch.softmax(scores, dim=-1) @ self.v(x))
            return y

    module, ap = Task(Prescaled(True), torch.randn(40, 64), 4, optimizer=still), scripted(config=FP16_ONLY)
    seen = watch_dtypes(module)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (10, 0)
    assert set(seen["net.q"]) == {torch.float16}
    assert set(ap.precision_map().values()) == {"fp16"}


@pytest.mark.parametrize("need_weights", [True, False])
def test_g06_torchs_own_attention_scales_before(need_weights: bool) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 1, batch_first=True)
            with torch.no_grad():
                self.attention.in_proj_weight.zero_()
                self.attention.in_proj_bias[:128] = 40.0

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.attention(x, x, x, need_weights=need_weights)[0]
            return y

    module, ap = Task(Own(), torch.randn(10, 4, 64), 1, optimizer=still), scripted(config=FP16_ONLY)
    cpu(callbacks=[ap], plugins=fp16cpu(16.0)).fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (10, 0)


# ---- g08: anomaly detection ----


def overflowing(bad: float) -> Callable[[nn.Module, Tensor, int], Tensor]:
    """One batch whose backward meets ``bad``: inf passes anomaly detection, NaN raises there."""

    class Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return torch.full_like(grads[0], bad)

    def loss(net: nn.Module, batch: Tensor, index: int) -> Tensor:
        output = net(batch)
        if index == 3:
            output = Meets.apply(output)  # type: ignore[no-untyped-call]
        value: Tensor = output.float().pow(2).mean()
        return value

    return loss


@pytest.mark.parametrize("plugin", [lambda: fp16cpu(65536), lambda: None], ids=["fp16", "fp32"])
def test_g08_an_inf_is_skipped_with_anomaly_detection_on(plugin: Callable[[], Any]) -> None:
    module, ap = task(nn.Linear(8, 8), 8, loss=overflowing(math.inf)), AutoPrecisionCallback()
    cpu(detect_anomaly=True, plugins=plugin(), callbacks=[ap]).fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (7, 1)


@pytest.mark.filterwarnings("ignore:Error detected in MeetsBackward:UserWarning")
def test_g08_a_nan_raises_and_the_text_names_the_interaction() -> None:
    module, ap = task(nn.Linear(8, 8), 8, loss=overflowing(math.nan)), AutoPrecisionCallback()
    with pytest.raises(RuntimeError, match="nan values") as caught:
        cpu(detect_anomaly=True, plugins=fp16cpu(65536), callbacks=[ap]).fit(module)
    assert "detect_anomaly" in str(caught.value)
    assert "skip" in str(caught.value)
    assert ap.applied_steps == 3
    assert not torch.is_anomaly_enabled()


def test_g08_without_it_the_same_nan_is_skipped_and_it_is_never_switched_on() -> None:
    states: list[bool] = []

    class Asks(Callback):
        def on_before_optimizer_step(self, *args: Any) -> None:
            states.append(torch.is_anomaly_enabled())

    module, ap = task(nn.Linear(8, 8), 8, loss=overflowing(math.nan)), AutoPrecisionCallback()
    cpu(plugins=fp16cpu(65536), callbacks=[ap, Asks()]).fit(module)
    assert (ap.applied_steps, ap.skipped_steps) == (7, 1)
    assert not any(states)


# ---- data that are not finite: no layer is to blame ----


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("as_pair", [False, True])
def test_g03_a_bad_batch_costs_a_step_and_no_format(
    value: float, as_pair: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = reported(caplog, monkeypatch)

    def loss(net: nn.Module, batch: Any, index: int) -> Tensor:
        x, y = batch if as_pair else (batch, torch.zeros(8, 1))
        value: Tensor = (net(x).float() - y).pow(2).mean()
        return value

    inputs, targets = torch.rand(64, 8), torch.zeros(64, 1)
    (targets if as_pair else inputs)[17] = value  # the third batch
    data = torch.utils.data.TensorDataset(inputs, targets) if as_pair else inputs
    module = Task(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), data, loss=loss, optimizer=still)
    ap = AutoPrecisionCallback("fixed:fp16", config=AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=16.0)))
    cpu(callbacks=[ap]).fit(module)
    assert text().count("the batch of window 2 holds inf or NaN") == 1
    assert (ap.applied_steps, ap.skipped_steps) == (7, 1)
    assert set(ap.precision_map().values()) == {"fp16"}


UNREADABLE: dict[str, Callable[[Tensor], Any]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "fp8": lambda x: x.to(torch.float8_e4m3fn),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", UNREADABLE)
def test_g03_a_skip_reads_batches_of_any_layout(name: str) -> None:
    batch = [torch.ones(2), {"x": UNREADABLE[name](torch.ones(2, 2))}]
    assert is_finite(batch)
    if name in ("coo", "csr", "fp8"):
        assert not is_finite(UNREADABLE[name](torch.full((2, 2), math.nan)))
