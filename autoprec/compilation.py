"""Notices that a model uses torch.compile, which gives up on a function after some versions of it."""

from __future__ import annotations

import sys

import torch
from torch import nn


class CompilationWatch:
    """Knows whether something that runs layers is compiled, and how many maps that leaves.

    Args:
        root: The model.

    Attributes:
        is_compiled: Whether compilation was seen.
        map_limit: How many different maps the compiler has room for, ``None`` for any number.
    """

    def __init__(self, root: nn.Module) -> None:
        self.is_compiled = False
        self.map_limit: int | None = None
        self._frames = _compiled_frames()
        if _has_compiled_parts(root):
            self._note(versions_used=0)

    def look(self) -> None:
        """Looks again: a function that runs layers may be compiled, or a layer since."""
        if not self.is_compiled and _compiled_frames() > self._frames:
            self._note(versions_used=2)  # the trial and the map before it

    def _note(self, versions_used: int) -> None:
        self.is_compiled = True
        # two are left for other causes of recompilation: batch shapes, gradient mode
        self.map_limit = max(int(torch._dynamo.config.recompile_limit) - 2 - versions_used, 1)


def _compiled_frames() -> int:
    """Frames and graphs that torch.compile has made in this process; does not import the compiler."""
    if "torch._dynamo" not in sys.modules:
        return 0
    counters = torch._dynamo.utils.counters
    return int(counters["frames"]["total"]) + int(counters["stats"]["unique_graphs"])


def _has_compiled_parts(root: nn.Module) -> bool:
    if getattr(root, "_compiler_ctx", None) is not None:  # Lightning has unwrapped torch.compile(module)
        return True
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in root.modules())
