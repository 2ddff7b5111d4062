"""What time a training takes: the clock's, or, in runs that must repeat or for a device that is not here, a cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

import torch

StepCost = Callable[[Mapping[str, str], int], float]
"""Returns the time of one training batch, in any unit, from the format of each unit by name and the batch size."""


def _relative_times() -> dict[str, float]:
    return {"fp32": 1.0, "tf32": 0.6, "bf16": 0.6, "fp16": 0.6, "fp8": 0.4, "int8": 0.4}


@dataclass(frozen=True, kw_only=True)
class FormatCost:
    """A batch takes a fixed time and, for each sample, the mean over the units of the relative times of their formats.

    Args:
        relative: Relative time of each format.
        fixed: Fixed time of a batch, in samples in fp32.

    Raises:
        ValueError: If a time is not above 0.
    """

    relative: Mapping[str, float] = field(default_factory=_relative_times)
    fixed: float = 8.0

    def __post_init__(self) -> None:
        """Validates the fields."""
        if not self.fixed >= 0 or not all(time > 0 for time in self.relative.values()):
            raise ValueError(f"Passed `{self}`. Relative times must be above 0, the fixed one at least 0.")

    def __call__(self, formats: Mapping[str, str], batch_size: int) -> float:
        """Returns the time of a batch, in samples in fp32.

        Args:
            formats: Format of each unit by name.
            batch_size: Samples in the batch.

        Raises:
            ValueError: If a format has no relative time.
        """
        unknown = set(formats.values()) - self.relative.keys()
        if unknown:
            raise ValueError(f"`FormatCost` has no relative time of {sorted(unknown)}. Pass it in `relative`.")
        times = [self.relative[name] for name in formats.values()]
        return self.fixed + max(batch_size, 1) * (sum(times) / len(times) if times else 1.0)


class Clock:
    """Adds up the time that training takes.

    Args:
        is_real: Whether time passes by itself while it runs; else it is charged.
    """

    def __init__(self, is_real: bool) -> None:
        self._is_real, self._spent, self._since, self._device = is_real, 0.0, math.nan, torch.device("cpu")

    @property
    def time(self) -> float:
        """Time so far."""
        return self._spent + (perf_counter() - self._since if self.is_running else 0.0)

    @property
    def is_running(self) -> bool:
        """Whether time passes."""
        return not math.isnan(self._since)

    def start(self, device: torch.device) -> None:
        """Lets time pass.

        Args:
            device: Where work may be under way.
        """
        self._device = device
        if self._is_real:
            self._since = perf_counter()

    def stop(self) -> None:
        """Stands still from here on, once the device has done what it was given."""
        if self.is_running:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._spent, self._since = self.time, math.nan

    def charge(self, time: float) -> None:
        """Adds time.

        Args:
            time: How much.

        Raises:
            ValueError: If it is negative or not finite.
        """
        if not 0.0 <= time < math.inf:
            raise ValueError(f"`cost` said that a batch takes {time!r}. It must return a finite time, 0 at least.")
        self._spent += float(time)
