"""What holds for every test: one thread, fixed seeds, an empty working directory, and no trace in global state."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

# two busy cores: threads only wait for each other, and the time of one example says nothing
torch.set_num_threads(1)
settings.register_profile("autoprec", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("autoprec")

# pytest's own note, and where Lightning's `seed_everything` leaves its seed
FREE_VARIABLES = {"PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"}


@pytest.fixture(scope="session", autouse=True)
def _uncalibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets no run measure by itself, however slow this machine is, and none read what other processes measured.

    Policies are offered bf16 for the small layers of tests, which on a CPU are faster in fp32.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoprec.cost._SMALLEST_16_BIT", {})
        patch.setattr("autoprec.cost_watch.SHORTEST_RUN_S", math.inf)
        patch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def global_state() -> dict[str, object]:
    state: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": torch.is_grad_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        "threads": torch.get_num_threads(),
    }
    for device in ("cpu", "cuda"):
        state[f"autocast {device}"] = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    variables = {f"${name}": value for name, value in os.environ.items() if name not in FREE_VARIABLES}
    return {**state, **variables}


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names]


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Fails a test that leaves global flags or environment variables changed."""
    before = global_state()
    yield
    found = changes(before, global_state())
    assert not found, "the test changed " + "; ".join(found)


@pytest.fixture(autouse=True)
def _own_folder(_no_trace: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the files that Lightning writes out of the checkout, and measurements of other runs out of the test.

    Undone, as all of monkeypatch, before the check.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPREC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
