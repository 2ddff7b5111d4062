"""The entry point that adds the callback to every Trainer, only when asked.

Time budget: 5 s.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
from lightning.pytorch import Trainer

from autoprec import AutoPrecisionCallback

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


def injected(trainer: Any) -> list[AutoPrecisionCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, AutoPrecisionCallback)]


def test_entry_point_is_installed() -> None:
    values = [point.value for point in entry_points(group="lightning.pytorch.callbacks_factory")]
    assert values.count("autoprec._factory:callbacks") == 1


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_inert_unless_asked(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPREC_AUTO", raising=False)
    if value is not None:
        monkeypatch.setenv("AUTOPREC_AUTO", value)
    assert injected(Trainer(**QUIET)) == []


def test_adds_the_callback_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_AUTO", "1")
    assert len(injected(Trainer(**QUIET))) == 1


def test_both_ways_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_AUTO", "1")
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `AutoPrecisionCallback`"):
        Trainer(callbacks=[AutoPrecisionCallback()], **QUIET)
