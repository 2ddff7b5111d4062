"""Case B-10, the proof of a size, and accumulation at aligned boundaries (the rule of case A-05)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, BatchConfig, Decision, ScriptedController
from tests.batches import Numbers, fit, numbers, sizes, sizes_of
from tests.support import Ask, Manual, cpu, reported, rows, scripted

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


def steering_of(ap: AutoPrecisionCallback) -> Any:
    assert ap.steering is not None
    return ap.steering


# B-10: resume


def saved(
    folder: Path, script: AutoPrecisionCallback | Mapping[int, Action], when: Mapping[str, Any], **options: Any
) -> Path:
    """Trains and returns the only checkpoint of that run."""
    checkpoint = ModelCheckpoint(folder, "saved", save_top_k=1, **when)
    fit(options.pop("module", Numbers()), script, others=(checkpoint,), enable_checkpointing=True, **options)
    return folder / "saved.ckpt"


END: dict[str, Any] = {"every_n_epochs": 1, "save_on_train_epoch_end": True}


def test_b10_end_of_epoch_checkpoint_resumes_with_the_new_size(tmp_path: Path) -> None:
    script = sizes_of(0, 16, 4)
    through, sees, _ = fit(Numbers(), script)
    path = saved(tmp_path, script, END, max_epochs=1)
    ap, resumed, _ = fit(Numbers(), script, ckpt_path=path)
    assert resumed.sizes == sees.sizes[1:]
    assert list(ap.history) == list(through.history)
    assert ap.batch_size == through.batch_size


def test_b10_end_of_epoch_checkpoint_of_a_run_that_counts_steps(tmp_path: Path) -> None:
    """Lightning itself draws one batch more in the epoch that was over; the new size acts in the next all the same."""
    script = sizes_of(0, 16, 4)
    path = saved(tmp_path, script, END, max_steps=8, max_epochs=-1)
    ap, sees, _ = fit(Numbers(), script, ckpt_path=path, max_steps=16, max_epochs=-1)
    assert sees.sizes == [[8], [16] * 4, [4] * 3]
    assert [(d.step, d.applied, d.outcome) for d in sizes(ap)] == [(9, 16, "applied"), (13, 4, "applied")]


@pytest.mark.parametrize("pending", ["script", "request"])
def test_b10_pending_size_in_an_end_of_epoch_checkpoint(tmp_path: Path, pending: str) -> None:
    """The checkpoint is written while the run goes on, so that the next epoch's size has been asked for."""

    class Once(ScriptedController):
        asked: list[int] = []

        def epoch_action(self, epoch: int) -> Action | None:
            self.asked.append(epoch)
            return super().epoch_action(epoch)

    def make() -> tuple[AutoPrecisionCallback, tuple[Callback, ...]]:
        ap = AutoPrecisionCallback(policy=Once(epochs=sizes_of(0, 16) if pending == "script" else {}))
        ask = Ask(ap, "on_train_batch_end", 3, Action(batch_size=16))
        return ap, (ask,) if pending == "request" else ()

    ap, others = make()
    first = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, **END)
    through, sees, _ = fit(Numbers(), ap, others=(*others, first), enable_checkpointing=True)
    assert sees.sizes == [[8] * 8, [16] * 4, [16] * 4]
    assert Once.asked == [0, 1, 2]
    Once.asked.clear()
    resumed, again, _ = fit(Numbers(), make()[0], ckpt_path=tmp_path / "epoch=0.ckpt")
    assert again.sizes == sees.sizes[1:]
    assert Once.asked == [2]
    assert list(resumed.history) == list(through.history)


@pytest.mark.parametrize("bs", [8, 16, 5])
def test_b10_size_of_the_checkpoint_counts(tmp_path: Path, bs: int) -> None:
    path = saved(tmp_path, sizes_of(0, 16), END, max_epochs=2)
    ap, sees, _ = fit(Numbers(bs=bs), {}, ckpt_path=path)
    assert sees.sizes == [[16] * 4]
    assert ap.batch_size == 16
    news = [d for d in sizes(ap) if "checkpoint" in d.reason]
    assert [(d.before, d.applied) for d in news] == ([(5, 16)] if bs == 5 else [])


def test_b10_middle_of_an_epoch_says_what_repeats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = reported(caplog, monkeypatch)
    path = saved(tmp_path, {}, {"every_n_train_steps": 3}, max_steps=3, max_epochs=-1)
    ap, sees, trainer = fit(Numbers(bs=16), {}, ckpt_path=path, max_epochs=2)
    assert sees.sizes == [[8] * 5, [16] * 4], "the epoch is ended as it was begun; then the user's own size counts"
    assert sees.rows[0] == list(range(40))
    assert trainer.global_step == 12
    said = [line for line in text().splitlines() if "cannot go on there" in line]
    assert len(said) == 1
    assert "24 of 64 samples" in said[0]
    assert "its first 24 samples are used again" in said[0]
    assert "24 not at all" in said[0]
    assert [(d.before, d.applied) for d in sizes(ap)] == [(16, 8), (8, 16)]
    assert steering_of(ap).batch_factor == 1.0


def test_b10_resumable_loader_takes_its_state_at_the_saved_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Resumable(DataLoader[Any]):
        """Skips what was seen, counted in batches of the size that it has when it is asked to."""

        done = skip = 0

        def __iter__(self) -> Any:
            batches = super().__iter__()
            skip, self.skip = self.skip, 0
            self.done = 0
            for batch in batches:
                self.done += 1
                if self.done > skip:
                    yield batch

        def state_dict(self) -> dict[str, int]:
            return {"samples": self.done * int(self.batch_size or 0)}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.skip = state["samples"] // int(self.batch_size or 1)

    text = reported(caplog, monkeypatch)
    module = Numbers()
    checkpoint = ModelCheckpoint(tmp_path, "saved", every_n_train_steps=10)
    options: dict[str, Any] = {"enable_checkpointing": True, "max_steps": 10, "max_epochs": -1}
    fit(module, sizes_of(0, 16), Resumable(numbers(64), 8), others=(checkpoint,), **options)
    ap, sees, _ = fit(Numbers(), sizes_of(0, 16), Resumable(numbers(64), 8), ckpt_path=tmp_path / "saved.ckpt")
    assert sees.rows[0] == list(range(32, 64))
    assert sees.sizes == [[16] * 2, [16] * 4]
    assert "cannot go on there" not in text()


def test_b10_request_of_the_middle_waits_for_the_end_of_the_resumed_epoch(tmp_path: Path) -> None:
    ap = scripted()
    checkpoint = ModelCheckpoint(tmp_path, "saved", every_n_train_steps=3)
    ask = Ask(ap, "on_train_batch_start", 1, Action(batch_size=16))
    fit(Numbers(), ap, others=(ask, checkpoint), enable_checkpointing=True, max_steps=3, max_epochs=-1)
    resumed, sees, _ = fit(Numbers(), {}, ckpt_path=tmp_path / "saved.ckpt", max_epochs=2)
    assert sees.sizes == [[8] * 5, [16] * 4]
    assert [d.outcome for d in sizes(resumed)] == ["deferred", "applied"]


def test_b10_checkpoint_of_a_validation_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    from tests.batches import Validated

    path = saved(tmp_path, sizes_of(0, 16), {"monitor": "val_loss"}, module=Validated(), max_epochs=1)
    ap, sees, _ = fit(Validated(), sizes_of(0, 16), ckpt_path=path, max_epochs=2)
    assert sees.sizes[-1] == [16] * 4
    assert [d.outcome for d in sizes(ap)] == ["applied"]


def test_b10_checkpoint_of_the_last_batch_of_an_epoch(tmp_path: Path) -> None:
    """Lightning goes on with the next epoch and its batches are counted before anybody is asked: none is left out."""
    path = saved(tmp_path, sizes_of(0, 16), {"every_n_train_steps": 8}, max_steps=8, max_epochs=-1)
    ap, sees, trainer = fit(Numbers(), sizes_of(0, 16, 16), ckpt_path=path, max_epochs=4)
    assert all(sorted(epoch) == list(range(64)) for epoch in sees.rows)
    assert sees.sizes[-1] == [16] * 4
    assert trainer.current_epoch == 4


def test_b10_checkpoint_of_a_version_without_sizes(tmp_path: Path) -> None:
    path = saved(tmp_path, {}, END, max_epochs=1)
    checkpoint = torch.load(path, weights_only=True)
    plugin = checkpoint["AutoPrecision"]
    del plugin["knobs"]["batch_size"], plugin["knobs"]["accumulation"], plugin["lost_samples"]
    for state in checkpoint["callbacks"].values():
        state.pop("asked_ahead", None)
    torch.save(checkpoint, path)
    ap, sees, _ = fit(Numbers(bs=16), sizes_of(0, 0, 4), ckpt_path=path)
    assert sees.sizes == [[16] * 4, [4] * 16]


# a size is proven by one applied step


def test_b06_size_is_to_be_proven_by_a_step() -> None:
    reasons: list[str] = []
    ap = scripted(epochs=sizes_of(0, 16))

    class Looks(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            reasons.extend(d.reason for d in sizes(ap))

    fit(Numbers(), ap, others=(Looks(),), max_epochs=2)
    assert reasons[0].endswith("to be proven by a step")
    assert set(reasons[1:]) == {"epoch 1"}


class Fails(Callback):
    """Says in a given batch that it did not fit into memory, as the guard would."""

    def __init__(self, ap: AutoPrecisionCallback, *batches: int) -> None:
        self.ap, self.batches = ap, batches
        self.count = -1
        self.answers: list[bool] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: pl.LightningModule, batch: Tensor, *args: Any) -> None:
        self.count += 1
        if self.count in self.batches:
            self.answers.append(steering_of(self.ap).lower_batch_size(len(batch)))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_b06_unproven_size_is_lowered_in_the_middle_of_an_epoch(drop_last: bool, workers: int) -> None:
    ap = scripted(epochs=sizes_of(0, 32, 0, 32))
    fails = Fails(ap, 8 if drop_last else 9)
    data = DataLoader(numbers(130), 16, drop_last=drop_last, num_workers=workers, shuffle=True)
    _, sees, _ = fit(Numbers(), ap, data, others=(fails,), max_epochs=4)
    assert fails.answers == [True]
    assert len(sees.sizes[1]) == (4 if drop_last else 5)
    assert sum(sees.sizes[1]) + ap.lost_samples == (128 if drop_last else 130)
    if not workers:  # else all batches of the epoch were drawn before
        assert set(sees.sizes[1][1:]) == {16}
        assert ap.lost_samples > 0
    assert set(sees.sizes[2]) <= {16, 2}
    assert len(sees.sizes[2]) == len(sees.sizes[0])
    assert sees.sizes[3] == sees.sizes[2]
    assert [(d.before, d.applied, d.outcome) for d in sizes(ap)] == [
        (16, 32, "applied"),
        (32, 16, "applied"),
        (16, 16, "limited"),
    ]
    assert "did not fit into memory" in sizes(ap)[-1].reason


@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")
@pytest.mark.parametrize("interval", [None, 0.5])
def test_b07_an_epoch_in_which_memory_ran_out_ends_where_it_would_have_ended(
    tmp_path: Path, interval: float | None
) -> None:
    """Resumed after memory has run out: the same number of batches, counters and validations, and the next epoch."""
    options: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 0}
    if interval is not None:
        options["val_check_interval"] = interval

    def make() -> tuple[AutoPrecisionCallback, Counts, tuple[Callback, ...]]:
        ap, counts = scripted(epochs=sizes_of(0, 32)), Counts()
        files = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        return ap, counts, (files, counts)

    ap, counts, others = make()
    fails = Fails(ap, 8)
    fit(Numbers(128, 16), ap, others=(*others, fails), enable_checkpointing=True, **options)
    assert fails.answers == [True]
    again, resumed, others = make()
    path = tmp_path / "step=11.ckpt"
    fit(Numbers(128, 16), again, others=others, enable_checkpointing=True, ckpt_path=path, **options)
    assert resumed.lengths == counts.lengths[1:] == [4, 8]
    assert resumed.steps[-1] == counts.steps[-1] == 20
    assert resumed.validations == [step for step in counts.validations if step > 11]
    assert again.lost_samples == ap.lost_samples > 0


class Counts(Callback):
    """Batches of each epoch, and the steps at which epochs and validations ended."""

    def __init__(self) -> None:
        self.lengths: list[float] = []
        self.steps: list[int] = []
        self.validations: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self.lengths.append(trainer.num_training_batches)
        self.steps.append(trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self.validations.append(trainer.global_step)


def test_b06_lost_samples_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = reported(caplog, monkeypatch)

    def make() -> tuple[AutoPrecisionCallback, tuple[Callback, ...]]:
        ap = scripted(epochs=sizes_of(0, 32, 32))
        return ap, (Fails(ap, 8), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, **END))

    ap, others = make()
    _, sees, _ = fit(Numbers(128, 16), ap, others=others, enable_checkpointing=True)
    assert ap.lost_samples == 128 - 32 - 3 * 16
    assert "batch      size 16, 1 micro-batch a step (effective batch 1 x the first)" in text()
    assert "48 samples did not train" in text()
    resumed, again, _ = fit(Numbers(128, 16), scripted(epochs=sizes_of(0, 32, 32)), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert again.sizes == sees.sizes[2:] == [[16] * 8]
    assert resumed.lost_samples == ap.lost_samples
    assert list(resumed.history) == list(ap.history)
    assert [d.outcome for d in sizes(resumed)] == ["applied", "applied", "limited"]


def test_b06_proven_size_has_nothing_to_go_back_to() -> None:
    ap = scripted(epochs=sizes_of(0, 16))
    fails = Fails(ap, 0, 3, 9)
    _, sees, _ = fit(Numbers(), ap, others=(fails,))
    assert fails.answers == [False, False, False]
    assert ap.lost_samples == 0
    assert sees.sizes == [[8] * 8, [16] * 4, [16] * 4]


# accumulation


def aligned(ap: AutoPrecisionCallback) -> list[Decision]:
    return rows(ap.history, "accumulate")


class Steps(Callback):
    """Notes after how many batches steps are taken, and the gradients before them."""

    def __init__(self) -> None:
        self.batches = 0
        self.steps: list[int] = []
        self.gradients: list[Tensor] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.batches += 1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.steps.append(self.batches)
        self.gradients.append(next(pl_module.parameters()).grad.clone())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("old", "new", "at"), [(1, 4, 1), (2, 3, 1), (2, 4, 1), (4, 2, 1), (3, 1, 1), (1, 3, 0), (2, 5, 2)]
)
def test_a05_accumulation_changes_at_an_aligned_batch(old: int, new: int, at: int) -> None:
    """Gradients are those of the same batches, each in one window exactly."""
    ap = scripted({at: Action(accumulate=new)})
    steps = Steps()
    module = Numbers(160, 8)
    start = [p.detach().clone() for p in module.parameters()]
    cpu(callbacks=[ap, steps], accumulate_grad_batches=old).fit(module)
    switch = next(done for done in range(at * old, 21) if done % old == 0 and done % new == 0)
    expected = [*range(old, switch + 1, old), *range(switch + new, 21, new)]
    expected += [] if expected[-1] == 20 else [20]
    assert steps.steps == expected
    for begin, end, gradient in zip([0, *expected], expected, steps.gradients, strict=False):
        parts = old if end <= switch else new
        mean = sum(numbers(160)[8 * i : 8 * i + 8].mean(0) for i in range(begin, end)) / parts
        torch.testing.assert_close(gradient[0], mean)
    assert len(start) == 2
    outcomes = [d.outcome for d in aligned(ap)]
    assert outcomes == (["applied"] if switch == at * old else ["deferred", "applied"])
    assert aligned(ap)[-1].applied == new


def test_a05_accumulation_that_is_never_aligned_waits_for_the_next_epoch() -> None:
    ap = scripted({1: Action(accumulate=7)})
    steps = Steps()
    cpu(callbacks=[ap, steps], accumulate_grad_batches=2, max_epochs=2).fit(Numbers())
    assert steps.steps == [2, 4, 6, 8, 15, 16]
    assert [(d.step, d.outcome) for d in aligned(ap)] == [(1, "deferred"), (4, "applied")]


def test_a05_accumulation_requested_inside_a_window() -> None:
    ap = scripted()
    steps = Steps()
    ask = Ask(ap, "on_before_backward", 0, Action(accumulate=4))
    trainer = cpu(callbacks=[ap, steps, ask], accumulate_grad_batches=2)
    trainer.fit(Numbers())
    assert steps.steps == [2, 4, 8]
    assert [(d.step, d.outcome) for d in aligned(ap)] == [(0, "deferred"), (2, "applied")]
    assert trainer.accumulate_grad_batches == 2


def test_a05_both_at_an_epoch_and_the_factor() -> None:
    factors: list[float] = []
    ap = scripted(epochs={1: Action(batch_size=16, accumulate=3), 2: Action(accumulate=1)})

    class Looks(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            factors.append(steering_of(ap).batch_factor)

    steps = Steps()
    _, sees, _ = fit(Numbers(), ap, others=(Looks(), steps))
    assert factors == [1.0] * 8 + [6.0] * 4 + [2.0] * 4
    assert steps.steps == [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("value", [0, -1])
def test_a05_nonsense_accumulation_is_refused(value: int) -> None:
    ap = scripted({1: Action(accumulate=value)})
    cpu(callbacks=[ap]).fit(Numbers())
    assert [(d.outcome, d.applied) for d in aligned(ap)] == [("refused", 1)]


@pytest.mark.parametrize(("config", "most"), [({}, 8), ({"max_accumulate": 3}, 3)])
def test_a05_accumulation_is_bounded(config: dict[str, Any], most: int) -> None:
    ap = scripted({0: Action(accumulate=100)}, config=AutoPrecisionConfig(batch=BatchConfig(**config)))
    cpu(callbacks=[ap]).fit(Numbers())
    assert [(d.outcome, d.applied) for d in aligned(ap)] == [("limited", most)]


def test_a05_accumulation_is_off_where_others_have_it() -> None:
    script = {0: Action(accumulate=2)}
    ap = scripted(script)
    cpu(callbacks=[ap]).fit(Manual(nn.Linear(4, 1), numbers(64)))
    assert "manual optimization" in aligned(ap)[0].reason
    ap, steps = scripted(script), Steps()
    cpu(callbacks=[ap, steps, GradientAccumulationScheduler({0: 4})]).fit(Numbers())
    assert "`GradientAccumulationScheduler`" in aligned(ap)[0].reason
    assert steps.steps == [4, 8]
    ap = scripted(script, knobs=("precision",))
    cpu(callbacks=[ap]).fit(Numbers())
    assert "it is not in `knobs`" in aligned(ap)[0].reason


def test_a05_accumulation_of_a_checkpoint_counts(tmp_path: Path) -> None:
    script = {4: Action(accumulate=2)}
    checkpoint = ModelCheckpoint(tmp_path, "saved", every_n_epochs=1, save_on_train_epoch_end=True)
    fit(Numbers(), scripted(script), others=(checkpoint,), enable_checkpointing=True, max_epochs=1)
    steps, through = Steps(), Steps()
    _, _, trainer = fit(Numbers(), scripted(script), others=(steps,), ckpt_path=tmp_path / "saved.ckpt", max_epochs=2)
    assert steps.steps == [2, 4, 6, 8]
    assert trainer.accumulate_grad_batches == 1
    ap = scripted(script)
    fit(Numbers(), ap, others=(through,), ckpt_path=tmp_path / "saved.ckpt", max_epochs=2, accumulate_grad_batches=4)
    assert through.steps == [2, 4, 6, 8]
    assert [(d.before, d.applied) for d in aligned(ap)] == [(1, 2), (4, 2)]
    assert steering_of(ap).batch_factor == 2.0


def test_a05_further_reasons_refuse_a_change() -> None:
    ap = scripted(epochs={1: Action(batch_size=16, accumulate=2)})

    class Forbids(Callback):
        def on_train_start(self, *args: Any) -> None:
            knobs = steering_of(ap).knobs
            knobs.batch_size.refusal = knobs.accumulation.refusal = lambda k: f"no schedule would bear {k:g}"

    _, sees, _ = fit(Numbers(), ap, others=(Forbids(),), max_epochs=2)
    assert sees.sizes == [[8] * 8] * 2
    (size,), (number,) = sizes(ap), aligned(ap)
    assert size.outcome == number.outcome == "refused"
    assert size.reason == number.reason == "no schedule would bear 2"
