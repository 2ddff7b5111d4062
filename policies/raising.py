"""How often a unit that overflowed is raised, from a recording, against how often units are raised anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoprec.envs.proxies import MAX_LEVELS
from autoprec.policies.play import Recording

Array = NDArray[Any]


@dataclass(frozen=True)
class Raises:
    """Counts by level of units in windows, each of them with another window behind it.

    Units in fp32 are left out, since they cannot be raised. A unit counts as raised if one of the next two windows ran
    it in a wider format.

    Attributes:
        offenders: Units that overflowed first in their window.
        raised: Those of them that were raised.
        quiet: Units that did not overflow.
        quiet_raised: Those of them that were raised all the same.
    """

    offenders: tuple[int, ...]
    raised: tuple[int, ...]
    quiet: tuple[int, ...]
    quiet_raised: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Share of the offenders that were raised; NaN without any."""
        return sum(self.raised) / sum(self.offenders) if sum(self.offenders) else math.nan

    @property
    def base(self) -> float:
        """Share of the others that were raised, at the levels that offenders had; NaN where there is nothing to say."""
        pairs = [
            (weight, raised / quiet)
            for weight, raised, quiet in zip(self.offenders, self.quiet_raised, self.quiet, strict=True)
            if weight and quiet
        ]
        total = sum(weight for weight, _ in pairs)
        return sum(weight * share for weight, share in pairs) / total if total else math.nan

    @classmethod
    def total(cls, parts: Iterable[Raises]) -> Raises:
        """Returns the sum of several counts.

        Args:
            parts: Counts, of other seeds or tasks.
        """
        found = list(parts)
        columns = zip(*((p.offenders, p.raised, p.quiet, p.quiet_raised) for p in found), strict=True)
        sums = [tuple(map(sum, zip(*column, strict=True))) for column in columns]
        return cls(*sums) if found else cls(*([(0,) * MAX_LEVELS] * 4))


def count_raises(recording: Recording) -> Raises:
    """Counts what was raised.

    Args:
        recording: What a policy did.
    """
    level = recording.level
    if len(level) < 2:
        return Raises.total([])
    padded = np.concatenate([level, np.full((1, *level.shape[1:]), -1)])
    now, following, after = level[:-1], padded[1:-1], padded[2:]
    can_be_raised = (now > 0) & (following >= 0)
    is_raised = (following < now) | ((after >= 0) & (after < now))
    is_offender = np.arange(level.shape[2]) == recording.offender[:-1, :, None]
    groups = (can_be_raised & is_offender, can_be_raised & (recording.overflows[:-1] == 0))
    counts = [(_by_level(now[group]), _by_level(now[group & is_raised])) for group in groups]
    return Raises(*counts[0], *counts[1])


def _by_level(levels: Array) -> tuple[int, ...]:
    return tuple(int(count) for count in np.bincount(levels, minlength=MAX_LEVELS))
