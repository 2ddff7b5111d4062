"""Launchers that train in another process, on one device: a spawned one, and the forked one of notebooks.

Time budget: 40 s (one spawned and three forked processes).
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from autoprec import Action, AutoPrecision, AutoPrecisionCallback, History, ScriptedController
from tests.small_fits import Plain, assert_identical, differences, loader, outcome, quiet, seed

MOVES = {
    1: Action(precision={"*": "bf16"}),
    3: Action(precision={"net.0": "fp16"}, loss_scale=256.0, clip=0.5),
    5: Action(precision={"net.2": "int8"}, batch_size=0),
}


def scripted(path: Path) -> AutoPrecisionCallback:
    return AutoPrecisionCallback(ScriptedController(MOVES), history_file=path, verbose=False)


@dataclass
class Run:
    """What the parent sees, and what the process wrote."""

    trainer: Trainer
    module: Plain
    callback: AutoPrecisionCallback
    plugin_before: Any
    history: History


def launch(strategy: str, path: Path, devices: int = 1) -> Run:
    before = dict(os.environ)
    try:
        seed()
        module, callback = Plain(), scripted(path)
        trainer = quiet(
            max_epochs=1,
            strategy=strategy,
            devices=devices,
            callbacks=[callback],
            log_every_n_steps=1,
            use_distributed_sampler=False,  # it shuffles where the loader does not
        )
        plugin = trainer.precision_plugin
        trainer.fit(module, loader())
        return Run(trainer, module, callback, plugin, History.from_jsonl(path))
    finally:
        for name in set(os.environ) - set(before):  # the address and port of the process group
            os.environ.pop(name)
        os.environ.update(before)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return launch("auto", tmp_path_factory.mktemp("auto") / "history.jsonl")


@pytest.fixture(scope="module", params=["ddp_spawn", "ddp_notebook"])
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    if request.param == "ddp_notebook" and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    return launch(request.param, tmp_path_factory.mktemp(request.param) / "history.jsonl")


def test_weights_are_those_of_a_run_in_this_process(launched: Run, in_process: Run) -> None:
    assert not differences(launched.module.state_dict(), in_process.module.state_dict())


def test_decisions_are_those_of_a_run_in_this_process(launched: Run, in_process: Run) -> None:
    assert launched.history == in_process.history
    assert {d.outcome for d in launched.history} == {"applied", "refused"}


def test_metrics_come_back(launched: Run) -> None:
    assert launched.trainer.callback_metrics["autoprec/applied_steps"] == 8
    assert launched.trainer.callback_metrics["autoprec/loss_scale"] == 256


def test_parent_is_untouched(launched: Run) -> None:
    assert launched.trainer.precision_plugin is launched.plugin_before
    assert not isinstance(launched.trainer.precision_plugin, AutoPrecision)
    assert [type(layer) for layer in launched.module.net] == [nn.Linear, nn.ReLU, nn.Linear]
    assert launched.callback.applied_steps == 0  # the process counted, not this object


def test_ddp_on_one_device_in_this_process(in_process: Run, tmp_path: Path) -> None:
    """DDP drops what ``convert_module`` returns and wraps the module: layers are steered in place."""
    try:
        run = launch("ddp", tmp_path / "history.jsonl")
    finally:
        torch.distributed.destroy_process_group()
    assert not differences(run.module.state_dict(), in_process.module.state_dict())
    assert run.history == in_process.history
    assert run.trainer.precision_plugin is run.plugin_before


class SkippedTwice(Plain):
    """The first two steps are skipped; the schedule counts the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx < 2 else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}


def test_schedules_are_held_although_ddp_wraps_the_module() -> None:
    before = dict(os.environ)
    try:
        module, callback = SkippedTwice(), AutoPrecisionCallback(verbose=False)
        quiet(max_epochs=1, strategy="ddp", devices=1, callbacks=[callback]).fit(module, loader())
    finally:
        torch.distributed.destroy_process_group()
        for name in set(os.environ) - set(before):
            os.environ.pop(name)
        os.environ.update(before)
    assert (callback.applied_steps, callback.skipped_steps) == (6, 2)
    assert module.schedule.last_epoch == 6
    assert type(module.schedule) is torch.optim.lr_scheduler.StepLR


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_devices_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"runs on one process.*`devices=1`"):
        launch("ddp_fork", tmp_path / "history.jsonl", devices=2)


@pytest.mark.parametrize("is_fitted", [False, True])
def test_callback_can_be_pickled(is_fitted: bool, tmp_path: Path) -> None:
    callback = scripted(tmp_path / "history.jsonl")
    if is_fitted:
        quiet(max_epochs=1, callbacks=[callback]).fit(Plain(), loader())
    again: AutoPrecisionCallback = pickle.loads(pickle.dumps(callback))
    assert again.precision_map() == callback.precision_map()
    results = []
    for each in (callback, again):
        seed()
        module = Plain()
        trainer = quiet(max_epochs=1, callbacks=[each])
        trainer.fit(module, loader())
        results.append(outcome(trainer, module))
    assert_identical(*results)


@pytest.mark.parametrize("is_fitted", [False, True])
def test_plugin_can_be_pickled(is_fitted: bool) -> None:
    plugin = AutoPrecision({"*": "bf16"})
    if is_fitted:
        quiet(max_epochs=1, plugins=[plugin]).fit(Plain(), loader())
    again = pickle.loads(pickle.dumps(plugin))
    assert again.initial_formats == {"*": "bf16"}
    trainer = quiet(max_epochs=1, plugins=[again])
    trainer.fit(Plain(), loader())
    assert again.steering.applied_steps == 8
    assert torch.isfinite(torch.tensor(again.steering.telemetry.median_norm))
