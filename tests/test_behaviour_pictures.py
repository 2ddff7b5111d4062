"""Pictures of behaviour: written, not empty, and what they annotate.

Time budget: 10 s.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.recordings import UNITS, recording, some_tasks

pytest.importorskip("matplotlib")
pytest.importorskip("stable_baselines3")
from matplotlib.figure import Figure
from matplotlib.image import imread

from autoprec.policies.behaviour_pictures import draw_episode, draw_overview, eventful_task, raises
from autoprec.policies.play import Recording

TASKS = some_tasks(4)
WINDOWS = 12


@pytest.fixture
def seen() -> Recording:
    """Unit 1 of task 2 overflows twice and is raised the first time."""
    level, offender = np.full((WINDOWS, 4, UNITS), 2), np.full((WINDOWS, 4), -1)
    overflows, skipped = np.zeros_like(level), np.zeros_like(offender)
    for window in (3, 8):
        offender[window, 2], overflows[window, 2, 1], skipped[window, 2] = 1, 2, 2
    level[4:, 2, 1] = 1
    return recording(
        TASKS, WINDOWS, level=level, formats=level.copy(), offender=offender, overflows=overflows, skipped=skipped
    )


def colours_in(path: Path) -> int:
    image = imread(path)
    assert image.shape[0] > 400
    assert image.shape[1] > 800
    return len(np.unique((image.reshape(-1, image.shape[2]) * 255).astype(np.uint8), axis=0))


def test_raises_are_found(seen: Recording) -> None:
    assert raises(seen, 2) == [(3, 1)]
    assert raises(seen, 0) == []
    assert eventful_task(seen) == 2


def test_an_episode_is_drawn(seen: Recording, tmp_path: Path) -> None:
    draw_episode(seen, 2, tmp_path / "episode.png", "a run")
    draw_episode(seen, 0, tmp_path / "quiet.png", "a run in which nothing happens")
    assert colours_in(tmp_path / "episode.png") > colours_in(tmp_path / "quiet.png") > 20


def test_an_overview_is_drawn(seen: Recording, tmp_path: Path) -> None:
    draw_overview(seen, tmp_path / "overview.png", "four tasks")
    assert colours_in(tmp_path / "overview.png") > 20


def test_lines_of_an_overview_can_be_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    tasks = [replace(TASKS[0], profile=f"device-{index}") for index in range(16)]
    draw_overview(recording(tasks, WINDOWS), tmp_path / "overview.png", "sixteen devices")
    lines = figures[0].axes[0].get_lines()
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(lines) == 16
    assert max(line.get_linewidth() for line in lines) <= 4.0  # wider ones hide the others
    assert "device-0 (1 task)" in {line.get_label() for line in lines}
