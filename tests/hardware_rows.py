"""Hardware files of a user, and devices that are not there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autoprec.hardware import Device, describe, probing, reload
from autoprec.hardware.database import DIRECTORY_VARIABLE
from autoprec.hardware.probing import Facts

DOCUMENTATION = Path(__file__).resolve().parents[1] / "docs" / "hardware.md"
GPU = torch.device("cuda", 0)
Pretend = Callable[..., Device]

SOURCE = """
schema = 1

[sources.mine]
title = "Measured here"
"""
ROW = """
[[device]]
name = "Test Card 1"
family = "ada"
match = ["*test card 1"]
memory_gb_per_s = 500
source = "mine"
formats.fp32 = { tflops = 40 }
formats.bf16 = { tflops = 100 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only folder with files of a user's, empty; what was read from others is forgotten before and after."""
    own = tmp_path / "hardware"
    own.mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(own))
    monkeypatch.setattr("platformdirs.user_config_dir", lambda *names, **options: str(tmp_path / "nowhere"))
    reload()
    yield own
    reload()


@pytest.fixture
def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Describes a device that answers as told."""

    def described(**facts: Any) -> Device:
        monkeypatch.setattr(probing, "probe", lambda device: Facts(**facts))
        reload()
        return describe(GPU)

    return described


def example() -> str:
    """The complete file in the documentation."""
    (block,) = re.findall(r"^```toml\n(.*?)^```", DOCUMENTATION.read_text(), re.MULTILINE | re.DOTALL)
    return str(block)
