"""Tasks to evaluate on, and the groups that results are given for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.architectures import ARCHITECTURES
from autoprec.envs.proxies import BANKS, Bank, Distribution, Task
from autoprec.envs.proxy_env import load_tasks
from autoprec.envs.twins import Twin

Array = NDArray[Any]

ONLY = "only-"
BANK_NAMES = (*BANKS, *(ONLY + name for name in ARCHITECTURES))
"""Banks to choose from. ``only-<architecture>`` has the test bank's seeds and that architecture alone, for a policy
that was trained without it."""
LEARNED = "wrong or hidden costs, costly probes, late"
"""The regimes in which there is something to learn that a table does not know."""
_MOST_DRAWN = 3
_LEAST_IN_GROUP = 8


def evaluation_tasks(
    bank: str,
    count: int,
    *,
    progress: Callable[[int, int], None] | None = None,
    distribution: Distribution | None = None,
) -> list[tuple[Task, Twin]]:
    """Returns the first tasks of a bank that count: those whose twin makes enough progress to be a unit of measure.

    Args:
        bank: One of ``BANK_NAMES``.
        count: How many. Fewer are returned if not even a third of the bank's tasks count.
        progress: Called with how many twins are known and how many will be.
        distribution: Instead of the bank's own.

    Raises:
        ValueError: If there is no such bank, or no task is asked for.
    """
    if bank not in BANK_NAMES or count < 1:
        raise ValueError(f"Passed the bank {bank!r} with {count} tasks. Banks are {sorted(BANK_NAMES)}, of 1 or more.")
    size, tasks = count + count // 4 + 4, list[tuple[Task, Twin]]()
    while size <= _MOST_DRAWN * count + 4:
        tasks = load_tasks(_bank(bank, size, distribution), progress=progress)
        if len(tasks) >= count:
            break
        size += max(count // 8, 4)
    return tasks[:count]


def _bank(name: str, size: int, distribution: Distribution | None) -> Bank:
    if not name.startswith(ONLY):
        return Bank(name, size, distribution)
    base = distribution or BANKS["test"][0]
    return Bank("test", size, base.only(name.removeprefix(ONLY)))


def groups(tasks: Sequence[Task]) -> dict[str, dict[str, Array]]:
    """Returns which tasks belong to which group: by kind of group and name, masks ``[tasks]``.

    Hardware that fewer than 8 tasks have goes under one name.

    Args:
        tasks: The tasks.
    """
    hardware = [task.profile for task in tasks]
    rare = {name for name in set(hardware) if hardware.count(name) < _LEAST_IN_GROUP}
    is_costly = [task.probe_cost > 0.0 for task in tasks]
    is_learned = [
        task.regime == "late" or task.table_kind != "exact" or costly
        for task, costly in zip(tasks, is_costly, strict=True)
    ]
    names: dict[str, list[str]] = {
        "learned regimes": [LEARNED if learned else "the rest" for learned in is_learned],
        "regime": [task.regime for task in tasks],
        "table of costs": [task.table_kind for task in tasks],
        "probes": ["cost time" if costly else "are free" for costly in is_costly],
        "hardware": ["others" if name in rare else name for name in hardware],
        "architecture": [task.architecture for task in tasks],
    }
    return {kind: {name: np.array(found) == name for name in sorted(set(found))} for kind, found in names.items()}


def twin_digest(tasks: Sequence[tuple[Task, Twin]]) -> str:
    """Returns text that changes with the tasks and with what their twins made.

    Args:
        tasks: Tasks with their twins.
    """
    return repr([(task.seed, *map(_rounded, twin)) for task, twin in tasks])


def _rounded(value: float) -> float:
    return round(value, 9) if math.isfinite(value) else value
