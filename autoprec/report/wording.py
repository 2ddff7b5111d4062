"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOTHING = "–"


def number(value: float | None, digits: int = 4) -> str:
    """Returns a number with so many significant digits.

    Args:
        value: The number, ``None`` where it is not known.
        digits: How many.
    """
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return "not finite" if math.isnan(value) else "off" if value > 0 else "-inf"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def seconds_text(seconds: float | None) -> str:
    """Returns a span of time.

    Args:
        seconds: Its seconds, ``None`` where they are not known.
    """
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"


def share(part: float, whole: float) -> str:
    """Returns a share in percent.

    Args:
        part: The part.
        whole: What it is a part of.
    """
    return NOTHING if not whole else f"{100 * part / whole:.3g}%"


def count(number_of: int, noun: str) -> str:
    """Returns a number of things.

    Args:
        number_of: How many.
        noun: One of them.
    """
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def listed(names: Sequence[str], limit: int = 6) -> str:
    """Returns names with commas between them, the first ones of many.

    Args:
        names: The names.
        limit: How many are named.
    """
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def interval(low: float | None, high: float | None, digits: int = 4) -> str:
    """Returns an interval, ``""`` where there is none.

    Args:
        low: Lower end.
        high: Upper end.
        digits: Significant digits.
    """
    if low is None or high is None or low == high:
        return ""
    return f"{number(low, digits)} to {number(high, digits)}"
