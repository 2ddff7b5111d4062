"""A loader's batch size, set in place and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from autoprec.loaders import LoaderSeam, SizedLoader, flattened, names_of, why_fixed


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8, 16, 30])
def test_held_loader_draws_what_a_new_one_would(drop_last: bool, size: int) -> None:
    def make(size: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(2)
        return DataLoader(range(30), size, shuffle=True, drop_last=drop_last, generator=generator)  # type: ignore[arg-type]

    held = make(8)
    sized = SizedLoader(held)
    sized.hold(size)
    twin = make(size)
    assert len(held) == len(twin)
    for _ in range(2):
        assert batches(held) == batches(twin)
    assert (held.batch_size, sized.size, sized.found_size) == (size, size, 8)


@pytest.mark.parametrize("drop_last", [False, True])
def test_size_acts_in_the_middle_of_an_epoch(drop_last: bool) -> None:
    loader: DataLoader[Any] = DataLoader(range(30), 4, drop_last=drop_last)  # type: ignore[arg-type]
    sized = SizedLoader(loader)
    sized.hold(8)
    seen = []
    for batch in loader:
        seen.append(len(batch))
        if len(seen) == 2:
            sized.hold(4)
    assert seen == [8, 8, 4, 4, 4] + ([] if drop_last else [2])
    assert sized.samples_of(3) == 20


def test_release_leaves_no_trace() -> None:
    loader: DataLoader[Any] = DataLoader(range(30), 4)  # type: ignore[arg-type]
    sampler, before = loader.batch_sampler, dict(vars(loader.batch_sampler))
    sized = SizedLoader(loader)
    sized.hold(4)
    assert not sized.is_held
    sized.hold(8)
    batches(loader)
    sized.release()
    sized.release()
    assert loader.batch_sampler is sampler
    assert (type(sampler), vars(sampler)) == (BatchSampler, before)
    assert loader.batch_size == 4
    with pytest.raises(ValueError, match="should not be set"):
        loader.batch_size = 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


class Sized(Stream):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda: DataLoader(range(10), 4), 10),  # type: ignore[arg-type]
        (lambda: DataLoader(range(10), 4, sampler=RandomSampler(range(10), num_samples=7)), 7),  # type: ignore[arg-type]
        (lambda: DataLoader(Stream(), 4), None),
        (lambda: DataLoader(Sized(), 4), 10),
        (lambda: DataLoader(Sized(), 4, num_workers=2), None),
        (lambda: DataLoader(range(10), 4, sampler=iter(range(10))), None),  # type: ignore[arg-type]
    ],
)
def test_rows_of_an_epoch(make: Any, rows: int | None) -> None:
    assert SizedLoader(make()).facts.rows == rows


def test_why_fixed() -> None:
    class Own(BatchSampler):
        pass

    assert why_fixed(DataLoader(range(4), 2)) is None  # type: ignore[arg-type]
    assert "not a `torch" in str(why_fixed([1]))
    assert "batch_size=None" in str(why_fixed(DataLoader([1], batch_size=None)))  # type: ignore[arg-type]
    own = Own(SequentialSampler(range(4)), 2, False)
    assert "Own`" in str(why_fixed(DataLoader(range(4), batch_sampler=own)))  # type: ignore[arg-type]


def test_names_follow_the_order_of_the_loaders() -> None:
    nested = {"b": 1, "a": [2, {"c": 3}], "d": (4,)}
    assert list(flattened(nested)) == [1, 2, 3, 4]
    assert list(names_of(nested)) == ["['b']", "['a'][0]", "['a'][1]['c']", "['d'][0]"]
    assert list(names_of(5)) == [""]


def test_seam_leaves_a_stand_in_that_came_later() -> None:
    class Strategy:
        def process_dataloader(self, loader: Any) -> Any:
            return loader

    strategy: Any = Strategy()
    seen: list[object] = []
    seam = LoaderSeam(strategy, seen.append)
    assert strategy.process_dataloader(3) == 3
    assert seen == [3]
    strategy.process_dataloader = later = lambda loader: loader
    seam.remove()
    assert strategy.process_dataloader is later
    del strategy.process_dataloader
    seam = LoaderSeam(strategy, seen.append)
    seam.remove()
    seam.remove()
    assert vars(strategy) == {}
