"""``Trainer(strategy="autoprec")``.

Time budget: 20 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from autoprec import (
    Action,
    AutoPrecision,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    AutoPrecisionStrategy,
    ScriptedController,
)
from tests.small_fits import Full, Outcome, assert_identical, fp16_plugin, loader, outcome, quiet, seed


def fit(callbacks: tuple[Any, ...] = (), **options: Any) -> tuple[Any, Full, Outcome]:
    seed()
    module = Full()
    trainer = quiet(max_epochs=2, callbacks=list(callbacks), **options)
    trainer.fit(module, loader(), loader(16))
    return trainer, module, outcome(trainer, module)


def test_registered_by_the_import() -> None:
    assert "autoprec" in StrategyRegistry.available_strategies()
    assert StrategyRegistry.get("autoprec") is not None


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", "bf16-true", "16-true"])
def test_precision_of_the_trainer_is_the_starting_point(precision: Any) -> None:
    trainer, module, got = fit(strategy="autoprec", precision=precision)
    plugin = trainer.precision_plugin
    assert type(trainer.strategy) is AutoPrecisionStrategy
    assert type(plugin) is AutoPrecision
    assert plugin.steering is not None
    assert trainer.precision == plugin.base.precision == precision
    assert plugin.steering.applied_steps + plugin.steering.skipped_steps == 16


def test_16_mixed_on_a_cpu_is_bf16_mixed() -> None:
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        trainer, _, _ = fit(strategy="autoprec", precision="16-mixed")
    assert trainer.precision_plugin.base.precision == "bf16-mixed"


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_alone_with_nothing_steered_it_trains_as_the_default_strategy(precision: Any) -> None:
    plain = fit(precision=precision, gradient_clip_val=0.5)
    base = quiet(precision=precision).precision_plugin
    plugin = AutoPrecision(base=base, config=AutoPrecisionConfig(fused_step=False))
    ours = fit(strategy="autoprec", plugins=[plugin], gradient_clip_val=0.5)
    assert_identical(plain[2], ours[2])


def scripted() -> AutoPrecisionCallback:
    script = {1: Action(precision={"*": "bf16"}, clip=0.5), 9: Action(precision={"net.0": "int8"})}
    return AutoPrecisionCallback(ScriptedController(script), verbose=False)


def test_with_the_callback_it_trains_as_the_callback_alone() -> None:
    assert_identical(fit((scripted(),))[2], fit((scripted(),), strategy="autoprec")[2])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_plugin_given_beside_it_is_used(precision: Any) -> None:
    base = quiet(precision=precision).precision_plugin
    plugin = AutoPrecision({"*": "int8"}, base=base)
    trainer, _, got = fit(strategy="autoprec", plugins=[plugin])
    assert trainer.precision_plugin is plugin
    again = AutoPrecision({"*": "int8"}, base=quiet(precision=precision).precision_plugin)
    assert_identical(fit(plugins=[again])[2], got)


def test_scaler_plugin_given_beside_it_is_the_starting_point() -> None:
    found = fp16_plugin(512.0, growth_interval=5)
    trainer, _, _ = fit(strategy="autoprec", plugins=[found])
    assert trainer.precision_plugin.base is found
    assert found.scaler is not None
    assert found.scaler.get_scale() == 512.0 * 2**3


@pytest.mark.parametrize("plugin", [AutoPrecision({"*": "bf16"}), Precision(), None])
def test_strategy_object(plugin: Precision | None) -> None:
    strategy = AutoPrecisionStrategy(precision_plugin=plugin)
    trainer, _, _ = fit(strategy=strategy)
    assert trainer.strategy is strategy
    assert isinstance(trainer.precision_plugin, AutoPrecision)
    assert trainer.precision_plugin.steering is not None
    formats = set(trainer.precision_plugin.steering.knobs.precision_map().values())
    assert formats == ({"bf16"} if isinstance(plugin, AutoPrecision) else {"fp32"})


@pytest.mark.parametrize("devices", [1, "1", "auto"])
def test_device_comes_from_the_trainer(devices: Any) -> None:
    trainer, module, _ = fit(strategy="autoprec", devices=devices)
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.world_size == 1
    assert module.device == torch.device("cpu")


@pytest.mark.parametrize("devices", [2, "2", 4])
def test_several_devices_are_refused_naming_ddp(devices: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"strategy='autoprec'.*devices=.*strategy='ddp'"):
        quiet(strategy="autoprec", devices=devices)


def test_several_nodes_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"num_nodes=2.*strategy='ddp'"):
        quiet(strategy="autoprec", num_nodes=2)


@pytest.mark.parametrize("name", ["BitsandbytesPrecision", "TransformerEnginePrecision", "XLAPrecision"])
def test_plugins_with_a_precision_of_their_own_are_refused(name: str) -> None:
    plugin = type(name, (Precision,), {})()
    with pytest.raises(MisconfigurationException, match=name):
        quiet(strategy="autoprec", plugins=[plugin])


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_before_and_after_fit(stage: str) -> None:
    seed()
    module = Full()
    trainer = quiet(strategy="autoprec", max_epochs=1)
    options: dict[str, Any] = {} if stage == "predict" else {"verbose": False}
    before = getattr(trainer, stage)(module, loader(16), **options)
    trainer.fit(module, loader(), loader(16))
    after = getattr(trainer, stage)(module, loader(16), **options)
    assert len(before) == len(after)
    assert [type(layer) for layer in module.net] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]


def test_fits_again() -> None:
    module = Full()
    trainer = quiet(strategy="autoprec", max_epochs=1)
    trainer.fit(module, loader(), loader(16))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader(16))
    assert trainer.global_step == 16


def test_setter_keeps_ours_and_wraps_others() -> None:
    strategy = AutoPrecisionStrategy()
    first = strategy.precision_plugin
    assert isinstance(first, AutoPrecision)
    found = fp16_plugin()
    strategy.precision_plugin = found
    assert isinstance(strategy.precision_plugin, AutoPrecision)
    assert strategy.precision_plugin.base is found
    strategy.precision_plugin = first
    assert strategy.precision_plugin is first
    strategy.precision_plugin = None
    assert isinstance(strategy.precision_plugin, AutoPrecision)
