"""Cases B-03, B-05, B-08 and B-09: sizes that are not legal, and loaders that cannot be resized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from autoprec import Action, AutoPrecisionCallback, AutoPrecisionConfig, BatchConfig, ScriptedController
from autoprec.encoding import feature
from tests.batches import Numbers, Validated, fit, numbers, sizes, sizes_of
from tests.small_fits import StatefulLoader
from tests.support import Climber, Task, cpu, rows, scripted, squares

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning")


# B-03: a remainder of one sample


class Normed(Task):
    """Linear, batch normalisation, Linear."""

    def __init__(self, n: int, bs: int, norm: nn.Module | None = None, **options: Any) -> None:
        net = nn.Sequential(nn.Linear(4, 4), norm or nn.BatchNorm1d(4), nn.Linear(4, 1))
        super().__init__(net, numbers(n), bs)
        self.options = options

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, self.bs, **self.options)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)])
def test_b03_remainder_of_one_is_avoided(norm: nn.Module) -> None:
    ap, sees, _ = fit(Normed(65, 5, norm), sizes_of(0, 16), max_epochs=2)
    assert sees.sizes == [[5] * 13, [15] * 4 + [5]]
    assert [(d.requested, d.applied, d.outcome) for d in sizes(ap)] == [(16, 15, "limited")]
    assert "batch normalisation" in sizes(ap)[0].reason
    assert sees.rows[1] == list(range(65))


def test_b03_users_drop_last_is_respected() -> None:
    _, sees, _ = fit(Normed(65, 5, drop_last=True), sizes_of(0, 16), max_epochs=2)
    assert sees.sizes[1] == [16] * 4


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.Identity(), nn.BatchNorm1d(4).eval()])
def test_b03_models_without_statistics_of_the_batch_take_any_size(norm: nn.Module) -> None:
    class StaysInEval(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
            if isinstance(norm, nn.BatchNorm1d):
                norm.eval()

    with pytest.warns(UserWarning, match="eval mode") if isinstance(norm, nn.BatchNorm1d) else nullcontext():
        ap, sees, _ = fit(Normed(65, 5, norm), sizes_of(0, 16), max_epochs=2, others=(StaysInEval(),))
    assert sees.sizes[1] == [16] * 4 + [1]
    assert sizes(ap)[0].outcome == "applied"


def test_b03_one_row_that_is_never_reached_does_no_harm() -> None:
    _, sees, _ = fit(Normed(65, 5), sizes_of(0, 16), max_epochs=2, limit_train_batches=3)
    assert sees.sizes == [[5] * 3, [16] * 3]


def test_b03_batch_of_one_is_never_chosen() -> None:
    ap, sees, _ = fit(Normed(60, 4), sizes_of(0, 1), max_epochs=2)
    assert set(sees.sizes[1]) == {2}
    assert sizes(ap)[0].outcome == "limited"


# B-05: larger than the data


def test_b05_doubling_ends_at_the_size_of_the_data() -> None:
    ap = AutoPrecisionCallback(policy=Climber(), knobs=("batch_size",), interval=1, verbose=False)
    _, sees, _ = fit(Numbers(100, 25), ap, max_epochs=6)
    assert [epoch[0] for epoch in sees.sizes] == [25, 50, 100, 100, 100, 100]
    capped = sizes(ap, "applied", "limited")[2:]
    assert {(d.before, d.requested, d.applied, d.outcome) for d in capped} == {(100, 200, 100, "limited")}
    assert ap.batch_size == 100


@pytest.mark.parametrize(("config", "asked", "got"), [({"max_size": 24}, 32, 24), ({"min_size": 6}, 2, 6)])
def test_b05_bounds_of_the_user(config: dict[str, Any], asked: int, got: int) -> None:
    ap = scripted(epochs=sizes_of(0, asked, asked), config=AutoPrecisionConfig(batch=BatchConfig(**config)))
    _, sees, _ = fit(Numbers(), ap)
    assert [set(epoch) - {64 % got} for epoch in sees.sizes[1:]] == [{got}, {got}]
    assert [(d.before, d.applied, d.outcome) for d in sizes(ap)] == [(8, got, "limited"), (got, got, "limited")]
    assert "BatchConfig" in sizes(ap)[0].reason


def test_b05_larger_than_the_data_is_limited_and_then_changes_nothing() -> None:
    ap, sees, _ = fit(Numbers(), sizes_of(0, 1000, 1000))
    assert sees.sizes == [[8] * 8, [64], [64]]
    assert [(d.before, d.applied, d.outcome) for d in sizes(ap)] == [(8, 64, "limited"), (64, 64, "limited")]
    assert all("64 samples" in d.reason for d in sizes(ap))


def test_b05_samplers_count_what_they_draw() -> None:
    data = DataLoader(numbers(64), 8, sampler=RandomSampler(range(64), num_samples=20))
    _, sees, _ = fit(Numbers(), sizes_of(0, 1000), data, max_epochs=2)
    assert sees.sizes[1] == [20]


# the Trainer's own numbers


@pytest.mark.parametrize(("drop_last", "got"), [(False, 16), (True, 16)])
def test_b05_an_epoch_keeps_the_batches_that_validation_counts(drop_last: bool, got: int) -> None:
    module = Validated(drop_last=drop_last)
    ap, sees, _ = fit(module, sizes_of(0, 60), val_check_interval=4, max_epochs=2)
    assert sees.sizes[1][0] >= got
    assert len(sees.sizes[1]) == 4
    assert sizes(ap)[0].outcome == "limited"
    assert "4 batches or more" in sizes(ap)[0].reason
    assert sees.validations == [4, 8, 12]


def test_b01_validation_schedules_and_lengths_follow() -> None:
    rates: list[float] = []

    class Scheduled(Validated):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def on_train_epoch_start(self) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]

    bar = TotalsBar()
    _, sees, _ = fit(Scheduled(), sizes_of(0, 16, 4), others=(bar,), enable_progress_bar=True)
    assert sees.validations == [8, 12, 28]
    assert rates == [1.0, 0.5, 0.25]
    assert bar.totals == [8, 4, 16]


class TotalsBar(TQDMProgressBar):
    """Notes how many batches it expects."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: list[Any] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        self.totals.append(self.train_progress_bar.total)
        super().on_train_epoch_end(trainer, pl_module)


def test_b01_validation_in_parts_of_an_epoch() -> None:
    _, sees, _ = fit(Validated(), sizes_of(0, 16), val_check_interval=0.5)
    assert sees.validations == [4, 8, 10, 12, 14, 16]


@pytest.mark.parametrize(("limit", "lengths"), [(3, [3, 3]), (0.5, [4, 2]), (1.0, [8, 4])])
def test_b01_limited_epochs(limit: float, lengths: list[int]) -> None:
    _, sees, _ = fit(Numbers(), sizes_of(0, 16), limit_train_batches=limit, max_epochs=2)
    assert [len(epoch) for epoch in sees.sizes] == lengths


def test_b05_share_of_an_epoch_is_never_empty() -> None:
    ap, sees, _ = fit(Numbers(), sizes_of(0, 64), limit_train_batches=0.25, max_epochs=2)
    assert len(sees.sizes[1]) == 1
    assert sizes(ap)[0].outcome == "limited"


@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled:UserWarning")
@pytest.mark.parametrize("shuffle", [False, True])
def test_b01_overfitting(shuffle: bool) -> None:
    ap, sees, _ = fit(Numbers(shuffle=shuffle), sizes_of(0, 16), overfit_batches=2)
    assert sees.sizes == [[8] * 2, [16] * 2, [16] * 2]
    assert sees.rows[1] == sees.rows[2] == list(range(32))
    assert [d.outcome for d in sizes(ap)] == ["applied"]


def test_b01_checkpoints_by_steps_and_epochs(tmp_path: Any) -> None:
    steps = ModelCheckpoint(tmp_path / "steps", "{step}", save_top_k=-1, every_n_train_steps=6)
    epochs = ModelCheckpoint(tmp_path / "epochs", "{epoch}-{step}", save_top_k=-1, every_n_epochs=1)
    fit(Numbers(), sizes_of(0, 16), others=(steps, epochs), enable_checkpointing=True)
    assert sorted(path.stem for path in (tmp_path / "steps").iterdir()) == ["step=12", "step=6"]
    assert sorted(path.stem for path in (tmp_path / "epochs").iterdir()) == [
        "epoch=0-step=8",
        "epoch=1-step=12",
        "epoch=2-step=16",
    ]


def test_b01_one_device_with_and_without_a_distributed_sampler() -> None:
    for use in (True, False):
        _, sees, _ = fit(Numbers(shuffle=True), sizes_of(0, 16), max_epochs=2, use_distributed_sampler=use)
        assert sees.sizes[1] == [16] * 4


def test_b01_under_manual_optimization() -> None:
    class Own(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(1e-6 * squares(self.net, batch, batch_idx))  # nothing clips here
            optimizer.step()

    ap, sees, _ = fit(Own(), sizes_of(0, 16))
    assert sees.sizes == [[8] * 8, [16] * 4, [16] * 4]
    assert sizes(ap)[0].reason == "epoch 1"


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
def test_b01_a_step_that_draws_batches_itself() -> None:
    seen: list[int] = []

    class Draws(Numbers):
        def training_step(self, dataloader_iter: Iterator[Any]) -> Any:  # type: ignore[override]
            batch, index, _ = next(dataloader_iter)
            seen.append(len(batch))
            return squares(self.net, batch, index)

    ap = scripted(epochs=sizes_of(0, 16))
    cpu(max_epochs=2, callbacks=[ap]).fit(Draws())
    assert seen == [8] * 8 + [16] * 4


# B-08: custom batch samplers


class Pairs(BatchSampler):
    """Makes batches its own way."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(numbers(12), batch_sampler=[[0, 1], [2, 3, 4], [5, 6]]), "`list`"),
        (lambda: DataLoader(numbers(12), batch_sampler=Pairs(SequentialSampler(range(12)), 4, False)), "`Pairs`"),
        (lambda: DataLoader(Stored(), batch_size=None), "`batch_size=None`"),
        (lambda: Plain(), "`Plain`"),
    ],
)
def test_b08_loaders_of_other_kinds_turn_the_knob_off(make: Any, reason: str) -> None:
    data = make()
    sampler = getattr(data, "batch_sampler", None)
    before = dict(vars(sampler)) if isinstance(sampler, BatchSampler) else None
    script = ScriptedController(steps={1: Action(precision={"*": "bf16"}, clip=0.5)}, epochs=sizes_of(8, 8, 8))
    ap = AutoPrecisionCallback(policy=script)
    _, sees, trainer = fit(Numbers(), ap, data, max_epochs=2)
    assert sees.sizes[0] == sees.sizes[1]
    assert [d.outcome for d in sizes(ap)] == ["refused", "refused"]
    assert all(reason in d.reason for d in sizes(ap)), sizes(ap)
    assert rows(ap.history, "clip", "applied")
    assert set(ap.precision_map().values()) == {"bf16"}
    assert trainer.train_dataloader is data
    assert before is None or vars(sampler) == before


class Stored(Dataset[Any]):
    """A data set of batches."""

    def __getitem__(self, index: int) -> Any:
        return numbers(4)

    def __len__(self) -> int:
        return 2


class Plain:
    """Batches that are there already."""

    def __iter__(self) -> Iterator[Any]:
        return iter([numbers(4), numbers(4)])

    def __len__(self) -> int:
        return 2


def test_b08_policy_gets_the_knob_masked() -> None:
    policy = Climber()
    ap = AutoPrecisionCallback(policy=policy, knobs=("batch_size",), interval=1, verbose=False)
    fit(Numbers(), ap, DataLoader(numbers(12), batch_sampler=[[0, 1], [2, 3, 4], [5, 6]]))
    for observation in policy.observations:
        row = observation[feature(observation, "knob_batch_size") == 1]
        assert feature(row, "can_raise") == 0
        assert feature(row, "can_lower") == 0
    assert policy.observations
    assert sizes(ap) == []


# B-09: iterable, combined and several loaders


class Stream(IterableDataset[Any]):
    """Rows whose number nobody knows, handed out once each."""

    def __init__(self, n: int = 100) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        yield from numbers(self.n)


class SizedStream(Stream):
    """The same with a length."""

    def __len__(self) -> int:
        return self.n


def test_b09_stream_of_unknown_length() -> None:
    policy = Climber()
    ap = AutoPrecisionCallback(policy=policy, knobs=("batch_size",), interval=1, verbose=False)
    _, sees, _ = fit(Validated(), ap, DataLoader(Stream(), 10), max_epochs=3)
    assert [set(epoch) - {100 % epoch[0]} for epoch in sees.sizes] == [{10}, {20}, {40}]
    assert all(sorted(epoch) == list(range(100)) for epoch in sees.rows)
    assert all(bool(torch.isfinite(torch.as_tensor(each)).all()) for each in policy.observations)


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
def test_b09_stream_of_known_length() -> None:
    data = DataLoader(SizedStream(), 10)
    ap, sees, _ = fit(Numbers(), sizes_of(0, 30), data)
    assert sees.sizes == [[10] * 10, [30] * 3 + [10], [30] * 3 + [10]]
    assert sees.batches == [10, 4, 4]
    assert len(data) == 10
    assert sizes(ap)[0].outcome == "applied"


def test_b09_stream_that_goes_on_loses_nothing() -> None:
    """An iterator that lives on between epochs is not asked for a batch more than without a change."""
    endless = iter(range(10**6))

    class Live(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.full((4,), float(next(endless))) for _ in range(16))

    _, sees, _ = fit(Numbers(), sizes_of(0, 8), DataLoader(Live(), 4))
    seen = [row for epoch in sees.rows for row in epoch]
    assert seen == list(range(len(seen)))
    assert [set(epoch) for epoch in sees.sizes] == [{4}, {8}, {8}]


def test_b09_unknown_last_batch_and_batch_statistics() -> None:
    ap, sees, _ = fit(Normed(0, 0), sizes_of(0, 20), DataLoader(Stream(), 10), max_epochs=2)
    assert sees.sizes[1] == [10] * 10
    assert "not known" in sizes(ap, "refused")[0].reason
    ap, sees, _ = fit(Normed(0, 0), sizes_of(0, 33), DataLoader(Stream(), 10, drop_last=True), max_epochs=2)
    assert sees.sizes[1] == [33] * 3


def pair(mode: Any = "max_size_cycle", a: int = 8, b: int = 4) -> CombinedLoader:
    return CombinedLoader({"a": DataLoader(numbers(64), a), "b": DataLoader(numbers(32), b)}, mode)


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_b09_loaders_keep_their_ratio(mode: Any) -> None:
    seen: list[tuple[int, int]] = []

    class Looks(Numbers):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((len(batch["a"]), len(batch["b"])))
            return super().training_step(batch, batch_idx)

    ap, sees, _ = fit(Looks(), sizes_of(0, 16), pair(mode), max_epochs=2)
    assert seen == [(8, 4)] * 8 + [(16, 8)] * 4
    assert sees.batches == [8, 4]


def test_b09_ratio_that_would_not_be_whole_is_limited() -> None:
    ap, sees, _ = fit(Numbers(), sizes_of(0, 15), pair(), max_epochs=2)
    assert sees.sizes[1][0] == 14
    assert sizes(ap)[0].outcome == "limited"
    assert "ratio" in sizes(ap)[0].reason


def test_b09_shorter_loader_bounds_both() -> None:
    ap, sees, _ = fit(Numbers(), sizes_of(0, 64), pair(a=8, b=8), max_epochs=2)
    assert sees.sizes[1] == [32, 32]
    assert "32 samples" in sizes(ap)[0].reason


def test_b09_one_loader_that_cannot_be_resized_turns_the_knob_off_for_all() -> None:
    data = {"a": DataLoader(numbers(64), 8), "b": DataLoader(numbers(32), batch_sampler=[[0, 1], [2]])}
    ap, sees, _ = fit(Numbers(), sizes_of(16, 16), data, max_epochs=2)
    assert sees.sizes == [[8] * 8] * 2
    assert {d.outcome for d in sizes(ap)} == {"refused"}
    assert "['b']" in sizes(ap)[0].reason
    assert "['a']: it could be" in sizes(ap)[0].reason
    assert data["a"].batch_size == 8


def test_b09_other_loaders_are_named_by_their_place() -> None:
    data = [DataLoader(numbers(64), 8), StatefulLoader(64)]
    ap, _, _ = fit(Numbers(), sizes_of(16), data, max_epochs=1)
    assert "[1]: it is a `StatefulLoader`" in sizes(ap)[0].reason
