"""Checks of single settings, with messages that say what was passed and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autoprec.formats import nearest


def check_type(config: object, name: str, expected: type | tuple[type, ...]) -> None:
    """Refuses a value of another type."""
    value = getattr(config, name)
    kinds = expected if isinstance(expected, tuple) else (expected,)
    # bool is an int to Python, but `growth_interval=True` is a slip
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return
    raise TypeError(
        f"Passed `{type(config).__qualname__}({name}={value!r})` with type `{type(value).__qualname__}`."
        f" `{name}` must be of type {' or '.join(f'`{kind.__qualname__}`' for kind in kinds)}."
    )


def check_real(config: object, name: str, is_legal: Callable[[float], bool], allowed: str) -> None:
    """Refuses what is not a number in a range."""
    make_plain(config, name)
    check_type(config, name, (float, int))
    check_range(config, name, is_legal, allowed)


def make_plain(config: object, name: str) -> None:
    """Turns a number of numpy's into one of Python's, which a checkpoint may hold."""
    value = getattr(config, name)
    if isinstance(value, np.generic):
        object.__setattr__(config, name, value.item())


def check_int(config: object, name: str, *, minimum: int) -> None:
    """Refuses what is not a whole number from a minimum on."""
    make_plain(config, name)
    check_type(config, name, int)
    check_range(config, name, lambda value: value >= minimum, f"an int >= {minimum}")


def check_range(config: object, name: str, is_legal: Callable[[Any], bool], allowed: str) -> None:
    """Refuses a value outside of a range."""
    value = getattr(config, name)
    if not is_legal(value):
        raise ValueError(f"Passed `{type(config).__qualname__}({name}={value!r})`. `{name}` must be {allowed}.")


def check_name(config: object, name: str, allowed: tuple[str, ...]) -> None:
    """Refuses a name that is not known; the message holds the nearest one."""
    value = getattr(config, name)
    if value in allowed:
        return
    *others, last = map(repr, allowed)
    raise ValueError(
        f"Passed `{type(config).__qualname__}({name}={value!r})`. `{name}` must be {', '.join(others)} or {last}."
        f"{nearest(value, allowed)}"
    )
