"""After fit, an exception in it or an interrupt, everything is as it was: module, Trainer, schedules, global state.

Time budget: 30 s.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from autoprec import Action, AutoPrecision, AutoPrecisionCallback, NonFiniteTrainingError, ScriptedController
from tests.conftest import global_state
from tests.small_fits import Full, clone, differences, fp16_plugin, loader, quiet

EVERY_FORMAT = {
    0: Action(precision={"*": "bf16", "norm": "bf16"}),
    2: Action(precision={"*": "fp16"}, loss_scale=2.0**24, clip=0.1),
    4: Action(precision={"*": "int8", "table": "fp8"}),
}


@pytest.fixture(autouse=True)
def _as_torch_starts() -> Iterator[None]:
    """What an earlier test may have left would hide the same trace here."""
    torch.backends.mha.set_fastpath_enabled(True)
    _global_optimizer_pre_hooks.clear()
    yield
    torch.backends.mha.set_fastpath_enabled(True)
    _global_optimizer_pre_hooks.clear()


class Zoo(Full):
    """One layer of each kind, hooks of the user's, tied weights and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.rnn = nn.GRU(16, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.table.weight
        self.batch_norm = nn.BatchNorm1d(8)
        self.calls = 0
        self.net[0].register_forward_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.calls += 1

    def loss(self, batch: Any) -> Tensor:
        index = (batch[0].abs() * 3).long().clamp(max=7)
        x = self.conv(self.table(index).mean(1)[:, None]).flatten(1)
        x = self.rnn(x[:, None])[0]
        x = self.block(self.attention(x, x, x)[0])
        x = self.batch_norm(self.tied(self.norm(x))[:, 0])
        return nn.functional.mse_loss(self.net(x).float(), batch[1].float())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        step = torch.optim.lr_scheduler.LambdaLR(optimizer, _flat)
        epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": step, "interval": "step"}, {"scheduler": epoch, "interval": "epoch"}]


def _flat(step: int) -> float:
    return 1.0


def identities(module: nn.Module) -> dict[str, int]:
    """Modules, parameters and buffers must stay the same objects."""
    parts = [*module.named_modules(remove_duplicate=False), *module.named_parameters(), *module.named_buffers()]
    return {f"{type(part).__name__} {name}": id(part) for name, part in parts}


def replaced(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def structure(module: nn.Module, trainer: Trainer) -> dict[str, Any]:
    """Classes, attributes, hooks and methods on instances, of everything that a fit touches; no values."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        hooks = {key: len(value) for key, value in vars(part).items() if key.endswith("_hooks")}
        found[f"module {name}"] = (type(part), attributes(part), hooks, part.training)
    for name, parameter in module.named_parameters():
        hooks = {key: getattr(parameter, key) for key in ("_backward_hooks", "_post_accumulate_grad_hooks")}
        found[f"parameter {name}"] = (type(parameter), parameter.dtype, parameter.requires_grad, hooks)
        found[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.dtype
    for name, buffer in module.named_buffers():
        found[f"buffer {name}"] = (type(buffer), buffer.dtype)
    strategy = trainer.strategy
    found["trainer"] = attributes(trainer)
    found["trainer settings"] = (trainer.gradient_clip_val, trainer.accumulate_grad_batches, trainer.precision)
    found["strategy"] = (type(strategy), attributes(strategy))
    found["plugin"] = (type(strategy.precision_plugin), attributes(strategy.precision_plugin))
    for index, optimizer in enumerate(trainer.optimizers):
        hooks = {key: len(value) for key, value in vars(optimizer).items() if key.endswith("_hooks")}
        found[f"optimizer {index}"] = (type(optimizer), attributes(optimizer), hooks)
    for index, config in enumerate(trainer.lr_scheduler_configs):
        found[f"schedule {index}"] = (type(config.scheduler), attributes(config.scheduler))
    return found


def attributes(value: Any) -> dict[str, str]:
    return {key: getattr(item, "__qualname__", type(item).__qualname__) for key, item in vars(value).items()}


def process_state() -> dict[str, Any]:
    """More than conftest.py's fixture looks at."""
    return {
        **global_state(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "mkldnn": (torch.backends.mkldnn.enabled, torch.backends.mkldnn.allow_tf32),
        "cpu reduced": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "inter-op": torch.get_num_interop_threads(),
        "deterministic warn": torch.is_deterministic_algorithms_warn_only_enabled(),
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
        "amp": (torch.amp.autocast, torch.autocast),
        "inference": torch.is_inference_mode_enabled(),
        "multithreaded backward": torch.autograd.is_multithreading_enabled(),
        "function mode": torch._C._len_torch_function_stack(),
        "dispatch mode": torch._C._len_torch_dispatch_stack(),
        "linear": (torch.nn.Linear.forward, torch.nn.functional.linear, torch.Tensor.backward),
        "excepthook": sys.excepthook,
        "optimizer hooks": [
            list(hooks.values()) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        ],
    }


def random_state() -> Any:
    return clone([torch.get_rng_state(), np.random.get_state(), random.getstate()])


Make = Callable[[], Any]


def fit(make: Make, callbacks: list[Any], options: Make = dict, raises: Any = None) -> dict[str, Any]:
    module = make()
    trainer = quiet(**{"max_steps": 6, "callbacks": callbacks, **options()})
    parts, plugin, before = identities(module), trainer.strategy.precision_plugin, process_state()
    with pytest.raises(raises) if raises else nullcontext():
        trainer.fit(module, loader(), loader(16))
    assert process_state() == before, differences(before, process_state())
    assert trainer.strategy.precision_plugin is plugin
    return {**structure(module, trainer), "replaced": replaced(parts, identities(module))}


def assert_no_trace(make: Make, callback: Make, options: Make = dict, raises: Any = None, others: Make = list) -> None:
    """Everything ends as it does without the callback, values aside."""
    plain = fit(make, others(), options, raises)
    ours = fit(make, [callback(), *others()], options, raises)
    if raises is not None:  # gradients of the step before may have gone for the activations of a forward
        plain |= {key: value for key, value in ours.items() if key.startswith("gradient") and value is None}
    assert ours == plain, differences(plain, ours)


def everything() -> AutoPrecisionCallback:
    return AutoPrecisionCallback(ScriptedController(EVERY_FORMAT), interval=2, verbose=False)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "32-true": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {"plugins": [fp16_plugin()]},
    "64-true": lambda: {"precision": "64-true"},
    "clipped": lambda: {"gradient_clip_val": 0.5},
}


def one_epoch() -> dict[str, Any]:
    return {"num_sanity_val_steps": 0, "max_epochs": 1, "max_steps": -1}


CALLBACKS: dict[str, Callable[[], AutoPrecisionCallback]] = {
    "everything": everything,
    "rule": lambda: AutoPrecisionCallback(interval=2, verbose=False),
    "masked": lambda: AutoPrecisionCallback(knobs=(), verbose=False),
    "current": lambda: AutoPrecisionCallback("fixed:bf16", eval_precision="current", verbose=False),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("callback", ["everything", "rule"])
def test_after_fit(callback: str, options: str) -> None:
    assert_no_trace(Zoo, CALLBACKS[callback], OPTIONS[options])


@pytest.mark.parametrize("callback", ["masked", "current"])
def test_after_fit_with_other_settings(callback: str) -> None:
    assert_no_trace(Zoo, CALLBACKS[callback])


class Stop(Exception):
    pass


def raising(kind: type[BaseException], hook: str, step: int = 3) -> LambdaCallback:
    def function(trainer: Trainer, *args: Any) -> None:
        if trainer.global_step >= step and not trainer.sanity_checking:
            raise kind("stop")

    return LambdaCallback(**{hook: function})


HOOKS = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_batch_start",
    "on_train_end",
    "on_fit_end",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_after_an_exception_in_a_hook(hook: str) -> None:
    assert_no_trace(Zoo, everything, one_epoch, Stop, lambda: [raising(Stop, hook)])


class Breaking(Zoo):
    """Raises in the forward or the backward of the fourth batch, or in validation."""

    def __init__(self, where: str, kind: type[BaseException]) -> None:
        super().__init__()
        self.where, self.kind = where, kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3 and self.where == "forward":
            raise self.kind("stop")
        if batch_idx == 3 and self.where == "backward":
            loss.register_hook(self._raise)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "validation":
            raise self.kind("stop")
        super().validation_step(batch, batch_idx)

    def _raise(self, *args: Any) -> None:
        raise self.kind("stop")


@pytest.mark.parametrize("options", ["32-true", "16-mixed"])
@pytest.mark.parametrize("where", ["forward", "backward", "validation"])
@pytest.mark.parametrize("callback", ["everything", "current"])
def test_after_an_exception_in_the_module(callback: str, where: str, options: str) -> None:
    assert_no_trace(
        lambda: Breaking(where, Stop),
        CALLBACKS[callback],
        lambda: {**one_epoch(), **OPTIONS[options]()},
        Stop,
    )


@pytest.mark.parametrize("where", ["forward", "backward", "validation"])
def test_after_an_interrupt(where: str) -> None:
    assert_no_trace(
        lambda: Breaking(where, KeyboardInterrupt),
        everything,
        one_epoch,
        (KeyboardInterrupt, SystemExit),
    )


@pytest.mark.parametrize(
    "where", ["setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start"]
)
def test_after_an_exception_while_setting_up(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise Stop("stop")

    monkeypatch.setattr(Zoo, where, fail)
    assert_no_trace(Zoo, everything, raises=Stop)


def test_after_a_checkpoint_that_does_not_load(tmp_path: Path) -> None:
    module = Zoo()
    trainer = quiet(max_steps=2, callbacks=[everything()])
    plugin, before = trainer.strategy.precision_plugin, process_state()
    with pytest.raises(FileNotFoundError):
        trainer.fit(module, loader(), loader(16), ckpt_path=tmp_path / "none.ckpt")
    assert trainer.strategy.precision_plugin is plugin
    assert process_state() == before
    assert classes(module) == classes(Zoo())


@pytest.mark.parametrize("options", [{"max_epochs": 0, "max_steps": -1}, {"max_steps": 0}, {"limit_train_batches": 0}])
def test_after_a_fit_without_a_step(options: dict[str, Any]) -> None:
    assert_no_trace(Zoo, everything, lambda: options)


@pytest.mark.filterwarnings("ignore:autoprec. 20 steps in a row:UserWarning")
def test_after_the_guard_stopped() -> None:
    class Hopeless(Zoo):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * float("inf")

    def options() -> dict[str, Any]:
        return {"max_steps": 80}

    module_before = fit(Zoo, [], lambda: {"max_steps": 1})
    ours = fit(Hopeless, [AutoPrecisionCallback("fixed:fp16", verbose=False)], options, raises=NonFiniteTrainingError)
    assert {key: value[0] for key, value in ours.items() if key.startswith("module ") and key != "module "} == {
        key: value[0] for key, value in module_before.items() if key.startswith("module ") and key != "module "
    }


def test_plugin_alone() -> None:
    """It stays where the user put it; everything else is as before."""
    ours = fit(Zoo, [], lambda: {"plugins": [AutoPrecision({"*": "bf16"})]})
    plain = fit(Zoo, [])
    changed = {key for key in plain if plain[key] != ours[key]}
    assert changed <= {"plugin", "strategy"}  # the strategy holds the plugin


def test_strategy() -> None:
    ours = fit(Zoo, [everything()], lambda: {"strategy": "autoprec"})
    plain = fit(Zoo, [])
    changed = {key for key in plain if plain[key] != ours[key]}
    assert changed <= {"plugin", "strategy"}


def test_random_states_after_an_exception() -> None:
    """The streams stand where they would without the callback."""

    def run(callbacks: list[Any]) -> Any:
        torch.manual_seed(7)
        trainer = quiet(max_epochs=1, callbacks=[*callbacks, raising(Stop, "on_train_batch_end")])
        with pytest.raises(Stop):
            trainer.fit(Zoo(), loader(shuffle=True), loader(16))
        return random_state()

    assert not differences(run([]), run([everything()]))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("is_fitted", [False, True])
def test_evaluation_is_that_of_the_trainer(stage: str, is_fitted: bool) -> None:
    """Before and after fit, nothing of ours takes part in evaluation."""
    module = Full()
    trainer = quiet(max_steps=4, callbacks=[everything()])
    if is_fitted:
        trainer.fit(module, loader(), loader(16))
    silent: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
    plain = getattr(quiet(), stage)(module, loader(16), **silent)
    before = identities(module), id(trainer.strategy.precision_plugin), process_state(), classes(module)
    ours = getattr(trainer, stage)(module, loader(16), **silent)
    assert before == (identities(module), id(trainer.strategy.precision_plugin), process_state(), classes(module))
    assert not differences(plain, ours)
    if stage == "predict":
        assert {tensor.dtype for tensor in ours} == {torch.float32}
        assert all(tensor.numpy().dtype == np.float32 for tensor in ours)


def classes(module: nn.Module) -> list[type]:
    return [type(part) for part in module.modules()]


class Leaves(Callback):
    """Leaves one trace at the end of fit."""

    def __init__(self, trace: Callable[[Any, Trainer], Any]) -> None:
        self.trace = trace

    def on_fit_end(self, trainer: Trainer, module: pl.LightningModule) -> None:
        self.trace(module, trainer)


TRACES: dict[str, Callable[[Any, Trainer], Any]] = {
    "class": lambda module, trainer: setattr(module.net[0], "__class__", type("Linear", (nn.Linear,), {})),
    "attribute": lambda module, trainer: module.net[0].__dict__.update(_state=1),
    "hook": lambda module, trainer: module.net[2].register_forward_hook(lambda *args: None),
    "parameter hook": lambda module, trainer: module.net[2].weight.register_hook(lambda grad: None),
    "method": lambda module, trainer: setattr(module.norm, "forward", module.norm.forward),
    "buffer": lambda module, trainer: setattr(module.batch_norm, "running_mean", torch.zeros(8)),
    "schedule": lambda module, trainer: setattr(trainer.lr_scheduler_configs[0].scheduler, "step", print),
    "optimizer": lambda module, trainer: setattr(trainer.optimizers[0], "step", print),
    "optimizer hook": lambda module, trainer: trainer.optimizers[0].register_step_pre_hook(print),
    "plugin": lambda module, trainer: setattr(trainer.strategy, "_precision_plugin", fp16_plugin()),
    "strategy": lambda module, trainer: setattr(trainer.strategy, "training_step", print),
    "trainer": lambda module, trainer: setattr(trainer, "gradient_clip_val", 0.5),
    "filter": lambda module, trainer: warnings.simplefilter("ignore"),
    "global optimizer hook": lambda module, trainer: register_optimizer_step_pre_hook(print),
    "fast path": lambda module, trainer: torch.backends.mha.set_fastpath_enabled(False),
}


@pytest.mark.parametrize("trace", TRACES)
def test_the_check_can_fail(trace: str) -> None:
    with warnings.catch_warnings(), pytest.raises(AssertionError):
        assert_no_trace(Zoo, lambda: Leaves(TRACES[trace]), lambda: {"max_steps": 1})
