"""Globals of torch that are replaced for a while: several users, several threads.

Time budget: 15 s.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import Function

from autoprec import AutoPrecisionCallback
from autoprec.replaced import Replaced
from autoprec.trial import Trial
from tests.small_fits import Plain, loader, quiet


@pytest.fixture
def place() -> SimpleNamespace:
    return SimpleNamespace(value="found")


@pytest.fixture
def replaced(place: SimpleNamespace) -> Replaced:
    return Replaced(lambda: place.value, lambda value: setattr(place, "value", value), "ours")


def test_regions_may_overlap(place: SimpleNamespace, replaced: Replaced) -> None:
    replaced.enter()
    replaced.enter()
    replaced.leave()
    assert place.value == "ours"
    replaced.leave()
    assert place.value == "found"


def test_an_exception_ends_the_region(place: SimpleNamespace, replaced: Replaced) -> None:
    with pytest.raises(KeyError), replaced.region():
        raise KeyError
    assert place.value == "found"


def test_what_is_found_may_differ_from_time_to_time(place: SimpleNamespace, replaced: Replaced) -> None:
    with replaced.region():
        assert (place.value, replaced.original) == ("ours", "found")
    place.value = "another"
    with replaced.region():
        pass
    assert place.value == "another"


def test_what_somebody_else_sets_meanwhile_stays(place: SimpleNamespace, replaced: Replaced) -> None:
    with replaced.region():
        place.value = "users"
    assert place.value == "users"
    with replaced.region():
        assert (place.value, replaced.original) == ("ours", "users")
    assert place.value == "users"


class Picky(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("expected float32")
        return x.clone()


def test_a_trial_repairs_calls_of_its_own_thread_only() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)

    def elsewhere() -> str:
        with pytest.raises(RuntimeError, match="expected float32"):
            Picky.apply(x)  # type: ignore[no-untyped-call]
        return "raised"

    with Trial(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(elsewhere).result() == "raised"
        assert Picky.apply(x).dtype == torch.float32  # type: ignore[no-untyped-call]


def test_fits_in_two_threads_leave_torch_as_it_was() -> None:
    found = torch.amp.autocast, Function.__dict__["apply"], torch.backends.mha.get_fastpath_enabled()
    together = threading.Barrier(2)

    class Meets(Plain):
        """Both steps are under way at the same time; the one that began first ends first."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                together.wait(timeout=60)
            return super().training_step(batch, batch_idx)

    def fit(index: int) -> int:
        callback = AutoPrecisionCallback("fixed:bf16", verbose=False)
        quiet(max_epochs=1, callbacks=[callback]).fit(Meets(), loader())
        return callback.applied_steps

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fit, range(2))) == [8, 8]
    assert (torch.amp.autocast, Function.__dict__["apply"], torch.backends.mha.get_fastpath_enabled()) == found
