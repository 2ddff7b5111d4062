"""Writes weights past autograd, in a module of its own, where only somebody who follows calls finds it."""

from __future__ import annotations

from typing import Any


def clamp(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def clamp_through_helper(module: Any) -> None:
    clamp(module)


class Clipper:
    """For ``module.apply(...)``."""

    def __call__(self, module: Any) -> None:
        if hasattr(module, "weight"):
            module.weight.data.clamp_(-0.2, 0.2)
