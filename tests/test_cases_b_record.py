"""What follows a change of the batch is on record once, and as exact with several loaders as with one.

Time budget: 10 s.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader

from autoprec import Action, AutoPrecisionConfig, BatchConfig
from tests.batches import Numbers, fit, numbers
from tests.support import cpu, rows, scripted

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]


def config(rule: Any) -> AutoPrecisionConfig:
    return AutoPrecisionConfig(batch=BatchConfig(learning_rate=rule))


@pytest.mark.parametrize(("rule", "gain"), [("linear", 4.0), ("sqrt", 2.0), ("none", None)])
@pytest.mark.parametrize("action", [Action(batch_size=32), Action(accumulate=4), Action(batch_size=16, accumulate=2)])
def test_b04_a_learning_rate_that_follows_the_batch_is_on_record(rule: Any, gain: float | None, action: Action) -> None:
    ap = scripted(epochs={1: action, 2: Action(batch_size=8, accumulate=1)}, config=config(rule), verbose=False)
    fit(Numbers(), ap, max_epochs=3)
    found = rows(ap.history, "learning_rate")
    if gain is None:
        assert not found
        return
    assert [row.before for row in found] == [1.0, *[row.applied for row in found[:-1]]]
    assert max(float(row.applied) for row in found) == gain  # type: ignore[arg-type]
    assert found[-1].applied == 1.0
    assert all(row.outcome == "applied" and f"rule {rule}" in row.reason for row in found)
    causes = {row.step for row in ap.history if row.knob in ("batch_size", "accumulate") and row.outcome == "applied"}
    assert {row.step for row in found} <= causes


def test_b10_a_resumed_run_records_no_learning_rate_again(tmp_path: Path) -> None:
    def make() -> Any:
        return scripted(epochs={1: Action(batch_size=16, accumulate=2)}, config=config("linear"), verbose=False)

    through = make()
    files = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True)
    fit(Numbers(), through, others=(files,), max_epochs=4, enable_checkpointing=True)
    resumed = make()
    fit(Numbers(), resumed, max_epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert list(resumed.history) == list(through.history)
    assert len(rows(resumed.history, "learning_rate")) == 2


def test_b10_another_accumulation_of_the_resumed_trainer_has_one_row_for_each_outcome(tmp_path: Path) -> None:
    files = ModelCheckpoint(tmp_path, "saved", save_top_k=1, every_n_train_steps=5)
    fit(Numbers(), scripted(verbose=False), others=(files,), max_epochs=1, enable_checkpointing=True, max_steps=5)
    ap = scripted(verbose=False)
    fit(Numbers(), ap, ckpt_path=tmp_path / "saved.ckpt", max_epochs=2, accumulate_grad_batches=4)
    found = [(row.before, row.requested, row.applied, row.outcome) for row in rows(ap.history, "accumulate")]
    assert found == [(1, 4, 1, "deferred"), (1, 4, 4, "applied")]


def test_b10_a_number_that_the_run_has_moved_counts_and_has_one_row(tmp_path: Path) -> None:
    def make() -> Any:
        return scripted({0: Action(accumulate=2)}, verbose=False)

    files = ModelCheckpoint(tmp_path, "saved", save_top_k=1, every_n_train_steps=2)
    fit(Numbers(), make(), others=(files,), max_epochs=1, enable_checkpointing=True, max_steps=2)
    ap = make()
    fit(Numbers(), ap, ckpt_path=tmp_path / "saved.ckpt", max_epochs=2, accumulate_grad_batches=4)
    found = [(row.before, row.applied, row.outcome) for row in rows(ap.history, "accumulate")]
    assert found == [(1, 2, "applied"), (4, 2, "applied")]


class Pairs(Numbers):
    """Two loaders, and a schedule for the steps that are estimated."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        self.schedule: Any = None

    def train_dataloader(self) -> Any:
        pair = {"a": DataLoader(numbers(72), 8), "b": DataLoader(numbers(52), 4)}
        return CombinedLoader(pair, self.mode)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch if isinstance(batch, dict) else {"a": batch}
        return super().training_step(next(each for each in batch.values() if each is not None), batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.01)
        total = int(self.trainer.estimated_stepping_batches)
        self.schedule = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule, "interval": "step"}}


@pytest.mark.parametrize("limit", [1.0, 0.7, 6])
@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size"])
def test_b09_schedules_of_several_loaders_end_where_they_would_have_from_epoch_0_on(mode: Any, limit: Any) -> None:
    """The numbers of batches are not in the ratio of the sizes: 72 samples are 9 batches of 8 and 5 of 16."""
    module = Pairs(mode)
    ap = scripted(epochs={0: Action(batch_size=16)}, knobs=("batch_size",), verbose=False)
    cpu(callbacks=[ap], max_epochs=2, limit_train_batches=limit).fit(module)
    assert ap.batch_size == 16
    assert module.schedule.last_epoch == module.schedule.total_steps
    assert math.isfinite(float(module.schedule.get_last_lr()[0]))
