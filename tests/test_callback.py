"""The callback as users meet it: arguments, the test seam, boundaries, records, metrics, the table, refusals.

Time budget: 40 s.
"""

from __future__ import annotations

import contextlib
import csv
import inspect
import json
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from autoprec import (
    Action,
    AutoPrecision,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    ClipConfig,
    Controller,
    FixedController,
    GuardConfig,
    History,
    LossScaleConfig,
    MapController,
    RuleController,
    ScriptedController,
)
from tests.small_fits import Plain, assert_identical, callback_of, fp16_plugin, loader, outcome, quiet, seed


def fit(callback: AutoPrecisionCallback, module: Plain | None = None, **options: Any) -> Trainer:
    others = options.pop("callbacks", [])
    trainer = quiet(**{"max_epochs": 1, "callbacks": [callback, *others], **options})
    trainer.fit(module or Plain(), loader())
    return trainer


def scripted(steps: dict[int, Action], **arguments: Any) -> AutoPrecisionCallback:
    return AutoPrecisionCallback(ScriptedController(steps), verbose=False, **arguments)


# arguments


def test_at_most_nine_typed_arguments() -> None:
    parameters = list(inspect.signature(AutoPrecisionCallback).parameters.values())
    assert len(parameters) <= 9
    for parameter in parameters:
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert parameter.annotation is not parameter.empty
        assert parameter.default is not parameter.empty


@pytest.mark.parametrize(
    ("policy", "kind"),
    [("rule", RuleController), ("fixed:bf16", FixedController), (FixedController("int8"), FixedController)],
)
def test_policy_by_name_or_object(policy: Any, kind: type) -> None:
    assert type(AutoPrecisionCallback(policy).controller) is kind


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "rules"}, ValueError, "Did you mean 'rule'?"),
        ({"policy": "fixed:bf61"}, ValueError, "Did you mean 'fixed:bf16'?"),
        ({"policy": "fixed:bfloat16"}, ValueError, "'fixed:bf16'"),
        ({"policy": "no/such/map.yaml"}, FileNotFoundError, "no/such/map.yaml"),
        ({"policy": 3}, TypeError, "policy=3"),
        ({"knobs": ("precison",)}, ValueError, "Did you mean 'precision'?"),
        ({"knobs": ("lr",)}, ValueError, "'batch_size'"),
        ({"knobs": "precision"}, ValueError, "knobs='precision'"),
        ({"knobs": 3}, (TypeError, ValueError), "knobs=3"),
        ({"interval": 0}, ValueError, "interval=0"),
        ({"interval": 2.5}, (TypeError, ValueError), "interval=2.5"),
        ({"interval": True}, (TypeError, ValueError), "interval=True"),
        ({"eval_precision": "curent"}, ValueError, "'current'"),
        ({"eval_precision": "bf16"}, ValueError, "'base'"),
        ({"config": {"formats": ("bf16",)}}, TypeError, "config="),
        ({"config": {}}, TypeError, "config="),
        ({"config": "bf16"}, TypeError, "config="),
        ({"history_file": 3}, TypeError, "history_file=3"),
    ],
)
def test_bad_argument_is_refused_at_once(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        AutoPrecisionCallback(**arguments)


def test_wrong_format_names_suggest_the_nearest() -> None:
    for make in (
        lambda: Action(precision={"net.0": "b16"}),
        lambda: AutoPrecisionConfig(formats=("fp32", "b16")),
        lambda: FixedController("b16"),
        lambda: AutoPrecision({"*": "b16"}),
    ):
        with pytest.raises(ValueError, match=re.escape("Did you mean 'bf16'?")):
            make()


# before, between and after fits


def test_before_the_first_fit(tmp_path: Path) -> None:
    callback = AutoPrecisionCallback()
    assert callback.history == []
    assert callback.precision_map() == {}
    assert (callback.applied_steps, callback.skipped_steps) == (0, 0)
    assert (callback.loss_scale, callback.clip_threshold, callback.batch_size) == (1.0, math.inf, None)
    with pytest.raises(RuntimeError, match="no fit is under way"):
        callback.request(Action(clip=1.0))
    with pytest.raises(RuntimeError, match="before the first fit"):
        callback.save_map(tmp_path / "map.yaml")


def test_after_fit_everything_can_be_read_and_nothing_asked() -> None:
    callback = scripted({1: Action(precision={"*": "bf16"}, loss_scale=256.0, clip=3.0)})
    fit(callback)
    assert callback.precision_map() == {"net.0": "bf16", "net.2": "bf16"}
    assert (callback.applied_steps, callback.skipped_steps) == (8, 0)
    assert (callback.loss_scale, callback.clip_threshold) == (256.0, 3.0)
    with pytest.raises(RuntimeError, match="no fit is under way"):
        callback.request(Action(clip=1.0))


def test_second_fit_starts_anew() -> None:
    callback = scripted({1: Action(precision={"net.0": "bf16"}, clip=3.0)})
    module = Plain()
    fit(callback, module)
    first = list(callback.history)
    fit(callback, module)
    assert list(callback.history) == first
    assert callback.applied_steps == 8


def test_same_trainer_fits_again() -> None:
    callback, module = scripted({9: Action(precision={"net.0": "bf16"})}), Plain()
    trainer = fit(callback, module)
    plugin = trainer.precision_plugin
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    assert trainer.precision_plugin is plugin
    assert trainer.global_step == 16


def test_fit_again_after_an_exception() -> None:
    """As after an out-of-memory error that the user's script caught."""

    def stop(trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 3 and not stop.done:  # type: ignore[attr-defined]
            stop.done = True  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("out of memory")

    stop.done = False  # type: ignore[attr-defined]
    callback, module = scripted({1: Action(precision={"*": "bf16"})}), Plain()
    trainer = quiet(max_epochs=1, callbacks=[callback, LambdaCallback(on_train_batch_end=stop)])
    plugin = trainer.precision_plugin
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(module, loader())
    assert callback.applied_steps == 3
    assert set(callback.precision_map().values()) == {"bf16"}
    trainer.fit(module, loader())
    assert trainer.precision_plugin is plugin
    assert set(callback.precision_map().values()) == {"bf16"}
    assert [type(layer) for layer in module.net] == [nn.Linear, nn.ReLU, nn.Linear]


def test_batch_size_is_read_from_the_loader() -> None:
    seen: list[Any] = []
    callback = AutoPrecisionCallback(verbose=False)
    fit(callback, callbacks=[LambdaCallback(on_train_batch_end=lambda *args: seen.append(callback.batch_size))])
    assert set(seen) == {8}


# the script


def test_script_acts_before_its_window() -> None:
    seen: list[tuple[str, float, float]] = []

    class Watches(Plain):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            seen.append((callback.precision_map()["net.0"], callback.loss_scale, callback.clip_threshold))
            return super().training_step(batch, batch_idx)

    callback = scripted({3: Action(precision={"net.0": "bf16"}, loss_scale=2048.0, clip=0.5)})
    fit(callback, Watches())
    assert seen[2] == ("fp32", 1.0, math.inf)
    assert seen[3:] == [("bf16", 2048.0, 0.5)] * 5
    rows = [(d.step, d.knob, d.unit, d.before, d.requested, d.applied, d.outcome) for d in callback.history]
    assert rows[0] == (3, "precision", "net.0", "fp32", "bf16", "bf16", "applied")
    assert rows[1][:2] == (3, "loss_scale")
    assert rows[1][4:] == (2048.0, 2048.0, "applied")
    assert rows[2] == (3, "clip", None, math.inf, 0.5, 0.5, "applied")


def test_interval_may_come_from_numpy() -> None:
    interval = AutoPrecisionCallback(interval=np.int64(3)).interval
    assert (interval, type(interval)) == (3, int)


def test_windows_count_accumulated_batches_once_and_skipped_ones_too() -> None:
    seen: dict[int, str] = {}

    class Watches(Plain):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            seen[batch_idx] = callback.precision_map()["net.0"]
            return super().training_step(batch, batch_idx) * (math.inf if batch_idx == 1 else 1.0)

    callback = scripted({0: Action(precision={"net.0": "bf16"}), 2: Action(precision={"net.0": "fp32"})})
    fit(callback, Watches(), accumulate_grad_batches=2)
    assert callback.skipped_steps == 1
    assert seen == {0: "bf16", 1: "bf16", 2: "bf16", 3: "bf16", 4: "fp32", 5: "fp32", 6: "fp32", 7: "fp32"}


def test_epochs_count_from_zero() -> None:
    seen: list[float] = []
    script = ScriptedController(epochs={0: Action(clip=5.0), 2: Action(clip=7.0)})
    callback = AutoPrecisionCallback(script, verbose=False)
    watch = LambdaCallback(on_train_batch_start=lambda *args: seen.append(callback.clip_threshold))
    fit(callback, max_epochs=3, callbacks=[watch])
    assert seen == [5.0] * 16 + [7.0] * 8


def test_script_keeps_its_place_after_an_early_end_of_an_epoch() -> None:
    """``on_train_batch_start`` of the module returns -1 and ends the epoch."""

    class Short(Plain):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 5 else None

    callback = scripted({6: Action(precision={"net.0": "bf16"})})
    fit(callback, Short(), max_epochs=2)
    assert callback.applied_steps == 10
    assert [d.step for d in callback.history if d.knob == "precision"] == [6]


# requests from user code


def asking(step: int, hook: str, action: Action) -> LambdaCallback:
    def ask(trainer: Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == step and not ask.done:  # type: ignore[attr-defined]
            ask.done = True  # type: ignore[attr-defined]
            callback_of(trainer).request(action)

    ask.done = False  # type: ignore[attr-defined]
    return LambdaCallback(**{hook: ask})


@pytest.mark.parametrize(
    "hook", ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_request_is_deferred_and_applied_at_the_boundary(hook: str) -> None:
    action = Action(precision={"net.2": "bf16"}, loss_scale=64.0, clip=0.25)
    callback = scripted({})
    fit(callback, callbacks=[asking(3, hook, action)])
    window = 4 if hook != "on_train_batch_end" else 3
    for knob in ("precision", "loss_scale", "clip"):
        rows = [d for d in callback.history if d.knob == knob and d.requested in ("bf16", 64.0, 0.25)]
        assert [d.outcome for d in rows] == ["deferred", "applied"]
        assert rows[1].step == window
        assert rows[0].applied == rows[0].before
    assert callback.precision_map()["net.2"] == "bf16"


def test_a05_request_inside_an_accumulation_window_waits_for_its_end() -> None:
    gradients: dict[str, list[Tensor]] = {"asked": [], "plain": []}

    def run(name: str, others: list[Any]) -> AutoPrecisionCallback:
        class Watches(Plain):
            def on_before_optimizer_step(self, optimizer: Any) -> None:
                gradients[name].append(self.net[0].weight.grad.clone())  # type: ignore[union-attr, operator]

        seed()
        callback = scripted({0: Action(loss_scale=1024.0, clip=math.inf)})
        fit(callback, Watches(), accumulate_grad_batches=2, callbacks=others)
        return callback

    callback = run("asked", [asking(0, "on_after_backward", Action(loss_scale=2048.0))])
    run("plain", [])
    rows = [d for d in callback.history if d.requested == 2048.0]
    assert [(d.step, d.outcome) for d in rows] == [(0, "deferred"), (1, "applied")]
    for asked, plain in zip(gradients["asked"], gradients["plain"], strict=True):
        torch.testing.assert_close(asked, plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Action(precision={"net.9": "bf16"}), "Did you mean"),
        (Action(loss_scale=0.0), "finite and > 0"),
        (Action(loss_scale=math.nan), "finite and > 0"),
        (Action(clip=-1.0), "must be > 0"),
        (Action(clip=math.nan), "must be > 0"),
        (Action(batch_size=0), "batch size"),
        (Action(accumulate=0), "must be >= 1"),
    ],
)
@pytest.mark.parametrize("is_scripted", [True, False])
def test_illegal_request_is_refused_with_the_reason(is_scripted: bool, action: Action, reason: str) -> None:
    seed()
    module = Plain()
    callback = scripted({2: action} if is_scripted else {})
    others = [] if is_scripted else [asking(2, "on_after_backward", action)]
    got = outcome(fit(callback, module, callbacks=others), module)
    rows = [d for d in callback.history if d.outcome == "refused"]
    assert len(rows) == 1
    assert reason in rows[0].reason
    assert rows[0].applied == rows[0].before
    seed()
    twin = Plain()
    assert_identical(outcome(fit(scripted({}), twin), twin), got)


@pytest.mark.parametrize("value", [None, {}, "bf16", {"net.0": "bf16"}])
def test_request_takes_an_action(value: Any) -> None:
    errors: list[BaseException] = []
    callback = scripted({})

    def ask(*args: Any) -> None:
        try:
            callback.request(value)
        except TypeError as error:
            errors.append(error)

    fit(callback, callbacks=[LambdaCallback(on_after_backward=ask)], max_steps=1)
    assert "takes an `autoprec.Action`" in str(errors[0])


# policies


class Spy(Controller):
    """Records what it is asked."""

    name = "spy"

    def __init__(self) -> None:
        self.observations: list[Any] = []
        self.names: list[str] = []
        self.autocast: list[bool] = []
        self.gradients: list[bool] = []

    def start(self, names: Sequence[str], legal: Sequence[tuple[str, ...]]) -> None:
        self.names = list(names)

    def decide(self, observation: Any) -> Any:
        self.observations.append(observation.copy())
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        self.gradients.append(torch.is_grad_enabled())
        return np.zeros(len(observation), dtype=np.int64)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}])
def test_decision_every_interval_of_applied_steps(options: dict[str, Any]) -> None:
    spy = Spy()
    callback = AutoPrecisionCallback(spy, interval=5, verbose=False)
    fit(callback, max_epochs=-1, max_steps=31, **options)
    assert 4 <= len(spy.observations) <= 6
    for observation in spy.observations:
        assert observation.shape[0] == 2 + 3
        assert observation.dtype == np.float32
        assert np.isfinite(observation).all()
    assert spy.names == ["net.0", "net.2"]
    assert not any(spy.autocast)
    assert not any(spy.gradients)


class Faulty(Spy):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def decide(self, observation: Any) -> Any:
        super().decide(observation)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("broken"),
        np.zeros(3, dtype=np.int64),
        np.full(5, 2),
        np.full(5, np.nan),
        "bf16",
        [[0, 1]],
        object(),
    ],
    ids=lambda answer: type(answer).__name__,  # a repr with an address differs between the processes of xdist
)
def test_faulty_policy_is_recorded_once_and_the_run_goes_on(answer: Any) -> None:
    seed()
    module, spy = Plain(), Faulty(answer)
    callback = AutoPrecisionCallback(spy, knobs=("precision", "loss_scale"), interval=2, verbose=False)
    with pytest.warns(UserWarning, match="policy 'spy' failed"):
        got = outcome(fit(callback, module, max_epochs=2), module)
    assert len(spy.observations) > 1
    rows = [d for d in callback.history if d.knob == "policy"]
    assert len(rows) == 1
    assert rows[0].outcome == "refused"
    seed()
    twin = Plain()
    plain = quiet(max_epochs=2)
    plain.fit(twin, loader())
    assert_identical(outcome(plain, twin), got)


@pytest.mark.parametrize("method", ["start", "initial_map", "step_action", "epoch_action"])
def test_fault_in_any_question_to_the_policy(method: str) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("broken")

    spy = type("Broken", (Spy,), {method: fail})()
    callback = AutoPrecisionCallback(spy, interval=2, verbose=False)
    with pytest.warns(UserWarning, match="policy 'spy' failed"):
        fit(callback)
    assert callback.applied_steps == 8


@pytest.mark.parametrize("method", ["initial_map", "step_action", "epoch_action"])
@pytest.mark.parametrize("answer", [3, "bf16", [1, 2], {"net.0": 3}], ids=lambda answer: type(answer).__name__)
def test_illegal_answer_to_any_question_does_not_end_the_run(method: str, answer: Any) -> None:
    spy = type("Garbage", (Spy,), {method: lambda *_: answer})()
    callback = AutoPrecisionCallback(spy, interval=2, verbose=False)
    with pytest.warns(UserWarning, match="policy 'spy' failed"):
        fit(callback)
    assert callback.applied_steps == 8
    assert [d.outcome for d in callback.history if d.knob == "policy"] == ["refused"]


def test_policy_whose_state_cannot_be_saved_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    def fail(self: Any) -> Any:
        raise KeyError("broken")

    callback = AutoPrecisionCallback(type("Stateless", (Spy,), {"state_dict": fail})(), verbose=False)
    trainer = fit(callback)
    with pytest.warns(UserWarning, match="policy 'spy' failed"):
        trainer.save_checkpoint(tmp_path / "file.ckpt")
    assert torch.load(tmp_path / "file.ckpt", weights_only=True)["AutoPrecision"]["applied_steps"] == 8


@pytest.mark.parametrize(
    "state",
    [[1, 2], {"x": np.zeros(2)}, {"x": [object()]}, {"x": np.float64(1.0)}],
    ids=["list", "array", "any", "number"],
)
def test_state_of_a_policy_that_a_checkpoint_cannot_hold(state: Any, tmp_path: Path) -> None:
    class Odd(Spy):
        def state_dict(self) -> Any:
            return state

    callback, path = AutoPrecisionCallback(Odd(), verbose=False), tmp_path / "last.ckpt"
    trainer = fit(callback)
    with pytest.warns(UserWarning, match="failed"):
        trainer.save_checkpoint(path)
    torch.load(path, weights_only=True)
    quiet(max_epochs=2, callbacks=[AutoPrecisionCallback(Spy(), verbose=False)]).fit(Plain(), loader(), ckpt_path=path)


def test_interrupt_in_a_policy_is_not_swallowed() -> None:
    callback = AutoPrecisionCallback(Faulty(None), interval=2, verbose=False)

    def stop(observation: Any) -> None:
        raise KeyboardInterrupt

    callback.controller.decide = stop  # type: ignore[method-assign]
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(callback)


def test_policy_may_return_an_action_or_moves() -> None:
    class Mixed(Spy):
        def decide(self, observation: Any) -> Any:
            super().decide(observation)
            if len(self.observations) == 1:
                return Action(precision={"net.0": "int8"})
            return np.array([1, -1, 0, 0, 0])

    config = AutoPrecisionConfig(formats=("fp32", "bf16", "int8"))
    callback = AutoPrecisionCallback(Mixed(), interval=3, config=config, verbose=False)
    fit(callback, max_epochs=2)
    precision = [d for d in callback.history if d.knob == "precision"]
    rows = [(d.unit, d.before, d.applied) for d in precision if d.outcome == "applied"]
    assert rows[:3] == [("net.0", "fp32", "int8"), ("net.0", "int8", "bf16"), ("net.2", "fp32", "bf16")]


def test_scripted_subclass_may_decide() -> None:
    class Both(ScriptedController):
        def decide(self, observation: Any) -> Action:
            return Action(clip=4.0)

    callback = AutoPrecisionCallback(Both({1: Action(precision={"*": "bf16"})}), interval=3, verbose=False)
    fit(callback)
    assert callback.clip_threshold == 4.0
    assert set(callback.precision_map().values()) == {"bf16"}


def test_saved_map_trains_the_same_way(tmp_path: Path) -> None:
    first = scripted({0: Action(precision={"net.0": "int8", "net.2": "bf16"}, loss_scale=512.0, clip=0.5)})
    seed()
    module = Plain()
    expected = outcome(fit(first, module), module)
    first.save_map(tmp_path / "map.yaml")
    second = AutoPrecisionCallback(tmp_path / "map.yaml", verbose=False)
    assert type(second.controller) is MapController
    seed()
    twin = Plain()
    assert_identical(expected, outcome(fit(second, twin), twin))


class Scaled(nn.Module):
    """A vector of its own beside a layer, as LayerScale has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gain * self.layer(x) @ torch.ones(8, 8, device=x.device)
        return y


class Vectors(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Scaled(), nn.PReLU(), nn.LayerNorm(8), nn.Linear(8, 2))
        self.bias = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("policy", ["rule", "fixed:bf16"])
def test_saved_map_freezes_only_what_was_decided(policy: str, precision: Any, tmp_path: Path) -> None:
    """Vectors and norms that nobody named follow what is before them; naming them would change the numbers."""

    def trained(policy: Any) -> tuple[AutoPrecisionCallback, Any]:
        seed()
        callback, module = AutoPrecisionCallback(policy, knobs=("precision", "loss_scale"), verbose=False), Vectors()
        return callback, outcome(fit(callback, module, precision=precision), module)

    first, expected = trained(policy)
    first.save_map(tmp_path / "map.yaml")
    second, found = trained(tmp_path / "map.yaml")
    assert_identical(expected, found)
    assert not any(row.outcome == "refused" for row in second.history)


def test_saved_map_leaves_to_the_run_what_the_run_decided(tmp_path: Path) -> None:
    callback = AutoPrecisionCallback(verbose=False)
    quiet(max_epochs=3, callbacks=[callback]).fit(Plain(), loader())
    assert math.isfinite(callback.clip_threshold)  # by the running median
    callback.save_map(tmp_path / "map.yaml")
    action = MapController(tmp_path / "map.yaml").action
    assert (action.clip, action.loss_scale) == (None, None)


class StartsLow(RuleController):
    """The rule in a run that begins in fp16."""

    def initial_map(self) -> dict[str, str]:
        return {"*": "fp16"}


@pytest.mark.parametrize("factor", [1e-6, 1e-7, 1e-9])
def test_g02_rule_raises_a_unit_whose_gradients_underflow(factor: float) -> None:
    """A scale far too small for the loss: entries vanish, at last all of them."""

    class Small(Plain):
        def loss(self, batch: Sequence[Tensor]) -> Tensor:
            return super().loss(batch) * factor

    config = AutoPrecisionConfig(formats=("fp32", "fp16"), loss_scale=LossScaleConfig(init_scale=1.0))
    callback = AutoPrecisionCallback(StartsLow(config), interval=4, config=config, verbose=False)
    seed()
    fit(callback, Small(), max_epochs=3)
    assert callback.precision_map()["net.0"] == "fp32"


# metrics


def test_metrics_are_logged_under_one_prefix_at_lightnings_interval(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = scripted({0: Action(precision={"net.0": "fp16"}, clip=2.0)})
    trainer = fit(callback, max_epochs=2, logger=logger, log_every_n_steps=4)
    ours = {name for name in trainer.callback_metrics if name.startswith("autoprec/")}
    assert {"autoprec/loss_scale", "autoprec/applied_steps", "autoprec/skipped_steps", "autoprec/bits"} <= ours
    assert {"autoprec/clip_threshold", "autoprec/grad_norm"} <= ours
    assert set(trainer.callback_metrics) == ours
    assert [name for name in trainer.progress_bar_metrics if name.startswith("autoprec/")] == ["autoprec/bits"]
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["autoprec/bits"]] == ["3", "7", "11", "15"]
    shares = 8 * 16 + 16, 16 * 2 + 2
    assert trainer.callback_metrics["autoprec/bits"] == pytest.approx((16 * shares[0] + 32 * shares[1]) / sum(shares))


def test_metrics_come_as_often_as_lightning_logs_under_accumulation(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(AutoPrecisionCallback(verbose=False), logger=logger, log_every_n_steps=2, accumulate_grad_batches=2)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        assert len([row for row in csv.DictReader(file) if row["autoprec/bits"]]) == 2


@pytest.mark.parametrize("has_bar", [False, True])
def test_metrics_are_there_for_other_callbacks_without_a_logger(has_bar: bool) -> None:
    trainer = quiet(max_epochs=1, log_every_n_steps=4, enable_progress_bar=has_bar, callbacks=[AutoPrecisionCallback()])
    trainer.fit(Plain(), loader())
    names = {"autoprec/bits", "autoprec/loss_scale", "autoprec/applied_steps", "autoprec/skipped_steps"}
    assert names | {"autoprec/grad_norm"} == set(trainer.callback_metrics)
    assert trainer.callback_metrics["autoprec/applied_steps"] == 8
    assert ("autoprec/bits" in trainer.progress_bar_metrics) == has_bar


def test_nothing_is_logged_under_barebones() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, barebones=True, max_steps=8, callbacks=[AutoPrecisionCallback()])
    trainer.fit(Plain(), loader())
    assert not trainer.callback_metrics


# the table


@pytest.fixture
def printed(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).propagate = True
    caplog.set_level(logging.INFO)
    return caplog


def test_table_says_what_happened(printed: pytest.LogCaptureFixture) -> None:
    class Spikes(Plain):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            return self.loss(batch if batch_idx != 5 else [batch[0] * 1e6, batch[1]])

    steps = {
        1: Action(precision={"net.0": "fp16", "net.2": "bf16"}, loss_scale=256.0),
        2: Action(precision={"net.1": "bf16"}, batch_size=0),
    }
    config = AutoPrecisionConfig(clip=ClipConfig(min_norms=2))
    callback = AutoPrecisionCallback(ScriptedController(steps), interval=2, config=config)
    fit(callback, Spikes())
    text = printed.text
    for part in (
        "policy scripted, started from 32-true",
        "7 applied, 1 skipped",
        "fp32       1 unit, 80.9% of parameters",
        "bf16       1 unit, 19.1% of parameters",
        "of compute",
        "overflow   net.0: 1",
        "net.1",
        "batch_size to 0",
        "loss scale",
        "clip",
    ):
        assert part in text, part


def test_table_calls_emulation_emulated(printed: pytest.LogCaptureFixture) -> None:
    fit(AutoPrecisionCallback("fixed:fp16"))
    assert re.search(r"fp16 +2 units.*emulated", printed.text)


@pytest.mark.parametrize("verbose", [True, False])
def test_verbose(verbose: bool, printed: pytest.LogCaptureFixture) -> None:
    fit(AutoPrecisionCallback(verbose=verbose))
    assert ("autoprec, policy rule" in printed.text) is verbose


# the record on disk


@pytest.mark.parametrize("ends", ["well", "badly"])
@pytest.mark.parametrize("where", ["log_dir", "path", "no logger"])
def test_history_file(where: str, ends: str, tmp_path: Path) -> None:
    target: Any = tmp_path / "deep" / "record.jsonl" if where == "path" else True
    callback = scripted({2: Action(precision={"*": "bf16"}, clip=math.inf, batch_size=3)}, history_file=target)
    logger = CSVLogger(tmp_path / "logs") if where == "log_dir" else False

    def stop(trainer: Trainer, *args: Any) -> None:
        if ends == "badly" and trainer.global_step == 5:
            raise ZeroDivisionError

    options: dict[str, Any] = {"logger": logger, "default_root_dir": tmp_path / "root"}
    watch = LambdaCallback(on_train_batch_start=stop)
    if ends == "badly":
        with pytest.raises(ZeroDivisionError):
            fit(callback, callbacks=[watch], **options)
    else:
        fit(callback, **options)
    places = {
        "path": tmp_path / "deep" / "record.jsonl",
        "log_dir": Path(logger.log_dir if isinstance(logger, CSVLogger) else "") / "autoprec.jsonl",
        "no logger": tmp_path / "root" / "autoprec.jsonl",
    }
    assert History.from_jsonl(places[where]) == callback.history
    rows = [json.loads(line) for line in places[where].read_text().splitlines()]
    assert {row["knob"] for row in rows} == {"precision", "clip", "batch_size"}


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_history_that_cannot_be_written_costs_nothing(is_interrupted: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    callback = AutoPrecisionCallback(history_file=tmp_path / "file" / "history.jsonl", verbose=False)

    def stumble(*args: Any) -> None:
        if is_interrupted:
            raise KeyError("the user's own fault")

    trainer = quiet(max_epochs=1, callbacks=[callback, LambdaCallback(on_train_epoch_end=stumble)])
    found = trainer.strategy.precision_plugin
    ends = pytest.raises(KeyError, match="the user's own fault") if is_interrupted else contextlib.nullcontext()
    with ends, pytest.warns(UserWarning, match="the history could not be written to"):
        trainer.fit(Plain(), loader())
    assert trainer.strategy.precision_plugin is found
    assert callback.applied_steps == 8


def test_no_file_unless_asked(tmp_path: Path) -> None:
    fit(scripted({0: Action(clip=1.0)}), default_root_dir=tmp_path / "root")
    assert not list(tmp_path.rglob("*.jsonl"))


# what cannot work


def test_f04_other_namespace_is_refused_with_both_names() -> None:
    foreign = type("Trainer", (), {"__module__": "pytorch_lightning.trainer.trainer"})()
    with pytest.raises(MisconfigurationException) as error:
        AutoPrecisionCallback().setup(foreign, Plain(), "fit")
    assert "lightning.pytorch" in str(error.value)
    assert "pytorch_lightning.trainer.trainer.Trainer" in str(error.value)


def test_f04_other_namespace_for_real() -> None:
    twin = pytest.importorskip("pytorch_lightning")
    demos = pytest.importorskip("pytorch_lightning.demos.boring_classes")
    trainer = twin.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[AutoPrecisionCallback()]
    )
    # both packages have an exception of this name
    with pytest.raises(Exception, match=r"`lightning\.pytorch`.*`pytorch_lightning\.") as error:
        trainer.fit(demos.BoringModel())
    assert type(error.value).__name__ == "MisconfigurationException"


def test_f04_plugin_and_module_of_the_other_namespace_are_refused() -> None:
    """Lightning does that itself; the plugin must not come through by accident."""
    twin = pytest.importorskip("pytorch_lightning")
    with pytest.raises(Exception, match="AutoPrecision"):
        twin.Trainer(plugins=[AutoPrecision()], accelerator="cpu", logger=False)


def test_two_callbacks_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `AutoPrecisionCallback`"):
        quiet(callbacks=[AutoPrecisionCallback(), AutoPrecisionCallback("fixed:bf16", knobs=())])


def test_two_callbacks_of_two_classes_are_refused() -> None:
    class Own(AutoPrecisionCallback):
        pass

    with pytest.raises(MisconfigurationException, match=r"with `AutoPrecisionCallback` and `.*Own`.*Choose one"):
        quiet(max_epochs=1, callbacks=[AutoPrecisionCallback(), Own()]).fit(Plain(), loader())


def test_one_callback_for_two_fits_at_once_is_refused() -> None:
    callback = AutoPrecisionCallback(verbose=False)

    def fit_another(*args: Any) -> None:
        quiet(max_epochs=1, callbacks=[callback]).fit(Plain(), loader())

    trainer = quiet(max_epochs=1, callbacks=[callback, LambdaCallback(on_train_epoch_end=fit_another)])
    found = trainer.strategy.precision_plugin
    with pytest.raises(MisconfigurationException, match="One AutoPrecisionCallback was given to two Trainers"):
        trainer.fit(Plain(), loader())
    assert trainer.strategy.precision_plugin is found
    fit(callback)  # usable again
    assert callback.applied_steps == 8


def test_callback_from_the_module_beside_one_in_the_trainer() -> None:
    """Lightning lets the module's callback replace the Trainer's of the same type."""

    class Brings(Plain):
        def configure_callbacks(self) -> Any:
            return [own]

    own, other = scripted({1: Action(precision={"*": "bf16"})}), AutoPrecisionCallback(verbose=False)
    trainer = quiet(max_epochs=1, callbacks=[other])
    plugin = trainer.precision_plugin
    trainer.fit(Brings(), loader())
    assert set(own.precision_map().values()) == {"bf16"}
    assert other.precision_map() == {}
    assert trainer.precision_plugin is plugin


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_several_processes_are_refused(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet()
    monkeypatch.setattr(Trainer, "world_size", property(lambda self: 2))
    with pytest.raises(MisconfigurationException, match=r"devices.*2.*`devices=1`"):
        AutoPrecisionCallback().setup(trainer, Plain(), stage)


# unusual modules


class NoParameters(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`:UserWarning")
@pytest.mark.parametrize("policy", ["rule", "fixed:fp16"])
def test_module_without_parameters(policy: str, printed: pytest.LogCaptureFixture) -> None:
    callback = AutoPrecisionCallback(policy)
    trainer = quiet(max_epochs=1, callbacks=[callback])
    trainer.fit(NoParameters(), loader())
    assert callback.precision_map() == {}
    assert (callback.applied_steps, callback.skipped_steps) == (0, 0)
    assert "no layer of this model can be steered" in printed.text


class RootOnly(Plain):
    """All parameters belong to the module itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.weight = nn.Parameter(torch.randn(8, 2))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.mse_loss(batch[0] @ self.weight, batch[1])


def test_module_without_units(printed: pytest.LogCaptureFixture) -> None:
    callback = AutoPrecisionCallback("fixed:bf16", interval=2)
    fit(callback, RootOnly())
    assert callback.applied_steps == 8
    assert callback.precision_map() == {"(root)": "fp32"}
    assert "no layer of this model can be steered" in printed.text
    assert "left alone (root)" in printed.text


def test_all_parameters_frozen_but_one() -> None:
    module = Plain(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    module.net[0].requires_grad_(False)
    callback = AutoPrecisionCallback(interval=2, verbose=False)
    fit(callback, module, max_epochs=4)
    assert set(callback.precision_map()) == {"net.0", "net.2"}
    assert not module.net[0].weight.requires_grad


def test_module_that_another_tool_prepared(printed: pytest.LogCaptureFixture) -> None:
    """Half weights, a forward on the instance, a parametrization: trained as they are, with the reason."""
    module = Plain()
    module.extra = nn.Linear(2, 2).bfloat16()
    module.extra.requires_grad_(False)
    module.net[2] = nn.utils.parametrizations.weight_norm(nn.Linear(16, 2))
    module.net[0].forward = module.net[0].forward
    callback = AutoPrecisionCallback("fixed:bf16")
    fit(callback, module)
    assert callback.precision_map() == {"net.0": "fp32", "net.2": "bf16", "extra": "fp32"}
    assert "left alone extra: its weights are stored in less than 32 bits" in printed.text
    assert "left alone net.0: its `forward` is replaced on the instance" in printed.text


def test_fit_inside_a_fit_of_the_same_layers() -> None:
    """An online probe trains a head on the same layers: each fit steers them for the time of its own steps."""
    dtypes: list[torch.dtype] = []

    class Probed(Plain):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            dtypes.append(self.net(batch[0]).dtype)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                probe.net = self.net
                fit(inner, probe)

    probe, inner = Plain(), scripted({1: Action(precision={"*": "int8"})})
    module, outer = Probed(), scripted({1: Action(precision={"*": "bf16"})})
    fit(outer, module)
    assert dtypes == [torch.float32] + [torch.bfloat16] * 7
    assert set(outer.precision_map().values()) == {"bf16"}
    assert set(inner.precision_map().values()) == {"int8"}
    assert [type(layer) for layer in module.net] == [nn.Linear, nn.ReLU, nn.Linear]


def test_plugin_found_is_put_back_with_its_scaler_where_the_run_left_it() -> None:
    plugin = fp16_plugin(4096.0, growth_interval=3)
    callback = AutoPrecisionCallback(knobs=("precision",), verbose=False)
    trainer = quiet(max_epochs=1, plugins=[plugin], callbacks=[callback])
    trainer.fit(Plain(), loader())
    assert trainer.precision_plugin is plugin
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == callback.loss_scale == 4096.0 * 2 ** (8 // 3)


def test_guard_config_reaches_the_run() -> None:
    class Spike(Plain):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
            return self.loss(batch if batch_idx != 1 else [batch[0] * 1e6, batch[1]])

    steps = {index: Action(precision={"net.0": "fp16"}) for index in range(8)}
    callback = scripted(steps, config=AutoPrecisionConfig(guard=GuardConfig(hold=3)))
    fit(callback, Spike())
    rows = [(d.step, d.outcome) for d in callback.history if d.unit == "net.0" and d.requested == "fp16"]
    assert [outcome for _, outcome in rows] == ["applied"] * 2 + ["refused"] * 3 + ["applied"] * 3


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_are_left_alone(stage: str) -> None:
    callback, trainer = AutoPrecisionCallback(), quiet()
    plugin = trainer.precision_plugin
    callback.setup(trainer, Plain(), stage)
    assert trainer.precision_plugin is plugin
    callback.teardown(trainer, Plain(), stage)
    assert trainer.precision_plugin is plugin
