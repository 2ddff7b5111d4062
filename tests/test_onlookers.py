"""Who may look at gradients, or write weights, where a step would like to be private.

Time budget: 10 s.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoprec import AutoPrecisionCallback
from autoprec.onlookers import has_step_hooks, onlooker, runs_between_steps
from tests import weight_writers
from tests.small_fits import Full, Plain
from tests.weight_writers import Clipper, clamp, clamp_through_helper

MACHINERY = (SingleDeviceStrategy("cpu"), Precision())
SEES = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
)
SEES_IN_MODULE = (
    *SEES,
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
)
BETWEEN = ("on_train_batch_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_start")
BETWEEN_IN_MODULE = (*BETWEEN, "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
LATER = (*BETWEEN, "on_train_end", "on_fit_end", "on_save_checkpoint", "on_exception", "on_validation_start")


def found(root: LightningModule | None = None, *callbacks: Callback) -> str | None:
    return onlooker(Plain() if root is None else root, callbacks, MACHINERY)


def harmless(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


def reads_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
    for parameter in self.parameters():
        print(parameter.grad)


def with_hook(base: type, name: str, function: Callable[..., Any] = harmless) -> Any:
    return type("Hooked", (base,), {name: function, "__module__": __name__})


# ---- hooks ----


@pytest.mark.parametrize("hook", SEES_IN_MODULE)
def test_hooks_of_the_module_that_see_gradients(hook: str) -> None:
    assert found(with_hook(Plain, hook)()) == f"`Hooked.{hook}`"


@pytest.mark.parametrize("hook", SEES)
def test_hooks_of_callbacks_that_see_gradients(hook: str) -> None:
    assert found(None, with_hook(Callback, hook)()) == f"`Hooked.{hook}`"


@pytest.mark.parametrize("base", [Callback, Plain])
def test_hooks_that_are_inherited(base: Any) -> None:
    inherits = type("Inherits", (with_hook(base, "on_after_backward"),), {})()
    text = found(inherits) if base is Plain else found(None, inherits)
    assert text == "`Inherits.on_after_backward`"


class Target:
    def method(self, *args: Any) -> None:
        pass


def passing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


ASSIGNED: dict[str, Any] = {
    "lambda": lambda *args: None,
    "method of another object": Target().method,
    "bound to it": types.MethodType(harmless, Callback()),
    "partial": functools.partial(harmless, None),
    "partial of a known function": functools.partial(print, "seen"),
    "wraps": passing(harmless),
    "wraps of a known function": passing(lightning_callbacks.ModelCheckpoint.on_train_batch_end),
    "builtin": [].append,
    "callable object": Clipper(),
    "mock": mock.Mock(),
}


@pytest.mark.parametrize("hook", ASSIGNED.values(), ids=ASSIGNED)
def test_hooks_that_are_assigned_on_the_instance(hook: Any) -> None:
    callback: Any = Callback()
    callback.on_train_batch_end = hook
    assert found(None, callback) == "`Callback.on_train_batch_end`"


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "on_train_batch_end"])
def test_lambda_callbacks(hook: str) -> None:
    assert found(None, LambdaCallback(**{hook: lambda *args: None})) == f"`LambdaCallback.{hook}`"
    assert found(None, LambdaCallback(**{hook: functools.partial(harmless, None)})) is not None
    assert found(None, LambdaCallback(on_fit_start=lambda *args: None)) is None


@pytest.mark.parametrize("hook", BETWEEN_IN_MODULE)
def test_hooks_that_run_between_steps(hook: str) -> None:
    root = with_hook(Plain, hook)()
    assert runs_between_steps(root, [])
    assert found(root) is None


@pytest.mark.parametrize("hook", BETWEEN)
def test_hooks_of_callbacks_that_run_between_steps(hook: str) -> None:
    callback = with_hook(Callback, hook)()
    assert runs_between_steps(Plain(), [callback])
    assert found(None, callback) is None


@pytest.mark.parametrize("hook", LATER)
def test_hooks_that_read_gradients_of_the_step_before(hook: str) -> None:
    text = "`reads_gradients`, which mentions `.grad` (gradients)"
    assert found(None, with_hook(Callback, hook, reads_gradients)()) == text
    if hasattr(LightningModule, hook):
        assert found(with_hook(Plain, hook, reads_gradients)()) == text


def test_strangers_in_the_machinery() -> None:
    class Mine(SingleDeviceStrategy):
        pass

    assert onlooker(Plain(), [], (Mine("cpu"), Precision())) == ("`test_strangers_in_the_machinery.<locals>.Mine`")
    assert onlooker(Plain(), [], (SingleDeviceStrategy("cpu"), MixedPrecision("bf16-mixed", "cpu"))) is None


# ---- telltales in training steps ----


class Helped(nn.Sequential):
    def clamp_weights(self) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-1, 1)


class Aide:
    """Neither a module nor a function."""

    def help(self, module: nn.Module) -> None:
        clamp(module)


def undeclared(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


AIDE = Aide()


def reads_own(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.net[0].weight.grad


def penalises(self: Any, batch: Any, batch_idx: int) -> Any:
    return torch.autograd.grad(self.loss(batch), self.net[0].weight)[0].sum()


def logs_norm(self: Any, batch: Any, batch_idx: int) -> Any:
    from lightning.pytorch.utilities import grad_norm

    self.log_dict(grad_norm(self, 2))


def clips(self: Any, batch: Any, batch_idx: int) -> Any:
    return nn.utils.clip_grad_norm_(self.parameters(), 1.0)


def writes(self: Any, batch: Any, batch_idx: int) -> Any:
    self.net[0].weight.data.clamp_(-1, 1)


def sets(self: Any, batch: Any, batch_idx: int) -> Any:
    self.net[0].weight.set_(torch.ones(1))


def hooks_node(self: Any, batch: Any, batch_idx: int) -> Any:
    weight = self.net[0].weight
    weight.expand_as(weight).grad_fn.next_functions[0][0].register_prehook(print)


def hooks_edge(self: Any, batch: Any, batch_idx: int) -> Any:
    torch.autograd.graph.get_gradient_edge(self.net[0].weight).node.register_prehook(print)


def calls_method(self: Any, batch: Any, batch_idx: int) -> Any:
    self.tidy()


def calls_function(self: Any, batch: Any, batch_idx: int) -> Any:
    clamp(self)


def calls_helper(self: Any, batch: Any, batch_idx: int) -> Any:
    clamp_through_helper(self)


def calls_through_module(self: Any, batch: Any, batch_idx: int) -> Any:
    weight_writers.clamp(self)


def calls_lambda(self: Any, batch: Any, batch_idx: int) -> Any:
    self.net.apply(lambda module: module.weight.data.clamp_(-1, 1))


def calls_nested(self: Any, batch: Any, batch_idx: int) -> Any:
    def inner() -> None:
        def innermost() -> None:
            self.net[0].weight.data.clamp_(-1, 1)

        innermost()

    inner()


def calls_comprehension(self: Any, batch: Any, batch_idx: int) -> Any:
    return [parameter.data for parameter in self.parameters()]


def calls_object(self: Any, batch: Any, batch_idx: int) -> Any:
    self.net.apply(self.clipper)


def calls_method_of_object(self: Any, batch: Any, batch_idx: int) -> Any:
    self.aide.help(self)


def calls_global_object(self: Any, batch: Any, batch_idx: int) -> Any:
    AIDE.help(self)


def calls_class(self: Any, batch: Any, batch_idx: int) -> Any:
    self.net.apply(Clipper())


def calls_submodule(self: Any, batch: Any, batch_idx: int) -> Any:
    self.helped.clamp_weights()


def reads_property(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.tidied


def calls_partial(self: Any, batch: Any, batch_idx: int) -> Any:
    self.partial()


def calls_cached(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.cached()


class Rich(Plain):
    """Everything that the steps above call."""

    def __init__(self) -> None:
        super().__init__()
        self.clipper, self.aide = Clipper(), Aide()
        self.helped = Helped(nn.Linear(2, 2))
        self.partial = functools.partial(clamp, self)

    def tidy(self) -> None:
        self.tidy_up()

    def tidy_up(self) -> None:
        writes(self, None, 0)

    @property
    def tidied(self) -> Any:
        return self.net[0].weight.data

    @functools.cache  # noqa: B019
    def cached(self) -> Any:
        return self.net[0].weight.data


STEPS = [
    reads_own,
    penalises,
    logs_norm,
    clips,
    writes,
    sets,
    hooks_node,
    hooks_edge,
    calls_method,
    calls_function,
    calls_helper,
    calls_through_module,
    calls_lambda,
    calls_nested,
    calls_comprehension,
    calls_object,
    calls_method_of_object,
    calls_global_object,
    calls_class,
    calls_submodule,
    reads_property,
    calls_partial,
    calls_cached,
    functools.partialmethod(writes),
    undeclared(writes),
    passing(writes),
    torch.no_grad()(writes),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: getattr(step, "__name__", "partialmethod"))
def test_training_steps_that_read_gradients_or_write_weights(step: Any) -> None:
    assert found(Rich()) is None
    text = found(with_hook(Rich, "training_step", step)())
    assert text is not None
    assert "which mentions" in text


def test_a_step_that_is_assigned_on_the_instance() -> None:
    module: Any = Plain()
    module.training_step = types.MethodType(writes, module)
    assert found(module) == "`writes`, which mentions `.data` (weights past autograd)"


class Layer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        self.weight.data.clamp_(-1, 1)
        return super().forward(input)


def with_layer(layer: nn.Module) -> LightningModule:
    module = Plain()
    module.net.append(layer)
    return module


def test_forwards_of_submodules_are_read() -> None:
    assert found(with_layer(nn.Linear(2, 2))) is None
    assert found(with_layer(Layer(2, 2))) == "`Layer.forward`, which mentions `.data` (weights past autograd)"


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_pre_hook",
        "register_forward_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_submodules_are_read(register: str) -> None:
    layer = nn.Linear(2, 2)
    getattr(layer, register)(lambda module, *args: None)
    assert found(with_layer(layer)) is None
    getattr(layer, register)(lambda module, *args: module.weight.data.clamp_(-1, 1))
    text = found(with_layer(layer))
    assert text is not None
    assert "<lambda>" in text


# ---- nothing is found where nothing is ----


class Ordinary(Full):
    """A module as people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, 8)
        self.criterion = nn.MSELoss()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def shared(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        with torch.no_grad():
            scale = x.detach().abs().max().item()
        loss: Tensor = self.criterion(self(x).float(), y.float()) / max(scale, 1.0)
        self.log(f"{stage}/loss", loss, prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.shared(batch, "val")

    def on_train_epoch_end(self) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        for group in optimizer.param_groups:
            group["params"][0].data.mul_(1.0)  # not in a step
        return [optimizer], [StepLR(optimizer, 1)]


def test_an_ordinary_module_is_private() -> None:
    assert found(Ordinary()) is None
    assert not runs_between_steps(Plain(), [])


QUIET_CALLBACKS: list[Callable[[], Callback]] = [
    lightning_callbacks.ModelCheckpoint,
    lightning_callbacks.LearningRateMonitor,
    lambda: lightning_callbacks.EarlyStopping("loss"),
    lambda: lightning_callbacks.EMAWeightAveraging(decay=0.9),
    lambda: lightning_callbacks.StochasticWeightAveraging(0.1),
    lightning_callbacks.TQDMProgressBar,
    lightning_callbacks.ModelSummary,
    lightning_callbacks.Timer,
    lambda: lightning_callbacks.GradientAccumulationScheduler({0: 1}),
    lambda: lightning_callbacks.ModelPruning("l1_unstructured", amount=0.1),
    AutoPrecisionCallback,
]


@pytest.mark.parametrize("make", QUIET_CALLBACKS)
def test_callbacks_of_lightning_are_known(make: Callable[[], Callback]) -> None:
    callback = make()
    assert found(None, callback) is None
    assert not runs_between_steps(Plain(), [callback])


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Transformer(8, 2, 1, 1, 16),
        lambda: nn.LSTM(4, 4),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
        lambda: nn.Sequential(nn.Conv2d(2, 2, 2), nn.BatchNorm2d(2), nn.Embedding(2, 2)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
def test_modules_of_torch_are_known(model: Callable[[], nn.Module]) -> None:
    assert found(with_layer(model())) is None


def test_only_names_of_attributes_and_globals_count_not_texts_and_variables() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        data, grad = batch
        self.log("grad", 1.0)
        return {"data": data, "grad": grad}

    assert found(with_hook(Plain, "training_step", step)()) is None


class Written(nn.Module):
    """Its making, which is no part of a step, writes weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight.data.clamp_(-1, 1)


class Output(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)


def test_making_an_object_in_a_step_is_not_making_every_module() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return Output(loss=self.loss(batch))

    module: Any = with_layer(Written())
    module.training_step = types.MethodType(step, module)
    assert found(module) is None


class Elusive:
    """Makes up every attribute that it is asked for, as lazily loaded libraries do."""

    def __getattr__(self, name: str) -> Any:
        return Elusive()


def test_objects_that_make_up_attributes_do_not_hold_it_up() -> None:
    root: Any = Plain()
    root.elusive, root.mock = Elusive(), mock.MagicMock()

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.elusive.anything(self.mock)

    root.training_step = types.MethodType(step, root)
    assert found(root) is None


# ---- hooks of optimizers ----


def optimizer() -> SGD:
    return SGD([nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_an_optimizer(register: str) -> None:
    hooked = optimizer()
    assert not has_step_hooks(hooked)
    handle = getattr(hooked, register)(harmless)
    assert has_step_hooks(hooked)
    assert not has_step_hooks(optimizer())
    handle.remove()
    assert not has_step_hooks(hooked)


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_hooks_of_all_optimizers(register: Callable[..., Any]) -> None:
    handle = register(lambda *args: None)
    try:
        assert has_step_hooks(optimizer())
    finally:
        handle.remove()
    assert not has_step_hooks(optimizer())


def test_schedules_are_no_hooks() -> None:
    scheduled = optimizer()
    StepLR(scheduled, 1)
    assert not has_step_hooks(scheduled)


def test_a_trainer_finds_its_own_parts_known() -> None:
    trainer = Trainer(accelerator="cpu", logger=False)
    callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
    assert onlooker(Plain(), callbacks, (trainer.strategy, trainer.precision_plugin)) is None


# ---- strategies with several processes ----


class Mine(DDPStrategy):
    pass


class Wide(SingleDeviceStrategy):
    world_size = 2


@pytest.mark.parametrize("make", [DDPStrategy, FSDPStrategy, ModelParallelStrategy, Mine, lambda: Wide("cpu")])
def test_strategies_with_several_processes_see_gradients(make: Callable[[], Any]) -> None:
    strategy = make()
    assert onlooker(Plain(), [], (strategy, Precision())) == f"`{type(strategy).__qualname__}`"
