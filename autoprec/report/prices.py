"""What a run costs, and what another way of training would have saved, with everything that is assumed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.report.wording import NOTHING, number

JOULES_PER_KWH = 3.6e6
_LONGEST_CURRENCY = 8


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What time and energy cost.

    Args:
        per_hour: Price of an hour of the machine; ``None`` if it is not known.
        energy: Price of a kilowatt-hour; ``None`` if it is not known or part of the other.
        currency: Of both.

    Raises:
        ValueError: If a price is negative or not finite, or the currency is no short word.
    """

    per_hour: float | None = None
    energy: float | None = None
    currency: str = "USD"

    def __post_init__(self) -> None:
        """Validates the fields."""
        for name, option, value in (
            ("per_hour", "--price-per-hour", self.per_hour),
            ("energy", "--energy-price", self.energy),
        ):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"Passed `Prices({name}={value!r})` (`{option}`). It must be a finite number, 0 or more."
                )
        if not 0 < len(self.currency.strip()) <= _LONGEST_CURRENCY:
            raise ValueError(
                f"Passed `Prices(currency={self.currency!r})`. It must be a short word such as USD, at most"
                f" {_LONGEST_CURRENCY} characters."
            )

    @property
    def is_known(self) -> bool:
        """Whether anything costs money."""
        return self.per_hour is not None or self.energy is not None

    def cost(self, seconds: float | None, joules: float | None = None) -> float | None:
        """Returns what a run costs, ``None`` where nothing is known.

        Args:
            seconds: How long it takes.
            joules: What it uses.
        """
        parts = []
        if self.per_hour is not None and seconds is not None and math.isfinite(seconds):
            parts.append(seconds / 3600.0 * self.per_hour)
        if self.energy is not None and joules is not None:
            parts.append(joules / JOULES_PER_KWH * self.energy)
        return sum(parts) if parts else None

    def text(self, amount: float | None) -> str:
        """Returns an amount of money.

        Args:
            amount: The amount, ``None`` where it is not known.
        """
        if amount is None:
            return NOTHING
        return f"{amount:,.2f} {self.currency}" if abs(amount) >= 10 else f"{number(amount, 3)} {self.currency}"

    def assumptions(self, energy_source: str | None) -> Iterator[str]:
        """Yields what amounts rest on.

        Args:
            energy_source: What counted joules, ``None`` where nothing did.
        """
        if self.per_hour is not None:
            yield (
                f"An hour of the machine costs {number(self.per_hour)} {self.currency}, as you have said, for the time"
                " that is shown; the machine is paid for while it trains only."
            )
        if self.energy is not None and energy_source is None:
            yield (
                f"A kilowatt-hour costs {number(self.energy)} {self.currency}, as you have said, but nothing counted"
                " the energy of these runs, so that no cost of energy is in any amount."
            )
        elif self.energy is not None:
            yield (
                f"A kilowatt-hour costs {number(self.energy)} {self.currency}, as you have said; joules are those of"
                f" {energy_source}, of the whole device, without cooling and the rest of the machine."
            )
        if not self.is_known:
            yield (
                "No price was given, so that time and energy are shown without amounts of money. Pass"
                " `--price-per-hour` and `--energy-price`."
            )
