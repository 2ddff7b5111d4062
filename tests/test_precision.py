"""The precision plugin on its own: what it delegates, what it refuses, and how it steps.

Time budget: 30 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from autoprec import AutoPrecision, AutoPrecisionCallback, AutoPrecisionConfig, LossScaleConfig
from tests.small_fits import (
    Full,
    Plain,
    assert_identical,
    differences,
    fp16_plugin,
    loader,
    outcome,
    quiet,
    seed,
)

MAKE: dict[str, Callable[[], Precision]] = {
    "32-true": Precision,
    "bf16-mixed": lambda: MixedPrecision("bf16-mixed", "cpu"),
    "16-mixed": fp16_plugin,
    "16-mixed without a scaler": lambda: MixedPrecision(
        "16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", enabled=False)
    ),
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "16-true": lambda: HalfPrecision("16-true"),
    "64-true": DoublePrecision,
}


class Seen(Full):
    """Keeps the dtypes of the model's output by stage."""

    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        self.seen: dict[str, set[torch.dtype]] = {}

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        out = self.net(batch[0])
        stage = str(self.trainer.state.stage.value) if self.trainer.state.stage else ""
        self.seen.setdefault(stage, set()).add(out.dtype)
        return nn.functional.mse_loss(out, batch[1].to(out.dtype))


def fit(plugin: Precision, module: Plain | None = None, **options: Any) -> tuple[Trainer, Any]:
    seed()
    module = module or Seen()
    trainer = quiet(**{"max_epochs": 1, "plugins": [plugin], **options})
    trainer.fit(module, loader(), loader(16) if isinstance(module, Full) else None)
    return trainer, module


# what it stands on


@pytest.mark.parametrize("name", MAKE)
def test_masked_plugin_is_its_base(name: str) -> None:
    """Contexts, conversions of module and data, scaler and step: nothing differs from the base alone."""
    plain = fit(MAKE[name]())
    ours = fit(AutoPrecision(base=MAKE[name](), knobs=()))
    assert_identical(outcome(*plain), outcome(*ours))
    assert plain[1].seen == ours[1].seen


@pytest.mark.parametrize("name", ["bf16-true", "16-true", "64-true"])
def test_true_precision_is_observed_and_guarded_only(name: str) -> None:
    callback = AutoPrecisionCallback("fixed:bf16", interval=2, verbose=False)
    trainer, module = fit(MAKE[name](), callbacks=[callback])
    assert callback.applied_steps == 8
    rows = [d for d in callback.history if d.knob == "precision"]
    assert {d.outcome for d in rows} == {"refused"}
    assert all(str(trainer.precision) in d.reason for d in rows)
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}[name]
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert module.seen["train"] == {dtype}


@pytest.mark.parametrize("name", ["bf16-true", "64-true"])
def test_a01_guard_works_under_true_precision(name: str) -> None:
    class Bad(Seen):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            return self.loss(batch) * (math.nan if batch_idx == 2 else 1.0)

    callback = AutoPrecisionCallback(verbose=False)
    _, module = fit(MAKE[name](), Bad(), callbacks=[callback])
    assert (callback.applied_steps, callback.skipped_steps) == (7, 1)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())


def test_large_float64_gradients_are_finite() -> None:
    """They are out of float32's range, not out of their own."""

    class Large(Seen):
        def loss(self, batch: Sequence[Tensor]) -> Tensor:
            return super().loss(batch) * 1e60

    callback = AutoPrecisionCallback(verbose=False)
    fit(DoublePrecision(), Large(), callbacks=[callback])
    assert callback.applied_steps > 0


@pytest.mark.parametrize("name", list(MAKE)[:3])
@pytest.mark.parametrize("eval_precision", ["base", "current"])
def test_a17_dtype_by_stage(name: str, eval_precision: Any) -> None:
    base = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[name]
    plugin = AutoPrecision({"*": "bf16"}, base=MAKE[name](), eval_precision=eval_precision)
    trainer, module = fit(plugin)
    assert module.seen["train"] == {torch.bfloat16}
    assert module.seen["validate"] == {base if eval_precision == "base" else torch.bfloat16}
    for stage in ("validate", "test"):
        module.seen.clear()
        getattr(trainer, stage)(module, loader(16), verbose=False)
        assert set.union(*module.seen.values()) == {base if eval_precision == "base" else torch.bfloat16}
    expected = {base, torch.float32} if eval_precision == "base" else {torch.bfloat16}
    assert {out.dtype for out in trainer.predict(module, loader(16))} <= expected  # type: ignore[union-attr]


def test_formats_of_the_base_are_those_of_plain_autocast() -> None:
    """All bf16 on a 32-true base computes what ``bf16-mixed`` computes, bit for bit."""
    plain = fit(MAKE["bf16-mixed"]())
    ours = fit(AutoPrecision({"*": "bf16"}, knobs=("precision",)))
    left, right = outcome(*plain), outcome(*ours)
    assert_identical(left, right)
    fp32 = fit(Precision())
    assert differences(left.weights, outcome(*fp32).weights), "precision makes no difference here: no test"


def test_map_back_to_the_base_computes_what_the_base_computes() -> None:
    plain = fit(Precision())
    ours = fit(AutoPrecision({"*": "fp32"}, base=MAKE["bf16-mixed"](), knobs=("precision",)))
    assert_identical(outcome(*plain), outcome(*ours))


# refusals


def fake(name: str, base: type = Precision) -> Precision:
    return type(name, (base,), {})()  # type: ignore[no-any-return]


REFUSED = {
    "TransformerEnginePrecision": "TransformerEngine",
    "BitsandbytesPrecision": "bitsandbytes",
    "DeepSpeedPrecision": "DeepSpeed",
    "XLAPrecision": "XLA",
    "FSDPPrecision": "FSDP",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("is_subclass", [False, True])
def test_plugins_with_a_precision_of_their_own_are_refused(name: str, is_subclass: bool) -> None:
    plugin = fake(name)
    if is_subclass:
        plugin = fake("Mine", type(plugin))
    with pytest.raises(MisconfigurationException, match=f"`{name}` and autoprec.*{REFUSED[name]}.*Choose one"):
        AutoPrecision(base=plugin)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_the_callback_refuses_them_in_the_trainer(name: str, stage: str) -> None:
    plugin = fake(name)
    trainer = quiet(plugins=[plugin], max_epochs=1, callbacks=[AutoPrecisionCallback()])
    with pytest.raises(MisconfigurationException, match=REFUSED[name]):
        getattr(trainer, stage)(Full(), loader(), *([loader()] if stage == "fit" else []))
    assert trainer.precision_plugin is plugin


def test_lightnings_own_fsdp_plugin_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="FSDP"):
        AutoPrecision(base=FSDPPrecision("bf16-mixed"))


def test_a_base_that_is_not_a_plugin_is_refused() -> None:
    with pytest.raises(TypeError, match="base="):
        AutoPrecision(base="bf16-mixed")  # type: ignore[arg-type]


def test_precision_given_twice_names_both() -> None:
    with pytest.raises(ValueError, match=r"precision=bf16-mixed.*AutoPrecision"):
        quiet(precision="bf16-mixed", plugins=[AutoPrecision()])


def test_a16_lbfgs_and_fp16_name_both() -> None:
    module = Plain(lambda parameters: torch.optim.LBFGS(parameters, max_iter=2))
    for plugin in (AutoPrecision({"*": "fp16"}), AutoPrecision(base=fp16_plugin())):
        with pytest.raises(MisconfigurationException, match=r"fp16 and the LBFGS.*Choose bf16 or fp32"):
            fit(plugin, module)


@pytest.mark.parametrize("formats", [{"*": "bf16"}, {}])
def test_a16_lbfgs_counts_steps_not_closure_calls(formats: dict[str, str]) -> None:
    calls: list[int] = []

    class Counts(Plain):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    module = Counts(lambda parameters: torch.optim.LBFGS(parameters, max_iter=3))
    callback = AutoPrecisionCallback(verbose=False)
    fit(AutoPrecision(formats), module, callbacks=[callback])
    assert callback.applied_steps == 8
    assert len(calls) > 8


# a step


def test_initial_formats_are_on_record() -> None:
    callback = AutoPrecisionCallback(interval=100, verbose=False)
    with pytest.warns(UserWarning, match="no unit is called 'nothing'"):
        fit(AutoPrecision({"net.0": "int8", "net.?": "bf16", "nothing": "fp16"}), callbacks=[callback])
    rows = {d.unit or d.reason: (d.applied, d.outcome) for d in callback.history if d.knob == "precision"}
    assert rows["net.0"] == ("int8", "applied")
    assert rows["net.2"] == ("bf16", "applied")
    assert any("'nothing'" in key and outcome == "refused" for key, (_, outcome) in rows.items())


def test_callback_beside_the_plugin_uses_it() -> None:
    plugin = AutoPrecision({"*": "bf16"})
    callback = AutoPrecisionCallback(verbose=False)
    trainer, _ = fit(plugin, callbacks=[callback])
    assert callback.plugin is plugin
    assert trainer.precision_plugin is plugin
    assert set(callback.precision_map().values()) == {"bf16"}


def test_gradients_in_hooks_are_float32_and_unscaled_before_the_step() -> None:
    norms: dict[float, list[float]] = {}

    def run(scale: float) -> None:
        class Looks(Plain):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                grads = [parameter.grad for parameter in self.parameters()]
                assert {grad.dtype for grad in grads if grad is not None} == {torch.float32}
                norms.setdefault(scale, []).append(float(torch.linalg.vector_norm(grads[0])))

        config = AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=scale))
        seed()
        fit(AutoPrecision({"net.0": "fp16"}, config=config, knobs=("precision", "loss_scale")), Looks())

    run(1.0)
    run(2.0**12)
    assert norms[1.0] == pytest.approx(norms[2.0**12], rel=1e-2)


@pytest.mark.parametrize("formats", [{}, {"*": "fp16"}])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_losses_are_those_of_the_batches(accumulate: int, formats: dict[str, str]) -> None:
    """Neither accumulation nor the loss scale shows in what policies are told."""
    config = AutoPrecisionConfig(loss_scale=LossScaleConfig(init_scale=128.0))
    plugin = AutoPrecision(formats, config=config)
    _, module = fit(plugin, Plain(), accumulate_grad_batches=accumulate)
    assert plugin.steering is not None
    telemetry = plugin.steering.telemetry
    telemetry.flush()
    assert list(telemetry.losses) == pytest.approx(module.losses, rel=1e-6)
    assert len(module.losses) == 8


@pytest.mark.parametrize("kind", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", list(MAKE)[:3])
def test_no_nonfinite_gradient_reaches_a_weight(name: str, kind: float) -> None:
    class Bad(Plain):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.trainer.global_step == 4:
                next(self.net.parameters()).grad[0, 0] = kind  # type: ignore[index]

    callback = AutoPrecisionCallback(knobs=(), verbose=False)
    _, module = fit(MAKE[name](), Bad(), callbacks=[callback])
    assert callback.skipped_steps == 1
    assert all(bool(torch.isfinite(parameter).all()) for parameter in module.parameters())


class NoClosure(torch.optim.SGD):
    """Ignores that it is given a closure until the end, as some wrappers do: refused by Lightning or by us, loudly."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(None)


def test_optimizer_that_never_calls_its_closure_fails_as_without_autoprec() -> None:
    module = Plain(lambda parameters: NoClosure(parameters, lr=0.1))
    with pytest.raises(MisconfigurationException, match="closure"):
        fit(Precision(), module)
    with pytest.raises(MisconfigurationException, match="closure"):
        fit(AutoPrecision(), module)


class UpdatesTwice(torch.optim.Optimizer):
    """Looks at the gradient at two places, as sharpness-aware optimizers do; the second may be non-finite."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for _ in range(2):
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                    parameter -= group["lr"] * parameter.grad
        return loss


def test_step_that_fails_half_way_is_undone() -> None:
    class Bad(Plain):
        calls = 0

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            self.calls += 1
            return self.loss(batch) * (math.inf if self.calls == 6 else 1.0)  # second look of the third step

        def on_train_batch_end(self, *args: Any) -> None:
            weights.append(next(self.net.parameters()).detach().clone())
            counts.append({state["count"] for state in self.trainer.optimizers[0].state.values()})

    weights: list[Tensor] = []
    counts: list[set[int]] = []
    callback = AutoPrecisionCallback(knobs=(), verbose=False)
    fit(Precision(), Bad(UpdatesTwice), callbacks=[callback])
    assert (callback.applied_steps, callback.skipped_steps) == (7, 1)
    assert torch.equal(weights[2], weights[1])
    assert counts[:4] == [{2}, {4}, {4}, {6}]


# clipping


@pytest.mark.parametrize("value", [None, 0, 0.0, -1.0])
def test_c03_clip_value_that_means_off(value: Any) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 100.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    AutoPrecision().clip_gradients(optimizer, value)
    assert torch.equal(parameter.grad, torch.full((3,), 100.0))


@pytest.mark.parametrize("algorithm", list(GradClipAlgorithmType))
def test_clip_outside_a_fit_is_that_of_the_base(algorithm: Any) -> None:
    found = []
    for plugin in (Precision(), AutoPrecision()):
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = torch.tensor([3.0, -4.0, 12.0])
        plugin.clip_gradients(torch.optim.SGD([parameter], lr=1.0), 1.5, algorithm)
        found.append(parameter.grad.clone())
    assert torch.equal(*found)


def test_c02_manual_clipping_sees_unscaled_gradients() -> None:
    class Manual(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")  # type: ignore[arg-type]
            grads = [parameter.grad for parameter in self.parameters()]
            norms.append(float(torch.stack([grad.norm() for grad in grads if grad is not None]).norm()))
            optimizer.step()  # type: ignore[union-attr]

    norms: list[float] = []
    fit(fp16_plugin(1024.0), Manual(), callbacks=[AutoPrecisionCallback(verbose=False)])
    assert norms == pytest.approx([0.1] * 8, rel=1e-4)


def test_what_the_module_writes_around_its_clippings_counts() -> None:
    """A norm from before the write would be reported, and a clamp would make an inf finite."""

    class Writes(Plain):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            for grad in grads:
                grad.mul_(1e3)
            norms.append(float(torch.stack([grad.norm() for grad in grads]).norm()))
            self.clip_gradients(optimizer, 1.0, "norm")
            if self.trainer.global_step == 3:
                grads[0][0, 0] = math.inf
            self.clip_gradients(optimizer, 0.5, "value")

    norms: list[float] = []
    callback = AutoPrecisionCallback(verbose=False)
    fit(Precision(), Writes(), callbacks=[callback])
    assert (callback.applied_steps, callback.skipped_steps) == (7, 1)
    assert callback.steering is not None
    assert list(callback.steering.telemetry.norms) == pytest.approx(norms[:3] + norms[4:])
    assert list(callback.steering.telemetry.clipped) == [1] * 7


# state


def test_state_is_complete_before_a_fit_and_after_it() -> None:
    plugin = AutoPrecision({"*": "bf16"})
    assert plugin.state_dict()
    plugin.load_state_dict(plugin.state_dict())
    fit(plugin)
    state = plugin.state_dict()
    assert state["applied_steps"] == 8
    assert state["knobs"]["formats"] == {"net.0": "bf16", "net.2": "bf16"}


@pytest.mark.parametrize("knobs", [(), ("precision", "loss_scale", "clip")])
def test_scaler_of_the_trainer_is_there_and_current(knobs: tuple[str, ...]) -> None:
    """``trainer.scaler`` is public; modules log its scale."""

    class Logs(Plain):
        def on_train_batch_end(self, *args: Any) -> None:
            scaler: Any = self.trainer.scaler
            scales.append(scaler.get_scale())

    scales: list[float] = []
    fit(fp16_plugin(1024.0, growth_interval=3), Logs())
    plain, scales = scales, []
    fit(fp16_plugin(1024.0, growth_interval=3), Logs(), callbacks=[AutoPrecisionCallback(knobs=knobs, verbose=False)])
    assert scales == plain
    assert len(set(plain)) == 3


def test_module_summary_knows_the_precision(recwarn: pytest.WarningsRecorder) -> None:
    """P16: Lightning's summary warns about names it does not know; ours is the base's."""
    for plugin in (AutoPrecision(), AutoPrecision(base=MixedPrecision("bf16-mixed", "cpu"))):
        assert plugin.precision == plugin.base.precision


def test_custom_plugin_of_the_user_keeps_its_contexts() -> None:
    entered: list[str] = []

    class Own(Precision):
        def train_step_context(self) -> Any:
            entered.append("train")
            return super().train_step_context()

        def convert_input(self, data: Any) -> Any:
            entered.append("input")
            return data

        def convert_module(self, module: nn.Module) -> nn.Module:
            entered.append("module")
            return module

        def teardown(self) -> None:
            entered.append("teardown")

    trainer, _ = fit(Own(), Plain(), callbacks=[AutoPrecisionCallback(verbose=False)], max_steps=2)
    assert entered.count("train") == 2
    assert {"input", "module", "teardown"} <= set(entered)
    assert type(trainer.precision_plugin) is Own


def test_custom_plugin_with_a_step_of_its_own_is_not_dropped_silently() -> None:
    """autoprec takes the step itself, so what such a plugin does there would be lost."""

    class Steps(Precision):
        def optimizer_step(self, optimizer: Any, model: pl.LightningModule, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().optimizer_step(optimizer, model, closure, **kwargs)

    with pytest.raises(MisconfigurationException, match="Steps.*optimizer_step"):
        fit(Steps(), Plain(), callbacks=[AutoPrecisionCallback(verbose=False)])
