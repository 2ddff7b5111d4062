"""The checks in conftest.py see what they are meant to see.

Time budget: 1 s.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import changes, global_state

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("name", "change", "undo"),
    [
        (
            "default dtype",
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
        ),
        (
            "autocast cpu",
            lambda: torch.set_autocast_enabled("cpu", True),
            lambda: torch.set_autocast_enabled("cpu", False),
        ),
        ("gradients", lambda: torch.set_grad_enabled(False), lambda: torch.set_grad_enabled(True)),
        ("$AUTOPREC_X", lambda: os.environ.update(AUTOPREC_X="1"), lambda: os.environ.pop("AUTOPREC_X")),
    ],
)
def test_change_of_global_state_is_seen(name: str, change: Callable[[], None], undo: Callable[[], None]) -> None:
    before = global_state()
    change()
    found = changes(before, global_state())
    undo()
    assert [line.split(":")[0] for line in found] == [name]


def test_monkeypatch_is_undone_before_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_X", "1")
    assert os.environ["AUTOPREC_X"] == "1"


def test_working_directory_is_outside_the_checkout() -> None:
    assert ROOT not in [Path.cwd(), *Path.cwd().parents]


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1
