"""Listeners are told how a run goes, and cannot hurt it.

Time budget: 10 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from autoprec import Action, AutoPrecisionCallback, Decision, ScriptedController
from autoprec.progress_feed import ProgressFeed
from autoprec.progress_reading import ProgressListener, ProgressReading, RunInfo, RunTotals
from tests.small_fits import Plain, loader, quiet


class Notes:
    """Keeps what it is told."""

    name = "the notes"

    def __init__(self) -> None:
        self.told: list[Any] = []

    def started(self, info: RunInfo) -> None:
        self.told.append(info)

    def decided(self, decisions: Sequence[Decision]) -> None:
        self.told.append(list(decisions))

    def progressed(self, reading: ProgressReading) -> None:
        self.told.append(reading)

    def ended(self, totals: RunTotals) -> None:
        self.told.append(totals)

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.told if isinstance(each, kind)]


def fit(monkeypatch: pytest.MonkeyPatch, *listeners: ProgressListener, steps: int = 24) -> AutoPrecisionCallback:
    monkeypatch.setattr("autoprec.callback.listeners_for", lambda *_: list(listeners))
    script = ScriptedController(steps={2: Action(precision={"net.0": "bf16"}), 15: Action(clip=0.5)})
    callback = AutoPrecisionCallback(script, interval=5, verbose=False)
    quiet(max_steps=steps, max_epochs=-1, callbacks=[callback]).fit(Plain(), loader())
    return callback


def test_tells_everything_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    callback = fit(monkeypatch, notes)
    assert isinstance(notes.told[0], RunInfo)
    assert isinstance(notes.told[-1], RunTotals)
    assert [decision for each in notes.of(list) for decision in each] == list(callback.history)
    readings = notes.of(ProgressReading)
    assert [reading.window for reading in readings] == [6, 12, 18, 24][: len(readings)]
    assert len(readings) >= 3
    assert readings[0].changed == {"net.0": "bf16"}
    assert readings[1].changed == {}
    assert readings[-1].formats == {"net.0": "bf16", "net.2": "fp32"}
    assert readings[-1].clip_threshold == 0.5
    assert set(readings[-1].grad_norms) == {"net.0", "net.2"}
    assert notes.told[0].formats == {"net.0": "fp32", "net.2": "fp32"}
    assert notes.told[0].parameter_count == 8 * 16 + 16 + 16 * 2 + 2


@pytest.mark.parametrize("place", ["started", "decided", "progressed", "ended"])
def test_one_that_raises_is_off_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    broken, notes = Notes(), Notes()

    def fails(_: Any) -> None:
        broken.told.append(None)
        raise RuntimeError("no")

    setattr(broken, place, fails)
    with pytest.warns(UserWarning, match=r"the notes failed \(RuntimeError: no\)") as said:
        callback = fit(monkeypatch, broken, notes)
    assert len([each for each in said if "failed" in str(each.message)]) == 1
    assert broken.told[-1] is None
    assert isinstance(notes.told[-1], RunTotals)
    assert callback.applied_steps == 24


def test_a_run_that_cannot_be_read_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("no reading")

    monkeypatch.setattr(ProgressFeed, "_reading", fails)
    notes = Notes()
    with pytest.warns(UserWarning, match=r"could not be read \(ZeroDivisionError: no reading\)"):
        callback = fit(monkeypatch, notes)
    assert callback.applied_steps == 24
    assert not notes.of(ProgressReading)


def test_nothing_is_read_without_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("autoprec.progress_feed._run_info", fails)
    for name in ("_reading", "_totals", "_tell"):
        monkeypatch.setattr(ProgressFeed, name, fails)
    assert fit(monkeypatch).applied_steps == 24  # a fault would be a warning, which is an error here
