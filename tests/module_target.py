"""A training of the user's own for ``autoprec train-policy --module``: tens of steps of a small regression."""

from __future__ import annotations

from typing import Any

from tests.small_fits import QUIET, Full, loader
from tests.training_envs import adam


def make() -> tuple[Any, Any, dict[str, Any]]:
    module = Full()
    module.make_optimizer = adam
    return module, (loader(shuffle=True), loader(32)), {**QUIET, "max_epochs": 4, "deterministic": True}


def nothing() -> None:
    """Returns what nobody can train."""
