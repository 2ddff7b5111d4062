"""The entry point that adds the callback to every Trainer, only when asked.

Time budget: 5 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from autoprec import AutoPrecisionCallback
from autoprec._factory import callbacks

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


def is_installed() -> bool:
    try:
        distribution("autoprec")
    except PackageNotFoundError:
        return False
    return True


needs_entry_point = pytest.mark.skipif(
    not is_installed(), reason="autoprec is not installed, so that Lightning finds no entry point; `pip install -e .`"
)


def ours(found: Sequence[Callback]) -> list[AutoPrecisionCallback]:
    return [callback for callback in found if isinstance(callback, AutoPrecisionCallback)]


def injected(trainer: Any) -> list[AutoPrecisionCallback]:
    return ours(trainer.callbacks)


@needs_entry_point
def test_entry_point_is_installed() -> None:
    values = [point.value for point in entry_points(group="lightning.pytorch.callbacks_factory")]
    assert values.count("autoprec._factory:callbacks") == 1


@pytest.fixture(params=["factory", pytest.param("trainer", marks=needs_entry_point)])
def added(request: pytest.FixtureRequest) -> Callable[[], list[AutoPrecisionCallback]]:
    """What the function adds, and where it is installed what a Trainer gets."""
    return {"factory": lambda: ours(callbacks()), "trainer": lambda: injected(Trainer(**QUIET))}[request.param]


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", "off"])
def test_inert_unless_asked(
    value: str | None, added: Callable[[], list[AutoPrecisionCallback]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AUTOPREC_AUTO", raising=False)
    if value is not None:
        monkeypatch.setenv("AUTOPREC_AUTO", value)
    assert added() == []


@pytest.mark.parametrize("value", ["1", "true", "Yes", "on"])
def test_adds_the_callback_when_asked(
    value: str, added: Callable[[], list[AutoPrecisionCallback]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPREC_AUTO", value)
    assert len(added()) == 1


def test_a_value_that_means_neither_is_named(
    added: Callable[[], list[AutoPrecisionCallback]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPREC_AUTO", "2")
    with pytest.warns(UserWarning, match="AUTOPREC_AUTO='2' is not understood"):
        assert added() == []


@needs_entry_point
def test_both_ways_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPREC_AUTO", "1")
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `AutoPrecisionCallback`"):
        Trainer(callbacks=[AutoPrecisionCallback()], **QUIET)
