"""Measures implementations of scaled dot-product attention against each other, in the same way as layers.

What lives here: one case, its calls and their errors. What does not: the implementations, which are handed in as
functions of query, key and value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from autoprec.calibration.layer_runs import Measured, relative_error, whole_numbers
from autoprec.calibration.timing import Deadline, Lap, time_in_turns

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
_WIDER = {torch.float32: torch.float64}


class AttentionCase(NamedTuple):
    """One kind of call of attention, and the ways to compute it.

    Attributes:
        key: What tells it from others, the same in every process.
        shapes: Those of query, key and value.
        dtype: Theirs.
        runs: Implementations by name, ``"default"`` for torch's own among them. Masks and flags are theirs to know.
        saved_bytes: What each keeps for the backward.
    """

    key: str
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    runs: Mapping[str, Attention]
    saved_bytes: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """About how much memory it takes to compare the implementations, scores in float64 included."""
        (*outer, queries, _), (*_, keys, _), _ = self.shapes
        return 16 * (math.prod(outer) * queries * keys + 4 * sum(math.prod(shape) for shape in self.shapes))


def measure_attention(case: AttentionCase, device: torch.device, lap: Lap, deadline: Deadline) -> dict[str, Measured]:
    """Times the implementations of a case in turns, and measures their errors.

    Args:
        case: The case.
        device: Where.
        lap: The stopwatch.
        deadline: When to stop at the latest.

    Returns:
        What each implementation costs; empty if there was not the time.
    """
    inputs = _inputs(case, device)
    calls = {name: _in_turn(run, [x.to(case.dtype) for x in inputs]) for name, run in case.runs.items()}
    seconds = time_in_turns(calls, lap, deadline)
    if seconds is None:
        return {}
    rounded = [x.to(case.dtype).to(_WIDER.get(case.dtype, torch.float32)) for x in inputs]
    exact = _in_turn(case.runs["default"], rounded)()
    return {
        name: Measured(
            seconds[name] * 1e3, max(map(relative_error, call(), exact)), case.saved_bytes.get(name, 0), copy_bytes=0
        )
        for name, call in calls.items()
    }


def _inputs(case: AttentionCase, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device) for shape in case.shapes
    ]


def _in_turn(run: Attention, inputs: list[Tensor]) -> Callable[[], list[Tensor]]:
    """A call of one implementation, forward and backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    gradient: list[Tensor] = []

    def forward_and_backward() -> list[Tensor]:
        output = run(*leaves)
        if not gradient:
            gradient.append(whole_numbers(output))
        return [output, *torch.autograd.grad(output, leaves, gradient[0])]

    return forward_and_backward
