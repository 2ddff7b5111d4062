"""A row is set up several times, because where its tensors happen to lie shifts a ratio by several percent.

Within one set-up the rounds agree much better with each other than with those of another one: caches are indexed by
addresses. So after a few rounds all arms are made anew, in another order and at other addresses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.arms import Arm

ROUNDS = 3
"""Rounds that count, of one set-up."""

_SHIFT = 300_007
"""Floats that lie before the tensors of a set-up, times its number."""


def in_setups(
    measure: Callable[[Sequence[Arm], int], dict[str, Any]], arms: Sequence[Arm], rounds: int
) -> dict[str, Any]:
    """Measures a row in as many set-ups as its rounds take.

    Args:
        measure: Takes arms and rounds; its result holds lists of laps under ``laps`` and maybe ``grad_stats``.
        arms: What takes turns.
        rounds: Rounds that count, of all set-ups together.

    Returns:
        What the first set-up returned, with the laps of all of them.
    """
    found: dict[str, Any] = {}
    for index, first in enumerate(range(0, rounds, ROUNDS)):
        shift = torch.empty(index * _SHIFT)
        start = index % len(arms)
        part = measure([*arms[start:], *arms[:start]], min(ROUNDS, rounds - first))
        del shift
        gc.collect()  # trainers and modules refer to each other; the next set-up needs their memory
        if not found:
            found = part
            continue
        for kind in ("laps", "grad_stats"):
            for name, laps in part.get(kind, {}).items():
                found[kind][name].extend(laps)
    return found
