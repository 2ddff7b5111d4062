"""No forward ever runs on a copy that is not what its weight gives, whoever writes weights, and when.

Each run is compared bit for bit with the run in which somebody looks on, which keeps no copies.

Time budget: 25 s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim import AdamW, Optimizer

from autoprec import AutoPrecisionConfig
from tests import weight_writers
from tests.private_runs import Changing, Run, assert_private_is_the_same, assert_same_runs, run
from tests.small_fits import StatefulLoader, seed
from tests.weight_writers import Clipper, clamp, clamp_through_helper

pytestmark = pytest.mark.parametrize("check", ["0", "1"], ids=["samples", "whole copies"])


@pytest.fixture(autouse=True)
def _check(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without and with the comparison of whole copies."""
    monkeypatch.setenv("AUTOPREC_CHECK", check)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01)


class Net(Changing):
    def __init__(self, change: Callable[[Any, int], object] | None = None) -> None:
        super().__init__(adamw, change)


class Validated(Net):
    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class Calls(Callback):
    """Calls something with the module in one hook of the callback, every time or the ``only``-th time."""

    def __init__(self, hook: str, do: Callable[[Any], object], only: int | None = None) -> None:
        self.do, self.only, self.calls = do, only, 0
        setattr(self, hook, self._on_hook)

    def _on_hook(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self.only in (None, self.calls):
            self.do(pl_module)
        self.calls += 1


def swap_storage(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.9


def load(module: Any) -> None:
    module.load_state_dict({key: value * 0.9 for key, value in module.state_dict().items()})


def through_a_vector(module: Any, step: int = 0) -> None:
    vector_to_parameters(parameters_to_vector(module.parameters()).detach() * 0.9, module.parameters())


def begin_anew(module: Any) -> None:
    nn.init.normal_(module.net[0].weight, generator=torch.Generator().manual_seed(3))


def in_place(module: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(module.parameters()), 0.9)


def past_torch(module: Any) -> None:
    for parameter in module.parameters():
        parameter.detach().numpy()[...] *= 0.9


WRITES = [swap_storage, load, through_a_vector, begin_anew, in_place, clamp]


# ---- writes between steps ----


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_epoch_start", "on_train_epoch_end"])
def test_callbacks_that_write_between_steps(hook: str, write: Callable[[Any], object]) -> None:
    assert_private_is_the_same(Net, callbacks=lambda: [Calls(hook, write)])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "hook", ["on_validation_start", "on_validation_batch_start", "on_validation_epoch_end", "on_validation_end"]
)
def test_writes_around_validation(hook: str, write: Callable[[Any], object]) -> None:
    assert_private_is_the_same(Validated, callbacks=lambda: [Calls(hook, write)], validates=True, val_check_interval=3)


@pytest.mark.parametrize("when", ["current", "base"])
def test_weights_are_swapped_for_validation_and_back(when: str) -> None:
    def callbacks() -> list[Callback]:
        return [
            Calls("on_validation_epoch_start", lambda m: [p.data.mul_(0.5) for p in m.parameters()]),
            Calls("on_validation_epoch_end", lambda m: [p.data.mul_(2.0) for p in m.parameters()]),
        ]

    assert_private_is_the_same(
        Validated, callbacks=callbacks, validates=True, val_check_interval=3, ap={"eval_precision": when}
    )


class WithoutLoss(Validated):
    """No loss just before validation."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.steps % 3 == 0 else loss


@pytest.mark.filterwarnings("ignore:.*training_step.* returned `None`")
def test_evaluation_in_current_formats_reads_the_weights_themselves() -> None:
    found: list[Any] = []

    def callbacks() -> list[Callback]:
        return [Calls("on_validation_epoch_start", lambda m: [p.data.mul_(0.5) for p in m.parameters()])]

    for looks_on in (False, True):
        seed()
        each = run(
            WithoutLoss(),
            looks_on=looks_on,
            callbacks=callbacks(),
            validates=True,
            ap={"eval_precision": "current"},
            val_check_interval=3,
            max_epochs=1,  # the last validation follows step 6
        )
        found.append(each.trainer.callback_metrics["val_loss"])
        assert looks_on or each.counts["on copies"] > 0
    assert torch.equal(*found)


# ---- writes inside of steps ----

IN_STEPS: dict[str, Callable[[Any, int], object]] = {
    "data": lambda module, step: [p.data.clamp_(-0.2, 0.2) for p in module.parameters()],
    "imported function": lambda module, step: clamp(module),
    "helper of a helper": lambda module, step: clamp_through_helper(module),
    "through a module": lambda module, step: weight_writers.clamp(module),
    "callable object": lambda module, step: module.net.apply(Clipper()),
    "nested function": lambda module, step: (lambda: [p.data.mul_(0.9) for p in module.parameters()])(),
}


@pytest.mark.parametrize("change", IN_STEPS.values(), ids=IN_STEPS)
def test_writes_past_autograd_inside_a_step_keep_it_from_being_private(change: Callable[[Any, int], object]) -> None:
    runs: list[Run] = []
    for looks_on in (False, True):
        seed()
        runs.append(run(Net(change), looks_on=looks_on))
    assert runs[0].counts["private"] == 0
    assert_same_runs(*runs)


@pytest.mark.parametrize("write", [through_a_vector, load, begin_anew, in_place])
def test_other_writes_inside_a_step(write: Callable[[Any], object]) -> None:
    assert_private_is_the_same(lambda: Net(lambda module, step: write(module) if step % 3 == 2 else None))


def test_a_write_in_a_hook_of_the_optimizer() -> None:
    class Hooked(Net):
        def configure_optimizers(self) -> Any:
            optimizer = AdamW(self.parameters(), lr=0.01)
            optimizer.register_step_post_hook(lambda *args: clamp(self))
            return optimizer

    runs: list[Run] = []
    for looks_on in (False, True):
        seed()
        runs.append(run(Hooked(), looks_on=looks_on))
    assert runs[0].counts["private"] == 0
    assert_same_runs(*runs)


def test_a_write_at_the_end_of_each_batch() -> None:
    found = run(Net(), callbacks=[Calls("on_train_batch_end", clamp)])
    assert found.counts["private"] == found.counts["on copies"] == 0
    assert found.counts["groups by kernel"] > 0
    assert max(float(p.detach().abs().max()) for p in found.module.parameters()) < 0.2001


# ---- Lightning's callbacks, torch's utilities ----


def averaging() -> list[Callback]:
    return [EMAWeightAveraging(decay=0.9)]


def swa() -> list[Callback]:
    return [StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1, annealing_epochs=1)]


def pruning() -> list[Callback]:
    return [ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3)]


@pytest.mark.parametrize("callbacks", [averaging, swa, pruning])
@pytest.mark.filterwarnings("ignore:Swapping scheduler")
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_callbacks_of_lightning(callbacks: Callable[[], list[Callback]]) -> None:
    assert_private_is_the_same(Validated, callbacks=callbacks, validates=True, max_epochs=3)


def prune_first(module: Any) -> None:
    prune.l1_unstructured(module.net[0], "weight", 0.5)


def prune_for_good(module: Any) -> None:
    prune_first(module)
    prune.remove(module.net[0], "weight")


def new_parameter(module: Any) -> None:
    module.net[0].weight = nn.Parameter(module.net[0].weight.detach() * 0.5)


@pytest.mark.parametrize("change", [prune_first, prune_for_good, new_parameter])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_end"])
def test_weights_that_are_replaced(hook: str, change: Callable[[Any], object]) -> None:
    assert_private_is_the_same(
        Validated, callbacks=lambda: [Calls(hook, change, only=2)], validates=True, val_check_interval=2
    )


# ---- writes past every guard ----


def with_ctypes(module: Any) -> None:
    for parameter in module.parameters():
        memory = (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
        memory[:] = [value * 0.9 for value in memory]


class WritingLoader(StatefulLoader):
    """Writes all weights through memory before it hands out one batch, in code that nobody reads."""

    def __init__(self, module: Any, write: Callable[[Any], object], before: int) -> None:
        super().__init__()
        self.module, self.write, self.before = module, write, before

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index, batch in enumerate(super().__iter__()):
            if index == self.before:
                self.write(self.module)
            yield batch


@pytest.mark.parametrize("write", [with_ctypes, past_torch, clamp])
def test_what_nobody_sees_is_found_by_comparison(write: Callable[[Any], object]) -> None:
    runs: list[Run] = []
    for looks_on in (False, True):
        seed()
        module = Net()
        data = WritingLoader(module, write, before=6)
        if looks_on:
            runs.append(run(module, looks_on=True, data=data, max_epochs=1))
            continue
        with pytest.warns(UserWarning, match=r"`net.0.weight` was written without a trace") as caught:
            runs.append(run(module, data=data, max_epochs=1))
        assert len([w for w in caught if "without a trace" in str(w.message)]) == 1
    assert runs[0].counts["on copies"] == 2 * (6 - 2), "two steps begin without"
    assert_same_runs(*runs)


@pytest.mark.parametrize("write", [swap_storage, load, in_place])
def test_what_leaves_a_trace_needs_no_comparison(write: Callable[[Any], object]) -> None:
    runs: list[Run] = []
    for looks_on in (False, True):
        seed()
        module = Net()
        runs.append(run(module, looks_on=looks_on, data=WritingLoader(module, write, before=6), max_epochs=1))
    assert runs[0].counts["on copies"] == 2 * (10 - 2)
    assert_same_runs(*runs)


def test_fits_without_such_writes_do_not_warn() -> None:
    found = run(Net(), max_epochs=4)
    assert found.counts["on copies"] > 50


def test_nothing_but_rounding_tells_a_fused_run_from_torchs() -> None:
    runs = []
    for fused in (True, False):
        seed()
        runs.append(run(Net(), config=AutoPrecisionConfig(fused_step=fused), callbacks=averaging()))
    assert runs[0].counts["private"] > 0
    assert not runs[1].counts
    for mine, theirs in zip(runs[0].module.parameters(), runs[1].module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
