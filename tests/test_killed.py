"""Runs that are killed at any time go on from Lightning's checkpoints as if nothing had happened.

Time budget: 25 s (four processes; with the slow one 60 s).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.killed_run import EVERY
from tests.small_fits import differences

SCRIPT = str(Path(__file__).parent / "killed_run.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
DEATHS = [("backward", 7), ("save", 16), ("step", 25), ("validation", 30), ("batch start", 41)]


def start(folder: Path, deaths: list[tuple[str, int]], *launcher: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for death in deaths for word in death]
    command = [sys.executable, *launcher, SCRIPT, str(folder), *words]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)


def end_of(folder: Path) -> Any:
    return torch.load(folder / "end.pt", weights_only=True)


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("through")
    done = start(folder, [])
    assert done.returncode == 0, done.stderr
    return end_of(folder)


@pytest.mark.slow
def test_killed_again_and_again(through: Any, tmp_path: Path) -> None:
    for attempt in range(len(DEATHS)):
        died = start(tmp_path, DEATHS)
        assert died.returncode == -signal.SIGKILL, (attempt, died.stderr)
    assert start(tmp_path, DEATHS).returncode == 0
    assert not differences(end_of(tmp_path), through)


def test_torchrun_starts_it_again(through: Any, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=2")
    deaths = [("step", EVERY + 1), ("save", 24)]
    done = start(tmp_path, deaths, *launcher)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "starts").read_text() == "3"
    assert not differences(end_of(tmp_path), through)
