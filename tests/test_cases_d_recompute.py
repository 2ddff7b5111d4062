"""Case D-04: 8-bit layers under recomputation, with accumulation, skipped steps, validation and a resume in the middle.

Scales are those of the tensor at hand in this version, so there is no history to advance: what must hold is that a
checkpointed run equals one that is not.

Time budget: 30 s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, RMSprop
from torch.utils.checkpoint import checkpoint

from autoprec import Action, AutoPrecisionCallback
from tests.small_fits import differences
from tests.support import Task, Watch, all_in, assert_finite, cpu, loader, rows, scripted, state_of

ACCUMULATE = 4
ROWS = 16
MICRO_BATCHES = 6 * ACCUMULATE
SPIKES = (9, MICRO_BATCHES + 13)  # one in each epoch
FORMS = [None, False, True]  # not checkpointed, non-reentrant, reentrant
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": functools.partial(SGD, lr=0.05, momentum=0.9),
    "adamw": functools.partial(AdamW, lr=0.01),
    "rmsprop": functools.partial(RMSprop, lr=0.01),
}


class Body(nn.Module):
    """A layer that is called twice, a norm between, a residual around."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.norm(self.first(self.first(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(Body() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = x.clone().requires_grad_()  # the reentrant form needs it
        for block in self.blocks:
            is_plain = self.use_reentrant is None or not torch.is_grad_enabled()
            x = block(x) if is_plain else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Spiked(Task):
    """The gradients of some micro-batches are infinite, their losses are not; validates in the middle of training."""

    def __init__(self, use_reentrant: bool | None, optimizer: str, spikes: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        super().__init__(
            Net(use_reentrant), torch.randn(MICRO_BATCHES * ROWS, 32), ROWS, optimizer=OPTIMIZERS[optimizer]
        )
        self.spikes = spikes
        self.val_losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.net(batch)
        if self.trainer.current_epoch * MICRO_BATCHES + batch_idx in self.spikes:
            output.register_hook(lambda gradient: gradient * math.inf)
        return (output.float() - batch.flip(1)).pow(2).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.val_losses.append(self.net(batch).float().pow(2).mean())

    def val_dataloader(self) -> Any:
        return loader(self.data[: 2 * ROWS], ROWS)


class Run:
    """A fit, and what must not depend on recomputation."""

    def __init__(
        self,
        use_reentrant: bool | None,
        formats: Action,
        optimizer: str = "adamw",
        spikes: tuple[int, ...] = SPIKES,
        epochs: int = 1,
        resume: Path | None = None,
        save: Path | None = None,
        **options: Any,
    ) -> None:
        self.ap = AutoPrecisionCallback(
            scripted({0: formats}).controller, knobs=("precision", "loss_scale"), eval_precision="current"
        )
        self.watch = Watch(self.ap)
        self.task = Spiked(use_reentrant, optimizer, spikes)
        self.trainer = cpu(
            callbacks=[self.ap, self.watch],
            max_epochs=epochs,
            accumulate_grad_batches=ACCUMULATE,
            val_check_interval=MICRO_BATCHES // 2,
            num_sanity_val_steps=0,
            **options,
        )
        self.trainer.fit(self.task, ckpt_path=resume, weights_only=None if resume is None else True)
        if save is not None:
            self.trainer.save_checkpoint(save)

    @property
    def result(self) -> dict[str, Any]:
        return {
            "weights": state_of(self.task),
            "optimizer": self.trainer.optimizers[0].state_dict(),
            "losses": self.watch.losses,
            "gradients": self.watch.gradients,
            "validation": self.task.val_losses,
            "counters": [self.ap.applied_steps, self.ap.skipped_steps],
            "map": self.ap.precision_map(),
            "history": [(d.step, d.unit, d.applied, d.outcome) for d in self.ap.history],
        }


def assert_same(found: Run, expected: Run, ignoring: tuple[str, ...] = ()) -> None:
    wrong = [path for path in differences(found.result, expected.result) if not path.startswith(ignoring)]
    assert not wrong, wrong[:5]


MIXED = Action(precision={"net.blocks.0.*": "fp8", "net.blocks.1.first": "int8", "net.blocks.1.second": "bf16"})
MAPS = {name: all_in(name) for name in ("fp32", "fp8", "int8", "bf16", "tf32")} | {"mixed": MIXED}


@functools.cache
def plain(formats: str, optimizer: str = "adamw", epochs: int = 1) -> Run:
    """A run without recomputation."""
    return Run(None, MAPS[formats], optimizer, SPIKES, epochs)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("formats", "optimizer"),
    [*((formats, optimizer) for formats in ("fp8", "int8") for optimizer in OPTIMIZERS)]
    + [(formats, "adamw") for formats in ("bf16", "tf32", "mixed")],
)
def test_d04_a_checkpointed_run_equals_one_that_is_not(formats: str, optimizer: str, use_reentrant: bool) -> None:
    expected = plain(formats, optimizer)
    found = Run(use_reentrant, MAPS[formats], optimizer)
    assert (found.ap.applied_steps, found.ap.skipped_steps) == (5, 1)
    assert_same(found, expected)
    assert_finite(found.task)
    # they would not tell a format from another if it did not act
    assert differences(plain("fp32", optimizer).result["weights"], expected.result["weights"])


@pytest.mark.parametrize("use_reentrant", FORMS)
@pytest.mark.parametrize("position", range(ACCUMULATE))
def test_d04_a_skipped_step_leaves_no_trace_wherever_the_window_broke(
    position: int, use_reentrant: bool | None
) -> None:
    """The fit goes on as if the window had not been: same weights as with the window left out."""

    class Without(Spiked):
        def train_dataloader(self) -> Any:
            keep = [i for i in range(MICRO_BATCHES) if i // ACCUMULATE != 2]
            return loader(self.data.view(MICRO_BATCHES, ROWS, 32)[keep].flatten(0, 1), ROWS)

    found = Run(use_reentrant, MAPS["fp8"], spikes=(2 * ACCUMULATE + position,))
    task, ap = Without(use_reentrant, "adamw", ()), scripted({0: all_in("fp8")}, knobs=("precision", "loss_scale"))
    cpu(callbacks=[ap], accumulate_grad_batches=ACCUMULATE, limit_val_batches=0).fit(task)
    assert (found.ap.skipped_steps, ap.skipped_steps, ap.applied_steps) == (1, 0, 5)
    assert not differences(state_of(found.task), state_of(task))


@pytest.mark.parametrize("use_reentrant", FORMS)
@pytest.mark.parametrize(("formats", "optimizer"), [("fp8", "adamw"), ("int8", "momentum"), ("mixed", "rmsprop")])
def test_d04_a_resumed_run_equals_the_uninterrupted_one(
    formats: str, optimizer: str, use_reentrant: bool | None, tmp_path: Path
) -> None:
    """Saved after one epoch; a step is skipped on either side of it. Resumed with recomputation and without."""
    expected = plain(formats, optimizer, epochs=2)
    Run(use_reentrant, MAPS[formats], optimizer, save=tmp_path / "half.ckpt")
    for form in {use_reentrant, None}:
        found = Run(form, MAPS[formats], optimizer, epochs=2, resume=tmp_path / "half.ckpt")
        assert (found.ap.applied_steps, found.ap.skipped_steps) == (10, 2)
        assert found.watch.losses == expected.watch.losses[MICRO_BATCHES:]
        assert_same(found, expected, (".losses", ".gradients", ".validation"))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_d04_a_change_of_format_between_windows(name: str, use_reentrant: bool) -> None:
    results = []
    for form in (None, use_reentrant):
        ap = scripted({1: all_in(name), 3: Action(precision={"net.blocks.0.first": "bf16"})}, knobs=("precision",))
        task, watch = Spiked(form, "momentum", (9,)), Watch(ap)
        cpu(callbacks=[ap, watch], accumulate_grad_batches=ACCUMULATE, limit_val_batches=0).fit(task)
        assert [d.step for d in rows(ap.history, "precision", "applied")] == [1, 1, 1, 1, 3]
        results.append([watch.gradients, watch.losses, state_of(task)])
    assert not differences(results[0], results[1])
