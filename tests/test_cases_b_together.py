"""Area B with all parts in one run: the batch-size knob, memory that runs out, learning rate, schedules and copies.

Time budget: 30 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from autoprec import (
    Action,
    AutoPrecisionCallback,
    AutoPrecisionConfig,
    BatchConfig,
    RollbackConfig,
    ScriptedController,
)
from tests.small_fits import Plain, quiet, rows, seed

pytestmark = [
    # Lightning says so once in a process
    pytest.mark.filterwarnings("ignore:.training_step. returned .None."),
    pytest.mark.filterwarnings("ignore:autoprec. a batch of .* did not fit into memory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


class Sizes(Callback):
    """What each batch brings: its samples, and what the learning rate is when it starts and in the update."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch[0]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class Limited(Plain):
    """Runs out of memory above a number of rows."""

    def __init__(self, limit: int, where: str = "forward") -> None:
        super().__init__()
        self.limit, self.where = limit, where

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        if len(batch[0]) > self.limit and self.where == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        loader: Any = self.trainer.train_dataloader
        if loader.batch_sampler.batch_size > self.limit and self.where == "backward":
            torch.empty(2**60)


class Doubling(ScriptedController):
    """Asks for twice the batch in every epoch."""

    def __init__(self, first: int) -> None:
        super().__init__(epochs={epoch: Action(batch_size=first * 2**epoch) for epoch in range(12)})


def fit(module: Plain, policy: Any, epochs: int, config: AutoPrecisionConfig | None = None, **options: Any) -> Any:
    seed()
    callback, sizes = AutoPrecisionCallback(policy, config=config, verbose=False), Sizes()
    trainer = quiet(max_epochs=epochs, callbacks=[callback, sizes], **options)
    trainer.fit(module, DataLoader(rows(64), batch_size=8))
    return callback, sizes, trainer


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b06_a_search_ends_at_the_largest_size_that_a_step_has_survived(where: str) -> None:
    callback, sizes, _ = fit(Limited(24, where), Doubling(8), epochs=5)
    # epoch 2 fails at 32, and has one more batch by Lightning's count; 32 is never tried again
    assert sizes.sizes == [8] * 8 + [16] * 4 + [32, 16] + [16] * 4 + [16] * 4
    assert callback.batch_size == 16
    assert (callback.applied_steps, callback.lost_windows, callback.skipped_steps) == (8 + 4 + 1 + 8, 1, 0)
    assert callback.lost_samples == 64 - 16, "the batch that failed, and what the epoch had no batch for"
    lowered = [d for d in callback.history if d.knob == "batch_size" and "out of memory" in d.reason]
    assert [(d.before, d.applied) for d in lowered] == [(32, 16)]


def test_b07_a_second_error_at_the_old_size_ends_the_run_unchanged() -> None:
    class Worse(Limited):
        def on_train_epoch_start(self) -> None:
            self.limit = 24 if self.current_epoch < 3 else 7

    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory. Tried to allocate 20.00 MiB$"):
        fit(Worse(24), Doubling(8), epochs=5)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_b07_with_accumulation_the_window_is_lost_as_a_whole(where: str) -> None:
    policy = ScriptedController(epochs={1: Action(batch_size=32)})
    callback, sizes, trainer = fit(Limited(16, where), policy, epochs=3, accumulate_grad_batches=2)
    # 4 windows of 2 x 8; then a batch of 32 fails, and the other micro-batch of its window, now of 8, does not run
    assert sizes.sizes == [8] * 8 + [32, 8] + [8] * 8
    assert callback.batch_size == 8
    assert (callback.applied_steps, callback.lost_windows) == (8, 1)
    assert callback.lost_samples == 64
    assert trainer.accumulate_grad_batches == 2


class Scheduled(Plain):
    """One cycle over the steps that Lightning estimates."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("size", [4, 16, 32])
def test_b04_one_cycle_ends_where_it_would_have_ended(size: int) -> None:
    _, _, plain = fit(Scheduled(), ScriptedController(), epochs=2)
    callback, sizes, trainer = fit(Scheduled(), ScriptedController(epochs={1: Action(batch_size=size)}), epochs=2)
    assert sizes.sizes == [8] * 8 + [size] * (64 // size)
    schedules = [each.lr_scheduler_configs[0].scheduler for each in (plain, trainer)]
    assert schedules[0].last_epoch == schedules[1].last_epoch == 16
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert callback.applied_steps == 8 + 64 // size


@pytest.mark.parametrize("size", [4, 16, 32])
def test_b04_loaders_that_the_estimate_has_set_up_have_the_size_of_the_first_epoch(size: int) -> None:
    _, _, plain = fit(Scheduled(), ScriptedController(), epochs=2)
    callback, sizes, trainer = fit(Scheduled(), ScriptedController(epochs={0: Action(batch_size=size)}), epochs=2)
    assert sizes.sizes == [size] * (64 // size) * 2
    assert trainer.num_training_batches == 64 // size
    changes = [d for d in callback.history if d.knob == "batch_size"]
    assert [(d.before, d.applied, d.outcome) for d in changes] == [(8, size, "applied")]
    schedules = [each.lr_scheduler_configs[0].scheduler for each in (plain, trainer)]
    assert schedules[0].last_epoch == schedules[1].last_epoch == 16


def test_b04_loaders_that_the_estimate_has_set_up_are_left_alone_where_nothing_is_asked() -> None:
    def losses(policy: Any) -> list[float]:
        seed()
        module = Scheduled()
        trainer = quiet(max_epochs=2, callbacks=[AutoPrecisionCallback(policy, knobs=(), verbose=False)])
        trainer.fit(module, DataLoader(rows(64), batch_size=8, shuffle=True))
        return module.losses

    seed()
    plain = Scheduled()
    quiet(max_epochs=2).fit(plain, DataLoader(rows(64), batch_size=8, shuffle=True))
    assert losses(ScriptedController()) == plain.losses


class Fixed(Plain):
    """One cycle over a number of steps that the user has reckoned."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize(("count", "accumulate", "steps"), [(64, 1, 16), (64, 4, 4), (65, 1, 18), (65, 2, 10)])
@pytest.mark.parametrize("size", [4, 16])
def test_b04_one_cycle_under_another_size_from_the_first_epoch_on(
    count: int, accumulate: int, steps: int, size: int
) -> None:
    module = Fixed(steps)
    callback = AutoPrecisionCallback(ScriptedController(epochs={0: Action(batch_size=size)}), verbose=False)
    trainer = quiet(max_epochs=2, callbacks=[callback], accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(rows(count), batch_size=8))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == steps


@pytest.mark.parametrize("kind", [Scheduled, lambda: Fixed(32)], ids=["estimated", "reckoned"])
@pytest.mark.parametrize("accumulate", [None, 2])
@pytest.mark.parametrize("ended", [0, 1, 2])
def test_b10_resumes_at_each_end_of_an_epoch(kind: Any, accumulate: int | None, ended: int, tmp_path: Any) -> None:
    """Also where a size acts first in the resumed run, and where the loaders come before the checkpoint."""
    policy = ScriptedController(
        epochs={1: Action(batch_size=16, accumulate=accumulate), 2: Action(accumulate=accumulate and 1)}
    )

    def run(module: Plain, path: Any = None, **options: Any) -> Any:
        seed()
        callback, sizes = AutoPrecisionCallback(policy, verbose=False), Sizes()
        trainer = quiet(max_epochs=4, callbacks=[callback, sizes, *options.pop("others", ())], **options)
        trainer.fit(module, DataLoader(rows(64), batch_size=8), ckpt_path=path, weights_only=path and True)
        return callback, sizes, trainer.lr_scheduler_configs[0].scheduler

    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    module, again = kind(), kind()
    callback, sizes, schedule = run(module, others=(checkpoint,), enable_checkpointing=True)
    assert schedule.last_epoch == 32
    resumed, its_sizes, its_schedule = run(again, tmp_path / f"epoch={ended}.ckpt")
    assert its_sizes.sizes == sizes.sizes[-len(its_sizes.sizes) :]
    assert its_sizes.rates == sizes.rates[-len(its_sizes.rates) :]
    assert its_schedule.last_epoch == 32
    assert list(resumed.history) == list(callback.history)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("ended", [None, 1])
def test_b04_memory_that_runs_out_leaves_the_schedule_its_length(
    accumulate: int, ended: int | None, tmp_path: Any
) -> None:
    """The epoch in which it runs out keeps the batches that were counted; those after it have as many as at first."""

    class Both(Limited, Scheduled):
        pass

    def run(path: Any = None, **options: Any) -> Any:
        seed()
        callback = AutoPrecisionCallback(ScriptedController(epochs={1: Action(batch_size=16)}), verbose=False)
        others = options.pop("others", ())
        trainer = quiet(max_epochs=4, callbacks=[callback, *others], accumulate_grad_batches=accumulate, **options)
        module = Both(8)
        trainer.fit(module, DataLoader(rows(96), batch_size=8), ckpt_path=path, weights_only=path and True)
        return callback, module, trainer.lr_scheduler_configs[0].scheduler

    checkpoint = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    callback, module, schedule = run(others=(checkpoint,), enable_checkpointing=True)
    assert callback.lost_windows == 1
    # the window that was lost holds the schedule back by what its call stands for
    assert schedule.last_epoch == 4 * 12 // accumulate - 2
    if ended is not None:
        _, again, its_schedule = run(tmp_path / f"epoch={ended}.ckpt")
        assert its_schedule.last_epoch == schedule.last_epoch
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))


def test_b04_accumulation_is_followed_as_well() -> None:
    _, _, plain = fit(Scheduled(), ScriptedController(), epochs=2)
    _, _, trainer = fit(Scheduled(), ScriptedController(epochs={1: Action(accumulate=4)}), epochs=2)
    schedules = [each.lr_scheduler_configs[0].scheduler for each in (plain, trainer)]
    assert schedules[0].last_epoch == schedules[1].last_epoch == 16


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_the_learning_rate_follows_the_effective_batch(rule: Any, factor: float) -> None:
    """Size and accumulation count together, in the update alone."""
    config = AutoPrecisionConfig(batch=BatchConfig(learning_rate=rule), fused_step=False)
    script = ScriptedController(epochs={1: Action(batch_size=16, accumulate=2)})
    module = Plain(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    before: list[Tensor] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            weight = module.net[0].weight
            before[:] = [weight.detach().clone(), weight.grad.clone()]

    seed()
    callback, sizes, watch = (
        AutoPrecisionCallback(script, knobs=("batch_size",), config=config, verbose=False),
        Sizes(),
        Watch(),
    )
    trainer = quiet(max_epochs=2, callbacks=[callback, sizes, watch])
    trainer.fit(module, DataLoader(rows(64), batch_size=8))
    weight, grad = before
    layer: Any = module.net[0]
    assert torch.allclose(weight - 0.05 * factor * grad, layer.weight, atol=1e-7)
    assert set(sizes.rates) == {0.05}, "the user's value is what everybody else sees"


def test_sde_refuses_a_size_that_its_equations_do_not_allow() -> None:
    config = AutoPrecisionConfig(batch=BatchConfig(learning_rate="sde"))
    script = ScriptedController(epochs={1: Action(batch_size=64), 2: Action(batch_size=16)})
    module = Plain(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.99)))
    callback, sizes, _ = fit(module, script, epochs=3, config=config)
    assert sizes.sizes == [8] * 16 + [16] * 4
    refused = [d.reason for d in callback.history if d.outcome == "refused"]
    assert len(refused) == 1
    assert "rule 'sde'" in refused[0]


def test_a_run_does_not_go_back_over_a_change_of_the_batch() -> None:
    """Schedules of a copy count steps of its own size: a change takes a new copy at once."""
    config = AutoPrecisionConfig(rollback=RollbackConfig(every=1000))

    class Poisons(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 11:
                with torch.no_grad():
                    module.net[0].weight[0, 0] = torch.nan

    seed()
    script = ScriptedController(epochs={1: Action(batch_size=16)})
    callback = AutoPrecisionCallback(script, config=config, verbose=False)
    trainer = quiet(max_epochs=3, callbacks=[callback, Poisons()])
    with pytest.warns(UserWarning, match="The run goes back to its copy of window 8"):
        trainer.fit(Scheduled(), DataLoader(rows(64), batch_size=8))
    assert callback.undone_windows > 0
    assert callback.applied_steps + callback.skipped_steps + callback.undone_windows == 8 + 4 + 4
