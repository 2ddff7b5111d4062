"""Cases B-01 and B-02: a batch size that acts in the epoch it was asked for, whatever the loaders come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from autoprec import Action, AutoPrecisionCallback, ScriptedController
from tests.batches import Data, Numbers, Sees, Validated, fit, numbers, sizes, sizes_of
from tests.support import Ask, Climber, cpu, loader, scripted, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


# B-01: a change that never happens or happens late


def test_b01_sizes_seen_and_recorded_from_the_first_batch_of_the_epoch() -> None:
    module = Numbers()
    ap, sees, _ = fit(module, sizes_of(0, 16))
    assert sees.sizes == [[8] * 8, [16] * 4, [16] * 4]
    assert sees.batches == [8, 4, 4]
    assert sees.knob == [{8}, {16}, {16}]
    assert all(sorted(epoch) == list(range(64)) for epoch in sees.rows)
    assert [(d.step, d.before, d.requested, d.applied, d.outcome) for d in sizes(ap)] == [(8, 8, 16, 16, "applied")]
    assert module.calls == 1
    assert sees.every == [0, 0, 0]
    assert ap.batch_size == 16


def test_b01_first_epoch() -> None:
    ap, sees, _ = fit(Numbers(), sizes_of(16, 0, 4))
    assert sees.sizes == [[16] * 4, [16] * 4, [4] * 16]
    assert [(d.step, d.before, d.applied) for d in sizes(ap, "applied")] == [(0, 8, 16), (8, 16, 4)]


def test_b01_request_in_the_middle_of_an_epoch_waits_for_its_end() -> None:
    ap = scripted()
    _, sees, _ = fit(Numbers(), ap, others=(Ask(ap, "on_train_batch_end", 2, Action(batch_size=32)),))
    assert sees.sizes == [[8] * 8, [32] * 2, [32] * 2]
    assert [(d.step, d.applied, d.outcome) for d in sizes(ap)] == [(3, 8, "deferred"), (8, 32, "applied")]


@pytest.mark.parametrize(
    ("hook", "call", "changed"),
    [
        ("on_fit_start", 0, 0),
        ("on_train_epoch_end", 0, 1),
        ("on_train_epoch_start", 1, 2),
        ("on_train_start", 0, 1),
        ("on_validation_end", 0, 1),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_b01_request_from_any_hook(hook: str, call: int, changed: int, is_last: bool) -> None:
    ap = scripted()
    ask, sees = Ask(ap, hook, call, Action(batch_size=16)), Sees(ap)
    module = Validated()
    order: list[Callback] = [ap, sees, ask] if is_last or hook == "on_fit_start" else [ask, ap, sees]
    cpu(max_epochs=3, callbacks=order, num_sanity_val_steps=0).fit(module)
    assert sees.sizes == [[16] * 4 if epoch >= changed else [8] * 8 for epoch in range(3)]
    assert sizes(ap)[-1].outcome == "applied"
    assert sees.every == [0, 0, 0]


def test_b01_request_that_the_run_ends_before_is_never_called_applied() -> None:
    ap = scripted()
    ask = Ask(ap, "on_train_batch_end", 2, Action(batch_size=16))
    _, _, trainer = fit(Numbers(), ap, others=(ask,), max_epochs=1)
    assert [d.outcome for d in sizes(ap)] == ["deferred"]
    assert ap.batch_size == 8
    assert trainer.reload_dataloaders_every_n_epochs == 0


def test_b01_later_request_replaces_the_one_that_waits() -> None:
    ap = scripted(epochs=sizes_of(0, 4))
    _, sees, _ = fit(Numbers(), ap, others=(Ask(ap, "on_train_batch_end", 2, Action(batch_size=32)),), max_epochs=2)
    assert sees.sizes[1] == [4] * 16
    assert [(d.requested, d.outcome) for d in sizes(ap)] == [(32, "deferred"), (32, "refused"), (4, "applied")]


@pytest.mark.parametrize("bad", [0, -3])
def test_b01_nonsense_is_refused(bad: int) -> None:
    ap, sees, _ = fit(Numbers(), {1: Action(batch_size=bad)}, max_epochs=2)
    assert [d.outcome for d in sizes(ap)] == ["refused"]
    assert "must be >= 1" in sizes(ap)[0].reason
    assert sees.sizes == [[8] * 8] * 2


def test_b01_nothing_changes_for_runs_that_do_not_ask() -> None:
    """Shuffled batches come out as without the callback, and loaders are never set up anew."""

    def run(*callbacks: Callback) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        module = Numbers(shuffle=True)
        cpu(max_epochs=3, callbacks=list(callbacks)).fit(module)
        return weights_of(module), torch.get_rng_state()

    plain, ours = run(), run(AutoPrecisionCallback(policy="rule", knobs=("precision", "batch_size"), verbose=False))
    assert torch.equal(plain[1], ours[1])
    assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[0], strict=True))


def test_b01_loaders_strategy_and_trainer_are_as_found_after_fit() -> None:
    data = DataLoader(numbers(64), 8, shuffle=True)
    sampler = data.batch_sampler
    _, _, trainer = fit(Numbers(), sizes_of(0, 16), data)
    assert (data.batch_size, type(data.batch_sampler), data.batch_sampler) == (8, BatchSampler, sampler)
    assert vars(data.batch_sampler).keys() == {"sampler", "batch_size", "drop_last"}
    assert "process_dataloader" not in vars(trainer.strategy)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_epoch_end", "on_train_epoch_start"])
def test_b01_loaders_are_as_found_after_an_exception(hook: str) -> None:
    class Raises(Callback):
        def __init__(self) -> None:
            setattr(self, hook, self._raise)

        def _raise(self, trainer: Trainer, *args: Any) -> None:
            if trainer.current_epoch == 1:
                raise ZeroDivisionError

    ap, module, data = scripted(epochs=sizes_of(0, 16, 32)), Numbers(), Data()
    trainer: Any = cpu(max_epochs=3, callbacks=[ap, Raises()])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, datamodule=data)
    assert trainer.reload_dataloaders_every_n_epochs == 0
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "train_dataloader" not in vars(module)
    assert "train_dataloader" not in vars(data)
    assert trainer.train_dataloader is None or trainer.train_dataloader.batch_size == 8


def test_b01_two_fits_in_a_row() -> None:
    ap, module = scripted(epochs=sizes_of(0, 16)), Numbers()
    trainer = cpu(max_epochs=2, callbacks=[ap])
    trainer.fit(module)
    sees = Sees()
    trainer = cpu(max_epochs=2, callbacks=[ap, sees])
    trainer.fit(module)
    assert sees.sizes == [[8] * 8, [16] * 4]
    assert len(sizes(ap)) == 1


def test_b01_policy_moves_the_size_by_factors_of_two() -> None:
    policy = Climber()
    ap = AutoPrecisionCallback(policy=policy, knobs=("batch_size",), interval=2, verbose=False)
    _, sees, _ = fit(Numbers(), ap)
    assert [set(epoch) for epoch in sees.sizes] == [{8}, {16}, {32}]
    assert [(d.requested, d.outcome) for d in sizes(ap)] == [
        (16, "deferred"),
        (16, "applied"),
        (32, "deferred"),
        (32, "applied"),
        (64, "deferred"),
    ]


# B-02: where loaders come from


@pytest.mark.parametrize("source", ["module", "datamodule", "fit", "dict", "list", "combined"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_b02_every_source_of_loaders(source: str, drop_last: bool) -> None:
    data: Any = DataLoader(numbers(64), 8, shuffle=True, drop_last=drop_last)
    module = Numbers(drop_last=drop_last)
    given = {
        "module": None,
        "datamodule": Data(drop_last=drop_last),
        "fit": data,
        "dict": {"a": data, "b": DataLoader(numbers(32), 4)},
        "list": [data, DataLoader(numbers(32), 4)],
        "combined": CombinedLoader([data, DataLoader(numbers(16), 4)], "min_size"),
    }[source]
    if source == "datamodule":
        ap, sees = scripted(epochs=sizes_of(0, 16)), Sees()
        cpu(max_epochs=3, callbacks=[ap, sees]).fit(module, datamodule=given)
        assert given.calls == 1
    else:
        ap, sees, _ = fit(module, sizes_of(0, 16), given)
    batches = 4 if source == "combined" else 8
    assert sees.sizes == [[8] * batches, [16] * (batches // 2), [16] * (batches // 2)]
    assert sees.batches == [batches, batches // 2, batches // 2]
    assert [d.outcome for d in sizes(ap)] == ["applied"]


def test_b02_combined_loader_from_the_module_keeps_its_mode() -> None:
    class Combined(Numbers):
        def train_dataloader(self) -> Any:
            self.calls += 1
            return CombinedLoader({"a": DataLoader(numbers(64), 8), "b": DataLoader(numbers(16), 4)}, "min_size")

    module = Combined()
    _, sees, _ = fit(module, sizes_of(0, 16))
    assert sees.sizes == [[8] * 4, [16] * 2, [16] * 2]
    assert module.calls == 1


def test_b02_nothing_of_the_loader_is_rebuilt() -> None:
    generator = torch.Generator().manual_seed(4)
    data = DataLoader(
        numbers(64),
        8,
        shuffle=True,
        generator=generator,
        collate_fn=torch.stack,
        num_workers=2,
        persistent_workers=True,
    )
    dataset, sampler = data.dataset, data.sampler
    seen: list[Any] = []

    class Looks(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(trainer.train_dataloader)

    _, sees, _ = fit(Numbers(), sizes_of(0, 16), data, others=(Looks(),))
    assert sees.sizes == [[8] * 8, [16] * 4, [16] * 4]
    assert all(each is data for each in seen)
    assert (data.dataset, data.sampler, data.generator) == (dataset, sampler, generator)
    assert all(sorted(epoch) == list(range(64)) for epoch in sees.rows)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_b02_the_users_own_reloads_keep_their_schedule(every: int) -> None:
    def run(script: Mapping[int, Action]) -> list[int]:
        calls: list[int] = []

        class Noted(Numbers):
            def train_dataloader(self) -> Any:
                calls.append(self.trainer.current_epoch)
                return super().train_dataloader()

        _, sees, _ = fit(Noted(), script, max_epochs=7, reload_dataloaders_every_n_epochs=every)
        assert sees.every == [every] * 7
        if script:
            assert [set(epoch) for epoch in sees.sizes] == [{8}, {16}, {16}, {16}, {16}, {32}, {32}]
        return calls

    assert run({1: Action(batch_size=16), 5: Action(batch_size=32)}) == run({})


def test_b02_validation_loaders_are_not_reloaded() -> None:
    class Counted(Validated):
        asked = 0

        def val_dataloader(self) -> Any:
            type(self).asked += 1
            return super().val_dataloader()

    fit(Counted(), sizes_of(0, 16, 4))
    assert Counted.asked == 1


def test_b02_foreign_stand_ins_stay() -> None:
    module = Numbers()
    module.train_dataloader = lambda: loader(numbers(64), 8)  # type: ignore[method-assign]
    mine = module.train_dataloader
    ap = scripted(epochs=sizes_of(0, 16))
    trainer = cpu(max_epochs=2, callbacks=[ap])
    seen: list[Any] = []
    original = trainer.strategy.process_dataloader

    def stand_in(dataloader: object) -> object:
        seen.append(dataloader)
        return original(dataloader)

    trainer.strategy.process_dataloader = stand_in  # type: ignore[method-assign]
    trainer.fit(module)
    assert module.train_dataloader is mine
    assert trainer.strategy.process_dataloader is stand_in
    assert len(seen) == 2
    assert sizes(ap, "applied")


def test_b01_request_after_the_first_batches_were_counted() -> None:
    """A size that the loaders have got already is on record as applied; the later request waits."""
    ap = scripted(epochs=sizes_of(32))
    ask, sees = Ask(ap, "on_train_start", 0, Action(batch_size=16)), Sees(ap)
    cpu(max_epochs=2, callbacks=[ask, ap, sees]).fit(Numbers())
    assert sees.sizes == [[32] * 2, [16] * 4]
    assert [(d.requested, d.outcome) for d in sizes(ap)] == [(32, "applied"), (16, "deferred"), (16, "applied")]


@pytest.mark.filterwarnings("ignore:.*batch size.*:UserWarning")
def test_b01_after_a_tuner_has_set_up_the_loaders(tmp_path: Path) -> None:
    """The first epoch's batches are counted by then, and are counted again."""

    class Tuned(Numbers):
        batch_size = 4

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, self.batch_size)

    ap = scripted(epochs=sizes_of(16, 0, 32))
    finder = BatchSizeFinder(steps_per_trial=1, init_val=8, max_trials=1)
    _, sees, _ = fit(Tuned(), ap, others=(finder,), default_root_dir=tmp_path)
    assert [set(epoch) for epoch in sees.sizes] == [{16}, {16}, {32}]
    assert [(d.before, d.requested, d.outcome) for d in sizes(ap)] == [(8, 16, "applied"), (16, 32, "applied")]


def test_b01_map_with_a_batch_size(tmp_path: Path) -> None:
    ap, _, _ = fit(Numbers(), sizes_of(0, 16))
    ap.save_map(tmp_path / "map.yaml")
    again = AutoPrecisionCallback(policy=tmp_path / "map.yaml", verbose=False)
    _, sees, _ = fit(Numbers(), again, max_epochs=2)
    assert sees.sizes == [[16] * 4] * 2
    plain, _, _ = fit(Numbers(), {})
    plain.save_map(tmp_path / "plain.yaml")
    assert "batch_size" not in (tmp_path / "plain.yaml").read_text()


def test_b01_controller_that_asks_nothing_is_asked_once_for_each_epoch() -> None:
    class Notes(ScriptedController):
        asked: list[Any] = []

        def initial_map(self) -> Mapping[str, str] | None:
            self.asked.append("map")
            return super().initial_map()

        def epoch_action(self, epoch: int) -> Action | None:
            self.asked.append(epoch)
            return super().epoch_action(epoch)

    fit(Numbers(), AutoPrecisionCallback(policy=Notes(), verbose=False))
    assert Notes.asked == ["map", 0, 1, 2]


def test_b01_rest_of_an_epochs_action_acts_when_the_epoch_starts() -> None:
    ap = scripted(epochs={1: Action(batch_size=16, clip=5.0, precision={"net": "bf16"})})
    clips: list[float] = []

    class Looks(Callback):
        def on_train_epoch_end(self, *args: Any) -> None:
            clips.append(ap.clip_threshold)

    fit(Numbers(), ap, others=(Looks(),), max_epochs=2)
    assert clips[0] != 5.0
    assert clips[1] == 5.0
    assert {d.step for d in ap.history if d.reason == "epoch 1"} == {8}
    assert {d.knob for d in ap.history if d.reason == "epoch 1"} == {"batch_size", "clip", "precision"}
