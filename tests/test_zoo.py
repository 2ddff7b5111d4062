"""The model zoo: four models under two maps in every run, all of them when slow tests are asked for.

Time budget: 15 s without slow tests, 5 minutes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from autoprec import AutoPrecisionCallback
from tests import zoo_check
from tests.zoo_check import MAPS, check, differences, plain_fit, quiet, state_of_process, traces_of
from tests.zoo_models import ZOO, missing_module

FAST = [(model, map_name) for model in ("gan", "carried_lstm", "gpt2", "convnext") for map_name in ("fp16", "mixed")]
SLOW = [(model, map_name) for model in ZOO for map_name in MAPS if (model, map_name) not in FAST]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("zoo")
    plain_fit.cache_clear()


def _run(model: str, map_name: str, folder: Path) -> None:
    reason = missing_module(ZOO[model])
    if reason:
        pytest.skip(reason)
    with quiet():
        assert check(model, map_name, folder).failures == []


@pytest.mark.parametrize(("model", "map_name"), FAST)
def test_zoo_fast(model: str, map_name: str, folder: Path) -> None:
    _run(model, map_name, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "map_name"), SLOW)
def test_zoo(model: str, map_name: str, folder: Path) -> None:
    _run(model, map_name, folder)


class _Leaky(AutoPrecisionCallback):
    """Leaves a hook, an attribute and a drawn random number behind, and spoils a weight."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        layer = pl_module.get_submodule("layer")
        layer.register_forward_hook(lambda module, inputs, output: None)
        layer._autoprec_rest = 1  # type: ignore[assignment]  # not a tensor, on purpose
        torch.rand(1)
        with torch.no_grad():
            next(layer.parameters()).view(-1)[0] = torch.nan


def test_check_finds_what_a_callback_leaves_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_check, "AutoPrecisionCallback", _Leaky)
    with quiet():
        failures = "\n".join(check("boring", "bf16", folder).failures)
    assert "state not finite: ['layer.weight']" in failures
    assert "module after fit: attributes of layer" in failures
    assert "module after fit: hooks of layer" in failures
    assert "random generators after fit: torch" in failures


def _swap_class(module: nn.Module) -> None:
    module[0].__class__ = type("Linear", (nn.Linear,), {})  # type: ignore[index]  # a Sequential


def _hook_a_parameter(module: nn.Module) -> None:
    weight: Any = next(module.parameters())
    weight.register_post_accumulate_grad_hook(lambda parameter: None)


def _replace_a_forward(module: nn.Module) -> None:
    module[0].forward = module[1].forward  # type: ignore[index]  # a Sequential


@pytest.mark.parametrize("leave", [_swap_class, _hook_a_parameter, _replace_a_forward])
def test_traces_show_every_change_of_a_module(leave: Callable[[nn.Module], Any]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = traces_of(module)
    assert differences(before, traces_of(module)) == []
    leave(module)
    assert differences(before, traces_of(module)) != []


def test_state_of_process_shows_flags_and_replaced_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of_process()
    assert differences(before, state_of_process()) == []
    monkeypatch.setenv("AUTOPREC_REST", "1")
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.bilinear)
    with torch.autocast("cpu", dtype=torch.float16):
        changed = "\n".join(differences(before, state_of_process()))
    assert all(name in changed for name in ("autocast is", "environment is", "torch.nn.functional.linear is"))
