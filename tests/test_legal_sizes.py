"""Legal batch sizes, checked against trying them all."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from autoprec.legal_sizes import LoaderFacts, SizeLimits, nearest_legal, sizes_of, why_illegal


def facts(size: int = 8, rows: int | None = 64, drop_last: bool = False) -> LoaderFacts:
    return LoaderFacts(size=size, rows=rows, drop_last=drop_last)


@pytest.mark.parametrize(
    ("size", "drop_last", "limit", "batches"),
    [
        (8, False, 1.0, 9),
        (8, True, 1.0, 8),
        (8, False, 4, 4),
        (8, False, 20, 9),
        (8, False, 0.5, 4),
        (65, True, 1.0, 1),
    ],
)
def test_batches_are_those_that_lightning_counts(size: int, drop_last: bool, limit: float, batches: int) -> None:
    assert facts(rows=65, drop_last=drop_last).batches(size, limit) == batches


def test_unknown_length_has_as_many_batches_as_the_limit() -> None:
    assert facts(rows=None).batches(8, 5) == 5
    assert facts(rows=None).batches(8) == float("inf")


@pytest.mark.parametrize(
    ("requested", "loader", "limits", "size", "why"),
    [
        (16, facts(), {}, 16, ""),
        (100, facts(), {}, 64, "64 samples"),
        (100, facts(), {"maximum": 24}, 24, "max_size"),
        (2, facts(), {"minimum": 4}, 4, "min_size"),
        (16, facts(rows=65), {"needs_two_rows": True}, 15, "batch normalisation"),
        (16, facts(rows=65, drop_last=True), {"needs_two_rows": True}, 16, ""),
        (16, facts(rows=65), {"needs_two_rows": True, "batch_limit": 4}, 16, ""),
        (1, facts(rows=60), {"needs_two_rows": True}, 2, "batch normalisation"),
        (60, facts(), {"min_batches": 4}, 21, "4 batches or more"),
        (60, facts(drop_last=True), {"min_batches": 4}, 16, "4 batches or more"),
        (64, facts(), {"batch_limit": 0.25}, 21, "1 batches or more"),
        (32, facts(), {"failed": 32, "survived": 16}, 16, "did not fit into memory"),
        (24, facts(), {"failed": 32, "survived": 16}, 24, ""),
        (10**12, facts(rows=10**9), {"min_batches": 1000, "needs_two_rows": True}, 10**6 + 1001, "samples"),
    ],
)
def test_nearest_legal(requested: int, loader: LoaderFacts, limits: dict[str, Any], size: int, why: str) -> None:
    found, reason = nearest_legal(requested, [loader], SizeLimits(**limits))
    assert why in reason
    assert bool(why) == bool(reason)
    if requested < 10**6:
        assert found == size
    else:
        assert found is not None
        assert why_illegal(found, [loader], SizeLimits(**limits)) is None


def test_no_legal_size() -> None:
    assert nearest_legal(4, [facts(rows=8)], SizeLimits(minimum=9))[0] is None
    assert nearest_legal(4, [facts(rows=8)], SizeLimits(min_batches=9))[0] is None


def test_ratio_of_several_loaders() -> None:
    loaders = [facts(8, 64), facts(4, 32), facts(12, None)]
    assert sizes_of(16, loaders) == [16, 8, 24]
    assert sizes_of(10, loaders) == [10, 5, 15]
    assert sizes_of(9, loaders) is None
    assert nearest_legal(9, loaders, SizeLimits())[0] == 8
    assert nearest_legal(1000, loaders, SizeLimits())[0] == 64


def test_nearest_is_the_nearest_of_all() -> None:
    """Random data and limits; the smaller of two that are equally near."""
    draw = random.Random(7)
    limited = 0
    for _ in range(300):
        loaders = [
            facts(draw.choice((2, 3, 4, 6)), draw.choice((None, draw.randint(20, 90))), draw.random() < 0.3)
            for _ in range(draw.choice((1, 1, 2)))
        ]
        limits = SizeLimits(
            minimum=draw.choice((1, 1, 3)),
            maximum=draw.choice((None, 40)),
            min_batches=draw.choice((1, 1, 3)),
            batch_limit=draw.choice((1.0, 0.5, 5)),
            needs_two_rows=all(each.rows is not None for each in loaders) and draw.random() < 0.6,
        )
        requested = draw.randint(1, 120)
        legal = [size for size in range(1, 121) if why_illegal(size, loaders, limits) is None]
        expected = min(legal, key=lambda size: (abs(size - requested), size), default=None)
        found = nearest_legal(requested, loaders, limits)[0]
        assert found == expected, (requested, loaders, limits)
        limited += expected != requested
    assert limited > 50


def test_remainders_of_one_are_never_chosen() -> None:
    for rows, requested in itertools.product((33, 61, 65, 121), range(1, 40)):
        size, _ = nearest_legal(requested, [facts(rows=rows)], SizeLimits(needs_two_rows=True))
        assert size is not None
        assert rows % size != 1
        assert size > 1
